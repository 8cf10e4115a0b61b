"""What a site holds (`Site`) and how its raw columns become numbers (`Column`, `Schema`)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

Cells = Sequence[str] | np.ndarray  # one raw column: text cells of a CSV, or float64 of an npz

# What people write for "no value"; the empty cell counts too.
MISSING = ("", "NA", "NaN", "nan", "?", "null")


class DataError(ValueError):
    """Data that cannot be used; the message says what was found, expected, and what to do."""


@dataclass(frozen=True, eq=False)
class Site:
    """One site's rows: features with NaN for a missing value, labels 0 .. classes - 1; of several
    labels a column each, with 1, 0, or -1 where one is not known.

    >>> site = Site("a", ("age",), np.array([[60.0], [np.nan]]), np.array([1, 0]))
    >>> len(site), len(site.take([0]))
    (2, 1)
    """

    name: str
    columns: tuple[str, ...]
    features: np.ndarray  # (n, d) float64
    labels: np.ndarray  # (n,) int64
    classes: int = 2

    def __post_init__(self) -> None:
        columns, labels = tuple(self.columns), np.asarray(self.labels)
        try:
            features = np.asarray(self.features, np.float64)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"Site {self.name!r} has features that are not numbers: {error}."
            ) from error
        if features.ndim != 2 or features.shape[1] != len(columns):
            raise DataError(
                f"Site {self.name!r} has features of shape {features.shape} and {len(columns)} "
                f"column names; give an array (rows, {len(columns)})."
            )
        if labels.shape[:1] != (len(features),) or labels.ndim > 2:
            raise DataError(
                f"Site {self.name!r} has {len(features)} rows and labels of shape {labels.shape}; "
                "give one label per row."
            )
        if not len(features):
            raise DataError(
                f"Site {self.name!r} has no rows; give it at least one, or leave the site out."
            )
        if twice := repeated(columns):
            raise DataError(
                f"Site {self.name!r} has column {twice[0]!r} more than once; give every column its "
                "own name."
            )
        least = 0 if labels.ndim == 1 else -1
        odd = set(np.unique(labels).tolist()) - set(range(least, self.classes))
        if odd:
            known = "0 and 1" if self.classes == 2 else f"0 .. {self.classes - 1}"
            known += ", and -1 where one is not known" if least else ""
            raise DataError(
                f"Site {self.name!r} has the labels {listed(odd)}; recode them as {known}."
            )
        if np.isinf(features).any():
            row, column = np.argwhere(np.isinf(features))[0]
            raise DataError(
                f"Site {self.name!r} has an infinite value in column {columns[column]!r}, row "
                f"{row}; use NaN for a missing value."
            )
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "features", features)
        object.__setattr__(self, "labels", labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Any) -> Site:
        """The rows at `index` (numbers or a mask) as a site of their own."""
        index = np.asarray(index)
        index = index if index.size else index.astype(np.int64)
        return replace(self, features=self.features[index], labels=self.labels[index])


def check_alike(sites: Sequence[Site]) -> None:
    """Refuse sites that could not train one model together, naming every difference at once.

    A text column `cp` with codes 1 and 2 is held as the columns `cp=1` and `cp=2`, so that the
    names tell types and codes.
    """
    if not sites:
        raise DataError("There are no sites; give at least one.")
    if twice := repeated(site.name for site in sites):
        raise DataError(f"Two sites are called {twice[0]!r}; give every site its own name.")
    parts = {site.name: _parts(site.columns) for site in sites}
    names = {site.name: site.columns for site in sites}
    differences = _differences(parts) + order_differences(names)
    if differences:
        raise DataError(
            bullets("The sites do not hold the same columns; make them equal", differences)
        )
    labels = np.concatenate([site.labels for site in sites])
    classes = np.unique(labels)
    if labels.ndim == 1 and len(classes) < 2:
        raise DataError(
            f"All rows of all {len(sites)} sites have the label {classes[0]}; two classes are "
            "needed in all."
        )


def check_columns(name: str, columns: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    """Refuse a site whose columns are not the wanted ones, in their order."""
    pair = {"the others": wanted, name: columns}
    differences = name_differences(pair) + order_differences(pair)
    if differences:
        raise DataError(bullets(f"Site {name!r} does not hold the expected columns", differences))


def _parts(columns: Sequence[str]) -> dict[str, list[str] | None]:
    """Each raw column with its codes, or None where it is a number."""
    parts: dict[str, list[str] | None] = {}
    for column in columns:
        name, equals, code = column.partition("=")
        codes = parts.setdefault(name, [] if equals else None)
        if equals and codes is not None:
            codes.append(code)
    return parts


def _differences(parts: dict[str, dict[str, list[str] | None]]) -> list[str]:
    found = name_differences({site: tuple(columns) for site, columns in parts.items()})
    for column in union(parts.values()):
        have = {site: columns[column] for site, columns in parts.items() if column in columns}
        texts = {site: codes for site, codes in have.items() if codes is not None}
        numbers = [site for site in have if site not in texts]
        if texts and numbers:
            found.append(
                f"column {column!r} is a number at {named(numbers)} and text at {named(texts)}"
            )
        for code in union(texts.values()):
            lack = [site for site, codes in texts.items() if code not in codes]
            if lack:
                found.append(f"column {column!r} has no code {code!r} at {named(lack)}")
    return found


def name_differences(columns: dict[str, tuple[str, ...]]) -> list[str]:
    """One sentence for every column that some sites lack."""
    held = {site: set(names) for site, names in columns.items()}
    found = []
    for column in union(columns.values()):
        lack = [site for site, names in held.items() if column not in names]
        if lack:
            have = [site for site in columns if site not in lack]
            found.append(f"column {column!r} is at {named(have)} and not at {named(lack)}")
    return found


def order_differences(columns: dict[str, tuple[str, ...]]) -> list[str]:
    """One sentence for every site that has the shared columns in another order than the first."""
    shared = set.intersection(*map(set, columns.values()))
    orders = {site: [name for name in names if name in shared] for site, names in columns.items()}
    (first, wanted), *others = orders.items()
    found = []
    for site, names in others:
        for ours, theirs in zip(wanted, names, strict=True):
            if ours != theirs:
                found.append(f"the order: {first} has {ours!r} where {site} has {theirs!r}")
                break
    return found


@dataclass(frozen=True)
class Column:
    """How one raw column becomes features: a number as it is, text as one 0/1 feature per code.

    >>> Column("cp", "text", ("1", "2")).features
    ('cp=1', 'cp=2')
    """

    name: str
    kind: Literal["number", "text"] = "number"
    codes: tuple[str, ...] = ()
    drop_first: bool = False  # the first code is the reference and has no feature of its own
    missing: tuple[str, ...] = ()  # values that mean "missing" in this column only

    @property
    def features(self) -> tuple[str, ...]:
        if self.kind == "number":
            return (self.name,)
        return tuple(f"{self.name}={code}" for code in self.codes[self.drop_first :])

    def encode(
        self,
        cells: Cells,
        missing: Iterable[str],
        where: Callable[[int], str],
        unknown: str = "refuse",
    ) -> np.ndarray:
        """The features (n, k), NaN where the cell is missing; `where(i)` names row i in errors.

        A code that is none of the column's is refused, or taken as "missing" or as "other": then
        it has a 0 for each of the codes.
        """
        missing = {plain(marker) for marker in (*missing, *self.missing)}
        if self.kind == "number":
            values = numbers(cells, missing)
            for i in np.flatnonzero(np.isinf(values)).tolist():
                raise DataError(
                    f"{where(i)}: column {self.name!r} holds {cells[i]!s}; a finite number is "
                    "needed. Correct the cell or leave it empty."
                )
            for i in np.flatnonzero(np.isnan(values)).tolist():
                if not is_missing(cells[i], missing):
                    raise DataError(
                        f"{where(i)}: column {self.name!r} holds {cells[i]!r}, but a number is "
                        "needed. Correct the cell, or add the value to `missing`."
                    )
            return values[:, None]
        place = {code: i for i, code in enumerate(self.codes)}
        table = np.eye(len(self.codes))[:, self.drop_first :]
        out = np.full((len(cells), table.shape[1]), np.nan)
        for i, cell in enumerate(cells):
            if is_missing(cell, missing):
                continue
            code = place.get(plain(cell))
            if code is not None:
                out[i] = table[code]
            elif unknown == "other" and not self.drop_first:
                out[i] = 0.0
            elif unknown == "refuse":
                raise DataError(
                    f"{where(i)}: column {self.name!r} holds {plain(cell)!r}, which is not one of "
                    f"its codes {listed(self.codes)}. Correct the cell or leave it empty."
                )
        return out


@dataclass(frozen=True)
class Schema:
    """How a raw table becomes features and labels; a run folder stores it to score new rows.

    With `classes`, each of them is numbered in turn, and there are no positives and negatives. With
    `labels`, there is a column of 0 and 1 (or false and true) for each, and `label` is empty.
    """

    columns: tuple[Column, ...]
    label: str
    positive: tuple[str, ...] = ("1",)
    negative: tuple[str, ...] = ("0",)
    missing: tuple[str, ...] = MISSING
    classes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of classes."""
        return len(self.classes) or 2

    @property
    def numbers(self) -> dict[str, int]:
        """Each label's number."""
        if self.classes:
            return {value: number for number, value in enumerate(self.classes)}
        return {**dict.fromkeys(self.negative, 0), **dict.fromkeys(self.positive, 1)}

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, in order: those of `Site.columns`."""
        return tuple(name for column in self.columns for name in column.features)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Schema:
        columns = tuple(Column(**tuples(column)) for column in value["columns"])
        return Schema(**{**tuples(value), "columns": columns})


def tuples(value: dict[str, Any]) -> dict[str, Any]:
    """A table of JSON with tuples in place of lists."""
    return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}


def plain(cell: object) -> str:
    """A cell without outer spaces or a whole number's `.0`: sites write one code as 4 and 4.0."""
    text = str(cell).strip()
    whole = re.fullmatch(r"(-?[0-9]+)\.0*", text)
    return whole[1] if whole else text


def number(cell: object) -> float | None:
    """The cell as a number; None where it is text (Python alone would read 1_000 as a number)."""
    text = str(cell)
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def numbers(cells: Cells, missing: set[str]) -> np.ndarray:
    """The cells as float64, NaN where they are missing or text."""
    if isinstance(cells, np.ndarray):
        markers = [value for value in map(number, missing) if value is not None]
        return np.where(np.isin(cells, markers), np.nan, cells)
    values = (None if plain(cell) in missing else number(cell) for cell in cells)
    return np.array([np.nan if value is None else value for value in values], np.float64)


def is_missing(cell: object, missing: set[str]) -> bool:
    """Whether a cell holds a marker of `missing`, or NaN however it is written."""
    if plain(cell) in missing:
        return True
    value = number(cell)
    return value is not None and value != value


def repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]


def union(lists: Iterable[Iterable[str]]) -> list[str]:
    """All names once, in the order of their first appearance."""
    return list(dict.fromkeys(name for names in lists for name in names))


def named(names: Iterable[str]) -> str:
    return ", ".join(names)


def listed(values: Iterable[object], most: int = 10) -> str:
    values = list(values)
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(repr, values[:most])) + more


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence with the known name most like `name`, or nothing."""
    lower = {known.lower(): known for known in names}
    found = difflib.get_close_matches(name.lower(), lower, n=1)
    return f" Did you mean {lower[found[0]]!r}?" if found else ""


def bullets(opening: str, sentences: Sequence[str]) -> str:
    return "\n  - ".join([opening + ":", *sentences])
