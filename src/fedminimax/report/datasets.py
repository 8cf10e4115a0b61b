"""What is known about the files of data sets: for the terminal, and for docs/data.md."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedminimax.data import SOURCES
from fedminimax.data.sources import OURS, Source, look


def sources_table(folder: str = "") -> Table:
    """The data sets that have files, and how many of these are here."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("name", "data set", "files here", "licence", "from"):
        table.add_column(heading, overflow="fold")
    for source in SOURCES.values():
        here = [look(source, [c.name for c in file.copies], folder) for file in source.files]
        count = f"{sum(path is not None for path in here)} of {len(here)}"
        table.add_row(source.name, source.title, count, source.licence, source.page)
    return table


def markdown() -> str:
    """The table of docs/data.md."""
    lines = ["| name | data set | licence | from | checked by |", "|---|---|---|---|---|"]
    for source in SOURCES.values():
        cells = (f"`{source.name}`", source.title, source.licence, source.page, checked(source))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def checked(source: Source) -> str:
    """What tells that a fetched file is the right one."""
    kinds = {
        (copy.digest.partition(":")[0].upper(), copy.by)
        for copy in (file.copies[0] for file in source.files)
    }
    (kind, by) = kinds.pop()
    if not kind:
        return "the SHA256 of the first download: none is published"
    return f"{kind} of {by}" + (": none is published" if by == OURS else "")
