"""The networks that experiments name, as torch modules that a user could have written."""

from __future__ import annotations

from fedminimax.models.cnn import CIFARCNN, CNN7, FashionCNN, LeNet5
from fedminimax.models.densenet import DenseNet121
from fedminimax.models.gan import SmallGAN
from fedminimax.models.resnet import ResNet20
from fedminimax.models.tabular import MLP, MLP3, Linear

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
