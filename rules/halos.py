"""Convolutions over a sharded dimension: a rank reads the few entries beside its chunk from its neighbours.

    conv1d(x, w, b, padding=3)[..., :S]     ->  padded_convolution1d(x, w, b, before=[3], after=[0])
    conv1d(pad(x, [3, 0]), w, b)            ->  the same
    conv2d(x, w, b, padding=1)              ->  padded_convolution2d(x, w, b, before=[1, 1], after=[1, 1])
    padded_convolution(chunk of x, ...)     ->  conv(halo(chunk of x, before, after), ...), with no padding there

So causal convolutions, which state space models and linear attention use before their scans, keep the sequence
sharded, and images are cut into strips. The first three are RAISE_CONVOLUTIONS, before placements are propagated; the
last is LOWER_CONVOLUTIONS, once they are known, after which no `padded_convolution` is left. What is not sharded there
becomes one convolution again.
Matches where a dimension keeps its length, or stride 2 halves it, S = stride * (length of the result), and windows are
no patches. Does not match, in these words: "windows follow each other"; "%conv1d gives 18 entries for 16 with stride
[1]".
Shapes: x [n, g ci, S...], w [g co, ci, k...] -> [n, g co, S / stride...]. Numerics: reassociates (other kernels).
Source: halo exchange, as for stencils; PyTorch, torch/distributed/tensor/_tp_conv.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from fxrewrite import Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.ops import bind, fake_value, key
from fxrewrite.spmd import (
    COLLECTIVE_CALLS,
    GLOBAL_SHAPE,
    LOCAL_SHAPES,
    PLACEMENT,
    Axis,
    Shard,
    SpmdContext,
    exchange_halo,
    global_shape,
    is_same_size,
    placement_of,
    size_hint,
    without_padding,
)
from rules.layouts.convolutions import CONVOLVE, PADDED, convolve

if TYPE_CHECKING:
    from fxrewrite.verify import Draw


@dataclass(frozen=True, slots=True)
class Windows:
    """A convolution: what its windows read, in each spatial dimension.

    Attributes:
        input: the value, without any padding.
        convolution: the call that has the weights.
        stride, dilation: of the windows.
        before, after: how many zeros the first and the last window read beyond the ends of the value; with `after` less
            than 0, so many entries at the end are cut off, since windows that are none of these would read them.
        gaps: whether windows leave entries between them unread.
        keeps: whether ranks' chunks of the dimension give chunks of the result: it has 1 / stride of the entries.
    """

    input: fx.Node
    convolution: fx.Node
    stride: list[int]
    dilation: list[int]
    before: list[int]
    after: list[int]
    gaps: list[bool]
    keeps: list[bool]

    @property
    def are_apart(self) -> bool:
        """Whether windows of the dimensions that are kept follow each other, as patches do."""
        dims = zip(self.keeps, self.before, self.after, self.gaps, strict=True)
        return not any(keeps and (before or after or gaps) for keeps, before, after, gaps in dims)


def read_windows(root: fx.Node) -> Windows | str:
    """Returns the windows of a convolution, or of a slice of the last dimension of one; or why they have no halo."""
    found = _without_cut(root)
    if isinstance(found, str):
        return found
    node, cut = found
    given = bind(node)
    num_spatial = _KEYS[key(node)]
    kernel = fake_value(given["weight"]).shape[2:]
    stride, dilation = (_each(given[name], num_spatial) for name in ("stride", "dilation"))
    if not all(isinstance(size, int) for size in kernel):
        return "the size of its kernel is not known"
    reach = [by * (size - 1) + 1 for by, size in zip(dilation, kernel, strict=True)]
    value, zeros = _unpadded(given["input"], num_spatial)
    before, after = (
        [a + b for a, b in zip(ends, more, strict=True)]
        for ends, more in zip(_padding(given["padding"], reach, num_spatial), zeros, strict=True)
    )
    if cut and (stride[-1] != 1 or cut > before[-1]):
        return "the slice cuts off more than windows that begin before the first entry"
    before[-1] -= cut
    sizes, made = fake_value(value).shape[-num_spatial:], fake_value(root).shape[-num_spatial:]
    keeps = [is_same_size(n * by, size) for n, by, size in zip(made, stride, sizes, strict=True)]
    if node is not root and not keeps[-1]:
        return f"the slice gives {size_hint(made[-1])} entries for {size_hint(sizes[-1])}"
    # Where chunks give chunks, the last window of a chunk begins `stride + before` entries before the end of it.
    reads = zip(keeps, after, reach, stride, before, strict=True)
    after = [_read_after(length - by - first, by) if kept else stated for kept, stated, length, by, first in reads]
    gaps = [length < by for length, by in zip(reach, stride, strict=True)]
    windows = Windows(value, node, stride, dilation, before, after, gaps, keeps)
    if not windows.are_apart:
        return windows
    if all(keeps):
        return "windows follow each other"
    numbers = (f"{size_hint(n)} entries for {size_hint(size)}" for n, size in zip(made, sizes, strict=True))
    return f"%{node.name} gives {', '.join(numbers)} with stride {stride}"


def _read_after(beyond: int, stride: int) -> int:
    """What the last window of a chunk reads after it, which ends so far beyond; less than 0 where another would fit."""
    return beyond if beyond <= -stride else max(beyond, 0)


def _without_cut(root: fx.Node) -> tuple[fx.Node, int] | str:
    """Returns the convolution that `root` is, or of whose last dimension it is a slice, and the slice's first entry."""
    if key(root) in _KEYS:
        return root, 0
    given, node = bind(root), root.all_input_nodes[0]
    if key(node) not in _KEYS or len(node.users) > 1 or given["step"] != 1:
        return "it is not a slice of a convolution that nothing else reads"
    start, last = given["start"] or 0, fake_value(root).dim() - 1
    if given["dim"] % (last + 1) != last or not isinstance(start, int) or start < 0:
        return "it is not a slice of the last dimension from a known entry on"
    return node, start


_KEYS = {f"aten::conv{num_spatial}d": num_spatial for num_spatial in CONVOLVE}


def _each(stated: Any, num_spatial: int) -> list[int]:
    values = list(stated) if isinstance(stated, (list, tuple)) else [stated]
    return values if len(values) == num_spatial else values * num_spatial


def _padding(stated: Any, reach: Sequence[int], num_spatial: int) -> tuple[list[int], list[int]]:
    """Returns how many zeros come before and after each dimension."""
    if stated == "same":
        return [(length - 1) // 2 for length in reach], [length // 2 for length in reach]
    padding = _each(0 if stated == "valid" else stated, num_spatial)
    return padding, padding


def _unpadded(value: fx.Node, num_spatial: int) -> tuple[fx.Node, tuple[list[int], list[int]]]:
    """Returns the value at whose ends zeros were put, and how many before and after each dimension."""
    none = [0] * num_spatial
    if key(value) not in ("aten::pad", "aten::constant_pad_nd"):
        return value, (none, none)
    given = bind(value)
    amounts = list(given["pad"])
    is_zero = given.get("mode", "constant") == "constant" and (given.get("value") or 0) == 0
    if not is_zero or not all(isinstance(n, int) and n >= 0 for n in amounts) or any(amounts[2 * num_spatial :]):
        return value, (none, none)
    amounts += [0] * (2 * num_spatial - len(amounts))
    before, after = (amounts[at : 2 * num_spatial : 2][::-1] for at in (0, 1))
    return given["self"], (before, after)


@where.predicate("root", text="has_a_halo")
def _has_a_halo(root: fx.Node) -> bool | str:
    found = read_windows(root)
    if isinstance(found, str):
        return found
    users = list(root.users)
    if key(root) in _KEYS and len(users) == 1 and key(users[0]) == "aten::slice":
        return isinstance(read_windows(users[0]), str) or "a slice of it has one"
    return True


_OPTIONS = ("stride", "padding", "dilation", "groups")


def _raise(name: str, root: Any) -> Rule:
    made = Rule(f"halos.{name}", Pattern((root,), (_has_a_halo,)), numerics="reassociates")

    @made.replacement
    def _(match: Match) -> Any:
        """padded_convolution(x, w, b, stride, before, after, dilation, groups)"""
        found = read_windows(match.root)
        assert isinstance(found, Windows), "the guard has looked"
        given = bind(found.convolution)
        operands = (match.proxy(x) if x is not None else None for x in (found.input, given["weight"], given["bias"]))
        how = (found.stride, found.before, found.after, found.dilation, given["groups"])
        return match.call(PADDED[len(found.stride)], *operands, *how)

    return made


def _convolution(name: str) -> Any:
    return op(name, cap("input"), cap("weight"), *(cap(option, "any") for option in ("bias", *_OPTIONS)))


raise_causal = _raise(
    "raise_causal", op("slice", _convolution("conv1d"), *(cap(name, "any") for name in ("dim", "start", "end")))
)


@raise_causal.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples slices that keep the length: of windows that end at an entry, begin there, or are around it."""
    groups, length, dilation, size = draw.integer(1, 2), draw.integer(1, 8), draw.integer(1, 2), draw.integer(2, 4)
    padding = dilation * (size - 1) + draw.choice(0, 0, 1)
    start = draw.choice(0, 0, padding, padding // 2)
    return {
        "input": draw.tensor(*draw.shape(draw.integer(0, 1)), 2 * groups, length),
        "weight": draw.tensor(3 * groups, 2, size),
        "bias": draw.choice(None, draw.tensor(3 * groups)),
        "stride": [1],
        "padding": [padding],
        "dilation": [dilation],
        "groups": groups,
        "dim": draw.choice(-1, -1),
        "start": start,
        "end": start + length,
    }


RAISE_CONVOLUTIONS = RuleSet(
    "raise_convolutions",
    raise_causal,
    *(_raise(f"raise_conv{num_spatial}d", _convolution(f"conv{num_spatial}d")) for num_spatial in CONVOLVE),
)


def _lower(num_spatial: int) -> Rule:
    names = ("stride", "before", "after", "dilation", "groups")
    operands = (cap("input"), cap("weight"), cap("bias", "any"), *(cap(name, "any") for name in names))
    made = Rule(
        f"halos.lower_conv{num_spatial}d",
        Pattern((op(PADDED[num_spatial], *operands),)),
        numerics="reassociates",
    )

    @made.replacement
    def _(match: Match, input: Any, weight: Any, bias: Any, stride: Any, dilation: Any, groups: Any) -> Any:  # noqa: A002
        """conv(halo(x), w, b, stride, dilation=dilation, groups=groups)"""
        before, after = list(match["before"]), list(match["after"])
        placement = placement_of(match.root)
        dim = placement.dim - fake_value(match.root).dim() if isinstance(placement, Shard) else 0
        x = input
        if -num_spatial <= dim < 0 and (before[dim] or after[dim]):
            axis = SpmdContext.required(match.context, made.id).axis
            x = _with_halo(match, x, dim, before[dim], max(after[dim], 0), axis)
            before[dim], after[dim] = 0, min(after[dim], 0)
        found = convolve(num_spatial, x, weight, bias, stride, before, after, dilation, groups)
        match.edit.set_meta(found.node, "val", match.root.meta["val"])
        match.edit.set_fact(found.node, GLOBAL_SHAPE, tuple(global_shape(match.root)))
        return found

    return made


def _with_halo(match: Match, x: fx.Proxy, dim: int, before: int, after: int, axis: Axis) -> fx.Proxy:
    """Returns the rank's chunk of `x` with the entries beside it; windows before the last rank's padding read zeros."""
    placement = placement_of(match["input"])
    assert isinstance(placement, Shard), "the result is in the chunks of the input"
    if placement.uneven and after:
        x = match.call(without_padding, x, placement, axis, 0.0)
        match.edit.set_fact(x.node, PLACEMENT, placement)
        match.edit.set_fact(x.node, GLOBAL_SHAPE, tuple(global_shape(match["input"])))
    return exchange_halo(match, x, x.node.meta["val"].dim() + dim, before, after, axis)


def _none_is_left(nodes: Sequence[fx.Node]) -> str:
    left = [node for node in nodes if node.target in PADDED.values()]
    return f"{len(left)} padded convolutions are left, the first is %{left[0].name}" if left else ""


LOWER_CONVOLUTIONS = RuleSet(
    "lower_convolutions",
    *map(_lower, PADDED),
    invariant=_none_is_left,
    needs=(LOCAL_SHAPES,),
    precedes=(COLLECTIVE_CALLS,),
)
