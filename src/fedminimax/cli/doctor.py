"""fedminimax doctor: whether this machine has what runs need, and what to do where it does not."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from rich.markup import escape
from rich.table import Table

import fedminimax
from fedminimax.cli.common import RUNS
from fedminimax.data import SOURCES
from fedminimax.data.sources import VARIABLE, look, places
from fedminimax.engine.device import usable_cores
from fedminimax.engine.executors.compiled.inductor import missing_compiler
from fedminimax.report.tables import console

GOOD, OPTIONAL, BAD = "ok", "-", "missing"
EXTRAS = {
    "plots": "figures of comparisons and reports",
    "tracking": "report --tensorboard and --mlflow",
    "tune": "tune: the search over rates",
    "privacy": "[privacy]: epsilon of releases on secret samples",
    "export": "export: a model as an ONNX file",
    "nvflare": "deploy: runs between sites with NVIDIA FLARE",
    "flower": "deploy: runs between sites with Flower",
}


class Check(NamedTuple):
    """One line of the table."""

    what: str
    state: str  # GOOD, OPTIONAL where runs do without it, BAD
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes none."""


def command(options: argparse.Namespace) -> int:
    """Prints the table; 1 if something is missing that every run needs."""
    checks = [*check_all()]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("what", "", "found", "what to do"):
        table.add_column(heading)
    for check in checks:
        table.add_row(*map(escape, check))
    console().print(table)
    bad = [check.what for check in checks if check.state == BAD]
    print(f"\n{'missing: ' + ', '.join(bad) if bad else 'ready to run'}")
    return int(bool(bad))


def check_all() -> Iterator[Check]:
    """Every line."""
    yield Check("fedminimax", GOOD, fedminimax.__version__)
    recent = sys.version_info >= (3, 11)
    advice = "" if recent else "install Python 3.11 or later"
    yield Check("Python", GOOD if recent else BAD, platform.python_version(), advice)
    yield Check("torch", GOOD, torch.__version__)
    yield compiler()
    yield cores()
    yield gpu()
    yield folder()
    yield data()
    for name, purpose in EXTRAS.items():
        yield extra(name, purpose)


def compiler() -> Check:
    """Whether rounds can be compiled."""
    why = missing_compiler()
    if why:
        return Check("C++ compiler", OPTIONAL, "none: runs are slower", "install g++ or clang")
    return Check("C++ compiler", GOOD, os.environ.get("CXX", "found"))


def cores() -> Check:
    """How many cores runs use."""
    usable, asked = usable_cores(), os.environ.get("OMP_NUM_THREADS")
    advice = ""
    if asked and asked.isdigit() and int(asked) < usable:
        advice = f"OMP_NUM_THREADS is {asked}: unset it to use all in one operation"
    return Check("cores", GOOD, f"{usable} of {os.cpu_count()} usable", advice)


def gpu() -> Check:
    """Whether device="cuda" or "mps" would work."""
    if torch.cuda.is_available():
        return Check("GPU", GOOD, torch.cuda.get_device_name(0), "run with run.device=cuda")
    if torch.backends.mps.is_available():
        return Check("GPU", GOOD, "Apple", "run with run.device=mps")
    return Check("GPU", OPTIONAL, "none: runs use the processor")


def folder() -> Check:
    """Whether runs can be written here."""
    place = RUNS if RUNS.exists() else Path()
    try:
        with tempfile.TemporaryFile(dir=place):
            return Check("run folder", GOOD, str(RUNS.resolve()))
    except OSError as error:
        advice = "go to a folder that you may write to, or give --folder"
        return Check("run folder", BAD, f"{place.resolve()}: {error.strerror}", advice)


def data() -> Check:
    """Which files of data sets are here."""
    here = [
        name
        for name, source in SOURCES.items()
        if all(look(source, [copy.name for copy in file.copies]) for file in source.files)
    ]
    looked = ", ".join(map(str, places()))
    advice = "fedminimax data list; fedminimax data fetch NAME" * (len(here) < len(SOURCES))
    if not os.environ.get(VARIABLE):
        advice += f", or set {VARIABLE} to a folder that has them"
    state = GOOD if len(here) == len(SOURCES) else OPTIONAL
    return Check("data sets", state, f"{len(here)} of {len(SOURCES)} in {looked}", advice)


def extra(name: str, purpose: str) -> Check:
    """Whether the packages of an extra are installed."""
    wanted = [
        re.split(r"[^A-Za-z0-9_.-]", requirement)[0]
        for requirement in metadata.requires("fedminimax") or ()
        if re.search(rf"extra == ['\"]{name}['\"]", requirement)
    ]
    versions, lack = [], []
    for package in wanted:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lack.append(package)
    if lack:
        advice = f"for {purpose}: pip install 'fedminimax[{name}]'"
        return Check(name, OPTIONAL, f"no {', '.join(lack)}", advice)
    return Check(name, GOOD, ", ".join(versions))
