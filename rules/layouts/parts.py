"""Reductions and norms in parts: what they are where a dimension that they need whole is sharded.

    var(x, dims)                m = sum(x) / n;  sum((x - m)^2) / (n - correction)
    linalg_vector_norm(x, p)    sum(|x|^p)^(1/p)
    logsumexp(x, dims)          m = amax(detach(x));  log(sum(exp(x - m))) + m
    softmax(x, dim)             e = exp(x - amax(detach(x)));  e / sum(e)
    batch_norm(x)               (x - mean) / sqrt(var + eps), over all entries of a channel

A sum over a sharded dimension is Partial, so of every rank they need one number a row, or two, where the operand would
be gathered. Variances are those of differences from the mean: no digits are lost where the mean is large. Half
precision is summed in float32, as torch does it. Where a norm or deviation is 0, its gradient is 0, as torch's.

Statistics of a batch norm in training are those of the whole batch, and running ones follow these, as on one device.
Each function gets the arguments of a call by name. Sizes are global ones. Numerics: reassociates.
Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983), for two passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Args: TypeAlias = Mapping[str, Any]


def _wide(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _dims(args: Args) -> list[int]:
    given, rank = args.get("dim"), args["self"].dim()
    dims = [given] if isinstance(given, int) else list(given or ())
    return [dim % rank for dim in dims] or list(range(rank))


def _count(x: Tensor, dims: Sequence[int]) -> Any:
    return math.prod(x.shape[dim] for dim in dims)


def _kept(x: Tensor, args: Args) -> Tensor:
    """A reduced value, which has dimensions of size 1, as the call gives it."""
    if args.get("keepdim"):
        return x
    return x.reshape([size for dim, size in enumerate(x.shape) if dim not in _dims(args)])


def _root(total: Tensor, power: float = 2) -> Tensor:
    """The root, whose gradient is 0 where it is 0."""
    is_zero = total == 0
    total = total.masked_fill(is_zero, 1)
    return (total.sqrt() if power == 2 else total.pow(1 / power)).masked_fill(is_zero, 0)


def _moments(x: Tensor, dims: list[int], correction: float = 0) -> tuple[Tensor, Tensor]:
    """The mean and the variance, with dimensions of size 1."""
    count = _count(x, dims)
    mean = x.sum(dims, keepdim=True) / count
    squares = (x - mean).square().sum(dims, keepdim=True)
    if isinstance(count, int):
        return mean, squares / max(count - correction, 0)
    return mean, squares / (torch.sym_max(count - int(correction), 0) if correction else count)


def _statistics(args: Args, *, is_root: bool) -> Any:
    """The variance, or its root, and the mean.

    Not of complex numbers, nor less a fraction of a size that is a symbol.
    """
    given, dims = args["self"], _dims(args)
    correction = args.get("correction")
    correction = float(args.get("unbiased", True)) if correction is None else correction
    if given.is_complex() or not (isinstance(_count(given, dims), int) or correction == int(correction)):
        return NotImplemented
    mean, found = _moments(_wide(given), dims, correction)
    found = _root(found) if is_root else found  # before it is rounded: a variance may be too large for float16
    return _kept(found, args).to(given.dtype), _kept(mean, args).to(given.dtype)


def var_mean(args: Args) -> Any:
    return _statistics(args, is_root=False)


def std_mean(args: Args) -> Any:
    return _statistics(args, is_root=True)


def var(args: Args) -> Any:
    found = var_mean(args)
    return found if found is NotImplemented else found[0]


def std(args: Args) -> Any:
    found = std_mean(args)
    return found if found is NotImplemented else found[0]


def norm(args: Args) -> Any:
    """Of p >= 1, below which gradients at 0 are others."""
    given, dims, dtype = args["self"], _dims(args), args.get("dtype")
    power = args.get("ord", args.get("p"))
    power = 2 if power is None else power
    if not given.is_floating_point() or not (power >= 1 or power == -math.inf):
        return NotImplemented
    x, keepdim = _wide(given, dtype), bool(args.get("keepdim"))
    if math.isinf(power):
        found = (x.abs().amax if power > 0 else x.abs().amin)(dims, keepdim=keepdim)
    elif power == 1:
        found = x.abs().sum(dims, keepdim=keepdim)
    else:
        found = _root((x.square() if power == 2 else x.abs().pow(power)).sum(dims, keepdim=keepdim), power)
    return found.to(dtype or given.dtype)


def logsumexp(args: Args) -> Any:
    """A row of -inf gives -inf, and one with inf gives inf."""
    given, dims = args["self"], _dims(args)
    if not given.is_floating_point():
        return NotImplemented
    x = _wide(given)
    most = x.detach().amax(dims, keepdim=True)
    most = most.masked_fill(most.isinf(), 0)
    return _kept((x - most).exp().sum(dims, keepdim=True).log() + most, args).to(given.dtype)


def _exponentials(args: Args) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """x less its greatest entry, the exponentials of that, their sum, and the dtype of the result."""
    dtype = torch.float32 if args.get("half_to_float") else args.get("dtype")
    x, dims = _wide(args["self"], dtype), _dims(args)
    shifted = x - x.detach().amax(dims, keepdim=True)
    exponentials = shifted.exp()
    return shifted, exponentials, exponentials.sum(dims, keepdim=True), dtype or args["self"].dtype


def softmax(args: Args) -> Any:
    _, exponentials, total, dtype = _exponentials(args)
    return (exponentials / total).to(dtype)


def log_softmax(args: Args) -> Any:
    shifted, _, total, dtype = _exponentials(args)
    return (shifted - total.log()).to(dtype)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(dtype)


def _last(args: Args) -> list[int]:
    rank = args["input"].dim()
    return list(range(rank - len(args["normalized_shape"]), rank))


def _layer_norm(args: Args) -> tuple[Tensor, Tensor, Tensor]:
    x = _wide(args["input"])
    mean, variance = _moments(x, _last(args))
    rstd = (variance + args["eps"]).rsqrt()
    return _scaled((x - mean) * rstd, args["weight"], args["bias"], args["input"].dtype), mean, rstd


def layer_norm(args: Args) -> Any:
    return _layer_norm(args)[0]


def native_layer_norm(args: Args) -> Any:
    """Statistics have no gradient. Not of half precision, of which they have another dtype on each device."""
    if _wide(args["input"]) is not args["input"]:
        return NotImplemented
    normed, mean, rstd = _layer_norm(args)
    return normed, mean.detach(), rstd.detach()


def fused_rms_norm(args: Args) -> Any:
    given, eps = args["input"], args["eps"]
    if given.is_complex() or (eps is None and _wide(given) is not given):
        return NotImplemented
    x, dims = _wide(given), _last(args)
    eps = torch.finfo(given.dtype).eps if eps is None else eps
    rstd = (x.square().sum(dims, keepdim=True) / _count(x, dims) + eps).rsqrt()
    return _scaled(x * rstd, args["weight"], None, given.dtype), rstd


def rms_norm(args: Args) -> Any:
    found = fused_rms_norm(args)
    return found if found is NotImplemented else found[0]


def _of_channels(value: Any, rank: int) -> Any:
    """A value for each channel, which is the second of so many dimensions."""
    return None if value is None else value.reshape([1, value.shape[0], *[1] * (rank - 2)])


def _scales(args: Args) -> tuple[Any, Any]:
    rank = args["input"].dim()
    return _of_channels(args["weight"], rank), _of_channels(args["bias"], rank)


def group_norm(args: Args) -> Any:
    given, groups = args["input"], args["num_groups"]
    n, channels, *rest = given.shape
    x = _wide(given).reshape([n, groups, channels // groups, *rest])
    mean, variance = _moments(x, list(range(2, x.dim())))
    x = ((x - mean) * (variance + args["eps"]).rsqrt()).reshape(given.shape)
    return _scaled(x, *_scales(args), given.dtype)


def _by_channel(args: Args, dims: list[int], *, is_computed: bool) -> Tensor:
    """Normalized by statistics over these dimensions, which the running ones follow, or else by the running ones."""
    given, running = args["input"], (args["running_mean"], args["running_var"])
    x = _wide(given)
    if is_computed:
        mean, variance = _moments(x, dims)
        count = _count(x, dims)
        for kept, found in zip(running, (mean, variance * (count / (count - 1))), strict=True):
            if kept is not None:
                _follow(kept, found, args["momentum"])
    else:
        mean, variance = (_of_channels(value, given.dim()) for value in running)
    x = (x - mean) * (variance + args["eps"]).rsqrt()
    return _scaled(x, *_scales(args), given.dtype)


def _follow(running: Tensor, found: Tensor, momentum: float) -> None:
    """Moves a running statistic to what was found, [n or 1, channels, 1...], of which it takes the mean over n."""
    found = found.detach().reshape(found.shape[:2])
    found = found.sum([0]) / found.shape[0]
    running.copy_(running * (1 - momentum) + found.to(running.dtype) * momentum)


def instance_norm(args: Args) -> Any:
    return _by_channel(args, list(range(2, args["input"].dim())), is_computed=args["use_input_stats"])


def batch_norm(args: Args) -> Any:
    return _by_channel(args, [0, *range(2, args["input"].dim())], is_computed=args["training"])


REDUCED = {
    "aten::var": var,
    "aten::std": std,
    "aten::var_mean": var_mean,
    "aten::std_mean": std_mean,
    "aten::linalg_vector_norm": norm,
    "aten::norm": norm,
    "aten::logsumexp": logsumexp,
}
ALONG = {
    "aten::softmax": softmax,
    "aten::_softmax": softmax,
    "aten::log_softmax": log_softmax,
    "aten::_log_softmax": log_softmax,
}
NORMS = {
    "aten::layer_norm": layer_norm,
    "aten::native_layer_norm": native_layer_norm,
    "aten::rms_norm": rms_norm,
    "aten::_fused_rms_norm": fused_rms_norm,
}
GROUP_NORM, INSTANCE_NORM = {"aten::group_norm": group_norm}, {"aten::instance_norm": instance_norm}
BATCH_NORM = {"aten::batch_norm": batch_norm}
"""Functions by the key of the operator that they write in parts."""
