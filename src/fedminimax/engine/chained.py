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
#include <cstring>

typedef void *Handle;

struct Column {  // an input of which each call has its own
    char *place;
    const char *first;
    long size, step;  // bytes
};

extern "C" long play(void (*code)(Handle *, Handle *), int (*open)(Handle, Handle *),
                     int (*close)(Handle), int (*data)(Handle, void **), void **tensors,
                     long inputs, const Column *columns, long changing, long outputs,
                     Handle *given, Handle *returned, long calls) {
    for (long call = 0; call < calls; call++) {
        for (const Column *c = columns; c < columns + changing; c++)
            std::memcpy(c->place, c->first + call * c->step, c->size);
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
ENDS = "} // inductor_entry_impl"  # what follows it in the text is for Python
INTERFACE = (
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
)
Player = tuple[Callable[..., int], *tuple[ctypes.c_void_p, ...]]


class Chained(NamedTuple):
    """Calls of one function that torch's compiler has written. It must write what it returns where
    its last call did, the last tensor that it returns must be a flag, and it must leave Python
    alone: other threads have it meanwhile."""

    code: ctypes.c_void_p
    player: Player

    def __call__(
        self, calls: int, inputs: Sequence[Tensor], columns: Mapping[int, Tensor], outputs: int
    ) -> bool:
        """So many calls with these inputs. In the places that have a column, a call has its own row
        of that; says whether all have set the flag."""
        own = {place: column[0].clone() for place, column in columns.items()}
        tensors = [own.get(place, tensor) for place, tensor in enumerate(inputs)]
        # All that a tensor is to torch's C interface begins with such an address.
        held = _numbers([tensor._cdata for tensor in tensors])
        described = _numbers([_column(own[place], rows) for place, rows in columns.items()])
        room = _numbers([0] * len(inputs)), _numbers([0] * outputs)
        whole, changing, given, returned = map(_start, (held, described, *room))
        sizes = map(ctypes.c_long, (len(inputs), len(columns), outputs, calls))
        inside, moving, leaving, count = sizes
        play, *interface = self.player
        about = (whole, inside, changing, moving, leaving, given, returned, count)
        return play(self.code, *interface, *about) == calls


def _column(place: Tensor, rows: Tensor) -> tuple[int, int, int, int]:
    """As the loop has it; the rows may lie anywhere, each in one piece."""
    assert rows[0].is_contiguous()
    return place.data_ptr(), rows.data_ptr(), place.nbytes, rows.stride(0) * rows.element_size()


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def _start(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def chained(compiled: Any) -> Chained | None:
    """The calls of a compiled graph; None where that cannot be done, because it needs private parts
    of torch, which other versions may lack."""
    with suppress(Exception):
        (entry,) = (cell.cell_contents for cell in compiled.current_callable.__closure__)
        made = Path(entry.__self__.__file__)
        # Python must not be given up by code that is called without it.
        if "py::gil_" in made.with_suffix(".cpp").read_text().partition(ENDS)[0]:
            return None
        if (player := _player()) is not None:
            return Chained(_address(ctypes.CDLL(str(made)), ENTRY), player)
    return None


@cache
def _player() -> Player | None:
    """The loop over calls, and the functions of torch that it needs."""
    with suppress(Exception):
        return _built()
    return None


def _built() -> Player:
    play = library(SOURCE, ("-O2",)).play
    play.restype = ctypes.c_long
    torch_itself = ctypes.CDLL(torch._C.__file__)
    return play, *(_address(torch_itself, name) for name in INTERFACE)


def library(source: str, flags: Sequence[str]) -> ctypes.CDLL:
    """What a text in C++ defines, compiled and loaded."""
    from torch._inductor import cpp_builder

    with tempfile.TemporaryDirectory(prefix="fedminimax-") as folder:
        text, made = Path(folder) / "source.cpp", Path(folder) / "library.so"
        text.write_text(source)
        asked = (*flags, "-shared", "-fPIC", "-std=c++17", str(text), "-o", str(made))
        command = [cpp_builder.get_cpp_compiler(), *asked]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(made))


def _address(library: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p)
