"""Arithmetic on vectors: in one pass, and nothing that is given is changed."""

import pytest
import torch
from torch.func import grad, vmap

from fedminimax.blocks.vectors import average, choose, plus, plus_difference

RATES = [0.5, torch.tensor(0.5)]


def vectors(count: int) -> list[torch.Tensor]:
    return list(torch.arange(4.0 * count).reshape(count, 4).square().unbind())


@pytest.mark.parametrize("rate", RATES, ids=["number", "tensor"])
def test_a_move_leaves_its_vectors_as_they_are(rate):
    x, d = vectors(2)
    before = x.clone(), d.clone()
    assert torch.equal(plus(x, rate, d), before[0] + 0.5 * before[1])
    assert torch.equal(x, before[0])
    assert torch.equal(d, before[1])


def test_a_direction_of_another_shape_or_precision_is_added():
    x, d = vectors(2)
    assert torch.equal(plus(x, 2.0, torch.ones(1)), x + 2)
    assert torch.equal(plus(x.double(), 2.0, d), x.double() + 2 * d)


def test_derivatives_and_vmap_see_the_same_numbers():
    x, d = vectors(2)

    def squares(x: torch.Tensor) -> torch.Tensor:
        return plus(x, 3.0, 2 * x).square().sum()

    assert torch.equal(grad(squares)(x), 98 * x)
    leaf = x.clone().requires_grad_()
    squares(leaf).backward()
    assert torch.equal(leaf.grad, 98 * x)  # type: ignore[arg-type]
    leaf = x.clone().requires_grad_()
    plus_difference(leaf, 3.0, 2 * leaf, leaf).square().sum().backward()
    assert torch.equal(leaf.grad, 32 * x)  # type: ignore[arg-type]
    rows = torch.stack([x, d])
    assert torch.equal(vmap(lambda v: plus(v, 1.0, v + 1))(rows), 2 * rows + 1)


def test_one_condition_chooses_alone_and_under_vmap():
    x, d = vectors(2)
    assert choose(torch.tensor(True), x, d) is x
    assert choose(torch.tensor(False), x, d) is d
    both = vmap(lambda condition: choose(condition, x, d))(torch.tensor([True, False]))
    assert torch.equal(both, torch.stack([x, d]))


@pytest.mark.parametrize("weight", [1, 1.0, torch.tensor(1.0, dtype=torch.float64)])
def test_an_average_of_weight_one_is_the_new_value_itself(weight):
    old, new = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])
    assert average(old, new, weight) is new
    assert average(old.double(), new.double(), 0.5).tolist() == [2.0, 1.0]
    # Where clients are stacked each has its own weight.
    weights = torch.tensor([1.0, 0.5])
    many = vmap(lambda w: average(old, new, w))(weights)
    assert many.tolist() == [[3.0, 0.0], [2.0, 1.0]]
