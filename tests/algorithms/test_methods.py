"""What every method must do, row by row, and the identities that tie methods together."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import rows_momentum
import torch
from rows import (
    Row,
    auc,
    cross_entropy,
    federation_of,
    labelled,
    labelled_rows,
    least_squares,
    linear_auc,
    noise_free,
    noisy,
    noisy_by_size,
    play,
    quadratic,
    wide_quadratic,
)
from table import FLOATS, ROWS, extra_floats, first_of_each, marked
from torch import Tensor
from torch.utils import _pytree as pytree

from fedminimax.algorithms import METHODS
from fedminimax.algorithms.ada_fgda import AdaFGDA
from fedminimax.algorithms.coda import Coda
from fedminimax.algorithms.coda_plus import CodaPlus
from fedminimax.algorithms.codasca import Codasca
from fedminimax.algorithms.drfa import DRFA
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.fsgda import FSGDA
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.local_sgdm_rl import LocalSGDMRL
from fedminimax.algorithms.npa import NPA
from fedminimax.algorithms.sagda import SAGDA
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.algorithms.smoothed_gda import SmoothedGDA
from fedminimax.blocks import parted
from fedminimax.blocks.parted import Parted
from fedminimax.blocks.schedules import Stagewise
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.job import ClientResult, PhaseJob
from fedminimax.engine.round import play_round
from fedminimax.engine.simulate import Run, simulate
from fedminimax.engine.state.folder import RunFolder
from fedminimax.problems.functions import Minimax
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Phase, Point, Problem


def rows_with(condition: Callable[[Row], bool], others_slow: bool = False) -> Any:
    """All of these rows; the fast tests may do with one of each method."""
    chosen = [row for row in ROWS if condition(row)]
    first = [row.name for row in first_of_each(chosen)]
    fast = marked(chosen, lambda row: not others_slow or row.name in first)
    return pytest.mark.parametrize("row", fast)


def equal_steps(algorithm: Algorithm) -> bool:
    return all(len({algorithm.steps(r, k) for k in range(4)}) == 1 for r in range(5))


def has_network(row: Row) -> bool:
    return hasattr(row.problem(), "network")


# The rows with a distance to reach are long, and otherwise like the others.
every_row = rows_with(lambda row: row.distance is None, others_slow=True)
far_rows = rows_with(lambda row: row.distance is not None, others_slow=True)
codasca_rows = rows_with(lambda row: isinstance(row.algorithm, Codasca) and row.distance is None)
SHORT = 3  # rounds: one more than the short stages have


def run(row: Row, rounds: int = 2, executor: str = "debug", **options: Any) -> Run:
    options = {"dtype": torch.float64, "evaluate_every": 1000, **options}
    return simulate(
        row.problem(), row.algorithm, row.clients(), rounds, executor=executor, **options
    )


def close(a: Point, b: Point, within: float) -> bool:
    return all(
        bool((p - q).abs().max() <= within * q.abs().max().clamp(min=1e-3))
        for p, q in zip(a, b, strict=True)
        if q.numel()
    )


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_every_method_has_a_row():
    assert set(METHODS.values()) == {type(row.algorithm) for row in ROWS} == set(FLOATS)
    assert len({row.name for row in ROWS}) == len(ROWS)


# Where a run arrives.


@far_rows
def test_the_distance_to_the_saddle_is_what_theory_promises(row):
    assert row.distance is not None
    low, high = row.distance
    found = run(row, row.rounds, "vectorised", evaluate_every=row.rounds * 4 // 5)
    assert found.outcome == "finished"
    _, before, last = (record["train"]["distance"] for record in found.history)
    assert low <= last <= high
    if low:
        # A floor, and not a descent that was cut short.
        assert last == pytest.approx(before, rel=1e-3)


def test_the_floor_of_local_steps_falls_with_the_rate():
    """The bias of local SGDA is proportional to rate x steps; CODASCA has none to begin with."""

    def floor(lr: float) -> float:
        row = Row("", LocalSGDA(lr, lr, local_steps=8), wide_quadratic, noise_free)
        return run(row, round(20 / lr / 8), "vectorised").history[-1]["train"]["distance"]

    assert 3 < floor(0.04) / floor(0.01) < 6


def test_the_saddle_of_the_far_rows_is_a_saddle():
    problem = wide_quadratic()
    clients = noise_free().to(torch.float64)
    t, b = (torch.stack([clients.train.rows(k)[i][0] for k in range(10)]).mean(0) for i in (0, 1))
    best = problem.saddle(t, b)
    assert min(float(v.abs().min()) for v in best) > 1e-2
    slopes = [gradients(problem, best, (clients.train.batch(k),)) for k in range(10)]
    for player in zip(*slopes, strict=True):
        assert float(torch.stack(player).mean(0).abs().max()) < 1e-13
    assert float(torch.stack([g.y for g in slopes]).abs().max()) > 1  # and the clients disagree


# Identities.


@dataclass(frozen=True)
class Uncontrolled(Codasca):
    """CODASCA whose controls are frozen at 0."""

    def send(self, down: Any, client: Any, clock: Any) -> tuple[Any, Any]:
        up, client = super().send(down, client, clock)
        none = {"control_x": torch.zeros_like(down.x), "control_y": torch.zeros_like(down.y)}
        return up._replace(**none), client._replace(**none)


SAME_PROBLEMS = pytest.mark.parametrize(
    ("problem", "clients"), [(quadratic, noisy), (quadratic, noisy_by_size), (auc, labelled)]
)
ONE_STAGE = {"lr": 0.1, "local_steps": 4, "stage_rounds": 100}


def identical(one: Algorithm, other: Algorithm, problem, clients, within: float = 0.0) -> None:
    a, b = (run(Row("", method, problem, clients), 3) for method in (one, other))
    assert equal(a.point, b.point) if within == 0 else close(a.point, b.point, within)
    assert not equal(a.point, Point(*(v.double() for v in problem().start())))


@SAME_PROBLEMS
def test_codasca_without_controls_is_coda_plus(problem, clients):
    bare = Uncontrolled(**ONE_STAGE, proximal=0.3, server_lr=1.0)
    plus = CodaPlus(**ONE_STAGE, proximal=0.3, stage_output="last")
    identical(bare, plus, problem, clients, within=1e-13)
    controlled, bare = (
        run(Row("", m, problem, clients), 3) for m in (Codasca(**ONE_STAGE, proximal=0.3), bare)
    )
    assert not close(controlled.point, bare.point, 1e-6)


@SAME_PROBLEMS
def test_coda_plus_without_proximal_term_is_local_sgda(problem, clients):
    plus = CodaPlus(**ONE_STAGE, proximal=0.0)
    identical(plus, LocalSGDA(0.1, 0.1, local_steps=4), problem, clients)


@SAME_PROBLEMS
def test_coda_plus_with_one_step_is_npa(problem, clients):
    stages = {"lr": Stagewise(0.1), "proximal": 0.3, "stage_rounds": 2}
    identical(CodaPlus(**stages, local_steps=1), NPA(**stages), problem, clients)


@pytest.mark.parametrize("problem", [cross_entropy, least_squares])
def test_local_sgda_without_a_dual_is_fedavg(problem):
    identical(LocalSGDA(0.1, 0.7, local_steps=4), FedAvg(0.1, local_steps=4), problem, labelled)


@rows_with(lambda row: row.distance is None and equal_steps(row.algorithm), others_slow=True)
def test_identical_clients_are_one_client(row):
    """Four of them, so that their mean is exact: the same bits as one machine alone."""
    rows = row.clients().train.rows(0)

    def copies(count: int) -> Clients:
        return Clients([rows] * count, batch_size=None, auxiliary=rows)

    alone, together = (run(replace(row, clients=lambda n=n: copies(n)), 5) for n in (1, 4))
    assert equal(alone.point, together.point)


# CODASCA's controls.


class Recorder(Debug):
    """The debug executor, with the last result at hand."""

    def run(self, job: PhaseJob) -> ClientResult:
        self.result = super().run(job)
        return self.result


@codasca_rows
def test_the_mean_of_the_controls_is_the_server_s(row):
    algorithm = row.algorithm
    federation, state, store = federation_of(row.problem(), algorithm, row.clients())
    seen = 0
    for _ in range(row.rounds):
        state = play_round(federation, state, store, Debug())
        if algorithm.ends(state.round - 1):
            assert not state.server.control_x.any()
            assert not state.server.control_y.any()
            continue
        for field, common in ((1, state.server.control_x), (2, state.server.control_y)):
            own = torch.stack([store.states[k][field] for k in range(len(federation.clients))])
            mean = federation.weights @ (own - common)
            assert float(mean.abs().max()) <= 1e-12 * float(own.abs().max())
            assert float((own - common).abs().max()) > 0
            seen += 1
    assert seen


@pytest.mark.parametrize("problem", [quadratic, linear_auc])
@pytest.mark.parametrize("server_lr", [1.0, 1.3])
def test_the_two_equations_for_controls_agree(problem, server_lr):
    """Eq. (6), from displacements, against what the clients keep, eq. (7), for a constant rate."""
    algorithm = Codasca(lr=0.1, proximal=0.2, local_steps=4, stage_rounds=100, server_lr=server_lr)
    clients = noisy() if problem is quadratic else labelled()
    federation, state, store = federation_of(problem(), algorithm, clients)
    recorder = Recorder()
    for _ in range(4):
        before, kept = state.server, dict(store.states)
        state = play_round(federation, state, store, recorder)
        up = recorder.result.up
        for k in range(len(federation.clients)):
            _, old_x, old_y, _ = kept.get(k, (None, 0.0, 0.0, None))
            new_x = old_x - before.control_x + (before.x - up.x[k]) / (4 * 0.1)
            new_y = old_y - before.control_y + (up.y[k] - before.y) / (4 * 0.1)
            assert torch.allclose(store.states[k][1], new_x, rtol=1e-10, atol=1e-12)
            assert torch.allclose(store.states[k][2], new_y, rtol=1e-10, atol=1e-12)


@codasca_rows
def test_identical_clients_need_no_correction(row):
    rows = row.clients().train.rows(0)
    clients = Clients([rows] * 4, batch_size=None)
    federation, state, store = federation_of(row.problem(), row.algorithm, clients)
    for _ in range(row.rounds):
        state = play_round(federation, state, store, Debug())
        if not row.algorithm.ends(state.round - 1):
            for k in range(4):
                assert equal(store.states[k][1:3], state.server[2:])
                assert bool(store.states[k][1].any())


# Executors, seeds and cohorts.


def agree(found: Run, reference: Run) -> None:
    assert reference.outcome == found.outcome == "finished"
    assert close(found.point, reference.point, 1e-10)
    counted = [
        {k: r[k] for k in ("gradients", "rows", "bytes_up", "bytes_down", "exchanges")}
        for r in (found.history[-1], reference.history[-1])
    ]
    assert counted[0] == counted[1]


@every_row
def test_executors_agree_and_a_seed_fixes_every_bit(row):
    reference = run(row, SHORT, "debug", seed=4)
    for executor in ("debug", "threads", "vectorised"):
        first = reference if executor == "debug" else run(row, SHORT, executor, seed=4)
        agree(first, reference)
        assert equal(first.point, run(row, SHORT, executor, seed=4).point), executor


@every_row
def test_executors_agree_on_a_cohort(row):
    options: dict[str, Any] = {"cohort": 3, "allow_partial": True, "seed": 3}
    reference = run(row, 2, "debug", **options)
    for executor in ("threads", "vectorised"):
        agree(run(row, 2, executor, **options), reference)


@rows_with(has_network, others_slow=True)
def test_gradients_in_parts_lead_to_the_same_point(row, monkeypatch):
    made, new = 0, Parted.__new__

    def counted(*given: Any) -> Parted:
        nonlocal made
        made += 1
        return new(*given)

    reference = run(row, 2, "debug")
    monkeypatch.setattr(parted, "LARGE", 1)
    monkeypatch.setattr(Parted, "__new__", counted)
    assert close(run(row, 2, "threads").point, reference.point, 1e-12)
    assert made


@every_row
def test_another_seed_is_another_run(row):
    options: dict[str, Any] = {"executor": "vectorised"}
    if row.clients().batch_size is None:
        # Whole batches leave nothing to chance but who takes part.
        options |= {"cohort": 3, "allow_partial": True}
    one, other = (run(row, 2, seed=seed, **options) for seed in (4, 5))
    assert not close(one.point, other.point, 1e-6)


def test_a_cohort_is_not_the_whole():
    row = Row("", FedAvg(0.1, 2), least_squares, labelled)
    some, everyone = run(row, 2, cohort=3), run(row, 2)
    assert not close(some.point, everyone.point, 1e-6)
    counted = [r.history[-1]["gradients"] for r in (some, everyone)]
    assert counted == [2 * 2 * 3, 2 * 2 * 5]


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if not kind.partial])
def test_a_cohort_is_refused_where_the_theory_has_none(name):
    row = next(row for row in ROWS if type(row.algorithm) is METHODS[name])
    with pytest.raises(ValueError, match=r"all clients take part: .* allow_partial = true"):
        run(row, 1, cohort=3)
    assert run(row, 1, "vectorised", cohort=3, allow_partial=True).outcome == "finished"


def test_a_cohort_is_welcome_where_the_theory_has_one():
    partial = {type(row.algorithm): row for row in ROWS if row.algorithm.partial}
    assert len(partial) > 10
    for row in partial.values():
        assert run(row, 1, "vectorised", cohort=3).outcome == "finished"


@dataclass(frozen=True)
class Uneven(FedAvg):
    """Client k takes k + 1 steps, and what it sends depends on how far its clock has come."""

    def steps(self, round: int, client: int) -> int:
        return client + 1

    def send(self, down: Any, client: Any, clock: Any) -> tuple[Any, Any]:
        scale = 1.0 + 0.1 * clock.step + 0.01 * clock.iteration + 0.001 * clock.steps
        return Point(client.x * scale, client.y), client


def test_executors_agree_on_unequal_steps():
    row = Row("", Uneven(0.1), least_squares, labelled)
    reference = run(row, 2, "debug")
    assert reference.history[-1]["gradients"] == 2 * (1 + 2 + 3 + 4 + 5)
    for executor in ("threads", "vectorised"):
        assert close(run(row, 2, executor).point, reference.point, 1e-10), executor


@every_row
def test_the_server_stays_in_the_sets(row):
    problem = row.problem()
    for state, _ in play(problem, row.algorithm, row.clients(), row.rounds):
        point = row.algorithm.point(state.server)
        inside = Point(problem.project_x(point.x), problem.project_y(point.y))
        assert close(point, inside, 1e-14)


# Purity, shapes and precision.


def leaves(values: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor)]


class Watch:
    """A phase whose hooks are checked: inputs unchanged, the same outputs for the same inputs."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.calls = dtype, set()

    def phase(self, phase: Phase) -> Phase:
        names = ("broadcast", "receive", "local_step", "send", "aggregate")
        return phase._replace(**{n: self.hook(n, getattr(phase, n)) for n in names})

    def hook(self, name: str, function: Any) -> Any:
        def checked(*arguments: Any) -> Any:
            before = [v.clone() for v in leaves(arguments)]
            found = function(*arguments)
            assert equal(leaves(arguments), before), f"{name} changes what it is given"
            assert equal(leaves(function(*arguments)), leaves(found)), f"{name} is not pure"
            for value in leaves(found):
                # A stage's number is a whole number, in either precision.
                assert value.dtype in (self.dtype, torch.int64), f"{name} returns {value.dtype}"
                assert not value.requires_grad
            if name == "local_step":
                self.alike(name, arguments[2], found)
            if name == "aggregate":
                self.alike(name, arguments[1], found)
            self.calls.add(name)
            return found

        return checked

    @staticmethod
    def alike(name: str, old: Any, new: Any) -> None:
        def same(a: Any, b: Any) -> bool:
            if isinstance(a, tuple):  # without entries until the first replies
                return not a or all(map(same, a, b))
            return a.shape == b.shape or a.dim() == 0  # a sum may begin as the number 0

        assert type(old) is type(new), name
        for field, a, b in zip(old._fields, old, new, strict=True):
            assert same(a, b), f"{name} changes the shape of {field}"


single_slow = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64], ids=str
)


@every_row
@single_slow
def test_hooks_are_pure_and_keep_shapes_and_types(row, dtype, monkeypatch):
    hooks_are_pure(row, dtype, monkeypatch)


@rows_with(has_network, others_slow=True)
@single_slow
def test_hooks_are_pure_where_gradients_are_in_parts(row, dtype, monkeypatch):
    monkeypatch.setattr(parted, "LARGE", 1)
    hooks_are_pure(row, dtype, monkeypatch)


def hooks_are_pure(row: Row, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, kind = Watch(dtype), type(row.algorithm)
    plain = kind.phases
    monkeypatch.setattr(kind, "phases", lambda s, r: tuple(map(watch.phase, plain(s, r))))
    federation, state, store = federation_of(
        row.problem(), row.algorithm, row.clients(), dtype=dtype
    )
    seen = []
    for _ in range(SHORT):
        state = play_round(federation, state, store, Debug())
        seen.append(pytree.tree_map(lambda v: v.shape, (state.server, store.states)))
        assert all(v.dtype in (dtype, torch.int64) for v in leaves(store.states))
    # The lengths of inner values are known to the server from the first replies on.
    assert seen[-1] == seen[-2]
    assert watch.calls == {"broadcast", "receive", "local_step", "send", "aggregate"}
    point = row.algorithm.point(state.server)
    assert [v.shape for v in point] == [v.shape for v in row.problem().start()]


# Costs.


@every_row
def test_floats_sent_per_round_and_precisions_agree_roughly(row):
    double, single = (
        run(row, SHORT, "vectorised", evaluate_every=1, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    floats_sent(row, double, torch.float64)
    floats_sent(row, single, torch.float32)
    assert single.point.x.dtype == single.point.y.dtype == torch.float32
    assert close(Point(*(v.double() for v in single.point)), double.point, 1e-3)


def floats_sent(row: Row, found: Run, dtype: torch.dtype) -> None:
    x, y = (v.numel() for v in row.problem().start())
    per_float = len(row.clients()) * dtype.itemsize
    assert len(found.history) == SHORT + 1
    for before, after in zip(found.history, found.history[1:], strict=False):
        number = before["round"]
        up, down = FLOATS[type(row.algorithm)](x, y)
        more_up, more_down = extra_floats(row, number)
        sent = {way: (after[way] - before[way]) / per_float for way in ("bytes_up", "bytes_down")}
        assert sent == pytest.approx({"bytes_up": up + more_up, "bytes_down": down + more_down})
        exchanges = after["exchanges"] - before["exchanges"]
        assert exchanges == len(row.algorithm.phases(number))


@every_row
def test_gradients_counted_are_those_taken(row, monkeypatch):
    calls, rows = 0, 0

    def counting(problem: Problem, point: Point, batch: Any, *rest: Any) -> Point:
        nonlocal calls, rows
        calls, rows = calls + 1, rows + len(batch[-1].weight)
        return gradients(problem, point, batch, *rest)

    for name, module in list(sys.modules.items()):
        if name.startswith("fedminimax.algorithms") and hasattr(module, "gradients"):
            monkeypatch.setattr(module, "gradients", counting)
    found = run(row, SHORT, "debug").history[-1]
    assert calls > 0
    # The first batch of a client is `init_batches` times as large, and counted as so many.
    first = len(row.clients()) * max(row.algorithm.init_batches - 1, 0)
    if isinstance(row.algorithm, LocalSGDMRL):  # a step on the server's own rows counts as one
        own = SHORT * row.algorithm.auxiliary_steps
        calls, rows = calls + own, rows + own * 12
    sweep = row.problem().sweep_gradients
    assert (found["gradients"], found["rows"]) == ((calls + first) * sweep, rows * sweep)


# Interruptions and failures.


def without_time(history: list[dict]) -> list[dict]:
    # Through JSON, where a tuple is a list: a resumed run has read its first records from a file.
    records = json.loads(json.dumps(history))
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


@every_row
def test_a_resumed_run_is_the_uninterrupted_one(row, tmp_path):
    """Interrupted inside a stage and, for the short stages, between two."""
    options: dict[str, Any] = {"executor": "vectorised", "evaluate_every": 1}
    whole = run(row, 4, folder=tmp_path / "whole", **options)
    run(row, 1, folder=tmp_path / "parts", **options)
    for rounds in (2, 4):
        parts = run(row, rounds, folder=tmp_path / "parts", resume=True, **options)
    assert parts.rounds == whole.rounds == 4
    assert equal(parts.point, whole.point)
    final = [(tmp_path / name / "final.safetensors").read_bytes() for name in ("whole", "parts")]
    assert final[0] == final[1]
    assert without_time(parts.history) == without_time(whole.history)
    assert without_time(RunFolder(tmp_path / "parts").read_history()) == without_time(whole.history)


@every_row
def test_a_resumed_cohort_is_the_uninterrupted_one(row, tmp_path):
    """Some clients are met only after the interruption."""
    options: dict[str, Any] = {
        "executor": "vectorised", "evaluate_every": 1, "cohort": 2, "allow_partial": True
    }  # fmt: skip
    whole = run(row, 4, **options)
    run(row, 1, folder=tmp_path, **options)
    assert equal(run(row, 4, folder=tmp_path, resume=True, **options).point, whole.point)


DIVERGING = [
    Row("fedavg", FedAvg(lr=1e60, local_steps=3), least_squares, labelled),
    Row("sgda", LocalSGDA(1e60, 1e60, local_steps=3)),
    Row("coda+", CodaPlus(lr=1e60, local_steps=3, stage_rounds=10)),
    Row("coda", Coda(lr=1e60, local_steps=3, stage_rounds=10)),
    Row("codasca", Codasca(lr=1e60, local_steps=3, stage_rounds=10)),
    Row("npa", NPA(lr=1e60, stage_rounds=10)),
    *rows_momentum.diverging(),
    Row("adafgda", AdaFGDA(lr=1e200, local_steps=3)),
    Row("sagda", SAGDA(1e60, 1e60, local_steps=8)),
    Row("scaffold", Scaffold(lr=1e60, local_steps=3), least_squares, labelled),
    Row("drfa", DRFA(lr=1e60, local_steps=3), least_squares, labelled),
]
DIVERGING_SERVERS = [
    Row("fsgda", FSGDA(primal_server_lr=1e200, dual_server_lr=1e200, local_steps=1)),
    Row("smoothed", SmoothedGDA(primal_lr=1e60, dual_lr=1e60, smoothing=0.0)),
    Row("adafgda", AdaFGDA(lr=1e150, local_steps=3)),
]


@pytest.mark.parametrize("executor", ["debug", "threads", "vectorised"])
@pytest.mark.parametrize("row", DIVERGING, ids=lambda row: row.name)
def test_a_diverging_run_says_where_and_returns_the_last_good_point(row, executor):
    found = run(row, 20, executor)
    told = re.fullmatch(
        r"non-finite (\w+) at round (\d+), client (\d+), phase (\d+), step (\d+): lower .*",
        found.outcome,
    )
    assert told, found.outcome
    variable, round, client, phase, step = told[1], *map(int, told.groups()[1:])
    assert variable in ("x", "y", "sum_x", "sum_y", "momentum_x", "momentum_y")
    assert round == found.rounds
    steps = row.algorithm.phases(round)[phase].steps
    assert step < (row.algorithm.steps(round, client) if steps is None else steps)
    assert client < 5
    ends_at_the_last_good_point(found, row, executor)


def ends_at_the_last_good_point(found: Run, row: Row, executor: str) -> None:
    assert all(bool(torch.isfinite(v).all()) for v in found.point)
    if found.rounds:
        assert equal(found.point, run(row, found.rounds, executor).point)
    else:
        assert equal(found.point, Point(*(v.double() for v in row.problem().start())))


@pytest.mark.parametrize("executor", ["debug", "vectorised"])
@pytest.mark.parametrize("row", DIVERGING_SERVERS, ids=lambda row: row.name)
def test_a_server_that_diverges_blames_no_client(row, executor):
    found = run(row, 20, executor)
    told = re.fullmatch(
        r"non-finite (x|memory_x) at round (\d+), phase \d, at the server, after steps that were "
        r"finite at every client: lower the learning rates, the server's too if it has one",
        found.outcome,
    )
    assert told, found.outcome
    assert int(told[2]) == found.rounds
    ends_at_the_last_good_point(found, row, executor)


@pytest.mark.parametrize("executor", ["debug", "threads", "vectorised"])
@pytest.mark.parametrize(("bad", "variable", "step"), [(0, "x", 1), (3, "x", 1), (4, "y", 4)])
def test_the_culprit_is_named(executor, bad, variable, step):
    """One client's gradient in x or in y overflows; the others only walk along."""

    def function(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        # Finite as long as |x| < 0.84; 0 at the others. Everyone moves x from 0.5 by 0.1 a step.
        large = torch.exp(1000 * batch.mean(batch.labels) * x[0].square()) - 1
        blow = (x * large).sum() if variable == "x" else (y * large.detach()).sum()
        return blow - x.sum() - y @ y

    def poisoned() -> Clients:
        rows = enumerate(labelled_rows())
        return Clients([(f, np.full(len(f), float(k == bad))) for k, (f, _) in rows], None)

    def problem() -> Minimax:
        return Minimax(function, torch.full((3,), 0.5), torch.zeros(3))

    found = run(Row("", LocalSGDA(0.1, 0.1, local_steps=6), problem, poisoned), 3, executor)
    place = f"non-finite {variable} at round 0, client {bad}, phase 0, step {step}: "
    assert found.outcome.startswith(place), found.outcome
