"""How near a compiled LocalSCGDAM step is to an eager one, and what keeps them apart: kinks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rows import federation_of
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fedminimax.algorithms.local_scgdam import LocalSCGDAM
from fedminimax.data.clients import Clients
from fedminimax.engine.executors.compiled.executor import Compiled
from fedminimax.engine.executors.debug import Debug
from fedminimax.engine.job import Executor
from fedminimax.engine.round import play_round
from fedminimax.models.cnn import FashionCNN
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.types import Batch, Clock, Point, batch_of

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


def momentum(problem: CompositionalAUC, x: Tensor, batches: tuple[Batch, Batch]) -> Tensor:
    """After a step whose gradients are taken at x."""
    client = METHOD.init_client(problem, Point(x, problem.start().y.to(x)), batches)
    still = torch.zeros_like(client.momentum_x), torch.zeros_like(client.momentum_y)
    client = client._replace(momentum_x=still[0], momentum_y=still[1])
    return METHOD.local_step(problem, None, client, batches, Clock.at()).momentum_x  # type: ignore[arg-type]  # the step reads nothing of it


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
    batches = batch_of(*images(0)), batch_of(*images(1))
    found = []
    for sign in (-1, 1):
        near = x.clone()
        near[before] += sign * 5e-7
        found.append(momentum(problem, near, batches))
    return apart(*found)


def test_a_step_at_a_kink_is_decided_by_rounding():
    """One activation of 16 rows and 8 hidden units."""
    assert at_a_kink(kinks=False) < 1e-5
    assert at_a_kink(kinks=True) > 1e-3


# The network of the paper, on which the difference was first seen.


def cnn() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FashionCNN().build((1, 28, 28))


def noise(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    pixels = torch.rand(32, 1, 28, 28, generator=chance)
    return pixels.to(dtype), (torch.arange(32) % 4 == 0).to(dtype)


def step_and_choices(seed: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The momentum after a step, and what each ReLU and max-pooling has chosen on the way."""
    chosen: list[Tensor] = []

    def note(part: nn.Module, given: tuple) -> None:
        values = given[0].detach()
        if isinstance(part, nn.ReLU):
            chosen.append(values > 0)
        elif isinstance(part, nn.MaxPool2d):
            most, places = F.max_pool2d(values, 2, return_indices=True)
            chosen.append(places * (most > 0))  # the others have no part in a gradient

    problem = CompositionalAUC(cnn().to(dtype), positive_share=0.25)
    batches = batch_of(*noise(seed, dtype)), batch_of(*noise(seed + 1000, dtype))
    noting = register_module_forward_pre_hook(note)
    try:
        return momentum(problem, problem.start().x.to(dtype), batches), chosen
    finally:
        noting.remove()


@pytest.mark.full
def test_the_network_of_the_paper_is_right_to_rounding_unless_a_choice_differs():
    """float32 against float64, both eager, step after step: some 5,000,000 choices in each."""
    near, other = [], []
    for seed in range(30):
        (single, choices), (double, exact) = (
            step_and_choices(seed, dtype) for dtype in (torch.float32, torch.float64)
        )
        pairs = zip(choices, exact, strict=True)
        differ = sum(int((one != two).sum()) for one, two in pairs)
        (other if differ else near).append((apart(single.double(), double), differ))
    print(f"no choice differs: {len(near)} steps, at most {max(near)[0]:.1e} apart")
    print("apart, and choices that differ:", *(f"{a:.1e} ({n})" for a, n in sorted(other)))
    assert max(near)[0] < 1e-5
    assert max(other)[0] > 10 * max(near)[0]


@pytest.mark.full
def test_a_compiled_step_on_the_network_of_the_paper_is_the_eager_one():
    clients = Clients([noise(1, torch.float64), noise(2, torch.float64)], batch_size=32)
    problem = CompositionalAUC(cnn(), positive_share=0.25)
    federation, state, store = federation_of(problem, METHOD, clients, dtype=torch.float64)
    state = play_round(federation, state, store, Debug())
    compiled, eager = (
        play_round(federation, state, copy.deepcopy(store), executor).server
        for executor in (Compiled(), Debug())
    )
    for name in ("x", "momentum_x", "momentum_y"):
        assert apart(getattr(compiled, name), getattr(eager, name)) < 1e-10
