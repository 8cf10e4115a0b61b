"""What ties the methods with moving averages of inner values to others and to theory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows import (
    auc,
    labelled,
    labelled_by_size,
    labelled_rows,
    linear,
    margin_auc,
    mlp,
    noisy,
    play,
    quadratic,
)
from rows_compositional import contest, three_levels
from test_identities_momentum import points
from torch import Tensor

from fedminimax.algorithms.levelwise_scgdam import LevelwiseSCGDAM
from fedminimax.algorithms.levelwise_scgdm import LevelwiseSCGDM
from fedminimax.algorithms.local_scgdam import LocalSCGDAM, Server
from fedminimax.algorithms.local_scgdm import LocalSCGDM
from fedminimax.algorithms.local_sgdam import LocalSGDAM
from fedminimax.blocks.schedules import InverseRoot
from fedminimax.data.clients import Clients
from fedminimax.engine.simulate import simulate
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.functions import Composition, Minimax
from fedminimax.types import Point, Problem

MIN: dict[str, Any] = {"lr": 0.4, "primal_lr": 0.4, "primal_rate": 1.5, "local_steps": 3}
MAX: dict[str, Any] = {**MIN, "dual_lr": 0.6, "dual_rate": 2.0}


def labelled_whole() -> Clients:
    """Full batches: every level has the same rows, and so has a problem of depth 1."""
    return Clients(labelled_rows(), batch_size=None)


def gap(a: Point, b: Point) -> float:
    return float((torch.cat(a) - torch.cat(b)).abs().max())


def alike(one: list[Point], other: list[Point], within: float = 1e-13) -> None:
    assert max(gap(a, b) for a, b in zip(one, other, strict=True)) <= within
    assert gap(one[0], one[-1]) > 1e-4  # and it moved


# One method is another.


@pytest.mark.parametrize(
    ("plain", "composed"),
    [
        (auc, lambda: CompositionalAUC(mlp(), inner_lr=0.0)),
        (margin_auc, lambda: CompositionalAUC(linear(), form="margin", margin=0.5, inner_lr=0.0)),
    ],
)
def test_without_inner_step_and_memory_local_scgdam_is_local_sgdam(plain, composed):
    """On full batches, because the outer level's rows are not those that a problem of depth 1
    draws."""
    compositional = LocalSCGDAM(**MAX, inner_rate=2.5)  # lr * inner_rate = 1
    one = points(composed(), compositional, labelled_whole(), 3)
    alike(one, points(plain(), LocalSGDAM(**MAX), labelled_whole(), 3))
    remembering = points(composed(), LocalSCGDAM(**MAX, inner_rate=1.0), labelled_whole(), 3)
    assert gap(one[-1], remembering[-1]) > 1e-6


@pytest.mark.parametrize(("problem", "clients"), [(quadratic, noisy), (auc, labelled)])
def test_on_one_level_local_scgdam_is_local_sgdam(problem, clients):
    """The same batches: a problem of depth 1 draws one a step for both."""
    rates: dict[str, Any] = {**MAX, "lr": InverseRoot(0.4)}
    one = points(problem(), LocalSCGDAM(**rates, inner_rate=2.0), clients(), 3)
    alike(one, points(problem(), LocalSGDAM(**rates), clients(), 3))


def test_on_one_level_local_scgdm_is_local_sgdam_of_a_minimisation():
    def squares(x: Tensor, y: Tensor, batch: Any) -> Tensor:
        return batch.mean((batch.features @ x - batch.labels) ** 2)

    def problem() -> Minimax:
        return Minimax(squares, torch.zeros(3))

    one = points(problem(), LocalSCGDM(**MIN, inner_rate=1.0), labelled(), 3)
    alike(one, points(problem(), LocalSGDAM(**MAX), labelled(), 3))


@pytest.mark.parametrize(
    ("both", "primal", "options"),
    [(LocalSCGDAM, LocalSCGDM, {}), (LevelwiseSCGDAM, LevelwiseSCGDM, {"depth": 3})],
)
def test_without_a_dual_the_minimax_method_is_the_other(both, primal, options):
    rest: dict[str, Any] = {"inner_rate": 2.0, **options}
    one = points(three_levels(), both(**MAX, **rest), labelled_by_size(), 3)
    alike(one, points(three_levels(), primal(**MIN, **rest), labelled_by_size(), 3), 0.0)
    assert one[0].y.numel() == 0


def identical(count: int = 3) -> Clients:
    return Clients([labelled_rows()[2]] * count, batch_size=None)


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize(
    ("problem", "depth"), [(contest, 2), (lambda: CompositionalAUC(mlp(), inner_lr=0.5), 2)]
)
def test_identical_clients_need_no_order_of_averages(problem, depth, p):
    options: dict[str, Any] = {**MAX, "inner_rate": 2.0, "local_steps": p}
    printed = points(problem(), LocalSCGDAM(**options), identical(), 4)
    levels = points(problem(), LevelwiseSCGDAM(**options, depth=depth), identical(), 4)
    alike(printed, levels, 1e-12)
    alone = points(problem(), LocalSCGDAM(**options), identical(1), 4)
    alike(printed, alone, 1e-12)


# The floor.


def slope_of(problem: Problem, clients: Clients) -> Callable[[Point], Tensor]:
    """The gradients of the whole federation, every level averaged before the next."""

    def objective(x: Tensor, y: Tensor) -> Tensor:
        batches = [clients.train.batch(k) for k in range(len(clients))]
        for level in range(1, problem.depth):
            x = torch.stack([problem.inner(level, x, b) for b in batches]).mean(0)
        return torch.stack([problem.outer(x, y, b) for b in batches]).mean()

    def found(point: Point) -> Tensor:
        return torch.cat(torch.func.grad(objective, argnums=(0, 1))(*point))

    return found


def far(spread: float, levels: int = 2, dual: bool = True) -> tuple[Composition, Clients]:
    """Linear inner levels, with matrices, and a quadratic last one, with a target, that differ
    between clients by `spread`; exact functions, one row each."""
    random = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return spread * torch.randn(4, 1, *shape, generator=random, dtype=torch.float64)

    columns = [*(torch.eye(2) + drawn(2, 2) for _ in range(levels - 1)), 1 + drawn(2)]

    def inner(level: int) -> Callable[..., Tensor]:
        return lambda x, batch: batch.mean(batch.rows[level] @ x)

    def outer(z: Tensor, y: Tensor, batch: Any) -> Tensor:
        away = z - batch.mean(batch.rows[-1])
        return away @ away / 2 + (0.5 * y @ away - y @ y / 2 if dual else 0.0)

    problem = Composition(
        [*map(inner, range(levels - 1)), outer],
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2 if dual else 0, dtype=torch.float64),
    )
    return problem, Clients(list(zip(*columns, strict=True)), batch_size=None)


FAR: dict[str, Any] = {
    "lr": 0.9,
    "primal_lr": 0.5,
    "primal_rate": 1.0,
    "inner_rate": 1.0,
    "local_steps": 1,
}
FAR_MAX: dict[str, Any] = {**FAR, "dual_lr": 0.5, "dual_rate": 1.0}


def floor(made: tuple[Composition, Clients], method: Any, rounds: int = 80) -> float:
    """How long the federation's gradient is where a run ends."""
    problem, clients = made
    options: dict[str, Any] = {"executor": "vectorised", "evaluate_every": rounds}
    run = simulate(problem, method, clients, rounds, **options)
    assert run.outcome == "finished"
    slope = slope_of(problem, clients)
    assert float(slope(problem.start()).norm()) > 0.1
    return float(slope(run.point).norm())


def test_printed_keeps_a_floor_that_levelwise_removes():
    """Exact functions, one local step: nothing is left but the order of the averages."""
    floors = []
    for spread in (0.05, 0.2):
        floors.append(floor(far(spread), LocalSCGDAM(**FAR_MAX)))
        assert floor(far(spread), LevelwiseSCGDAM(**FAR_MAX)) < 1e-10
    # A covariance over clients: it grows with the square of what they differ by.
    assert floors[0] > 1e-3
    assert 10 < floors[1] / floors[0] < 20


def test_the_floor_falls_with_none_of_the_rates():
    made = far(0.2)
    usual = floor(made, LocalSCGDAM(**FAR_MAX))
    slower = {**FAR_MAX, "primal_lr": 0.3, "dual_lr": 0.4, "primal_rate": 0.8, "dual_rate": 0.7}
    assert floor(made, LocalSCGDAM(**slower), 160) == pytest.approx(usual, rel=1e-6)
    # A slower inner average brings the clients' inner values together, but not their targets.
    calm = {**FAR_MAX, "primal_lr": 0.05, "dual_lr": 0.1, "inner_rate": 0.2}
    assert floor(made, LocalSCGDAM(**calm), 300) > usual / 3


def test_local_scgdm_keeps_a_floor_on_three_levels_that_levelwise_removes():
    made = far(0.1, levels=3, dual=False)
    assert floor(made, LocalSCGDM(**FAR)) > 1e-3
    assert floor(made, LevelwiseSCGDM(**FAR)) < 1e-10


def test_more_local_steps_keep_their_part_of_the_floor():
    """Between synchronisations the clients' products are their own."""
    rates = {**FAR_MAX, "local_steps": 3}
    printed, levels = (
        floor(far(0.2), kind(**rates), 60) for kind in (LocalSCGDAM, LevelwiseSCGDAM)
    )
    assert 1e-3 < levels < printed


def test_where_jacobians_are_common_there_is_no_floor():
    problem, clients = far(0.2)
    common = clients.train.rows(0)[0]
    rows = [(common, clients.train.rows(k)[1]) for k in range(4)]
    made = problem, Clients(rows, batch_size=None)
    assert floor(made, LocalSCGDAM(**FAR_MAX)) < 1e-10


# Output and settings.


def test_output_inner_is_the_server_s_average_of_inner_values():
    def problem() -> CompositionalAUC:
        return CompositionalAUC(mlp(), inner_lr=0.5)

    rates: dict[str, Any] = {**MAX, "inner_rate": 2.0}
    plain, inner = LocalSCGDAM(**rates), LocalSCGDAM(**rates, output="inner")
    for (a, _), (b, _) in zip(
        play(problem(), plain, labelled(), 2), play(problem(), inner, labelled(), 2), strict=True
    ):
        assert torch.equal(a.server.x, b.server.x)
        assert torch.equal(inner.point(b.server).x, b.server.inner[0])
        assert torch.equal(inner.point(b.server).y, plain.point(a.server).y)
        assert not torch.equal(b.server.inner[0], b.server.x)
    first = inner.init_server(problem(), problem().start())
    assert torch.equal(inner.point(first).x, problem().start().x)  # no client has replied


def test_output_inner_is_refused_where_it_is_no_x():
    method = LocalSCGDAM(**MAX, inner_rate=2.0, output="inner")
    with pytest.raises(ValueError, match="Quadratic has no inner level: give x"):
        method.init_server(quadratic(), quadratic().start())
    stepped = CompositionalAUC(mlp(), evaluated="stepped")
    with pytest.raises(ValueError, match='evaluated "stepped", which would take that step again'):
        method.init_server(stepped, stepped.start())
    (x, y), h = contest().start(), torch.zeros(2)
    server = Server(x=x, y=y, inner=(h,), momentum_x=x, momentum_y=y)
    with pytest.raises(ValueError, match="the last inner value has length 2 and x 3: give x"):
        method.point(server)


def test_a_depth_that_is_not_the_problem_s_is_refused():
    method = LevelwiseSCGDAM(**MAX, inner_rate=2.0, depth=3)
    with pytest.raises(ValueError, match="depth is 3, but Composition has depth 2"):
        simulate(contest(), method, labelled(), 1)
    assert method.for_problem(three_levels()).depth == 3


def test_a_dual_is_refused_by_the_method_without_one():
    with pytest.raises(ValueError, match="LocalSCGDM only minimises, but Composition also has"):
        simulate(contest(), LocalSCGDM(), labelled(), 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"inner_rate": 4.0}, r"lr \* inner_rate is 1.2"),
        ({"primal_rate": 4.0}, r"lr \* primal_rate is 1.2"),
        ({"dual_rate": 4.0}, r"lr \* dual_rate is 1.2"),
        ({"output": "h"}, "output is 'h'; give x or inner"),
        ({"lr": -0.1}, "lr is -0.1"),
        ({"local_steps": 0}, "local_steps is 0"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(options, told):
    with pytest.raises(ValueError, match=told):
        LocalSCGDAM(**options)


@pytest.mark.parametrize("kind", [LevelwiseSCGDAM, LevelwiseSCGDM])
def test_bad_settings_of_a_level_wise_method_are_refused_with_a_sentence(kind):
    with pytest.raises(ValueError, match="made a round after the x that they belong to: give x"):
        kind(output="inner")
    with pytest.raises(ValueError, match="depth is 0"):
        kind(depth=0)
