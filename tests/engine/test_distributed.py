"""Processes that torchrun starts compute what the simulator does, and end together."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_runs import FAULTY_ROUND, ROWS, play
from safetensors.torch import load_file

from fedminimax import cli
from fedminimax.engine.backends.torchrun import Torchrun, join_processes
from fedminimax.engine.state import checkpoint

ROOT = Path(__file__).parents[2]
HEART = ROOT / "experiments" / "heart_codasca.toml"
SCRIPT = ROOT / "tests" / "distributed_runs.py"
SHORT = ("rounds=12", "evaluate_every=5", "dtype=float64", "executor=vectorised")
SPENT = ("gradients", "rows", "bytes_up", "bytes_down", "exchanges")


# One thread each, and connections on the loopback only.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def torchrun(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    local = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", processes)
    command = started(["torchrun", *map(str, local), *map(str, arguments)])
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)


def started(command: list[str]) -> list[str]:
    assert command[0] == "torchrun"
    return [sys.executable, "-m", "torch.distributed.run", *command[1:]]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What the program itself said, apart from torchrun's report of processes that failed."""
    return [line for line in done.stderr.splitlines() if line.startswith("fedminimax: ")]


def tensors(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {p.name: load_file(p) for p in sorted(folder.rglob("*.safetensors"))}


def outcome(folder: Path) -> str:
    return checkpoint.read(folder / "final.safetensors")[1]["outcome"]


def history(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def check_equal(one: Path, other: Path) -> None:
    """Checkpoints with all clients' states, results, and what was spent."""
    assert outcome(one) == outcome(other)
    first, second = tensors(one), tensors(other)
    assert list(first) == list(second)
    for file in first:
        assert list(first[file]) == list(second[file]), file
        for name, value in first[file].items():
            torch.testing.assert_close(second[file][name], value, rtol=1e-10, atol=1e-10)
    for a, b in zip(history(one), history(other), strict=True):
        assert {name: a[name] for name in SPENT} == {name: b[name] for name in SPENT}
        assert a["evaluation_bytes"] == b["evaluation_bytes"]
        # A drift is the root of a difference that may be 0.
        assert b["optimality"] == pytest.approx(a["optimality"], rel=1e-8, abs=1e-7)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    for row in ROWS:
        play(row, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes", [2, *(pytest.param(count, marks=pytest.mark.full) for count in (1, 3))]
)
def test_every_method_in_several_processes_equals_the_simulator(processes, simulated, tmp_path):
    done = torchrun(processes, SCRIPT, "rows", tmp_path)
    assert done.returncode == 0, done.stderr
    for row in ROWS:
        check_equal(simulated / row.name, tmp_path / row.name)


@pytest.mark.slow
def test_a_killed_process_ends_the_run_and_others_resume_it(tmp_path):
    """Two processes until one is killed, then three, then none but this one."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main(["run", str(HEART), *SHORT, "--quiet", "--folder", str(whole)]) == 0
    begun = ("run", HEART, *SHORT, "engine=distributed", "checkpoint_every=3", "--folder", cut)
    done = torchrun(2, SCRIPT, "cli", "dies", *begun)
    assert done.returncode != 0
    assert len(ours(done)) == 1, done.stderr
    assert "--resume" in ours(done)[0]
    saved = sorted(path.stem for path in (cut / "checkpoints").iterdir())
    assert saved == ["round-0000003", "round-0000006"]
    assert FAULTY_ROUND > 6

    done = torchrun(3, "-m", "fedminimax", "run", cut, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished; ") == 1
    assert done.stdout.count("round 12/12") == 1
    check_final(whole, cut)
    last = "round-0000012.safetensors"
    assert list(tensors(cut)[last]) == list(tensors(whole)[last])  # with every client's state

    (cut / "final.safetensors").unlink()
    (cut / "checkpoints" / last).unlink()
    assert cli.main(["run", str(cut), "--resume", "--quiet"]) == 0
    check_final(whole, cut)


def check_final(one: Path, other: Path, tolerance: float = 1e-10) -> None:
    found = load_file(other / "final.safetensors")
    for name, value in load_file(one / "final.safetensors").items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_an_error_in_one_process_ends_all_with_its_sentence(tmp_path):
    begun = ("run", HEART, *SHORT, "engine=distributed", "--folder", tmp_path / "run")
    done = torchrun(3, SCRIPT, "cli", "fails", *begun)
    assert done.returncode != 0
    assert ours(done) == ["fedminimax: process 1 of 3: the rows of this machine cannot be read"], (
        done.stderr
    )
    again = torchrun(2, "-m", "fedminimax", *begun)
    assert again.returncode != 0
    assert len(ours(again)) == 1
    assert "already holds a run" in ours(again)[0]


@pytest.mark.slow
def test_a_process_that_hangs_is_not_waited_for_for_ever(tmp_path):
    begun = ("run", HEART, *SHORT, "engine=distributed", "--folder", tmp_path / "run")
    done = torchrun(2, SCRIPT, "cli", "hangs", *begun, "--timeout", "5")
    assert done.returncode != 0
    assert any("has not answered for 5 s" in line for line in ours(done)), done.stderr
    assert all("--resume" in line for line in ours(done)), done.stderr


def commands() -> list[list[str]]:
    page = (ROOT / "docs" / "cluster.md").read_text()
    found = re.findall(r"^((?:torchrun|fedminimax) .*)$", page, re.MULTILINE)
    return [line.split() for line in found]


@pytest.mark.slow
def test_the_commands_of_the_document(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    begin, go_on, alone, two_machines = commands()
    for command in (begin, go_on):
        done = subprocess.run(started(command), env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "finished; " in done.stdout
    assert cli.main(alone[1:]) == 0
    command = [
        word.replace("first-machine:29500", f"127.0.0.1:{free_port()}") for word in two_machines
    ]
    both = [
        subprocess.Popen(started(command), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = "".join(process.communicate(timeout=600)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert said.count("finished; ") == 1
    check_final(tmp_path / "runs/heart", tmp_path / "runs/two", 1e-5)


@pytest.mark.slow
def test_several_processes_of_a_simulation_are_refused(tmp_path):
    done = torchrun(2, "-m", "fedminimax", "run", HEART, "--folder", tmp_path / "run")
    assert done.returncode != 0
    assert ours(done) == [
        'fedminimax: torchrun has started 2 processes, but engine is "simulator", which needs one: '
        "add engine=distributed"
    ]
    assert not (tmp_path / "run").exists()


def test_without_torchrun_there_is_a_sentence(tmp_path, capsys):
    arguments = ["run", str(HEART), "engine=distributed", "--folder", str(tmp_path / "run")]
    assert cli.main(arguments) == 2
    assert "torchrun has not started this process" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def one_process(monkeypatch):
    """As torchrun would start a single process."""
    told = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in {**told, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, str(value))


def test_a_single_process_equals_the_simulator(one_process, tmp_path):
    chosen = [row for row in ROWS if row.name in ("codasca", "diverging")]
    assert len(chosen) == 2
    with join_processes(timeout=60) as backend:
        assert isinstance(backend, Torchrun)
        for row in chosen:
            play(row, tmp_path / "joined", backend)
    for row in chosen:
        play(row, tmp_path / "alone")
        check_equal(tmp_path / "alone" / row.name, tmp_path / "joined" / row.name)


def test_every_client_has_one_owner():
    cohort = np.array([1, 4, 4, 9, 10])
    backends = [Torchrun(rank, 3) for rank in range(3)]
    owned = [cohort[backend.own(cohort)].tolist() for backend in backends]
    assert owned == [[9], [1, 4, 4, 10], []]
    assert [[b.owns(k) for b in backends].index(True) for k in (9, 10, 11)] == [0, 1, 2]
