"""A flipped bit in any file of a run ends in a sentence, or in the run's own result."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from deployment import EXPERIMENTS, SITES, data_of, deployed, in_process, site_file

from fedminimax import FederatedClassifier
from fedminimax.config import Experiment
from fedminimax.engine.backends.base import RunEndedError
from fedminimax.engine.state.folder import RunFolder
from fedminimax.engine.trainer import Interrupted
from fedminimax.experiment import load, resume, run_experiment
from fedminimax.remote.in_process import InProcess
from fedminimax.remote.server import run_sites
from fedminimax.remote.site import Site

QUADRATIC = {"name": "quadratic", "clients": 3, "dimension": 2, "noise": 0.5, "rows": 4}


def asked(store):
    run = {"rounds": 5, "evaluate_every": 1, "checkpoint_every": 1, "store": store, "batch_size": 2}
    method = {"name": "codasca", "local_steps": 1}
    table = {"data": QUADRATIC, "problem": {"name": "quadratic"}, "method": method}
    return Experiment.from_table({**table, "run": {**run, "executor": "debug"}})


def end_of(folder):
    """What a run has come to, but not how long it took."""
    history = RunFolder(folder).read_history()
    for record in history:
        del record["seconds"]
    return (folder / "final.safetensors").read_bytes(), json.dumps(history)


def flipped(folder, number, rng):
    """One bit of one file, each file in turn."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
    path = files[number % len(files)]
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)
    return path


def check_flips(begun, count, go_on, expected, tmp_path):
    """Whatever bit is flipped in a folder, going on ends as expected, or in a sentence."""
    rng, told = np.random.default_rng(0), 0
    for number in range(count):
        folder = tmp_path / "flipped"
        shutil.copytree(begun, folder)
        path = flipped(folder, number, rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert go_on(folder) == expected, path
        except (ValueError, OSError, RunEndedError):
            told += 1
        shutil.rmtree(folder)
    assert told > count / 4


@pytest.fixture(params=["memory", "disk"])
def begun(request, tmp_path):
    """A run that was interrupted, and what the whole one comes to."""
    run_experiment(asked(request.param), tmp_path / "whole")
    done = []
    with pytest.raises(Interrupted):
        run_experiment(
            asked(request.param),
            tmp_path / "begun",
            on_round=done.append,
            interrupted=lambda: len(done) == 3,
        )
    return tmp_path / "begun", end_of(tmp_path / "whole")


def gone_on(folder):
    resume(folder)
    return end_of(folder)


def test_a_flipped_bit_in_a_run_is_never_gone_on_with(begun, tmp_path):
    check_flips(begun[0], 24, gone_on, begun[1], tmp_path)


@pytest.mark.full
def test_hundreds_of_flipped_bits_in_runs(begun, tmp_path):
    check_flips(begun[0], 240, gone_on, begun[1], tmp_path)


def test_a_flipped_bit_in_a_finished_run_or_a_model_is_told(tmp_path):
    run_experiment(asked("memory"), tmp_path / "run")

    def read(folder):
        run = load(folder)
        return run.point.x.tolist(), run.outcome, json.dumps(run.history)

    check_flips(tmp_path / "run", 24, read, read(tmp_path / "run"), tmp_path)
    X = np.random.default_rng(0).normal(size=(40, 2))
    y = (X[:, 0] > 0).astype(int)
    model = FederatedClassifier("auc", rounds=1, batch_size=8).fit(X, y, sites=np.arange(40) % 2)
    model.save(tmp_path / "model")

    def scored(folder):
        return FederatedClassifier.load(folder).decision_function(X).tolist()

    check_flips(tmp_path / "model", 16, scored, scored(tmp_path / "model"), tmp_path)


@pytest.mark.parametrize("count", [16, pytest.param(240, marks=pytest.mark.full)])
def test_a_flipped_bit_at_a_site_or_its_server_is_never_gone_on_with(tmp_path, count):
    which, done = EXPERIMENTS["controls"], []
    whole = deployed(which, in_process(which, tmp_path / "whole"), tmp_path / "whole").point
    begun = tmp_path / "begun"

    def gone_on(folder, **callbacks):
        run = _deployed(which, folder, **callbacks)
        if run.outcome != "finished":
            raise ValueError(run.outcome)
        return run.point.x.tolist()

    with pytest.raises(Interrupted):
        gone_on(begun, on_round=done.append, interrupted=lambda: len(done) == 3)
    check_flips(begun, count, gone_on, whole.x.tolist(), tmp_path)


def _deployed(which, home: Path, **callbacks):
    files = [site_file(name, home, data_of(which)) for name in SITES]
    transport = InProcess({f.name: Site(f, log=lambda text: None).handle for f in files})
    return run_sites(which, transport, SITES, home / "run", log=lambda text: None, **callbacks)
