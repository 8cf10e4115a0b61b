"""Batch normalisation by the batch at hand: with padding rows, and with moments that are kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedminimax.blocks.precision import double
from fedminimax.blocks.vectors import transformed


class RowNorm(nn.Module):
    """Batch normalisation by the batch at hand, in which padding rows have no part."""

    row_weight: Tensor

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        # Replaced in each call by the row weights of a padded batch; empty means that all rows
        # count the same.
        self.register_buffer("row_weight", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        row_weight = self.row_weight
        if row_weight.shape[0] == 0:
            if x.numel() > x.shape[1]:
                return normalised(x, self.weight, self.bias, self.eps)
            # One value per channel: torch refuses it, and a padded batch has variance 0 here too.
            row_weight = x.new_ones(1)
        if x.dtype == row_weight.dtype:
            return self._by_rows(x, row_weight)
        # Of a pass in another precision the statistics are taken in that of the weights.
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
    """Batch normalisation that sums x and x^2 over rows, per channel."""

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm):
        super().__init__(norm)
        self.rows, self.sums = 0, torch.zeros(2, norm.num_features, dtype=torch.float64)

    @property
    def moments(self) -> Tensor:
        """E[x] and E[x^2]; those of a layer that the network never uses change nothing."""
        return self.sums / self.rows if self.rows else self.sums + torch.tensor([[0.0], [1.0]])

    def forward(self, x: Tensor) -> Tensor:
        channel = (1, -1, *([1] * (x.dim() - 2)))
        mean = double(x.reshape(*x.shape[:2], -1).mean(2)).mean(0)
        # About the mean, because the variance would be a small difference of E[x^2] and E[x]^2;
        # in double precision only from the sums over the positions of a row on.
        center = mean.to(x)
        about = (x - center.reshape(channel)).reshape(*x.shape[:2], -1)
        variance = double(about.square_().mean(2)).mean(0) - (mean - center.to(mean)) ** 2
        variance = variance.clamp(min=0)
        self.rows += len(x)
        self.sums = self.sums.to(mean) + len(x) * torch.stack([mean, variance + mean * mean])
        return F.batch_norm(x, center, variance.to(x), self.weight, self.bias, eps=self.eps)


def weighted_moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """E[x] and E[x^2] per channel, over rows by weight and over positions evenly."""
    flat = x.flatten(2).mean(2) if x.dim() > 2 else x
    squares = (x * x).flatten(2).mean(2) if x.dim() > 2 else x * x
    return torch.tensordot(weight, flat, dims=1), torch.tensordot(weight, squares, dims=1)


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Each channel with mean 0 and variance 1 over the batch, times its weight, plus its bias."""
    if weight is not None and weight.dtype != x.dtype and transformed():
        # Of a pass in another precision: vmap knows no normalisation of mixed ones.
        return normalised(x.to(weight.dtype), weight, bias, eps).to(x.dtype)
    return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
