"""The image networks: their sizes against the literature, and their use as functions of weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedminimax.config import ConfigError, Experiment
from fedminimax.models import MODELS
from fedminimax.models.cnn import CIFARCNN, CNN7, FashionCNN, LeNet5
from fedminimax.models.densenet import DenseNet121
from fedminimax.models.resnet import ResNet20
from fedminimax.models.tabular import MLP3
from fedminimax.problems.network import Network

GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("model", "shape", "outputs", "wanted"),
    [
        # He et al. 2016: 0.27 M; with parameter-free shortcuts exactly so many.
        (ResNet20(), COLOUR, 10, 269_722),
        # Huang et al. 2017, as every published implementation counts them.
        (DenseNet121(), (3, 224, 224), 1000, 7_978_856),
        (DenseNet121(), (3, 224, 224), 1, 6_954_881),
        # LeCun et al. 1998, with all maps of the second convolution connected.
        (LeNet5(), GREY, 10, 61_706),
        (LeNet5(), (1, 32, 32), 10, 61_706),
        # FESS-GDA, Table 3: 448 + 4,640 + 18,496 + 524,800 + 32,832 + 650.
        (CIFARCNN(), COLOUR, 10, 581_866),
        # Our choices of what the papers leave open.
        (FashionCNN(), GREY, 1, 1_474_249),
        (FashionCNN(norm="none"), GREY, 1, 1_474_249 - 2 * (32 + 64)),
        # 896 + 9,248 + 18,496 + 36,928 + 73,856 + 147,584 + 20,490, and 896 of the norms.
        (CNN7(), COLOUR, 10, 308_394),
        (MLP3(), GREY, 10, 785 * 200 + 201 * 100 + 101 * 10),
    ],
)
def test_the_number_of_weights(model, shape, outputs, wanted):
    assert weights(model.build(shape, outputs)) == wanted


def test_the_fashion_network_is_that_of_the_paper():
    """The LocalSCGDAM paper, Table 3, line by line."""
    kinds = [type(part).__name__ for part in FashionCNN().build(GREY)]
    half = ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    assert kinds == [*half, *half, "Flatten", "Linear", "Linear", "Linear"]
    parts = list(FashionCNN(activation="relu").build(GREY))
    assert [p.out_channels for p in parts if isinstance(p, nn.Conv2d)] == [32, 64]
    assert [p.out_features for p in parts if isinstance(p, nn.Linear)] == [600, 120, 1]
    assert [(p.kernel_size, p.stride) for p in parts if isinstance(p, nn.MaxPool2d)] == [(2, 2)] * 2
    assert [type(p).__name__ for p in parts[-5:]] == ["Linear", "ReLU"] * 2 + ["Linear"]


def test_seven_and_three_layers():
    def layers(module: nn.Module) -> list[str]:
        return [type(p).__name__ for p in module.modules() if hasattr(p, "in_features")
                or hasattr(p, "in_channels")]  # fmt: skip

    assert layers(CNN7().build(COLOUR)) == ["Conv2d"] * 6 + ["Linear"]
    assert layers(MLP3().build(GREY)) == ["Linear"] * 3
    assert len(layers(ResNet20().build(COLOUR))) == 20
    assert len(layers(DenseNet121(growth=2).build(COLOUR))) == 121


def test_widths():
    narrow, wide = (weights(ResNet20(width=w).build(COLOUR, 10)) for w in (8, 32))
    assert narrow < 269_722 / 3 < 3 * 269_722 < wide
    small = DenseNet121(growth=4, stem="small").build(COLOUR)
    large = DenseNet121(growth=4, stem="large").build(COLOUR)
    assert weights(small) - weights(large) == 8 * 3 * (9 - 49)
    # The small stem keeps the size: 32, 16, 8, 4 before the mean.
    seen = []
    small[-3].register_forward_hook(lambda part, inputs, out: seen.append(inputs[0].shape[-2:]))
    small(torch.zeros(2, *COLOUR))
    assert seen == [(4, 4)]


NETWORKS = {
    "fashion_cnn": (FashionCNN, {}, GREY),
    "cifar_cnn": (CIFARCNN, {}, (3, 16, 16)),
    "cnn7": (CNN7, {"width": 4}, (3, 16, 16)),
    "resnet20": (ResNet20, {"width": 4}, (3, 16, 16)),
    "densenet121": (DenseNet121, {"growth": 2}, COLOUR),
}


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("name", NETWORKS)
def test_clients_gradients_are_the_same_stacked_and_one_by_one(name, norm):
    torch.manual_seed(0)
    kind, options, shape = NETWORKS[name]
    network = Network(kind(norm=norm, **options).build(shape).double())
    assert network.has_norms == (norm == "batch")
    rows = torch.randn(2, 3, *shape, dtype=torch.float64)
    points = network.start() + 0.01 * torch.randn(2, network.length, dtype=torch.float64)

    def loss(x, rows):
        return (network(x, rows) ** 2).mean()

    stacked = vmap(grad(loss))(points, rows)
    for k in range(2):
        own = grad(loss)(points[k], rows[k])
        assert own.abs().max() > 0
        torch.testing.assert_close(stacked[k], own, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_group_norm_leaves_rows_alone_and_batch_norm_does_not(name):
    torch.manual_seed(0)
    kind, options, shape = NETWORKS[name]
    rows = torch.randn(4, *shape)
    for norm, alone in (("group", True), ("none", True), ("batch", False)):
        module = kind(norm=norm, **options).build(shape)
        both = functional_call(module, dict(module.named_parameters()), (rows,))
        own = module(rows[:2])
        assert torch.allclose(both[:2], own, rtol=1e-3, atol=1e-5) == alone


def test_building_leaves_no_trace():
    """The trial that counts features changes neither statistics nor mode nor random numbers."""
    torch.manual_seed(3)
    module = FashionCNN().build(GREY)
    after = torch.rand(1)
    assert module.training
    norms = [part for part in module if isinstance(part, nn.BatchNorm2d)]
    assert all(torch.equal(n.running_mean, torch.zeros(n.num_features)) for n in norms)  # type: ignore[arg-type]
    torch.manual_seed(3)
    for part in FashionCNN().build(GREY).parameters():
        assert part.requires_grad
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize(
    "name", ["fashion_cnn", "lenet5", "cifar_cnn", "cnn7", "resnet20", "densenet121"]
)
def test_rows_that_are_no_images_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} takes images of shape .* the shape \(22,\)"):
        MODELS[name]().build((22,))


def test_what_cannot_be_built_is_told():
    with pytest.raises(ValueError, match="images of 4 x 4 pixels are too small for lenet5"):
        LeNet5().build((1, 4, 4))
    for kind in (FashionCNN, CIFARCNN, CNN7, ResNet20, DenseNet121):
        with pytest.raises(ValueError, match="norm is 'layer'; give one of 'batch', 'group', 'no"):
            kind(norm="layer")  # type: ignore[arg-type]
    for kind in (CNN7, ResNet20):
        with pytest.raises(ValueError, match="width is 0; give at least 1"):
            kind(width=0)
    with pytest.raises(ValueError, match="growth is 3; give an even number"):
        DenseNet121(growth=3)
    with pytest.raises(ValueError, match=r"hidden is \[3\]; three layers have two hidden widths"):
        MLP3(hidden=(3,))


def test_a_file_names_them():
    table = {
        "data": {"name": "shapes", "side": 16},
        "model": {"name": "resnet20", "width": 4, "norm": "group"},
        "problem": {"name": "auc"},
        "method": {"name": "codasca"},
    }
    made = Experiment.from_table(table).make("model")
    assert made == ResNet20(width=4, norm="group")
    table["model"]["norm"] = "layer"
    with pytest.raises(ConfigError, match=r"\[model\] norm is 'layer'"):
        Experiment.from_table(table)
