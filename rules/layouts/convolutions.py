"""Convolutions: rows of the batch and groups of channels are independent, positions are not.

    n (g ci) !l..., (g co) ci !k..., +(g co)? -> n (g co) !o...      transposed: weight (g ci) co !k...

A depthwise convolution along the sequence, which state space models and linear attention use before their scans, has as
many groups as channels, so propagation moves the shards to the channels by all-to-all. A dense convolution has one
group: the shards move to the batch, or are gathered. Windows that do not overlap, such as patches or single positions,
are independent: l = (o k).
"""

from typing import Any

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, is_same_size
from rules.layouts.terms import index_map


def convolution(call: Call) -> IndexMap | None:
    """n (g ci) !l..., (g co) ci !k..., +(g co)? -> n (g co) !o...; l = (o !k) where windows do not overlap"""
    weight, groups = call.shape(1), call.args["groups"]
    return _convolution(call, ci=weight[1], co=weight[0] // groups, is_transposed=False)


def transposed_convolution(call: Call) -> IndexMap | None:
    """n (g ci) !l..., (g ci) co !k..., +(g co)? -> n (g co) !o...; o = (l !k) where windows do not overlap"""
    weight, groups = call.shape(1), call.args["groups"]
    return _convolution(call, ci=weight[0] // groups, co=weight[1], is_transposed=True)


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
    # A Partial result would contain the bias once per rank.
    summed = {"ci"} if call.args.get("bias") is None else set[str]()
    return index_map(call, operands, (*batch, channels[1], *after), whole=whole, summed=summed, sizes=sizes)


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


LAYOUTS = tuple(
    LayoutRule(
        f"layout.{name}{rank}d", (f"aten::{name}{rank}d",), rule, run_args=(("groups", -rank - 1),), neutral="zeros"
    )
    for name, rule in (("conv", convolution), ("conv_transpose", transposed_convolution))
    for rank in (1, 2, 3)
)
