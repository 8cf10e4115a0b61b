"""The networks that experiments name, as torch modules that a user could have written."""

from __future__ import annotations

from fedminimax.models.gan import SmallGAN
from fedminimax.models.tabular import MLP, Linear

MODELS = {"linear": Linear, "mlp": MLP, "small_gan": SmallGAN}
