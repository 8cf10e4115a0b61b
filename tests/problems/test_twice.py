"""What is differentiated twice has the values and both derivatives of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedminimax.problems.norms import normalise
from fedminimax.problems.twice import DifferentiatedTwice

D = torch.float64
ORDERS = [torch.contiguous_format, torch.channels_last]


def images(*shape: int, order: torch.memory_format = torch.channels_last) -> Tensor:
    return torch.randn(shape, dtype=D).contiguous(memory_format=order)


def agrees(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values, gradients and their gradients, in those inputs that have any."""
    asked = [v for v in inputs if v.requires_grad]

    def found() -> list[Tensor]:
        values = function(*inputs)
        slopes = torch.autograd.grad(values.sin().sum(), asked, create_graph=True)
        twice = torch.cat([s.reshape(-1) for s in slopes]).cos().sum()
        return [values, *slopes, *torch.autograd.grad(twice, asked)]

    theirs = found()
    with DifferentiatedTwice():
        ours = found()
    assert type(ours[0].grad_fn) is not type(theirs[0].grad_fn)  # it is another function
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"dilation": (2, 1), "groups": 2}]
)
@pytest.mark.parametrize("biased", [True, False])
def test_convolution(order: torch.memory_format, data: bool, options: Any, biased: bool):
    x = images(3, 4, 7, 6, order=order).requires_grad_(not data)
    weight = torch.randn(6, 4 // options.get("groups", 1), 3, 3, dtype=D, requires_grad=True)
    bias = torch.randn(6, dtype=D, requires_grad=True) if biased else None
    more = () if bias is None else (bias,)
    agrees(lambda x, weight, *bias: F.conv2d(x, weight, *bias, **options), x, weight, *more)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options", [{}, {"stride": 1, "padding": 1}, {"stride": [2, 1], "ceil_mode": True}]
)
def test_pooling(order: torch.memory_format, options: Any):
    x = images(3, 4, 7, 6, order=order).requires_grad_()
    agrees(lambda x: F.max_pool2d(x * x, 3, **options), x)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 5, 4)])
def test_normalisation(shape: tuple[int, ...]):
    x = images(*shape) if len(shape) == 4 else torch.randn(shape, dtype=D)
    inputs = [v.requires_grad_() for v in (x + 5, *torch.randn(2, 3, dtype=D))]
    agrees(lambda x, weight, bias: normalise(x, weight, bias, 1e-5), *inputs)


def test_a_third_derivative_of_normalisation_is_refused():
    x = torch.randn(5, 2, dtype=D, requires_grad=True)
    with DifferentiatedTwice():
        values = normalise(x, torch.ones(2, dtype=D), torch.zeros(2, dtype=D), 1e-5)
    (once,) = torch.autograd.grad(values.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivative"):
        torch.autograd.grad(once.sin().sum(), x, create_graph=True)


ONES = torch.ones(2, dtype=D)
LEFT_TO_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm without bias": lambda x: normalise(x, ONES, None, 1e-5),
    "a norm without weight": lambda x: normalise(x, None, ONES, 1e-5),
    "a norm that measures": lambda x: F.batch_norm(x, ONES.clone(), ONES.clone(), ONES, ONES, True),
    "a norm by moments": lambda x: F.batch_norm(x, ONES, ONES, ONES, ONES),
    "padding by name": lambda x: F.conv2d(x, torch.ones(2, 2, 3, 3, dtype=D), padding="same"),
    "convolution of one image": lambda x: F.conv2d(x[0], torch.ones(2, 2, 3, 3, dtype=D)),
    "pooling of one image": lambda x: F.max_pool2d(x[0], 2),
    "pooling with places": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "by name": lambda x: F.conv2d(input=x, weight=torch.ones(2, 2, 3, 3, dtype=D)),
    "mixed precision": lambda x: _mixed(lambda: F.max_pool2d(x, 2)),
    "inside vmap": lambda x: torch.func.vmap(lambda x: F.max_pool2d(x[None], 2)[0])(x),
    "another device": lambda x: F.max_pool2d(x.to("meta"), 2),
}


def _mixed(function: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function()


@pytest.mark.parametrize("case", LEFT_TO_TORCH)
def test_what_is_left_to_torch(case: str):
    x, function = images(3, 2, 5, 5).requires_grad_(), LEFT_TO_TORCH[case]
    theirs = function(x)
    with DifferentiatedTwice():
        ours = function(x)
    assert type(ours.grad_fn) is type(theirs.grad_fn)
    if not ours.is_meta:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_norm_of_the_wrong_size_is_refused():
    weight = torch.ones(8, dtype=D)
    with DifferentiatedTwice(), pytest.raises(RuntimeError, match="should contain 5 elements"):
        F.batch_norm(images(3, 5, 2, 2), None, None, weight[:2], weight[2:4], True)


def test_other_threads_are_not_concerned():
    x = images(3, 2, 5, 5).requires_grad_()
    with DifferentiatedTwice(), ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(F.max_pool2d, x, 2).result()
    assert type(theirs.grad_fn) is type(F.max_pool2d(x, 2).grad_fn)
