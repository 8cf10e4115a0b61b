"""The commands of docs/tuning.md, as written but shorter."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tuning.md").read_text()
# Without the reasons why other tests do not run them.
BLOCKS = [
    re.sub("  # .*", "", block) for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
]
SHORT = "run.rounds=2 run.evaluate_every=1"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """What the commands use of a clone; `fedminimax` is this interpreter's."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "fedminimax"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedminimax "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


def said(script):
    done = subprocess.run(["bash", "-e", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs the extra `tune`")
@pytest.mark.slow
def test_the_searches_run_and_go_on(clone):
    (first, again), (own,), (resumed, longer) = (block.splitlines() for block in BLOCKS[:3])
    fewer = "--trials 2 --repeats 2"
    found = said(f"{first} --cuts 2 {fewer} {SHORT}\n{again} --quiet")
    assert "improve" in found
    assert "run folder: runs/best-1" in found
    assert "searching method.lr = 0.01..5 log, method.local_steps = 1..16\n" in said(
        f"{own} {fewer} {SHORT}"
    )
    assert "trial 1/" not in said(resumed)
    assert "trial 2/2: " in said(longer.replace("--trials 60", "--trials 3"))


@pytest.mark.slow
def test_the_comparisons_rank(clone):
    (block,) = BLOCKS[3:]
    file = Path("experiments/heart_methods.toml")
    text = file.read_text().replace("rounds = 60", "rounds = 2")
    file.write_text(text.replace('"method.lr" = [0.1, 0.5]', '"method.lr" = [0.1]'))
    first, second = said(block).split("auc (higher is better)")
    assert "less the best" in first
    for name in ("codasca", "coda_plus", "local_sgda", "sagda", "fedavg"):
        assert name in second
    assert "over 5 seeds" in second


def test_the_page_of_results_is_of_the_page_s_command():
    made = (ROOT / "docs" / "results" / "heart_methods.md").read_text()
    command = BLOCKS[3].splitlines()[0]
    assert made.startswith(f"Made by `{command}`.\n")
