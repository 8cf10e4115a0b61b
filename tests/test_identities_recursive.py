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

from fedminimax.algorithms._recursive import DoublyRecursive, Levels, opened
from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.fed_dr_scgda import FedDRSCGDA
from fedminimax.algorithms.fgda import FGDA
from fedminimax.data.clients import Clients
from fedminimax.data.returns import Returns
from fedminimax.engine.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.engine.simulate import Run, simulate
from fedminimax.problems.functions import Composition
from fedminimax.problems.gradients import composed_gradients
from fedminimax.problems.portfolio import Portfolio
from fedminimax.types import Clock, Point, Problem

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
SYNC = pytest.mark.parametrize("sync", ["printed", "levelwise"])
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

    def phi(x: Tensor, y: Tensor) -> Tensor:
        for level in range(1, problem.depth):
            x = torch.stack([problem.inner(level, x, batch) for batch in batches]).mean(0)
        return torch.stack([problem.outer(x, y, batch) for batch in batches]).mean(0)

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
    ours = FedDRSCGDA(**rates, recursion_rate=0.3, first_batches=2, sync="printed")
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
    ours = FedDRSCGDA(**rates, recursion_rate=0.3, depth=1)
    theirs = OneFirstBatch(**rates, primal_rate=0.3, dual_rate=0.3, sync="reaverage")
    alike(points(problem(), ours, clients(), 4), points(problem(), theirs, clients(), 4))


@SYNC
@STEPS
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_without_a_dual_the_minimax_method_is_fed_dr_scgd(depth, steps, sync):
    rest: dict[str, Any] = {"recursion_rate": 0.3, "local_steps": steps, "sync": sync}
    rest |= {"depth": depth, "projection": "ball", "radius": 0.7}
    both, one = FedDRSCGDA(0.2, 0.7, **rest), FedDRSCGD(0.2, **rest)
    a, b = (points(composition(depth), m, composed_by_size(), 4) for m in (both, one))
    alike(a, b, 0.0)


@SYNC
@STEPS
def test_a_dual_that_does_not_matter_leaves_x_alone(steps, sync):
    """The last level is a function of its input plus one of y."""

    def apart(value: Tensor, y: Tensor, batch: Any) -> Tensor:
        return composition(2).outer(value, y[:0], batch) - 0.5 * y @ y + y.sum()

    problem = Composition([*composition(2).levels[:-1], apart], composition(2).start().x, [0.0])
    rest: dict[str, Any] = {"local_steps": steps, "sync": sync, "depth": 2}
    found = points(problem, FedDRSCGDA(0.2, 0.3, **rest), composed(), 4)
    alone = points(composition(2), FedDRSCGD(0.2, **rest), composed(), 4)
    assert all(near(a.x, b.x, 1e-13) for a, b in zip(found, alone, strict=True))
    assert float(found[-1].y) > 0.1


@STEPS
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_readings_agree_when_clients_do(depth, steps):
    same = Clients([composed_rows()[0]] * 3, batch_size=None)
    rest: dict[str, Any] = {"local_steps": steps, "depth": depth}
    alike(
        points(contested(depth), FedDRSCGDA(0.2, 0.3, **rest, sync="printed"), same, 3),
        points(contested(depth), FedDRSCGDA(0.2, 0.3, **rest, sync="levelwise"), same, 3),
    )


def test_the_readings_differ_when_clients_do():
    rest: dict[str, Any] = {"local_steps": 2, "depth": 3}
    one, other = (
        points(composition(3), FedDRSCGD(0.2, sync=sync, **rest), composed_whole(), 4)
        for sync in ("printed", "levelwise")
    )
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
    method = FedDRSCGDA(0.2, 0.3, **rest, sync="printed")
    for state, _ in play(problem, method, same, 3):
        grad = slopes(problem, same, Point(state.server.x, state.server.y))
        assert near(state.server.momentum[0], grad.x)
        assert near(state.server.momentum_y, grad.y)
    assert float(grad.x.norm()) > 1e-4  # it has not simply arrived


@DEPTHS
@pytest.mark.parametrize(("rate", "clients"), [(0.0, exact_clients), (0.3, composed_whole)])
def test_any_clients_track_the_exact_gradient_level_by_level(clients, depth, rate):
    """One local step, exact functions: from the first synchronisation on."""
    problem = contested(depth)
    method = FedDRSCGDA(0.2, 0.3, recursion_rate=rate, local_steps=1, depth=depth)
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
    assert float(grad.x.norm()) > 1e-4
    method = FedDRSCGD(0.2, recursion_rate=0.3, local_steps=1, sync="levelwise", depth=depth)
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


# The floors that clients far apart leave (algorithms.md, section 9).


def run(problem: Problem, method: Any, clients: Clients, rounds: int) -> Run:
    options: dict[str, Any] = {"executor": "vectorised", "dtype": torch.float64}
    found = simulate(problem, method, clients, rounds, evaluate_every=rounds, **options)
    assert found.outcome == "finished"
    return found


@cache
def floor(sync: Any, rate: float, steps: int, rounds: int) -> float:
    """The length of grad Phi where a run ends, noise-free."""
    rest: dict[str, Any] = {"local_steps": steps, "sync": sync, "depth": 3}
    method = FedDRSCGD(0.5 / steps, recursion_rate=rate, **rest)
    end = run(composition(3), method, exact_clients(), rounds).point
    return float(slopes(composition(3), exact_clients(), end).x.norm())


@pytest.mark.parametrize(("steps", "size"), [(1, 0.111), (4, 0.042)])
def test_the_printed_floor_does_not_depend_on_the_rate(steps, size):
    floors = [floor("printed", rate, steps, 140) for rate in (0.9, 0.1)]
    assert floors == pytest.approx([size, size], rel=0.04)
    assert floors[0] == pytest.approx(floor("printed", 0.9, steps, 100), rel=0.02)  # a floor


@pytest.mark.parametrize("rate", [0.9, 0.1])
def test_one_local_step_leaves_no_floor_level_by_level(rate):
    assert floor("levelwise", rate, 1, 40) < 1e-10


def test_the_floor_of_local_steps_falls_with_the_rate_level_by_level():
    high, low = (floor("levelwise", rate, 4, 100) for rate in (0.3, 0.03))
    assert low < high / 5, (low, high)  # measured 3.0e-2 and 3.9e-3
    assert high < floor("printed", 0.1, 4, 140)


@pytest.mark.parametrize("depth", [2, 3])
def test_the_saddle_is_reached_level_by_level_and_not_as_printed(depth):
    problem, ends = contested(depth), {}
    rest: dict[str, Any] = {"recursion_rate": 0.3, "local_steps": 1, "depth": depth}
    for sync in ("printed", "levelwise"):
        method = FedDRSCGDA(0.5, 0.5, **rest, sync=sync)  # type: ignore[arg-type]
        end = run(problem, method, exact_clients(), 70).point
        ends[sync] = float(torch.cat(list(slopes(problem, exact_clients(), end))).norm())
    assert ends["levelwise"] < 1e-10
    assert ends["printed"] > 1e-2


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
    client = opened(first)
    for _ in range(60):
        client = method.local_step(problem, None, client, draw, Clock.at())
    for level, (found, true) in enumerate(zip(client.momentum, first.momentum, strict=True), 1):
        shrunk = (rate / (2 + rate)) ** (depth - level + 1)
        assert near(found / shrunk, true, 1e-6)


def test_the_ball_of_a_level_has_the_radius_of_lemma_c_1():
    problem, method = composition(3), FedDRSCGD(0.1, projection="ball", radius=0.3, local_steps=2)
    start = Point(*(v.double() for v in problem.start()))
    batch = (composed().to(torch.float64).train.batch(0),) * 3
    client = opened(method.init_client(problem, start, batch))
    client = method.local_step(problem, None, client, batch, Clock.at())
    lengths = [float(v.norm()) for v in client.momentum]
    assert lengths == pytest.approx([0.3**3, 0.3**2, 0.3])
    wide = replace(method, radius=1e3)
    a, b = (points(problem, m, composed(), 3) for m in (wide, replace(method, projection="none")))
    alike(a, b, 0.0)  # a ball that nothing leaves


# What is refused, and what it costs.


def made(**settings: Any) -> Callable[[], DoublyRecursive]:
    return lambda: FedDRSCGD(**settings)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (made(recursion_rate=1.5), "recursion_rate is 1.5; give a weight of at most 1"),
        (made(recursion_rate=-0.1), "recursion_rate is -0.1; give a finite number of at least 0"),
        (made(lr=float("nan")), "lr is nan; give a finite number"),
        (made(local_steps=0), "local_steps is 0; give a whole number of at least 1"),
        (made(first_batches=0), "first_batches is 0; give a whole number of at least 1"),
        (made(projection="half"), "projection is 'half'; give none or ball or third"),
        (made(sync="never"), "sync is 'never'; give printed or levelwise"),
        (made(radius=0.0), "radius is 0.0; give a finite number above 0"),
        (made(radius="wide"), "radius is 'wide'; give a finite number above 0"),
        (made(depth=0), "depth is 0; give a whole number of at least 1"),
        (made(depth=True), "depth is True; give a whole number of at least 1"),
        (lambda: FedDRSCGDA(dual_lr=-1.0), "dual_lr is -1.0; give a finite number"),
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
        simulate(composition(3), FedDRSCGD(sync="levelwise", depth=2), composed(), 1)
    told, asked = (FedDRSCGD(sync="levelwise", depth=depth) for depth in (3, None))
    a, b = (run(composition(3), method, composed(), 3).point for method in (told, asked))
    assert gap(a, b) == 0
    with pytest.raises(ValueError, match="has to know how many levels there are: give depth="):
        FedDRSCGD(sync="levelwise").phases(1)


def test_the_same_floats_in_two_k_exchanges_in_the_place_of_one():
    """An iteration is two sweeps, each a gradient of every level; a move needs none."""
    costs = {}
    for sync in ("printed", "levelwise"):
        method = FedDRSCGD(0.1, local_steps=3, sync=sync, depth=3)
        first, last = (run(composition(3), method, composed(), r).history[-1] for r in (1, 2))
        names = ("bytes_up", "bytes_down", "exchanges", "gradients")
        costs[sync] = {name: last[name] - first[name] for name in names}
    sent = 5 * 8 * (2 * WIDTHS[0] + 2 * (WIDTHS[1] + WIDTHS[2]))
    usual = {"bytes_up": sent, "bytes_down": sent, "gradients": 5 * 3 * 2 * 3}
    assert costs["printed"] == {**usual, "exchanges": 1}
    assert costs["levelwise"] == {**usual, "exchanges": 6}


@SYNC
def test_floats_of_the_paper_s_portfolio(sync):
    """4 d + 6 (algorithms.md, section 2.3), 406 for 100 assets, both ways."""
    clients = Clients(Returns(2, 100, 6).client_rows(), batch_size=1)
    method = FedDRSCGD(1e-3, local_steps=2, sync=sync)
    short, long = (run(Portfolio(100), method, clients, r).history[-1] for r in (1, 2))
    for way in ("bytes_up", "bytes_down"):
        assert (long[way] - short[way]) / 8 / 2 == 406


def test_the_exchanges_of_one_iteration_see_the_same_rows_and_each_level_its_own(monkeypatch):
    seen: dict[tuple[int, int], list[Tensor]] = {}

    def spied(name: str) -> Callable[..., Any]:
        plain = getattr(DoublyRecursive, name)

        def track(self: Any, *rest: Any) -> Any:
            batch, clock = rest[-2:]
            here = int(clock.round), int(clock.client)
            seen.setdefault(here, []).append(torch.stack([b.weight @ b.rows[-1] for b in batch]))
            return plain(self, *rest)

        return track

    for name in ("track_inner", "track_outer", "track_momentum"):
        monkeypatch.setattr(DoublyRecursive, name, spied(name))
    list(
        play(
            composition(3), FedDRSCGD(0.1, local_steps=1, sync="levelwise", depth=3), composed(), 4
        )
    )
    assert {number for number, _ in seen} == {1, 2, 3}
    for batches in seen.values():
        assert len(batches) == 5
        assert all(torch.equal(batch, batches[0]) for batch in batches)
    largest = 2  # the client with more rows than three batches
    assert not torch.equal(seen[1, largest][0], seen[2, largest][0])
    assert not torch.equal(seen[1, largest][0][0], seen[1, largest][0][1])


def test_a_client_that_comes_later_starts_at_the_server_s_point(monkeypatch):
    """Level by level too, a round's first exchange sends the point down."""
    begun: list[Levels] = []
    plain = DoublyRecursive.init_client

    def spied(self: Any, *rest: Any) -> Levels:
        begun.append(plain(self, *rest))
        return begun[-1]

    monkeypatch.setattr(DoublyRecursive, "init_client", spied)
    method = FedDRSCGDA(0.2, 0.2, local_steps=2, depth=2)
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
