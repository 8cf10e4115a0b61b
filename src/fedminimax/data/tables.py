"""Tables as they were written: CSV and npz files, and how a schema reads them."""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedminimax.data.sites import (
    Cells,
    DataError,
    Schema,
    is_missing,
    listed,
    named,
    nearest,
    plain,
    repeated,
)

SUFFIXES = (".csv", ".csv.gz", ".npz")
_ZIP = b"PK\x03\x04"  # what a spreadsheet begins with


class Rows(NamedTuple):
    """Rows to score: like a `Site`, but with labels only where the table has them."""

    columns: tuple[str, ...]
    features: np.ndarray  # (n, d) float64, NaN = missing
    labels: np.ndarray | None  # (n,) int64
    lines: Sequence[int]  # where each row stands in its file


@dataclass(frozen=True)
class Raw:
    """One file as it was written; nothing is interpreted yet."""

    name: str
    file: str
    names: Sequence[str]  # all columns of the file; `cells` holds those that are used
    cells: dict[str, Cells]
    labels: Sequence[object] | None
    lines: Sequence[int]
    unit: str = "line"

    def where(self, row: int) -> str:
        return f"{self.file}, {self.unit} {self.lines[row]}"


def read_table(
    path: str | Path, schema: Schema, unknown: Literal["refuse", "missing"] = "refuse"
) -> Rows:
    """New rows in the columns a model was trained on; others are ignored, the label may be absent.

    A code that training never saw is refused, or, with unknown = "missing", imputed like a missing
    value.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"There is no file {str(file)!r}; give a CSV, csv.gz or npz file.")
    wanted = {column.name for column in schema.columns}
    raw = open_table(file, schema.label, wanted.__contains__)
    lack = [column.name for column in schema.columns if column.name not in raw.cells]
    if lack:
        raise DataError(
            f"{raw.file} lacks the columns {listed(lack, 30)}, which the model was trained on; its "
            f"columns are {listed(raw.names, 30)}.{nearest(lack[0], raw.names)}"
        )
    if not len(raw.lines):
        raise DataError(f"{raw.file} has no rows; give at least one to score.")
    return Rows(schema.features, encode(raw, schema, unknown), labels_of(raw, schema), raw.lines)


def encode(raw: Raw, schema: Schema, unknown: str = "refuse") -> np.ndarray:
    """The features of a raw table, in the schema's order."""
    parts = [
        column.encode(raw.cells[column.name], schema.missing, raw.where, unknown)
        for column in schema.columns
    ]
    return np.concatenate(parts, axis=1)


def labels_of(raw: Raw, schema: Schema) -> np.ndarray | None:
    markers = {plain(marker) for marker in schema.missing}
    if raw.labels is None or all(is_missing(label, markers) for label in raw.labels):
        return None
    value = schema.numbers
    for i, label in enumerate(raw.labels):
        if plain(label) not in value:
            raise DataError(
                f"{raw.where(i)}: the label {schema.label!r} is {plain(label)!r}, but one of "
                f"{listed(value)} is needed. Correct it, or leave out the label column."
            )
    return np.array([value[plain(label)] for label in raw.labels], np.int64)


def open_table(file: Path, label: str, wanted: Callable[[str], bool]) -> Raw:
    """Read a file, with everything that can go wrong turned into a sentence that names it."""
    if not file.name.lower().endswith(SUFFIXES):
        raise DataError(f"{file.name} is not one of {named(SUFFIXES)}; save the table as CSV.")
    if file.name.lower().endswith(".npz"):
        return _npz(file, label, wanted)
    return raw_csv(stem(file), file.name, _text(file), label, wanted)


def _text(file: Path) -> str:
    try:
        data = file.read_bytes()
        if data.startswith(_ZIP):
            raise DataError(
                f"{file.name} is a spreadsheet or a zip file, whatever its name says; save it as "
                "CSV from the program that made it."
            )
        data = gzip.decompress(data) if file.name.lower().endswith(".gz") else data
        return data.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{file.name} is not a whole gzip file ({error}); copy it again."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.name} is not UTF-8 text (byte {error.start}); save it as UTF-8."
        ) from error


def raw_csv(
    name: str,
    file: str,
    text: str,
    label: str,
    wanted: Callable[[str], bool] = lambda name: True,
    header: Sequence[str] = (),
) -> Raw:
    """The wanted columns and the label of a CSV text; its first line is the header unless given."""
    first = ",".join(header) + "\n" if header else ""
    reader = csv.reader(io.StringIO(first + text, newline=""), strict=True)
    rows, lines, start = [], [], 1
    try:
        for row in reader:
            if row:
                rows.append(row)
                lines.append(start - bool(header))
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file}, from line {start}: this is not CSV ({error}); correct the quotes."
        ) from error
    if not rows:
        raise DataError(f"{file} is empty; it needs a header row and at least one row of data.")
    names = [column.strip() for column in rows[0]]
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(names):
            raise DataError(
                f"{file}, line {line}: {len(row)} cells, but the header has {len(names)}; correct "
                "the line."
            )
    used = [i for i, column in enumerate(names) if column == label or wanted(column)]
    if twice := repeated(names[i] for i in used):
        raise DataError(f"{file} has column {twice[0]!r} more than once; rename or remove one.")
    columns = {names[i]: [row[i].strip() for row in rows[1:]] for i in used}
    labels = columns.pop(label, None)
    cells: dict[str, Cells] = dict(columns)
    if "" in cells:
        raise DataError(
            f"{file}: column {names.index('') + 1} has no name (a row number written by pandas or "
            'R?); name it, or leave it out with drop = [""].'
        )
    return Raw(name, file, names, cells, labels, lines[1:])


def _npz(file: Path, label: str, wanted: Callable[[str], bool]) -> Raw:
    arrays = plain_arrays(file)
    if "features" not in arrays:
        raise DataError(
            f"{file.name} has the arrays {listed(arrays)}; `features` is needed, and `labels` to "
            "train."
        )
    features, labels = arrays["features"], arrays.get("labels")
    if features.ndim != 2 or features.dtype.kind not in "biuf":
        raise DataError(
            f"{file.name}: `features` is {features.dtype} of shape {features.shape}; give numbers "
            "of shape (rows, columns)."
        )
    if labels is not None and labels.shape != (len(features),):
        raise DataError(
            f"{file.name}: `labels` has shape {labels.shape} for {len(features)} rows; give one "
            "label per row."
        )
    names = _names(file.name, arrays)
    if label in names and wanted(label):
        raise DataError(
            f"{file.name}: the label {label!r} is also a column of `features`; name it in `drop`."
        )
    used = [i for i, name in enumerate(names) if wanted(name)]
    if twice := repeated(names[i] for i in used):
        raise DataError(
            f"{file.name} has column {twice[0]!r} more than once; rename or remove one."
        )
    values = features.astype(np.float64)
    cells: dict[str, Cells] = {names[i]: values[:, i] for i in used}
    text = None if labels is None else _texts(labels)
    return Raw(stem(file), file.name, names, cells, text, range(len(values)), unit="row")


def plain_arrays(file: Path) -> dict[str, np.ndarray]:
    try:
        # Pickle would let a data file run code.
        held = np.load(file, allow_pickle=False)
        if not isinstance(held, np.lib.npyio.NpzFile):
            raise ValueError("it holds one bare array")
        with held:
            return {key: held[key] for key in held.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{file.name} cannot be read as npz of plain arrays ({error}); save it with np.savez, "
            "without objects."
        ) from error


def _names(file: str, arrays: dict[str, np.ndarray]) -> list[str]:
    count = arrays["features"].shape[1]
    if "columns" not in arrays:
        return [f"feature {i}" for i in range(count)]
    if arrays["columns"].shape != (count,):
        raise DataError(
            f"{file}: `columns` has shape {arrays['columns'].shape} for {count} columns; give one "
            "name per column."
        )
    return [str(name).strip() for name in _texts(arrays["columns"])]


def _texts(values: np.ndarray) -> list[object]:
    if values.dtype.kind == "S":
        return [value.decode("utf-8", "replace") for value in values.tolist()]
    # A boolean label means what it says: 1 and 0.
    return (values.astype(np.int64) if values.dtype.kind == "b" else values).tolist()


def stem(file: Path) -> str:
    suffix = max(
        (end for end in SUFFIXES if file.name.lower().endswith(end)), key=len, default=file.suffix
    )
    return file.name[: len(file.name) - len(suffix)]
