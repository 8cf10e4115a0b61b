"""What ties the methods with momentum, STORM estimates or a snapshot to others and to theory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from rows import (
    auc,
    federation_of,
    labelled,
    noise_free,
    noisy,
    noisy_by_size,
    noisy_rows,
    play,
    quadratic,
    robust_least_squares,
    wide_quadratic,
)

from fedminimax.algorithms._tracked import FourVectors
from fedminimax.algorithms.ada_fgda import AdaFGDA
from fedminimax.algorithms.fed_dr_scgd import FedDRSCGD
from fedminimax.algorithms.fedsgda_m import FedSGDAM
from fedminimax.algorithms.fedsgda_plus import FedSGDAPlus
from fedminimax.algorithms.fgda import FGDA
from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.local_sgda_plus import LocalSGDAPlus
from fedminimax.algorithms.local_sgdam import LocalSGDAM
from fedminimax.algorithms.local_sgdam_plus import LocalSGDAMPlus
from fedminimax.algorithms.nlasg import NLASG
from fedminimax.blocks.adaptive import SCALES, AdaBelief, AdaGradNorm, Adam, AMSGrad, Identity
from fedminimax.blocks.schedules import InverseRoot
from fedminimax.blocks.storm import storm
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.vectorised import Vectorised
from fedminimax.engine.round import State, play_round
from fedminimax.engine.simulate import simulate
from fedminimax.engine.state.store import Store
from fedminimax.problems.functions import Minimax
from fedminimax.problems.gradients import gradients
from fedminimax.types import Algorithm, Cost, Phase, Point, Problem

STORM: dict[str, Any] = {
    "primal_lr": 0.1,
    "dual_lr": 0.2,
    "primal_rate": 0.3,
    "dual_rate": 0.6,
    "local_steps": 3,
}
PROBLEMS = pytest.mark.parametrize(
    ("problem", "clients"), [(quadratic, noisy), (quadratic, noisy_by_size), (auc, labelled)]
)
SYNC = pytest.mark.parametrize("sync", ["track", "reaverage", "literal"])


def points(problem: Problem, algorithm: Algorithm, clients: Clients, rounds: int) -> list[Point]:
    """The server's point after every round."""
    return [algorithm.point(state.server) for state, _ in play(problem, algorithm, clients, rounds)]


def gap(a: Point, b: Point) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


def alike(one: list[Point], other: list[Point], within: float = 1e-13) -> None:
    assert max(gap(a, b) for a, b in zip(one, other, strict=True)) <= within
    assert gap(one[0], one[-1]) > 1e-4  # and it moved


def copies() -> Clients:
    """Identical clients with all their rows: local steps lose nothing."""
    return Clients([noisy_rows()[0]] * 3, batch_size=None)


# One method is another.


@PROBLEMS
@SYNC
def test_ada_fgda_with_the_identity_is_fgda(problem, clients, sync):
    plain = FGDA(**STORM, lr=0.7, sync=sync)
    scaled: dict[str, Any] = {"lr": 0.7, "sync": sync}
    one = points(problem(), AdaFGDA(**STORM, **scaled, scale="identity"), clients(), 3)
    alike(one, points(problem(), plain, clients(), 3), 0.0)
    other = points(problem(), AdaFGDA(**STORM, **scaled, scale="adam"), clients(), 3)
    assert gap(one[-1], other[-1]) > 1e-3


@dataclass(frozen=True)
class WithoutFirstAverage(FedSGDAM):
    """FedSGDA-M whose first estimates stay where they are made."""

    def phases(self, round: int) -> tuple[Phase, ...]:
        return FourVectors.phases(self, round)


@dataclass(frozen=True)
class WholeFirstRound(FGDA):
    """FGDA that synchronises one iteration later than the box."""

    @property
    def init_batches(self) -> int:  # type: ignore[override]
        return 1

    def steps(self, round: int, client: int) -> int:
        return self.local_steps


@PROBLEMS
def test_fedsgda_m_is_fgda_but_for_the_first_round(problem, clients):
    late = points(problem(), WholeFirstRound(**STORM, lr=1.0), clients(), 3)
    alike(points(problem(), WithoutFirstAverage(**STORM), clients(), 3), late)
    assert gap(points(problem(), FedSGDAM(**STORM), clients(), 3)[-1], late[-1]) > 1e-6


@PROBLEMS
def test_storm_of_rate_one_is_momentum_of_weight_one(problem, clients):
    plain = {**STORM, "primal_rate": 1.0, "dual_rate": 1.0}
    alike(
        points(problem(), WithoutFirstAverage(**plain), clients(), 3),
        points(problem(), LocalSGDAM(**plain, lr=1.0), clients(), 3),
    )


DELAYED = [
    LocalSGDAM(0.5, 0.2, 0.4, 2.0, 2.0, local_steps=3),  # beta * eta = 1
    FedSGDAM(0.1, 0.2, 1.0, 1.0, local_steps=3),
]


@pytest.mark.parametrize("method", DELAYED, ids=["sgdam", "fedsgda-m"])
def test_weight_one_is_local_sgda_one_index_later(method):
    """The gradient used is the one made at the end of the step before: with identical clients and
    whole batches nobody can tell; a first round cannot tell either, if nothing was averaged."""
    plain = LocalSGDA(0.1, 0.2, local_steps=3)
    alike(points(quadratic(), method, copies(), 4), points(quadratic(), plain, copies(), 4))
    whole = Clients(noisy_rows(), batch_size=None)
    late, now = (points(quadratic(), m, whole, 2) for m in (method, plain))
    if isinstance(method, LocalSGDAM):
        assert gap(late[0], now[0]) < 1e-13
    assert gap(late[1], now[1]) > 1e-4


@pytest.mark.parametrize("sync", ["track", "reaverage"])  # "literal" uses a gradient twice
def test_fgda_of_rate_one_is_local_sgda_one_index_later(sync):
    """After its rounds of q - 1, q, q, ... steps: those of LocalSGDA with one step a round."""
    method = FGDA(0.5, 0.2, 0.4, 1.0, 1.0, local_steps=3, sync=sync)
    single = points(quadratic(), LocalSGDA(0.1, 0.2, local_steps=1), copies(), 9)
    # "reaverage" returns the point after the move of the synchronisation.
    reached = (2, 5, 8) if sync == "track" else (3, 6, 9)
    alike(points(quadratic(), method, copies(), 3), [single[t - 1] for t in reached])


def delayed_sgda(problem: Problem, clients: Clients, method: FGDA, rounds: int) -> list[Point]:
    """LocalSGDA whose gradient is made at the end of the step before, and averaged with the point:
    with "track" where the clients then are, else where the averages have brought them all."""
    federation, state, _ = federation_of(problem, method, clients)
    problem, everyone, w = federation.problem, np.arange(len(clients)), federation.weights
    primal, dual = method.lr * method.primal_lr, method.lr * method.dual_lr  # type: ignore[operator]

    def mean(values: list[Point]) -> Point:
        return Point(*(torch.tensordot(w, torch.stack(v), 1) for v in zip(*values, strict=True)))

    def move(at: Point, slope: Point) -> Point:
        return Point(at.x - primal * slope.x, at.y + dual * slope.y)

    assert federation.first_sampler is not None
    first, start = (
        federation.first_sampler.draw(everyone, 0, 1),
        Point(state.server.x, state.server.y),
    )
    slopes = [gradients(problem, start, first.client(k, 0, 1)) for k in range(len(clients))]
    point, t, found = start, 0, []
    for number in range(rounds):
        steps = method.steps(number, 0)
        ends, drawn = [], federation.sampler.draw(everyone, t, max(steps, 1))
        for k in range(len(clients)):
            at, slope = point, slopes[k]
            for step in range(steps):
                at = move(at, slope)
                slope = gradients(problem, at, drawn.client(k, step, 1))
            ends.append((at, slope))
        point, slope = (mean(list(v)) for v in zip(*ends, strict=True))
        t += steps
        if method.sync != "track":
            point = move(point, slope)
        if method.sync == "reaverage":
            drawn = federation.sampler.draw(everyone, t, 1)
            slope = mean(
                [gradients(problem, point, drawn.client(k, 0, 1)) for k in range(len(clients))]
            )
            t += 1
        slopes = [slope] * len(clients)
        found.append(point)
    return found


@PROBLEMS
@SYNC
def test_fgda_of_rate_one_is_local_sgda_with_the_gradient_of_the_step_before(
    problem, clients, sync
):
    """With clients and batches that differ, so that the delay shows."""
    method = FGDA(0.5, 0.2, 0.4, 1.0, 1.0, local_steps=3, sync=sync)
    ours = points(problem(), method, clients(), 4)
    alike(ours, delayed_sgda(problem(), clients(), method, 4), 1e-12)
    now = points(problem(), LocalSGDA(0.1, 0.2, local_steps=3), clients(), 4)
    assert gap(ours[-1], now[-1]) > 1e-4


def test_the_readings_agree_when_clients_do():
    """Own vectors and averages are then the same: at t = 3, 6, ... and after the move there."""
    track, again = (
        points(quadratic(), FGDA(**STORM, lr=0.8, sync=sync), copies(), 4)
        for sync in ("track", "reaverage")
    )
    fine = points(quadratic(), FGDA(**{**STORM, "local_steps": 1}, lr=0.8), copies(), 13)
    alike(track, [fine[t - 1] for t in (3, 6, 9, 12)])
    alike(again, [fine[t] for t in (3, 6, 9, 12)])


@PROBLEMS
def test_fedsgda_plus_without_server_rate_is_local_sgda_plus(problem, clients):
    one = FedSGDAPlus(0.1, 0.2, local_steps=2, server_lr=1.0, snapshot_rounds=2)
    alike(
        points(problem(), one, clients(), 5),
        points(problem(), LocalSGDAPlus(0.1, 0.2, local_steps=2), clients(), 5),
    )
    far = points(problem(), replace(one, server_lr=1.5), clients(), 5)
    assert gap(far[-1], points(problem(), one, clients(), 5)[-1]) > 1e-4


@PROBLEMS
def test_a_snapshot_in_every_step_is_no_snapshot(problem, clients):
    plus, plain = LocalSGDAPlus(0.1, 0.2, local_steps=1), LocalSGDA(0.1, 0.2, local_steps=1)
    alike(points(problem(), plus, clients(), 4), points(problem(), plain, clients(), 4), 1e-12)
    longer = LocalSGDA(0.1, 0.2, local_steps=3), LocalSGDAPlus(0.1, 0.2, local_steps=3)
    a, b = (points(problem(), method, clients(), 4)[-1] for method in longer)
    assert gap(a, b) > 1e-5


def test_a_snapshot_does_not_matter_to_players_that_never_meet():
    """f(x, y) = |x - a|^2 - |y - b|^2: the gradient in y is the same at every x."""

    def apart() -> Minimax:
        def f(x, y, batch):
            a = batch.mean(batch.rows[1])
            return ((x - a) ** 2).sum() - ((y + a) ** 2).sum()

        return Minimax(f, torch.zeros(3), torch.zeros(3))

    for plain, plus in (
        (LocalSGDA(0.1, 0.2, 3), LocalSGDAPlus(0.1, 0.2, 3)),
        (LocalSGDAM(local_steps=3), LocalSGDAMPlus(local_steps=3)),
    ):
        alike(points(apart(), plain, noisy(), 5), points(apart(), plus, noisy(), 5))
        a, b = (points(quadratic(), method, noisy(), 5)[-1] for method in (plain, plus))
        assert gap(a, b) > 1e-5


def test_the_snapshot_stays_until_its_period_is_over():
    method = LocalSGDAPlus(0.1, 0.2, local_steps=2, snapshot_every=6)
    plus = LocalSGDAMPlus(local_steps=2, snapshot_every=6)
    for algorithm in (method, plus):
        before, kept = quadratic().start().x.double(), []
        starts = []
        for state, store in play(quadratic(), algorithm, noisy(), 8):
            starts.append(before)
            before = state.server.x
            kept.append([states[-1] for states in store.states.values()])
        for round, snapshots in enumerate(kept):
            for snapshot in snapshots:
                assert torch.equal(snapshot, starts[round - round % 3])


# The floor that clients far apart leave: s = 10, q = 20, step 0.02.


def fixed_point(algorithm: Algorithm) -> Point:
    """Where rounds end that are affine in what the server holds and the same in each coordinate.

    One round from 0 and one from each direction give the map; its fixed point needs no patience.
    """
    federation, first, _ = federation_of(wide_quadratic(), algorithm, noise_free())
    zero = type(first.server)(*(torch.zeros_like(v) for v in first.server))

    def played(server: Any) -> np.ndarray:
        # Round 1: a first round is not like the others.
        state = State(1, 0, server, Cost())
        after = play_round(federation, state, Store(algorithm.keep), Vectorised())
        return torch.stack(list(after.server)).numpy()

    rest = played(zero)
    columns = [
        (played(zero._replace(**{name: torch.ones_like(vector)})) - rest)[:, 0]
        for name, vector in zip(zero._fields, zero, strict=True)
    ]
    slope = np.stack(columns, axis=1)
    assert np.abs(np.linalg.eigvals(slope)).max() < 1  # runs do arrive there
    end = np.linalg.solve(np.eye(len(slope)) - slope, rest)
    found = played(type(zero)(*map(torch.from_numpy, end)))
    assert np.abs(found - end).max() < 1e-10 * max(1.0, np.abs(end).max())
    return algorithm.point(type(zero)(*map(torch.from_numpy, end)))


def means() -> tuple[torch.Tensor, torch.Tensor]:
    """The means of t and b over the clients that are far apart."""
    clients = noise_free().to(torch.float64)
    rows = [clients.train.rows(k) for k in range(len(clients))]
    return torch.stack([r[0][0] for r in rows]).mean(0), torch.stack([r[1][0] for r in rows]).mean(
        0
    )


@cache
def floor(algorithm: Algorithm) -> float:
    """The distance from the saddle, both players together."""
    best = wide_quadratic().saddle(*means())
    pairs = zip(fixed_point(algorithm), best, strict=True)
    return float(sum((p - q).square().sum() for p, q in pairs)) ** 0.5


RATES = (0.5, 0.1, 0.02, 0.005)


def storm_of(kind: Callable[..., Algorithm], rate: float, **options: Any) -> Algorithm:
    step = {"primal_lr": 0.02, "dual_lr": 0.02, "local_steps": 20}
    return kind(**step, primal_rate=rate, dual_rate=rate, **options)


def test_sync_then_track_keeps_local_sgda_s_floor_at_every_rate():
    plain = floor(LocalSGDA(0.02, 0.02, local_steps=20))
    assert plain > 1e-3
    for kind in (FGDA, FedSGDAM):
        floors = [floor(storm_of(kind, rate)) for rate in RATES]
        assert all(0.5 * plain < found <= plain for found in floors), (kind, plain, floors)
        assert floors == sorted(floors, reverse=True)
        # Four times slower, and nothing is gained.
        assert floors[-1] > 0.9 * floors[-2]


def test_reaverage_falls_in_proportion_to_the_rate():
    plain = floor(LocalSGDA(0.02, 0.02, local_steps=20))
    floors = [floor(storm_of(FGDA, rate, sync="reaverage")) for rate in RATES]
    assert floors == sorted(floors, reverse=True)
    assert floors[0] < plain
    ratios = [a / b for a, b in pairwise(floors)]
    assert 3 < ratios[-1] <= 4.2, floors  # rates 0.02 and 0.005: in proportion
    assert 2.5 < ratios[-2] <= 5.2, floors  # 0.1 and 0.02: nearly
    assert floors[-1] < plain / 15
    tracked = [floor(storm_of(FGDA, rate)) for rate in RATES]
    assert all(a < b for a, b in zip(floors, tracked, strict=True))


def test_the_fixed_point_is_where_a_run_arrives():
    for sync in ("track", "reaverage"):
        algorithm = FGDA(1.0, 0.04, 0.1, 0.3, 0.3, local_steps=5, sync=sync)
        options: dict[str, Any] = {"executor": "vectorised", "dtype": torch.float64}
        run = simulate(wide_quadratic(), algorithm, noise_free(), 40, evaluate_every=40, **options)
        assert run.history[-1]["train"]["distance"] == pytest.approx(floor(algorithm), rel=1e-3)


# The two readings, looked at from inside.


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_reaverage_keeps_the_recursion_of_lemma_8(rate):
    """The mean estimate minus the mean gradient where it was made shrinks by 1 - rate a step,
    synchronisations included. Noise-free it begins at 0, and stays there however far the clients
    drift apart in between."""
    method = FGDA(1.0, 0.05, 0.05, rate, rate, local_steps=4, sync="reaverage")
    t, b = means()
    moved = wide_quadratic().start()
    for state, _ in play(wide_quadratic(), method, noise_free(), 3):
        x, y, momentum_x, momentum_y = state.server
        # All clients begin the next round at the server's point, so the gradients are taken there.
        assert float((momentum_x - (10.0 * x - t * y)).abs().max()) < 1e-11
        assert float((momentum_y - (b - y - t * x)).abs().max()) < 1e-11
        assert float((x - moved.x).abs().max()) > 1e-3
        moved = state.server


# Scales.


def test_scales_follow_their_formulas():
    w = [torch.tensor([3.0, -1.0]), torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.0])]

    def run(rule) -> list[list[float]]:
        memory, out = rule.start(w[0]), []
        for m in w:
            memory = rule.update(memory, m)
            out.append(rule.diagonal(memory).double().tolist())
        return out

    def averaged(squares: list[list[float]], largest: bool = False) -> list[list[float]]:
        a, top, out = np.zeros(2), np.zeros(2), []
        for s in squares:
            a = 0.75 * a + 0.25 * np.array(s)
            top = np.maximum(top, a)
            out.append((np.sqrt(top if largest else a) + 0.5).tolist())
        return out

    squares = [[9, 1], [1, 4], [0.25, 0]]
    changes = [[9, 1], [4, 1], [0.25, 4]]
    cases = {
        Adam: averaged(squares),
        AMSGrad: averaged(squares, largest=True),
        AdaBelief: averaged(changes),
        AdaGradNorm: [[np.sqrt(s) + 0.5] for s in (10, 15, 15.25)],
        Identity: [[1.0]] * 3,
    }
    assert set(cases) == set(SCALES.values())
    for kind, expected in cases.items():
        found = run(kind(rate=0.25, floor=0.5))
        for f, e in zip(found, expected, strict=True):
            assert f == pytest.approx(e, rel=1e-6), kind


def test_a_scaled_step_does_not_depend_on_the_unit_of_the_loss():
    """Divided by its own size, a direction keeps no unit (but for the floor)."""

    def scaled(unit: float) -> Callable[[], Minimax]:
        def f(x, y, batch):
            t, b = (batch.mean(column) for column in batch.rows)
            return unit * (x @ x - (y @ y / 2 - b @ y + t * (y @ x)))

        return lambda: Minimax(f, torch.ones(3), torch.ones(3))

    for scale in ("adam", "adabelief", "amsgrad", "adagrad_norm"):
        method = AdaFGDA(**STORM, lr=0.1, scale=scale, scale_floor=1e-13)
        one, other = (points(scaled(unit)(), method, noisy(), 3)[-1] for unit in (1.0, 1000.0))
        assert gap(one, other) < 1e-9, scale


@SYNC
def test_without_a_dual_the_methods_minimise(sync):
    """y of length 0: nothing divides by it."""

    def squares() -> Minimax:
        return Minimax(lambda x, y, b: b.mean((b.features @ x - b.labels) ** 2), torch.zeros(3))

    for scale in SCALES:
        options: dict[str, Any] = {"scale": scale, "sync": sync}
        method = AdaFGDA(**STORM, **options, lr=0.3)
        end = points(squares(), method, labelled(), 3)[-1]
        assert end.y.numel() == 0
        assert bool(torch.isfinite(end.x).all())


def test_storm_by_hand():
    e, n, o = (torch.tensor([v]) for v in (2.0, 5.0, 3.0))
    assert float(storm(e, n, o, 1.0)) == 5.0
    assert float(storm(e, n, o, 0.0)) == 5.0 + 2.0 - 3.0
    assert float(storm(e, n, o, 0.25)) == 5.0 + 0.75 * (2.0 - 3.0)


def test_projections_bind_in_every_method():
    """Rows with sets would show nothing if no step ever left them."""
    free = robust_least_squares()
    loose = Minimax(free.outer, torch.zeros(3), torch.full((2,), 0.5))
    momentum = {"primal_lr": 0.4, "dual_lr": 0.6, "local_steps": 3}
    for method in (
        LocalSGDAPlus(0.2, 0.2, 3),
        FedSGDAPlus(0.2, 0.2, 3, 2.0),
        LocalSGDAM(**momentum),
        LocalSGDAMPlus(**momentum),
        FedSGDAM(**STORM),
        FGDA(**STORM),
        FGDA(**STORM, sync="reaverage"),
        AdaFGDA(**STORM, lr=1.0),
    ):
        inside, outside = (points(p, method, labelled(), 2)[-1] for p in (free, loose))
        assert float(inside.x.norm()) <= 0.05 + 1e-12, method
        assert gap(inside, outside) > 1e-3, method


# Settings.


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: LocalSGDAPlus(local_steps=3, snapshot_every=4), "multiple"),
        (lambda: LocalSGDAPlus(local_steps=3, snapshot_every=0), "multiple"),
        (lambda: LocalSGDAMPlus(local_steps=3, snapshot_every=7), "multiple"),
        (lambda: LocalSGDAM(lr=0.5, primal_rate=3.0), r"lr \* primal_rate is 1.5"),
        (lambda: LocalSGDAM(InverseRoot(0.5), primal_rate=3.0), "primal_rate begins at 1.5"),
        (lambda: LocalSCGDAM(lr=InverseRoot(0.5), primal_rate=3.0), "primal_rate begins at 1.5"),
        (lambda: FedDRSCGD(recursion_rate=InverseRoot(1.5)), "recursion_rate begins at 1.5"),
        (lambda: NLASG(averaging_rate=InverseRoot(1.5)), "averaging_rate begins at 1.5"),
        (lambda: FGDA(dual_rate=InverseRoot(1.5)), "dual_rate begins at 1.5; give a weight of at"),
        (lambda: FedSGDAPlus(snapshot_rounds=0), "snapshot_rounds"),
        (lambda: FedSGDAM(dual_rate=1.5), "dual_rate is 1.5"),
        (lambda: FedSGDAM(first_batches=0), "first_batches"),
        (lambda: FGDA(primal_rate=2.0), "primal_rate is 2.0"),
        (lambda: FGDA(sync="box"), "give one of track, reaverage, literal"),  # type: ignore[arg-type]
        (lambda: FGDA(lr=-1.0), "lr is -1.0"),
        (lambda: AdaFGDA(scale="rmsprop"), "adagrad_norm"),  # type: ignore[arg-type]
        (lambda: AdaFGDA(scale_floor=0.0), "floor is 0.0"),
        (lambda: AdaFGDA(scale_rate=0.0), "rate is 0.0"),
        (lambda: AdaFGDA(scale_rate=1.5), "rate is 1.5"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(make, told):
    with pytest.raises(ValueError, match=told):
        make()


def test_a_schedule_may_stand_where_a_weight_stands():
    assert FGDA(primal_rate=InverseRoot(3.0, shift=100)).init_batches == 8
    assert FedSGDAM(first_batches=4).init_batches == 4
