"""Gradients of large networks in parts, one for each tensor of weights, as autograd returns them.

Concatenating the parts is a pass over the whole vector, which a step of a method can do without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

LARGE = 1 << 19  # numbers; concatenating shorter vectors takes negligible time
_SOLE = 2  # references to memory that only one tensor uses: that tensor's and the query's own
_PARTS = "fedminimax_parts"  # attribute of a leaf: its parts as leaves, once `split` was called


class Parted(Tensor):
    """A vector in parts. `blocks.vectors` works on the parts; any other operation concatenates them
    first.

    >>> vector = Parted([torch.ones(2), torch.zeros(1)])
    >>> vector + 1
    tensor([2., 2., 1.])
    """

    pieces: list[Tensor]  # vectors; empty once they have been concatenated
    sizes: list[int]
    together: Tensor | None

    @staticmethod
    def __new__(cls, pieces: Sequence[Tensor]) -> Parted:
        first, sizes = pieces[0], [piece.numel() for piece in pieces]
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  not public
            cls, (sum(sizes),), dtype=first.dtype, device=first.device
        )
        made.pieces, made.sizes, made.together = list(pieces), sizes, None
        return made

    def __init__(self, pieces: Sequence[Tensor]):
        """Nothing to do: torch makes tensors in __new__."""

    def join(self) -> Tensor:
        """The parts as one vector."""
        if self.together is None:
            self.together, self.pieces = torch.cat(self.pieces), []
        return self.together

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self.join())

    def tolist(self) -> Any:
        return self.join().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.join().numpy(force=force)

    # Unchecked: torch has no public name for it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return operation(*tree_map(join_parts, args), **tree_map(join_parts, kwargs or {}))


def join_parts(value: Any) -> Any:
    """A `Parted` vector as a plain one; anything else unchanged."""
    return value.join() if isinstance(value, Parted) else value


def copy_into(place: Tensor, vector: Tensor) -> None:
    """Copies a vector, in parts or not, into `place`."""
    if isinstance(vector, Parted) and vector.pieces:
        parts = place.split(vector.sizes)
        for part, piece in zip(parts, vector.pieces, strict=True):
            part.copy_(piece)
    else:
        place.copy_(join_parts(vector))


def leaf(vector: Tensor) -> Tensor:
    """The vector as a new tensor on the same memory that requires gradients. If it is large,
    `split` makes its parts leaves too."""
    if isinstance(vector, Parted) and vector.pieces:
        found = Parted(vector.pieces)
        setattr(found, _PARTS, [piece.detach().requires_grad_() for piece in vector.pieces])
        return found.requires_grad_()
    found = join_parts(vector).detach().requires_grad_()
    # On an accelerator one operation on the whole is faster than one for each part.
    if vector.numel() >= LARGE and vector.device.type == "cpu":
        setattr(found, _PARTS, [])
    return found


def split(vector: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """`vector.split(sizes)`; the parts of a large `leaf` are leaves themselves."""
    held: list[Tensor] | None = getattr(vector, _PARTS, None)
    if held is not None and not held:
        held += [part.requires_grad_() for part in vector.detach().split(sizes)]
    alike = held is not None and [part.numel() for part in held] == list(sizes)
    # Unchecked: `held` is a list then.
    return held if alike else vector.split(sizes)  # type: ignore[return-value]


def backward(value: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a number in leaves, in memory that nothing else uses."""
    if not value.requires_grad:  # it depends on none of them
        return tuple(torch.zeros_like(v) for v in leaves)
    parts: list[list[Tensor]] = [getattr(v, _PARTS, []) for v in leaves]
    torch.autograd.backward(value, inputs=[*leaves, *(part for held in parts for part in held)])
    return tuple(_gradient(v, held) for v, held in zip(leaves, parts, strict=True))


def _gradient(of: Tensor, parts: list[Tensor]) -> Tensor:
    if not parts:
        return _own(of)
    slope = Parted([_own(part) for part in parts])
    return slope if of.grad is None else slope.join() + of.grad


def _own(of: Tensor) -> Tensor:
    """The gradient of a leaf. It is copied if its memory is shared, or if torch cannot tell: the
    gradients of a sum of two leaves may share memory, and a user's function may keep its result."""
    found, of.grad = of.grad, None
    if found is None:
        return torch.zeros_like(of)
    count = getattr(torch._C, "_storage_Use_Count", None)
    sole = count is not None and count(found.untyped_storage()._cdata) <= _SOLE
    return found if sole else found.clone()
