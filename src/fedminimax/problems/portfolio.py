"""The risk-averse portfolio, a composition of three levels, and its closed-form solutions."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedminimax.blocks.precision import double
from fedminimax.problems.questions import shares
from fedminimax.types import AnswerCheck, Batch, Measures, Point, Problem, Query, Vectors

Budget = Literal["none", "sum", "long_only"]


class Portfolio(Problem):
    """Mean-deviation portfolio (Fed-DR-SCGD paper, eq. 13 and 14): most return, least risk.

    min over x of  risk * sqrt(variance of r'w) - mean of r'w. A row is a return vector r, and both
    moments are over all rows of all clients. In three levels:

        F_1(x)      = ( mean r'w, w )                            w = x, or softmax(x)
        F_2(u1, u2) = ( u1, mean (r'u2 - u1)^2 )
        F_3(z1, z2) = -z1 + risk * sqrt( max(z2, floor) )

    An estimate of z2 can be 0 or less, hence the floor. If the deviation is below sqrt(floor), 1e-4
    by default, the risk's part of the loss is constant, and `gap`, which compares with the minimum
    without a floor, is at least risk * sqrt(floor) at w = 0. So returns that are fractions need a
    smaller floor.

    Missing returns: rows (r,) have none. With rows (r, present), a cell whose present is 0 is
    filled with the asset's mean over all present cells of the federation, which `prepare` asks for
    before round 0: sum_k w_k mean(present r) / sum_k w_k mean(present), w_k the clients' weights.
    So the mean return is that of the present cells, and the variance of an asset is that of its
    present cells times their share.

    Measures: loss (Phi), weight_sum, and, at the weights divided by their sum, return, deviation
    and ratio (return by deviation). Where rows can be seen, also excess (the deviation less the
    smallest with the same return) and gap (Phi less its minimum), or `minimum`, a sentence that
    says why there is none, or why it is not known.

    Arguments:
        dimension: the number of assets.
        risk: the factor of the deviation.
        budget: "none" is the paper's form. With c > 0, Phi(c x) = c Phi(x): its infimum is 0, at
            x = 0, or there is none. "sum" keeps the sum of weights at 1 by projection. "long_only"
            takes w = softmax(x): a sum of 1, no weight below 0.
        floor: as above.
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
        """w, the weight of each asset."""
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
        """The constant part of the level's Jacobian, with 0 in all other entries, and the positions
        of these in the flattened matrix; None if nothing is constant."""
        if level == 1 and self.budget == "long_only":
            return None
        return self._structure[level - 1]

    def prepare(self, ask: Query) -> Portfolio:
        """The problem with each asset's mean return, if returns are missing."""
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

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question == "present":
            return self._present(batch)
        if question == "return_moments":
            returns, weight = double(self._returns(batch)), double(batch.weight)
            return weight @ returns, (weight[:, None] * returns).T @ returns
        return super().answer(question, vectors, batch)

    def return_moments(self, ask: Query) -> Moments:
        """The federation's mean vector and covariance matrix of returns, for simulations: clients
        send their means of r and of r r', which real sites need not disclose."""
        mean, second = ask.mean("return_moments")
        return Moments(mean, second - torch.outer(mean, mean))

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
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
            measures |= self._compare(measures, self.return_moments(ask))
        return measures

    def _compare(self, measures: Measures, moments: Moments) -> Measures:
        """The differences to the best portfolios on the same rows, if there is a formula."""
        if not regular(moments):
            return {"minimum": f"the minimum is not known: {IRREGULAR}"}
        compared: Measures = {}
        if "return" in measures:
            target = torch.tensor([measures["return"]], dtype=torch.float64)
            least = float(frontier(*moments, target).deviation)
            compared["excess"] = measures["deviation"] - least
        best = minimum(*moments, self.risk, self.budget)
        if best.value is None:
            return {**compared, "minimum": best.reason}
        return {**compared, "gap": measures["loss"] - best.value}

    def _present(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean of the returns, missing ones counted as 0, and the share of present ones; empty
        vectors if rows have no column for missing returns."""
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
    """Of returns."""

    mean: Tensor
    covariance: Tensor


class Frontier(NamedTuple):
    """Efficient portfolios."""

    deviation: Tensor  # the smallest, for each target
    weights: Tensor  # those of that portfolio, a row for each target


class Minimum(NamedTuple):
    """The least value of the objective."""

    value: float | None  # None if there is no minimum, or no formula
    weights: Tensor | None
    reason: str  # a sentence: what the minimum is, or why there is none


class _Constants(NamedTuple):
    """Merton's constants, with S the covariance, m the mean and 1 the vector of ones."""

    a: float  # 1' S^-1 1
    b: float  # 1' S^-1 m
    c: float  # m' S^-1 m
    d: float  # a c - b^2
    ones: Tensor  # S^-1 1
    means: Tensor  # S^-1 m


def no_minimum(reason: str) -> Minimum:
    """No minimum, or none that a formula gives, for that reason."""
    return Minimum(value=None, weights=None, reason=reason)


def regular(moments: Moments) -> bool:
    """Is there one efficient portfolio for every return? No if some weights have no risk, as with
    fewer rows than assets, or if all assets have the same mean."""
    spectrum = torch.linalg.eigvalsh(moments.covariance)
    if not float(spectrum[0]) > 1e-12 * float(spectrum[-1]):
        return False
    k = _constants(*moments)
    return k.d > 1e-12 * k.a * k.c


def frontier(mean: Tensor, covariance: Tensor, targets: Tensor) -> Frontier:
    """The efficient frontier in closed form (Merton 1972).

    Arguments:
        mean, covariance: the moments of returns, which must be `regular`.
        targets: mean returns.

    Returns, for each target, the smallest deviation of weights with sum 1 and that mean return, and
    these weights.

    >>> found = frontier(torch.tensor([1.0, 3.0]), torch.eye(2), torch.tensor([2.0]))
    >>> found.weights.tolist(), round(float(found.deviation), 4)
    ([[0.5, 0.5]], 0.7071)
    """
    k, t = _constants(mean, covariance), targets[:, None]
    weights = ((k.c - k.b * t) * k.ones + (k.a * t - k.b) * k.means) / k.d
    # A form that cannot be negative.
    variance = 1 / k.a + (targets - k.b / k.a) ** 2 * k.a / k.d
    return Frontier(variance.sqrt(), weights)


def least_variance(mean: Tensor, covariance: Tensor) -> Tensor:
    """The weights with sum 1 and the smallest deviation."""
    k = _constants(mean, covariance)
    return k.ones / k.a


def tangency(mean: Tensor, covariance: Tensor) -> Tensor | None:
    """The weights with sum 1 and the largest ratio of mean to deviation. None if there is no
    largest one, because the portfolio of least variance has a negative mean return."""
    k = _constants(mean, covariance)
    return k.means / k.b if k.b > 0 else None


def minimum(mean: Tensor, covariance: Tensor, risk: float, budget: Budget = "sum") -> Minimum:
    """The minimum of risk * sqrt(w'Sw) - m'w, S the covariance and m the mean.

    With weights that sum to 1 (`budget` "sum"): along the frontier the deviation is
    sqrt(1/a + (t - b/a)^2 a/d) at the return t, with Merton's constants, so the objective's slope
    in t is 0 where

        t = b/a + d / (a sqrt(a risk^2 - d)),   and there it is   (sqrt(a risk^2 - d) - b) / a

    if a risk^2 > d; otherwise it is unbounded. Without a budget the minimum is 0, at w = 0, if
    risk^2 >= c, the largest squared ratio of mean to deviation; otherwise there is none.
    """
    k = _constants(mean, covariance)
    if budget == "long_only":
        return no_minimum("with weights of at least 0 the minimum has no closed form")
    if budget == "none":
        if risk**2 >= k.c:
            return Minimum(0.0, torch.zeros_like(mean), "without a budget the best is to hold none")
        return no_minimum(
            f"without a budget there is no minimum: risk is {risk:g}, but the best ratio of mean "
            f"to deviation is {math.sqrt(k.c):.4g}, and scaling its weights up pays without end",
        )
    left = k.a * risk**2 - k.d
    if not left > 0:
        return no_minimum(
            f"there is no minimum: risk is {risk:g}, but along the frontier return grows by up to "
            f"{math.sqrt(k.d / k.a):.4g} for each unit of deviation, without end",
        )
    target = k.b / k.a + k.d / (k.a * math.sqrt(left))
    # The frontier's weights, in a form that also holds if all means are the same (d = 0).
    weights = k.ones / k.a + (k.means - k.b / k.a * k.ones) / math.sqrt(left)
    return Minimum((math.sqrt(left) - k.b) / k.a, weights, f"the minimum has return {target:.4g}")


def _constants(mean: Tensor, covariance: Tensor) -> _Constants:
    ones = torch.ones_like(mean)
    solved = torch.linalg.solve(covariance, torch.stack([ones, mean], 1))
    a, b, c = (float(v) for v in (ones @ solved[:, 0], ones @ solved[:, 1], mean @ solved[:, 1]))
    return _Constants(a, b, c, max(a * c - b * b, 0.0), solved[:, 0], solved[:, 1])
