"""Rates that change during a run, stages, and projections."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedminimax.algorithms.local_sgda import LocalSGDA
from fedminimax.blocks.projections import ball, nonnegative, simplex
from fedminimax.blocks.schedules import (
    SCHEDULES,
    Constant,
    InverseRoot,
    Schedule,
    Stagewise,
    StepDecay,
    at,
)
from fedminimax.blocks.stages import grow, stage_of
from fedminimax.types import Clock

ALL = [
    Constant(0.3),
    StepDecay(0.3, factor=4, at=(2, 5)),
    StepDecay(0.3, factor=2, at=(3,), unit="iteration"),
    Stagewise(0.3, factor=3.0),
    InverseRoot(0.3, shift=2.0, power=0.5),
    InverseRoot(0.3, shift=1.0, power=1 / 3, unit="round"),
]


def by_formula(schedule: Schedule, round: int, iteration: int, stage: int) -> float:
    now = {"round": round, "iteration": iteration, "stage": stage}
    if isinstance(schedule, StepDecay):
        return schedule.value / schedule.factor ** sum(now[schedule.unit] >= m for m in schedule.at)
    if isinstance(schedule, Stagewise):
        return schedule.value / schedule.factor**stage
    if isinstance(schedule, InverseRoot):
        return schedule.value / (schedule.shift + now[schedule.unit]) ** schedule.power
    return schedule.value


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_values_are_the_formula_s(schedule):
    for round, iteration, stage in itertools.product((0, 1, 2, 4, 5, 100), (0, 3, 50), (0, 1, 4)):
        clock = Clock.at(round=round, iteration=iteration, stage=stage)
        right = by_formula(schedule, round, iteration, stage)
        assert float(at(schedule, clock)) == pytest.approx(right, rel=1e-14)


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_schedule_is_a_scalar_tensor_that_leaves_the_precision_alone(schedule, dtype):
    value = at(schedule, Clock.at(round=3, iteration=7, stage=1))
    assert isinstance(value, torch.Tensor)
    assert value.shape == ()
    assert (value * torch.ones(2, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_schedules_under_vmap(schedule):
    clocks = Clock(*(torch.arange(6).to(number.dtype) for number in Clock.at()))
    many = torch.vmap(lambda clock: at(schedule, clock))(clocks)
    right = [by_formula(schedule, i, i, i) for i in range(6)]
    np.testing.assert_allclose(many.numpy(), right, rtol=1e-14)  # type: ignore
    one = torch.vmap(lambda clock, x: at(schedule, clock) * x)(clocks, torch.ones(6, 2))
    assert one.dtype == torch.float32


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_one_graph_serves_every_value_of_a_schedule(schedule):
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(lambda clock: at(schedule, clock) * 2, backend=backend, fullgraph=True)
    for i in range(5):
        value = step(Clock.at(round=i, iteration=i, stage=i))
        assert float(value) == pytest.approx(2 * by_formula(schedule, i, i, i), rel=1e-14)
    assert len(compiles) == 1
    torch._dynamo.reset()


def test_a_number_is_its_own_rate():
    assert at(0.25, Clock.at(round=9)) == 0.25


def test_every_schedule_has_a_name():
    assert set(SCHEDULES.values()) == set(Schedule.__subclasses__())


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        Constant,
        Stagewise,
        lambda v: StepDecay(0.1, factor=v),
        lambda v: StepDecay(0.1, at=(1, v)),
        lambda v: InverseRoot(0.1, shift=v),
        lambda v: InverseRoot(0.1, power=v),
    ],
)
def test_values_that_no_rate_can_have_are_refused(make, bad):
    with pytest.raises(ValueError, match="give a finite number"):
        make(bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StepDecay(0.1, factor=0.0, at=(1,)),
        lambda: Stagewise(0.1, factor=0.0),
        lambda: InverseRoot(0.1, shift=0.0),
    ],
    ids=["step_decay", "stagewise", "inverse_root"],
)
def test_a_schedule_that_divides_by_zero_is_refused(make):
    """At round 1, stage 1 and iteration 0 these would be infinite."""
    with pytest.raises(ValueError, match="schedule"):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: StepDecay(0.1, unit="epoch"),  # type: ignore[arg-type]
        lambda: InverseRoot(0.1, unit="rounds"),  # type: ignore[arg-type]
        lambda: Constant("0.1"),  # type: ignore[arg-type]
    ],
)
def test_words_that_are_no_unit_and_text_that_is_no_number_are_refused_when_given(make):
    with pytest.raises(ValueError, match="schedule"):
        make()


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "0.1", None])
def test_rates_of_methods_are_checked_where_they_are_given(bad):
    with pytest.raises(ValueError, match=r"LocalSGDA: primal_lr is .* or a schedule"):
        LocalSGDA(primal_lr=bad)


@pytest.mark.parametrize("bad", [0, -3, 1.5, True, "8"])
def test_counts_of_methods_are_checked_where_they_are_given(bad):
    with pytest.raises(ValueError, match=r"LocalSGDA: local_steps is .* whole number"):
        LocalSGDA(local_steps=bad)


# ------------------------------------------------------------------ stages


@pytest.mark.parametrize(("length", "growth"), [(3, 1.0), (2, 2.0), (4, 1.5), (5, 0.5), (1, 1.0)])
def test_stages_follow_one_another_with_the_lengths_asked_for(length, growth):
    stages = [stage_of(r, length, growth) for r in range(60)]
    assert stages[0].number == 0
    for before, after in itertools.pairwise(range(60)):
        moved = stages[after].number - stages[before].number
        assert moved == (1 if stages[before].last_round == before else 0)
    lengths = [sum(s.number == n for s in stages) for n in range(3)]
    assert lengths == [max(1, int(length * growth**n + 0.5)) for n in range(3)]


def test_grown_counts_stay_at_least_one():
    assert [grow(8, 2.0, s) for s in range(3)] == [8, 16, 32]
    assert [grow(4, 0.25, s) for s in range(4)] == [4, 1, 1, 1]


# ------------------------------------------------------------------ projections

numbers = st.floats(-50, 50, allow_nan=False, width=64)
vectors = st.lists(numbers, min_size=1, max_size=5)


def nearest_on_simplex(v: np.ndarray) -> np.ndarray:
    """The best over all supports: on each, the projection onto the plane sum = 1."""
    best, distance = None, math.inf
    for size in range(1, len(v) + 1):
        for support in map(list, itertools.combinations(range(len(v)), size)):
            point = np.zeros(len(v))
            point[support] = v[support] - (v[support].sum() - 1) / size
            if point.min() >= -1e-12 and (d := ((point - v) ** 2).sum()) < distance:
                best, distance = point, d
    assert best is not None
    return best


@settings(max_examples=150, deadline=None)
@given(vectors)
def test_simplex_is_the_nearest_point_by_brute_force(values):
    v = torch.tensor(values, dtype=torch.float64)
    ours = simplex(v)
    assert float(ours.sum()) == pytest.approx(1, abs=1e-12)
    assert float(ours.min()) >= 0
    np.testing.assert_allclose(ours.numpy(), nearest_on_simplex(v.numpy()), atol=1e-9)
    torch.testing.assert_close(simplex(ours), ours, rtol=0, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(vectors, st.floats(0.1, 20))
def test_ball_is_the_nearest_point(values, radius):
    v = torch.tensor(values, dtype=torch.float64)
    norm = float(v.norm())
    right = v if norm <= radius else v * radius / norm
    ours = ball(radius)(v)
    torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)
    assert float(ours.norm()) <= radius * (1 + 1e-12)


@settings(max_examples=50, deadline=None)
@given(vectors, vectors)
def test_projections_bring_points_no_further_apart(a, b):
    size = min(len(a), len(b))
    u, v = (torch.tensor(w[:size], dtype=torch.float64) for w in (a, b))
    for project in (simplex, ball(2.0), nonnegative):
        assert float((project(u) - project(v)).norm()) <= float((u - v).norm()) + 1e-9


@pytest.mark.parametrize(("size", "dtype"), [(1e8, torch.float32), (1e20, torch.float64)])
def test_the_simplex_takes_entries_of_any_size(size, dtype):
    for entries, expected in (
        ([size, 0.0, size], [0.5, 0.0, 0.5]),
        ([size, -size, 0.25], [1.0, 0.0, 0.0]),
        ([-size, -size], [0.5, 0.5]),
        ([0.5, 0.25, *[-torch.finfo(dtype).max] * 3], [0.625, 0.375, 0.0, 0.0, 0.0]),
    ):
        assert simplex(torch.tensor(entries, dtype=dtype)).tolist() == expected


def test_points_of_the_set_stay_where_they_are():
    inside = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    torch.testing.assert_close(simplex(inside), inside, rtol=0, atol=1e-15)
    assert torch.equal(ball(1.0)(inside), inside)
    assert torch.equal(ball(1.0)(torch.zeros(3)), torch.zeros(3))
    assert torch.equal(nonnegative(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert torch.equal(simplex(torch.tensor([7.0])), torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("project", [simplex, ball(0.7), nonnegative])
def test_projections_vmap_and_keep_the_precision(project, dtype):
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = torch.vmap(project)(rows)
    assert together.dtype == dtype
    for row, ours in zip(rows, together, strict=True):
        torch.testing.assert_close(ours, project(row))
    compiled = torch.compile(project, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(rows[0]), together[0])
    torch._dynamo.reset()
