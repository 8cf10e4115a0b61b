"""Machine code of a graph of operations, through torch's compiler."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fedminimax.engine.device import threads
from fedminimax.engine.executors.compiled.chained import RELEASED, RELEASED_IF_HELD, address
from fedminimax.engine.executors.compiled.rewrites import (
    PRODUCTS,
    SMALL,
    in_parts,
    insert,
    once,
    operation,
    sum_early,
    tensors,
)

Call = Callable[[list[Tensor]], list[Tensor]]
_LOCK = Lock()
_ATEN = torch.ops.aten
LOOKING_UP = {_ATEN.gather, _ATEN.embedding, _ATEN.take, _ATEN.scatter, _ATEN.scatter_add}
LOOKING_UP |= {_ATEN.index_put, _ATEN.index_add, _ATEN.index_copy}
LOOKING_UP |= {_ATEN.nll_loss_forward, _ATEN.nll_loss2d_forward}


def inductor(module: fx.GraphModule, given: list[Tensor]) -> Code:
    """C++ for inputs like the given ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on its own use of what it has deprecated
        lowered = rewritten(module, given)
        # Code that fails on several threads ends the process.
        with threads(1 if _looks_up(module.graph) else torch.get_num_threads()):
            # In private parts of torch, which other versions may not have.
            with suppress(Exception):
                if _is_small(lowered.graph):
                    return _compiled_small(copy.deepcopy(lowered), given)
            with suppress(Exception):
                return _compile(copy.deepcopy(lowered), given)
            return Code(_make(lowered, given), None)


def rewritten(module: fx.GraphModule, given: list[Tensor]) -> fx.GraphModule:
    """The same in the operations that the compiler knows, as it is given to it."""
    # Late: a second that only those pay who compile.
    from torch._inductor import lowering  # noqa: F401, because decompositions count on it
    from torch._inductor.decomposition import select_decomp_table

    # What the problem holds is real, beside inputs of which only the shape counts.
    lower = make_fx(module, select_decomp_table(), "fake", _allow_non_fake_inputs=True)
    lowered = lower(*given)
    for rewrite in (in_parts, once, sum_early):
        rewrite(lowered.graph)
    return lowered


def _make(lowered: fx.GraphModule, given: list[Tensor], **settings: bool) -> Call:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    lowered.recompile()
    # Both: the setting alone leaves what calls the machine code in Python.
    with config.patch({"cpp_wrapper": True, **settings}):
        # Unchecked: torch has no public name for it.
        return compile_fx_inner(lowered, given, cpp_wrapper=True)  # type: ignore[return-value]


def _compile(lowered: fx.GraphModule, given: list[Tensor], on_stack: bool = False) -> Code:
    settings = {"aot_inductor.allow_stack_allocation": True} if on_stack else {}
    with _wrap(on_stack):
        call = _make(lowered, given, **settings)
    return Code(call, address(call, len(given)), on_stack)


class Code(NamedTuple):
    """Machine code."""

    call: Call
    address: int | None  # where chained.py can call it, if it can
    lends: bool = False  # does it write what it returns where its last call in this thread did?

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.call(tensors)


def _looks_up(graph: fx.Graph) -> bool:
    """Is anything looked up by other numbers than the inputs have, which may be out of range?"""
    for node in graph.nodes:
        kind, numbers = operation(node), []
        if kind is _ATEN.index_select:
            numbers = [node.args[2]]
        elif kind is _ATEN.index:
            numbers = list(node.args[1])
        elif kind in LOOKING_UP:
            return True
        if not all(map(_is_input, numbers)):
            return True
    return False


def _is_input(node: Any) -> bool:
    while (
        node is not None and node.op == "call_function" and getattr(node.target, "is_view", False)
    ):
        node = node.args[0]
    return node is None or node.op == "placeholder"


def _is_small(graph: fx.Graph) -> bool:
    found = tensors(graph)
    products = any(operation(node) in PRODUCTS for node in found)
    return not products and all(value.nbytes <= SMALL for value in found.values())


def _compiled_small(lowered: fx.GraphModule, given: list[Tensor]) -> Code:
    """Where all tensors are small, making them takes as long as their arithmetic: here they have
    their places on the stack. The compiler does that only where it has code of its own for every
    operation, which it has not for products of matrices."""
    graph = lowered.graph
    (end,) = (node for node in graph.nodes if node.op == "output")
    returned: list[fx.Node] = []
    # An input that is returned may be what the last call has lent, and be overwritten; and such
    # code ends with a signal if one piece of memory is returned twice.
    for node in end.args[0]:
        made = node.op == "call_function" and not getattr(node.target, "is_view", True)
        made = made and node not in returned
        returned.append(node if made else insert(graph, node, torch.ops.aten.clone.default, end))
    end.args = (returned,)
    return _compile(lowered, given, on_stack=True)


@contextmanager
def _wrap(on_stack: bool) -> Iterator[None]:
    """What stands around the compiler's own code: with tensors on the stack (the setting counts
    only for the first graph of a process), and such that threads without Python can call it."""
    from torch._inductor.codegen import common

    if on_stack:
        from torch._inductor.codegen.cpp_wrapper_cpu_array_ref import CppWrapperCpuArrayRef as Usual
    else:
        from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu as Usual

    class Wrapper(Usual):  # type: ignore[misc, valid-type]  a class found at run time
        @staticmethod
        def create(*given: Any, **named: Any) -> Any:
            return Wrapper()

        def write_wrapper_decl(self) -> None:
            super().write_wrapper_decl()
            lines = self.prefix._lines
            lines[:] = [
                line.replace(RELEASED, RELEASED_IF_HELD) if isinstance(line, str) else line
                for line in lines
            ]

    common.init_backend_registration()
    with _LOCK:
        before = common.device_codegens["cpu"]
        common.device_codegens["cpu"] = replace(before, cpp_wrapper_codegen=Wrapper)
        try:
            yield
        finally:
            common.device_codegens["cpu"] = before


@cache
def missing_compiler() -> str | None:
    """Why nothing can be compiled on this machine, or None."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return (
            "this machine has no C++ compiler, so rounds are not compiled and the run is slower: "
            "install g++ or clang"
        )
    return None
