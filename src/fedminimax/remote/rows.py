"""The rows of one site, however it holds them: a table of its own, its part of a data set that is
built in, or rows that it makes."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedminimax.config import CHOICES, ConfigError, Experiment, Table, options_for, part_of
from fedminimax.data.encoding import answer
from fedminimax.data.folder import Folder, Reading, ordered, site
from fedminimax.data.prepare import inputs_of, rows, split_sites
from fedminimax.data.sites import (
    Column,
    DataError,
    Schema,
    Site,
    bullets,
    is_missing,
    name_differences,
    named,
    order_differences,
    plain,
    union,
)
from fedminimax.data.statistics import local_moments
from fedminimax.data.tables import Raw
from fedminimax.experiment import FACTS, SPLITS, check_split, facts_of
from fedminimax.remote.wire import quoted

MOST_CODES = 1000  # of a column, or values of the label, over all sites
LARGEST = 1e100  # of what a site may tell as the sum of a column
OPTIONS = ("label", "positive", "classes", "missing")  # of a table, on which all sites agree


class OwnTable:
    """A file of this site. How its text columns and labels are coded is agreed with the others."""

    def __init__(self, name: str, home: Path, options: Table):
        self.name = name
        given = options_for(Folder, options, "[data]")
        self.file = home / Path(given["path"]).expanduser()
        if not self.file.is_file():
            raise DataError(f"There is no file {str(self.file)!r}; set path in [data] to one.")
        self.reader = Folder(**given)

    @cached_property
    def raw(self) -> Raw:
        return replace(self.reader.open_files([self.file])[0], name=self.name)

    def outline(self) -> Table:
        """All that the server learns of the table: names of columns, codes, and label values."""
        columns, values, _ = self.reader.outline([self.raw], others=True)
        reader, lack = self.reader, {plain(marker) for marker in self.reader.missing}
        empty = [
            n for n, cells in self.raw.cells.items() if all(is_missing(c, lack) for c in cells)
        ]
        options = {n: getattr(reader, n) for n in OPTIONS}
        columns = [asdict(c) for c in columns]
        return {"columns": columns, "empty": empty, "labels": values, "options": options}

    def site(self, schema: Schema) -> Site:
        return site(self.raw, schema)


class PartOfTables:
    """This site's part of tables that are built in."""

    def __init__(self, name: str, reading: Reading):
        self.name, self.reading = name, reading

    def outline(self) -> Table:
        return {"schema": self.reading.schema.to_json()}

    def site(self, schema: Schema) -> Site:
        for held in self.reading.sites:
            if held.name == self.name:
                return held
        raise DataError(
            f"The data have no site {self.name!r}; they have "
            f"{named(s.name for s in self.reading.sites)}."
        )


class OwnClients:
    """This site's part of data that make their own clients."""

    def __init__(self, data: Any):
        self.data = data

    def outline(self) -> Table:
        facts = {name: getattr(self.data, name) for name in FACTS if hasattr(self.data, name)}
        return {"facts": facts}

    def rows(self, number: int, names: list[str]) -> dict[str, Any]:
        train = self.data.client_rows()
        if len(train) != len(names):
            raise DataError(
                f"The data make {len(train)} clients, but there are {len(names)} sites; make them "
                "equal."
            )
        found = {"train": train[number]}
        for split in SPLITS[1:]:
            held = getattr(self.data, f"{split}_rows", lambda: None)()
            if held is not None:
                found[split] = held[number]
        return found


Holding = OwnTable | PartOfTables | OwnClients


def holding(name: str, home: Path, data: Table) -> Holding:
    """What a site file's [data] says."""
    kind = data.get("name", "folder")
    rest = {key: value for key, value in data.items() if key != "name"}
    if kind == "folder":
        return OwnTable(name, home, rest)
    part = part_of("data", data)
    made = CHOICES["data"][part.name](**part.options)
    return OwnClients(made) if hasattr(made, "client_rows") else PartOfTables(name, made.read())


class Rows(NamedTuple):
    """A site's rows by use."""

    splits: dict[str, Any]  # tables: sites of raw features, until they are scaled
    columns: tuple[str, ...] | None  # of tables

    @property
    def sizes(self) -> dict[str, int]:
        tables = self.columns is not None
        return {split: len(held if tables else held[0]) for split, held in self.splits.items()}


def split_rows(held: Holding, experiment: Experiment, setup: Table, number: int) -> Rows:
    if isinstance(held, OwnClients):
        check_split(experiment, held.data)
        return Rows(held.rows(number, setup["names"]), None)
    schema = Schema.from_json(setup["schema"])
    if isinstance(held, OwnTable):
        check_schema(held, schema)
    own = held.site(schema)
    parts = split_sites([own], experiment.split, number)
    return Rows({name: sites[0] for name, sites in parts.items()}, own.columns)


def check_schema(held: OwnTable, schema: Schema) -> None:
    """Refuses a schema that reads this site's table otherwise than its own file says: numbers as
    codes, other labels, or other marks of missing values. Codes of other sites may be added."""
    reader, outline = held.reader, held.outline()
    values = schema.classes or schema.positive + schema.negative
    expected, _ = reader.schema(schema.columns, ordered(values))
    if expected != schema or not set(outline["labels"]) <= set(values):
        raise ConfigError(
            f"the run reads the labels or missing values of site {held.name!r} otherwise than its "
            "site file says: agree on label, positive, classes and missing in [data]"
        )
    own = {column["name"]: column for column in outline["columns"]}
    for column in schema.columns:
        mine = own.get(column.name)
        if column.missing or column.drop_first or mine is None:
            wrong = "is not among its own, or has marks of its own"
        elif column.name in outline["empty"]:
            continue
        elif column.kind != mine["kind"]:
            wrong = f"is {column.kind}, and at the site it is {mine['kind']}"
        elif not set(mine["codes"]) <= set(column.codes):
            wrong = "lacks codes that the site has"
        else:
            continue
        raise ConfigError(
            f"column {quoted(column.name)!r} of the run {wrong}: site {held.name!r} reads its "
            "table as its own file says"
        )


def digest_of(found: Rows) -> str:
    """The same for the same rows in the same use, and for no others."""
    digest = hashlib.blake2s(digest_size=16)
    for split, held in sorted(found.splits.items()):
        columns = held if found.columns is None else (held.features, held.labels)
        for column in map(np.asarray, columns):
            digest.update(f"{split} {column.dtype} {column.shape} ".encode())
            digest.update(column.tobytes())
    return digest.hexdigest()


def told_moments(
    found: Rows, centre: np.ndarray | None, least: int, least_marked: int = 0
) -> np.ndarray:
    """The sums of the training rows, without those of columns that have a value in a few only. A
    mark of 0 or 1 that fewer than `least_marked` rows have counts as the other one."""
    features = _merged(found.splits["train"].features, least_marked)
    moments = local_moments(features, centre)
    return np.where(moments[0] >= least, moments, 0.0)


def _merged(features: np.ndarray, least: int) -> np.ndarray:
    ones, zeros = (features == 1).sum(0), (features == 0).sum(0)
    marks = ones + zeros == (~np.isnan(features)).sum(0)
    for few, value, other in ((ones, 1.0, 0.0), (zeros, 0.0, 1.0)):
        rare = marks & (few > 0) & (few < least)
        features = np.where(rare & (features == value), other, features)
    return features


def told_counts(found: Rows, edges: np.ndarray, sizes: np.ndarray, least: int) -> np.ndarray:
    """The training rows between the edges of each column, of which there are `sizes`."""
    own = np.split(edges, np.cumsum(sizes)[:-1])
    return answer(found.splits["train"].features, own, least)


def wrong_counts(counts: np.ndarray) -> str | None:
    """What of such counts no rows can have."""
    if not ((counts >= 0) & (counts < 2**31) & (counts == np.rint(counts))).all():
        return f"its counts of values are from {counts.min():g} to {counts.max():g}"
    return None


def rows_in(counts: np.ndarray, sizes: np.ndarray) -> int:
    """The most rows that such counts are of."""
    return int(np.add.reduceat(counts, np.cumsum([0, *(sizes[:-1] + 2)])).max())


def wrong_moments(moments: np.ndarray, centred: bool) -> str | None:
    """What of such sums, from whomever they come, no rows can have."""
    count, total, squares = moments
    if not ((count >= 0) & (count < 2**31) & (count == np.rint(count))).all():
        return f"its counts of values are from {count.min():g} to {count.max():g}"
    # A mean that others then subtract from their values must not make these too large.
    largest = LARGEST * 1e30 if centred else LARGEST
    if (np.abs(total) > largest).any() or (squares > largest**2).any():
        return f"its sums are of values beyond {LARGEST:g}: rescale its columns"
    # The square of a mean is at most the mean of squares; the rest is for rounding.
    if (squares < 0).any() or (total**2 > (1 + 1e-6) * count * squares + 1e-300).any():
        return "its sums of squares are smaller than its sums allow"
    return None


def scaled_rows(found: Rows, setup: Table) -> dict[str, Any]:
    """As a run takes them."""
    if found.columns is None:
        return found.splits
    inputs = inputs_of(setup)
    return {name: rows(inputs, held) for name, held in found.splits.items()}


@dataclass(frozen=True)
class Agreed:
    """What all outlines say together."""

    schema: Schema | None
    supplied: Table  # to the problem and its model


def wrong_outline(outline: Any) -> str | None:
    """What of an outline, from whomever it comes, is none."""
    try:
        _check_outline(outline)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"its outline is none: {quoted(error)}"
    return None


def _check_outline(outline: Any) -> None:
    if set(outline) == {"facts"}:
        for name, fact in outline["facts"].items():
            if name == "labels":
                _check_texts(fact)
                continue
            sizes = fact if isinstance(fact, list) else [fact]
            if name not in FACTS or not all(type(n) is int and n > 0 for n in sizes):
                raise ValueError(f"{name} is {fact!r}")
        return
    if set(outline) == {"schema"}:
        schema = outline["schema"]
        options_for(Schema, {**schema, "columns": []}, "its schema")
    else:
        schema = outline
        options = options_for(Folder, {"path": "", **outline["options"]}, "its options")
        if set(options) != {"path", *OPTIONS}:
            raise ValueError(f"its options are {', '.join(options)}")
        Folder(**options)
        _check_texts(outline["empty"])
        _check_texts(outline["labels"])
    for column in schema["columns"]:
        Column(**options_for(Column, column, "a column"))


def _check_texts(texts: Any) -> None:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{texts!r} is no list of texts")


def agree(outlines: dict[str, Table]) -> Agreed:
    """One schema, or the same facts, from what each site says of its data; or a sentence."""
    (first, one), *_ = outlines.items()
    for name, other in outlines.items():
        if set(other) != set(one):
            raise ConfigError(
                f"sites {first!r} and {name!r} hold data of different kinds: make [data] alike"
            )
    if "facts" in one:
        return Agreed(None, dict(_same(outlines, "facts")))
    if "schema" in one:
        schema = Schema.from_json(_same(outlines, "schema"))
    else:
        options = _same(outlines, "options")
        reader = Folder("", **{**options, "missing": tuple(options["missing"])})
        schema, _ = reader.schema(_columns(outlines), _values(outlines))
    return Agreed(schema, {"features": len(schema.features), **facts_of(schema)})


def _same(outlines: dict[str, Table], what: str) -> Any:
    (first, one), *others = outlines.items()
    for name, other in others:
        if other[what] != one[what]:
            raise ConfigError(
                f"[data] differs between sites {first!r} and {name!r}: {quoted(one[what])} and "
                f"{quoted(other[what])}; agree on one"
            )
    return one[what]


def _columns(outlines: dict[str, Table]) -> tuple[Column, ...]:
    held = {name: {c["name"]: c for c in o["columns"]} for name, o in outlines.items()}
    names = {name: tuple(columns) for name, columns in held.items()}
    found = name_differences(names) + order_differences(names)
    columns = []
    for column in next(iter(names.values())):
        kinds = {
            name: c[column]["kind"]
            for name, c in held.items()
            if column in c and column not in outlines[name]["empty"]
        }
        if not kinds:
            found.append(f"column {column!r} has no value at any site: name it in `drop`")
            continue
        if len(set(kinds.values())) > 1:
            numbers = [name for name, kind in kinds.items() if kind == "number"]
            found.append(
                f"column {column!r} is a number at {named(numbers)} and text at "
                f"{named(name for name in kinds if name not in numbers)}"
            )
        told = {name: c[column]["codes"] for name, c in held.items() if column in c}
        codes = _few(told, f"codes of column {quoted(column)!r}")
        kind = next(iter(kinds.values()))
        columns.append(Column(column, kind, ordered(codes)))
    if found:
        raise ConfigError(bullets("The sites' tables do not fit together; make them equal", found))
    return tuple(columns)


def _values(outlines: dict[str, Table]) -> tuple[str, ...]:
    told = {name: outline["labels"] for name, outline in outlines.items()}
    return ordered(_few(told, "values of the label"))


def _few(told: dict[str, list[str]], what: str) -> Any:
    """What all sites tell together, or the site that tells most of too many."""
    found = union(told.values())
    if len(found) > MOST_CODES:
        most = max(told, key=lambda name: len(told[name]))
        raise ConfigError(
            f"the sites have {len(found)} {what}, {len(told[most])} of them at site {most!r}, and "
            f"a run between sites takes at most {MOST_CODES}: name the column in `drop`, or group "
            "its codes"
        )
    return found
