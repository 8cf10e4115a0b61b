"""The file of a site: its name, its own data, its limits, and what it allows beside what is built
in. It stays at the site; the server names none of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedminimax.config import (
    ALLOWED,
    ConfigError,
    Table,
    imported,
    messages_of,
    options_for,
    read_toml,
    suggest,
)
from fedminimax.messages import Messages
from fedminimax.privacy.accountant import mu2_of
from fedminimax.remote.identity import checked_peers

FILE, ALLOW_FILE = "site.toml", "allow.toml"
EXAMPLE = """\
# This file stays here: the server never sees it, and names no path on this machine.
name = "{name}"

[data]                     # this site's rows: a CSV, csv.gz or npz file, with the options of the
path = "{name}.csv"        # data set `folder` (fedminimax list folder); or a built-in data set by
label = "disease"          # its name, of which the part with this site's name is used

[limits]
least_per_bin = 5          # the fewest rows that this site counts in a bin of a score histogram
least_rows = 10            # the fewest rows of a split of which it tells anything
# least_batch = 10         # the fewest rows of a batch (least_rows, if it is left out)
rounds = 10000             # the most rounds of a run
questions = 30             # how often one question is answered in an evaluation, or before a run
runs = 1000                # the most runs in which it takes part, by its audit log
megabytes = 1000           # the longest message that it opens
# epsilon = 10.0           # what these rows may spend of privacy over all runs; others are refused
# delta = 1e-5

# [peers]                  # the fingerprints of the other sites, which masked messages need
                           # (fedminimax deploy peers)

# [agreed]                 # the only experiments in which it takes part, by the digests that
# heart = "..."            # fedminimax deploy digest tells of their files

# [messages]               # how its messages must be sent, if it insists: an experiment with other
# clip = 1.0               # stages or another reducer is refused

[allow]                    # what an experiment may name here beside what is built in, such as
# model.our_net = "our_package.networks:OurNet"
"""


@dataclass(frozen=True)
class Limits:
    least_per_bin: int = 5
    least_rows: int = 10
    least_batch: int | None = None  # None: least_rows
    rounds: int = 10_000
    questions: int = 30
    runs: int = 1000
    megabytes: int = 1000
    epsilon: float | None = None  # over all runs; None: counted, and not limited
    delta: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value >= 0:
                raise ConfigError(f"[limits] {name} is {value}; give a number of at least 0")

    @property
    def fewest_in_batch(self) -> int:
        return self.least_rows if self.least_batch is None else self.least_batch

    @property
    def spendable(self) -> float | None:
        """The limit as a sum of 1 / noise^2, as the ledger counts."""
        return None if self.epsilon is None else mu2_of(self.epsilon, self.delta)


@dataclass(frozen=True)
class SiteFile:
    name: str
    folder: Path
    data: Table
    limits: Limits = field(default_factory=Limits)
    messages: Messages | None = None  # None: as the experiment says
    agreed: Mapping[str, str] = field(default_factory=dict)  # digests of experiments; none: any
    allow: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    peers: Mapping[str, str] = field(default_factory=dict)  # site -> fingerprint

    @staticmethod
    def read(folder: Path) -> SiteFile:
        file = folder / FILE
        table = read_toml(file)
        known = ("name", "data", "limits", "messages", "agreed", "allow", "peers")
        for key in table:
            if key not in known:
                raise ConfigError(f"{file} has no key {key!r}; {suggest(key, known)}")
        name = table.get("name")
        if not isinstance(name, str) or not name:
            raise ConfigError(f'{file} has no name; add name = "..." with the name of this site')
        if not isinstance(table.get("data"), dict):
            raise ConfigError(f"{file} has no section [data]; say there where this site's rows are")
        for section in ("limits", "agreed", "allow", "peers"):
            if not isinstance(table.setdefault(section, {}), dict):
                raise ConfigError(
                    f"{file}: {section} is {table[section]!r}; make it a section, [{section}], "
                    "or leave it out"
                )
        limits = Limits(**options_for(Limits, table["limits"], "[limits]"))
        allow = _allowed(file, table["allow"])
        register(allow)
        messages = messages_of(table["messages"]) if "messages" in table else None
        peers = checked_peers(file, name, table["peers"])
        agreed = table["agreed"]
        return SiteFile(name, folder, table["data"], limits, messages, agreed, allow, peers)


def register_allowed(consortium: Path) -> None:
    """At the server: what the file allow.toml in the consortium's folder allows, if there is one.
    It has the lines of a site's [allow]."""
    file = consortium / ALLOW_FILE
    if file.exists():
        register(_allowed(file, read_toml(file)))


def _allowed(file: Path, table: Table) -> dict[str, dict[str, str]]:
    sections = [section for section in ALLOWED if section != "data"]
    for section, names in table.items():
        texts = isinstance(names, dict) and all(isinstance(p, str) for p in names.values())
        if section not in sections or not texts:
            raise ConfigError(
                f"{file}: allowed {section} = {names!r}; write SECTION.NAME = "
                f'"package.module:Class", with one of the sections {", ".join(sections)}'
            )
    return table


def register(allow: Mapping[str, Mapping[str, str]]) -> None:
    """Makes what a file of this machine allows known by its name; what is built in stays."""
    for section, names in allow.items():
        for name, place in names.items():
            kind = imported(place, f"[allow] {section}.{name}")
            if ALLOWED[section].setdefault(name, kind) is not kind:
                raise ConfigError(f"[allow] {section}.{name} is built in; choose another name")
