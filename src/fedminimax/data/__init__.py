"""The data sets, by the name that an experiment gives them."""

from __future__ import annotations

from fedminimax.data.fama_french import FamaFrench
from fedminimax.data.folder import Folder
from fedminimax.data.gaussian import GaussianData, TiltData
from fedminimax.data.heart import Heart
from fedminimax.data.levels import LevelsData
from fedminimax.data.pooled import Pooled
from fedminimax.data.returns import Returns
from fedminimax.data.shapes import Shapes
from fedminimax.data.sinusoids import SinusoidData
from fedminimax.data.synthetic import QuadraticData

DATASETS = {
    "heart": Heart,
    "folder": Folder,
    "pooled": Pooled,
    "quadratic": QuadraticData,
    "gaussian": GaussianData,
    "tilt": TiltData,
    "shapes": Shapes,
    "levels": LevelsData,
    "sinusoids": SinusoidData,
    "returns": Returns,
    "fama_french": FamaFrench,
}
