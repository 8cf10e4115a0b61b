"""Where the files of a data set come from, where they are looked for, and whether they are whole.

A file is looked for in the folder that the experiment names (data.folder), in the one that the
environment variable FEDMINIMAX_DATA names, and in the user's cache, in this order; in each of them
itself, or in the data set's own folder there.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from lzma import LZMAError
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedminimax.data.sites import DataError

VARIABLE = "FEDMINIMAX_DATA"
OURS = "our own record"  # of a copy whose publisher gives no checksum
BROKEN = (OSError, EOFError, zlib.error, LZMAError, tarfile.TarError)
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Copy:
    """A form in which a file may lie here.

    digest: "md5:..." or "sha256:..." of its bytes, `by` whom; inside: the digests of what it
    unpacks to, by member (of a gz file, its one content is the member ""). A file that somebody
    packed again has other bytes, and still the same inside; a folder has only that.
    """

    name: str
    digest: str = ""
    by: str = ""
    inside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class File:
    """A file of a data set: what is fetched from `url` is the first of its copies."""

    url: str
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Source:
    """Where a data set comes from; `instead` says what to do where it cannot be fetched."""

    name: str
    title: str
    folder: str
    licence: str
    page: str
    files: tuple[File, ...]
    instead: str = ""
    home: Path | None = None  # of data that come with the package

    def advice(self) -> str:
        return self.instead or f"type `fedminimax data fetch {self.name}`"


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Verdict(NamedTuple):
    """good: None where nobody says what the bytes should be."""

    good: bool | None
    text: str


def cache() -> Path:
    """The user's folder for what can be fetched again, by the convention of the platform."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        base = Path(given)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base / "fedminimax"


def places(given: str | Path = "") -> list[Path]:
    """The folders that are searched, in order; the first is also where fetched files go."""
    named = [str(given), os.environ.get(VARIABLE, "")]
    return [*(Path(name).expanduser() for name in named if name), cache()]


def look(source: Source, names: Sequence[str], given: str | Path = "") -> Path | None:
    """The first of these names that is there, in any case of letters: the first place wins."""
    for place in [*([source.home] if source.home else []), *places(given)]:
        for folder in (place, place / source.folder):
            there = {p.name.lower(): p for p in folder.iterdir()} if folder.is_dir() else {}
            for name in names:
                if name.lower() in there:
                    return there[name.lower()]
    return None


def find(source: Source, names: Sequence[str], given: str | Path = "") -> Path:
    """The same, or a sentence that says where it was looked for and what to type."""
    found = look(source, names, given)
    if found is None:
        looked = ", ".join(f"{place} (and its {source.folder})" for place in places(given))
        raise DataError(
            f"{source.title}: there is no {' or '.join(names)} in {looked}. To have it, "
            f"{source.advice()}; or set data.folder, or the environment variable {VARIABLE}, to "
            "the folder that holds it."
        )
    return found


def digest(file: Path | Readable, kind: str) -> str:
    """The file's digest as "md5:..." or "sha256:..."."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return digest(opened, kind)
    state = hashlib.new(kind, usedforsecurity=False)
    while chunk := file.read(_CHUNK):
        state.update(chunk)
    return f"{kind}:{state.hexdigest()}"


def matches(file: Path | Readable, wanted: str) -> bool:
    """Whether the file has this checksum, which begins with the name of its algorithm."""
    return digest(file, wanted.partition(":")[0]) == wanted


def record_of(file: Path) -> Path:
    """Where the digest of a first download is kept, for files without a published one."""
    return file.with_name(file.name + ".sha256")


def verify(file: Path, copy: Copy) -> Verdict:
    """Whether a file is what its publisher says, or at least what was downloaded first."""
    if file.is_dir():
        return _check(file, copy, "unpacked")
    record = record_of(file)
    if not copy.digest and not record.exists():
        return Verdict(None, "no checksum is published, and none was recorded when it came")
    by = copy.by or "its first download"
    wanted = copy.digest or "sha256:" + record.read_text(encoding="utf-8").split()[0]
    kind = wanted.partition(":")[0]
    if matches(file, wanted):
        return Verdict(True, f"{kind} as {by} says" if copy.digest else f"{kind} as when it came")
    if copy.inside:
        return _check(file, copy, "packed again")
    if copy.by == OURS:
        return Verdict(None, "another file than the one that our numbers were made with")
    return Verdict(False, f"not the {kind} of {by}: fetch it again")


def _check(file: Path, copy: Copy, how: str) -> Verdict:
    """The verdict on what a file or folder holds."""
    if not copy.inside:
        return Verdict(None, f"{how}, and no checksums of what it holds are known")
    odd = [name or "content" for name, good in _insides(file, copy.inside) if not good]
    if odd:
        return Verdict(False, f"not as published: {', '.join(odd)}")
    return Verdict(True, f"{how}; what it holds is as published")


def _insides(file: Path, wanted: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Each member that should be in the file, and whether it is there as published."""
    if file.is_dir():
        for name, digest in wanted.items():
            yield name, (file / name).is_file() and matches(file / name, digest)
        return
    if "" in wanted:
        try:
            with gzip.open(file) as content:
                yield "", matches(content, wanted[""])
        except BROKEN:
            yield "", False
        return
    left = dict(wanted)
    try:
        # As a stream: an archive that can only be unpacked in order is read once.
        with tarfile.open(file, "r|*") as packed:
            for member in packed:
                name = Path(member.name).name
                held: Any = packed.extractfile(member) if name in left else None
                if held is not None:
                    yield name, matches(held, left.pop(name))
    except BROKEN:
        pass
    yield from ((name, False) for name in left)
