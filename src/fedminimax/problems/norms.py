"""Batch normalisation without running statistics: with padding rows, and with summed moments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedminimax.blocks.precision import double
from fedminimax.blocks.vectors import is_transformed


class RowNorm(nn.Module):
    """Batch normalisation by the statistics of the batch, without its padding rows."""

    row_weight: Tensor

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        # `Network` replaces it in each call on a padded batch; empty means equal weights.
        self.register_buffer("row_weight", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        row_weight = self.row_weight
        if row_weight.shape[0] == 0:
            if x.numel() > x.shape[1]:
                return normalise(x, self.weight, self.bias, self.eps)
            # torch refuses one value per channel; here its variance is 0, as in a padded batch.
            row_weight = x.new_ones(1)
        if x.dtype == row_weight.dtype:
            return self._by_rows(x, row_weight)
        # Under mixed precision, statistics are computed in the precision of the weights.
        with torch.autocast(x.device.type, enabled=False):
            return self._by_rows(x.to(row_weight.dtype), row_weight).to(x.dtype)

    def _by_rows(self, x: Tensor, row_weight: Tensor) -> Tensor:
        channel = (1, -1, *([1] * (x.dim() - 2)))
        mean = weighted_moments(x, row_weight)[0]
        variance = weighted_moments(x - mean.reshape(channel), row_weight)[1]
        scaled = (x - mean.reshape(channel)) * torch.rsqrt(variance + self.eps).reshape(channel)
        if self.weight is not None:
            scaled = scaled * self.weight.reshape(channel)
        return scaled if self.bias is None else scaled + self.bias.reshape(channel)


class MeasuringNorm(RowNorm):
    """Batch normalisation that also sums x and x^2 over all rows it sees, per channel."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm):
        super().__init__(norm)
        self.rows, self.sums = 0, torch.zeros(2, norm.num_features, dtype=torch.float64)

    @property
    def moments(self) -> Tensor:
        """E[x] and E[x^2]; 0 and 1 for a layer that the network never uses."""
        return self.sums / self.rows if self.rows else self.sums + torch.tensor([[0.0], [1.0]])

    def forward(self, x: Tensor) -> Tensor:
        channel = (1, -1, *([1] * (x.dim() - 2)))
        mean = double(x.reshape(*x.shape[:2], -1).mean(2)).mean(0)
        # Around the mean, because E[x^2] - E[x]^2 would lose digits. The sums over the positions of
        # a row are in the precision of x, all others in double precision.
        center = mean.to(x)
        about = (x - center.reshape(channel)).reshape(*x.shape[:2], -1)
        variance = double(about.square_().mean(2)).mean(0) - (mean - center.to(mean)) ** 2
        variance = variance.clamp(min=0)
        self.rows += len(x)
        self.sums = self.sums.to(mean) + len(x) * torch.stack([mean, variance + mean * mean])
        return F.batch_norm(x, center, variance.to(x), self.weight, self.bias, eps=self.eps)


def weighted_moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """E[x] and E[x^2] per channel: rows have the given weights, positions equal ones."""
    flat = x.flatten(2).mean(2) if x.dim() > 2 else x
    squares = (x * x).flatten(2).mean(2) if x.dim() > 2 else x * x
    return torch.tensordot(weight, flat, dims=1), torch.tensordot(weight, squares, dims=1)


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Batch normalisation: each channel with mean 0 and variance 1, times weight, plus bias."""
    if weight is not None and weight.dtype != x.dtype and is_transformed():
        # Mixed precision, which normalisation under vmap does not support.
        return normalise(x.to(weight.dtype), weight, bias, eps).to(x.dtype)
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
