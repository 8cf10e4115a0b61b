"""fedminimax data: the files of data sets, listed, fetched and verified."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fedminimax.config import suggest
from fedminimax.data import SOURCES
from fedminimax.data.download import fetch
from fedminimax.data.sources import Source, look, verify
from fedminimax.report.datasets import sources_table
from fedminimax.report.tables import console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    actions = parser.add_subparsers(required=True, metavar="list|fetch|verify")
    for name, action, many, told in (
        ("list", _list, None, "the data sets that have files, and whether they are here"),
        ("fetch", _fetch, "+", "download what is missing of them, and check it"),
        ("verify", _verify, "*", "check the files that are here, or those of the named sets"),
    ):
        command = actions.add_parser(name, help=told)
        if many is not None:
            command.add_argument("names", nargs=many, metavar="NAME")
        command.add_argument(
            "--folder",
            default="",
            help="looked in first, and fetched to (default: FEDMINIMAX_DATA, or the cache)",
        )
        command.set_defaults(command=action)


def _list(options: argparse.Namespace) -> int:
    console().print(sources_table(options.folder))
    return 0


def _fetch(options: argparse.Namespace) -> int:
    for source in _sources(options.names):
        with _Download() as show:
            found = fetch(source, options.folder, show.report)
        for path, fetched in found.items():
            print(f"{source.name}: {path} {'fetched' if fetched else 'is there'}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    """Fails where a file is not what it should be, or a named data set is not whole."""
    failed, done = False, set()
    for source in _sources(options.names or list(SOURCES)):
        for file in source.files:
            # Of several forms, each that is here is checked: any of them may be the one read.
            paths = [look(source, [copy.name], options.folder) for copy in file.copies]
            if options.names and not any(paths):
                failed = True
                print(f"{source.name}: {file.copies[0].name} is missing: {source.advice()}")
            for copy, path in zip(file.copies, paths, strict=True):
                if path is not None and path not in done:
                    done.add(path)
                    good, text = verify(path, copy)
                    failed = failed or good is False
                    word = {True: "good", False: "WRONG", None: "unknown"}[good]
                    print(f"{source.name}: {path} {word}: {text}")
    if not done:
        print("there are no files to verify")
    return int(failed)


def _sources(names: Sequence[str]) -> list[Source]:
    for name in names:
        if name not in SOURCES:
            raise ValueError(f"no data set with files is called {name!r}; {suggest(name, SOURCES)}")
    return [SOURCES[name] for name in names]


class _Download:
    """A bar for each file that is fetched; where there is no terminal, nothing."""

    def __init__(self) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self.bar = Progress(
            TextColumn("{task.description}"), *columns, disable=not sys.stdout.isatty()
        )
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Download:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def report(self, name: str, done: int, total: int | None) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.bar.add_task(name, total=total)
        self.bar.update(self.tasks[name], completed=done, total=total)
