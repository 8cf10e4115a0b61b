"""A user's own data: a CSV, Parquet or npz file per site in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedminimax.data.columns import Texts
from fedminimax.data.sites import (
    MISSING,
    Cells,
    Column,
    DataError,
    Schema,
    Site,
    bullets,
    check_alike,
    is_missing,
    listed,
    name_differences,
    named,
    nearest,
    number,
    numbers,
    order_differences,
    plain,
    repeated,
    union,
)
from fedminimax.data.tables import SUFFIXES, Raw, encode, labels_of, open_table, stem

TRUTHS = {"1": 1, "true": 1, "0": 0, "false": 0, "-1": -1}  # labels that need no `positive`
LEAST_ROWS = 20  # of a site, for its column to look like one of identifiers
MOST_NOTES = 3  # about the codes of one column
MOST_CLASSES = 1000  # more label values than that are rather measurements


class Reading(NamedTuple):
    """The sites, notes that a user should see, and the schema that reads new rows."""

    sites: list[Site]
    notes: list[str]
    schema: Schema


@dataclass(frozen=True)
class Folder:
    """Your own tables: a folder with one CSV, Parquet or npz file per site.

    A CSV has a header row. An npz has the arrays `features` (n, d) and `labels` (n,), and may have
    `columns` (d,). Text columns become one 0/1 feature per code, true and false 1 and 0. Sites
    whose columns differ in name, order or type are refused.

    label: the column to predict; a list of several, each 0/1 or false/true, is predicted together,
    and an empty cell is a label that is not known.
    classes: "two", or "halves" of several labels, the upper half being positive as in the papers'
    code, or "all": each label is a class of its own, numbered in order.
    positive: of two, the label that counts as positive, all others being negative; not needed for
    0/1, -1/1 and false/true, where 1 or true is.
    drop: columns to leave out, such as a patient's number.
    missing: what stands for a missing value.
    categorical: columns of numbers that are codes, such as a chest pain type of 1 to 4.
    codes: whether a code that only some sites have is noted ("union") or refused ("strict").
    most_codes: a text column with more codes is refused; it is rather a name or free text.
    """

    path: str
    label: str | tuple[str, ...]
    positive: str = ""
    drop: tuple[str, ...] = ()
    missing: tuple[str, ...] = MISSING
    categorical: tuple[str, ...] = ()
    codes: Literal["union", "strict"] = "union"
    most_codes: int = 100
    classes: Literal["two", "halves", "all"] = "two"

    def __post_init__(self) -> None:
        for option in ("drop", "missing", "categorical"):
            if isinstance(getattr(self, option), str):
                raise DataError(
                    f"{option} is {getattr(self, option)!r}; give a list of texts, such as "
                    "['patient']."
                )
        if self.codes not in ("union", "strict"):
            raise DataError(f"codes is {self.codes!r}; use 'union' or 'strict'.")
        if self.classes not in ("two", "halves", "all"):
            raise DataError(f"classes is {self.classes!r}; use 'two', 'halves' or 'all'.")
        if self.positive and self.classes != "two":
            raise DataError(
                f"positive is {self.positive!r}, but classes is {self.classes!r}; leave one out."
            )
        if not self.label or (not isinstance(self.label, str) and "" in self.label):
            raise DataError("label is empty; give the name of the column that holds the label.")
        if self.labels and (len(self.labels) == 1 or repeated(self.labels)):
            raise DataError(
                f"label is {self.label!r}; give one name, or a list of at least two different ones."
            )
        if self.labels and (self.positive or self.classes != "two"):
            raise DataError(
                "label names several columns, each of which is 0 or 1; leave positive and classes "
                "out."
            )

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of several labels; none of a single one."""
        return () if isinstance(self.label, str) else tuple(self.label)

    @property
    def one_label(self) -> str:
        """The name of the label; empty, if there are several."""
        return self.label if isinstance(self.label, str) else ""

    def sites(self) -> list[Site]:
        return self.read().sites

    def read(self) -> Reading:
        files, notes = table_files(Path(self.path).expanduser())
        reading = self.read_files(files)
        return reading._replace(notes=notes + reading.notes)

    def read_files(self, files: Sequence[Path]) -> Reading:
        """The same for files named one by one."""
        raws = self.open_files(files)
        columns, values, notes = self.outline(raws)
        schema, label_notes = self.schema(columns, values)
        sites = [site(raw, schema) for raw in raws]
        check_alike(sites)
        markers = {plain(marker) for marker in self.missing}
        notes += label_notes + absent(sites, schema) + _rather_ids(raws, columns, markers)
        return Reading(sites, notes, schema)

    def open_files(self, files: Sequence[Path]) -> list[Raw]:
        raws = [
            open_table(
                file,
                self.one_label or None,
                lambda name: name not in self.drop,
                (*self.categorical, *self.labels),
                self.missing,
            ).set_aside(self.labels)
            for file in files
        ]
        for raw in raws:
            self._check_file(raw)
        self._check_options(raws)
        return raws

    def outline(
        self, raws: list[Raw], others: bool = False
    ) -> tuple[tuple[Column, ...], tuple[str, ...], list[str]]:
        """The columns of tables that fit together, the values of their labels, and notes. With
        `others` there are further tables elsewhere, which may fill a column that is empty here."""
        markers = {plain(marker) for marker in self.missing}
        looks = {
            column: self._look(column, raws, markers) for column in union(r.cells for r in raws)
        }
        names = {raw.name: tuple(raw.cells) for raw in raws}
        _refuse(
            name_differences(names) + order_differences(names) + _kind_differences(looks, others)
        )
        notes = self._code_notes(looks)
        columns = tuple(
            Column(name, "text", _codes(held)) if _is_text(held) else Column(name)
            for name, held in looks.items()
        )
        return columns, self._label_values(raws, markers), notes

    def schema(
        self, columns: tuple[Column, ...], values: tuple[str, ...]
    ) -> tuple[Schema, list[str]]:
        """How tables with these columns and labels are read, and notes."""
        positive, negative, notes = self._sides(values)
        classes = values if self.classes == "all" else ()
        missing = tuple(self.missing)
        sides = (positive, negative, missing, classes, self.labels)
        return Schema(columns, self.one_label, *sides), notes

    def _look(self, column: str, raws: list[Raw], markers: set[str]) -> list[_Look]:
        there = [raw for raw in raws if column in raw.cells]
        return [_Look.at(raw, column, markers, column in self.categorical) for raw in there]

    def _check_file(self, raw: Raw) -> None:
        if self.labels:
            self._check_several(raw)
        elif raw.labels is None and raw.file.lower().endswith(".npz"):
            raise DataError(f"{raw.file} has no array `labels`; add one, with a label per row.")
        elif raw.labels is None:
            hint = nearest(self.one_label, raw.cells)
            if len(raw.cells) == 1 and any(mark in next(iter(raw.cells)) for mark in ";\t"):
                hint = " Separate the cells with commas."
            elif any(number(name) is not None for name in raw.cells):
                hint = " If that is a row of data, add a header row above it."
            raise DataError(
                f"{raw.file} has no label column {self.label!r}; its columns are "
                f"{listed(raw.cells, 30)}. Set `label` to one of them.{hint}"
            )
        if not raw.cells:
            raise DataError(
                f"{raw.file} has no column but the label; at least one feature is needed."
            )
        if not len(raw.lines):
            raise DataError(
                f"Site {raw.name!r} has no rows ({raw.file}); give it at least one, or remove the "
                "file."
            )

    def _check_several(self, raw: Raw) -> None:
        if lack := [name for name in self.labels if name not in raw.aside]:
            raise DataError(
                f"{raw.file} has no label column {lack[0]!r}; its columns are "
                f"{listed(raw.names, 30)}. A label that a site does not know is an empty column."
                f"{nearest(lack[0], raw.names)}"
            )

    def _check_options(self, raws: list[Raw]) -> None:
        known = union(raw.cells for raw in raws)
        for name in self.categorical:
            if name not in known:
                raise DataError(
                    f"categorical names column {name!r}, which is at no site; there are "
                    f"{listed(known, 30)}.{nearest(name, known)}"
                )
        # A misspelt `drop` would quietly leave in what must not be used, such as the outcome.
        there = union(raw.names for raw in raws)
        for name in self.drop:
            if name not in there:
                raise DataError(
                    f"drop names column {name!r}, which is at no site; there are "
                    f"{listed(there, 30)}.{nearest(name, there)}"
                )

    def _code_notes(self, looks: dict[str, list[_Look]]) -> list[str]:
        notes, differences = [], []
        for column, held in looks.items():
            codes = _codes(held)
            if len(codes) > self.most_codes:
                raise DataError(
                    f"Text column {column!r} has {len(codes)} codes ({listed(codes, 3)}), more "
                    f"than most_codes = {self.most_codes}. Name it in `drop`, or raise most_codes."
                )
            # A site where the column is wholly missing has a note of its own.
            held = [look for look in held if look.present]
            lacking, found = [], []
            for code in codes:
                lack = [look.raw.name for look in held if code not in look.codes]
                if lack:
                    have = [look.raw.name for look in held if code in look.codes]
                    lacking.append(code)
                    found.append(
                        f"column {column!r} has the code {code!r} at {named(have)} and not at "
                        f"{named(lack)}"
                    )
            differences += found
            short = f"column {column!r} has codes that not all sites have: {listed(lacking, 5)}"
            notes += found if len(found) <= MOST_NOTES else [short]
        if self.codes == "strict":
            _refuse(differences, "make the codes equal, or set codes = 'union'")
        return notes

    def _label_values(self, raws: list[Raw], markers: set[str]) -> tuple[str, ...]:
        held = [(raw, raw.labels) for raw in raws if raw.labels is not None]
        for raw, labels in held:
            for label, first in zip(labels.values, labels.first, strict=True):
                if is_missing(label, markers):
                    raise DataError(
                        f"{raw.where(first)}: the label {self.label!r} is missing; fill it in or "
                        "remove the row."
                    )
        values = ordered(union(map(plain, labels.values) for _, labels in held))
        if self.classes != "two" and len(values) > MOST_CLASSES:
            raise DataError(
                f"Label {self.label!r} has {len(values)} values ({listed(values, 3)}), too many "
                f"to be classes; at most {MOST_CLASSES} are. Name another column, or use "
                "classes = 'two'."
            )
        return values

    def _sides(self, values: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
        """The positive labels, the negative ones, and a note where there are more than two."""
        if self.classes == "all" or self.labels:
            return (), (), []
        if self.classes == "halves":
            middle = len(values) // 2
            upper, lower = values[middle:], values[:middle]
            return upper, lower, [f"label {self.label!r}: {listed(upper)} count as positive"]
        positive = plain(self.positive)
        truths = {value: TRUTHS.get(value.lower()) for value in values}
        if {*truths.values()} <= {0, 1} or {*truths.values()} <= {-1, 1}:
            asked = TRUTHS.get(positive.lower(), None if positive else 1)
            upper = tuple(value for value in values if truths[value] == asked)
            if upper or not positive:
                lower = tuple(value for value in values if value not in upper)
                return upper or ("1",), lower or ("0",), []
        if not positive:
            raise DataError(
                f"Label {self.label!r} has the values {listed(values)}; without `positive` they "
                "must be 0 and 1, -1 and 1, or false and true. Set `positive` to the value that "
                f"counts as positive, such as positive = {values[-1]!r}, or `classes` to 'halves' "
                "or 'all'."
            )
        if positive not in values:
            near = nearest(positive, values) or f" Set positive = {values[-1]!r}?"
            raise DataError(
                f"positive is {positive!r}, which no label of {self.label!r} is; the values are "
                f"{listed(values)}.{near}"
            )
        negative = tuple(value for value in values if value != positive)
        alike = [value for value in negative if value.lower() == positive.lower()]
        if alike:
            raise DataError(
                f"Label {self.label!r} has the values {positive!r} and {alike[0]!r}, which differ "
                "only in capitals; write them in one way."
            )
        note = f"label {self.label!r}: {listed(negative)} all count as negative"
        return (positive,), negative, [note] if len(negative) > 1 else []


def site(raw: Raw, schema: Schema) -> Site:
    """A raw table whose every row has a label, as a site."""
    labels = labels_of(raw, schema)
    if labels is None:
        raise DataError(
            f"{raw.file} has no labels in column {schema.label!r}; training needs them."
        )
    return Site(raw.name, schema.features, encode(raw, schema), labels, schema.count)


def absent(sites: Sequence[Site], schema: Schema) -> list[str]:
    """A note for every column that a site has no value of."""
    notes, start = [], 0
    nothing = {site.name: np.asarray(np.isnan(site.features).all(axis=0)) for site in sites}
    for column in schema.columns:
        stop = start + len(column.features)
        lack = [name for name, none in nothing.items() if none[start:stop].all()]
        if lack and stop > start:
            notes.append(
                f"column {column.name!r} has no value at {named(lack)}: the other sites' mean "
                "stands in"
            )
        start = stop
    return notes


class _Look(NamedTuple):
    """What a column looks like at one site."""

    raw: Raw
    present: int
    text: int
    first_text: int | None
    codes: list[str]
    categorical: bool

    @staticmethod
    def at(raw: Raw, column: str, markers: set[str], categorical: bool) -> _Look:
        cells = raw.cells[column]
        if isinstance(cells, np.ndarray) and not categorical:
            present = int(np.count_nonzero(~np.isnan(cells)))
            for marker in markers:
                if (value := number(marker)) is not None:
                    present -= int(np.count_nonzero(cells == value))
            return _Look(raw, present, 0, None, [], False)
        held = Texts.of(cells)
        there = [i for i, cell in enumerate(held.values) if not is_missing(cell, markers)]
        texts = [i for i in there if number(held.values[i]) is None]
        codes = union([[plain(held.values[i]) for i in there]]) if texts or categorical else []
        present, text = (sum(held.counts[i] for i in which) for which in (there, texts))
        first = min((held.first[i] for i in texts), default=None)
        return _Look(raw, present, text, first, codes, categorical)


def _is_text(held: list[_Look]) -> bool:
    return any(look.categorical or look.text for look in held)


def _codes(held: list[_Look]) -> tuple[str, ...]:
    return ordered(union(look.codes for look in held))


def _kind_differences(looks: dict[str, list[_Look]], others: bool) -> list[str]:
    """A sentence for every column that is a number here and text there, or is nowhere filled."""
    found = []
    for column, held in looks.items():
        present, text = sum(look.present for look in held), sum(look.text for look in held)
        if not present and not others:
            found.append(f"column {column!r} has no value at any site: name it in `drop`")
        if not text or held[0].categorical:
            continue
        numeric = [look.raw.name for look in held if look.present and not look.text]
        # A slip of the pen at one site alone must not turn a measurement into a hundred codes.
        if not numeric and 2 * text >= present:
            continue
        usual = f"a number at {named(numeric)}" if numeric else "a number in most rows"
        for look in held:
            if look.first_text is not None:
                found.append(
                    f"column {column!r} is {usual}, but {look.raw.where(look.first_text)} has the "
                    f"text {look.raw.cells[column][look.first_text]!r}: correct it, add it to "
                    "`missing`, or name the column in `categorical`"
                )
    return found


def _rather_ids(raws: Sequence[Raw], columns: Sequence[Column], markers: set[str]) -> list[str]:
    """A note for every column that has another whole number in each row, as an identifier has."""
    if max(len(raw.lines) for raw in raws) < LEAST_ROWS:
        return []
    return [
        f"column {column.name!r} has another whole number in every row: if it is an identifier, "
        "name it in `drop`"
        for column in columns
        if column.kind == "number" and all(unique(raw.cells[column.name], markers) for raw in raws)
    ]


def unique(cells: Cells, markers: set[str]) -> bool:
    """Whether a column has another whole number in every row that has one."""
    if isinstance(cells, np.ndarray):
        some = cells[:99]  # which tells most measurements
        if not np.array_equal(some, np.round(some), equal_nan=True):
            return False
    values = numbers(cells, markers)
    values = values[~np.isnan(values)]
    return np.array_equal(values, np.round(values)) and len(np.unique(values)) == len(values)


def _refuse(differences: list[str], advice: str = "make them equal") -> None:
    if differences:
        raise DataError(bullets(f"The sites' tables do not fit together; {advice}", differences))


def ordered(codes: Iterable[str]) -> tuple[str, ...]:
    def place(code: str) -> tuple[float, str]:
        value = number(code)
        return (float("inf") if value is None else value, code)

    return tuple(sorted(codes, key=place))


def table_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The tables of a folder by their names, and notes."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(
            f"The folder {str(folder)!r} {what}; give a folder with one CSV, Parquet or npz file "
            "per site."
        )
    there = [
        file for file in folder.iterdir() if file.is_file() and not file.name.startswith((".", "~"))
    ]
    files = sorted((file for file in there if file.name.lower().endswith(SUFFIXES)), key=stem)
    others = sorted(file.name for file in there if file not in files)
    if not files:
        found = f"it holds {listed(others)}" if others else "it is empty"
        raise DataError(
            f"The folder {str(folder)!r} has no {named(SUFFIXES)} file ({found}); put in one per "
            "site."
        )
    if twice := repeated(map(stem, files)):
        raise DataError(
            f"Two files of {str(folder)!r} are called {twice[0]!r}; keep one file per site."
        )
    return files, [f"ignored, neither CSV, Parquet nor npz: {named(others)}"] if others else []
