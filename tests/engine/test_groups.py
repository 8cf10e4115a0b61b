"""Clients in groups: the numbers are those of clients one by one, however they are grouped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pytest
import torch
from rows import Row, federation_of, noisy_by_size
from table import marked
from test_compiled import FIRST, SIX_ROWS, THREE, AsTraced, Lent, played, same
from torch import Tensor

from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDA
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.blocks.trees import flat
from fedminimax.engine.executors.compiled import executor as compiled
from fedminimax.engine.executors.compiled import groups, shared
from fedminimax.engine.executors.compiled.executor import Compiled
from fedminimax.engine.executors.compiled.inductor import inductor
from fedminimax.engine.executors.debug import Debug
from fedminimax.problems.gradients import gradients
from fedminimax.problems.quadratic import Quadratic
from fedminimax.types import Algorithm, NonFiniteError, Point


class Grouped(Compiled):
    """How many groups there were in a phase, each time."""

    def __init__(self, threads: int = 1, compiler=None) -> None:
        super().__init__(threads, compiler or AsTraced())
        self.counts: set[int] = set()

    def _in_groups(self, work, clocks, parts):  # type: ignore[override]  # as narrow as the test needs
        self.counts.add(len(parts))
        return super()._in_groups(work, clocks, parts)


@pytest.fixture(autouse=True)
def groups_of_two(monkeypatch):
    monkeypatch.setattr(shared, "_MADE", {})
    monkeypatch.setattr(shared, "_TRACED", {})
    monkeypatch.setattr(groups, "LEAST", 1)
    monkeypatch.setattr(groups, "FEW", groups.HELD)
    monkeypatch.setattr(groups, "ALONE", 0)
    monkeypatch.setattr(
        compiled, "groups", lambda count, each, cores: groups.groups(count, groups.HELD // 2, cores)
    )


@pytest.mark.parametrize("row", marked(SIX_ROWS, lambda row: row.name in THREE))
def test_groups_compute_what_clients_one_by_one_compute(row):
    for threads in (1, 2):  # which share what is traced
        executor = Grouped(threads)
        same(row, executor)
        executor.close()
        assert min(executor.counts) > 1


@pytest.mark.parametrize(
    "name",
    [
        "sgda",
        pytest.param("codasca", marks=pytest.mark.slow),
        pytest.param("dr-scgd", marks=pytest.mark.full),
    ],
)
def test_groups_as_machine_code(name):
    (row,) = (row for row in FIRST if row.name == name)
    executor = Grouped(2, inductor)
    same(row, executor)
    executor.close()
    assert min(executor.counts) > 1


@pytest.mark.parametrize(("threads", "counts"), [(1, set()), (2, {2}), (3, set())])
def test_every_core_has_a_group_of_clients_enough(threads, counts, monkeypatch):
    monkeypatch.setattr(compiled, "groups", groups.groups)
    monkeypatch.setattr(groups, "LEAST", 3)
    row = Row("codasca", Codasca(lr=0.05, local_steps=2), lambda: Quadratic(3), noisy_by_size)
    executor = Grouped(threads)
    same(row, executor)
    executor.close()
    assert executor.counts == counts


def test_what_a_groups_graph_lends_is_copied_before_the_next_group():
    row = Row("codasca", Codasca(lr=0.05, local_steps=2), lambda: Quadratic(3), noisy_by_size)
    executor = Grouped(compiler=Lent())
    same(row, executor)
    assert min(executor.counts) > 1


@pytest.mark.parametrize(
    "method",
    [
        LocalSGDA(0.05, 0.05, local_steps=2),
        Codasca(lr=0.05, local_steps=2, stage_rounds=4),
        FedNormSGDA(0.05, 0.05, client_steps=(1, 5, 2, 3, 4)),
    ],
    ids=["all", "stages", "unequal"],
)
def test_rounds_together_and_threads_with_the_same_groups_change_no_bit(method):
    ends = []
    for together, threads in ((1, 1), (9, 1), (9, 2)):
        executor = Grouped(threads)
        federation, state, store = federation_of(Quadratic(3), method, noisy_by_size())
        state = played(federation, state, store, executor, 9, together)
        executor.close()
        assert min(executor.counts) > 1
        ends.append((state.round, state.cost, flat((state.server, *store.states.values()))))
    for other in ends[1:]:
        assert ends[0][:2] == other[:2]
        assert all(torch.equal(a, b) for a, b in zip(ends[0][2], other[2], strict=True))


def test_a_group_that_diverges_is_found():
    method = Codasca(lr=1e300, local_steps=2)
    for executor in (Grouped(), Debug()):
        federation, state, store = federation_of(Quadratic(3), method, noisy_by_size())
        with pytest.raises(NonFiniteError, match="lower the learning rate"):
            played(federation, state, store, executor)


class Remembering(NamedTuple):
    x: Tensor
    y: Tensor
    history: tuple[Tensor, ...]  # of its last points, up to four


@dataclass(frozen=True)
class WithHistory(Algorithm):
    """What a client keeps grows from round to round; and the server's vectors are columns."""

    lr: float = 0.1
    keep: ClassVar[tuple[str, ...]] = ("history",)
    spoilt: ClassVar[bool] = False

    def init_client(self, problem, down, batch):
        return Remembering(down.x, down.y, (down.x,))

    def receive(self, down, client, clock):
        return Remembering(down.x, down.y, client.history)

    def local_step(self, problem, down, client, batch, clock):
        grad = gradients(problem, Point(client.x, client.y), batch)
        return client._replace(x=client.x - self.lr * grad.x)

    def send(self, down, client, clock):
        spoil = torch.where(clock.client == 4, torch.nan, 0.0) if self.spoilt else 0.0
        history = (*client.history, client.x + spoil)[-4:]
        pull = sum(point.sum() for point in client.history) / 100
        return Point(client.x + pull, client.y), client._replace(history=history)

    def aggregate(self, problem, server, mean, clock):
        x, _ = torch.stack([mean.x, 2 * mean.x], 1).unbind(1)
        return server._replace(x=x)


@pytest.mark.parametrize("together", [1, 6])
def test_what_clients_keep_may_grow_and_vectors_may_be_columns(together):
    ends = []
    for executor in (Grouped(), Debug()):
        federation, state, store = federation_of(Quadratic(3), WithHistory(), noisy_by_size())
        state = played(federation, state, store, executor, 6, together)
        ends.append(flat((state.server, *store.states.values())))
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_a_number_that_only_one_client_keeps_is_found():
    @dataclass(frozen=True)
    class Spoilt(WithHistory):
        spoilt: ClassVar[bool] = True

    federation, state, store = federation_of(Quadratic(3), Spoilt(), noisy_by_size())
    with pytest.raises(NonFiniteError, match="history"):
        played(federation, state, store, Grouped(), 1)


def test_clients_of_two_groups_count_once():
    parts = groups.groups(5, groups.HELD // 2, cores=1)
    assert [(g.first, g.size, g.again) for g in parts] == [(0, 2, 0), (2, 2, 0), (3, 2, 1)]
    whole = groups.Whole(5)
    for group in parts:
        whole.put(group, [torch.arange(5.0)[group.rows] + 10 * group.number])
    assert whole.tensors[0].tolist() == [0, 1, 12, 13, 24]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(("count", "each"), [(100, 10), (100, groups.HELD), (1, groups.HELD)])
def test_few_small_and_large_clients_stay_together(count, each, cores, monkeypatch):
    monkeypatch.setattr(groups, "LEAST", 8)
    monkeypatch.setattr(groups, "ALONE", groups.HELD // 2)
    assert groups.groups(count, each, cores) == []


@pytest.mark.parametrize(
    ("cores", "sizes"), [(1, [34, 34, 34]), (2, [25] * 4), (3, [34, 34, 34]), (64, [34, 34, 34])]
)
def test_each_core_has_as_many_groups_as_the_others(cores, sizes, monkeypatch):
    monkeypatch.setattr(groups, "LEAST", 8)
    found = groups.groups(100, groups.HELD * 3 // 100, cores)
    assert [group.size for group in found] == sizes


def refusing(module, given):
    raise RuntimeError("no code for that")


def test_groups_that_cannot_be_compiled_run_all_at_once_with_one_sentence():
    row = Row("codasca", Codasca(lr=0.05, local_steps=2), lambda: Quadratic(3), noisy_by_size)
    executor = Grouped(compiler=refusing)
    with pytest.warns(UserWarning, match="cannot be compiled, so it is not") as told:
        same(row, executor)
    # The first round of a stage, in which clients get their states, has shapes of its own.
    assert len(told) == len(executor._graphs)
