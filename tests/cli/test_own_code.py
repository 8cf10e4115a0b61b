"""A problem and a method of the user's own, named by the place of their class."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from fedminimax import FederatedClassifier, cli
from fedminimax.config import CHOICES, code_allowed, part_of
from fedminimax.engine.state.checkpoint import read

MODULE = '''
from dataclasses import dataclass

import fedminimax as fm
from fedminimax.extend import gradients
from fedminimax.problems.cross_entropy import CrossEntropy


class Halved(CrossEntropy):
    """Half of cross-entropy."""

    def outer(self, value, y, batch):
        return super().outer(value, y, batch) / 2


@dataclass(frozen=True)
class Descent(fm.Algorithm):
    """Local gradient descent."""

    lr: float = 0.5
    local_steps: int = 2

    def local_step(self, problem, down, client, batch, clock):
        return client._replace(x=client.x - self.lr * gradients(problem, client, batch).x)
'''
OWN = """
[data]
name = "heart"
[model]
name = "linear"
[problem]
name = "my_own_code:Halved"
[method]
name = "my_own_code:Descent"
lr = 0.6
[run]
rounds = 4
evaluate_every = 2
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_code.py").write_text(MODULE)
    (tmp_path / "own.toml").write_text(OWN)
    yield tmp_path
    sys.modules.pop("my_own_code", None)


def test_a_run_of_own_code_is_trained_and_reported(here, capsys):
    assert cli.main(["run", "own.toml", "--allow-code", "--quiet", "--folder", "run"]) == 0
    assert 'name = "my_own_code:Descent"' in (here / "run/config.toml").read_text()
    assert cli.main(["run", "own.toml", "--quiet", "--folder", "refused"]) == 2
    assert "which is code of your own: add --allow-code" in capsys.readouterr().err
    assert cli.main(["report", "run", "--allow-code", "-o", "page.html"]) == 0
    assert "Descent" in (here / "page.html").read_text()
    # Half of the loss at twice the rate.
    built_in = ["problem.name=cross_entropy", "method.name=fedavg", "lr=0.3", "local_steps=2"]
    assert cli.main(["run", "own.toml", *built_in, "--quiet", "--folder", "whole"]) == 0
    half, whole = (read(here / name / "final.safetensors")[0]["x"] for name in ("run", "whole"))
    torch.testing.assert_close(half, whole)
    assert not any(":" in name for known in CHOICES.values() for name in known)


def test_own_code_is_imported_only_where_it_is_allowed(here):
    with pytest.raises(ValueError, match="add --allow-code"):
        part_of("problem", {"name": "my_own_code:Halved"})
    assert "my_own_code" not in sys.modules
    sys.path.insert(0, str(here))
    try:
        with code_allowed():
            for name, sentence in (
                ("my_own_code:Descent", "which is no Problem"),
                ("my_own_code:Absent", "cannot be imported"),
                ("no_such_module:Halved", "cannot be imported"),
                (":Halved", "write .package.module:Class"),
            ):
                with pytest.raises(ValueError, match=sentence):
                    part_of("problem", {"name": name})
            random = np.random.default_rng(0)
            rows, sites = random.standard_normal((90, 2)), np.repeat(list("abc"), 30)
            y = (rows[:, 0] > 0).astype(int)
            options = {"method": "my_own_code:Descent", "module": "linear", "rounds": 5}
            model = FederatedClassifier("my_own_code:Halved", **options).fit(rows, y, sites=sites)
        assert model.score(rows, y) > 0.8
    finally:
        sys.path.remove(str(here))
