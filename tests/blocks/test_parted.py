"""Gradients in parts give the numbers of gradients in one piece, whatever is done with them."""

import numpy as np
import pytest
import torch
from torch import nn

from fedminimax.blocks import parted
from fedminimax.blocks.parted import Parted, backward, join_parts, leaf, split
from fedminimax.blocks.vectors import average, plus, plus_difference
from fedminimax.problems.auc import AUC
from fedminimax.problems.gradients import gradients, slope
from fedminimax.types import Point, batch_of

SIZES = (2, 3)


@pytest.fixture(autouse=True)
def large(monkeypatch):
    monkeypatch.setattr(parted, "LARGE", 1)


def in_parts(vector):
    return Parted([part.clone() for part in vector.split(SIZES)])


def by_split(x):
    first, second = split(x, SIZES)
    return (first**2).sum() * second.prod()


@pytest.mark.parametrize("form", [torch.clone, in_parts])
@pytest.mark.parametrize("also_whole", [False, True])
def test_a_gradient_is_that_of_the_vector(form, also_whole):
    def function(x):
        return by_split(x) + ((x**3).sum() if also_whole else 0)

    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    at = leaf(form(x))
    (found,) = backward(function(at), [at])
    plain = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(plain), plain)
    assert torch.equal(join_parts(found), expected)
    assert isinstance(found, Parted) is not also_whole


def test_what_does_not_count_has_a_gradient_of_zeros():
    at, other = leaf(torch.ones(5)), leaf(torch.ones(3))
    found = backward(split(at, SIZES)[0].sum(), [at, other])
    assert join_parts(found[0]).tolist() == [1, 1, 0, 0, 0]
    assert found[1].tolist() == [0, 0, 0]
    (found,) = backward(torch.ones(()), [other])
    assert found.tolist() == [0, 0, 0]


def test_a_leaf_can_be_split_in_two_ways():
    at = leaf(torch.ones(5))
    (found,) = backward(split(at, SIZES)[0].sum() + 2 * split(at, (1, 4))[1].sum(), [at])
    assert found.tolist() == [1, 3, 2, 2, 2]


@pytest.mark.parametrize("rate", [-0.5, torch.tensor(-0.5)])
@pytest.mark.parametrize("second", [torch.clone, in_parts])
@pytest.mark.parametrize("first", [torch.clone, in_parts])
def test_a_move_is_that_of_whole_vectors(first, second, rate):
    vector, direction = torch.arange(5.0), torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0])
    x, d = first(vector), second(direction)
    assert torch.equal(average(x, d, 0.25), average(vector, direction, 0.25))
    assert torch.equal(join_parts(plus(x, rate, d)), plus(vector, rate, direction))
    moved = plus_difference(x, rate, d, x)
    assert torch.equal(join_parts(moved), plus(vector, rate, direction - vector))
    assert torch.equal(join_parts(x), vector)
    assert torch.equal(join_parts(d), direction)


def test_a_vector_in_parts_is_any_other_operations_vector():
    vector = in_parts(torch.arange(5.0))
    assert (vector + 1).tolist() == [1, 2, 3, 4, 5]
    assert torch.stack([vector, vector]).shape == (2, 5)
    assert vector[1:3].tolist() == [1, 2]
    vector.mul_(2)
    assert vector.tolist() == [0, 2, 4, 6, 8]
    assert np.array_equal(vector.numpy(), [0, 2, 4, 6, 8])
    assert repr(vector) == "tensor([0., 2., 4., 6., 8.])"
    assert plus(vector, 1.0, vector).tolist() == [0, 4, 8, 12, 16]


def test_a_problem_with_a_network_has_the_gradient_of_its_function():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    problem = AUC(module, positive_share=0.3)
    point, batch = problem.start(), batch_of(torch.randn(8, 3), torch.arange(8.0) % 2)
    found = gradients(problem, point, (batch,))
    assert isinstance(found.x, Parted)
    x, y = (v.clone().requires_grad_() for v in point)
    expected = Point(*torch.autograd.grad(problem.outer(x, y, batch), (x, y)))
    assert torch.equal(join_parts(found.x), expected.x)
    assert torch.equal(found.y, expected.y)


class Shared(torch.autograd.Function):
    """A function whose derivative is a tensor that somebody holds."""

    held = torch.ones(5)

    @staticmethod
    def forward(ctx, x):
        return (x * Shared.held).sum()

    @staticmethod
    def backward(ctx, *grads):
        return Shared.held.view(5)


def test_a_gradient_has_memory_of_its_own():
    at = leaf(torch.ones(4)), leaf(torch.zeros(4))
    both = backward((at[0].reshape(2, 2) + at[1].reshape(2, 2)).square().sum(), at)
    assert both[0].data_ptr() != both[1].data_ptr()
    at = [leaf(torch.zeros(5))]
    (found,) = backward(Shared.apply(at[0].reshape(5)), at)
    found.zero_()
    assert Shared.held.tolist() == [1] * 5


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.rand(1, 3)) for _ in range(2))

    def forward(self, rows):
        return rows @ (self.a + self.b).T


def test_weights_that_a_network_adds_up_move_apart():
    torch.manual_seed(0)
    problem = AUC(Sum(), positive_share=0.3)
    point, batch = problem.start(), batch_of(torch.randn(8, 3), torch.arange(8.0) % 2)
    grad = gradients(problem, point, (batch,))
    slope = join_parts(grad.x).clone()
    grad = gradients(problem, point, (batch,))
    assert torch.equal(join_parts(plus(point.x, -1.0, grad.x)), point.x - slope)


@pytest.mark.parametrize("form", [torch.clone, in_parts])
@pytest.mark.parametrize("inside", [lambda x: plus(x, 1.0, x), lambda x: average(x, 3 * x, 0.5)])
def test_moves_inside_a_function_count_in_its_derivative(form, inside):
    at = leaf(form(torch.arange(5.0)))
    (found,) = backward(split(at, SIZES)[0].sum() + inside(at).square().sum(), [at])
    assert found.tolist() == [1, 9, 16, 24, 32]


def test_a_derivative_inside_a_function_counts_in_its_derivative():
    def function(x):
        return slope(lambda v: (split(v, SIZES)[0] ** 3).sum(), x).sum()

    at = leaf(torch.arange(5.0))
    (found,) = backward(function(at), [at])
    assert found.tolist() == [0, 6, 0, 0, 0]


def test_vectors_of_other_lengths_or_precisions_are_moved_as_usual():
    vector = in_parts(torch.arange(5.0))
    assert plus(vector, 1.0, torch.ones(1)).tolist() == [1, 2, 3, 4, 5]
    assert plus(vector, 1.0, torch.ones(5).double()).dtype == torch.float64
    other = Parted([torch.ones(4), torch.ones(1)])
    assert join_parts(plus(vector, 1.0, other)).tolist() == [1, 2, 3, 4, 5]
