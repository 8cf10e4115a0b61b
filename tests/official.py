"""Small files in the official formats of the data sets, written for tests."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import tarfile
from pathlib import Path

import numpy as np

BESIDE = Path(__file__).parent.parent.parent / "shared" / "data"
DATA = Path(os.environ.get("FEDMINIMAX_DATA", BESIDE))  # where real files may lie


def idx(array: np.ndarray) -> bytes:
    """Two zero bytes, the type, the number of dimensions, the dimensions, the bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, train: int = 40, test: int = 20, classes: int = 10) -> None:
    """The four files of MNIST: image i is filled with i, and its class is i modulo `classes`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("t10k", test)):
        number = np.arange(count)
        images = np.broadcast_to(number[:, None, None] % 256, (count, 28, 28))
        for kind, array in (("images-idx3", images), ("labels-idx1", number % classes)):
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(idx(array)))


def cifar(labels: list[list[int]]) -> bytes:
    """A record per image: its labels, then 32 x 32 red, green and blue values, which tell it."""
    records = []
    for number, own in enumerate(labels):
        channels = [np.full(1024, value, np.uint8) for value in (number, number + 100, own[-1])]
        channels[0][1] = 77  # the second pixel of the first row
        records.append(bytes(own) + b"".join(c.tobytes() for c in channels))
    return b"".join(records)


def stl10(labels: list[int]) -> tuple[bytes, bytes]:
    """Images whose red value is the number of its column, and green that of its row."""
    column, row = np.meshgrid(np.arange(96), np.arange(96))
    image = np.stack([column, row, np.full((96, 96), 9)])
    # Column-major: a channel is written column by column.
    one = image.transpose(0, 2, 1).astype(np.uint8).tobytes()
    return one * len(labels), bytes(label + 1 for label in labels)


def tar(files: dict[str, bytes], pack: str) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    packed = {"gz": gzip.compress, "xz": lzma.compress}
    return packed[pack](held.getvalue())


def cifar10_files(train: int = 20, test: int = 10) -> dict[str, bytes]:
    """The members of the CIFAR-10 archive, the classes in turn."""

    def turn(count: int) -> bytes:
        return cifar([[i % 10] for i in range(count)])

    files = {f"cifar-10-batches-bin/data_batch_{n}.bin": turn(train // 5) for n in range(1, 6)}
    return {
        "cifar-10-batches-bin/batches.meta.txt": b"airplane\n",
        **files,
        "cifar-10-batches-bin/test_batch.bin": turn(test),
    }
