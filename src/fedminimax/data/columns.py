"""CSV and Parquet files read column by column with pyarrow: numbers as float64, the rest as texts.

What pyarrow would read otherwise than Python's csv reader does (a quote inside a cell, a line that
is too short) is left to the latter, which names the line at fault.
"""

from __future__ import annotations

import csv
import io
import mmap
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedminimax.data.sites import Cells, DataError, number, plain

if TYPE_CHECKING:
    import pyarrow as pa

Data = bytes | mmap.mmap
TRUTH = {"true": 1.0, "false": 0.0}
_SAMPLE = (
    50  # rows that tell which columns are texts; one that tells wrongly costs a second reading
)
_HEAD = 1 << 20  # bytes in which these rows are looked for
_BLOCK = 1 << 24  # bytes that pyarrow parses at a time; a row must fit


class Texts(Sequence[str]):
    """A column of texts, each kept once, in the order of their first appearance.

    >>> column = Texts.of(["m", " f ", "m"])
    >>> column.values, column.places.tolist(), column[1]
    (['m', 'f'], [0, 1, 0], 'f')
    """

    def __init__(self, values: list[str], places: np.ndarray):
        self.values, self.places = values, places

    @staticmethod
    def of(cells: Sequence[object] | np.ndarray) -> Texts:
        """The same for cells of any kind; outer spaces are left out."""
        if isinstance(cells, Texts):
            return cells
        if isinstance(cells, np.ndarray):
            found, first, index = np.unique(cells, return_index=True, return_inverse=True)
            order = np.argsort(first)
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            return Texts([str(value) for value in found[order].tolist()], place[index])
        places: dict[str, int] = {}
        index = [places.setdefault(str(cell).strip(), len(places)) for cell in cells]
        return Texts([*places], np.array(index, np.int64))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: Any) -> Any:
        return self.values[self.places[row]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype)[self.places]

    @cached_property
    def first(self) -> list[int]:
        """The row in which each text stands first."""
        found = np.full(len(self.values), len(self.places), np.int64)
        np.minimum.at(found, self.places, np.arange(len(self.places)))
        return found.tolist()

    @cached_property
    def counts(self) -> list[int]:
        """In how many rows each text stands."""
        return np.bincount(self.places, minlength=len(self.values)).tolist()


class Lines(Sequence[int]):
    """Where each row of a CSV file stands. Only errors and tables of scores ask for it, so the file
    is read for it when it is first asked for."""

    def __init__(self, file: Path, data: Data, rows: int):
        self.file, self.data, self.rows = file, data, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: Any) -> Any:
        return self._found[row]

    @cached_property
    def _found(self) -> Sequence[int]:
        held = np.frombuffer(self.data, np.uint8)
        breaks = np.count_nonzero(held == ord("\n"))
        if breaks + (held[-1] != ord("\n")) == self.rows + 1 and self.data.find(b"\r\r") < 0:
            return range(2, self.rows + 2)  # a line for each row
        return [line for line, _ in islice(csv_rows(self.file.name, text_of(self.data)), 1, None)]


class Columns(NamedTuple):
    """The columns of a file that are used, by their place in its header."""

    cells: dict[int, Cells]
    rows: int


def csv_rows(file: str, text: str, first: int = 1) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV text that are not empty, the header first, each with its line."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    start, width = first, None
    try:
        for row in reader:
            if row:
                width = len(row) if width is None else width
                if len(row) != width:
                    raise DataError(
                        f"{file}, line {start}: {len(row)} cells, but the header has {width}; "
                        "correct the line."
                    )
                yield start, row
            start = reader.line_num + first
    except csv.Error as error:
        raise DataError(
            f"{file}, from line {start}: this is not CSV ({error}); correct the quotes."
        ) from error


def text_of(data: Data) -> str:
    """The text of a file's bytes, without a byte-order mark."""
    return bytes(data).decode("utf-8-sig")


class Head(NamedTuple):
    """How a CSV file begins."""

    names: list[str]
    rows: list[list[str]]  # the first ones
    start: int  # the byte after the header


def csv_head(data: Data) -> Head | None:
    """The header and the first rows; None if there are none, or they are not as they should be."""
    start = 3 if data[:3] == b"\xef\xbb\xbf" else 0
    text, cut = data[start:_HEAD].decode("utf-8", "ignore"), len(data) > _HEAD
    read = 0

    def consume() -> Iterator[str]:
        nonlocal read
        for line in io.StringIO(text, newline=""):
            read += len(line.encode())
            yield line

    reader = csv.reader(consume(), strict=True)
    try:
        names = next((row for row in reader if row), None)
        if names is None:
            return None
        end, rows = start + read, []
        for row in reader:
            if len(rows) == _SAMPLE or (cut and start + read >= _HEAD - 4):
                break
            if row:
                rows.append(row)
    except csv.Error:
        return None
    if not rows or any(len(row) != len(names) for row in rows):
        return None
    return Head([name.strip() for name in names], rows, end)


def csv_columns(
    data: Data, head: Head, used: Sequence[int], texts: Collection[int], missing: Collection[str]
) -> Columns | None:
    """The columns at `used`, those at `texts` as they are written; None where only Python's csv
    reader can tell what is meant."""
    import pyarrow as pa

    quotes = data.find(b'"') >= 0
    if quotes and not _is_well_quoted(data):
        return None
    markers = {plain(marker) for marker in missing}
    written = {
        i: i in texts or any(_is_word(row[i].strip(), markers) for row in head.rows) for i in used
    }
    nothing = sorted({"", *missing, *markers} - {m for m in markers if _is_finite(m)})

    def read(kinds: dict[int, pa.DataType]) -> dict[int, pa.ChunkedArray]:
        from pyarrow import csv as arrow

        table = arrow.read_csv(
            pa.BufferReader(pa.py_buffer(data)[head.start :]),
            arrow.ReadOptions(
                column_names=[str(i) for i in range(len(head.names))], block_size=_BLOCK
            ),
            arrow.ParseOptions(newlines_in_values=quotes),
            arrow.ConvertOptions(
                check_utf8=False,
                include_columns=[str(i) for i in kinds],
                column_types={str(i): kind for i, kind in kinds.items()},
                null_values=nothing,
            ),
        )
        return dict(zip(kinds, table.columns, strict=True))

    coded = pa.dictionary(pa.int32(), pa.string())
    try:
        try:
            found = read({i: coded if written[i] else pa.float64() for i in used})
        except pa.ArrowInvalid:  # a text below the first rows, or a fault: this tells them apart
            found = read({i: coded if written[i] else pa.string() for i in used})
        rows = len(next(iter(found.values())))
        cells = dict(_drain(found, markers, texts))
        endless = [i for i, c in cells.items() if isinstance(c, np.ndarray) and np.isinf(c).any()]
        if endless:  # an error names the cell as it is written
            cells |= {
                i: _texts(column) for i, column in read(dict.fromkeys(endless, coded)).items()
            }
    except pa.ArrowInvalid:
        return None
    return Columns(cells, rows)


def _is_word(cell: str, markers: set[str]) -> bool:
    return number(cell) is None and bool(cell) and cell not in markers


def _is_finite(marker: str) -> bool:
    value = number(marker)
    return value is not None and value == value


def _is_well_quoted(data: Data) -> bool:
    """Whether quotes stand around whole cells only, and in pairs inside them."""
    held, opened = np.frombuffer(data, np.uint8), 0
    around = np.zeros(256, bool)
    around[[ord(mark) for mark in ',\n\r"']] = True
    for start in range(0, len(held), _BLOCK):
        places = start + np.flatnonzero(held[start : start + _BLOCK] == ord('"'))
        opens, closes = places[opened::2], places[1 - opened :: 2]
        before = opens[opens > (3 if data[:3] == b"\xef\xbb\xbf" else 0)] - 1
        after = closes[closes < len(held) - 1] + 1
        if not (around[held[before]].all() and around[held[after]].all()):
            return False
        opened ^= len(places) & 1
    return not opened


def parquet_names(file: Path) -> list[str]:
    """The names of a Parquet file's columns."""
    return [name.strip() for name in _parquet(file).schema_arrow.names]


def parquet_columns(
    file: Path, used: Sequence[int], texts: Collection[int], missing: Collection[str]
) -> Columns:
    """The columns at `used`, those at `texts` as texts."""
    import pyarrow as pa

    opened = _parquet(file)
    names = opened.schema_arrow.names
    try:
        table = opened.read(columns=[names[i] for i in used])
    except (pa.ArrowException, OSError) as error:
        raise _broken(file, error) from error
    found, rows = {i: table.column(names[i]) for i in used}, table.num_rows
    del table
    for i, column in found.items():
        if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
            raise DataError(
                f"{file.name}: column {names[i]!r} holds {column.type}, but numbers or texts are "
                "needed. Convert it, or name it in `drop`."
            )
    return Columns(dict(_drain(found, {plain(m) for m in missing}, texts)), rows)


def _parquet(file: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise _broken(file, error) from error


def _broken(file: Path, error: Exception) -> DataError:
    first = str(error).partition("\n")[0].rstrip(".")
    return DataError(f"{file.name} cannot be read as Parquet ({first}); write it again.")


def _drain(
    found: dict[int, pa.ChunkedArray], markers: set[str], texts: Collection[int]
) -> Iterator[tuple[int, Cells]]:
    """The cells of each column, which is let go at once: memory holds the table about once."""
    for i in list(found):
        yield i, _cells(found.pop(i), markers, i in texts)


def _cells(column: pa.ChunkedArray, markers: set[str], text: bool) -> Cells:
    """A column as numbers if it holds only these (or true and false), else as texts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if text:
        return _texts(column)
    if pa.types.is_dictionary(kind):
        held = _texts(column)
        return _truth(held, markers) if not _all_numbers(held, markers) else _numbers(held, markers)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or "view" in str(kind):
        texts = column.cast(pa.string())
        trimmed = pc.call_function("utf8_trim_whitespace", [texts])
        nothing = pc.SetLookupOptions(value_set=pa.array([*markers, ""], pa.string()))
        marked = pc.call_function("is_in", [trimmed], nothing)
        try:
            none = pa.scalar(None, pa.string())
            values = pc.call_function("if_else", [marked, none, trimmed])
            return values.cast(pa.float64()).to_numpy()
        except pa.ArrowInvalid:
            return _truth(_texts(column), markers)
    if pa.types.is_temporal(kind):
        return _texts(column)
    # Integers beyond 2^53 are rounded, as Python's float() rounds them.
    return column.cast(pa.float64(), safe=False).to_numpy()


def _texts(column: pa.ChunkedArray) -> Texts:
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    held = column.unify_dictionaries().combine_chunks()
    held = held.chunk(0) if isinstance(held, pa.ChunkedArray) and held.num_chunks else held
    if not len(held):
        return Texts([], np.zeros(0, np.int64))
    values = ["" if v is None else str(v) for v in held.dictionary.to_pylist()]
    index = held.indices.to_numpy(zero_copy_only=False)
    if held.null_count:
        index = np.where(np.isnan(index), len(values), index).astype(np.int64)
        values.append("")
    distinct = Texts.of(values)  # without their outer spaces, several may be one
    return Texts(distinct.values, distinct.places[index])


def _all_numbers(held: Texts, markers: set[str]) -> bool:
    return all(not _is_word(value, markers) for value in held.values)


def _numbers(held: Texts, markers: set[str]) -> np.ndarray:
    found = [None if plain(value) in markers else number(value) for value in held.values]
    values = np.array([np.nan if value is None else value for value in found], np.float64)
    return values[held.places]


def _truth(held: Texts, markers: set[str]) -> Cells:
    """True and false as 1 and 0, however they are written."""
    there = [value for value in held.values if _is_word(value, markers)]
    if not there or any(_is_word(v, markers) and v.lower() not in TRUTH for v in held.values):
        return held
    if any(number(value) is not None and plain(value) not in markers for value in held.values):
        return held
    values = np.array([TRUTH.get(value.lower(), np.nan) for value in held.values])
    return values[held.places]
