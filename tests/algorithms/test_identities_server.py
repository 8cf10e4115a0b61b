"""What ties the methods with a step at the server to each other, and what their theory promises."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
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
    noisy_whole,
    quadratic,
    robust_least_squares,
    wide_quadratic,
)

from fedminimax.algorithms.cdma import CDMAADA, CDMANC, CDMAONE
from fedminimax.algorithms.fed_norm_sgda import FedNormSGDA, FedNormSGDAPlus
from fedminimax.algorithms.fedavg import FedAvg
from fedminimax.algorithms.fednest import FedNest
from fedminimax.algorithms.fess_gda import FESSGDA
from fedminimax.algorithms.fsgda import FSGDA
from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.algorithms.sagda import SAGDA
from fedminimax.algorithms.scaffold import Scaffold
from fedminimax.algorithms.smoothed_gda import SmoothedAGDA, SmoothedGDA
from fedminimax.blocks.schedules import InverseRoot
from fedminimax.data.clients import Clients
from fedminimax.data.synthetic import QuadraticData
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.engine.simulate import Run, simulate
from fedminimax.problems.functions import Minimax
from fedminimax.problems.gradients import gradients
from fedminimax.problems.quadratic import Quadratic
from fedminimax.types import Algorithm, Phase, Point

LOCAL: dict[str, Any] = {"primal_lr": 0.1, "dual_lr": 0.2, "local_steps": 3}
SERVER: dict[str, Any] = {**LOCAL, "primal_server_lr": 1.3, "dual_server_lr": 0.8}
PLACES = [(quadratic, noisy), (quadratic, noisy_by_size), (auc, labelled)]
EVERYWHERE = pytest.mark.parametrize(
    ("problem", "clients"), [*PLACES, (robust_least_squares, labelled)]
)
WITHOUT_SETS = pytest.mark.parametrize(("problem", "clients"), PLACES)
WHOLE = pytest.mark.parametrize(("problem", "clients"), [(quadratic, noisy_whole)])


def run(problem, method: Algorithm, clients, rounds: int = 3, **options: Any) -> Run:
    options = {"evaluate_every": 1000, "executor": "vectorised", **options}
    return simulate(
        problem(), method, clients(), rounds, dtype=torch.float64, allow_partial=True, **options
    )


def gap(a: Point, b: Point) -> float:
    return max(float((p - q).abs().max()) for p, q in zip(a, b, strict=True))


def assert_same(problem, clients, one: Algorithm, other: Algorithm, **options: Any) -> None:
    a, b = (run(problem, m, clients, **options).point for m in (one, other))
    assert gap(a, b) < 1e-12
    assert gap(a, Point(*(v.double() for v in problem().start()))) > 1e-3


def assert_different(problem, clients, one: Algorithm, other: Algorithm, **options: Any) -> None:
    a, b = (run(problem, m, clients, **options).point for m in (one, other))
    assert gap(a, b) > 1e-6


# Identities.


@EVERYWHERE
def test_fess_gda_without_smoothing_is_fsgda_and_local_sgda(problem, clients):
    assert_same(problem, clients, FESSGDA(**SERVER, smoothing=0.0), FSGDA(**SERVER))
    plain = FESSGDA(**LOCAL, smoothing=0.0)
    assert_same(problem, clients, plain, LocalSGDA(**LOCAL))
    assert_same(problem, clients, plain, LocalSGDA(**LOCAL), cohort=2)
    assert_same(problem, clients, FESSGDA(**LOCAL, anchor_rate=1.0), plain)  # the anchor is x
    assert_different(problem, clients, FESSGDA(**LOCAL, smoothing=1.0), plain)
    assert_different(problem, clients, FESSGDA(**SERVER, smoothing=0.0), plain)


def test_fess_gda_pulls_with_the_rate_of_the_first_step_of_the_round():
    """A round without smoothing from the same state, beside it: they differ by the pull alone."""
    method = FESSGDA(InverseRoot(0.1), 0.1, 3, 1.3, smoothing=0.5, anchor_rate=0.2)
    federation, state, store = federation_of(quadratic(), method, noisy())
    state = play_round(federation, state, store, Debug())
    pulled, free = (
        play_round(replace(federation, algorithm=m), state, store, Debug()).server.x
        for m in (method, replace(method, smoothing=0.0))
    )
    rate = 0.1 / (1 + 3) ** 0.5  # three steps have been taken before
    pull = 1.3 * rate * 3 * 0.5 * (state.server.x - state.server.anchor)
    assert float(pull.abs().min()) > 1e-4
    torch.testing.assert_close(pulled, free - pull, rtol=0, atol=1e-14)


@WITHOUT_SETS
def test_fess_gda_with_one_step_is_smoothed_gda(problem, clients):
    one = FESSGDA(0.1, 0.2, local_steps=1, smoothing=0.7, anchor_rate=0.3)
    other = SmoothedGDA(0.7, 0.3, primal_lr=0.1, dual_lr=0.2)
    assert_same(problem, clients, one, other, rounds=5)


def test_smoothed_gda_of_many_is_that_of_their_pool():
    """Clients of equal size with all their rows: the mean objective on one machine."""
    rows = noisy_rows((4, 4, 4))
    pooled = [tuple(np.concatenate(c) for c in zip(*rows, strict=True))]
    for method in (SmoothedGDA(0.7, 0.3), SmoothedAGDA(0.7, 0.3)):
        many, one = (
            run(quadratic, method, lambda r=r: Clients(r, batch_size=None), 5).point
            for r in (rows, pooled)
        )
        # t is the same in all rows of a client, and the objective linear in it.
        assert gap(many, one) < 1e-12
    assert_different(quadratic, noisy, SmoothedGDA(0.7, 0.3), SmoothedAGDA(0.7, 0.3))


@dataclass(frozen=True)
class Uncontrolled(SAGDA):
    """SAGDA whose controls are 0."""

    def collecting(self, **changes: Any) -> Phase:
        # All rows: an exchange that needs no batch leaves FSGDA's to the local steps.
        return super().collecting(data="whole", **changes)

    def collect(self, problem, down, client, batch, clock):
        return client


@EVERYWHERE
def test_sagda_without_controls_is_fsgda(problem, clients):
    assert_same(problem, clients, Uncontrolled(**SERVER), FSGDA(**SERVER))
    assert_different(problem, clients, SAGDA(**SERVER), FSGDA(**SERVER))


@WHOLE
def test_sagda_on_whole_data_is_cdma_one(problem, clients):
    """The stored gradient is then the one computed again."""
    assert_same(problem, clients, SAGDA(**LOCAL), CDMAONE(**LOCAL))
    assert_same(problem, clients, SAGDA(**LOCAL), CDMAONE(**LOCAL), cohort=2)
    assert_different(problem, noisy, SAGDA(**LOCAL), CDMAONE(**LOCAL))


@WITHOUT_SETS
def test_fed_norm_sgda_with_equal_steps_is_fsgda_and_local_sgda(problem, clients):
    server: dict[str, Any] = {"primal_server_lr": 1.3 * 0.1, "dual_server_lr": 0.8 * 0.2}
    assert_same(problem, clients, FedNormSGDA(**LOCAL, **server), FSGDA(**SERVER))
    assert_same(problem, clients, FedNormSGDA(**LOCAL, **server), FSGDA(**SERVER), cohort=2)
    one = FedNormSGDA(**LOCAL, primal_server_lr=0.1, dual_server_lr=0.2)
    assert_same(problem, clients, one, LocalSGDA(**LOCAL))
    equal = FedNormSGDA(**{**LOCAL, "local_steps": 9}, client_steps=(3,) * 5, **server)
    assert_same(problem, clients, equal, FSGDA(**SERVER))


@EVERYWHERE
def test_a_snapshot_of_this_round_matters_only_from_the_second_step_on(problem, clients):
    single = {"primal_lr": 0.1, "dual_lr": 0.2, "local_steps": 1}
    assert_same(problem, clients, FedNormSGDAPlus(**single, snapshot_rounds=1),
                FedNormSGDA(**single))  # fmt: skip
    for method in (
        FedNormSGDAPlus(**single, snapshot_rounds=2),
        FedNormSGDAPlus(**LOCAL, snapshot_rounds=1),
    ):
        plain = FedNormSGDA(**{f: getattr(method, f) for f in single})
        assert_different(problem, clients, method, plain)


@EVERYWHERE
def test_cdma_nc_is_local_sgda(problem, clients):
    assert_same(problem, clients, CDMANC(**LOCAL), LocalSGDA(**LOCAL))


@EVERYWHERE
def test_cdma_ada_is_cdma_one_when_all_take_part_or_nothing_is_remembered(problem, clients):
    one = CDMAONE(**LOCAL)
    assert_same(problem, clients, CDMAADA(**LOCAL, momentum_rate=0.1), one, rounds=4)
    forgets = CDMAADA(**LOCAL, momentum_rate=1.0)
    assert_same(problem, clients, forgets, one, cohort=2, rounds=4)
    assert_different(problem, clients, CDMAADA(**LOCAL, momentum_rate=0.1), one, cohort=2, rounds=4)


@WHOLE
def test_fednest_with_single_steps_is_alternating_descent_ascent(problem, clients):
    federation, state, _ = federation_of(problem(), FedNest(), clients())
    x, y = state.server.x, state.server.y

    def slope() -> Point:
        each = [
            gradients(federation.problem, Point(x, y), (federation.clients.train.batch(k),))
            for k in range(5)
        ]
        weights = federation.weights
        return Point(*(weights @ torch.stack(part) for part in zip(*each, strict=True)))

    for _ in range(3):
        for _ in range(2):
            y = y + 0.3 * slope().y
        x = x - 0.1 * slope().x
    method = FedNest(0.1, 0.3, local_steps=1, inner_steps=1, inner_rounds=2)
    assert gap(run(problem, method, clients).point, Point(x, y)) < 1e-12


# What theory promises beside the far rows of the table.


def test_unequal_steps_shift_the_solution_unless_normalised():
    """Without normalisation a client weighs by its steps, whatever the rate."""
    steps = (2, 4, 6, 8, 10) * 2

    @dataclass(frozen=True)
    class Naive(FSGDA):
        def steps(self, round: int, client: int) -> int:
            return steps[client]

    def floor(method: Algorithm, lr: float) -> float:
        found = run(wide_quadratic, method, noise_free, round(8 / lr / 6))
        return found.history[-1]["train"]["distance"]

    def normalised(lr: float) -> Algorithm:
        return FedNormSGDA(lr, lr, primal_server_lr=lr, dual_server_lr=lr, client_steps=steps)

    coarse, fine = (floor(normalised(lr), lr) for lr in (0.08, 0.02))
    assert 3 < coarse / fine < 6
    naive = [floor(Naive(lr, lr), lr) for lr in (0.08, 0.02)]
    assert min(naive) > 3 * coarse > 9 * fine
    assert naive[1] > 0.5 * naive[0]


@pytest.mark.parametrize("kind", [SmoothedGDA, SmoothedAGDA, FESSGDA])
def test_smoothing_tames_the_game_that_descent_ascent_loses(kind):
    """f = x y: descent ascent moves away from the saddle 0, or around it; smoothing arrives."""

    def game() -> Minimax:
        return Minimax(lambda x, y, batch: x @ y, torch.ones(2), torch.ones(2))

    def alone() -> Clients:
        return Clients([(torch.zeros(1),), (torch.zeros(1),)], batch_size=None)

    rates: dict[str, Any] = {"primal_lr": 0.3, "dual_lr": 0.3, "anchor_rate": 0.1}
    rates |= {"local_steps": 1} if kind is FESSGDA else {}
    smooth, plain = (run(game, kind(smoothing=p, **rates), alone, 150).point for p in (1.0, 0.0))
    assert float(torch.cat(smooth).norm()) < 1e-3
    assert float(torch.cat(plain).norm()) > 0.5


def test_smoothing_that_overshoots_is_warned_of():
    problem, start = quadratic(), quadratic().start()
    edge = FESSGDA(0.1, 0.1, 10, 2.0, smoothing=1.0)  # the edge of the paper's grid
    with pytest.warns(UserWarning, match=r"by 2 times"):
        edge.init_server(problem, start)
    with pytest.warns(UserWarning, match=r"by 2\.5 times"):
        SmoothedAGDA(smoothing=5.0, primal_lr=InverseRoot(0.5)).init_server(problem, start)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FESSGDA(0.1, 0.1, 10, 1.9, smoothing=1.0).init_server(problem, start)


# Ten of a hundred.

ROUNDS = 40
PARTIAL = [
    FESSGDA(0.02, 0.05, 4, smoothing=1.0, anchor_rate=0.5),
    FSGDA(0.02, 0.05, 4),
    SAGDA(0.02, 0.05, 4),
    FedNormSGDA(0.02, 0.05, 6, 0.02, 0.05, least_steps=2),
    FedNormSGDAPlus(0.02, 0.05, 4, 0.02, 0.05, snapshot_rounds=3),
    CDMANC(0.02, 0.05, 4),
    CDMAONE(0.02, 0.05, 4),
    CDMAONE(0.02, 0.05, 4, redraw=True),
    CDMAADA(0.02, 0.05, 4, momentum_rate=0.3),
    CDMAADA(0.02, 0.05, 4, redraw=True, momentum_rate=0.3),
    FedNest(0.08, 0.2, 4, inner_rounds=1, inner_steps=4),
]


def hundred(spread: float) -> Clients:
    data = QuadraticData(100, 3, spread, coupling=0.5 * (spread > 0)).client_rows()
    return Clients([(t + 0.3, b + 3.0) for t, b in data], batch_size=None)


def named(method: Algorithm) -> str:
    return type(method).__name__ + ("-redraw" * getattr(method, "redraw", False))


@pytest.mark.parametrize("method", PARTIAL, ids=named)
def test_ten_of_a_hundred(method):
    def ten(spread: float, rounds: int) -> Run:
        return simulate(  # without allow_partial: their theory has it
            Quadratic(3), method, hundred(spread), rounds, cohort=10, executor="vectorised",
            dtype=torch.float64, evaluate_every=rounds,
        )  # fmt: skip

    varied = ten(1.0, ROUNDS)
    first, last = (record["train"]["distance"] for record in varied.history)
    assert first > 3
    # The cohorts' own saddles lie around the common one: a method with constant rates stays near.
    assert 1e-3 < last < 0.6
    assert last < 0.2 * first
    per_client = varied.history[-1]["gradients"] / (10 * ROUNDS)
    turns = isinstance(method, FedNormSGDA)  # 2 to 6 steps, by who is there
    assert per_client == pytest.approx(sum_of_gradients(method), abs=0.3 if turns else 1e-9)
    # When all clients are alike, it does not matter who is there.
    assert ten(0.0, 80).history[-1]["train"]["distance"] < 1e-5


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_with_ten_of_a_hundred_arrives(option):
    """The controls of those that are away stand in for them; FedAvg stays among the minima of the
    cohorts."""
    random = np.random.default_rng(0)
    rows = [(random.uniform(0.5, 1.5, (1, 3)), random.normal(3, 2, (1, 3))) for _ in range(100)]

    def bowls() -> Minimax:
        def f(x, y, batch):
            return (batch.mean(batch.rows[0]) * (x - batch.mean(batch.rows[1])) ** 2).sum() / 2

        return Minimax(f, torch.zeros(3))

    curvature, minimum = (np.concatenate(column) for column in zip(*rows, strict=True))
    best = torch.from_numpy((curvature * minimum).sum(0) / curvature.sum(0))

    def distance(method: Algorithm) -> float:
        found = simulate(
            bowls(), method, Clients(rows, batch_size=None), 200, cohort=10, executor="vectorised",
            dtype=torch.float64, evaluate_every=200,
        )  # fmt: skip
        return float((found.point.x - best).norm())

    assert distance(Scaffold(0.1, local_steps=4, option=option)) < 1e-6
    assert distance(FedAvg(0.1, local_steps=4)) > 1e-2


def sum_of_gradients(method: Algorithm) -> float:
    """Gradients per client and round, by hand, on average over the rounds."""
    if isinstance(method, FESSGDA | FSGDA | CDMANC | FedNormSGDA | FedNormSGDAPlus):
        return 4
    if isinstance(method, SAGDA):
        return 1 + 4
    if isinstance(method, CDMAONE):
        return 1 + 2 * 4
    if isinstance(method, CDMAADA):
        return 2 + 2 * 4 - 1 / ROUNDS  # the first round has no point before
    return 2 * (1 + 2 * 4)


# What travels, where it depends on options.


def sent(method: Algorithm, round: int) -> tuple[float, float]:
    found = run(quadratic, method, noisy, round + 1, evaluate_every=1).history
    return tuple((found[-1][w] - found[-2][w]) / (5 * 8) for w in ("bytes_up", "bytes_down"))  # type: ignore


def test_floats_that_depend_on_options():
    """dx = dy = 3."""
    assert sent(CDMAONE(), 1) == (12, 12)
    assert sent(CDMAONE(redraw=True), 1) == (12, 18)
    assert sent(CDMAADA(), 0) == (12, 12)
    assert sent(CDMAADA(), 1) == (12, 18)
    assert sent(CDMAADA(redraw=True), 1) == (12, 24)
    for t in (1, 2, 4):
        assert sent(FedNest(inner_rounds=t), 1) == (2 * t * 3 + 6, (2 * t + 1) * 3 + 6)
    plus = FedNormSGDAPlus(snapshot_rounds=2)
    assert [sent(plus, r) for r in (1, 2, 3)] == [(7, 9), (7, 6), (7, 9)]


# Bad input.


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FESSGDA(smoothing=-1.0), "smoothing is -1.0; give a finite number"),
        (lambda: FESSGDA(smoothing=float("nan")), "smoothing is nan"),
        (lambda: FESSGDA(anchor_rate=1.5), "anchor_rate is 1.5; give a number from 0 to 1"),
        (lambda: FESSGDA(anchor_rate=InverseRoot(1.5)), "give a number from 0 to 1"),
        (lambda: FESSGDA(dual_proximal=-0.1), "dual_proximal is -0.1"),
        (lambda: SmoothedGDA(primal_lr=-1.0), "primal_lr is -1.0"),
        (lambda: FSGDA(local_steps=0), "local_steps is 0"),
        (lambda: FedNormSGDA(client_steps=(1, 0)), r"client_steps is \(1, 0\)"),
        (lambda: FedNormSGDA(local_steps=4, least_steps=5), "least_steps is 5; .* which is 4"),
        (lambda: FedNormSGDA(client_steps=(1, 2), least_steps=1), "leave out one of them"),
        (lambda: FedNormSGDAPlus(snapshot_rounds=0), "snapshot_rounds is 0"),
        (lambda: CDMAADA(momentum_rate=-1.0), "momentum_rate is -1.0"),
        (lambda: FedNest(inner_steps=0), "inner_steps is 0"),
        (lambda: FedNest(inner_rounds=0), "inner_rounds is 0"),
        (lambda: FedNest(control_data="all"), "control_data is 'all'"),  # type: ignore[arg-type]
    ],
)
def test_bad_hyper_parameters_are_refused_with_a_sentence(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_steps_are_wanted_for_every_client():
    with pytest.raises(ValueError, match="client_steps has 4 numbers, but there are 5 clients"):
        federation_of(quadratic(), FedNormSGDA(client_steps=(1, 2, 3, 4)), noisy())
