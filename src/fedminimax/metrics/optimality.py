"""How far a point is from optimal: what to watch when the loss itself may go up, down or below 0.

Everything is computed from questions to the clients, on all rows of the split asked about, and
costs what the questions cost. f is the federation's objective, the weighted mean over clients (for
a composition, with every level averaged before the next). Norms are Euclidean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedminimax.types import Ask, Point, Problem


class Full:
    """The federation's objective and its gradients, asked from the clients."""

    def __init__(self, problem: Problem, ask: Ask):
        self.problem, self.ask = problem, ask
        self.gradients_asked = 0  # of the whole objective, whatever its depth
        self._values: list[Tensor] = []  # of the inner levels, at the x asked about last

    def value(self, point: Point) -> float:
        return float(self.ask.mean("loss", self._inner_values(point.x)[-1], point.y)[0])

    def gradients(self, point: Point) -> Point:
        """Depth 1: one exchange. Depth K: K - 1 for the values, one for the last level, and K - 1
        to pull its gradient back through the averaged Jacobians."""
        self.gradients_asked += 1
        values = self._inner_values(point.x)
        slope, dual = self.ask.mean("gradients", values[-1], point.y)
        for level in range(self.problem.depth - 1, 0, -1):
            at = values[level - 1]
            (slope,) = self.ask.mean("pullback", at, slope.to(at.dtype), torch.tensor(level))
        return Point(slope.to(point.x.dtype), dual.to(point.y.dtype))

    def dual_gradient(self, point: Point) -> Tensor:
        """The gradient in y alone, which is not pulled back through the levels."""
        self.gradients_asked += 1
        _, dual = self.ask.mean("gradients", self._inner_values(point.x)[-1], point.y)
        return dual.to(point.y.dtype)

    def _inner_values(self, x: Tensor) -> list[Tensor]:
        # An ascent in y, and a value beside a gradient, stay at one x: its levels are asked for
        # once.
        if not self._values or self._values[0] is not x:
            self._values = [x]
            for level in range(1, self.problem.depth):
                (value,) = self.ask.mean("inner", self._values[-1], torch.tensor(level))
                self._values.append(value.to(x.dtype))
        return self._values


class Solved(NamedTuple):
    """The end of an inner optimisation."""

    vector: Tensor
    residual: float  # the projected gradient there, 0 at a solution
    gradients: int  # asked for on the way; 0 for a closed form
    reached: bool  # whether the residual is within the tolerance


def primal_gradient(full: Full, point: Point) -> float:
    """|grad_x f|; if x has a set, |x - P_X(x - grad_x f)|."""
    return _residual(full.problem.project_x, point.x, -full.gradients(point).x)


def dual_gradient(full: Full, point: Point) -> float:
    """|P_Y(y + grad_y f) - y|: 0 exactly when y cannot be improved in first order."""
    return _residual(full.problem.project_y, point.y, full.dual_gradient(point))


def best_dual(full: Full, point: Point, tolerance: float = 1e-6, most: int = 1000) -> Solved:
    """The y that maximises f(x, .): in closed form if the problem has one, else by projected
    ascent from point.y, until the projected gradient is at most `tolerance` or `most` gradients
    were asked for. A local maximum only, if f is not concave in y (or PL)."""
    problem = full.problem
    if point.y.numel() == 0:
        return Solved(point.y, 0.0, 0, True)
    # A problem may have another y to restart from (CODA's rule) than the one that maximises.
    rule = problem.best_dual_from or problem.dual_from
    if rule is not None and problem.depth == 1:
        (mean,) = full.ask.mean("dual_statistics", point.x)
        return Solved(problem.project_y(rule(mean)).to(point.y.dtype), 0.0, 0, True)
    return _climb(
        lambda y: full.value(Point(point.x, y)),
        lambda y: full.dual_gradient(Point(point.x, y)),
        problem.project_y,
        point.y,
        tolerance,
        most,
    )


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
    """|grad Phi(x)| with Phi(x) = max over y of f(x, y), which is grad_x f at the best y where
    that y is the only one (strongly concave or PL); elsewhere it is one subgradient of many, and
    `moreau_gradient` is the measure to take. If x has a set, as for `primal_gradient`."""
    best = best_dual(full, point, tolerance, most).vector
    return primal_gradient(full, Point(point.x, best))


class Moreau(NamedTuple):
    """The Moreau envelope at a point."""

    gradient: float  # |grad Phi_{1/(2 modulus)}(x)|
    nearest: Tensor  # argmin over u of Phi(u) + modulus |u - x|^2
    residual: float  # of the saddle that was solved for it
    gradients: int
    reached: bool


def moreau_gradient(
    full: Full, point: Point, modulus: float = 1.0, tolerance: float = 1e-6, most: int = 2000
) -> Moreau:
    """2 modulus |x - u|, where u minimises Phi(u) + modulus |u - x|^2: the length of the gradient
    of Phi's Moreau envelope, for functions that are weakly convex in x and concave in y.

    `modulus` is at least the weak convexity of f in x (the papers' l, its smoothness, will do); a
    smaller one measures nothing. u and its best y are found by projected extragradient steps on
    f(u, v) + modulus |u - x|^2, which is then strongly convex in u, until the residual is at most
    `tolerance`.
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
        # A step is right when the field changes by less than it would take to turn back.
        if step * _distance(there, along) > 0.9 * _distance(ahead, now):
            step /= 2
            continue
        now, step = moved(now, there, step), step * 1.1
        along = field(now)
    gradient = 2 * modulus * float(torch.linalg.vector_norm(x - now.x))
    used = full.gradients_asked - start
    return Moreau(gradient, now.x, residual, used, residual <= tolerance)


class Gap(NamedTuple):
    """max over y' of f(x, y')  -  min over x' of f(x', y)."""

    gap: float
    upper: float
    lower: float
    reached: bool  # both inner problems were solved; else the gap is only a lower bound


def duality_gap(full: Full, point: Point, tolerance: float = 1e-6, most: int = 1000) -> Gap:
    """The duality gap of a convex-concave problem: at least 0, and 0 exactly at a saddle. It is
    infinite where an inner problem has no solution; then `reached` is false."""
    y, x = best_dual(full, point, tolerance, most), best_primal(full, point, tolerance, most)
    upper = full.value(Point(point.x, y.vector))
    lower = full.value(Point(x.vector, point.y))
    return Gap(upper - lower, upper, lower, y.reached and x.reached)


def gradient_dissimilarity(full: Full, point: Point) -> tuple[float, float]:
    """How much clients disagree at a point, for x and for y: the root of the weighted mean of
    |grad f_k - grad f|^2. It drives the drift of local steps; clients send no gradient that the
    server would not average."""
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


def client_drift(points: Tensor, weights: Tensor) -> float:
    """The root of the weighted mean of |x_k - mean|^2, for the clients' points (one a row) at the
    end of their local steps.

    >>> client_drift(torch.tensor([[0.0], [2.0]]), torch.tensor([0.5, 0.5]))
    1.0
    """
    share = (weights / weights.sum()).to(points.dtype)
    return float((share @ (points - share @ points).square().sum(1)).sqrt())


def _gap(full: Full, point: Point) -> dict[str, Any]:
    found = duality_gap(full, point)
    return {"gap": found.gap, "gap_reached": found.reached}


def _moreau(full: Full, point: Point, modulus: float = 1.0) -> dict[str, Any]:
    found = moreau_gradient(full, point, modulus)
    return {"moreau": found.gradient, "moreau_reached": found.reached}


def _phi(full: Full, point: Point) -> dict[str, Any]:
    best = best_dual(full, point)
    slope = primal_gradient(full, Point(point.x, best.vector))
    return {"grad_phi": slope, "grad_phi_reached": best.reached}


def _dissimilarity(full: Full, point: Point) -> dict[str, Any]:
    x, y = gradient_dissimilarity(full, point)
    return {"dissimilarity_x": x, "dissimilarity_y": y}


MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "grad_x": lambda full, point: {"grad_x": primal_gradient(full, point)},
    "grad_y": lambda full, point: {"grad_y": dual_gradient(full, point)},
    "grad_phi": _phi,
    "moreau": _moreau,
    "gap": _gap,
    "dissimilarity": _dissimilarity,
}
DRIFT = "drift"  # not asked for at a point, but watched during a round


def check_names(names: Sequence[str]) -> None:
    for name in names:
        _options(name)


def measure(names: Sequence[str], problem: Problem, point: Point, ask: Ask) -> dict[str, Any]:
    """The named measures at a point, with the tolerances and counts that are their defaults;
    "moreau:5" is `moreau` with modulus 5. `drift` is not among them: see `Drift`."""
    check_names(names)
    full = Full(problem, ask)
    found: dict[str, Any] = {}
    for name in names:
        if name != DRIFT:
            kind, options = _options(name)
            found |= MEASURES[kind](full, point, **options)
    return found


def _options(name: str) -> tuple[str, dict[str, float]]:
    """The measure that a name asks for, and the options behind its colon."""
    kind, colon, text = name.partition(":")
    if kind not in (*MEASURES, DRIFT):
        raise ValueError(f"there is no measure {kind!r}; known: {', '.join((*MEASURES, DRIFT))}")
    if not colon:
        return kind, {}
    if kind != "moreau":
        raise ValueError(f"the measure {name!r} has an option, but only moreau takes one: {kind!r}")
    try:
        modulus = float(text)
    except ValueError:
        modulus = 0.0
    if not (modulus > 0 and math.isfinite(modulus)):
        raise ValueError(
            f'the measure {name!r} has the modulus {text!r}; give a number above 0: "moreau:5"'
        )
    return kind, {"modulus": modulus}


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
    """Projected ascent whose steps are as long as the slope along them allows."""
    now, step, asked = project(start), 1.0, 1
    height, slope = value(now), gradient(now)
    while True:
        residual = _residual(project, now, slope)
        if residual <= tolerance or asked >= most:
            return Solved(now, residual, asked, residual <= tolerance)
        ahead = project(now + step * slope)
        there, reached, asked = gradient(ahead), value(ahead), asked + 1
        # By gradients, because near the top a gain in value drowns in rounding; the value only
        # keeps a step from leaping over a valley.
        bends = step * float((there - slope).norm()) > float((ahead - now).norm())
        if bends or reached < height - 1e-12 * max(1.0, abs(height)):
            step /= 2
            continue
        now, slope, height, step = ahead, there, reached, step * 1.5
