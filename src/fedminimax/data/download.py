"""Fetching the files of a data set from where they are published: whole or not at all."""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fedminimax.data.sites import DataError
from fedminimax.data.sources import File, Source, digest, look, matches, places, record_of

Report = Callable[[str, int, int | None], None]  # name, bytes so far, bytes in all where known
NETWORK = (
    *(urllib.error.URLError, http.client.HTTPException),
    *(ConnectionError, TimeoutError, ssl.SSLError),
)
_CHUNK = 1 << 18
_PATIENCE = 60  # seconds without a byte


def fetch(
    source: Source,
    given: str | Path = "",
    report: Report = lambda name, done, total: None,
) -> dict[Path, bool]:
    """Each file of the data set, and whether it had to be fetched; what is there stays."""
    target = places(given)[0] / source.folder
    found: dict[Path, bool] = {}
    for file in source.files:
        here = look(source, [copy.name for copy in file.copies], given)
        if here is not None:
            found[here] = False
            continue
        if not file.url:
            raise DataError(
                f"{source.title} is not offered for download in a form that is read here: "
                f"{source.advice()}, that is, into {target}."
            )
        target.mkdir(parents=True, exist_ok=True)
        found[_fetch(file, target, report)] = True
    return found


def _fetch(file: File, target: Path, report: Report) -> Path:
    copy = file.copies[0]
    path, part = target / copy.name, target / f"{copy.name}.part"
    # Without a checksum nobody would notice that two halves belong to different files.
    if not copy.digest:
        part.unlink(missing_ok=True)
    try:
        _download(file.url, part, lambda done, total: report(copy.name, done, total))
    except NETWORK as error:
        kept = "what has come is kept, and the next try goes on from there"
        raise DataError(
            f"{file.url} cannot be fetched ({error}); "
            f"{kept if copy.digest and part.exists() else 'try again later'}, or download it by "
            f"hand to {path}."
        ) from error
    if copy.digest and not matches(part, copy.digest):
        kind = copy.digest.partition(":")[0]
        found = digest(part, kind)
        part.unlink()
        raise DataError(
            f"{file.url} has the checksum {found}, but {copy.by} says {copy.digest}: the file was "
            "thrown away; try again, and if it stays so, do not trust it."
        )
    if not copy.digest:
        line = f"{digest(part, 'sha256').partition(':')[2]}  {copy.name}\n"
        record_of(path).write_text(line, encoding="utf-8")
    os.replace(part, path)
    return path


def _download(url: str, part: Path, report: Callable[[int, int | None], None]) -> None:
    """The file into `part`, going on where an earlier try ended, if the server can."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedminimax"})
    if done:
        request.add_header("Range", f"bytes={done}-")
    try:
        answer = urllib.request.urlopen(request, timeout=_PATIENCE)
    except urllib.error.HTTPError as error:
        with error:
            # 416: there is nothing behind what is here; the checksum tells whether it is right.
            if error.code == 416 and done:
                return
        raise
    with answer:
        if answer.status != 206:
            done = 0
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if done else "wb") as file:
            report(done, total)
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                report(done, total)
    # A connection that closes early reads like the end of the file.
    if total is not None and done < total:
        raise http.client.IncompleteRead(b"", total - done)
