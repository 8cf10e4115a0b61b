"""What clients keep between rounds: the store in memory and the one on disk, and kills."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.blocks.trees import leaves, tree_map
from fedminimax.config import Experiment
from fedminimax.data.clients import Clients
from fedminimax.engine import trainer
from fedminimax.engine.simulate import simulate
from fedminimax.engine.state import checkpoint, lock, row_file
from fedminimax.engine.state.checkpoint import CheckpointError
from fedminimax.engine.state.disk_store import DiskStore
from fedminimax.engine.state.lock import BusyError
from fedminimax.engine.state.store import ClientStore, Store
from fedminimax.messages import Stage
from fedminimax.problems.functions import Minimax

D = torch.float64
SMALL = FedAvg(lr=0.3, local_steps=1)  # its clients keep nothing


def square(x, y, batch):
    return batch.mean((batch.rows[0] - x).square().sum(-1)) / 2


def go(folder: Path | None, store: str = "disk", rounds: int = 7, resume: bool = False, **options):
    rows = [(torch.arange(3.0, dtype=D)[:, None] + torch.tensor([k, -k]),) for k in range(6)]
    settings = {"checkpoint_every": 2, "evaluate_every": 9, "executor": "debug"} | options
    problem = Minimax(square, torch.zeros(2, dtype=D))
    clients = Clients(rows, batch_size=2)
    method = settings.pop("method", None) or Scaffold(lr=0.3, local_steps=1)
    options = {"folder": folder, "store": store, "resume": resume, "cohort": 2} | settings
    return simulate(problem, method, clients, rounds, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """The result of a run that nothing happened to, its store in memory."""
    folder = tmp_path_factory.mktemp("whole")
    go(folder, "memory")
    return (folder / "final.safetensors").read_bytes()


def final(folder: Path) -> bytes:
    return (folder / "final.safetensors").read_bytes()


# ------------------------------------------------------------------ both stores alike


class Kept(NamedTuple):
    a: torch.Tensor
    b: tuple[torch.Tensor, ...] = ()


def kept(*values: float) -> Kept:
    a = torch.tensor(values, dtype=D)[:, None] + torch.tensor([0.0, 0.5])
    return Kept(a, (torch.tensor(values).long(), a[:, :0]))


@pytest.fixture(params=["memory", "disk", "temporary"])
def store(request, tmp_path):
    fields = ("a", "b")
    kinds = {
        "memory": lambda: Store(fields),
        "disk": lambda: DiskStore(fields, 20, tmp_path),
        "temporary": lambda: DiskStore(fields, 20),
    }
    with closing(kinds[request.param]()) as made:
        made.restore(0, {})
        yield made


def numbers(store: ClientStore, *cohort: int) -> list[float]:
    loaded = store.load(np.array(cohort))
    assert loaded.b[0].tolist() == loaded.a[:, 0].tolist()
    assert loaded.a[:, 1].tolist() == [v + 0.5 for v in loaded.a[:, 0].tolist()]
    assert loaded.b[1].shape == (len(cohort), 0)
    return loaded.a[:, 0].tolist()


def test_a_store_gives_back_what_was_saved_last(store):
    assert store.missing(np.array([1, 3, 5])).tolist() == [1, 3, 5]
    store.save(np.array([1, 3, 5]), kept(10, 30, 50))
    assert numbers(store, 1, 3, 5) == [10, 30, 50]
    assert store.missing(np.array([3, 4])).tolist() == [4]
    store.save(np.array([4]), kept(40))  # as when a client is met: the others come back with it
    assert numbers(store, 3, 4) == [30, 40]
    store.save(np.array([3, 4]), kept(31, 41))
    store.save(np.array([0, 4, 19]), kept(2, 42, 190))
    assert numbers(store, 0, 1, 3, 4, 5, 19) == [2, 10, 31, 42, 50, 190]
    assert numbers(store, 3, 4) == [31, 42]
    assert sorted(store.states) == [0, 1, 3, 4, 5, 19]
    assert store.states[4].a.tolist() == [42, 42.5]
    assert store.missing(np.array([0, 2, 19])).tolist() == [2]


def test_of_a_client_that_is_there_twice_the_last_state_counts(store):
    store.save(np.array([2, 7, 7, 9]), kept(20, 70, 71, 90))
    assert numbers(store, 7, 9) == [71, 90]
    store.save(np.array([9, 9]), kept(91, 92))
    store.save(np.array([1]), kept(10))
    assert numbers(store, 2, 7, 7, 9) == [20, 71, 71, 92]


def test_the_cohort_that_stays_is_written_at_checkpoints_only(tmp_path, monkeypatch):
    written = []
    plain = DiskStore._write
    monkeypatch.setattr(
        DiskStore, "_write", lambda s, c, *rest: (written.append(len(c)), plain(s, c, *rest))[1]
    )
    go(tmp_path, cohort=6, rounds=6, checkpoint_every=3)
    assert written == [6, 6]


def test_a_run_ends_with_the_same_bytes_with_either_store(tmp_path, whole):
    go(tmp_path)
    assert final(tmp_path) == whole
    # The files are what any program reads, and the checkpoints hold no states.
    rows = np.load(tmp_path / "clients" / "field.control.npy", allow_pickle=False)
    sums = np.load(tmp_path / "clients" / "sums.npy", allow_pickle=False)
    assert rows.shape == (6, 2)
    assert len(sums) == 6
    assert rows[sums != 0].any(axis=1).all()
    for path in (tmp_path / "checkpoints").iterdir():
        tensors, about = checkpoint.read(path)
        assert not any(name.startswith("client.") for name in tensors)
        assert about["clients"]["tensors"] == [["control", ["<f8", 6, 2]]]


def test_without_a_folder_the_files_go_when_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    run = go(None, on_round=lambda _: seen.append(len(list(tmp_path.glob("*/*.npy")))))
    assert max(seen) == 2
    assert not list(tmp_path.iterdir())
    assert torch.equal(run.point.x, go(None, "memory").point.x)

    def fail(_: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        go(None, on_round=fail)
    assert not list(tmp_path.iterdir())


def test_methods_that_keep_nothing_need_no_files(tmp_path):
    clients = Clients([(torch.zeros(2, 1),)] * 2)
    problem = Minimax(square, torch.zeros(1))
    simulate(problem, FedAvg(), clients, 2, folder=tmp_path, store="disk")
    assert not (tmp_path / "clients").exists()


def test_an_unknown_store_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match='store is \'tape\'; give "memory" or "disk"'):
        go(tmp_path / "run", "tape")
    assert not (tmp_path / "run").exists()
    table = {"data": {"name": "quadratic"}, "problem": {"name": "quadratic"}}
    table |= {"method": {"name": "codasca"}, "run": {"store": "disk"}}
    assert Experiment.from_table(table).run.store == "disk"


def test_states_that_change_their_shape_are_a_sentence(tmp_path):
    with closing(DiskStore(("a", "b"), 5, tmp_path)) as store:
        store.restore(0, {})
        store.save(np.array([1]), kept(1))
        store.save(np.array([2]), Kept(torch.zeros(1, 3)))
        with pytest.raises(ValueError, match=r"clients keep a \(3,\) .* use store = \"memory\""):
            store.settle()


# ------------------------------------------------------------------ going on


@pytest.mark.parametrize("stores", [("disk", "memory"), ("memory", "disk", "memory", "disk")])
def test_a_run_goes_on_with_another_store(tmp_path, whole, stores):
    for number, store in enumerate(stores, 1):
        last = number == len(stores)
        go(tmp_path, store, rounds=7 if last else 2 * number - 1, resume=number > 1)
    assert final(tmp_path) == whole


def test_a_fresh_run_takes_nothing_from_what_an_old_one_left(tmp_path, whole):
    go(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    for name in ("history.jsonl", "final.safetensors"):
        (tmp_path / name).unlink()
    go(tmp_path)
    assert final(tmp_path) == whole


def test_the_last_checkpoint_may_be_deleted(tmp_path, whole):
    go(tmp_path, rounds=5)
    sorted((tmp_path / "checkpoints").iterdir())[-1].unlink()
    for _ in range(2):
        with pytest.raises(KilledError):
            go(tmp_path, resume=True, on_round=killed)
    go(tmp_path, resume=True)
    assert final(tmp_path) == whole


def test_states_that_cannot_be_brought_back_are_a_sentence(tmp_path):
    go(tmp_path, rounds=3)
    old = sorted((tmp_path / "checkpoints").iterdir())[0]
    content = old.read_bytes()
    go(tmp_path, resume=True)
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    old.write_bytes(content)
    with pytest.raises(CheckpointError, match="are not those of the checkpoint of round 2"):
        go(tmp_path, resume=True)


def test_a_damaged_journal_and_missing_files_are_sentences(tmp_path):
    go(tmp_path / "a", rounds=5)
    sorted((tmp_path / "a" / "checkpoints").iterdir())[-1].unlink()
    journal = tmp_path / "a" / "clients" / "undo-0000004"
    content = bytearray(journal.read_bytes())
    for place in (0, 30):
        journal.write_bytes(
            content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :] * 2
        )
        with pytest.raises(CheckpointError, match="undo-0000004 is damaged at byte 0"):
            go(tmp_path / "a", resume=True)
    rows = tmp_path / "a" / "clients" / "field.control.npy"
    os.truncate(rows, rows.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"field.control.npy is cut short"):
        go(tmp_path / "a", resume=True)
    rows.write_bytes(b"x" * 200)
    with pytest.raises(CheckpointError, match=r"field.control.npy is damaged"):
        go(tmp_path / "a", resume=True)
    rows.unlink()
    with pytest.raises(CheckpointError, match=r"there is no file .*field.control.npy"):
        go(tmp_path / "a", resume=True)


def test_a_full_disk_is_a_sentence_and_the_run_goes_on(tmp_path, whole, monkeypatch):
    plain, calls = row_file.write_all, []

    def full(file, data):
        calls.append(len(data))
        if len(calls) > 12:
            raise OSError(28, "No space left on device")
        plain(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(row_file, "write_all", full)
        with pytest.raises(CheckpointError, match="No space left on device; the last checkpoint"):
            go(tmp_path)
    go(tmp_path, resume=True)
    assert final(tmp_path) == whole


def test_without_a_folder_a_full_disk_speaks_of_no_checkpoint(monkeypatch):
    def full(file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_file, "write_all", full)
    with pytest.raises(CheckpointError, match="No space left on device; free some space there"):
        go(None)


@pytest.mark.skipif(lock.fcntl is None, reason="no locks on this system")
@pytest.mark.parametrize("store", ["disk", "memory"])
def test_a_run_that_goes_on_already_is_not_gone_on_with(tmp_path, whole, store):
    def again(round: int) -> None:
        if round == 3:
            with pytest.raises(BusyError, match="another process is at work in"):
                go(tmp_path, store, resume=True)

    go(tmp_path, on_round=again)
    assert final(tmp_path) == whole


# ------------------------------------------------------------------ kills


class KilledError(BaseException):
    """Nothing catches it."""


def killed(round: int) -> None:
    raise KilledError


class Steps:
    """Counts what changes the disk, and ends the process, so to speak, after one such step, or in
    the middle of it."""

    def __init__(self, patch: pytest.MonkeyPatch, last: int | None = None, torn: bool = False):
        self.count, self.last, self.torn = 0, last, torn
        plain = row_file.write_all
        patch.setattr(row_file, "write_all", lambda file, data: self.write(plain, file, data))
        for name in ("fsync", "replace", "unlink"):
            patch.setattr(os, name, self.after(getattr(os, name)))

    def after(self, plain):
        def step(*arguments, **options):
            self.check()
            plain(*arguments, **options)
            self.taken()

        return step

    def write(self, plain, file, data) -> None:
        self.check()
        if self.torn and self.count + 1 == self.last:
            plain(file, data[: len(data) // 2])
        else:
            plain(file, data)
        self.taken()

    def taken(self) -> None:
        self.count += 1
        self.check()

    def check(self) -> None:
        # What a `finally` would still write, a killed process does not.
        if self.count == self.last:
            raise KilledError


@pytest.fixture
def quick(monkeypatch):
    """A process that is killed leaves what it has written, on the disk or on its way there."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(trainer, "environment", dict)


def cut(folder: Path, monkeypatch, last: int, torn: bool, **options) -> bool:
    """Was the run killed at that step?"""
    with monkeypatch.context() as patch:
        Steps(patch, last, torn)
        try:
            go(folder, **options)
        except KilledError:
            return True
    return False


def steps_of_a_run(folder: Path, monkeypatch) -> int:
    with monkeypatch.context() as patch:
        steps = Steps(patch)
        go(folder, rounds=7)
    return steps.count


@pytest.mark.parametrize("torn", [False, True], ids=["after", "within"])
def test_a_run_killed_at_any_single_step_goes_on_to_the_same_bytes(
    tmp_path, whole, monkeypatch, quick, torn
):
    count = steps_of_a_run(tmp_path / "counted", monkeypatch)
    assert count > 60
    for last in range(1, count + 1):
        folder = tmp_path / str(last)
        assert cut(folder, monkeypatch, last, torn)
        go(folder, resume=folder.exists())
        assert final(folder) == whole, last
        shutil.rmtree(folder)


def test_a_run_killed_twice_at_any_step_goes_on_to_the_same_bytes(
    tmp_path, whole, monkeypatch, quick
):
    """The second time while it goes back to its checkpoint."""
    count = steps_of_a_run(tmp_path / "counted", monkeypatch)
    chance = random.Random(0)
    for last in range(20, count):
        folder = tmp_path / str(last)
        assert cut(folder, monkeypatch, last, torn=False)
        for _ in range(2):
            cut(folder, monkeypatch, chance.randint(1, 12), chance.random() < 0.5, resume=True)
        go(folder, resume=True)
        assert final(folder) == whole, last
        shutil.rmtree(folder)


def test_a_killed_run_goes_on_from_the_checkpoint_before_the_last(
    tmp_path, whole, monkeypatch, quick
):
    count = steps_of_a_run(tmp_path / "counted", monkeypatch)
    chance, deleted = random.Random(1), 0
    for last in range(20, count):
        folder = tmp_path / str(last)
        assert cut(folder, monkeypatch, last, torn=False)
        found = sorted((folder / "checkpoints").glob("round-*"))
        if len(found) > 1:
            found[-1].unlink()
            deleted += 1
        cut(folder, monkeypatch, chance.randint(1, 12), torn=False, resume=True)
        go(folder, resume=True)
        assert final(folder) == whole, last
        shutil.rmtree(folder)
    assert deleted > 10


@dataclass(frozen=True)
class Coarse(Stage):
    """Sends round numbers, and keeps what rounding left out."""

    def init_client(self, up):
        return up

    def at_client(self, down, client, up, kept, clock):
        own = tree_map(torch.add, up, kept)
        sent = tree_map(lambda v: v.round(decimals=1), own)
        return sent, tree_map(torch.sub, own, sent)


def staged(folder: Path | None, store: str = "disk", method=None, **options):
    return go(folder, store, method=method, messages=[Coarse()], **options)


@pytest.mark.parametrize("method", [Scaffold(lr=0.3, local_steps=1), SMALL], ids=["both", "alone"])
def test_what_is_kept_for_message_stages_lives_in_files_too(tmp_path, monkeypatch, quick, method):
    """Beside what the method keeps, and alone; killed at a step in every few."""
    staged(tmp_path / "whole", "memory", method)
    expected = final(tmp_path / "whole")
    stores = ("disk", "memory", "disk")
    for number, store in enumerate(stores):
        rounds = 7 if number == 2 else 2 * number + 3
        staged(tmp_path / "other", store, method, rounds=rounds, resume=number > 0)
    assert final(tmp_path / "other") == expected
    with monkeypatch.context() as patch:
        count = Steps(patch)
        staged(tmp_path / "counted", method=method)
    assert final(tmp_path / "counted") == expected
    for path in (tmp_path / "counted" / "checkpoints").iterdir():
        tensors, _ = checkpoint.read(path)
        assert not any(name.startswith("client.") for name in tensors)
    for last in range(7, count.count, 9):
        folder = tmp_path / str(last)
        for again, step in enumerate((last, 5)):
            with monkeypatch.context() as patch, suppress(KilledError):
                Steps(patch, step, torn=last % 2 > 0)
                staged(folder, method=method, resume=again > 0)
        staged(folder, method=method, resume=True)
        assert final(folder) == expected, last
        shutil.rmtree(folder)


SCRIPT = """
import os, sys, time
import torch
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.data.clients import Clients
from fedminimax.engine.simulate import simulate
from fedminimax.problems.functions import Minimax

folder, rounds, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rows = [(torch.arange(3.0)[:, None] + torch.full((2000,), float(k)),) for k in range(50)]

def loss(x, y, batch):
    return batch.mean((batch.rows[0] - x).square().sum(-1)) / 2

def on_round(round):
    print(round, flush=True)
    if round >= last:
        time.sleep(600)  # for whoever is to kill it, however slow

simulate(
    Minimax(loss, torch.zeros(2000)), Scaffold(lr=0.1, local_steps=1), Clients(rows, batch_size=2),
    rounds=rounds, cohort=5, executor="vectorised", evaluate_every=10**6, checkpoint_every=3,
    folder=folder, store="disk", resume=os.path.exists(folder + "/checkpoints"),
    on_round=on_round,
)
"""
NEVER = 10**6


def start(folder: Path, rounds: int, last: int = NEVER) -> subprocess.Popen:
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(rounds), str(last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )


def kill_a_little_after(process: subprocess.Popen, round: int, seconds: float) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= round:
            break
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL


def killed_again_and_again(folder: Path, rounds: int, kills: int) -> bytes:
    for _ in range(kills):
        process = start(folder, rounds, last=rounds - 5)
        kill_a_little_after(process, random.randint(1, 9), random.uniform(0, 0.05))
    process = start(folder, rounds)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return final(folder)


def uninterrupted(folder: Path, rounds: int) -> bytes:
    process = start(folder, rounds)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return final(folder)


@pytest.mark.slow
def test_a_process_killed_at_a_random_moment_goes_on_to_the_same_bytes(tmp_path):
    expected = uninterrupted(tmp_path / "whole", 40)
    assert killed_again_and_again(tmp_path / "run", 40, 1) == expected


@pytest.mark.full
def test_a_process_killed_again_and_again_goes_on_to_the_same_bytes(tmp_path):
    expected = uninterrupted(tmp_path / "whole", 200)
    for attempt in range(4):
        assert killed_again_and_again(tmp_path / str(attempt), 200, 6) == expected


def test_leaves_have_names_that_files_can_have():
    assert [name for name, _ in leaves(kept(1))] == ["a", "b.0", "b.1"]
