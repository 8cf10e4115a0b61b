"""fedminimax init: an experiment file for a user's own tables, with what was assumed about them."""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from fedminimax.config import write_toml
from fedminimax.data.columns import Texts
from fedminimax.data.folder import TRUTHS, Folder, Reading, ordered, table_files, unique
from fedminimax.data.pooled import Pooled
from fedminimax.data.prepare import Split, prepare
from fedminimax.data.sites import (
    MISSING,
    DataError,
    is_missing,
    listed,
    named,
    nearest,
    number,
    plain,
    union,
)
from fedminimax.data.tables import Raw, open_table, stem
from fedminimax.report.tables import console

OTHER_MARKERS = ("-", "--", ".", "n/a", "N/A", "na", "#N/A", "<NA>", "NULL", "None", "none", "nil")
LABELS = (
    *("label", "target", "y", "class", "outcome", "response", "diagnosis", "disease", "death"),
    *("died", "dead", "mortality", "survived", "default", "income", "fraud", "churn", "failure"),
)
YES = ("yes", "y", "t", "positive", "pos", "case", "sick", "dead", "died", "bad", "malignant")
SITES = (
    *("site", "hospital", "center", "centre", "clinic", "client", "institution", "region"),
    *("location", "branch", "bank", "state", "country", "device"),
)
IDENTIFIERS = ("id", "uid", "udi", "uuid", "index", "number", "nr", "no", "patient", "row", "key")
CLIENTS = 4  # of a pooled file without a column of sites
FEW = 10  # values that a whole number which is rather a code may have


class Found(NamedTuple):
    """A column in all files together."""

    name: str
    files: int  # that have it
    counts: Counter[str]  # of its values
    missing: int
    texts: int  # cells that are no numbers
    whole: bool  # another whole number in every row

    @property
    def is_text(self) -> bool:
        return 2 * self.texts >= max(sum(self.counts.values()), 1)

    def has_word(self, words: Sequence[str]) -> bool:
        """Whether a part of its name is one of these words."""
        split = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name).lower()
        return bool({*re.split(r"[^a-z]+", split)} & {*words})


class Plan(NamedTuple):
    """What the experiment file will say of the data, and why."""

    data: dict[str, Any]
    reasons: dict[str, str]  # by key
    options: list[str]  # lines for what may be set besides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "data", type=Path, help="a folder with a CSV, Parquet or npz file per site, or one file"
    )
    parser.add_argument("--label", metavar="COLUMN", help="the column to predict")
    parser.add_argument("--positive", metavar="VALUE", help="the label that counts as positive")
    parser.add_argument("--site-column", metavar="COLUMN", help="of one file: each row's site")
    parser.add_argument("-o", "--output", type=Path, help="where to write (default: NAME.toml)")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def command(options: argparse.Namespace) -> int:
    """Writes the file, unless the data cannot be used; then says why."""
    place: Path = options.data
    output = options.output or Path(f"{safe_name(place)}.toml")
    if output.exists() and not options.force:
        raise ValueError(f"{output} is there already; give --force or another name with -o")
    files = table_files(place)[0] if place.is_dir() or not place.exists() else [place]
    plan, columns = plan_for(files, place, options)
    made = (Pooled if plan.data["name"] == "pooled" else Folder)(
        **{key: value for key, value in plan.data.items() if key != "name"}
    )
    reading = made.read()
    notes = prepare(reading, Split()).notes
    output.write_text(text_of(plan), encoding="utf-8")
    console().print(sites_table(reading))
    print(f"columns: {', '.join(summary(columns, plan))}\n")
    print("assumed:")
    for sentence in plan.reasons.values():
        print(f"  - {sentence}")
    for note in notes:
        print(f"note: {note}")
    print(f"\nwrote {output}; go on with:  fedminimax run {shlex.quote(str(output))}")
    return 0


def safe_name(place: Path) -> str:
    """A name for a site or a folder, from that of a file, in letters that every system takes."""
    name = stem(place) if place.is_file() else place.resolve().name
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_") or "mine"


def plan_for(
    files: Sequence[Path], place: Path, options: argparse.Namespace
) -> tuple[Plan, list[Found]]:
    """What to write of the data, from a look at each column."""
    raws = [open_table(file, None, lambda name: name != "") for file in files]
    markers = tuple(marker_texts(raws))
    missing = (*MISSING, *markers)
    columns = [examine(name, raws, missing) for name in union(raw.cells for raw in raws)]
    data: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    pooled = len(files) == 1
    label, reasons["label"], values = choose_label(columns, raws, options)
    rest = [column for column in columns if column.name != label]
    if pooled:
        path = str(files[0])
        data = {"name": "pooled", "path": path, "label": label}
        site = choose_site_column(rest, options.site_column)
        if site:
            data |= {"partition": "column", "column": site}
            reasons["column"] = f"each value of {site!r} is a site (--site-column decides)"
            rest = [column for column in rest if column.name != site]
        else:
            data |= {"partition": "iid", "clients": CLIENTS}
            reasons["partition"] = (
                f"there is one file and no column of sites in it, so rows are dealt out to "
                f"{CLIENTS} sites at random (--site-column names one)"
            )
    else:
        if options.site_column:
            raise ValueError(
                f"--site-column is {options.site_column!r}, but there are {len(files)} files, one "
                "per site: leave it out, or give one file"
            )
        data = {"name": "folder", "path": str(place), "label": label}
        reasons["path"] = f"each of the {len(files)} files is a site"
    side, reasons["positive"] = choose_positive(values, options.positive)
    data |= side
    drops = {"": "it has no name"} if any("" in raw.names for raw in raws) else {}
    drops |= {column.name: why for column in rest if (why := useless(column, len(raws)))}
    if drops:
        data["drop"] = tuple(drops)
        told = "; ".join(f"{name!r}: {why}" for name, why in drops.items())
        reasons["drop"] = f"left out are {told}"
    if markers:
        data["missing"] = missing
        reasons["missing"] = f"{listed(markers)} among numbers stand for missing values"
    codes = [c.name for c in rest if c.name not in drops and rather_codes(c)]
    more = [f"categorical = {list(codes)!r}".replace("'", '"')] if codes else []
    return Plan(data, {key: why for key, why in reasons.items() if why}, more), columns


def marker_texts(raws: Sequence[Raw]) -> Iterator[str]:
    """Usual marks for a missing value that stand among numbers."""
    for marker in OTHER_MARKERS:
        for raw in raws:
            columns = [c for c in raw.cells.values() if isinstance(c, Texts) and marker in c.values]
            if any(all(_known(v) for v in column.values) for column in columns):
                yield marker
                break


def _known(value: str) -> bool:
    return number(value) is not None or value in MISSING or value in OTHER_MARKERS


def examine(name: str, raws: Sequence[Raw], missing: Sequence[str]) -> Found:
    """What a column holds in all files together."""
    markers = {plain(marker) for marker in missing}
    counts, lack, texts, held = Counter[str](), 0, 0, [r for r in raws if name in r.cells]
    for raw in held:
        column = Texts.of(raw.cells[name])
        for value, times in zip(column.values, column.counts, strict=True):
            if is_missing(value, markers):
                lack += times
            else:
                counts[plain(value)] += times
                texts += times * (number(value) is None)
    long = [raw for raw in held if len(raw.lines) > 1]
    whole = not texts and bool(long) and all(unique(raw.cells[name], markers) for raw in long)
    return Found(name, len(held), counts, lack, texts, whole)


def choose_label(
    columns: Sequence[Found], raws: Sequence[Raw], options: argparse.Namespace
) -> tuple[str, str, Counter[str]]:
    """The label's name, the reason for it, and how often it has each value."""
    if all(raw.labels is not None for raw in raws):  # npz files keep it apart
        values: Counter[str] = Counter()
        for raw in raws:
            assert raw.labels is not None
            for value, times in zip(raw.labels.values, raw.labels.counts, strict=True):
                values[plain(value)] += times
        return options.label or "label", "", values
    named_so = {column.name: column for column in columns}
    if options.label:
        if options.label not in named_so:
            raise DataError(
                f"--label is {options.label!r}, but the columns are {listed(named_so, 30)}."
                f"{nearest(options.label, named_so)}"
            )
        return options.label, "", named_so[options.label].counts
    able = [c for c in columns if len(c.counts) == 2 and not c.missing and c.files == len(raws)]
    last = columns[-1].name if columns else ""
    likely = [c for c in able if c.has_word(LABELS)]
    likely += [c for c in able if c.name == last] or able * (len(able) == 1)
    if not likely:
        why = f"these have two values: {listed(c.name for c in able)}" if able else "none has two"
        raise DataError(
            f"Which column is the label? {why[0].upper()}{why[1:]}; say which with --label, out of "
            f"{listed(named_so, 30)}."
        )
    best, others = likely[0], [c.name for c in able if c.name != likely[0].name]
    also = f"; with two values there are also {listed(others)}" if others else ""
    return best.name, f"{best.name!r} is the label (--label decides{also})", best.counts


def choose_positive(values: Counter[str], given: str | None) -> tuple[dict[str, Any], str]:
    """Which labels count as positive, as options of the data, and why."""
    if given is not None:
        return {"positive": given}, ""
    truths = {TRUTHS.get(value.lower()) for value in values}
    if truths <= {0, 1} or truths <= {-1, 1}:
        return {}, ""
    if len(values) > 2 and all(number(value) is not None for value in values):
        known = ordered(values)
        upper = known[len(known) // 2 :]
        return {"classes": "halves"}, (
            f"the label has {len(values)} values, of which the upper half counts as positive, "
            f"from {upper[0]} on (--positive names one)"
        )
    sure = [value for value in values if value.lower() in YES]
    chosen = sure[0] if len(sure) == 1 else min(values, key=lambda value: (values[value], value))
    why = "" if len(sure) == 1 else ", as the rarest label"
    return {"positive": chosen}, f"{chosen!r} counts as positive{why} (--positive decides)"


def choose_site_column(columns: Sequence[Found], given: str | None) -> str | None:
    """The column that says which site a row is of."""
    if given:
        names = [column.name for column in columns]
        if given not in names:
            raise DataError(
                f"--site-column is {given!r}, but the other columns are {listed(names, 30)}."
                f"{nearest(given, names)}"
            )
        return given
    for column in columns:
        if column.has_word(SITES) and 2 <= len(column.counts) <= 200 and not column.missing:
            return column.name
    return None


def useless(column: Found, files: int) -> str:
    """Why a column is no feature, or nothing."""
    present = sum(column.counts.values())
    if not present:
        return "it has no values"
    if column.files < files:
        return f"only {column.files} of {files} files have it"
    if column.texts and column.is_text and len(column.counts) > Folder.most_codes:
        return f"it has {len(column.counts)} different texts, as names and identifiers have"
    if column.texts and column.is_text and len(column.counts) == present >= 20:
        return "it has another text in every row"
    if column.whole and column.has_word(IDENTIFIERS):
        return "it has another whole number in every row, as an identifier has"
    if column.whole and len(column.counts) >= 20:
        values = [float(value) for value in column.counts]
        if max(values) - min(values) < 2 * len(values):
            return "its whole numbers count the rows"
    return ""


def rather_codes(column: Found) -> bool:
    """Whether numbers may be codes: a few whole ones."""
    values = [number(value) for value in column.counts]
    whole = all(value is not None and value == round(value) for value in values)
    return not column.texts and whole and 2 < len(values) <= FEW


def summary(columns: Sequence[Found], plan: Plan) -> Iterator[str]:
    """How many columns are of which kind."""
    out = {*plan.data.get("drop", ()), plan.data["label"], plan.data.get("column")}
    used = [column for column in columns if column.name not in out]
    texts = [column for column in used if column.texts]
    lacking = [column for column in used if column.missing]
    yield f"{len(used) - len(texts)} of numbers"
    yield f"{len(texts)} of texts" + (f" ({named(c.name for c in texts[:8])})" if texts else "")
    yield f"{len(lacking)} with missing values"
    if out := plan.data.get("drop", ()):
        yield f"{len(out)} left out"


def sites_table(reading: Reading) -> Table:
    """A line per site: how many rows, how many of them positive, how many cells missing."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("site")
    for heading in ("rows", "positive", "missing cells"):
        table.add_column(heading, justify="right")
    shown = reading.sites[:30]
    for site in shown:
        positive, lack = float(np.mean(site.labels)), float(np.isnan(site.features).mean())
        table.add_row(site.name, f"{len(site):,}", f"{positive:.1%}", f"{lack:.1%}")
    if len(reading.sites) > len(shown):
        table.add_row(f"and {len(reading.sites) - len(shown)} more")
    labels = np.concatenate([site.labels for site in reading.sites])
    table.add_row(f"all {len(reading.sites)}", f"{len(labels):,}", f"{labels.mean():.1%}")
    return table


def text_of(plan: Plan) -> str:
    """The experiment file."""
    lines = ["# Written by fedminimax init. `fedminimax list run` and the like explain the keys."]
    written = {key: list(v) if isinstance(v, tuple) else v for key, v in plan.data.items()}
    for line in write_toml({"data": written}).splitlines():
        key = line.partition(" = ")[0]
        why = plan.reasons.get(key)
        lines += [f"# {why}"] if why and key != "path" else []
        lines += [line] if line else []
    lines += [f"# {line}  # few whole numbers: keep those that are codes" for line in plan.options]
    return "\n".join(lines) + REST


REST = """

[split]                 # of each site's rows: 60 % train, 20 % choose, 20 % test
bins = 16               # quantile bins in which numbers are encoded; 0: they stay numbers

[model]
name = "mlp"
hidden = [64, 64]

[problem]
name = "auto"           # or one of `fedminimax list problems`, with a [method]
measure = "auc"         # ranks well, also where positives are rare

[run]
rounds = 150
batch_size = 64
weights = "size"
"""
