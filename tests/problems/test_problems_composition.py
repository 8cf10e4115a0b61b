"""Compositions of plain functions: levels that do not fit together are named at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedminimax.blocks.projections import simplex
from fedminimax.data.clients import Clients
from fedminimax.data.levels import LevelsData
from fedminimax.data.sinusoids import SinusoidData
from fedminimax.engine.query import LocalQuery
from fedminimax.problems.check_levels import check_levels
from fedminimax.problems.functions import Composition, Minimax
from fedminimax.problems.levels import Levels
from fedminimax.problems.maml import MAML
from fedminimax.types import Point, Problem

CLIENTS = Clients([(torch.eye(3), torch.ones(3)), (torch.eye(3), torch.zeros(3))])


def checked(problem: Problem, clients: Clients = CLIENTS) -> tuple[int, ...]:
    start = problem.start()
    clients = clients.to(start.x.dtype)
    weights = clients.weight_vector("uniform")
    problem = problem.prepare(LocalQuery(problem, clients, "train", weights))
    return check_levels(problem, start, clients.train.batch(0))


def widen(x: Tensor, batch: Any) -> Tensor:
    return torch.cat([x, batch.mean(batch.rows[0])])


def square(v: Tensor, batch: Any) -> Tensor:
    return v @ v


def test_lengths_are_those_of_x_and_of_the_inner_values():
    assert checked(Composition([widen, widen, square], [1.0, 2.0])) == (2, 5, 8)
    assert checked(Composition([square], [1.0, 2.0])) == (2,)
    with_dual = Composition([widen, lambda v, y, batch: v.sum() * y.sum()], [1.0], [0.5, 0.5])
    assert checked(with_dual) == (1, 4)
    assert checked(Minimax(lambda x, y, batch: x @ x, [1.0])) == (1,)


def test_it_holds_for_problems_that_are_not_plain_functions():
    rows = Clients(LevelsData(clients=2, depth=4, dimension=3).client_rows())
    assert checked(Levels(3, 4), rows) == (3, 4, 4, 4)
    with pytest.raises(ValueError, match=r"level 1 of Levels \(of 3\).*the rows are for 4 levels"):
        checked(Levels(3, 3), rows)
    tasks = Clients(SinusoidData(clients=2, tasks=2).client_rows())
    assert checked(MAML(nn.Linear(1, 1), 3), tasks) == (2, 4, 4)


def test_a_level_that_cannot_take_what_the_one_before_returns_is_named():
    def narrow(v: Tensor, batch: Any) -> Tensor:
        return torch.ones(2, 3, dtype=v.dtype) @ v

    problem = Composition([widen, widen, narrow, square], [1.0, 2.0])
    said = r"level 3 of Composition \(of 4\) .* what level 2 returns, a vector of length 8: "
    with pytest.raises(ValueError, match=said):
        checked(problem)
    with pytest.raises(ValueError, match=r"level 1 of Composition.*applied to x.*length 2"):
        checked(Composition([narrow, square], [1.0, 2.0]))
    last = Composition([widen, lambda v, batch: v @ torch.ones(3)], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"level 2 of Composition.*level 1 returns.*length 5"):
        checked(last)


def test_what_a_level_returns_has_the_right_shape():
    with pytest.raises(ValueError, match=r"level 1 .* shape \(\); an inner level returns a vector"):
        checked(Composition([square, square], [1.0]))
    with pytest.raises(ValueError, match=r"level 2 .* shape \(3, 3\).*flatten"):
        checked(Composition([widen, lambda v, batch: batch.rows[0], square], [1.0]))
    with pytest.raises(ValueError, match=r"level 2 .* shape \(4,\); the last level returns a num"):
        checked(Composition([widen, lambda v, batch: v], [1.0]))
    with pytest.raises(ValueError, match=r"level 1 .* returns a float; return a tensor"):
        checked(Composition([lambda x, batch: 1.0, square], [1.0]))  # type: ignore[list-item]


def test_the_advice_about_lengths_is_given_where_lengths_are_the_trouble():
    with pytest.raises(ValueError, match=r"size.*Give levels of which each takes"):
        checked(Composition([widen, lambda v, batch: v @ torch.ones(3)], [1.0, 2.0]))

    def broken(v: Tensor, batch: Any) -> Tensor:
        raise KeyError("no such column")

    with pytest.raises(ValueError, match=r"level 2 of Composition.*no such column'$"):
        checked(Composition([widen, broken, square], [1.0]))


def test_a_level_that_changes_the_type_is_named():
    def wide(v: Tensor, batch: Any) -> Tensor:
        return v.double()

    with pytest.raises(ValueError, match=r"level 2 .* takes torch.float32 and returns .*64"):
        checked(Composition([widen, wide, square], [1.0]))
    assert checked(Composition([widen, wide, square], torch.ones(1).double())) == (1, 4, 4)


def test_one_function_in_the_place_of_a_list_is_told():
    with pytest.raises(ValueError, match=r"levels is one function; give a list"):
        Composition(square, [1.0])  # type: ignore[arg-type]


def test_a_set_of_another_length_is_refused():
    def outer(v: Tensor, y: Tensor, batch: Any) -> Tensor:
        return v.sum() * y.sum()

    Composition([widen, outer], [1.0], [0.5, 0.5], project_y=simplex)
    with pytest.raises(ValueError, match=r"project_y .* y0 \(2\): give a projection"):
        Composition([widen, outer], [1.0], [0.5, 0.5], project_y=lambda y: y[:1])


def test_the_check_costs_nothing_and_changes_nothing():
    problem = Composition([widen, square], [1.0, 2.0])
    point = problem.start()
    ask = LocalQuery(problem, CLIENTS, "train", CLIENTS.weight_vector("uniform"))
    before = [v.clone() for v in point]
    check_levels(problem, Point(*point), CLIENTS.train.batch(0))
    assert ask.cost.exchanges == 0
    for now, then in zip(point, before, strict=True):
        assert torch.equal(now, then)
