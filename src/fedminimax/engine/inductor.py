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

from fedminimax.engine.chained import RELEASED, RELEASED_IF_HELD, address
from fedminimax.engine.rewrites import (
    PRODUCTS,
    SMALL,
    in_parts,
    inserted,
    once,
    operation,
    summed,
    tensors,
)

Call = Callable[[list[Tensor]], list[Tensor]]
_LOCK = Lock()


def inductor(module: fx.GraphModule, given: list[Tensor]) -> Code:
    """C++ for inputs like the given ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on its own use of what it has deprecated
        lowered = rewritten(module, given)
        if _is_small(lowered.graph):
            # In private parts of torch, which other versions may not have.
            with suppress(Exception):
                return _compiled_small(copy.deepcopy(lowered), given)
        return _compiled(lowered, given)


def rewritten(module: fx.GraphModule, given: list[Tensor]) -> fx.GraphModule:
    """The same in the operations that the compiler knows, as it is given to it."""
    # Late: a second that only those pay who compile.
    from torch._inductor import lowering  # noqa: F401, because decompositions count on it
    from torch._inductor.decomposition import select_decomp_table

    # What the problem holds is real, beside inputs of which only the shape counts.
    lower = make_fx(module, select_decomp_table(), "fake", _allow_non_fake_inputs=True)
    lowered = lower(*given)
    for rewrite in (in_parts, once, summed):
        rewrite(lowered.graph)
    return lowered


def _compiled(lowered: fx.GraphModule, given: list[Tensor], **settings: bool) -> Code:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    lowered.recompile()
    # Both: the setting alone leaves what calls the machine code in Python.
    with config.patch({"cpp_wrapper": True, **settings}), _wrapped(any(settings.values())):
        call = compile_fx_inner(lowered, given, cpp_wrapper=True)
    return Code(call, address(call, len(given)))  # type: ignore[arg-type]


class Code(NamedTuple):
    """Machine code."""

    call: Call
    address: int | None  # where engine/chained.py can call it, if it can
    lends: bool = False  # does it write what it returns where its last call in this thread did?

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.call(tensors)


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
        returned.append(node if made else inserted(graph, node, torch.ops.aten.clone.default, end))
    end.args = (returned,)
    settings = {"aot_inductor.allow_stack_allocation": True}
    return _compiled(lowered, given, **settings)._replace(lends=True)


@contextmanager
def _wrapped(on_stack: bool) -> Iterator[None]:
    """What stands around the compiler's own code: with tensors on the stack (the setting counts
    only for the first graph of a process), and such that threads without Python can call it."""
    from torch._inductor.codegen import common
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.cpp_wrapper_cpu_array_ref import CppWrapperCpuArrayRef

    class Wrapper(CppWrapperCpuArrayRef if on_stack else CppWrapperCpu):  # type: ignore[misc]
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
