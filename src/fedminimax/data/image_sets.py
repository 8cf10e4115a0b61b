"""The image data sets that experiments name: where each comes from, and which reader reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from fedminimax.data.formats import Pictures, cifar, idx_pair, medmnist, members, stl10
from fedminimax.data.images import Images
from fedminimax.data.sites import DataError
from fedminimax.data.sources import OURS, Copy, File, Source, find

TORCHVISION = "torchvision"  # for files whose own publisher gives no checksum


def _idx_files(base: str, by: str, digests: Mapping[str, tuple[str, str]]) -> tuple[File, ...]:
    """Files of the idx format, each with the MD5 of its bytes and of what it unpacks to."""
    return tuple(
        File(f"{base}/{name}", (Copy(name, f"md5:{packed}", by, {"": f"md5:{inside}"}),))
        for name, (packed, inside) in digests.items()
    )


class _Idx(Images):
    """Images in four files of the idx format."""

    def pictures(self) -> dict[str, Pictures]:
        def at(name: str) -> Path:
            return find(self.source, (name,), self.folder)

        return {
            split: idx_pair(at(f"{name}-images-idx3-ubyte.gz"), at(f"{name}-labels-idx1-ubyte.gz"))
            for split, name in (("train", "train"), ("test", "t10k"))
        }


@dataclass(frozen=True)
class FashionMNIST(_Idx):
    """Fashion-MNIST: 60,000 and 10,000 grey images of 28 x 28 pixels, ten kinds of clothing."""

    source: ClassVar[Source] = Source(
        "fashion_mnist",
        "Fashion-MNIST",
        "fashion-mnist",
        "MIT",
        "https://github.com/zalandoresearch/fashion-mnist",
        _idx_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "the official page",
            {
                "train-images-idx3-ubyte.gz": (
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                ),
                "train-labels-idx1-ubyte.gz": (
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "9018921c3c673c538a1fc5bad174d6f9",
                ),
                "t10k-images-idx3-ubyte.gz": (
                    "bef4ecab320f06d8554ea6380940ec79",
                    "8181f5470baa50b63fa0f6fddb340f0a",
                ),
                "t10k-labels-idx1-ubyte.gz": (
                    "bb300cfdad3c16e7a12a480ee83cd310",
                    "15d484375f8d13e6eb1aabb0c3f46965",
                ),
            },
        ),
    )


@dataclass(frozen=True)
class MNIST(_Idx):
    """MNIST: 60,000 and 10,000 grey images of 28 x 28 pixels, ten digits."""

    source: ClassVar[Source] = Source(
        "mnist",
        "MNIST",
        "mnist",
        "none stated",
        "http://yann.lecun.com/exdb/mnist/",
        # The publisher's own server has often refused; PyTorch keeps a copy.
        _idx_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            TORCHVISION,
            {
                "train-images-idx3-ubyte.gz": (
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "6bbc9ace898e44ae57da46a324031adb",
                ),
                "train-labels-idx1-ubyte.gz": (
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "a25bea736e30d166cdddb491f175f624",
                ),
                "t10k-images-idx3-ubyte.gz": (
                    "9fb629c4189551a2d022fa330f9573f3",
                    "2646ac647ad5339dbf082846283269ea",
                ),
                "t10k-labels-idx1-ubyte.gz": (
                    "ec29112dd5afa0611ce80d1b7f02629c",
                    "27ae3e4e09519cfbb04c329615203637",
                ),
            },
        ),
    )


def _archive(data: Images) -> Path:
    """The archive of a data set; or, as it is read sooner, the folder that it unpacks to."""
    names = [copy.name for copy in data.source.files[0].copies]
    return find(data.source, names[::-1], data.folder)


TORONTO = "https://www.cs.toronto.edu/~kriz"
# Of the six files themselves, so that an archive that was packed again can be told.
BATCHES = {
    f"{name}.bin": f"sha256:{digest}"
    for name, digest in {
        "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    }.items()
}


@dataclass(frozen=True)
class CIFAR10(Images):
    """CIFAR-10: 50,000 and 10,000 colour images of 32 x 32 pixels, ten kinds of things."""

    source: ClassVar[Source] = Source(
        "cifar10",
        "CIFAR-10",
        "cifar-10",
        "none stated; cite Krizhevsky 2009",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            File(
                f"{TORONTO}/cifar-10-binary.tar.gz",
                (
                    Copy(
                        "cifar-10-binary.tar.gz",
                        "md5:c32a1d4ab5d03f1284b67883e8d87530",
                        "the official page",
                        BATCHES,
                    ),
                    Copy(
                        "cifar-10-binary.tar.xz",
                        "sha256:d6f0bf391d31d0d1b0e73fce182b6303453584cabdbd9146cf33d1c80feb214b",
                        OURS,
                        BATCHES,
                    ),
                    Copy("cifar-10-batches-bin", inside=BATCHES),
                ),
            ),
        ),
    )

    def pictures(self) -> dict[str, Pictures]:
        place = _archive(self)
        raw = members(place, list(BATCHES))
        train = b"".join(raw[name] for name in BATCHES if name != "test_batch.bin")
        where = str(place)
        return {
            "train": cifar(train, 1, 0, where),
            "test": cifar(raw["test_batch.bin"], 1, 0, where),
        }


@dataclass(frozen=True)
class CatDogStandIn(CIFAR10):
    """A stand-in for CATvsDOG: the cats and the dogs of CIFAR-10, 5,000 and 1,000 of each.

    CATvsDOG itself is not read here; it has other and larger images, so numbers are not comparable
    with those of papers on it. With task = "first_half" the cats are positive, with
    "second_half" the dogs.
    """

    task: Literal["classes", "first_half", "second_half", "listed"] = "first_half"
    only: tuple[int, ...] = (3, 5)

    @property
    def notes(self) -> list[str]:
        return [
            *super().notes,
            "cat against dog from CIFAR-10 is a stand-in for CATvsDOG: its numbers are not "
            "comparable with those of papers on CATvsDOG",
        ]


@dataclass(frozen=True)
class CIFAR100(Images):
    """CIFAR-100: 50,000 and 10,000 colour images of 32 x 32 pixels, 100 kinds of things.

    labels: the 100 "fine" classes, or the 20 "coarse" ones that they belong to.
    """

    labels: Literal["fine", "coarse"] = "fine"
    source: ClassVar[Source] = Source(
        "cifar100",
        "CIFAR-100",
        "cifar-100",
        "none stated; cite Krizhevsky 2009",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            File(
                f"{TORONTO}/cifar-100-binary.tar.gz",
                (
                    Copy(
                        "cifar-100-binary.tar.gz",
                        "md5:03b5dce01913d631647c71ecec9e9cb8",
                        "the official page",
                    ),
                    Copy("cifar-100-binary"),
                ),
            ),
        ),
    )

    def pictures(self) -> dict[str, Pictures]:
        place = _archive(self)
        which = 1 if self.labels == "fine" else 0
        raw = members(place, ("train.bin", "test.bin"))
        return {s: cifar(raw[f"{s}.bin"], 2, which, str(place)) for s in ("train", "test")}


STL10_FILES = {
    "train_X.bin": "md5:918c2871b30a85fa023e0c44e0bee87f",
    "train_y.bin": "md5:5a34089d4802c674881badbb80307741",
    "test_X.bin": "md5:7f263ba9f9e0b06b93213547f721ac82",
    "test_y.bin": "md5:36f9794fa4beb8a2c72628de14fa638e",
}


@dataclass(frozen=True)
class STL10(Images):
    """STL-10: 5,000 and 8,000 colour images of 96 x 96 pixels, ten kinds of things."""

    source: ClassVar[Source] = Source(
        "stl10",
        "STL-10",
        "stl-10",
        "none stated; cite Coates, Ng and Lee 2011",
        "https://cs.stanford.edu/~acoates/stl10/",
        (
            File(
                "http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",
                (
                    Copy(
                        "stl10_binary.tar.gz",
                        "md5:91f7769df0f17e558f3565bffb0c7dfb",
                        TORCHVISION,
                    ),
                    Copy("stl10_binary", inside=STL10_FILES),
                ),
            ),
        ),
    )

    def pictures(self) -> dict[str, Pictures]:
        place = _archive(self)
        raw = members(place, list(STL10_FILES))
        return {
            split: stl10(raw[f"{split}_X.bin"], raw[f"{split}_y.bin"], str(place))
            for split in ("train", "test")
        }


# The findings of chestmnist, in the order of its columns.
CHEST = (
    *("atelectasis", "cardiomegaly", "effusion", "infiltration", "mass", "nodule", "pneumonia"),
    *("pneumothorax", "consolidation", "edema", "emphysema", "fibrosis", "pleural", "hernia"),
)
MEDMNIST = {
    name: Source(
        name,
        f"MedMNIST {name}",
        "medmnist",
        "CC BY-NC 4.0" if name == "dermamnist" else "CC BY 4.0",
        "https://medmnist.com",
        (
            File(
                f"https://zenodo.org/record/6496656/files/{name}.npz?download=1",
                (Copy(f"{name}.npz", f"md5:{digest}", "the MedMNIST package"),),
            ),
        ),
    )
    for name, digest in {
        "pathmnist": "a8b06965200029087d5bd730944a56c1",
        "chestmnist": "02c8a6516a18b556561a56cbdd36c4a8",
        "dermamnist": "0744692d530f8e62ec473284d019b0c7",
        "octmnist": "c68d92d5b585d8d81f7112f81e2d0842",
        "pneumoniamnist": "28209eda62fecd6e6a2d98b1501bb15f",
        "retinamnist": "bd4c0672f1bba3e3a89f0e4e876791e4",
        "breastmnist": "750601b1f35ba3300ea97c75c52ff8f6",
        "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
        "tissuemnist": "ebe78ee8b05294063de985d821c1c34b",
        "organamnist": "866b832ed4eeba67bfb9edee1d5544e6",
        "organcmnist": "0afa5834fb105f7705a7d93372119a21",
        "organsmnist": "e5c39f1af030238290b9557d9503af9d",
    }.items()
}


@dataclass(frozen=True)
class MedMNIST(Images):
    """MedMNIST: twelve sets of medical images of 28 x 28 pixels, with validation images.

    subset: which of them; each is fetched by its own name.
    finding: which label counts, where images have several of 0 and 1 (the 14 of chestmnist).
    findings: "one", or "all" labels at once, for a problem that ranks several.
    """

    # fmt: off
    subset: Literal[
        "pathmnist", "chestmnist", "dermamnist", "octmnist", "pneumoniamnist", "retinamnist",
        "breastmnist", "bloodmnist", "tissuemnist", "organamnist", "organcmnist", "organsmnist",
    ] = "pneumoniamnist"
    # fmt: on
    finding: int = 0
    findings: Literal["one", "all"] = "one"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.findings == "one":
            return
        other = {"task": "classes", "partition": "iid", "only": (), "finding": 0}
        for name, needed in other.items():
            if getattr(self, name) != needed:
                raise DataError(
                    f'findings is "all", but {name} is {getattr(self, name)!r}, which is of one '
                    "label; leave one of them out."
                )

    @property
    def labels(self) -> list[str]:
        """The names of several labels; none of one."""
        if self.findings == "one":
            return []
        count = self._published["train"].labels.shape[1]
        return [*CHEST] if count == len(CHEST) else [str(number) for number in range(count)]

    @property
    def source(self) -> Source:  # type: ignore[override]  it depends on the options
        return MEDMNIST[self.subset]

    def pictures(self) -> dict[str, Pictures]:
        file = find(self.source, (f"{self.subset}.npz",), self.folder)
        return medmnist(file, None if self.findings == "all" else self.finding)
