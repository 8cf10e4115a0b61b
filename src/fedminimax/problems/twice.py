"""Layers whose derivative is differentiated again, in fewer passes than torch needs.

torch also computes the derivative in the images, which nobody needs; adds zeros, which loses the
channels-last format and slows down everything after it; and takes many passes for batch
normalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedminimax.blocks.vectors import is_transformed

aten = torch.ops.aten


class DifferentiatedTwice(TorchFunctionMode):
    """Computes convolution, max-pooling and batch normalisation by the functions below, in passes
    whose derivative will be differentiated again. torch's own functions are used for other forms of
    these layers, other devices, inside vmap and the like, and under mixed precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own, kwargs, found = _OWN.get(func), kwargs or {}, None
        if own and args and args[0].device.type == "cpu" and not is_transformed():
            found = None if torch.is_autocast_enabled("cpu") else own(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _as_list(numbers: Any) -> Any:
    return numbers if isinstance(numbers, list | tuple) else [numbers]


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if x.dim() != 4 or isinstance(padding, str):
        return None
    way = (*map(_as_list, (stride, padding, dilation)), False, [0], groups)
    return _Convolved.apply(x, weight, bias, way)


class _Convolved(torch.autograd.Function):
    """Convolution; `way` is stride, padding, dilation, transposed, output padding, groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Any, way: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biases, ctx.way = None if bias is None else [len(bias)], way
        return aten.convolution(x, weight, bias, *way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slopes: Any = _ConvolvedSlopes.apply(*grads, *ctx.saved_tensors, ctx.biases, ctx.way)
        return *slopes, None


class _ConvolvedSlopes(torch.autograd.Function):
    """The gradients of a convolution in x, weight and bias, as a function of the gradient g in its
    values, of x and of the weight.

    Times (a, c, d) they are < g, conv(a, weight) + conv(x, c) + d >: linear in g, in x and in the
    weight.
    """

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, biases: Any, way: Any) -> Any:
        ctx.save_for_backward(g, x, weight)
        ctx.way = way
        wanted = [ctx.needs_input_grad[1], True, biases is not None]
        return aten.convolution_backward(g, x, weight, biases, *way, wanted)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g, x, weight), (a, c, d) = ctx.saved_tensors, grads
        in_g = aten.convolution(x, c, d, *ctx.way)
        if a is None:  # x is data
            return in_g, None, None, None, None
        in_g = in_g + aten.convolution(a, weight, None, *ctx.way)
        slopes = aten.convolution_backward(g, a, c, None, *ctx.way, [True, True, False])
        return in_g, *slopes[:2], None, None


def _pool(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if x.dim() != 4 or return_indices:
        return None
    stride = [] if stride is None else stride
    way = map(_as_list, (kernel_size, stride, padding, dilation))
    return _Pooled.apply(x, (*way, ceil_mode))


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: tuple[Any, ...]) -> Tensor:
        values, places = aten.max_pool2d_with_indices(x, *way)
        ctx.save_for_backward(x, places)
        ctx.way = way
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _PooledSlopes.apply(*grads, *ctx.saved_tensors, ctx.way), None


class _PooledSlopes(torch.autograd.Function):
    """The gradient goes to the chosen positions; they are constant where a derivative exists."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, places: Tensor, way: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(places)
        return aten.max_pool2d_with_indices_backward(g, x, *way, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,), (a,), size = ctx.saved_tensors, grads, ctx.saved_tensors[0].shape[2:]
        if not a.is_contiguous(memory_format=torch.channels_last):
            chosen = a.flatten(2).gather(2, places.flatten(2)).unflatten(2, size)
        else:
            a, places = (v.movedim(1, -1).flatten(1, 2) for v in (a, places))
            chosen = a.gather(1, places).unflatten(1, size).movedim(-1, 1)
        return chosen, None, None, None


def _normalise(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not training or running_mean is not None or weight is None or bias is None:
        return None
    if x.numel() <= x.shape[1] or not len(weight) == len(bias) == x.shape[1]:
        return None  # torch refuses it
    return _Normalised.apply(x, weight, bias, eps)


class _Normalised(torch.autograd.Function):
    """Values and gradients are torch's own; the derivative of the gradients is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        values, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.eps = eps
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slopes: Any = _NormalisedSlopes.apply(*grads, *ctx.saved_tensors, ctx.eps)
        return *slopes, None


class _NormalisedSlopes(torch.autograd.Function):
    """The gradients of batch normalisation in x, weight and bias, as a function of the gradient g
    in its values, of x and of the weight.

    With z = (x - mean) * scale, means over the batch < >, and s = weight * scale, they are

        s (g - <g> - z <g z>),    n <g z>,    n <g>.

    Times (a, c, d), these are n s S + c n <g z> + d n <g>, where S = <a g> - <a> <g> - <a z> <g z>,
    and its derivatives in g, x and the weight are what `backward` returns. torch takes some thirty
    passes over x for them.
    """

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(g, x, weight, mean, scale)
        return aten.native_batch_norm_backward(
            g, x, weight, None, None, mean, scale, True, eps, [True, True, True]
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph: mean and scale would depend on x
            raise RuntimeError(
                "a third derivative of batch normalisation is not available by autograd: "
                "use torch.func, or group normalisation"
            )
        g, x, weight, mean, scale = ctx.saved_tensors
        shape, (c, d) = x.movedim(1, -1).shape, grads[1:]
        a, g, x = (v.movedim(1, -1).reshape(-1, shape[-1]) for v in (grads[0], g, x))
        each = x.new_full((len(x),), 1 / len(x))
        s, z = weight * scale, (x - mean).mul_(scale)
        a = a - each @ a  # the gradient in x sums to 0, so a constant changes nothing
        product = a * z  # its memory is used again below
        mean_g, mean_az = each @ g, each @ product
        mean_gz = each @ torch.mul(g, z, out=product)
        rest = each @ torch.mul(a, g, out=product) - mean_az * mean_gz  # S
        in_z = c - s * mean_az
        in_g = torch.addcmul(d, a, s, out=product).addcmul_(z, in_z)
        # z depends on x directly, by its mean and by its scale; s by its scale.
        mean_uz = (in_z - s * mean_az) * mean_gz
        in_x = torch.addcmul(-scale * in_z * mean_g, a, -scale * s * mean_gz, out=a)
        in_x.addcmul_(g, scale * in_z).addcmul_(z, -scale * (mean_uz + s * rest))
        in_g, in_x = (v.view(shape).movedim(-1, 1) for v in (in_g, in_x))
        return in_g, in_x, len(x) * scale * rest, None, None, None


_OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.conv2d: _convolve,
    F.max_pool2d: _pool,
    F.batch_norm: _normalise,
}
