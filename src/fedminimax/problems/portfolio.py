"""The risk-averse portfolio: a composition of three levels, and its closed-form solutions."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedminimax.blocks.precision import double
from fedminimax.problems.questions import shares
from fedminimax.types import AnswerCheck, Ask, Batch, Point, Problem

Budget = Literal["none", "sum", "long_only"]


class Portfolio(Problem):
    """Mean-deviation portfolio (papers/fed-dr-scgd.txt, eq. 13 and 14): most return, least risk.

    min over x of  risk * sqrt(variance of r'w) - mean of r'w, with one return vector r a row, and
    both moments over all rows of all clients. In three levels:

        F_1(x)      = ( mean r'w, w )                            w = x, or softmax(x)
        F_2(u1, u2) = ( u1, mean (r'u2 - u1)^2 )
        F_3(z1, z2) = -z1 + risk * sqrt( max(z2, floor) )

    An estimate of z2 can be 0 or below, hence the floor; there the risk has no slope. So where the
    deviation is below sqrt(floor), 1e-4 by default, the risk's part of the loss is flat, and gap,
    which is against the minimum without a floor, does not come below risk * sqrt(floor) at w = 0:
    for returns as fractions give a smaller floor.

    budget: "none" is the paper's form. It is homogeneous: with c > 0, Phi(c x) = c Phi(x), so its
    infimum is 0, at x = 0, or there is none. "sum" keeps the sum of weights at 1 by projection,
    which averaging respects. "long_only" takes w = softmax(x): a sum of 1, no weight below 0.

    Missing returns: rows (r,) are taken as they are. With rows (r, present) a cell whose present is
    0 is filled with the asset's mean over all present cells of the federation, asked before round
    0: sum_k w_k mean(present r) / sum_k w_k mean(present), w_k the clients' weights. So the first
    level stays a mean over rows and clients, its mean return is that of the present cells, and an
    absent cell adds no deviation; an asset's variance is thereby that of its present cells times
    the share of them.

    Measures: loss (Phi), weight_sum, and at the weights divided by their sum return, deviation and
    ratio (the first by the second). Where rows can be seen, also excess (the deviation less the
    least that gives the same return) and gap (Phi less its minimum), or `minimum`: the sentence
    that says why there is none, or why it is not known.
    """

    depth = 3
    checks: ClassVar[Mapping[str, AnswerCheck]] = {
        "present": lambda reply, rows: shares(reply[1:], rows),
    }

    def __init__(
        self, dimension: int, risk: float = 1.0, budget: Budget = "none", floor: float = 1e-8
    ):
        if type(dimension) is not int or dimension < 1:
            raise ValueError(
                f"dimension is {dimension!r}; give the number of assets, a whole number of at "
                "least 1"
            )
        if not 0 <= risk < math.inf:
            raise ValueError(f"risk is {risk!r}; give a finite number of at least 0")
        if not 0 < floor < math.inf:
            raise ValueError(
                f"floor is {floor!r}; give a finite number above 0: the square root of the "
                "variance has no slope at 0"
            )
        if budget not in get_args(Budget):
            known = ", ".join(map(repr, get_args(Budget)))
            raise ValueError(f"budget is {budget!r}; give one of {known}")
        self.dimension, self.risk, self.floor = dimension, risk, floor
        self.budget: Budget = budget
        self.fill: Tensor | None = None
        d = dimension
        own = torch.cat([torch.zeros(1, d), torch.eye(d)])
        above = torch.zeros(2, d + 1)
        above[0, 0] = 1.0
        self._structure = (own, torch.arange(d)), (above, torch.arange(d + 1, 2 * (d + 1)))

    def start(self) -> Point:
        """Equal weights."""
        each = 0.0 if self.budget == "long_only" else 1 / self.dimension
        return Point(torch.full((self.dimension,), each), torch.zeros(0))

    def weights(self, x: Tensor) -> Tensor:
        return torch.softmax(x, 0) if self.budget == "long_only" else x

    def inner(self, level: int, value: Tensor, batch: Batch) -> Tensor:
        returns = self._returns(batch)
        if level == 1:
            w = self.weights(value)
            return torch.cat([batch.mean(returns @ w).reshape(1), w])
        if level == 2:
            u1, u2 = value[:1], value[1:]
            return torch.cat([u1, batch.mean((returns @ u2 - u1) ** 2).reshape(1)])
        return super().inner(level, value, batch)

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return -value[0] + self.risk * torch.clamp(value[1], min=self.floor).sqrt()

    def project_x(self, x: Tensor, /) -> Tensor:
        return x - (x.sum() - 1) / self.dimension if self.budget == "sum" else x

    def jacobian_structure(self, level: int) -> tuple[Tensor, Tensor] | None:
        """The level's Jacobian with 0 for what rows or points change, and the positions of that in
        the flattened matrix; None where nothing is constant."""
        if level == 1 and self.budget == "long_only":
            return None
        return self._structure[level - 1]

    def prepare(self, ask: Ask) -> Portfolio:
        total, share = ask.mean("present")
        known = copy.copy(self)
        if share.numel():
            never = (share == 0).nonzero().flatten().tolist()
            if never:
                raise ValueError(
                    f"no client has a return of asset {never[0]} (counted from 0; {len(never)} "
                    "such): leave it out of the data"
                )
            known.fill = total / share
        return known

    def answer(
        self, question: str, vectors: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, ...]:
        if question == "present":
            return self._present(batch)
        if question == "return_moments":
            returns, weight = double(self._returns(batch)), double(batch.weight)
            return weight @ returns, (weight[:, None] * returns).T @ returns
        return super().answer(question, vectors, batch)

    def return_moments(self, ask: Ask) -> Moments:
        """The federation's mean vector and covariance matrix of returns. The clients send their
        means of r and of r r', which is more than real sites need to tell for a measure."""
        mean, second = ask.mean("return_moments")
        return Moments(mean, second - torch.outer(mean, mean))

    def evaluate(self, point: Point, ask: Ask, moments: Tensor | None = None) -> dict[str, Any]:
        measures = super().evaluate(point, ask)
        total = float(self.weights(point.x).sum())
        measures["weight_sum"] = total
        if total != 0:
            value = point.x if self.budget == "long_only" else point.x / total
            for level in (1, 2):
                (value,) = ask.mean("inner", value, torch.tensor(level))
            mean, deviation = float(value[0]), math.sqrt(max(float(value[1]), 0.0))
            measures |= {"return": mean, "deviation": deviation}
            if deviation > 0:
                measures["ratio"] = mean / deviation
        if ask.sees_rows:
            measures |= self._compared(measures, self.return_moments(ask))
        return measures

    def _compared(self, measures: dict[str, Any], moments: Moments) -> dict[str, Any]:
        """With the best on the same rows, where there is a formula for it."""
        if not regular(moments):
            return {"minimum": f"the minimum is not known: {IRREGULAR}"}
        compared: dict[str, Any] = {}
        if "return" in measures:
            target = torch.tensor([measures["return"]], dtype=torch.float64)
            least = float(frontier(*moments, target).deviation)
            compared["excess"] = measures["deviation"] - least
        best = minimum(*moments, self.risk, self.budget)
        if best.value is None:
            return {**compared, "minimum": best.told}
        return {**compared, "gap": measures["loss"] - best.value}

    def _present(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean of the present returns, absent ones counting 0, and the share of them; nothing
        where nothing is missing."""
        width = batch.features.shape[1:]
        if tuple(width) != (self.dimension,):
            raise ValueError(
                f"the rows hold {tuple(width)} returns each, but dimension is {self.dimension}: "
                "give one return per asset"
            )
        if len(batch.rows) == 1:
            return batch.weight[:0], batch.weight[:0]
        shapes = [tuple(column.shape[1:]) for column in batch.rows]
        if len(shapes) != 2 or shapes[0] != shapes[1]:
            raise ValueError(
                f"a row has columns of shapes {', '.join(map(str, shapes))}; give (returns,), or "
                "(returns, present) with both of one shape: a portfolio has no labels"
            )
        returns, present = batch.rows
        if not bool(((present == 0) | (present == 1)).all()):
            odd = present[(present != 0) & (present != 1)][0]
            raise ValueError(
                f"the second column of the rows, which says what returns are present, has an entry "
                f"{float(odd):g}; give 1 for a present return and 0 for a missing one"
            )
        return batch.mean(returns * present), batch.mean(present)

    def _returns(self, batch: Batch) -> Tensor:
        if len(batch.rows) == 1:
            return batch.rows[0]
        if self.fill is None:
            raise ValueError("the assets' means, for missing returns, are not known: call prepare")
        returns, present = batch.rows
        return returns * present + self.fill.to(returns.dtype) * (1 - present)


IRREGULAR = (
    "some weights have no risk at all, as when there are fewer rows than assets, or all assets "
    "have the same mean"
)


class Moments(NamedTuple):
    mean: Tensor
    covariance: Tensor


class Frontier(NamedTuple):
    deviation: Tensor  # the least, for each target
    weights: Tensor  # that have it, a row for each target


class Minimum(NamedTuple):
    value: float | None  # None where there is none, or no formula
    weights: Tensor | None
    told: str  # a sentence


class _Constants(NamedTuple):
    """Merton's, with S the covariance, m the mean and 1 the vector of ones."""

    a: float  # 1' S^-1 1
    b: float  # 1' S^-1 m
    c: float  # m' S^-1 m
    d: float  # a c - b^2
    ones: Tensor  # S^-1 1
    means: Tensor  # S^-1 m


def regular(moments: Moments) -> bool:
    """Is there one best portfolio for every return? Not if some weights have no risk at all, as
    when there are fewer rows than assets, nor if all assets have the same mean."""
    spectrum = torch.linalg.eigvalsh(moments.covariance)
    if not float(spectrum[0]) > 1e-12 * float(spectrum[-1]):
        return False
    k = _constants(*moments)
    return k.d > 1e-12 * k.a * k.c


def frontier(mean: Tensor, covariance: Tensor, targets: Tensor) -> Frontier:
    """The efficient frontier in closed form (Merton 1972): for every target the weights with sum 1
    and that mean return whose deviation is least. See `regular` for when there is none.

    >>> found = frontier(torch.tensor([1.0, 3.0]), torch.eye(2), torch.tensor([2.0]))
    >>> found.weights.tolist(), round(float(found.deviation), 4)
    ([[0.5, 0.5]], 0.7071)
    """
    k, t = _constants(mean, covariance), targets[:, None]
    weights = ((k.c - k.b * t) * k.ones + (k.a * t - k.b) * k.means) / k.d
    # Not from the weights: this form cannot be negative.
    variance = 1 / k.a + (targets - k.b / k.a) ** 2 * k.a / k.d
    return Frontier(variance.sqrt(), weights)


def least_variance(mean: Tensor, covariance: Tensor) -> Tensor:
    """The weights with sum 1 whose deviation is least of all."""
    k = _constants(mean, covariance)
    return k.ones / k.a


def tangency(mean: Tensor, covariance: Tensor) -> Tensor | None:
    """The weights with sum 1 whose ratio of mean to deviation is largest; None where it grows
    without end along the frontier, because the weights of least variance lose."""
    k = _constants(mean, covariance)
    return k.means / k.b if k.b > 0 else None


def minimum(mean: Tensor, covariance: Tensor, risk: float, budget: Budget = "sum") -> Minimum:
    """The least of risk * sqrt(w'Sw) - m'w, S the covariance and m the mean.

    With weights that sum to 1: along the frontier the deviation is sqrt(1/a + (t - b/a)^2 a/d) at
    the return t, with Merton's constants, so the objective's slope in t is 0 where

        t = b/a + d / (a sqrt(a risk^2 - d)),   and there it is   (sqrt(a risk^2 - d) - b) / a

    if a risk^2 > d; otherwise it falls for ever. Without a budget it is 0 at w = 0 if risk^2 >= c,
    the largest squared ratio of mean to deviation, and else unbounded.
    """
    k = _constants(mean, covariance)
    if budget == "long_only":
        return Minimum(None, None, "with weights of at least 0 the minimum has no closed form")
    if budget == "none":
        if risk**2 >= k.c:
            return Minimum(0.0, torch.zeros_like(mean), "without a budget the best is to hold none")
        return Minimum(
            None,
            None,
            f"without a budget there is no minimum: risk is {risk:g}, but the best ratio of mean "
            f"to deviation is {math.sqrt(k.c):.4g}, and scaling its weights up pays without end",
        )
    left = k.a * risk**2 - k.d
    if not left > 0:
        return Minimum(
            None,
            None,
            f"there is no minimum: risk is {risk:g}, but along the frontier return grows by up to "
            f"{math.sqrt(k.d / k.a):.4g} for each unit of deviation, without end",
        )
    target = k.b / k.a + k.d / (k.a * math.sqrt(left))
    # Of the frontier's weights, in a form that also holds where all means are the same (d = 0).
    weights = k.ones / k.a + (k.means - k.b / k.a * k.ones) / math.sqrt(left)
    return Minimum((math.sqrt(left) - k.b) / k.a, weights, f"the minimum has return {target:.4g}")


def _constants(mean: Tensor, covariance: Tensor) -> _Constants:
    ones = torch.ones_like(mean)
    solved = torch.linalg.solve(covariance, torch.stack([ones, mean], 1))
    a, b, c = (float(v) for v in (ones @ solved[:, 0], ones @ solved[:, 1], mean @ solved[:, 1]))
    return _Constants(a, b, c, max(a * c - b * b, 0.0), solved[:, 0], solved[:, 1])
