"""docs/deploying.md as its reader follows it, word for word, on one machine."""

import contextlib
import os
import re
import signal
import subprocess

import pytest
from deployment import ROOT, assert_same, make_clone, simulated

from fedminimax.config import Experiment
from fedminimax.engine.device import threads
from fedminimax.experiment import load
from fedminimax.remote.measure import HEAD, METHODS, Spent, row

PAGE = (ROOT / "docs" / "deploying.md").read_text()
COMMANDS = re.search(r"```bash\n(.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]


@pytest.fixture
def clone(tmp_path):
    pytest.importorskip("nvflare", reason="pip install 'fedminimax[nvflare]'")
    make_clone(tmp_path)
    yield tmp_path
    for file in tmp_path.glob("*/pid"):
        for number in file.read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(number), signal.SIGTERM)


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
    # In single precision, as the file has it, where sums depend on how many threads share them.
    with threads(1):
        expected = simulated(which)
    assert_same(load(clone / "consortium" / "runs" / "heart_codasca").point, expected)


def test_the_table_of_costs_is_as_deploy_measure_prints_it():
    lines = PAGE[PAGE.index(HEAD) :].splitlines()[2 : 2 + len(METHODS)]
    printed = [row(method, Spent(0.5, 1, 2, 3, 1), 0.25, 1.5).strip() for method in METHODS]
    assert [re.sub(r"[\d.,]+", "0", line) for line in lines] == [
        re.sub(r"[\d.,]+", "0", line) for line in printed
    ]
