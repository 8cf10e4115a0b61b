"""docs/deploying.md as its reader follows it, word for word, on one machine."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import assert_same, simulated

from fedminimax.config import Experiment
from fedminimax.experiment import load

pytest.importorskip("nvflare", reason="pip install 'fedminimax[nvflare]'")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "deploying.md").read_text()
COMMANDS = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]


@pytest.fixture
def clone(tmp_path):
    """What the commands use of a clone in which the first two, which install, were done."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "activate").write_text(f'export PATH="{bin}:$PATH" PYTHONPATH="{ROOT / "src"}"\n')
    (bin / "fedminimax").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedminimax "$@"\n')
    (bin / "pip").write_text("#!/bin/sh\n")
    for name in ("fedminimax", "pip"):
        (bin / name).chmod(0o755)
    (tmp_path / ".venv" / ".ready").touch()
    yield tmp_path
    for file in tmp_path.glob("*/pid"):
        with contextlib.suppress(OSError):
            os.kill(int(file.read_text()), signal.SIGTERM)


@pytest.mark.slow
def test_the_commands_of_the_page_train_what_the_simulator_does(clone):
    told = {**os.environ, "OMP_NUM_THREADS": "1"}
    # A file, because the processes behind the commands would keep a pipe open.
    with open(clone / "said", "w") as said:
        command = ["bash", "-e", "-c", COMMANDS]
        done = subprocess.run(command, cwd=clone, env=told, stdout=said, stderr=said, timeout=900)
    text = (clone / "said").read_text()
    assert done.returncode == 0, text
    assert "finished\nrun folder: consortium/runs/heart_codasca\n" in text
    assert "heart_codasca: round 20/20, finished" in text
    file = ROOT / "experiments" / "heart_codasca.toml"
    which = Experiment.from_file(file, ["rounds=20", "executor=debug"])
    # In single precision, as the file has it.
    found, expected = load(clone / "consortium" / "runs" / "heart_codasca").point, simulated(which)
    assert_same(found, expected)
