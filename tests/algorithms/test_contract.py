"""The contract, tried on one method of each awkward kind before whole families are built on it.

Each method here is a small `Algorithm`, as its author would write it; each runs on every executor
and meets its known answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.blocks.projections import simplex
from fedminimax.data.clients import Clients
from fedminimax.engine.executors import choose
from fedminimax.engine.round import Federation, State, play_round
from fedminimax.engine.simulate import Run, simulate
from fedminimax.engine.state.store import Store
from fedminimax.problems.functions import Minimax
from fedminimax.problems.gradients import gradients
from fedminimax.problems.quadratic import Quadratic
from fedminimax.types import Algorithm, Clock, Cost, Draw, Phase, Point, Problem

EXECUTORS = ("debug", "threads", "vectorised")
TAU = 10.0


def everywhere(
    problem: Problem, algorithm: Algorithm, clients: Clients, rounds: int, **options: Any
) -> Run:
    """A run, once all executors have been seen to agree on its first rounds."""

    def go(name: str, rounds: int) -> Run:
        run = simulate(
            problem,
            algorithm,
            clients,
            rounds,
            executor=name,
            dtype=torch.float64,
            evaluate_every=rounds,
            **options,
        )
        assert run.outcome == "finished", name
        return run

    first = [go(name, min(rounds, 6)) for name in EXECUTORS]
    for run, name in zip(first, EXECUTORS, strict=True):
        for mine, theirs in zip(run.point, first[0].point, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10, msg=name)
    return first[0] if rounds <= 6 else go("vectorised", rounds)


def by_hand(
    problem: Problem,
    algorithm: Algorithm,
    clients: Clients,
    executor: str,
    cohort: int | None = None,
    seed: int = 0,
) -> tuple[Federation, Callable[[], tuple[State, Store]]]:
    """The federation, and a function that plays a round and shows server and client states."""
    clients = clients.to(torch.float64)
    start = Point(*(v.to(torch.float64) for v in problem.start()))
    weights = clients.weight_vector(clients.weights or problem.client_weights)
    federation = Federation.of(problem, algorithm, clients, weights, seed, cohort or len(clients))
    state, store = State(0, 0, algorithm.init_server(problem, start), Cost()), Store(algorithm.keep)
    runner = choose.make(executor, 2)

    def play() -> tuple[State, Store]:
        nonlocal state
        state = play_round(federation, state, store, runner)
        return state, store

    return federation, play


def quadratic_clients(
    count: int = 5, dimension: int = 4, spread: float = 3.0, rows: int = 1, noise: float = 0.0
):
    """Means t_k and b_k per client, and clients whose rows have those means."""
    random = np.random.default_rng(7)
    t = random.uniform(0.5, 1.5, count) if spread else np.full(count, 0.8)
    b = 1.0 + spread * random.standard_normal((count, dimension))
    if not spread:
        b = np.tile(random.standard_normal(dimension), (count, 1))
    scatter = noise * random.standard_normal((count, rows, dimension))
    scatter -= scatter.mean(1, keepdims=True)
    train = [(np.full(rows, t[k]), b[k] + scatter[k]) for k in range(count)]
    return t, b, Clients(train, batch_size=None if rows == 1 else 2)


def quadratic_gradients(t: float, b: np.ndarray, x: np.ndarray, y: np.ndarray):
    return TAU * x - t * y, b - y - t * x


def quadratic_saddle(t: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = b.mean(0) / (1 + t.mean() ** 2 / TAU)
    return t.mean() * y / TAU, y


def assert_at(point: Point, x: np.ndarray, y: np.ndarray, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(point.x.numpy(), x, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(point.y.numpy(), y, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ a) two phases: SAGDA


class SagdaServer(NamedTuple):
    x: Tensor
    y: Tensor
    control_x: Tensor
    control_y: Tensor


class SagdaClient(NamedTuple):
    x: Tensor
    y: Tensor
    anchor_x: Tensor  # v_i, the client's own gradient at the server's point
    anchor_y: Tensor


class Controls(NamedTuple):
    control_x: Tensor
    control_y: Tensor


@dataclass(frozen=True)
class Sagda(Algorithm):
    """SAGDA (Yang et al., 2022): local steps corrected by gradients at the server's point."""

    primal_lr: float = 0.02
    dual_lr: float = 0.02
    primal_server_lr: float = 1.0
    dual_server_lr: float = 1.0
    local_steps: int = 8
    keep: ClassVar[tuple[str, ...]] = ("x", "y", "anchor_x", "anchor_y")
    partial: ClassVar[bool] = True

    def init_server(self, problem: Problem, start: Point) -> SagdaServer:
        return SagdaServer(*start, torch.zeros_like(start.x), torch.zeros_like(start.y))

    def init_client(self, problem: Problem, down: Point, batch: Draw | None) -> SagdaClient:
        return SagdaClient(down.x, down.y, torch.zeros_like(down.x), torch.zeros_like(down.y))

    def phases(self, round: int) -> tuple[Phase, ...]:
        collect = self.phase(
            receive=self.receive_point,
            local_step=self.collect,
            send=self.send_anchor,
            aggregate=self.store_controls,
            steps=1,
        )
        return collect, self.phase(broadcast=self.broadcast_controls)

    def receive_point(self, down: Point, client: Any, clock: Clock) -> SagdaClient:
        return SagdaClient(down.x, down.y, client.anchor_x, client.anchor_y)

    def collect(self, problem, down, client, batch, clock) -> SagdaClient:
        grad = gradients(problem, Point(client.x, client.y), batch)
        return client._replace(anchor_x=grad.x, anchor_y=grad.y)

    def send_anchor(self, down, client: SagdaClient, clock: Clock):
        return Controls(client.anchor_x, client.anchor_y), client

    def store_controls(self, problem, server: SagdaServer, mean: Controls, clock) -> SagdaServer:
        return server._replace(control_x=mean.control_x, control_y=mean.control_y)

    def broadcast_controls(self, server: SagdaServer, clock: Clock) -> Controls:
        return Controls(server.control_x, server.control_y)

    def receive(self, down: Controls, client: Any, clock: Clock) -> SagdaClient:
        return SagdaClient(*client)

    def local_step(self, problem, down: Controls, client: SagdaClient, batch, clock) -> SagdaClient:
        grad = gradients(problem, Point(client.x, client.y), batch)
        x = client.x - self.primal_lr * (grad.x - client.anchor_x + down.control_x)
        y = client.y + self.dual_lr * (grad.y - client.anchor_y + down.control_y)
        return client._replace(x=x, y=y)

    def aggregate(self, problem, server: SagdaServer, mean: Point, clock) -> SagdaServer:
        return server._replace(
            x=server.x + self.primal_server_lr * (mean.x - server.x),
            y=server.y + self.dual_server_lr * (mean.y - server.y),
        )


def test_sagda_removes_the_floor_that_local_sgda_keeps():
    t, b, clients = quadratic_clients()
    best = Point(*map(torch.from_numpy, quadratic_saddle(t, b)))

    def distance(point: Point) -> float:
        return float(sum((p - q).square().sum() for p, q in zip(point, best, strict=True))) ** 0.5

    run = everywhere(Quadratic(4, TAU), Sagda(0.05, 0.1), clients, 60)
    plain = everywhere(Quadratic(4, TAU), LocalSGDA(0.05, 0.1, local_steps=8), clients, 60)
    assert distance(run.point) < 1e-10
    assert distance(plain.point) > 1e-3


def test_sagda_equals_its_box():
    t, b, clients = quadratic_clients()
    x, y = np.ones(4), np.ones(4)
    for _ in range(3):
        v = [quadratic_gradients(t[k], b[k], x, y) for k in range(5)]
        V = [np.mean([vk[i] for vk in v], 0) for i in (0, 1)]
        ends = []
        for k in range(5):
            xk, yk = x, y
            for _ in range(4):
                gx, gy = quadratic_gradients(t[k], b[k], xk, yk)
                xk, yk = xk - 0.02 * (gx - v[k][0] + V[0]), yk + 0.01 * (gy - v[k][1] + V[1])
            ends.append((xk, yk))
        x = x + 1.5 * (np.mean([e[0] for e in ends], 0) - x)
        y = y + 0.9 * (np.mean([e[1] for e in ends], 0) - y)
    method = Sagda(0.02, 0.01, 1.5, 0.9, local_steps=4)
    assert_at(everywhere(Quadratic(4, TAU), method, clients, 3).point, x, y)


def test_sagda_costs_two_exchanges_of_dx_plus_dy_floats():
    _, _, clients = quadratic_clients()
    last = everywhere(Quadratic(4, TAU), Sagda(local_steps=8), clients, 3).history[-1]
    assert last["exchanges"] == 2 * 3
    assert last["bytes_up"] == last["bytes_down"] == 2 * (4 + 4) * 8 * 5 * 3
    assert last["gradients"] == (1 + 8) * 5 * 3


def test_sagda_draws_a_batch_of_its_own_for_the_anchor():
    _, _, clients = quadratic_clients(rows=6, noise=1.0)
    rounds = 4
    everywhere(Quadratic(4, TAU), Sagda(local_steps=3), clients, rounds)
    everywhere(Quadratic(4, TAU), Sagda(local_steps=3), clients, rounds, cohort=2)
    _, play = by_hand(Quadratic(4, TAU), Sagda(local_steps=3), clients, "debug")
    state = [play()[0] for _ in range(rounds)][-1]
    assert state.iteration == rounds * (1 + 3)


# ------------------------------------------------------------------ b) unequal steps: Fed-Norm-SGDA


class SumsClient(NamedTuple):
    x: Tensor
    y: Tensor
    sum_x: Tensor
    sum_y: Tensor


class SumsUp(NamedTuple):
    direction_x: Tensor
    direction_y: Tensor
    steps: Tensor


@dataclass(frozen=True)
class FedNormSgda(Algorithm):
    """Fed-Norm-SGDA (Sharma et al., 2023), a_k = 1: clients send the mean of their gradients."""

    primal_lr: float = 0.02
    dual_lr: float = 0.02
    primal_server_lr: float = 0.02  # gamma^s
    dual_server_lr: float = 0.02

    def steps(self, round: int, client: int) -> int:
        return 1 + (client + round) % 4

    def receive(self, down: Point, client: Any, clock: Clock) -> SumsClient:
        return SumsClient(down.x, down.y, torch.zeros_like(down.x), torch.zeros_like(down.y))

    def local_step(self, problem, down, client: SumsClient, batch, clock) -> SumsClient:
        grad = gradients(problem, Point(client.x, client.y), batch)
        return SumsClient(
            client.x - self.primal_lr * grad.x,
            client.y + self.dual_lr * grad.y,
            client.sum_x + grad.x,
            client.sum_y + grad.y,
        )

    def send(self, down, client: SumsClient, clock: Clock):
        up = SumsUp(
            client.sum_x / clock.steps,
            client.sum_y / clock.steps,
            clock.steps.to(client.x.dtype),
        )
        return up, client

    def aggregate(self, problem, server: Point, mean: SumsUp, clock: Clock) -> Point:
        return Point(
            server.x - mean.steps * self.primal_server_lr * mean.direction_x,
            server.y + mean.steps * self.dual_server_lr * mean.direction_y,
        )


def test_unequal_steps_reach_the_saddle_of_equal_clients():
    t, b, clients = quadratic_clients(spread=0.0)
    run = everywhere(Quadratic(4, TAU), FedNormSgda(0.05, 0.1, 0.05, 0.1), clients, 150)
    assert_at(run.point, *quadratic_saddle(t, b))
    taken = sum(1 + (k + r) % 4 for k in range(5) for r in range(150))
    assert run.history[-1]["gradients"] == taken
    assert run.history[-1]["bytes_up"] == 150 * 5 * (4 + 4 + 1) * 8


def test_unequal_steps_equal_a_loop():
    t, b, clients = quadratic_clients()
    x, y = np.ones(4), np.ones(4)
    for r in range(5):
        directions, taken = [], []
        for k in range(5):
            xk, yk, sums = x, y, np.zeros((2, 4))
            steps = 1 + (k + r) % 4
            for _ in range(steps):
                gx, gy = quadratic_gradients(t[k], b[k], xk, yk)
                sums += np.stack([gx, gy])
                xk, yk = xk - 0.03 * gx, yk + 0.01 * gy
            directions.append(sums / steps)
            taken.append(steps)
        gx, gy = np.mean(directions, 0)
        x, y = x - np.mean(taken) * 0.05 * gx, y + np.mean(taken) * 0.04 * gy
    method = FedNormSgda(0.03, 0.01, 0.05, 0.04)
    assert_at(everywhere(Quadratic(4, TAU), method, clients, 5).point, x, y)


def test_unequal_steps_agree_on_minibatches_and_in_partial_cohorts():
    _, _, clients = quadratic_clients(rows=6, noise=1.0)
    everywhere(Quadratic(4, TAU), FedNormSgda(), clients, 6)
    everywhere(Quadratic(4, TAU), FedNormSgda(), clients, 6, cohort=2, allow_partial=True)


class ClockUp(NamedTuple):
    x: Tensor


@dataclass(frozen=True)
class SendsItsClock(FedNormSgda):
    """What `send` reads on the clock is what the server averages."""

    reads: str = "step"

    def send(self, down, client: SumsClient, clock: Clock):  # type: ignore[override]  # as narrow as the test needs
        return ClockUp(getattr(clock, self.reads).to(client.x.dtype).expand(4)), client

    def aggregate(self, problem, server: Point, mean: ClockUp, clock: Clock) -> Point:  # type: ignore[override]  # as narrow as the test needs
        return server._replace(x=mean.x)


@pytest.mark.parametrize("reads", ["step", "iteration", "steps", "client", "round"])
def test_the_clock_of_send_is_the_client_s_own(reads):
    _, _, clients = quadratic_clients()
    run = everywhere(Quadratic(4, TAU), SendsItsClock(reads=reads), clients, 2)
    own = np.array([1 + (k + 1) % 4 for k in range(5)])
    right = {
        "step": own.mean(),
        "iteration": 4 + own.mean(),  # the longest client took 4 steps in round 0
        "steps": own.mean(),
        "client": 2.0,
        "round": 1.0,
    }
    assert float(run.point.x[0]) == pytest.approx(right[reads])


# ------------------------------------------------------------------ d) server steps: FESS-GDA


class SmoothedServer(NamedTuple):
    x: Tensor
    y: Tensor
    anchor: Tensor  # z


@dataclass(frozen=True)
class FessGda(Algorithm):
    """FESS-GDA: LocalSGDA at the clients; the server extrapolates, smooths and projects."""

    primal_lr: float = 0.05
    dual_lr: float = 0.05
    primal_server_lr: float = 1.0
    dual_server_lr: float = 1.0
    smoothing: float = 1.0  # p
    anchor_rate: float = 0.5  # beta
    local_steps: int = 4
    partial: ClassVar[bool] = True

    def init_server(self, problem: Problem, start: Point) -> SmoothedServer:
        return SmoothedServer(*start, start.x)

    def local_step(self, problem, down: Point, client: Point, batch, clock) -> Point:
        grad = gradients(problem, client, batch)
        return Point(
            problem.project_x(client.x - self.primal_lr * grad.x),
            problem.project_y(client.y + self.dual_lr * grad.y),
        )

    def aggregate(self, problem, server: SmoothedServer, mean: Point, clock) -> SmoothedServer:
        pull = self.primal_lr * self.primal_server_lr * self.local_steps * self.smoothing
        x = (
            server.x
            + self.primal_server_lr * (mean.x - server.x)
            - pull * (server.x - server.anchor)
        )
        y = problem.project_y(server.y + self.dual_server_lr * (mean.y - server.y))
        return SmoothedServer(x, y, server.anchor + self.anchor_rate * (x - server.anchor))


def fair_problem() -> tuple[Minimax, Clients, list[np.ndarray]]:
    """Three losses |x - row|^2, weighted by a y on the simplex; six clients with own rows."""
    random = np.random.default_rng(5)
    rows = [random.standard_normal((1, 3, 2)) * 2 for _ in range(6)]

    def loss(x, y, batch):
        return y @ batch.mean((batch.rows[0] - x).square().sum(-1))

    problem = Minimax(loss, torch.zeros(2), torch.full((3,), 1 / 3), project_y=simplex)
    return problem, Clients([(r,) for r in rows], batch_size=None), [r[0] for r in rows]


def numpy_simplex(v: np.ndarray) -> np.ndarray:
    """The threshold by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


def test_fess_gda_stays_on_the_simplex_and_equals_its_box():
    problem, clients, rows = fair_problem()
    method = FessGda(0.05, 0.3, 1.2, 1.7, smoothing=0.6, anchor_rate=0.4, local_steps=3)
    run = everywhere(problem, method, clients, 6, cohort=3)
    federation, play = by_hand(problem, method, clients, "debug", cohort=3)
    x, y, z = np.zeros(2), np.full(3, 1 / 3), np.zeros(2)
    y = y.astype(np.float32).astype(float)  # the problem starts in single precision
    clipped = False
    for r in range(6):
        ends = []
        for k in federation.draw_cohort(None, r, 0):
            xk, yk = x, y
            for _ in range(3):
                gx = 2 * (yk[:, None] * (xk - rows[k])).sum(0)
                gy = ((rows[k] - xk) ** 2).sum(1)
                xk, yk = xk - 0.05 * gx, numpy_simplex(yk + 0.3 * gy)
            ends.append((xk, yk))
        x_new = x + 1.2 * (np.mean([e[0] for e in ends], 0) - x) - 0.05 * 1.2 * 3 * 0.6 * (x - z)
        raw = y + 1.7 * (np.mean([e[1] for e in ends], 0) - y)
        clipped |= bool((raw < 0).any())
        x, y = x_new, numpy_simplex(raw)
        z = z + 0.4 * (x - z)
        state, store = play()
        assert float(state.server.y.sum()) == pytest.approx(1)
        assert bool((state.server.y >= 0).all())
        assert store.states == {}  # clients are stateless
    assert clipped  # otherwise the server's projection was never needed
    assert_at(run.point, x, y, 1e-9)
    assert_at(Point(state.server.x, state.server.y), x, y, 1e-9)  # type: ignore[reportPossiblyUnbound]  # the loop has set it


def test_fess_gda_without_smoothing_is_local_sgda():
    problem, clients, _ = fair_problem()
    method = FessGda(0.05, 0.3, smoothing=0.0, local_steps=3)
    ours = everywhere(problem, method, clients, 20, cohort=3)
    plain = everywhere(
        problem, LocalSGDA(0.05, 0.3, local_steps=3), clients, 20, cohort=3, allow_partial=True
    )
    # x + (m - x) is m up to rounding.
    torch.testing.assert_close(ours.point.x, plain.point.x, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.point.y, plain.point.y, rtol=0, atol=1e-12)
    smoothed = everywhere(problem, FessGda(0.05, 0.3, local_steps=3), clients, 20, cohort=3)
    assert float((smoothed.point.x - plain.point.x).abs().max()) > 1e-6


# ------------------------------------------------------------------ e) state and absence: SCAFFOLD


class ScaffoldServer(NamedTuple):
    x: Tensor
    y: Tensor
    control_x: Tensor
    control_y: Tensor


class ScaffoldClient(NamedTuple):
    x: Tensor
    y: Tensor
    control_x: Tensor
    control_y: Tensor


class ScaffoldUp(NamedTuple):
    x: Tensor
    y: Tensor
    delta_x: Tensor
    delta_y: Tensor


@dataclass(frozen=True)
class ScaffoldGda(Algorithm):
    """SCAFFOLD (option II) on both players, with clients that may be away."""

    lr: float = 0.02
    server_lr: float = 1.0
    local_steps: int = 4
    keep: ClassVar[tuple[str, ...]] = ("control_x", "control_y")
    partial: ClassVar[bool] = True

    def init_server(self, problem: Problem, start: Point) -> ScaffoldServer:
        return ScaffoldServer(*start, torch.zeros_like(start.x), torch.zeros_like(start.y))

    def init_client(self, problem, down: ScaffoldServer, batch) -> ScaffoldClient:
        return ScaffoldClient(down.x, down.y, torch.zeros_like(down.x), torch.zeros_like(down.y))

    def broadcast(self, server: ScaffoldServer, clock: Clock) -> ScaffoldServer:
        return server

    def receive(self, down: ScaffoldServer, client: Any, clock: Clock) -> ScaffoldClient:
        return ScaffoldClient(down.x, down.y, *client)

    def local_step(self, problem, down, client: ScaffoldClient, batch, clock) -> ScaffoldClient:
        grad = gradients(problem, Point(client.x, client.y), batch)
        return client._replace(
            x=client.x - self.lr * (grad.x - client.control_x + down.control_x),
            y=client.y + self.lr * (grad.y - client.control_y + down.control_y),
        )

    def send(self, down, client: ScaffoldClient, clock: Clock):
        scale = clock.steps.double() * self.lr
        new_x = client.control_x - down.control_x + (down.x - client.x) / scale
        new_y = client.control_y - down.control_y + (client.y - down.y) / scale
        up = ScaffoldUp(client.x, client.y, new_x - client.control_x, new_y - client.control_y)
        return up, client._replace(control_x=new_x, control_y=new_y)

    def aggregate(self, problem, server, mean: ScaffoldUp, clock: Clock) -> ScaffoldServer:
        # |S| / N; a quotient of integer tensors would be in single precision.
        share = clock.replies.double() / clock.clients
        return ScaffoldServer(
            server.x + self.server_lr * (mean.x - server.x),
            server.y + self.server_lr * (mean.y - server.y),
            server.control_x + share * mean.delta_x,
            server.control_y + share * mean.delta_y,
        )


def test_arithmetic_with_the_clock_does_not_lose_digits():
    """An author writes |S| / N and steps * lr; neither may bring single precision along."""
    clock = Clock.at(replies=2, clients=6, steps=3)
    one = torch.ones(1, dtype=torch.float64)
    assert float((one * (clock.replies / clock.clients))[0]) == 2 / 6
    assert float((one * (clock.steps * 0.1))[0]) == 3 * 0.1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_server_s_control_is_the_mean_of_all_clients_present_or_not(executor):
    t, b, clients = quadratic_clients(count=6)
    federation, play = by_hand(Quadratic(4, TAU), ScaffoldGda(), clients, executor, cohort=2)
    x, y, c = np.ones(4), np.ones(4), np.zeros((2, 4))
    own = np.zeros((6, 2, 4))
    met: dict[int, int] = {}
    for r in range(12):
        ends, change = [], []
        for k in federation.draw_cohort(None, r, 0):
            met.setdefault(int(k), r)
            xk, yk = x, y
            for _ in range(4):
                gx, gy = quadratic_gradients(t[k], b[k], xk, yk)  # type: ignore
                xk, yk = xk - 0.02 * (gx - own[k][0] + c[0]), yk + 0.02 * (gy - own[k][1] + c[1])
            new = own[k] - c + np.stack([x - xk, yk - y]) / (4 * 0.02)
            change.append(new - own[k])
            ends.append((xk, yk))
            own[k] = new
        x, y = (np.mean([e[i] for e in ends], 0) for i in (0, 1))
        c = c + 2 / 6 * np.mean(change, 0)
        state, store = play()
        assert set(store.states) == set(met)  # a client has a state from its first round on
        assert_at(Point(state.server.x, state.server.y), x, y)
        assert_at(Point(state.server.control_x, state.server.control_y), *c)
        kept = np.zeros((6, 2, 4))
        for k, fields in store.states.items():
            kept[k] = torch.stack(fields).numpy()
        np.testing.assert_allclose(kept, own, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(c, kept.mean(0), rtol=1e-10, atol=1e-10)
    assert len(set(met.values())) > 2  # clients were met at different rounds


def test_scaffold_with_absent_clients_reaches_the_saddle():
    t, b, clients = quadratic_clients(count=6)
    run = everywhere(Quadratic(4, TAU), ScaffoldGda(lr=0.05), clients, 250, cohort=3)
    assert_at(run.point, *quadratic_saddle(t, b), tolerance=1e-8)


def test_client_states_survive_a_resume(tmp_path):
    _, _, clients = quadratic_clients(count=6)

    def go(rounds, folder, resume=False):
        return simulate(
            Quadratic(4, TAU),
            ScaffoldGda(),
            clients,
            rounds,
            cohort=2,
            executor="debug",
            dtype=torch.float64,
            evaluate_every=5,
            folder=folder,
            resume=resume,
        )

    whole = go(20, tmp_path / "whole")
    go(10, tmp_path / "cut")
    cut = go(20, tmp_path / "cut", resume=True)
    assert torch.equal(whole.point.x, cut.point.x)
    files = [tmp_path / name / "final.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


# ------------------------------------------------------------------ phases and their batches


class RowsServer(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Spying(Algorithm):
    """Phases as given, each step notes the rows it got; rows are their own numbers."""

    plan: tuple[dict, ...] = ()

    def phases(self, round: int) -> tuple[Phase, ...]:
        return tuple(self.phase(**changes) for changes in self.plan)

    def local_step(self, problem, down, client, batch, clock):
        problem.seen.append(  # type: ignore
            (int(clock.phase), int(clock.step), int(clock.client), batch[0].rows[0].tolist())
        )
        return client


def phases_seen(*plan: dict, rows: int = 12, rounds: int = 1, clients: int = 1, batch: int = 2):
    problem = Minimax(lambda x, y, batch: batch.mean(batch.rows[0]), torch.zeros(1))
    problem.seen = []  # type: ignore[attr-defined]
    data = [(torch.arange(rows, dtype=torch.float64),) for _ in range(clients)]
    _, play = by_hand(problem, Spying(plan=plan), Clients(data, batch_size=batch), "debug")
    for _ in range(rounds):
        play()
    return problem.seen  # type: ignore[attr-defined]


def test_same_repeats_the_batches_of_the_phase_before():
    seen = phases_seen({"steps": 2}, {"steps": 2, "draw": "same"}, {"steps": 1})
    first, again, fresh = ([s[3] for s in seen if s[0] == p] for p in (0, 1, 2))
    assert first == again
    assert fresh[0] not in first


@pytest.mark.parametrize("second", [1, 3])
def test_after_same_a_fresh_phase_gets_rows_not_yet_drawn(second):
    """12 rows in batches of 2 are 6 steps of one pass: nothing may come twice before."""
    seen = phases_seen({"steps": 2}, {"steps": second, "draw": "same"}, {"steps": 2})
    drawn = {tuple(s[3]) for s in seen if s[0] in (0, 1)}
    fresh = [tuple(s[3]) for s in seen if s[0] == 2]
    assert len(fresh) == 2
    assert not drawn & set(fresh)


def test_a_phase_without_steps_is_an_exchange_without_data():
    seen = phases_seen({"steps": 2}, {"steps": 0}, {"steps": 2})
    assert [s[0] for s in seen] == [0, 0, 2, 2]
    rows = [tuple(s[3]) for s in seen]
    assert len(set(rows)) == 4


def test_whole_data_phases_see_every_row():
    seen = phases_seen({"steps": 1, "data": "whole"}, {"steps": 1})
    assert seen[0][3] == list(range(12))
    assert len(seen[1][3]) == 2


def test_a_whole_data_phase_uses_up_no_minibatch():
    seen = phases_seen({"steps": 1, "data": "whole"}, {"steps": 3}, rounds=2)
    used = [row for s in seen if s[0] == 1 for row in s[3]]
    assert sorted(used) == list(range(12))  # two rounds of three batches of two: one pass


def test_cohorts_of_phases():
    problem = Minimax(lambda x, y, batch: batch.mean(batch.rows[0]), torch.zeros(1))
    problem.seen = []  # type: ignore[attr-defined]
    data = [(torch.arange(2, dtype=torch.float64),) for _ in range(30)]
    plan = (
        {"steps": 1},
        {"steps": 1},
        {"steps": 1, "cohort": "redraw"},
        {"steps": 1, "cohort": "all"},
    )
    _, play = by_hand(problem, Spying(plan=plan), Clients(data), "debug", cohort=5)
    play()
    who = [[s[2] for s in problem.seen if s[0] == p] for p in range(4)]  # type: ignore[attr-defined]
    assert who[0] == who[1]
    assert len(who[0]) == len(who[2]) == 5
    assert who[0] != who[2]
    assert who[3] == list(range(30))
