"""Reads a mask of the graph as an expression of small values, each with rows or columns but not both.

    mask = (arange(S) <= arange(S)[:, None]) & padding[:, None, None]
      ->   bitwise_and(le(x0, x1), x2)  of  arange(S), arange(S)[:, None], padding[:, None, None]

A value with rows and columns is followed upwards through pointwise operators, through tril and triu, which compare
positions, and through views that broadcast, reorder or cut dimensions, to values that have at most one of the two. A
view of a value with both is applied to the values that it is computed from instead. So a rank computes its rows of a
mask from its rows of those values.
If a mask is not such an expression, the reader says why: an input or a parameter has rows and columns of its own, a
matrix product is between, a leaf needs a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from fxrewrite import Match
from fxrewrite.graph import ClosedValues, reached
from fxrewrite.ops import bind, fake_value, filled_with, has_trait, key, value
from fxrewrite.spmd import Size, is_same_size, size_proxy
from rules.masks.expressions import POINTWISE

aten = torch.ops.aten

POINTWISE_KEYS = {f"aten::{name}": name for name in POINTWISE}
_TRIANGLES = {"aten::tril": "gt", "aten::triu": "lt"}
"""How `columns - rows` compares with the diagonal where these operators write zeros."""
_LONGEST = 4096
"""Longest text of an expression, in characters. Real masks are shorter; the limit bounds the time of reading."""

Dims: TypeAlias = "tuple[int | None, ...]"
"""Dimension of the mask for each dimension of a value (-1: columns, -2: rows); None: size 1, absent in the mask."""


class UnreadableError(ValueError):
    """Says why a mask is not an expression of small values."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A cut of one dimension of the mask: its operator, and the arguments that follow the dimension."""

    dim: int
    target: Any
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class MaskPlace:
    """A graph value as part of the mask: where its dimensions are in the mask, and the cuts applied to it."""

    node: fx.Node
    dims: Dims
    cuts: tuple[_Cut, ...] = ()
    counted: int | None = None
    """If set, the place is not the value but 0, 1, 2, ... along this (negative) dimension of it."""

    @property
    def shape(self) -> Sequence[Size]:
        """Shape of the value, or of the counted range."""
        shape = fake_value(self.node).shape
        return shape if self.counted is None else (shape[self.counted],)

    def dim_of(self, dim: int) -> int | None:
        """Returns the value's own dimension for this dimension of the mask; None if it is missing or of size 1."""
        return next((i for i, d in enumerate(self.dims) if d == dim and not is_same_size(self.shape[i], 1)), None)

    @property
    def is_dense(self) -> bool:
        """Whether the value has both rows and columns of the mask."""
        return self.dim_of(-1) is not None and self.dim_of(-2) is not None


@dataclass(frozen=True, slots=True)
class ReadMask:
    """A mask as text for `rules.masks.expressions.parse_mask`, with the graph values that are its leaves."""

    text: str
    places: tuple[MaskPlace, ...] = field(repr=False)

    def leaves(self, match: Match) -> list[fx.Proxy]:
        """Adds the leaves to the graph, in a replacement."""

        def given(place: MaskPlace) -> fx.Proxy:
            if place.counted is None:
                return match.proxy(place.node)
            device = fake_value(place.node).device
            (size,) = place.shape
            return match.call(aten.arange.default, size_proxy(match, size), device=device, pin_memory=False)

        return [_laid_out(place, given(place), match.proxy, match.call) for place in self.places]

    def value(self, number: int, closed: ClosedValues) -> torch.Tensor:
        """Returns a leaf at the lengths of `closed`. Raises OpenValueError if it depends on more than sizes."""
        place = self.places[number]
        given = closed(place.node) if place.counted is None else torch.arange(closed.size(place.shape[0]))
        return _laid_out(place, given, closed, lambda target, *args: target(*args))

    def has(self, number: int, dim: int) -> bool:
        """Whether a leaf varies along rows (-2), or along columns (-1)."""
        return self.places[number].dim_of(dim) is not None


def is_dense(mask: fx.Node) -> bool:
    """Whether a mask has both rows and columns."""
    return place_of(mask).is_dense


def read_mask(mask: fx.Node) -> ReadMask | str:
    """Returns the mask as an expression, or says why it is not one."""
    reader = _Reader()
    try:
        text = reader.text(place_of(mask))
    except UnreadableError as error:
        return str(error)
    for place in reader.places:
        if place.counted is None and _needs_gradient(place.node):
            return f"%{place.node.name} needs a gradient"
    return ReadMask(text, tuple(reader.places))


def place_of(node: fx.Node) -> MaskPlace:
    """Returns a value as a mask of its own."""
    return MaskPlace(node, _from_behind(fake_value(node).dim()))


def _from_behind(rank: int) -> tuple[int, ...]:
    return tuple(range(-rank, 0))


class _Reader:
    """Reads one mask; `places` numbers its leaves in the order of the text."""

    def __init__(self) -> None:
        self.places: dict[MaskPlace, int] = {}
        self._texts: dict[MaskPlace, str] = {}

    def text(self, place: MaskPlace) -> str:
        """Returns the text of what is computed at a place."""
        if place.counted is not None or (not place.is_dense and not _is_number(place.node)):
            return f"x{self.places.setdefault(place, len(self.places))}"
        if place not in self._texts:
            self._texts[place] = self._dense(place)
        if len(self._texts[place]) > _LONGEST:
            raise UnreadableError("it is too long an expression")
        return self._texts[place]

    def _dense(self, place: MaskPlace) -> str:
        node, name = place.node, key(place.node)
        if has_trait(node, "cast"):
            return f"to({self._operand(place, node.args[0])}, {fake_value(node).dtype})"
        number = filled_with(node)
        if number is not None:
            return f"full({_literal(node, number)}, {fake_value(node).dtype})"
        if name in POINTWISE_KEYS and not node.kwargs:
            return f"{POINTWISE_KEYS[name]}({', '.join(self._operand(place, arg) for arg in node.args)})"
        # tril and triu are rewritten as a comparison of positions, which are leaves of their own.
        if name in _TRIANGLES:
            hidden, diagonal = _TRIANGLES[name], _literal(node, bind(node)["diagonal"])
            rows, columns = (self.text(MaskPlace(node, (place.dims[dim],), place.cuts, dim)) for dim in (-2, -1))
            kept = self.text(MaskPlace(node.all_input_nodes[0], place.dims, place.cuts))
            return f"masked_fill({kept}, {hidden}(sub({columns}, {rows}), {diagonal}), 0)"
        return self.text(looked_through(place))

    def _operand(self, place: MaskPlace, arg: Any) -> str:
        """Returns the text of an operand of a pointwise operator, which broadcasts from the last dimension."""
        if not isinstance(arg, fx.Node):
            return _literal(place.node, arg)
        found = value(arg)
        if not isinstance(found, torch.Tensor):
            raise UnreadableError(f"%{place.node.name} is computed from a number of the graph")
        return self.text(MaskPlace(arg, place.dims[len(place.dims) - found.dim() :], place.cuts))


def _is_number(node: fx.Node) -> bool:
    """Whether a value without dimensions is filled with a number that the graph states."""
    return has_trait(node, "zeros", "ones", "full") and fake_value(node).dim() == 0


def _literal(node: fx.Node, number: Any) -> str:
    is_number = isinstance(number, (bool, int, float)) and not math.isnan(number)
    if not is_number and not (number is None or isinstance(number, torch.dtype)):
        raise UnreadableError(f"%{node.name} has the argument {number}")
    return str(number)


def looked_through(place: MaskPlace) -> MaskPlace:
    """Returns the place of a view's operand, with the view applied to its dimensions and cuts.

    Raises UnreadableError if it is not such a view.
    """
    node, name = place.node, key(place.node)
    source = node.all_input_nodes[0] if node.all_input_nodes else node
    shape: Any = getattr(value(source), "shape", ())
    if has_trait(node, "same", "detach", "expand"):
        return MaskPlace(source, place.dims[len(place.dims) - len(shape) :], place.cuts)
    if has_trait(node, "reshape", "squeeze"):
        return MaskPlace(source, _but_for_ones(place, shape), place.cuts)
    if name == "aten::permute":
        order = [dim % len(shape) for dim in bind(node)["dims"]]
        return MaskPlace(source, tuple(place.dims[order.index(dim)] for dim in range(len(shape))), place.cuts)
    if name == "aten::transpose":
        args, dims = bind(node), list(place.dims)
        a, b = args["dim0"], args["dim1"]
        dims[a], dims[b] = dims[b], dims[a]
        return MaskPlace(source, tuple(dims), place.cuts)
    if has_trait(node, "slice"):
        _, dim, *rest = bind(node).values()
        cut = place.dims[dim]
        return MaskPlace(
            source, place.dims, place.cuts if cut is None else (_Cut(cut, node.target, (*rest,)), *place.cuts)
        )
    if name == "aten::select" and is_same_size(shape[bind(node)["dim"]], 1):
        dim: int = bind(node)["dim"] % len(shape)
        return MaskPlace(source, (*place.dims[:dim], None, *place.dims[dim:]), place.cuts)
    what = "an input or a parameter" if node.op in ("placeholder", "get_attr") else name
    raise UnreadableError(f"%{node.name}, {what}, has rows and columns")


def _but_for_ones(place: MaskPlace, shape: Sequence[Size]) -> Dims:
    """Returns dims for `shape`, which has the value's dimensions up to added and removed dimensions of size 1."""
    left = [(dim, size) for dim, size in zip(place.dims, place.shape, strict=True) if not is_same_size(size, 1)]
    found: list[int | None] = []
    for size in shape:
        if is_same_size(size, 1):
            found.append(None)
        elif left and is_same_size(left[0][1], size):
            found.append(left.pop(0)[0])
        else:
            left = [*left, (None, size)]
            break
    if left:
        raise UnreadableError(f"%{place.node.name} reshapes rows and columns")
    return tuple(found)


def _laid_out(place: MaskPlace, x: Any, given: Callable[[fx.Node], Any], call: Callable[..., Any]) -> Any:
    """Applies the cuts to the value `x` of a place, and orders its dimensions as the mask's."""
    dims = list(place.dims)
    for cut in place.cuts:
        dim = place.dim_of(cut.dim)
        if dim is not None:
            x = call(cut.target, x, dim, *(given(arg) if isinstance(arg, fx.Node) else arg for arg in cut.args))
    for i in reversed(range(len(dims))):
        if dims[i] is None:
            x = call(aten.squeeze.dim, x, i)
            del dims[i]
    order = sorted(range(len(dims)), key=lambda i: dims[i] or 0)
    if order != list(range(len(dims))):
        x = call(aten.permute.default, x, order)
    for dim in reversed(_from_behind(-min((dim or 0 for dim in dims), default=0))):
        if dim not in dims:
            x = call(aten.unsqueeze.default, x, dim)
    return x


def _needs_gradient(node: fx.Node) -> bool:
    """Whether a gradient may flow through the value to an input or a parameter."""

    def may_flow(n: fx.Node) -> bool:
        found = value(n)
        return isinstance(found, torch.Tensor) and found.is_floating_point() and not has_trait(n, "detach")

    def has_gradient(n: fx.Node) -> bool:
        given = n.meta.get("example_value") if n.op == "placeholder" else value(n)
        return given is None or given.requires_grad  # traces keep no other word of an input's gradient

    walk = reached([node], lambda n: n.all_input_nodes if may_flow(n) else [])
    return any(may_flow(n) and has_gradient(n) for n in walk)
