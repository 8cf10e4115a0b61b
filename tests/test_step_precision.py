"""How near a compiled LocalSCGDAM step is to an eager one, and what keeps them apart: kinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rows import federation_of
from torch import Tensor, nn

from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.data.clients import Clients
from fedminimax.engine.compiled import Compiled
from fedminimax.engine.debug import Debug
from fedminimax.engine.round import play_round
from fedminimax.engine.work import Executor
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.types import Clock, Point, batch_of

ROWS, PIXELS = 16, 8
METHOD = LocalSCGDAM(local_steps=1)


def network(kinks: bool, norm: bool) -> nn.Sequential:
    bend, pool = (nn.ReLU, nn.MaxPool2d) if kinks else (nn.Tanh, nn.AvgPool2d)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), *[nn.BatchNorm2d(4)] * norm, bend(), pool(2)]
    hidden = nn.Linear(4 * (PIXELS // 2) ** 2, 8)
    return nn.Sequential(*layers, nn.Flatten(), hidden, bend(), nn.Linear(8, 1))


def images(seed: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    pixels = torch.rand(ROWS, 1, PIXELS, PIXELS, generator=chance)
    return pixels, (torch.arange(ROWS) % 4 == 0).float()


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def round_of(executor: Executor, dtype: torch.dtype) -> Any:
    problem = CompositionalAUC(network(kinks=True, norm=True), positive_share=0.25)
    clients = Clients([images(1), images(2)], batch_size=ROWS // 2)
    federation, state, store = federation_of(problem, METHOD, clients, dtype=dtype)
    for _ in range(2):
        state = play_round(federation, state, store, executor)
    return state.server


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_compiled_step_on_a_network_is_the_eager_one(dtype, most):
    compiled, eager = round_of(Compiled(), dtype), round_of(Debug(), dtype)
    for name in ("x", "momentum_x", "momentum_y"):
        assert apart(getattr(compiled, name), getattr(eager, name)) < most


def momentum(problem: CompositionalAUC, x: Tensor) -> Tensor:
    """After a step, in float32, whose gradients are taken at x."""
    batches = batch_of(*images(0)), batch_of(*images(1))
    client = METHOD.init_client(problem, Point(x, problem.start().y), batches)
    still = torch.zeros_like(client.momentum_x), torch.zeros_like(client.momentum_y)
    client = client._replace(momentum_x=still[0], momentum_y=still[1])
    return METHOD.local_step(problem, None, client, batches, Clock.at()).momentum_x


def at_a_kink(kinks: bool) -> float:
    """How far two steps are apart whose start differs by 1e-6 in one number: the bias of a hidden
    unit, put where its activation on one row of the first batch changes its sign."""
    module = network(kinks, norm=False)
    trunk, hidden = module[:4], module[4]
    with torch.no_grad():
        hidden.bias[0] -= hidden(trunk(images(0)[0]))[0, 0]  # type: ignore[index, operator]
    problem = CompositionalAUC(module, positive_share=0.25)
    x = problem.start().x
    before = sum(p.numel() for p in trunk.parameters()) + hidden.weight.numel()  # type: ignore
    found = []
    for sign in (-1, 1):
        near = x.clone()
        near[before] += sign * 5e-7
        found.append(momentum(problem, near))
    return apart(*found)


def test_a_step_at_a_kink_is_decided_by_rounding():
    """One activation of 16 rows and 8 hidden units."""
    assert at_a_kink(kinks=False) < 1e-5
    assert at_a_kink(kinks=True) > 1e-3
