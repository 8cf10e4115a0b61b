"""Every Python block of the documents runs, and the template is a method."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import fedminimax as fm
from fedminimax.data.synthetic import QuadraticData

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "__main__"}
    exec(compile(block, "document", "exec"), scope)
    if "search" in scope:
        assert scope["best"].outcome_ == "finished"
        assert scope["search"].score(scope["X_test"], scope["y_test"]) > 0.85
        again = fm.FederatedClassifier.load("runs/heart-model")
        assert again.operating_point_["sensitivity"] >= 0.9
    else:
        assert scope["run"].outcome == "finished"


def test_newcomers_objective_is_at_most_ten_lines():
    page = (ROOT / "docs" / "adding_a_problem.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    lines = [s for s in block.splitlines() if s.strip() and not s.startswith(("#", "import"))]
    assert len(lines) <= 10


def test_a_copy_of_the_template_is_a_method_that_converges(tmp_path, monkeypatch):
    source = (ROOT / "src/fedminimax/algorithms/_template.py").read_text()
    (tmp_path / "my_method.py").write_text(source.replace("class Template", "class MyMethod"))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_method")
    clients = fm.Clients(QuadraticData(spread=0.0).client_rows(), batch_size=None)
    method = module.MyMethod(primal_lr=0.05, dual_lr=0.05)
    runs = [
        fm.simulate(
            fm.Quadratic(10), method, clients, rounds=60, dtype=torch.float64, executor=executor
        )
        for executor in ("debug", "vectorised")
    ]
    assert runs[0].history[-1]["train"]["distance"] < 1e-6
    torch.testing.assert_close(runs[0].point.x, runs[1].point.x, rtol=1e-10, atol=1e-14)
