"""Convolutions, pools and resampling: rows of the batch and groups of channels are independent, positions are not.

    n (g ci) !l..., (g co) ci !k..., +(g co)? -> n (g co) !o...      transposed: weight (g ci) co !k...
    n... !h !w -> n... i j                                           a pool: channels are independent, too

A convolution whose windows overlap needs its positions whole: shards move to groups of channels, to the batch, or are
gathered. `padded_convolution`, which `rules.halos` makes of most of them, keeps positions in chunks: a rank reads what
is beside its chunk. Windows that do not overlap, such as patches or single positions, are independent: l = (o k).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fxrewrite.ops import key
from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, declare_convolution, declare_virtual, is_same_size
from rules.layouts.terms import aten, index_map

CONVOLVE = {1: torch.ops.aten.conv1d.default, 2: torch.ops.aten.conv2d.default, 3: torch.ops.aten.conv3d.default}
"""Convolutions by how many spatial dimensions they have."""


def _padded(num_spatial: int) -> Callable[..., torch.Tensor]:
    def function(
        input: torch.Tensor,  # noqa: A002  # ATen's name for it
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        before: Sequence[int],
        after: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> torch.Tensor:
        return convolve(num_spatial, input, weight, bias, stride, before, after, dilation, groups)

    function.__name__ = function.__qualname__ = f"padded_convolution{num_spatial}d"
    return declare_virtual()(function)


def convolve(
    num_spatial: int,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    dilation: Sequence[int],
    groups: Any,
) -> Any:
    """Returns the convolution, of a padded `x` where the two ends of a dimension do not get as many zeros."""
    padding = [a if a == b else 0 for a, b in zip(before, after, strict=True)]
    apart = [(a - p, b - p) for a, b, p in zip(before, after, padding, strict=True)]
    if any(map(any, apart)):
        x = torch.ops.aten.constant_pad_nd(x, [count for ends in reversed(apart) for count in ends])
    return CONVOLVE[num_spatial](x, weight, bias, list(stride), padding, list(dilation), groups)


PADDED = {num_spatial: _padded(num_spatial) for num_spatial in CONVOLVE}
"""The operators, by how many spatial dimensions they have."""


for _function in PADDED.values():
    declare_convolution(key(_function))


def convolution(call: Call) -> IndexMap | None:
    """n (g ci) !l..., (g co) ci !k..., +(g co)? -> n (g co) !o...; l = (o !k) where windows do not overlap"""
    weight, groups = call.shape(1), call.args["groups"]
    return _convolution(call, ci=weight[1], co=weight[0] // groups, is_transposed=False)


def transposed_convolution(call: Call) -> IndexMap | None:
    """n (g ci) !l..., (g ci) co !k..., +(g co)? -> n (g co) !o...; o = (l !k) where windows do not overlap"""
    weight, groups = call.shape(1), call.args["groups"]
    return _convolution(call, ci=weight[0] // groups, co=weight[1], is_transposed=True)


def padded_convolution(call: Call) -> IndexMap | None:
    """n (g ci) (o !s)..., (g co) ci !k..., +(g co)? -> n (g co) o..."""
    value, weight, result = call.shape(0), call.shape(1), call.result_shapes()[0]
    num_spatial, groups = len(weight) - 2, call.args["groups"]
    batch = (("n",),) if len(value) > num_spatial + 1 else ()
    sizes: dict[str, Size] = {"g": groups, "ci": weight[1], "co": weight[0] // groups}
    read, made = [], []
    beside: dict[str, int] = {}
    for dim in range(num_spatial):
        by, size = call.args["stride"][dim], result[dim - num_spatial]
        keeps = is_same_size(size * by, value[dim - num_spatial])
        if keeps:
            beside[f"o{dim}"] = call.args["before"][dim] + max(call.args["after"][dim], 0)
        read.append((f"o{dim}", f"s{dim}")[: 1 + (by > 1)] if keeps else (f"l{dim}",))
        made.append((f"o{dim}",))
        sizes |= {f"o{dim}": size, f"s{dim}": by}
    operands = {
        "input": (*batch, ("g", "ci"), *read),
        "weight": (("g", "co"), ("ci",), *((f"k{dim}",) for dim in range(num_spatial))),
        "bias": (("g", "co"),),
    }
    whole = {f"{name}{dim}" for name in "ks" for dim in range(num_spatial)}
    added = (call.args.get("bias"),)
    found = index_map(
        call, operands, (*batch, ("g", "co"), *made), whole=whole, summed={"ci"}, added=added, sizes=sizes
    )
    return None if found is None else replace(found, beside=beside)


def _convolution(call: Call, *, ci: Size, co: Size, is_transposed: bool) -> IndexMap | None:
    value, weight, result = call.shape(0), call.shape(1), call.result_shapes()[0]
    num_spatial = len(weight) - 2
    batch = (("n",),) if len(value) > num_spatial + 1 else ()
    sizes: dict[str, Size] = {"g": call.args["groups"], "ci": ci, "co": co}
    fine, coarse = (result, value) if is_transposed else (value, result)
    windows, places = [], []
    for dim in range(num_spatial):
        at = dim - num_spatial
        apart = _are_apart(call, dim, num_spatial) and is_same_size(fine[at], coarse[at] * weight[at])
        windows.append((f"o{dim}", f"k{dim}") if apart else (f"l{dim}",))
        places.append((f"o{dim}",))
        sizes |= {f"l{dim}": fine[at], f"o{dim}": coarse[at], f"k{dim}": weight[at]}
    kernel = tuple((f"k{dim}",) for dim in range(num_spatial))
    before, after = (places, windows) if is_transposed else (windows, places)
    channels = ("g", "ci"), ("g", "co")
    operands = {
        "input": (*batch, channels[0], *before),
        "weight": (channels[0], ("co",), *kernel) if is_transposed else (channels[1], ("ci",), *kernel),
        "bias": (channels[1],),
    }
    whole = {f"k{dim}" for dim in range(num_spatial)}
    added = (call.args.get("bias"),)
    return index_map(
        call, operands, (*batch, channels[1], *after), whole=whole, summed={"ci"}, added=added, sizes=sizes
    )


def _are_apart(call: Call, dim: int, num_spatial: int) -> bool:
    """Whether windows along a spatial dimension follow each other without overlap, padding or gaps."""

    def stated(name: str, otherwise: int) -> Any:
        value = call.args.get(name, otherwise)
        values = value if isinstance(value, (list, tuple)) else [value]
        return values[dim] if len(values) == num_spatial else values[0]

    size = call.shape(1)[dim - num_spatial]
    padding = 0 if stated("padding", 0) == "valid" else stated("padding", 0)
    return (
        is_same_size(stated("stride", 1), size)
        and padding == stated("output_padding", 0) == 0
        and (is_same_size(size, 1) or stated("dilation", 1) == 1)
    )


_POOLS = {
    1: "avg_pool1d adaptive_avg_pool1d max_pool1d upsample_nearest1d upsample_linear1d",
    2: "avg_pool2d adaptive_avg_pool2d max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d "
    "_upsample_nearest_exact2d",
    3: "avg_pool3d adaptive_avg_pool3d max_pool3d upsample_nearest3d upsample_trilinear3d",
}
"""Operators whose entries are windows of positions, or resampled ones, by the number of dimensions."""
_POOLS_WITH_INDICES = {
    1: "max_pool1d_with_indices adaptive_max_pool1d",
    2: "max_pool2d_with_indices adaptive_max_pool2d",
    3: "max_pool3d_with_indices adaptive_max_pool3d",
}


_POSITIONS = {1: "!l", 2: "!h !w", 3: "!d !h !w"}
_WINDOWS = {1: "i", 2: "i j", 3: "i j k"}


def _pools(rank: int) -> tuple[LayoutRule, LayoutRule]:
    before, after = f"n... {_POSITIONS[rank]}", f"n... {_WINDOWS[rank]}"
    return (
        LayoutRule(f"layout.pool{rank}d", aten(_POOLS[rank]), f"{before} -> {after}"),
        LayoutRule(
            f"layout.pool_with_indices{rank}d", aten(_POOLS_WITH_INDICES[rank]), f"{before} -> {after}, {after}"
        ),
    )


LAYOUTS = (
    *(
        LayoutRule(
            f"layout.{name}{rank}d", (f"aten::{name}{rank}d",), rule, run_args=(("groups", -rank - 1),), neutral="zeros"
        )
        for name, rule in (("conv", convolution), ("conv_transpose", transposed_convolution))
        for rank in (1, 2, 3)
    ),
    *(
        LayoutRule(
            f"layout.padded_convolution{rank}d",
            (key(function),),
            padded_convolution,
            run_args=(("groups", -rank - 1),),
            neutral="zeros",
        )
        for rank, function in PADDED.items()
    ),
    *(rule for rank in (1, 2, 3) for rule in _pools(rank)),
    LayoutRule("layout.shuffle_pixels", aten("pixel_shuffle pixel_unshuffle"), "n... !c !h !w -> n... d i j"),
    LayoutRule("layout.shuffle_channels", aten("channel_shuffle"), "n !c p... -> n c p..."),
    LayoutRule("layout.sample_grid", aten("grid_sampler grid_sampler_2d"), "n c !h !w, n i j !x -> n c i j"),
)
