"""The data sets, by the name that an experiment gives them."""

from __future__ import annotations

from fedminimax.data.fama_french import FamaFrench
from fedminimax.data.folder import Folder
from fedminimax.data.gaussian import GaussianData, TiltData
from fedminimax.data.gusto import Gusto
from fedminimax.data.heart import Heart
from fedminimax.data.image_sets import (
    CIFAR10,
    CIFAR100,
    MEDMNIST,
    MNIST,
    STL10,
    CatDogStandIn,
    FashionMNIST,
    MedMNIST,
)
from fedminimax.data.levels import LevelsData
from fedminimax.data.pooled import Pooled
from fedminimax.data.returns import Returns
from fedminimax.data.scikit_learn import ScikitLearn
from fedminimax.data.shapes import Shapes
from fedminimax.data.sinusoids import SinusoidData
from fedminimax.data.synthetic import QuadraticData
from fedminimax.data.uci import UCI

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
    "fashion_mnist": FashionMNIST,
    "mnist": MNIST,
    "cifar10": CIFAR10,
    "cat_dog_stand_in": CatDogStandIn,
    "cifar100": CIFAR100,
    "stl10": STL10,
    "medmnist": MedMNIST,
    "gusto": Gusto,
    "uci": UCI,
    "scikit_learn": ScikitLearn,
}
# Where the files of those come from that have any.
SOURCES = {
    source.name: source
    for source in (
        *(kind.source for kind in (FashionMNIST, MNIST, CIFAR10, CIFAR100, STL10)),
        *MEDMNIST.values(),
        *(kind.source for kind in (Heart, Gusto, FamaFrench)),
    )
}
