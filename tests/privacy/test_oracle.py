"""The oracle: what one row can change, and that nothing passes it by."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedminimax.privacy.noise import Without
from fedminimax.problems.auc import AUC
from fedminimax.problems.compositional_auc import CompositionalAUC
from fedminimax.problems.cross_entropy import CrossEntropy
from fedminimax.problems.gradients import (
    class_slopes,
    dual_statistics,
    gradients,
    inner_jacobian,
    inner_value,
    outer_value,
    pullback,
    value_and_pull,
)
from fedminimax.problems.private import Oracle
from fedminimax.types import Batch, Clock, Point, batch_of

ROWS = 12


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def rows(seed: int = 0) -> Batch:
    chance = torch.Generator().manual_seed(seed)
    features = torch.randn(ROWS, 4, generator=chance, dtype=torch.float64)
    return batch_of(features, (torch.rand(ROWS, generator=chance) < 0.4).double())


def private(problem: Any, clip: float, **settings: Any) -> Any:
    return Oracle(clip, source=Without(), **settings).private(problem, Clock.at())


PROBLEMS = {
    "auc": AUC(net(), positive_share=0.4, score="raw"),
    "compositional": CompositionalAUC(net(), positive_share=0.4, score="raw", inner_lr=0.5),
    "cross-entropy": CrossEntropy(net()),
}
# What a method can ask, as (problem, point, vector, batch) -> numbers in one vector.
ANSWERS: dict[str, Callable[..., torch.Tensor]] = {
    "gradients": lambda p, at, v, b: torch.cat([*gradients(p, at, (b,))]),
    "snapshot": lambda p, at, v, b: torch.cat([*gradients(p, at, (b,), dual_at=at.x + 1)]),
    "outer_value": lambda p, at, v, b: outer_value(p, at.x, at.y, b).reshape(1),
    "dual_statistics": lambda p, at, v, b: dual_statistics(p, at.x, b),
    "inner_value": lambda p, at, v, b: inner_value(p, 1, at.x, b),
    "pullback": lambda p, at, v, b: pullback(p, 1, at.x, v, b),
    "jacobian": lambda p, at, v, b: inner_jacobian(p, 1, at.x, b)[1].flatten(),
}
CASES = [
    (name, answer)
    for name in PROBLEMS
    for answer in ANSWERS
    if (name == "compositional" or answer not in ("inner_value", "pullback", "jacobian"))
    and (name != "cross-entropy" or answer in ("gradients", "outer_value"))
]


def somewhere(problem: Any) -> tuple[Point, torch.Tensor]:
    start = problem.start()
    vector = torch.linspace(-1, 1, len(start.x), dtype=torch.float64)
    return Point(start.x + 0.1 * vector, start.y + 0.3), vector


@pytest.mark.parametrize(("name", "answer"), CASES)
def test_without_clipping_and_noise_it_is_the_exact_answer(name, answer):
    problem, asked, batch = PROBLEMS[name], ANSWERS[answer], rows()
    at, vector = somewhere(problem)
    found = asked(private(problem, 1e9), at, vector, batch)
    torch.testing.assert_close(found, asked(problem, at, vector, batch), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e30, 1e200, math.inf, math.nan])
@pytest.mark.parametrize(("name", "answer"), CASES)
def test_a_row_moves_an_answer_by_no_more_than_its_sensitivity(name, answer, size):
    """The row is replaced by an empty one: its weight is 0, and the others keep theirs."""
    problem, asked, batch, clip = PROBLEMS[name], ANSWERS[answer], rows(), 0.7
    at, vector = somewhere(problem)
    features = batch.features.clone()
    features[0] *= size
    whole = batch._replace(rows=(features, batch.labels))
    others = batch.weight.clone()
    others[0] = 0
    found = [
        asked(private(problem, clip), at, vector, whole._replace(weight=weight))
        for weight in (batch.weight, others)
    ]
    bound = clip / ROWS
    if answer in ("inner_value", "pullback", "jacobian"):
        bound *= problem.inner_lr
    if answer == "pullback":
        bound *= float(vector.norm())
    moved = float((found[0] - found[1]).norm())
    assert moved <= bound * (1 + 1e-9)
    if size == 1e4 and answer in ("gradients", "outer_value"):
        assert moved > 0.5 * bound  # and a row can come near it


def test_the_dual_is_rescaled_before_clipping_and_back_after_it():
    problem, batch = PROBLEMS["auc"], rows()
    at, _ = somewhere(problem)
    exact = gradients(problem, at, (batch,))
    same = gradients(private(problem, 1e9, dual_scale=10.0), at, (batch,))
    torch.testing.assert_close(same.y, exact.y)
    # With a scale of 10 the dual fills the clip, and less is left to x.
    cut = [gradients(private(problem, 0.1, dual_scale=s), at, (batch,)).x for s in (1e-3, 10.0)]
    assert cut[1].norm() < cut[0].norm()


def test_noise_is_as_large_as_it_says():
    problem, batch = PROBLEMS["auc"], rows()
    at, _ = somewhere(problem)
    quiet = torch.cat([*gradients(private(problem, 0.5), at, (batch,))])
    oracle = Oracle(0.5, noise=4.0)
    loud = [
        torch.cat([*gradients(oracle.private(problem, Clock.at(round=r)), at, (batch,))])
        for r in range(60)
    ]
    spread = (torch.stack(loud) - quiet).std()
    assert float(spread) == pytest.approx(4.0 * 0.5 / ROWS, rel=0.1)


def test_padding_rows_add_nothing_and_do_not_change_the_noise():
    problem, batch = PROBLEMS["auc"], rows()
    at, _ = somewhere(problem)
    padded = Batch(
        tuple(torch.cat([c, c[:3]]) for c in batch.rows),
        torch.cat([batch.weight, torch.zeros(3, dtype=torch.float64)]),
        torch.cat([torch.zeros(ROWS), torch.ones(3)]).double(),
    )
    oracle = Oracle(0.5, noise=1.0)
    one, other = (gradients(oracle.private(problem, Clock.at()), at, (b,)) for b in (batch, padded))
    torch.testing.assert_close(one.x, other.x)


def test_each_answer_is_counted_as_what_it_releases():
    problem, batch = PROBLEMS["compositional"], rows()
    at, vector = somewhere(problem)
    asked = private(problem, 1.0)
    gradients(asked, at, (batch, batch))
    assert asked.releases == [0, 1]
    _, pull = value_and_pull(asked, 1, at.x, batch)
    assert asked.releases == [1, 1]
    pull(vector)
    value_and_pull(asked, 1, at.x, batch)[1](vector)
    assert asked.releases == [4, 1]
    inner_jacobian(asked, 1, at.x, batch)
    assert asked.releases == [6, 1]


def test_more_releases_than_were_counted_are_refused():
    problem, batch = PROBLEMS["auc"], rows()
    at, _ = somewhere(problem)
    asked = Oracle(1.0, limit=(1,), source=Without()).private(problem, Clock.at())
    gradients(asked, at, (batch,))
    with pytest.raises(ValueError, match="more than 1 times, as often as was counted"):
        gradients(asked, at, (batch,))


@pytest.mark.parametrize(
    "ask",
    [
        lambda p, at, b: p.outer(at.x, at.y, b),
        lambda p, at, b: p.inner(1, at.x, b),
        lambda p, at, b: p.dual_statistics(at.x, b),
        lambda p, at, b: p.answer("loss", at, b),
        lambda p, at, b: class_slopes(p, at.x[None], b),
    ],
)
def test_what_passes_the_oracle_by_is_refused(ask):
    problem = PROBLEMS["compositional"]
    at, _ = somewhere(problem)
    with pytest.raises(ValueError, match="past the oracle, where a row would be seen"):
        ask(private(problem, 1.0), at, rows())
