"""Machine code called many times in a row without Python between the calls: of small graphs it
would take most of the time."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Torch's C interface to tensors, and the function that its compiler writes: it takes handles of the
# inputs, which it disposes of, and gives back handles of what it returns.
SOURCE = r"""
typedef void *Handle;

extern "C" long play(void (*code)(Handle *, Handle *), int (*open)(Handle, Handle *),
                     int (*close)(Handle), int (*data)(Handle, void **), void **tensors, long calls,
                     long inputs, long outputs, Handle *given, Handle *returned) {
    for (long call = 0; call < calls; call++, tensors += inputs) {
        for (long i = 0; i < inputs; i++)
            if (open(tensors + i, given + i)) {
                while (i--) close(given[i]);
                return -1;
            }
        try {
            code(given, returned);
        } catch (...) {
            return -1;
        }
        void *last;
        const bool good = !data(returned[outputs - 1], &last) && *static_cast<bool *>(last);
        for (long i = 0; i < outputs; i++) close(returned[i]);
        if (!good) return call;
    }
    return calls;
}
"""
ENTRY = "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"
INTERFACE = (
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
)
Player = tuple[Callable[..., int], *tuple[ctypes.c_void_p, ...]]


class Chained(NamedTuple):
    """Calls of one function that torch's compiler has written. It must write what it returns where
    its last call did, and the last tensor that it returns must be a flag."""

    code: ctypes.c_void_p
    player: Player

    def __call__(
        self,
        calls: int,
        inputs: Sequence[Tensor],
        changing: Mapping[int, Sequence[Tensor]],
        outputs: int,
    ) -> bool:
        """So many calls with these inputs, of which each call has its own in the changing places;
        says whether all have set the flag."""
        tensors = np.tile(_addresses(inputs), (calls, 1))
        for place, column in changing.items():
            tensors[:, place] = _addresses(column)
        room = np.empty(len(inputs), dtype=np.int64), np.empty(outputs, dtype=np.int64)
        whole, given, returned = (ctypes.c_void_p(v.ctypes.data) for v in (tensors, *room))
        sizes = map(ctypes.c_long, (calls, len(inputs), outputs))
        play, *interface = self.player
        return play(self.code, *interface, whole, *sizes, given, returned) == calls


def _addresses(tensors: Sequence[Tensor]) -> np.ndarray:
    """All that a tensor is to torch's C interface begins with such an address."""
    return np.array([tensor._cdata for tensor in tensors], dtype=np.int64)


def chained(compiled: Any) -> Chained | None:
    """The calls of a compiled graph; None where that cannot be done, because it needs private parts
    of torch, which other versions may lack."""
    with suppress(Exception):
        (entry,) = (cell.cell_contents for cell in compiled.current_callable.__closure__)
        library = ctypes.CDLL(entry.__self__.__file__)
        if (player := _player()) is not None:
            return Chained(_address(library, ENTRY), player)
    return None


@cache
def _player() -> Player | None:
    """The loop over calls, and the functions of torch that it needs."""
    with suppress(Exception):
        return _built()
    return None


def _built() -> Player:
    play = library(SOURCE, ("-O2",), ctypes.PyDLL).play  # the code lets other threads run by itself
    play.restype = ctypes.c_long
    torch_itself = ctypes.CDLL(torch._C.__file__)
    return play, *(_address(torch_itself, name) for name in INTERFACE)


def library(
    source: str, flags: Sequence[str], load: Callable[[str], ctypes.CDLL] = ctypes.CDLL
) -> ctypes.CDLL:
    """What a text in C++ defines, compiled and loaded."""
    from torch._inductor import cpp_builder

    with tempfile.TemporaryDirectory(prefix="fedminimax-") as folder:
        text, made = Path(folder) / "source.cpp", Path(folder) / "library.so"
        text.write_text(source)
        asked = (*flags, "-shared", "-fPIC", "-std=c++17", str(text), "-o", str(made))
        command = [cpp_builder.get_cpp_compiler(), *asked]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return load(str(made))


def _address(library: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p)
