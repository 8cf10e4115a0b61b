"""Rounds of machine code without Python between them: of small graphs it would take most of the
time."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# The function that torch's compiler writes takes handles of its inputs, which it disposes of, and
# gives back handles of what it returns.
SOURCE = r"""
#include <cstring>

typedef void *Handle;

struct Interface {  // torch's
    int (*open)(Handle, Handle *);
    int (*close)(Handle);
    int (*data)(Handle, void **);
};

struct Column {  // an input of which each round has its own; sizes are in bytes
    char *place;
    const char *first;
    long size, step;
};

struct Output {
    long next;  // the input that it is in the next round, or -1
    char *copy;  // where it goes after the last round
    long size;
};

struct Loop {
    Interface torch;
    void (*code)(Handle *, Handle *);
    const Column *columns;
    const Output *outputs;  // the last one is a flag
    Handle *inputs, *given, *returned, *held;
    char *owned;  // the inputs whose handles were returned by a call
    long column_count, output_count, input_count, rounds;
};

static bool played(const Loop &loop, long round) {
    const Interface &torch = loop.torch;
    for (long i = 0; i < loop.column_count; i++) {
        const Column &column = loop.columns[i];
        std::memcpy(column.place, column.first + round * column.step, column.size);
    }
    for (long i = 0; i < loop.input_count; i++)
        if (torch.open(loop.inputs[i], loop.given + i)) {
            while (i--) torch.close(loop.given[i]);
            return false;
        }
    try {
        loop.code(loop.given, loop.returned);
    } catch (...) {
        return false;
    }
    bool good = true;
    for (long i = 0; i < loop.output_count; i++) {
        const Output &output = loop.outputs[i];
        const Handle returned = loop.returned[i];
        void *data = nullptr;
        good = !torch.data(returned, &data) && good;
        if (good && i == loop.output_count - 1) good = *static_cast<bool *>(data);
        if (good && output.copy && round == loop.rounds - 1)
            std::memcpy(output.copy, data, output.size);
        if (output.next < 0) {
            torch.close(returned);
            continue;
        }
        if (loop.owned[output.next]) torch.close(loop.inputs[output.next]);
        loop.inputs[output.next] = returned;
        loop.owned[output.next] = 1;
    }
    return good;
}

extern "C" long play(const Loop *loop) {
    // A tensor that only Python holds asks Python for leave whenever it is opened.
    const Interface &torch = loop->torch;
    const long count = loop->input_count;
    long round = 0, held = 0;
    while (held < count && !torch.open(loop->inputs[held], loop->held + held)) held++;
    if (held == count)
        while (round < loop->rounds && played(*loop, round)) round++;
    for (long i = 0; i < count; i++)
        if (loop->owned[i]) torch.close(loop->inputs[i]);
    while (held--) torch.close(loop->held[held]);
    return round;
}
"""
FLAGS = ("-O2", "-std=c++17")
ENTRY = "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_"
ENDS = "} // inductor_entry_impl"  # what follows it in the text is for Python
STEALS = "steal_from_raw_handles_to_raii_handles(input_handles, {})"  # of all its inputs
# Of code that may be called by threads that have not got Python.
RELEASED = "py::gil_scoped_release_simple release;"
RELEASED_IF_HELD = (
    "struct Release { PyThreadState *state = PyGILState_Check() ? PyEval_SaveThread() : nullptr; "
    "~Release() { if (state) PyEval_RestoreThread(state); } } release;"
)
INTERFACE = (
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
)


class _Loop(ctypes.Structure):
    _fields_ = [
        ("interface", ctypes.c_void_p * len(INTERFACE)),
        *((name, ctypes.c_void_p) for name in ("code", "columns", "outputs")),
        *((name, ctypes.c_void_p) for name in ("inputs", "given", "returned", "held", "owned")),
        *((f"{name}_count", ctypes.c_long) for name in ("column", "output", "input")),
        ("rounds", ctypes.c_long),
    ]


def play(
    code: int,
    rounds: int,
    inputs: Sequence[Tensor],
    columns: Mapping[int, Tensor],
    moving: Sequence[tuple[int, Tensor]],
) -> list[Tensor] | None:
    """So many rounds of the code at that address. In the places that have a column, a round has its
    own row of that. What is moving, places among the inputs (or -1) and tensors of the same form,
    is what a round returns for them in the next; behind it comes a flag. Returned is what the last
    round returns; None, if a round has not set its flag, or has failed."""
    player = _player()
    assert player is not None
    assert all(rows[0].is_contiguous() for rows in columns.values())
    own = {place: rows[0].clone() for place, rows in columns.items()}
    tensors = [own.get(place, tensor) for place, tensor in enumerate(inputs)]
    after = [torch.empty_like(like) for _, like in moving]
    described = [
        (own[place].data_ptr(), rows.data_ptr(), own[place].nbytes, rows.stride(0) * rows.itemsize)
        for place, rows in columns.items()
        if rows.stride(0)
    ]
    outputs = [(place, v.data_ptr(), v.nbytes) for (place, _), v in zip(moving, after, strict=True)]
    outputs.append((-1, 0, 0))
    # A tensor is to torch's C interface the address of where its own address is.
    cells = _numbers([tensor._cdata for tensor in tensors])
    handles = _numbers([cells.ctypes.data + cells.itemsize * i for i in range(len(cells))])
    tables = [_numbers(described), _numbers(outputs), handles]
    tables += [_numbers([0] * len(v)) for v in (tensors, outputs, tensors, tensors)]
    places = (table.ctypes.data for table in tables)
    counts = (len(described), len(outputs), len(tensors), rounds)
    interface = (ctypes.c_void_p * len(INTERFACE))(*player.interface)
    loop = _Loop(interface, code, *places, *counts)
    return after if player.play(ctypes.byref(loop)) == rounds else None


def _numbers(values: Sequence[Any]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def address(compiled: Any, inputs: int) -> int | None:
    """Where the machine code of a compiled graph with so many inputs is; None where it cannot be
    called from there, because that needs private parts of torch, which other versions may lack."""
    with suppress(Exception):
        (entry,) = (cell.cell_contents for cell in compiled.current_callable.__closure__)
        made = Path(entry.__self__.__file__)
        text = made.with_suffix(".cpp").read_text().partition(ENDS)[0]
        # To let go of Python without having it would end the process; and code that also asks for
        # what the graph holds would find nothing there.
        careful = RELEASED_IF_HELD in text and "gil_scoped_release" not in text
        if careful and STEALS.format(inputs) in text and _player() is not None:
            return _address(ctypes.CDLL(str(made)), ENTRY)
    return None


class Player(NamedTuple):
    """The loop over rounds, and the functions of torch that it needs."""

    play: Callable[..., int]
    interface: tuple[int, ...]


@cache
def _player() -> Player | None:
    with suppress(Exception):
        loop, torch_itself = library(SOURCE, FLAGS).play, ctypes.CDLL(torch._C.__file__)
        loop.restype, loop.argtypes = ctypes.c_long, [ctypes.c_void_p]
        return Player(loop, tuple(_address(torch_itself, name) for name in INTERFACE))
    return None


def library(source: str, flags: Iterable[str]) -> ctypes.CDLL:
    """What a text in C++ defines, compiled and loaded."""
    from torch._inductor import cpp_builder

    with tempfile.TemporaryDirectory(prefix="fedminimax-") as folder:
        text, made = Path(folder) / "source.cpp", Path(folder) / "library.so"
        text.write_text(source)
        asked = (*flags, "-shared", "-fPIC", str(text), "-o", str(made))
        command = [cpp_builder.get_cpp_compiler(), *asked]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(made))


def _address(library: ctypes.CDLL, name: str) -> int:
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found
