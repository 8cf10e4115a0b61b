"""Image data sets, and the papers' tasks on them: which classes are positive, how many positives
are kept, and who has which images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedminimax.data.formats import Pictures
from fedminimax.data.imbalance import keep_positives
from fedminimax.data.partition import class_groups, dirichlet, iid, own_classes, positive_classes
from fedminimax.data.sites import DataError, listed
from fedminimax.data.sources import Source
from fedminimax.data.split import strata, stratified_split

Rows = list[tuple[Tensor, Tensor]]
_CHUNK = 4096


class Part(NamedTuple):
    """A split: its images, the class of each in the task, and which belong to each client."""

    pictures: Pictures
    labels: np.ndarray
    owned: list[np.ndarray]


@dataclass(frozen=True)
class Images:
    """Images with labels, dealt out to clients; the test images are those of the publisher.

    task: "classes" tells all classes apart; two sides are told apart by "first_half" (the first
    half of the classes is positive, as the text of LocalSCGDAM has it), "second_half" (as the code
    of CODASCA and of LibAUC has it) or "listed" (the classes in `positive` are).
    only: the classes that are used; the others are left out.
    positive_share: the papers' imratio. Positives are removed from the training images until they
    make up that share: int(share / (1 - share) * negatives) stay, of all clients together or, where
    clients have classes of their own, of each. The test images stay as they are.
    partition: "iid"; "dirichlet" (by class; the smaller the concentration, the more unlike);
    "classes" (no two clients share a class, and of two sides each client has some of both: the
    papers' IH data); "single_class" (the classes are dealt out one by one, so that a client may
    have one side only). A client's test images are of its own classes in the last two, and an even
    share otherwise: measures over all test images are the same.
    share: of the images of each class that are used, drawn at random. validation: the share of the
    training images that is held out to choose by.
    pixels: in [0, 1] ("unit"), in [-1, 1] ("signed"), or with mean 0 and variance 1 in each channel
    over the training images ("standard").
    folder: where the files lie, if not where FEDMINIMAX_DATA says or in the cache.
    """

    folder: str = ""
    task: Literal["classes", "first_half", "second_half", "listed"] = "classes"
    positive: tuple[int, ...] = ()
    only: tuple[int, ...] = ()
    positive_share: float | None = None
    partition: Literal["iid", "dirichlet", "classes", "single_class"] = "iid"
    clients: int = 10
    concentration: float = 0.5
    share: float = 1.0
    validation: float = 0.0
    pixels: Literal["unit", "signed", "standard"] = "unit"
    seed: int = 0
    source: ClassVar[Source]

    def __init_subclass__(cls) -> None:
        # The description of a data set ends with the keys that all of them have.
        keys = (Images.__doc__ or "").partition("\n\n")[2].rstrip()
        cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n\n{keys}\n    "

    def __post_init__(self) -> None:
        for name, known in (
            ("task", ("classes", "first_half", "second_half", "listed")),
            ("partition", ("iid", "dirichlet", "classes", "single_class")),
            ("pixels", ("unit", "signed", "standard")),
        ):
            if getattr(self, name) not in known:
                raise DataError(f"{name} is {getattr(self, name)!r}; use one of {listed(known)}.")
        if bool(self.positive) != (self.task == "listed"):
            raise DataError(
                f"task is {self.task!r} and positive is {list(self.positive)}; give the positive "
                'classes with task = "listed", and only then.'
            )
        if self.positive_share is not None and self.task == "classes":
            raise DataError(
                f"positive_share is {self.positive_share}, but no class is positive: set `task` to "
                '"first_half", "second_half" or "listed".'
            )
        if not 0 < self.share <= 1 or not 0 <= self.validation < 1:
            raise DataError(
                f"share is {self.share} and validation {self.validation}; give a share above 0 and "
                "at most 1, and one of at least 0 and below 1."
            )

    def pictures(self) -> dict[str, Pictures]:
        """The splits as published: train, test, and perhaps validation."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        return self._parts["train"].pictures.images.shape[1:]

    @property
    def classes(self) -> int:
        several = self._published["train"].labels.ndim > 1
        return len(self._used) if self.task == "classes" and not several else 2

    @property
    def notes(self) -> list[str]:
        """What a user should know about the task."""
        told = []
        for split, part in self._parts.items():
            labels = part.labels[np.concatenate(part.owned)]
            count = f"{len(labels):,} {split} images"
            if self.task != "classes":
                above = int(labels.sum())
                count += f", {above:,} positive and {len(labels) - above:,} negative"
            told.append(count)
        found = [f"{self.source.title}: {'; '.join(told)}"]
        if self.partition == "single_class" and self.task != "classes":
            found.append("classes are dealt out one by one: a client may have one side only")
        return found

    def client_rows(self) -> Rows:
        return self._rows("train")

    def validation_rows(self) -> Rows | None:
        return self._rows("validation") if "validation" in self._parts else None

    def test_rows(self) -> Rows:
        return self._rows("test")

    def _rows(self, split: str) -> Rows:
        """Views of one tensor that holds the images once, client after client."""
        part = self._parts[split]
        order, sizes = np.concatenate(part.owned), [len(rows) for rows in part.owned]
        images = torch.empty((len(order), *self.shape), dtype=torch.float32)
        scale, shift = (torch.from_numpy(v).float()[:, None, None] for v in self._affine)
        for start in range(0, len(order), _CHUNK):
            chunk = torch.from_numpy(part.pictures.images[order[start : start + _CHUNK]])
            images[start : start + _CHUNK] = chunk.float() * scale + shift
        labels = torch.from_numpy(part.labels[order])
        return list(zip(images.split(sizes), labels.split(sizes), strict=True))

    @cached_property
    def _affine(self) -> tuple[np.ndarray, np.ndarray]:
        """What each channel's bytes are multiplied by, and what is added."""
        ones = np.ones(self.shape[0])
        if self.pixels == "unit":
            return ones / 255, 0 * ones
        if self.pixels == "signed":
            return ones / 127.5, -ones
        part = self._parts["train"]
        order = np.sort(np.concatenate(part.owned))
        counts = np.zeros((self.shape[0], 256))
        for start in range(0, len(order), _CHUNK):
            chunk = part.pictures.images[order[start : start + _CHUNK]]
            counts += [np.bincount(c.ravel(), minlength=256) for c in chunk.swapaxes(0, 1)]
        counts /= counts.sum(1, keepdims=True)
        mean = counts @ np.arange(256)
        spread = np.sqrt(np.maximum(counts @ np.arange(256) ** 2 - mean**2, 1e-12))
        return 1 / spread, -mean / spread

    @property
    def _used(self) -> np.ndarray:
        return np.unique(self._published["train"].labels)

    @cached_property
    def _published(self) -> dict[str, Pictures]:
        """The splits, of the classes and in the share that are used."""
        found = {}
        for split, (images, labels) in self.pictures().items():
            if unknown := set(self.only) - set(np.unique(labels).tolist()):
                raise DataError(
                    f"only is {list(self.only)}, but no {split} image is of class {min(unknown)}; "
                    f"the classes are {np.unique(labels).tolist()}."
                )
            index = np.flatnonzero(np.isin(labels, self.only)) if self.only else None
            if self.share < 1:
                index = np.arange(len(labels)) if index is None else index
                cut = (self.share, 1 - self.share, 0.0)
                index = index[stratified_split(labels[index], cut, self.seed)[0]]
            whole = Pictures(images, labels)
            found[split] = whole if index is None else Pictures(images[index], labels[index])
        return found

    @cached_property
    def _parts(self) -> dict[str, Part]:
        found = {split: np.arange(len(p.labels)) for split, p in self._published.items()}
        held = {split: split for split in found}
        if self.validation:
            if "validation" in found:
                raise DataError(
                    f"validation is {self.validation}, but {self.source.title} comes with "
                    "validation images; leave it out."
                )
            cut = (1 - self.validation, self.validation, 0.0)
            labels = self._published["train"].labels
            found["train"], found["validation"], _ = stratified_split(labels, cut, self.seed, 1)
            held["validation"] = "train"
        parts = {}
        for split in ("train", "validation", "test"):
            if split in found:
                pictures = self._published[held[split]]
                owned = self._dealt(pictures.labels, found[split], split)
                parts[split] = Part(pictures, self._tell_apart(pictures.labels), owned)
        return parts

    def _above(self) -> np.ndarray:
        """The positive classes."""
        if self.task == "listed":
            return np.array(self.positive)
        upper = positive_classes(self._used)
        return upper if self.task == "second_half" else np.setdiff1d(self._used, upper)

    def _tell_apart(self, labels: np.ndarray) -> np.ndarray:
        """What is to be told of each image: its class, numbered in order, or its side."""
        if labels.ndim > 1:
            return labels
        if self.task == "classes":
            return np.searchsorted(self._used, labels)
        if unknown := set(self.positive) - set(self._used.tolist()):
            raise DataError(
                f"positive holds {min(unknown)}, which no image is; the classes are "
                f"{self._used.tolist()}."
            )
        return np.isin(labels, self._above()).astype(np.int64)

    def _dealt(self, labels: np.ndarray, rows: np.ndarray, split: str) -> list[np.ndarray]:
        """Each client's rows of a split, with positives removed from all but the test images."""
        share = None if split == "test" else self.positive_share
        if self.partition == "classes" and self.task != "classes":
            owned, _ = class_groups(labels[rows], self.clients, share, self.seed, self._above())
            return [rows[own] for own in owned]
        if share is not None:
            number = int(split == "validation")
            rows = rows[keep_positives(self._tell_apart(labels[rows]), share, self.seed, number)]
        if self.partition in ("classes", "single_class"):
            sides = {"different": self._used}
            owned = own_classes(labels[rows], self.clients, self.seed, sides)
        elif self.partition == "dirichlet" and split != "test":
            owned = dirichlet(labels[rows], self.clients, self.concentration, self.seed)
        else:
            owned = iid(strata(labels[rows]), self.clients, self.seed)
        return [rows[own] for own in owned]
