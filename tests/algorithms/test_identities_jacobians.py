"""What ties NLASG, SCSC and SMVR to other methods, to theory, and to what they send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from rows import (
    composed_gradients,
    cross_entropy,
    federation_of,
    labelled,
    labelled_by_size,
    least_squares,
    play,
)
from rows_jacobians import (
    Affine,
    affine_rows,
    days,
    days_by_size,
    free_portfolio,
    long_portfolio,
    map_rows,
    maps,
    portfolio,
    three_levels,
)

from fedminimax.algorithms._jacobians import Levels, product
from fedminimax.algorithms._tracked import FourVectors
from fedminimax.algorithms.fedsgda_m import FedSGDAM
from fedminimax.algorithms.nlasg import NLASG
from fedminimax.algorithms.scsc import SCSC
from fedminimax.algorithms.smvr import SMVR
from fedminimax.data.batches import Sampler
from fedminimax.data.clients import Clients
from fedminimax.data.returns import Returns
from fedminimax.engine.executors.vectorised import Vectorised
from fedminimax.engine.job import ClientError
from fedminimax.engine.round import play_round
from fedminimax.engine.simulate import simulate
from fedminimax.problems.functions import Composition, Minimax
from fedminimax.problems.gradients import inner_jacobian
from fedminimax.problems.portfolio import Portfolio
from fedminimax.types import Algorithm, Phase, Point, Problem, batch_of

ALL = (NLASG, SCSC, SMVR)
METHODS = pytest.mark.parametrize("method", ALL)
SOME: dict[str, Any] = {"lr": 0.1, "averaging_rate": 0.4, "local_steps": 3}


def servers(problem: Problem, algorithm: Algorithm, clients: Clients, rounds: int = 3) -> list[Any]:
    """The server after every round, clients side by side in float64."""
    federation, state, store = federation_of(problem, algorithm, clients)
    found = []
    for _ in range(rounds):
        state = play_round(federation, state, store, Vectorised())
        found.append(state.server)
    return found


def gap(one: list[Any], other: list[Any]) -> float:
    return max(float((a.x - b.x).abs().max()) for a, b in zip(one, other, strict=True))


# One method is another.


@dataclass(frozen=True)
class LocalStorm(FedSGDAM):
    """Local STORM: FedSGDA-M whose first estimates stay where they are made."""

    def phases(self, round: int) -> tuple[Phase, ...]:
        return FourVectors.phases(self, round)


@pytest.mark.parametrize("problem", [least_squares, cross_entropy])
@pytest.mark.parametrize("clients", [labelled, labelled_by_size])
def test_smvr_of_one_level_is_local_storm(problem, clients):
    storm = LocalStorm(primal_lr=0.1, primal_rate=0.4, local_steps=3)
    one = servers(problem(), SMVR(**SOME), clients())
    other = servers(problem(), storm, clients())
    assert gap(one, other) < 1e-14
    assert float((one[0].x - one[-1].x).abs().max()) > 1e-3
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.jacobians[0], b.momentum_x, rtol=1e-13, atol=1e-15)


def test_smvr_and_scsc_without_memory_are_the_same():
    one, other = (
        servers(three_levels(), method(lr=0.1, averaging_rate=1.0, local_steps=3), maps())
        for method in (SMVR, SCSC)
    )
    assert gap(one, other) < 1e-14
    remembering = servers(three_levels(), SMVR(**SOME), maps())
    assert gap(remembering, servers(three_levels(), SCSC(**SOME), maps())) > 1e-4


SLOPE = (1.0, -2.0, 0.5)


def ramps() -> Composition:
    """Affine levels whose offsets alone are random: every method moves alike."""

    def first(x, batch):
        return batch.mean(batch.rows[0] @ x + batch.rows[1])

    def second(h, batch):
        return batch.mean(batch.rows[2] @ h + batch.rows[3])

    return Composition([first, second, lambda z, batch: z @ z.new_tensor(SLOPE)], [0.0, 1.0, 2.0])


def ramp_clients() -> Clients:
    random = np.random.default_rng(0)
    rows = []
    for A, a, B, b, _ in affine_rows(clients=4):
        maps = (np.repeat(m, 6, axis=0) for m in (A, B))
        offsets = (o + random.standard_normal((6, 3)) for o in (a, b))
        rows.append(tuple(c for pair in zip(maps, offsets, strict=True) for c in pair))
    return Clients(rows, batch_size=2)


def fed_dr_values(clients: Clients, rate: float, lr: float, p: int, rounds: int):
    """The values of Fed-DR-SCGD, Algorithm 1, lines 1 and 3 to 8, in numpy, on the ramps."""
    clients = clients.to(torch.float64)
    count = len(clients)
    first, later = Sampler(clients, 3, 0, "first", 1), Sampler(clients, 3, 0)
    A, B = (clients.train.rows(0)[i][0].numpy() for i in (0, 2))
    slope = A.T @ B.T @ np.array(SLOPE)

    def offsets(sampler, n, t):
        draw = sampler.draw(np.array([n]), t, 1).client(0, 0, 3)
        return draw[0].rows[1].numpy().mean(0), draw[1].rows[3].numpy().mean(0)

    x = np.array([0.0, 1.0, 2.0])
    h = []
    for n in range(count):
        a, b = offsets(first, n, 0)
        h.append((A @ x + a, B @ (A @ x + a) + b))
    for t in range(p * rounds):
        new = x - lr * slope
        for n in range(count):
            (h1, h2), (a, b) = h[n], offsets(later, n, t)
            n1 = (1 - rate) * (h1 - (A @ x + a)) + A @ new + a
            n2 = (1 - rate) * (h2 - (B @ h1 + b)) + B @ n1 + b
            h[n] = (n1, n2)
        x = new
        if (t + 1) % p == 0:
            h = [tuple(np.mean([own[k] for own in h], axis=0) for k in (0, 1))] * count
    return x, *h[0]


@METHODS
def test_on_affine_levels_all_track_values_as_fed_dr_scgd_does(method):
    """For them NLASG's linear correction is STORM's difference."""
    found = servers(ramps(), method(**SOME), ramp_clients())[-1]
    expected = fed_dr_values(ramp_clients(), 0.4, 0.1, 3, 3)
    for ours, theirs in zip((found.x, *found.inner), expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-12, atol=1e-12)


# On exact functions.


def deep(levels: int) -> Composition:
    def inner(number):
        return lambda v, batch: batch.mean(torch.tanh(batch.rows[0] @ v + 0.1 * number))

    def last(v, batch):
        return batch.mean((v - batch.rows[1]).square().sum(-1))

    return Composition([inner(k) for k in range(1, levels)] + [last], torch.full((3,), 0.3))


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
@pytest.mark.parametrize("method", [SCSC, SMVR])
def test_on_whole_identical_clients_the_product_is_the_gradient(method, levels):
    random = np.random.default_rng(3)
    rows = random.standard_normal((5, 3, 3)), random.standard_normal((5, 3))
    clients = Clients([rows] * 3, batch_size=None)
    problem = deep(levels)
    found = servers(problem, method(lr=0.2, averaging_rate=0.3, local_steps=3), clients)[-1]
    batch = clients.to(torch.float64).train.batch(0)
    slope = composed_gradients(problem, Point(found.x, found.y), (batch,) * levels).x
    assert float(slope.abs().max()) > 1e-6
    torch.testing.assert_close(product(found.jacobians), slope, rtol=1e-10, atol=1e-14)


@METHODS
def test_identical_clients_are_one_machine(method):
    rows = map_rows()[0]
    one, four = (
        servers(three_levels(), method(**SOME), Clients([rows] * n, batch_size=None))
        for n in (1, 4)
    )
    assert gap(one, four) < 1e-15


@METHODS
def test_clients_whose_maps_differ_leave_a_floor_that_no_rate_removes(method):
    """All levels are averaged at once: what averaging does to a level's value never enters the
    next one."""
    clients = Clients(affine_rows(maps_differ=0.1), batch_size=None)

    def floor(rate: float) -> float:
        algorithm = method(lr=0.3, averaging_rate=rate, local_steps=1)
        run = simulate(
            Affine(), algorithm, clients, 80, executor="vectorised", dtype=torch.float64,
            evaluate_every=80
        )  # fmt: skip
        return run.history[-1]["train"]["distance"]

    floors = [floor(rate) for rate in (0.6, 0.3)]
    assert min(floors) > 0.1
    assert floors[0] == pytest.approx(floors[1], rel=1e-3)


# What is sent.


@METHODS
@pytest.mark.parametrize(
    ("problem", "clients"),
    [(portfolio, days), (free_portfolio, days_by_size), (long_portfolio, days)],
)
def test_structured_jacobians_give_the_same_numbers(method, problem, clients):
    options: dict[str, Any] = {"lr": 0.02, "averaging_rate": 0.6, "local_steps": 3}
    dense = servers(problem(), method(**options), clients())
    packed = method(**options, sent="structured")
    less = servers(problem(), packed, clients())
    assert gap(dense, less) <= 1e-12
    assert float((dense[0].x - dense[-1].x).abs().max()) > 1e-4
    whole = packed.unpack(problem(), less[-1].jacobians)
    for a, b in zip(whole, dense[-1].jacobians, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert less[-1].jacobians[1].numel() < dense[-1].jacobians[1].numel()


@METHODS
@pytest.mark.parametrize(("sent", "floats"), [("dense", 10_507), ("structured", 406)])
def test_floats_of_the_paper_s_portfolio(method, sent, floats):
    """d^2 + 5 d + 7 and 4 d + 6, for 100 assets."""
    clients = Clients(Returns(2, 100, 6).client_rows(), batch_size=1)
    algorithm = method(lr=1e-3, local_steps=2, sent=sent)
    federation, state, store = federation_of(Portfolio(100), algorithm, clients)
    sent_so_far = []
    for _ in range(2):
        state = play_round(federation, state, store, Vectorised())
        sent_so_far.append(state.cost)
    up, down = (
        (getattr(sent_so_far[1], way) - getattr(sent_so_far[0], way)) / 8 / 2
        for way in ("bytes_up", "bytes_down")
    )
    assert (up, down) == (floats, floats)
    assert sent_so_far[0].bytes_down / 8 / 2 == 100  # at first there is only x to send


@METHODS
def test_a_problem_that_tells_no_structure_is_sent_densely(method):
    dense, structured = (
        servers(three_levels(), method(**SOME, sent=sent), maps())[-1]
        for sent in ("dense", "structured")
    )
    assert [v.shape for v in dense.jacobians] == [v.shape for v in structured.jacobians]
    assert torch.equal(dense.x, structured.x)


@pytest.mark.parametrize("make", [portfolio, free_portfolio, long_portfolio])
def test_the_structure_of_the_portfolio_is_that_of_its_jacobians(make):
    problem = make()
    seen: dict[int, list] = {1: [], 2: []}
    for seed in range(4):
        random = np.random.default_rng(seed)
        batch = batch_of(torch.from_numpy(random.standard_normal((3, 4))))
        for level, length in ((1, 4), (2, 5)):
            value = torch.from_numpy(random.standard_normal(length))
            seen[level].append(inner_jacobian(problem, level, value, batch)[1])
    for level, found in seen.items():
        told = problem.jacobian_structure(level)
        varies = (torch.stack(found).std(0) > 1e-12).flatten().nonzero().flatten()
        if told is None:
            assert len(varies) == found[0].numel()
            continue
        constant, varying = told
        assert torch.equal(varies, varying)
        fixed = torch.ones(found[0].numel(), dtype=torch.bool)
        fixed[varying] = False
        assert torch.equal(constant.flatten()[fixed].double(), found[0].flatten()[fixed])


# Bounds, refusals and counts.


def test_the_radius_bounds_every_jacobian():
    free, bound = (
        servers(three_levels(), SMVR(**SOME, radius=radius), maps())[-1] for radius in (None, 0.7)
    )
    assert max(float(torch.linalg.vector_norm(v)) for v in free.jacobians) > 0.8
    assert max(float(torch.linalg.vector_norm(v)) for v in bound.jacobians) <= 0.7 + 1e-12
    far = servers(three_levels(), SMVR(**SOME, radius=1e6), maps())[-1]
    torch.testing.assert_close(far.x, free.x, rtol=1e-13, atol=0)
    # The first estimates too.
    batch, start = maps().to(torch.float64).train.batch(0), three_levels().start()
    down = Levels(start.x.double(), (), ())
    first = SMVR(radius=0.7).init_client(three_levels(), down, (batch,) * 3)
    sizes = [float(torch.linalg.vector_norm(v)) for v in first.jacobians]
    assert max(sizes) == pytest.approx(0.7)


@METHODS
def test_jacobians_that_do_not_fit_are_refused_with_their_size(method):
    def level(v, batch):
        return v * batch.mean(batch.rows[0])

    problem = Composition([level, level, lambda v, batch: v @ v], torch.ones(20_000))
    clients = Clients([(torch.ones(3),)])
    # 2 matrices of 20,000 x 20,000 and a vector, in single precision; a step has those from before
    # and one, or for SMVR two, of its own.
    held = r"3 copies: 9\.6 GB" if method is SMVR else r"2 copies: 6\.4 GB"
    with pytest.raises(ClientError, match=f"800,020,000 entries, .* {held} .* use Fed-DR-SCGD"):
        simulate(problem, method(), clients, 1, executor="debug")
    small = Composition([level, lambda v, batch: v @ v], torch.ones(50))
    # 2,550 entries: a number that is not rounded away.
    told = r"3\.06e-05 GB" if method is SMVR else r"2\.04e-05 GB"
    with pytest.raises(ClientError, match=f"{told} .* most_gb is 2e-05"):
        simulate(small, method(most_gb=2e-5), clients, 1, executor="debug")
    assert simulate(small, method(), clients, 1, executor="debug").outcome == "finished"


@METHODS
def test_bad_options_are_refused(method):
    for options, told in (
        ({"averaging_rate": 1.5}, "averaging_rate is 1.5"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"local_steps": 0}, "local_steps is 0"),
        ({"sent": "sparse"}, "'dense' or 'structured'"),
        ({"most_gb": 0.0}, "most_gb is 0.0"),
    ):
        with pytest.raises(ValueError, match=told):
            method(**options)
    dual = Minimax(lambda x, y, batch: x @ y, torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="only minimises"):
        simulate(dual, method(), Clients([(torch.ones(2),)]), 1)


def test_bad_options_of_smvr_are_refused():
    with pytest.raises(ValueError, match="radius is 0"):
        SMVR(radius=0)
    with pytest.raises(ValueError, match="send 'dense', or leave radius out"):
        SMVR(radius=1.0, sent="structured")


@METHODS
def test_a_step_counts_the_points_at_which_it_takes_jacobians(method):
    for state, _ in play(three_levels(), method(**SOME), maps(), 2):
        first, steps = 5, 5 * 3 * state.round
        # A sweep through three levels is three gradients.
        assert state.cost.gradients == 3 * (first + steps * (2 if method is SMVR else 1))


def test_the_momentum_of_nlasg_stays_at_its_client():
    (state, store), *_ = play(three_levels(), NLASG(**SOME), maps(), 1)
    momenta = torch.stack([store.states[k].momentum for k in range(5)])
    assert float(momenta.std(0).min()) > 1e-3
    assert not hasattr(state.server, "momentum")
    # And it matters: without memory there is none to keep.
    forgotten = servers(three_levels(), NLASG(lr=0.1, averaging_rate=1.0, local_steps=3), maps())
    assert gap(forgotten, servers(three_levels(), NLASG(**SOME), maps())) > 1e-4


def test_the_jacobian_oracle_by_finite_differences():
    problem, clients = three_levels(), maps().to(torch.float64)
    batch = clients.train.batch(0)
    for level, length in ((1, 4), (2, 3)):
        at = torch.linspace(-0.5, 0.7, length, dtype=torch.float64)
        value, jacobian = inner_jacobian(problem, level, at, batch)
        torch.testing.assert_close(value, problem.inner(level, at, batch), rtol=0, atol=0)
        for j in range(length):
            step = 1e-6 * torch.eye(length, dtype=torch.float64)[j]
            ahead, behind = (problem.inner(level, at + s * step, batch) for s in (1, -1))
            torch.testing.assert_close(
                jacobian[:, j], (ahead - behind) / 2e-6, rtol=1e-7, atol=1e-9
            )
