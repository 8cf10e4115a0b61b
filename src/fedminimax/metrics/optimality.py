"""Measures of how far a point is from optimal, for objectives whose value does not tell.

All are computed from clients' answers on all rows of a split. f is the federation's objective: the
weighted mean over clients (in a composition, every level is averaged before the next is applied).
Norms are Euclidean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedminimax.types import Measures, Point, Problem, Query


class Full:
    """The federation's objective and its gradients, computed from clients' answers.

    Arguments:
        problem: the problem.
        ask: how clients are asked.
    """

    def __init__(self, problem: Problem, ask: Query):
        self.problem, self.ask = problem, ask
        self.gradients_asked = 0  # of the whole objective, at any depth
        self._values: list[Tensor] = []  # of the inner levels, at the x of the last question

    def value(self, point: Point) -> float:
        """f at a point."""
        return float(self.ask.mean("loss", self._inner_values(point.x)[-1], point.y)[0])

    def gradients(self, point: Point) -> Point:
        """The gradients of f in x and y, by 2 K - 1 exchanges at depth K: K - 1 for the values, one
        for the last level, and K - 1 for products with Jacobians."""
        self.gradients_asked += 1
        values = self._inner_values(point.x)
        slope, dual = self.ask.mean("gradients", values[-1], point.y)
        for level in range(self.problem.depth - 1, 0, -1):
            at = values[level - 1]
            (slope,) = self.ask.mean("pullback", at, slope.to(at.dtype), torch.tensor(level))
        return Point(slope.to(point.x.dtype), dual.to(point.y.dtype))

    def dual_gradient(self, point: Point) -> Tensor:
        """The gradient in y alone, which needs no products with Jacobians."""
        self.gradients_asked += 1
        _, dual = self.ask.mean("gradients", self._inner_values(point.x)[-1], point.y)
        return dual.to(point.y.dtype)

    def _inner_values(self, x: Tensor) -> list[Tensor]:
        # An ascent in y, or a value with a gradient, stays at one x: its levels are asked for once.
        if not self._values or self._values[0] is not x:
            self._values = [x]
            for level in range(1, self.problem.depth):
                (value,) = self.ask.mean("inner", self._values[-1], torch.tensor(level))
                self._values.append(value.to(x.dtype))
        return self._values


class Solved(NamedTuple):
    """The result of an inner optimisation."""

    vector: Tensor
    residual: float  # the norm of the projected gradient there, 0 at a solution
    gradients: int  # how many were asked for; 0 for a closed form
    reached: bool  # is the residual within the tolerance?


def primal_gradient(full: Full, point: Point) -> float:
    """|grad_x f|; if x is limited to a set, |x - P_X(x - grad_x f)|."""
    return _residual(full.problem.project_x, point.x, -full.gradients(point).x)


def dual_gradient(full: Full, point: Point, smoothness: float = 1.0) -> float:
    """l |P_Y(y + grad_y f / l) - y|: 0 exactly when y cannot be improved in first order. With l the
    `smoothness` of f it is the measure of FESS-GDA's Definition 2.1; without a set Y it is
    |grad_y f| for every l."""
    slope = full.dual_gradient(point) / smoothness
    return smoothness * _residual(full.problem.project_y, point.y, slope)


def best_dual(full: Full, point: Point, tolerance: float = 1e-6, most: int = 1000) -> Solved:
    """The y that maximises f(x, .), in closed form if there is one, else by projected ascent.

    Arguments:
        full: the objective.
        point: x, and the y to start from.
        tolerance: the norm of the projected gradient at which to stop.
        most: the most gradients to ask for.

    Without concavity or the PL condition in y, the result may be a local maximum.
    """
    problem = full.problem
    if point.y.numel() == 0:
        return _closed_form(point.y)
    # `dual_from` may be a method's rule to restart from (CODA's), and not the maximiser.
    rule = problem.best_dual_from or problem.dual_from
    if rule is not None and problem.depth == 1:
        (mean,) = full.ask.mean("dual_statistics", point.x)
        return _closed_form(problem.project_y(rule(mean)).to(point.y.dtype))
    return _climb(
        lambda y: full.value(Point(point.x, y)),
        lambda y: full.dual_gradient(Point(point.x, y)),
        problem.project_y,
        point.y,
        tolerance,
        most,
    )


def _closed_form(vector: Tensor) -> Solved:
    return Solved(vector=vector, residual=0.0, gradients=0, reached=True)


def best_primal(full: Full, point: Point, tolerance: float = 1e-6, most: int = 1000) -> Solved:
    """The x that minimises f(., y), by projected descent from point.x."""
    return _climb(
        lambda x: -full.value(Point(x, point.y)),
        lambda x: -full.gradients(Point(x, point.y)).x,
        full.problem.project_x,
        point.x,
        tolerance,
        most,
    )


def phi_gradient(full: Full, point: Point, tolerance: float = 1e-6, most: int = 1000) -> float:
    """|grad Phi(x)| with Phi(x) = max over y of f(x, y): `primal_gradient` at the best y.

    If the best y is unique (f strongly concave or PL in y), this is the gradient of Phi. Otherwise
    it is one of several subgradients; use `moreau_gradient` then. Arguments as for `best_dual`.
    """
    best = best_dual(full, point, tolerance, most).vector
    return primal_gradient(full, Point(point.x, best))


class Moreau(NamedTuple):
    """The Moreau envelope at a point."""

    gradient: float  # |grad Phi_{1/(2 modulus)}(x)|
    nearest: Tensor  # argmin over u of Phi(u) + modulus |u - x|^2
    residual: float  # of the saddle that was solved for it
    gradients: int
    reached: bool  # is the residual within the tolerance?


def moreau_gradient(
    full: Full, point: Point, modulus: float = 1.0, tolerance: float = 1e-6, most: int = 2000
) -> Moreau:
    """2 modulus |x - u|, where u minimises Phi(u) + modulus |u - x|^2: the norm of the gradient of
    Phi's Moreau envelope, for functions that are weakly convex in x and concave in y.

    u and its best y are found by projected extragradient steps on f(u, v) + modulus |u - x|^2.

    Arguments:
        full: the objective.
        point: x, and the y to start from.
        modulus: at least the constant of weak convexity of f in x, such as the papers' smoothness
            constant l. A smaller one gives no meaningful result.
        tolerance: the residual at which to stop.
        most: the most gradients to ask for.
    """
    if not modulus > 0:
        raise ValueError(f"modulus is {modulus!r}; give a number above 0, at least f's curvature")
    problem, x = full.problem, point.x

    def field(at: Point) -> Point:
        """The directions in which both players improve."""
        slope = full.gradients(at)
        return Point(-(slope.x + 2 * modulus * (at.x - x)), slope.y)

    def moved(at: Point, along: Point, step: float) -> Point:
        return Point(
            problem.project_x(at.x + step * along.x), problem.project_y(at.y + step * along.y)
        )

    start = full.gradients_asked
    now, step = point, 1 / (4 * modulus)
    along = field(now)
    while True:
        residual = _distance(moved(now, along, 1.0), now)
        if residual <= tolerance or full.gradients_asked - start >= most:
            break
        ahead = moved(now, along, step)
        there = field(ahead)
        # A step is short enough if step * (change of the field) is below the distance moved.
        if step * _distance(there, along) > 0.9 * _distance(ahead, now):
            step /= 2
            continue
        now, step = moved(now, there, step), step * 1.1
        along = field(now)
    return Moreau(
        gradient=2 * modulus * float(torch.linalg.vector_norm(x - now.x)),
        nearest=now.x,
        residual=residual,
        gradients=full.gradients_asked - start,
        reached=residual <= tolerance,
    )


class Gap(NamedTuple):
    """max over y' of f(x, y')  -  min over x' of f(x', y)."""

    gap: float
    upper: float
    lower: float
    reached: bool  # were both inner problems solved? If not, the gap is a lower bound


def duality_gap(full: Full, point: Point, tolerance: float = 1e-6, most: int = 1000) -> Gap:
    """The duality gap of a convex-concave problem: at least 0, and 0 exactly at a saddle.

    If an inner problem has no solution, the gap is infinite and `reached` is false. Arguments as
    for `best_dual`.
    """
    y, x = best_dual(full, point, tolerance, most), best_primal(full, point, tolerance, most)
    upper = full.value(Point(point.x, y.vector))
    lower = full.value(Point(x.vector, point.y))
    reached = y.reached and x.reached
    return Gap(gap=upper - lower, upper=upper, lower=lower, reached=reached)


def gradient_dissimilarity(full: Full, point: Point) -> tuple[float, float]:
    """How much the clients' gradients differ at a point, for x and for y: the root of the weighted
    mean of |grad f_k - grad f|^2. The server sees averages only."""
    if full.problem.depth > 1:
        raise ValueError(
            "dissimilarity compares the gradients of the clients' own objectives, but in a "
            f"composition of {full.problem.depth} levels a client has none, because every level is "
            "averaged before the next: measure grad_x, or drift"
        )
    grad_x, grad_y, squares = full.ask.mean("gradient_norms", point.x, point.y)
    own = torch.stack([grad_x.square().sum(), grad_y.square().sum()])
    spread = (squares - own).clamp(min=0).sqrt()
    return float(spread[0]), float(spread[1])


def _gap(full: Full, point: Point) -> Measures:
    found = duality_gap(full, point)
    return {"gap": found.gap, "gap_reached": found.reached}


def _moreau(full: Full, point: Point, modulus: float = 1.0) -> Measures:
    found = moreau_gradient(full, point, modulus)
    return {"moreau": found.gradient, "moreau_reached": found.reached}


def _grad_y(full: Full, point: Point, smoothness: float = 1.0) -> Measures:
    return {"grad_y": dual_gradient(full, point, smoothness)}


def _phi(full: Full, point: Point) -> Measures:
    best = best_dual(full, point)
    slope = primal_gradient(full, Point(point.x, best.vector))
    return {"grad_phi": slope, "grad_phi_reached": best.reached}


def _dissimilarity(full: Full, point: Point) -> Measures:
    x, y = gradient_dissimilarity(full, point)
    return {"dissimilarity_x": x, "dissimilarity_y": y}


MEASURES: dict[str, Callable[..., Measures]] = {
    "grad_x": lambda full, point: {"grad_x": primal_gradient(full, point)},
    "grad_y": _grad_y,
    "grad_phi": _phi,
    "moreau": _moreau,
    "gap": _gap,
    "dissimilarity": _dissimilarity,
}
OPTIONS = {"grad_y": "smoothness", "moreau": "modulus"}  # what stands behind a measure's colon
DRIFT = "drift"  # measured during a round, not at a point


def check_names(names: Sequence[str]) -> None:
    """Refuses unknown measures."""
    for name in names:
        _options(name)


def measure(names: Sequence[str], problem: Problem, point: Point, ask: Query) -> Measures:
    """The named measures at a point, with the tolerances and counts that are their defaults;
    "moreau:5" is `moreau` with modulus 5, "grad_y:5" `grad_y` with smoothness 5. `drift` is not
    among them: see `Drift`."""
    check_names(names)
    full = Full(problem, ask)
    found: Measures = {}
    for name in names:
        if name != DRIFT:
            kind, options = _options(name)
            found |= MEASURES[kind](full, point, **options)
    return found


def _options(name: str) -> tuple[str, dict[str, float]]:
    """The measure of a name, and the options after its colon."""
    kind, colon, text = name.partition(":")
    if kind not in (*MEASURES, DRIFT):
        raise ValueError(f"there is no measure {kind!r}; known: {', '.join((*MEASURES, DRIFT))}")
    if not colon:
        return kind, {}
    if kind not in OPTIONS:
        takers = " and ".join(OPTIONS)
        raise ValueError(
            f"the measure {name!r} has an option, but only {takers} take one: {kind!r}"
        )
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(
            f"the measure {name!r} has the {OPTIONS[kind]} {text!r}; give a number above 0: "
            f'"{kind}:5"'
        )
    return kind, {OPTIONS[kind]: number}


def _residual(project: Callable[[Tensor], Tensor], at: Tensor, along: Tensor) -> float:
    return float(torch.linalg.vector_norm(project(at + along) - at))


def _distance(a: Point, b: Point) -> float:
    return float(sum((p - q).square().sum() for p, q in zip(a, b, strict=True)) ** 0.5)


def _climb(
    value: Callable[[Tensor], float],
    gradient: Callable[[Tensor], Tensor],
    project: Callable[[Tensor], Tensor],
    start: Tensor,
    tolerance: float,
    most: int,
) -> Solved:
    """Projected ascent with step sizes that adapt to the change of the gradient."""
    now, step, asked = project(start), 1.0, 1
    height, slope = value(now), gradient(now)
    while True:
        residual = _residual(project, now, slope)
        if residual <= tolerance or asked >= most:
            reached = residual <= tolerance
            return Solved(vector=now, residual=residual, gradients=asked, reached=reached)
        ahead = project(now + step * slope)
        there, higher, asked = gradient(ahead), value(ahead), asked + 1
        # Steps are judged by gradients, because near the maximum the gain in value is below
        # rounding. The value only prevents a step across a valley.
        bends = step * float((there - slope).norm()) > float((ahead - now).norm())
        if bends or higher < height - 1e-12 * max(1.0, abs(height)):
            step /= 2
            continue
        now, slope, height, step = ahead, there, higher, step * 1.5
