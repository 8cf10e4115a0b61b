"""The official formats of image data sets, read into arrays of bytes (images, channels, rows,
columns) and labels."""

from __future__ import annotations

import gzip
import math
import tarfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedminimax.data.sites import DataError, listed
from fedminimax.data.sources import BROKEN
from fedminimax.data.tables import plain_arrays


class Pictures(NamedTuple):
    """Images as they were published, and the number of each one's class."""

    images: np.ndarray  # (n, channels, rows, columns) uint8
    labels: np.ndarray  # (n,) int64


def idx(file: Path) -> np.ndarray:
    """An array of bytes in the format of MNIST, packed by gzip.

    Two zero bytes, the type (8: unsigned bytes), the number of dimensions, each dimension in four
    bytes, the largest first; then the bytes of the array.
    """
    try:
        raw = gzip.decompress(file.read_bytes())
    except BROKEN as error:
        raise DataError(f"{file} is not a whole gzip file ({error}); fetch it again.") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise DataError(f"{file} is not in the idx format of unsigned bytes; fetch it again.")
    start = 4 + 4 * raw[3]
    shape = tuple(np.frombuffer(raw[4:start], ">u4").tolist())
    if len(raw) != start + math.prod(shape):
        raise DataError(
            f"{file} says it holds {shape} bytes, and has {len(raw) - start}; fetch it again."
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def idx_pair(images: Path, labels: Path) -> Pictures:
    """The two files of a split of MNIST or Fashion-MNIST."""
    pixels, classes = idx(images), idx(labels)
    if pixels.ndim != 3 or classes.shape != (len(pixels),):
        raise DataError(
            f"{images} has the shape {pixels.shape} and {labels} the shape {classes.shape}; give "
            "images and as many labels."
        )
    return Pictures(pixels[:, None], classes.astype(np.int64))


def members(place: Path, names: Sequence[str]) -> Mapping[str, bytes]:
    """Files of a tar archive, however it is packed, or of the folder that it was unpacked to."""
    if place.is_dir():
        lack = [name for name in names if not (place / name).is_file()]
        found = {} if lack else {name: (place / name).read_bytes() for name in names}
    else:
        about = place.stat()
        found = _unpack(place.resolve(), tuple(names), about.st_mtime_ns, about.st_size)
        lack = [name for name in names if name not in found]
    if lack:
        raise DataError(f"{place} lacks {listed(lack)}; fetch it again.")
    return found


# To unpack CIFAR-10 from xz takes ten seconds, longer than many a run on it: a comparison reads it
# once. A file that has changed, as its time or size tell, is read again.
@lru_cache(maxsize=1)
def _unpack(archive: Path, names: tuple[str, ...], changed: int, size: int) -> Mapping[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        # As a stream, which ends with the last name: STL-10 has gigabytes behind it.
        with tarfile.open(archive, "r|*") as packed:
            for member in packed:
                name = Path(member.name).name
                held = packed.extractfile(member) if name in names else None
                if held is not None:
                    found[name] = held.read()
                if len(found) == len(names):
                    break
    except BROKEN as error:
        raise DataError(f"{archive} is not a whole tar archive ({error}); fetch it again.") from (
            error
        )
    return MappingProxyType(found)


def cifar(raw: bytes, labels: int, which: int, where: str) -> Pictures:
    """The binary CIFAR format: per image, `labels` bytes of labels, then 3 x 32 x 32 pixels."""
    size = labels + 3 * 32 * 32
    if not raw or len(raw) % size:
        raise DataError(f"{where} has {len(raw)} bytes, no multiple of {size}; fetch it again.")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return Pictures(rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, which].astype(np.int64))


def stl10(images: bytes, labels: bytes, where: str) -> Pictures:
    """The binary STL-10 format: 3 x 96 x 96 pixels, each channel column by column; labels from
    1."""
    size = 3 * 96 * 96
    if not labels or len(images) != size * len(labels):
        raise DataError(
            f"{where} has {len(images)} bytes of images for {len(labels)} labels, not {size} for "
            "each; fetch it again."
        )
    pixels = np.frombuffer(images, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 1, 3, 2)
    return Pictures(pixels, np.frombuffer(labels, np.uint8).astype(np.int64) - 1)


def medmnist(file: Path, finding: int | None) -> dict[str, Pictures]:
    """The splits of a MedMNIST file; where rows have several labels of 0 and 1, one is chosen, or,
    if `finding` is None, all are kept, as columns."""
    arrays, found = plain_arrays(file), {}
    for split, name in (("train", "train"), ("validation", "val"), ("test", "test")):
        lack = [key for key in (f"{name}_images", f"{name}_labels") if key not in arrays]
        if lack:
            raise DataError(f"{file} has no array {lack[0]!r}; fetch it again.")
        images, labels = arrays[f"{name}_images"], arrays[f"{name}_labels"]
        labels = labels.reshape(len(labels), -1)
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or len(images) != len(labels):
            raise DataError(
                f"{file} has {name} images of type {images.dtype} and shape {images.shape}, and "
                f"{len(labels)} labels; give bytes, two-dimensional, and as many labels."
            )
        if finding is None and labels.shape[1] < 2:
            raise DataError(
                f'findings is "all", but rows of {file.name} have one label; leave findings out.'
            )
        if finding is not None and not 0 <= finding < labels.shape[1]:
            raise DataError(
                f"finding is {finding}, but rows of {file.name} have {labels.shape[1]} label(s); "
                "give a number from 0 on."
            )
        images = images[..., None] if images.ndim == 3 else images
        told = labels if finding is None else labels[:, finding]
        found[split] = Pictures(images.transpose(0, 3, 1, 2), told.astype(np.int64))
    return found
