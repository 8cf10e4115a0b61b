"""Arithmetic on vectors: what is taken for the result is what the caller has given up, no more."""

import pytest
import torch
from torch.func import grad, vmap

from fedminimax.blocks.parted import Parted
from fedminimax.blocks.vectors import average, chosen, plus

RATES = [0.5, torch.tensor(0.5)]


def vectors(count: int) -> list[torch.Tensor]:
    return list(torch.arange(4.0 * count).reshape(count, 4).square().unbind())


@pytest.mark.parametrize("rate", RATES, ids=["number", "tensor"])
def test_only_a_spent_direction_is_written_over(rate):
    x, d = vectors(2)
    before = x.clone(), d.clone()
    expected = x + 0.5 * d
    assert torch.equal(plus(x, rate, d), expected)
    assert torch.equal(x, before[0])
    assert torch.equal(d, before[1])
    found = plus(x, rate, d, spent=True)
    assert torch.equal(found, expected)
    assert torch.equal(x, before[0])
    assert found.data_ptr() == d.data_ptr()


def test_a_direction_of_another_shape_or_precision_is_not_taken():
    x, d = vectors(2)
    assert torch.equal(plus(x, 2.0, torch.ones(1), spent=True), x + 2)
    assert torch.equal(plus(x.double(), 2.0, d, spent=True), x.double() + 2 * d)


def test_derivatives_and_vmap_see_the_same_numbers():
    x, d = vectors(2)

    def squares(x: torch.Tensor) -> torch.Tensor:
        return plus(x, 3.0, 2 * x, spent=True).square().sum()

    assert torch.equal(grad(squares)(x), 98 * x)
    leaf = x.clone().requires_grad_()
    squares(leaf).backward()
    assert torch.equal(leaf.grad, 98 * x)  # type: ignore[arg-type]
    rows = torch.stack([x, d])
    assert torch.equal(vmap(lambda v: plus(v, 1.0, v + 1, spent=True))(rows), 2 * rows + 1)


def test_one_condition_chooses_alone_and_under_vmap():
    x, d = vectors(2)
    assert chosen(torch.tensor(True), x, d) is x
    assert chosen(torch.tensor(False), x, d) is d
    both = vmap(lambda condition: chosen(condition, x, d))(torch.tensor([True, False]))
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


def test_an_average_of_weight_one_hands_on_no_vector_in_parts():
    """Its memory may be taken by what follows."""
    parts = Parted([torch.ones(2), torch.zeros(1)])
    found = average(torch.full((3,), 5.0), parts, 1.0)
    assert not isinstance(found, Parted)
    assert found.tolist() == [1.0, 1.0, 0.0]
