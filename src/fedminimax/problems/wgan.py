"""A Wasserstein GAN on one-dimensional Gaussians, whose saddle is known."""

from __future__ import annotations

import torch
from torch import Tensor

from fedminimax.types import Batch, Measures, Point, Problem, Query, Vectors


class WGAN(Problem):
    """The regularised Wasserstein GAN of the FESS-GDA paper (Section 4.1): x and y have length 2.

    The generator x = (mu, sigma) makes mu + sigma z; the critic y = (phi_1, phi_2) scores
    D(v) = phi_1 v + phi_2 v^2; a row is a pair (z, real):

        f(x, y) = mean of ( D(real) - D(mu + sigma z) )  -  penalty |y|^2

    With real = mu' + sigma' z on every row, as in the paper, x = (mu', sigma') and y = 0 is a
    saddle. D depends on sigma through sigma^2 only (up to the mean of z), so sigma starts above 0.
    Measures: `error`, (mu - mu')^2 + (sigma - sigma')^2, with mu' and sigma' from the rows by least
    squares; and `distribution_error`, the same without the sign of sigma, because -sigma makes the
    same distribution.

    Arguments:
        penalty: the paper's lambda.
        mu, sigma: where the generator starts.
    """

    monitor = "error"

    def __init__(self, penalty: float = 0.01, mu: float = 1.0, sigma: float = 1.0):
        if not penalty > 0:
            raise ValueError(
                f"penalty is {penalty!r}; give a number above 0: it makes the dual strongly concave"
            )
        self.penalty, self.mu, self.sigma = penalty, mu, sigma

    def start(self) -> Point:
        return Point(torch.tensor([self.mu, self.sigma]), torch.zeros(2))

    def features(self, x: Tensor, batch: Batch) -> Tensor:
        """The means of real - made and of real^2 - made^2, which phi_1 and phi_2 multiply."""
        z, real = batch.rows
        made = x[0] + x[1] * z
        return torch.stack([batch.mean(real - made), batch.mean(real**2 - made**2)])

    def outer(self, value: Tensor, y: Tensor, batch: Batch) -> Tensor:
        return y @ self.features(value, batch) - self.penalty * (y @ y)

    def dual_statistics(self, x: Tensor, batch: Batch) -> Tensor:
        return self.features(x, batch)

    def dual_from(self, mean: Tensor) -> Tensor:
        return mean / (2 * self.penalty)

    def answer(self, question: str, vectors: Vectors, batch: Batch) -> Vectors:
        if question == "line":
            z, real = batch.rows
            return (torch.stack([batch.mean(v) for v in (z, real, z * z, z * real)]),)
        return super().answer(question, vectors, batch)

    def target(self, ask: Query) -> Tensor:
        """mu' and sigma', by least squares."""
        z, real, zz, z_real = ask.mean("line")[0]
        sigma = (z_real - z * real) / (zz - z * z)
        return torch.stack([real - sigma * z, sigma])

    def evaluate(self, point: Point, ask: Query, moments: Tensor | None = None) -> Measures:
        mu, sigma = point.x.tolist()
        true_mu, true_sigma = self.target(ask).tolist()

        def error(sigma: float, true_sigma: float) -> float:
            return (mu - true_mu) ** 2 + (sigma - true_sigma) ** 2

        return super().evaluate(point, ask) | {
            "error": error(sigma, true_sigma),
            "distribution_error": error(abs(sigma), abs(true_sigma)),
            "mu": mu,
            "sigma": sigma,
        }
