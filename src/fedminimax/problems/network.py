"""A torch module as a function of one weight vector.

Batch-norm statistics are a property of weights and data, not a variable: training uses the
statistics of the batch, and `Network.module` sets statistics that were estimated for its weights.
"""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes

from fedminimax.blocks.parted import split
from fedminimax.problems.norms import MeasuringNorm, RowNorm
from fedminimax.types import Batch, Problem

Parameters = dict[str, Tensor]  # by the names that they have in a module
Places = dict[str, list[tuple[dict[str, Any], str]]]  # dictionaries, and the keys in them
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_CHUNK = 256  # rows, at most, that are normalised together where moments are estimated
_SCORED = 512  # rows that are scored together: the fastest of 32 to 2,048 (bench);
_SCORED_NUMBERS = 1 << 21  # of large images fewer, with at most this many numbers in all


def weights_of(module: nn.Module) -> Tensor:
    """All parameters of a module as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


class Network:
    """A module as a function (vector, rows) -> outputs.

    Argument:
        module: any torch module; it is copied. Refused are frozen parameters, random layers such as
            dropout, and layers with running statistics other than BatchNorm.

    >>> network = Network(nn.Linear(3, 1))
    >>> network.length, network(torch.zeros(4), torch.ones(2, 3)).shape
    (4, torch.Size([2, 1]))
    """

    def __init__(self, module: nn.Module):
        for name, part in module.named_modules():
            if reason := _unusable(part):
                raise ValueError(f"the module's part {name!r} ({type(part).__name__}) {reason}")
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        if frozen:
            raise ValueError(
                f"the module's parameter {frozen[0]!r} is frozen (requires_grad = False), but all "
                "weights are trained here: unfreeze it, or compute its part of the features before"
            )
        self.precision: torch.dtype | None = None  # of the forward pass, if not that of the rows
        self._plain = copy.deepcopy(module)
        self._functional = pool_first(_swap_norms(copy.deepcopy(module)))
        self._norms = [
            name for name, part in self._functional.named_modules() if isinstance(part, RowNorm)
        ]
        parameters = dict(self._functional.named_parameters())
        self._names = tuple(parameters)
        self.shapes = list(p.shape for p in parameters.values())
        self._sizes = tuple(p.numel() for p in parameters.values())
        self.length = sum(self._sizes)
        if self.length == 0:
            raise ValueError("the module has no parameters: there is nothing to train")
        self.has_norms = bool(self._norms)
        self._local = threading.local()

    def start(self) -> Tensor:
        """The module's own weights as one vector."""
        return weights_of(self._functional)

    @property
    def text(self) -> str:
        """The module's architecture, and its precision if that is not the one of its vectors."""
        return repr(self._plain) + (f" in {self.precision}" if self.precision else "")

    def at(self, precision: torch.dtype | None) -> Network:
        """The same network, with forward passes in another precision."""
        network = Network(self._plain)
        network.precision = precision
        return network

    def parts(self, vector: Tensor) -> tuple[Parameters, Tensor]:
        """The weights that a vector begins with, by name, and what follows them."""
        # One operation, because the derivative of each one is a pass over the vector.
        *parts, rest = split(vector, (*self._sizes, vector.shape[0] - self.length))
        found = {n: p.view(s) for n, p, s in zip(self._names, parts, self.shapes, strict=True)}
        return found, rest

    def __call__(
        self, weights: Tensor | Parameters, rows: Tensor, batch: Batch | None = None
    ) -> Tensor:
        """The outputs, with batch normalisation by these rows.

        Arguments:
            weights: the vector, or its `parts`.
            rows: the inputs.
            batch: what the rows are of; it says which rows are padding.
        """
        if isinstance(weights, Tensor):
            weights = self.parts(weights)[0]
        first = weights[self._names[0]]
        tensors = weights | self._buffers(first.device)
        if batch is not None and batch.padding.shape[0]:
            tensors |= {f"{name}.row_weight": batch.weight for name in self._norms}
        rows = channels_last(rows)
        if self.precision is None:
            return self._call(tensors, rows)
        with torch.autocast(first.device.type, self.precision, cache_enabled=False):
            outputs = self._call(tensors, rows)
        return outputs.to(first.dtype)

    def moments(self, vector: Tensor, rows: Tensor) -> Tensor:
        """E[x] and E[x^2] of the inputs of each batch-norm layer on these rows, layer after layer.

        The inputs of layers after the first are normalised by the statistics of this client's rows,
        in chunks: an approximation of those under the statistics of all clients.
        """
        module = pool_first(_swap_norms(copy.deepcopy(self._plain), MeasuringNorm))
        module, weights = module.to(vector.device), self.parts(vector)[0]
        for chunk in rows.tensor_split(math.ceil(len(rows) / _CHUNK)):
            functional_call(module, weights, (channels_last(chunk),))
        norms: list[Any] = [module.get_submodule(name) for name in self._norms]
        return torch.cat([norm.moments.reshape(-1) for norm in norms])

    def module(self, vector: Tensor, moments: Tensor | None = None) -> nn.Module:
        """A copy of the user's module with these weights, in evaluation mode, with the given
        batch-norm moments."""
        module = copy.deepcopy(self._plain).to(vector).eval()
        with torch.no_grad():
            for name, value in self.parts(vector)[0].items():
                module.get_parameter(name).copy_(value)
            if moments is not None:
                norms: list[Any] = [module.get_submodule(name) for name in self._norms]
                parts = moments.split([2 * norm.num_features for norm in norms])
                for norm, part in zip(norms, parts, strict=True):
                    mean, square = part.reshape(2, -1)
                    norm.running_mean = mean.to(vector, copy=True)
                    norm.running_var = (square - mean * mean).clamp(min=0).to(vector)
        return module

    def outputs(self, vector: Tensor, rows: Tensor, moments: Tensor | None = None) -> Tensor:
        """The outputs in evaluation mode."""
        module = pool_first(self.module(vector, moments))
        size = max(32, min(_SCORED, _SCORED_NUMBERS * len(rows) // max(1, rows.numel())))
        with torch.no_grad():
            return torch.cat([module(channels_last(chunk)) for chunk in rows.split(size)])

    def __deepcopy__(self, memo: dict) -> Network:
        return self.at(self.precision)

    def _buffers(self, device: torch.device) -> dict[str, Tensor]:
        """The module's buffers, copied to a device other than the CPU."""
        if device.type == "cpu":
            return {}
        held = self._functional.named_buffers()
        return {name: value.to(device) for name, value in held if value.numel()}

    def _call(self, tensors: Parameters, rows: Tensor) -> Tensor:
        """The module's outputs with these tensors in place of its own."""
        if torch.compiler.is_compiling():
            return functional_call(self._functional, tensors, (rows,))
        # The same as functional_call, which searches for the places in each call.
        module, places = self._own_module()
        own = [(held, key, held[key]) for name in tensors for held, key in places[name]]
        try:
            for name, value in tensors.items():
                for held, key in places[name]:
                    held[key] = value
            return module(rows)
        finally:
            for held, key, value in own:
                held[key] = value

    def _own_module(self) -> tuple[nn.Module, Places]:
        """This thread's own copy of the module. It has no weights between calls, so that a forward
        pass that is repeated in the backward pass (torch.utils.checkpoint) fails instead of using
        wrong weights."""
        if not hasattr(self._local, "own"):
            with _disable_current_modes():  # the first call may be traced by a compiler
                module = copy.deepcopy(self._functional)
                places = _places(module)
                for name in self._names:
                    for held, key in places[name]:
                        held[key] = nn.Parameter(torch.empty_like(held[key], device="meta"))
            self._local.own = module, places
        return self._local.own


def in_precision(problem: Problem, precision: torch.dtype | None, dtype: torch.dtype) -> Problem:
    """The problem with networks that compute in `precision`; `dtype` is that of its vectors."""
    if precision is None or precision == dtype:
        return problem
    if precision != torch.bfloat16:
        raise ValueError(
            f"precision is {precision!r}; give torch.bfloat16 (float16 would need its losses "
            "scaled), or leave it out"
        )
    if dtype != torch.float32:
        raise ValueError(
            f"precision bfloat16 is for runs in float32, not {dtype}: vectors of that precision "
            "would only hide what the network has lost"
        )
    networks = {n: v.at(precision) for n, v in vars(problem).items() if isinstance(v, Network)}
    if not networks:
        raise ValueError(
            f"precision bfloat16 is that of a network, but {type(problem).__name__} has none: "
            "leave precision out"
        )
    changed = copy.copy(problem)
    vars(changed).update(networks)
    return changed


def _swap_norms(
    module: nn.Module,
    kind: type[RowNorm] = RowNorm,
    swapped: dict[nn.Module, RowNorm] | None = None,
) -> nn.Module:
    """The module with its batch-norm layers replaced; one that is used twice stays one."""
    swapped = {} if swapped is None else swapped
    if isinstance(module, _NORMS):
        return swapped.setdefault(module, kind(module))
    for name, child in module._modules.items():
        if child is not None:
            setattr(module, name, _swap_norms(child, kind, swapped))
    return module


def _places(module: nn.Module) -> Places:
    """Where the parts of a module hold each tensor, by its name: several places if it is shared."""
    # A tensor that is both a parameter and a buffer has the parameter's name.
    names = {id(v): n for n, v in (*module.named_buffers(), *module.named_parameters())}
    found: Places = {name: [] for name in names.values()}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for key, value in held.items():
                if value is not None:
                    found[names[id(value)]].append((held, key))
    return found


def pool_first(module: nn.Module) -> nn.Module:
    """The module with each ReLU that is followed by max-pooling moved behind it: the same numbers
    and derivatives, for a quarter of the work."""
    for part in module.modules():
        if isinstance(part, nn.Sequential):
            for i in range(len(part) - 1):
                if type(part[i]) is nn.ReLU and type(part[i + 1]) in _POOLS:
                    part[i], part[i + 1] = part[i + 1], part[i]
    return module


def channels_last(rows: Tensor) -> Tensor:
    """Images in the memory format in which torch pools and normalises several times faster on a
    CPU; under vmap, which has no memory formats, unchanged."""
    if rows.dim() != 4 or torch.compiler.is_compiling() or _inside_vmap(rows):
        return rows
    # Also for one channel, where `contiguous` would return the rows unchanged.
    return rows.clone(memory_format=torch.channels_last)


def _inside_vmap(rows: Tensor) -> bool:
    """Inside vmap?"""
    # Unchecked: torch has no public name for it.
    return torch._C._functorch.is_functorch_wrapped_tensor(rows)  # type: ignore[attr-defined]


def _unusable(part: nn.Module) -> str | None:
    """Why a part of a module cannot be trained here, or None."""
    dropout = getattr(part, "p", 0.0) if isinstance(part, nn.modules.dropout._DropoutNd) else 0.0
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
        dropout = part.dropout
    if dropout > 0 or isinstance(part, nn.RReLU):
        return (
            "draws its own random numbers, which would differ between executors and between the "
            "two points of one step: remove it, or set its dropout to 0"
        )
    norm = isinstance(part, nn.modules.batchnorm._NormBase) and not isinstance(part, _NORMS)
    if norm and part.track_running_stats:
        return (
            "keeps running statistics that no exchange would average: use BatchNorm, GroupNorm, "
            "or track_running_stats=False"
        )
    return None
