"""What people hold their rows in, as numbers: data frames with texts, and sparse matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import issparse

from fedminimax.data.sites import MISSING, Column, DataError, listed, plain


def dense(values: Any) -> Any:
    """A sparse matrix with its zeros written out; anything else as it is."""
    return values.toarray() if issparse(values) else values


def text_columns(frame: Any) -> tuple[Column, ...] | None:
    """The columns of a data frame that has texts or categories among them; None of other rows.

    A text column becomes one 0/1 feature per code, in the order of the codes.
    """
    if not hasattr(frame, "columns") or not hasattr(frame, "dtypes"):
        return None
    kinds = ["text" if _is_text(frame[name].dtype) else "number" for name in frame.columns]
    if "text" not in kinds:
        return None
    columns = []
    for name, kind in zip(frame.columns, kinds, strict=True):
        codes = () if kind == "number" else tuple(sorted({*_cells(frame[name])} - {""}))
        if kind == "text" and not codes:
            raise DataError(f"column {name!r} of X has texts and no values: leave it out")
        # Unchecked: one of two kinds, by the branches above.
        columns.append(Column(str(name), kind, codes))  # type: ignore[arg-type]
    return tuple(columns)


def numbers_of(frame: Any, columns: Sequence[Column]) -> np.ndarray:
    """The features of a frame's rows, NaN where a cell is missing; a code that training never saw
    has a 0 for each of the codes."""
    if list(map(str, getattr(frame, "columns", ()))) != [column.name for column in columns]:
        texts = listed(column.name for column in columns if column.kind == "text")
        raise DataError(
            f"the model was trained on a data frame with the text columns {texts}: give one with "
            "the same columns, in the same order"
        )

    def where(row: int) -> str:
        return f"row {row} of X"

    found = []
    for name, column in zip(frame.columns, columns, strict=True):
        cells = _cells(frame[name])
        if column.kind == "number" and not _is_text(frame[name].dtype):
            cells = np.asarray(frame[name], np.float64)
        found.append(column.encode(cells, MISSING, where, unknown="other"))
    return np.hstack(found)


def label_names(y: Any) -> tuple[str, ...]:
    """The names of several labels, those of a frame's columns or their numbers; none of one."""
    shape = y.shape if hasattr(y, "shape") else np.asarray(y).shape
    if len(shape) != 2 or shape[1] < 2:
        return ()
    return tuple(map(str, getattr(y, "columns", range(shape[1]))))


def label_marks(y: Any, names: Sequence[str]) -> np.ndarray:
    """Several labels as 1, 0, and -1 where one is NaN or None, and so not known."""
    try:
        values = np.asarray(dense(y), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"y has several columns that are not all numbers: {error}") from error
    values = np.where(np.isnan(values), -1.0, values)
    for name, column in zip(names, values.T, strict=True):
        held = set(np.unique(column).tolist())
        if odd := held - {-1.0, 0.0, 1.0}:
            raise DataError(
                f"label {name!r} of y holds {listed(sorted(odd))}; several labels are 1 and 0, or "
                "NaN where one is not known: recode them"
            )
        if not {0.0, 1.0} <= held:
            raise DataError(
                f"label {name!r} of y has rows of {len(held - {-1.0})} classes, but 0 and 1 are "
                "needed: leave it out"
            )
    return values.astype(np.int64)


def _is_text(dtype: Any) -> bool:
    """Whether a column's cells are no numbers: texts, objects or categories."""
    kind = getattr(dtype, "kind", "O")
    return kind not in "biufc"


def _cells(column: Any) -> list[str]:
    """The cells as texts, a missing one as the empty one."""
    lack = np.asarray(column.isna(), bool)
    values = np.asarray(column, dtype=object)
    return ["" if gone else plain(value) for value, gone in zip(values, lack, strict=True)]
