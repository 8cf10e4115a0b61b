"""What ties the doubly recursive methods to others, to the gradient and to the floors of theory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from rows import (
    auc,
    composed_gradients,
    federation_of,
    labelled,
    labelled_by_size,
    least_squares,
    noisy,
    noisy_by_size,
    play,
    quadratic,
    robust_least_squares,
)
from rows_recursive import (
    WIDTHS,
    composed,
    composed_by_size,
    composed_rows,
    composed_whole,
    composition,
    contested,
    exact_clients,
)
from test_identities_momentum import WithoutFirstAverage, points
from torch import Tensor

from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.fed_dr_scgda import FedDRSCGDA
from fedminimax.algorithms.fgda import FGDA
from fedminimax.algorithms.levelwise_dr_scgd import LevelwiseDRSCGD
from fedminimax.algorithms.levelwise_dr_scgda import LevelwiseDRSCGDA
from fedminimax.data.clients import Clients
from fedminimax.data.returns import Returns
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.engine.simulate import Run, simulate
from fedminimax.problems.functions import Composition
from fedminimax.problems.portfolio import Portfolio
from fedminimax.types import Clock, Phase, Point, Problem

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
PAIRS = pytest.mark.parametrize(
    ("both", "primal"), [(FedDRSCGDA, FedDRSCGD), (LevelwiseDRSCGDA, LevelwiseDRSCGD)]
)
STEPS = pytest.mark.parametrize("steps", [1, 3])
MINIMAX = pytest.mark.parametrize(
    ("problem", "clients"),
    [
        (quadratic, noisy),
        (quadratic, noisy_by_size),
        (auc, labelled),
        (robust_least_squares, labelled),
    ],
)


def slopes(problem: Problem, clients: Clients, point: Point) -> Point:
    """The gradients of Phi: each level is averaged over clients before the next is applied."""
    clients = clients.to(torch.float64)
    batches = [clients.train.batch(k) for k in range(len(clients))]
    weights = clients.weight_vector(clients.weights or "size")

    def mean(values: list[Tensor]) -> Tensor:
        return torch.tensordot(weights, torch.stack(values), 1)

    def phi(x: Tensor, y: Tensor) -> Tensor:
        for level in range(1, problem.depth):
            x = mean([problem.inner(level, x, batch) for batch in batches])
        return mean([problem.outer(x, y, batch) for batch in batches])

    return Point(*torch.func.grad(phi, argnums=(0, 1))(*point))


def near(a: Tensor, b: Tensor, within: float = 1e-10) -> bool:
    return float((a - b).abs().max()) <= within * max(1.0, float(b.abs().max()))


def gap(a: Point, b: Point) -> float:
    pairs = [(p, q) for p, q in zip(a, b, strict=True) if p.numel()]
    return max(float((p - q).abs().max()) for p, q in pairs)


def alike(one: list[Point], other: list[Point], within: float = 1e-13) -> None:
    assert max(gap(a, b) for a, b in zip(one, other, strict=True)) <= within
    assert gap(one[0], one[-1]) > 1e-4  # and it moved


# One method is another.


@MINIMAX
@STEPS
def test_with_one_level_the_printed_method_is_local_storm(problem, clients, steps):
    rates: dict[str, Any] = {"primal_lr": 0.1, "dual_lr": 0.2, "local_steps": steps}
    ours = FedDRSCGDA(**rates, recursion_rate=0.3, first_batches=2)
    storm = WithoutFirstAverage(**rates, primal_rate=0.3, dual_rate=0.3, first_batches=2)
    alike(points(problem(), ours, clients(), 4), points(problem(), storm, clients(), 4))


@STEPS
@pytest.mark.parametrize("clients", [labelled, labelled_by_size])
def test_with_one_level_fed_dr_scgd_is_local_storm_of_a_minimisation(clients, steps):
    rest: dict[str, Any] = {"local_steps": steps, "first_batches": 2}
    ours = FedDRSCGD(0.1, recursion_rate=0.3, **rest)
    storm = WithoutFirstAverage(primal_lr=0.1, primal_rate=0.3, **rest)
    one, other = (points(least_squares(), m, clients(), 4) for m in (ours, storm))
    alike(one, other)
    assert one[0].y.numel() == 0


@dataclass(frozen=True)
class OneFirstBatch(FGDA):
    """FGDA with a first batch of the usual size."""

    @property
    def init_batches(self) -> int:  # type: ignore[override]
        return 1


@MINIMAX
@STEPS
def test_with_one_level_the_levelwise_method_is_fgda_s_second_reading(problem, clients, steps):
    rates: dict[str, Any] = {"primal_lr": 0.1, "dual_lr": 0.2, "local_steps": steps}
    ours = LevelwiseDRSCGDA(**rates, recursion_rate=0.3, depth=1)
    theirs = OneFirstBatch(**rates, primal_rate=0.3, dual_rate=0.3, sync="reaverage")
    alike(points(problem(), ours, clients(), 4), points(problem(), theirs, clients(), 4))


@PAIRS
@STEPS
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_without_a_dual_the_minimax_method_is_the_other(depth, steps, both, primal):
    rest: dict[str, Any] = {"recursion_rate": 0.3, "local_steps": steps}
    rest |= {"projection": "ball", "radius": 0.7}
    problem, methods = composition(depth), (both(0.2, 0.7, **rest), primal(0.2, **rest))
    a, b = (points(problem, m.for_problem(problem), composed_by_size(), 4) for m in methods)
    alike(a, b, 0.0)


@PAIRS
@STEPS
def test_a_dual_that_does_not_matter_leaves_x_alone(steps, both, primal):
    """The last level is a function of its input plus one of y."""

    def apart(value: Tensor, y: Tensor, batch: Any) -> Tensor:
        return composition(2).outer(value, y[:0], batch) - 0.5 * y @ y + y.sum()

    problem = Composition([*composition(2).levels[:-1], apart], composition(2).start().x, [0.0])
    method, without = (m.for_problem(problem) for m in (both(0.2, 0.3), primal(0.2)))
    method, without = (replace(m, local_steps=steps) for m in (method, without))
    found = points(problem, method, composed(), 4)
    alone = points(composition(2), without, composed(), 4)
    assert all(near(a.x, b.x, 1e-13) for a, b in zip(found, alone, strict=True))
    assert float(found[-1].y) > 0.1


@STEPS
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_readings_agree_when_clients_do(depth, steps):
    same = Clients([composed_rows()[0]] * 3, batch_size=None)
    level_wise = LevelwiseDRSCGDA(0.2, 0.3, local_steps=steps, depth=depth)
    printed = points(contested(depth), FedDRSCGDA(0.2, 0.3, local_steps=steps), same, 3)
    alike(printed, points(contested(depth), level_wise, same, 3))


def test_the_readings_differ_when_clients_do():
    methods = FedDRSCGD(0.2, local_steps=2), LevelwiseDRSCGD(0.2, local_steps=2, depth=3)
    one, other = (points(composition(3), m, composed_whole(), 4) for m in methods)
    assert gap(one[-1], other[-1]) > 1e-4


def test_a_recursion_of_rate_one_composes_the_client_s_own_levels():
    """Then nothing is remembered: the estimates are values and gradients on the present batch."""
    alone = Clients(composed_rows()[:1], batch_size=None)
    method = FedDRSCGD(0.2, recursion_rate=1.0, local_steps=2)
    for state, _ in play(composition(3), method, alone, 3):
        batch = alone.to(torch.float64).train.batch(0)
        point = Point(state.server.x, state.server.y)
        grad = composed_gradients(composition(3), point, (batch,) * 3)
        assert near(state.server.momentum[0], grad.x, 1e-13)


# The estimates are the gradient.


@DEPTHS
@pytest.mark.parametrize(("rate", "steps"), [(0.0, 1), (0.3, 3)])
def test_identical_clients_track_the_exact_gradient(depth, rate, steps):
    """Exact functions, no projection: every estimate is what it estimates, after every round."""
    same, problem = Clients([composed_rows()[2]] * 3, batch_size=None), contested(depth)
    rest: dict[str, Any] = {"recursion_rate": rate, "local_steps": steps}
    method = FedDRSCGDA(0.2, 0.3, **rest)
    for state, _ in play(problem, method, same, 3):
        grad = slopes(problem, same, Point(state.server.x, state.server.y))
        assert near(state.server.momentum[0], grad.x)
        assert near(state.server.momentum_y, grad.y)
    # it has not simply arrived
    assert float(grad.x.norm()) > 1e-4  # type: ignore[reportPossiblyUnbound]  # the loop has set it


@DEPTHS
@pytest.mark.parametrize(("rate", "clients"), [(0.0, exact_clients), (0.3, composed_whole)])
def test_any_clients_track_the_exact_gradient_level_by_level(clients, depth, rate):
    """One local step, exact functions: from the first synchronisation on."""
    problem = contested(depth)
    method = LevelwiseDRSCGDA(0.2, 0.3, recursion_rate=rate, local_steps=1, depth=depth)
    before = None
    for state, _ in play(problem, method, clients(), 4):
        if before is not None:
            # The sweeps of a round are at the point that it began with.
            grad = slopes(problem, clients(), before)
            assert near(state.server.momentum[0], grad.x)
            assert near(state.server.momentum_y, grad.y)
        before = Point(state.server.x, state.server.y)


@DEPTHS
def test_fed_dr_scgd_tracks_the_exact_gradient(depth):
    """Without a dual: identical clients as printed, any clients level by level."""
    same, problem = Clients([composed_rows()[2]] * 3, batch_size=None), composition(depth)
    for state, _ in play(problem, FedDRSCGD(0.2, recursion_rate=0.3, local_steps=3), same, 3):
        grad = slopes(problem, same, Point(state.server.x, state.server.y))
        assert near(state.server.momentum[0], grad.x)
    assert float(grad.x.norm()) > 1e-4  # type: ignore[reportPossiblyUnbound]  # the loop has set it
    method = LevelwiseDRSCGD(0.2, recursion_rate=0.3, local_steps=1, depth=depth)
    before, compared = None, 0
    for state, _ in play(problem, method, exact_clients(), 4):
        if before is not None:
            assert near(state.server.momentum[0], slopes(problem, exact_clients(), before).x)
            compared += 1
        before = Point(state.server.x, state.server.y)
    assert compared == 3


@pytest.mark.parametrize("depth", [2, 3, 4, 5])
def test_any_clients_do_not_as_printed(depth):
    method = FedDRSCGD(0.2, recursion_rate=0.3, local_steps=1)
    for state, _ in play(composition(depth), method, exact_clients(), 3):
        grad = slopes(composition(depth), exact_clients(), Point(state.server.x, state.server.y))
        assert float((state.server.momentum[0] - grad.x).norm()) > 1e-3


# The floors that clients far apart leave.


def run(problem: Problem, method: Any, clients: Clients, rounds: int) -> Run:
    options: dict[str, Any] = {"executor": "vectorised", "dtype": torch.float64}
    found = simulate(problem, method, clients, rounds, evaluate_every=rounds, **options)
    assert found.outcome == "finished"
    return found


@cache
def floor(kind: Any, rate: float, steps: int, rounds: int) -> float:
    """The length of grad Phi where a run ends, noise-free."""
    method = kind(0.5 / steps, recursion_rate=rate, local_steps=steps)
    end = run(composition(3), method, exact_clients(), rounds).point
    return float(slopes(composition(3), exact_clients(), end).x.norm())


@pytest.mark.parametrize(
    ("steps", "size"), [(1, 0.111), pytest.param(4, 0.042, marks=pytest.mark.slow)]
)
def test_the_printed_floor_does_not_depend_on_the_rate(steps, size):
    floors = [floor(FedDRSCGD, rate, steps, 140) for rate in (0.9, 0.1)]
    assert floors == pytest.approx([size, size], rel=0.04)
    assert floors[0] == pytest.approx(floor(FedDRSCGD, 0.9, steps, 100), rel=0.02)  # a floor


@pytest.mark.parametrize("rate", [0.9, 0.1])
def test_one_local_step_leaves_no_floor_level_by_level(rate):
    assert floor(LevelwiseDRSCGD, rate, 1, 40) < 1e-10


def test_the_floor_of_local_steps_falls_with_the_rate_level_by_level():
    high, low = (floor(LevelwiseDRSCGD, rate, 4, 100) for rate in (0.3, 0.03))
    assert low < high / 5, (low, high)  # measured 3.0e-2 and 3.9e-3
    assert high < floor(FedDRSCGD, 0.1, 4, 140)


@pytest.mark.parametrize("depth", [2, 3])
def test_the_saddle_is_reached_level_by_level_and_not_as_printed(depth):
    problem, ends = contested(depth), {}
    for kind in (FedDRSCGDA, LevelwiseDRSCGDA):
        method = kind(0.5, 0.5, recursion_rate=0.3, local_steps=1)
        end = run(problem, method, exact_clients(), 70).point
        ends[kind] = float(torch.cat(list(slopes(problem, exact_clients(), end))).norm())
    assert ends[LevelwiseDRSCGDA] < 1e-10
    assert ends[FedDRSCGDA] > 1e-2


# The projections.


@pytest.mark.parametrize("rate", [0.95, 0.5, 0.1])
@DEPTHS
def test_the_third_shrinks_what_it_projects(depth, rate):
    """At a fixed x momentum^k converges to (a / (2 + a))^(K - k + 1) times its value."""
    alone = Clients(composed_rows()[:1], batch_size=None).to(torch.float64)
    problem, method = composition(depth), FedDRSCGD(0.0, recursion_rate=rate, projection="third")
    draw = (alone.train.batch(0),) * depth
    start = Point(*(v.double() for v in problem.start()))
    first = method.init_client(problem, start, draw)
    client = first
    for _ in range(60):
        client = method.local_step(problem, start, client, draw, Clock.at())
    for level, (found, true) in enumerate(zip(client.momentum, first.momentum, strict=True), 1):
        shrunk = (rate / (2 + rate)) ** (depth - level + 1)
        assert near(found / shrunk, true, 1e-6)


def test_the_ball_of_a_level_has_the_radius_of_lemma_c_1():
    problem, method = composition(3), FedDRSCGD(0.1, projection="ball", radius=0.3, local_steps=2)
    start = Point(*(v.double() for v in problem.start()))
    batch = (composed().to(torch.float64).train.batch(0),) * 3
    client = method.init_client(problem, start, batch)
    client = method.local_step(problem, start, client, batch, Clock.at())
    lengths = [float(v.norm()) for v in client.momentum]
    assert lengths == pytest.approx([0.3**3, 0.3**2, 0.3])
    wide = replace(method, radius=1e3)
    a, b = (points(problem, m, composed(), 3) for m in (wide, replace(method, projection="none")))
    alike(a, b, 0.0)  # a ball that nothing leaves


# What is refused, and what it costs.


def made(kind: Any = FedDRSCGD, **settings: Any) -> Callable[[], Any]:
    return lambda: kind(**settings)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (made(recursion_rate=1.5), "recursion_rate is 1.5; give a weight of at most 1"),
        (made(recursion_rate=-0.1), "recursion_rate is -0.1; give a finite number of at least 0"),
        (made(lr=float("nan")), "lr is nan; give a finite number"),
        (made(local_steps=0), "local_steps is 0; give a whole number of at least 1"),
        (made(first_batches=0), "first_batches is 0; give a whole number of at least 1"),
        (made(projection="half"), "projection is 'half'; give none or ball or third"),
        (made(radius=0.0), "radius is 0.0; give a finite number above 0"),
        (made(radius="wide"), "radius is 'wide'; give a finite number above 0"),
        (made(LevelwiseDRSCGD, depth=0), "depth is 0; give a whole number of at least 1"),
        (made(LevelwiseDRSCGD, depth=True), "depth is True; give a whole number of at least 1"),
        (made(FedDRSCGDA, dual_lr=-1.0), "dual_lr is -1.0; give a finite number"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, told):
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        make()


def test_a_dual_is_refused_by_the_method_that_only_minimises():
    with pytest.raises(ValueError, match="FedDRSCGD only minimises, but Composition also has a"):
        simulate(contested(2), FedDRSCGD(), composed(), 1)


def test_a_depth_that_is_not_the_problem_s_is_refused_before_the_first_round():
    with pytest.raises(ValueError, match="depth is 2, but Composition has depth 3: leave it out"):
        simulate(composition(3), LevelwiseDRSCGD(depth=2), composed(), 1)
    told, asked = (LevelwiseDRSCGD(depth=depth) for depth in (3, None))
    a, b = (run(composition(3), method, composed(), 3).point for method in (told, asked))
    assert gap(a, b) == 0
    with pytest.raises(ValueError, match="has to know how many levels there are: give depth="):
        LevelwiseDRSCGD().phases(1)


def test_the_same_floats_in_two_k_exchanges_in_the_place_of_one():
    """An iteration is two sweeps, each a gradient of every level; a move needs none."""
    costs = {}
    for kind in (FedDRSCGD, LevelwiseDRSCGD):
        method = kind(0.1, local_steps=3)
        first, last = (run(composition(3), method, composed(), r).history[-1] for r in (1, 2))
        names = ("bytes_up", "bytes_down", "exchanges", "gradients")
        costs[kind] = {name: last[name] - first[name] for name in names}
    sent = 5 * 8 * (2 * WIDTHS[0] + 2 * (WIDTHS[1] + WIDTHS[2]))
    usual = {"bytes_up": sent, "bytes_down": sent, "gradients": 5 * 3 * 2 * 3}
    assert costs[FedDRSCGD] == {**usual, "exchanges": 1}
    assert costs[LevelwiseDRSCGD] == {**usual, "exchanges": 6}


@pytest.mark.parametrize("kind", [FedDRSCGD, LevelwiseDRSCGD])
def test_floats_of_the_paper_s_portfolio(kind):
    """4 d + 6, 406 for 100 assets, both ways."""
    clients = Clients(Returns(2, 100, 6).client_rows(), batch_size=1)
    method = kind(1e-3, local_steps=2)
    short, long = (run(Portfolio(100), method, clients, r).history[-1] for r in (1, 2))
    for way in ("bytes_up", "bytes_down"):
        assert (long[way] - short[way]) / 8 / 2 == 406


def test_the_exchanges_of_one_iteration_see_the_same_rows_and_each_level_its_own():
    seen: dict[tuple[int, int], list[Tensor]] = {}

    def watched(phase: Phase) -> Phase:
        def local_step(*given: Any) -> Any:
            batch, clock = given[-2:]
            here = int(clock.round), int(clock.client)
            seen.setdefault(here, []).append(torch.stack([b.weight @ b.rows[-1] for b in batch]))
            return phase.local_step(*given)

        return phase._replace(local_step=local_step)

    class Watched(LevelwiseDRSCGD):
        def phases(self, round: int) -> tuple[Phase, ...]:
            return tuple(map(watched, super().phases(round)))

    list(play(composition(3), Watched(0.1, local_steps=1, depth=3), composed(), 4))
    assert {number for number, _ in seen} == {1, 2, 3}
    for batches in seen.values():
        assert len(batches) == 5
        assert all(torch.equal(batch, batches[0]) for batch in batches)
    largest = 2  # the client with more rows than three batches
    assert not torch.equal(seen[1, largest][0], seen[2, largest][0])
    assert not torch.equal(seen[1, largest][0][0], seen[1, largest][0][1])


def test_a_client_that_comes_later_starts_at_the_server_s_point(monkeypatch):
    """Level by level too, a round's first exchange sends the point down."""
    begun: list[Any] = []
    plain = LevelwiseDRSCGDA.init_client

    def spied(self: Any, *rest: Any) -> Any:
        begun.append(plain(self, *rest))
        return begun[-1]

    monkeypatch.setattr(LevelwiseDRSCGDA, "init_client", spied)
    method = LevelwiseDRSCGDA(0.2, 0.2, local_steps=2, depth=2)
    federation, state, store = federation_of(contested(2), method, composed_whole(), cohort=2)
    late = 0
    for _ in range(6):
        before, start = len(begun), state.server
        state = play_round(federation, state, store, Debug())
        for client in begun[before:]:
            assert torch.equal(client.x, start.x)
            assert torch.equal(client.y, start.y)
            late += before > 0
    assert late
