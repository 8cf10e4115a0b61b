"""Tables as they were written: CSV, Parquet and npz files, and how a schema reads them."""

from __future__ import annotations

import gzip
import math
import mmap
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy

from fedminimax.data.columns import (
    Data,
    Head,
    Lines,
    Texts,
    csv_columns,
    csv_head,
    csv_rows,
    parquet_columns,
    parquet_names,
    text_of,
)
from fedminimax.data.sites import (
    MISSING,
    Cells,
    Column,
    DataError,
    Schema,
    is_missing,
    listed,
    named,
    nearest,
    number,
    plain,
    repeated,
)

SUFFIXES = (".csv", ".csv.gz", ".parquet", ".npz")
KINDS = "CSV, csv.gz, Parquet or npz"
MARKS = {"1": 1, "true": 1, "0": 0, "false": 0}  # what one of several labels may be
_ZIP = b"PK\x03\x04"  # what a spreadsheet begins with


class Rows(NamedTuple):
    """Rows to score: like a `Site`, but with labels only where the table has them."""

    columns: tuple[str, ...]
    features: np.ndarray  # (n, d) float64, NaN = missing
    labels: np.ndarray | None  # (n,) int64; (n, labels) of several, -1 where one is not known
    lines: Sequence[int]  # where each row stands in its file


@dataclass(frozen=True)
class Raw:
    """One file as it was written; nothing is interpreted yet."""

    name: str
    file: str
    names: Sequence[str]  # all columns of the file; `cells` holds those that are used
    cells: dict[str, Cells]
    labels: Texts | None
    lines: Sequence[int]
    unit: str = "line"
    aside: Mapping[str, Texts] = field(default_factory=dict)  # columns that are no features

    def set_aside(self, names: Collection[str]) -> Raw:
        """The same with columns that are no features apart."""
        apart = {name: Texts.of(self.cells[name]) for name in names if name in self.cells}
        cells = {name: held for name, held in self.cells.items() if name not in apart}
        return replace(self, cells=cells, aside=apart)

    def where(self, row: int) -> str:
        return f"{self.file}, {self.unit} {self.lines[row]}"


def read_table(
    path: str | Path, schema: Schema, unknown: Literal["refuse", "missing", "other"] = "refuse"
) -> Rows:
    """New rows in the columns a model was trained on; others are ignored, the label may be absent.

    A code that training never saw is refused, or, with unknown = "missing", imputed like a missing
    value, or, with "other", none of the codes.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"There is no file {str(file)!r}; give a {KINDS} file.")
    wanted = {column.name for column in schema.columns}
    texts = {column.name for column in schema.columns if column.kind == "text"} | {*schema.labels}
    used, label = wanted | {*schema.labels}, schema.label or None
    raw = open_table(file, label, used.__contains__, texts, schema.missing)
    raw = raw.set_aside(schema.labels)
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
    parts = [_encode(column, raw, schema.missing, unknown) for column in schema.columns]
    out = np.empty((len(raw.lines), sum(part.shape[1] for part in parts)))
    # A few rows at a time stay in the cache, in which columns become rows.
    for start in range(0, len(out), 512):
        np.concatenate([part[start : start + 512] for part in parts], 1, out[start : start + 512])
    return out


def _encode(column: Column, raw: Raw, missing: Sequence[str], unknown: str) -> np.ndarray:
    """A column's features. Of texts, each one is encoded once."""
    cells = raw.cells[column.name]
    if column.kind == "number" and isinstance(cells, np.ndarray):
        found = [number(plain(marker)) for marker in (*missing, *column.missing)]
        markers = [value for value in found if value is not None and value == value]
        values = np.where(np.isin(cells, markers), np.nan, cells) if markers else cells
        if not np.isinf(values).any():
            return values[:, None]
    held = Texts.of(cells)
    table = column.encode(held.values, missing, lambda i: raw.where(held.first[i]), unknown)
    return table[held.places]


def labels_of(raw: Raw, schema: Schema) -> np.ndarray | None:
    """The label of each row, or a column for each of several; None if the table has not all."""
    if schema.labels:
        if not raw.aside.keys() >= {*schema.labels}:
            return None
        return np.stack([_marks(raw, name, schema.missing) for name in schema.labels], axis=1)
    markers = {plain(marker) for marker in schema.missing}
    held = raw.labels
    if held is None or all(is_missing(label, markers) for label in held.values):
        return None
    value = schema.numbers
    for label, first in zip(held.values, held.first, strict=True):
        if plain(label) not in value:
            raise DataError(
                f"{raw.where(first)}: the label {schema.label!r} is {plain(label)!r}, but one of "
                f"{listed(value)} is needed. Correct it, or leave out the label column."
            )
    return np.array([value[plain(label)] for label in held.values], np.int64)[held.places]


def _marks(raw: Raw, name: str, missing: Sequence[str]) -> np.ndarray:
    """One of several labels: 1, 0, or -1 where it is missing."""
    held, markers = raw.aside[name], {plain(marker) for marker in missing}
    found = []
    for cell, first in zip(held.values, held.first, strict=True):
        mark = -1 if is_missing(cell, markers) else MARKS.get(plain(cell).lower())
        if mark is None:
            raise DataError(
                f"{raw.where(first)}: the label {name!r} is {plain(cell)!r}, but of several labels "
                "each is 1 or 0, true or false, or empty where it is not known. Correct it, or add "
                "the value to `missing`."
            )
        found.append(mark)
    return np.array(found, np.int64)[held.places]


def open_table(
    file: Path,
    label: str | None,
    wanted: Callable[[str], bool] = lambda name: True,
    texts: Collection[str] = (),
    missing: Sequence[str] = MISSING,
) -> Raw:
    """Read a file, with everything that can go wrong turned into a sentence that names it.

    `texts` are columns whose numbers are codes, which stay as they are written.
    """
    ending = file.name.lower()
    if not ending.endswith(SUFFIXES):
        raise DataError(f"{file.name} is not one of {named(SUFFIXES)}; save the table as CSV.")
    if ending.endswith(".npz"):
        return _npz(file, label, wanted)
    if ending.endswith(".parquet"):
        return _read_parquet(file, label, wanted, texts, missing)
    data = _data(file)
    head = csv_head(data)
    if head is not None:
        raw = _from_csv(file, data, head, label, wanted, texts, missing)
        if raw is not None:
            return raw
    return raw_csv(stem(file), file.name, text_of(data), label, wanted)


def _from_csv(
    file: Path,
    data: Data,
    head: Head,
    label: str | None,
    wanted: Callable[[str], bool],
    texts: Collection[str],
    missing: Sequence[str],
) -> Raw | None:
    used = used_columns(file.name, head.names, label, wanted)
    if not used:
        return None
    kept = {i for i in used if head.names[i] == label or head.names[i] in texts}
    found = csv_columns(data, head, used, kept, missing)
    if found is None:
        return None
    cells = {head.names[i]: found.cells[i] for i in used}
    labels = cells.pop(label or "", None)
    lines = Lines(file, data, found.rows)
    return Raw(stem(file), file.name, head.names, cells, _as_labels(labels), lines)


def _read_parquet(
    file: Path,
    label: str | None,
    wanted: Callable[[str], bool],
    texts: Collection[str],
    missing: Sequence[str],
) -> Raw:
    names = parquet_names(file)
    used = used_columns(file.name, names, label, wanted)
    kept = {i for i in used if names[i] == label or names[i] in texts}
    found = parquet_columns(file, used, kept, missing)
    cells = {names[i]: found.cells[i] for i in used}
    labels = _as_labels(cells.pop(label or "", None))
    return Raw(stem(file), file.name, names, cells, labels, range(found.rows), unit="row")


def _as_labels(cells: Cells | None) -> Texts | None:
    return None if cells is None else Texts.of(cells)


def used_columns(
    file: str, names: Sequence[str], label: str | None, wanted: Callable[[str], bool]
) -> list[int]:
    """The places of the wanted columns and of the label, each of which has a name of its own."""
    used = [i for i, name in enumerate(names) if name == label or wanted(name)]
    if twice := repeated(names[i] for i in used):
        raise DataError(f"{file} has column {twice[0]!r} more than once; rename or remove one.")
    if "" in (names[i] for i in used):
        raise DataError(
            f"{file}: column {names.index('') + 1} has no name (a row number written by pandas or "
            'R?); name it, or leave it out with drop = [""].'
        )
    return used


def _data(file: Path) -> Data:
    """The bytes of a CSV file, which are UTF-8."""
    try:
        data = _bytes(file)
        if data[: len(_ZIP)] == _ZIP:
            raise DataError(
                f"{file.name} is a spreadsheet or a zip file, whatever its name says; save it as "
                "CSV from the program that made it."
            )
        if file.name.lower().endswith(".gz"):
            data = gzip.decompress(data)
        if len(data) and np.frombuffer(data, np.uint8).max() >= 128:
            text_of(data)
        return data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{file.name} is not a whole gzip file ({error}); copy it again."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file.name} is not UTF-8 text (byte {error.start}); save it as UTF-8."
        ) from error


def _bytes(file: Path) -> Data:
    """A large file is not copied into memory."""
    with file.open("rb") as opened:
        if file.stat().st_size < 1 << 20:
            return opened.read()
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def raw_csv(
    name: str,
    file: str,
    text: str,
    label: str | None,
    wanted: Callable[[str], bool] = lambda name: True,
    header: Sequence[str] = (),
) -> Raw:
    """The wanted columns and the label of a CSV text, by Python's csv reader, each cell as it is
    written; the first line is the header unless given."""
    above = ",".join(header) + "\n" if header else ""
    found = list(csv_rows(file, above + text, first=0 if header else 1))
    if not found:
        raise DataError(f"{file} is empty; it needs a header row and at least one row of data.")
    (_, given), *rows = found
    names = [column.strip() for column in given]
    used = used_columns(file, names, label, wanted)
    cells: dict[str, Cells] = {names[i]: Texts.of([row[i] for _, row in rows]) for i in used}
    labels = _as_labels(cells.pop(label or "", None))
    return Raw(name, file, names, cells, labels, [line for line, _ in rows])


def _npz(file: Path, label: str | None, wanted: Callable[[str], bool]) -> Raw:
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
    used = used_columns(file.name, names, None, wanted)
    values = features.astype(np.float64)
    cells: dict[str, Cells] = {names[i]: values[:, i] for i in used}
    text = None if labels is None else Texts.of(_texts(labels))
    return Raw(stem(file), file.name, names, cells, text, range(len(values)), unit="row")


def plain_arrays(file: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file, each as large as its header says."""
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                _check_size(archive, member)
        # Pickle would let a data file run code.
        with np.load(file, allow_pickle=False) as held:
            return {key: held[key] for key in held.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{file.name} cannot be read as npz of plain arrays ({error}); save it with np.savez, "
            "without objects."
        ) from error


HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def _check_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuses an array whose header asks for other memory than the file has bytes for."""
    with archive.open(member) as file:
        read = HEADERS.get(npy.read_magic(file))
        if read is None:
            return
        shape, _, dtype = read(file)
        size, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
    if size != there and not dtype.hasobject:
        raise ValueError(
            f"{member.filename} says that it is of shape {shape}, {size} bytes, but has "
            f"{there} of them"
        )


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
