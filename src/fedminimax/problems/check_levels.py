"""A check before training: do the levels of a composition fit together?"""

from __future__ import annotations

import torch
from torch import Tensor

from fedminimax.types import Batch, Point, Problem


def check_levels(problem: Problem, point: Point, batch: Batch) -> tuple[int, ...]:
    """The lengths of x and of the inner values, computed on rows of one client.

    Raises a ValueError that names the level if a level cannot take what the level before it
    returns, if an inner level does not return a vector of the same type, or if the last one does
    not return a number. A level that accepts vectors of any length (by broadcasting, say) passes.

    Arguments:
        problem: the problem.
        point: x and y to begin with.
        batch: some rows.
    """
    name, value = type(problem).__name__, point.x
    lengths = [len(value)]
    for level in range(1, problem.depth + 1):
        last = level == problem.depth
        source = "x" if level == 1 else f"what level {level - 1} returns"
        try:
            with torch.no_grad():
                result = (
                    problem.outer(value, point.y, batch)
                    if last
                    else problem.inner(level, value, batch)
                )
        except Exception as error:
            advice = ". Give levels of which each takes what the one before it returns"
            raise ValueError(
                f"level {level} of {name} (of {problem.depth}) cannot be applied to {source}, a "
                f"vector of length {len(value)}: {error}{advice if _of_shapes(error) else ''}"
            ) from error
        where = f"level {level} of {name} (of {problem.depth})"
        _check_shape(result, last, where)
        if not last and result.dtype != value.dtype:
            raise ValueError(
                f"{where} takes {value.dtype} and returns {result.dtype}; return what it takes: "
                "make constants with value.new_tensor(...), or end with .to(value.dtype)"
            )
        if not last:
            value = result
            lengths.append(len(value))
    return tuple(lengths)


def _of_shapes(error: Exception) -> bool:
    """Is it torch's error for tensors whose shapes do not fit?"""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("size" in text or "shape" in text)


def _check_shape(result: object, last: bool, where: str) -> None:
    if not isinstance(result, Tensor):
        raise ValueError(f"{where} returns a {type(result).__name__}; return a tensor")
    if last and result.dim() != 0:
        raise ValueError(
            f"{where} returns a tensor of shape {tuple(result.shape)}; the last level returns a "
            "number: sum it, or average it with batch.mean"
        )
    if not last and result.dim() != 1:
        raise ValueError(
            f"{where} returns a tensor of shape {tuple(result.shape)}; an inner level returns a "
            "vector (use .flatten(), or .reshape(1) for a number)"
        )
