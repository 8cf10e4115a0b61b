"""The papers' networks: in Python by class (`fm.models.MLP`), in files by the names in `MODELS`.

Each is a frozen dataclass of options whose `build(shape, outputs)` makes a plain torch module.
"""

from __future__ import annotations

from fedminimax.models.cnn import CIFARCNN as CIFARCNN
from fedminimax.models.cnn import CNN7 as CNN7
from fedminimax.models.cnn import FashionCNN as FashionCNN
from fedminimax.models.cnn import LeNet5 as LeNet5
from fedminimax.models.densenet import DenseNet121 as DenseNet121
from fedminimax.models.gan import SmallGAN as SmallGAN
from fedminimax.models.resnet import ResNet20 as ResNet20
from fedminimax.models.tabular import MLP as MLP
from fedminimax.models.tabular import MLP3 as MLP3
from fedminimax.models.tabular import Linear as Linear

MODELS = {
    "linear": Linear,
    "mlp": MLP,
    "mlp3": MLP3,
    "fashion_cnn": FashionCNN,
    "lenet5": LeNet5,
    "cifar_cnn": CIFARCNN,
    "cnn7": CNN7,
    "resnet20": ResNet20,
    "densenet121": DenseNet121,
    "small_gan": SmallGAN,
}
