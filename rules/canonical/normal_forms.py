"""Normal forms: one spelling per view, and operators that return their input are removed.

    slice(x, 2, 0, S)  ->  x        expand(x, shape of x)  ->  x        to(x, dtype of x)  ->  x        alias(x)  ->  x
    view(x, shape)  ->  reshape(x, shape)     new_zeros(x, size)  ->  zeros(size)           cat([empty, x])  ->  x
    squeeze(x, 1)  ->  select(x, 1, 0)        repeat_interleave(x, 2, 1, output_size=n)  ->  repeat_interleave(x, 2, 1)

Drops an operator if the result has the shape, dtype, device and strides of its input, for every length that the graph
admits. A view requires strides that only the traced value is known to have; a reshape is the same view where one
exists. Which dimensions a squeeze removes depends on sizes at run time; a select states it. `new_zeros` and the like
read only the dtype and device of their tensor, which are known.
Numerics: exact; the result is the input itself, as the operators themselves promise.
Source: PyTorch, aten/src/ATen/native/native_functions.yaml (each returns self, or a view of all of it).
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, loose, op, refuse, where
from fxrewrite.ops import bind, fake_value
from fxrewrite.spmd import is_same_size

if TYPE_CHECKING:
    from fxrewrite.verify import Draw


@where.predicate("x", "root", text="changes_nothing")
def _changes_nothing(x: fx.Node, root: fx.Node) -> bool:
    before, after = fake_value(x), fake_value(root)
    return (
        before.dtype == after.dtype
        and before.device == after.device
        and len(before.shape) == len(after.shape)
        and all(is_same_size(a, b) for a, b in zip(before.shape, after.shape, strict=True))
        and all(is_same_size(a, b) for a, b in zip(before.stride(), after.stride(), strict=True))
    )


@where.predicate("root", text="copies_nothing")
def _copies_nothing(root: fx.Node) -> bool | str:
    return not bind(root).get("copy") or "it copies x"


def _drop(name: str, *more: Any) -> Rule:
    arguments = (cap("x"), *more)
    dropped = Rule(
        f"normal_forms.drop_{name}",
        Pattern((loose(op(f"aten::{name}", *arguments)),), (_changes_nothing, _copies_nothing)),
        optional=True,
    )

    @dropped.replacement
    def _(x: fx.Proxy) -> fx.Proxy:
        """x"""
        return x

    return dropped


def _to_reshape(name: str) -> Rule:
    pattern = Pattern((op(f"aten::{name}", cap("x"), cap("shape", "any")),))
    respelled = Rule(f"normal_forms.{name}_to_reshape", pattern, optional=True)

    @respelled.replacement
    def _(x: fx.Proxy, shape: Any) -> fx.Proxy:
        """reshape(x, shape)"""
        return torch.ops.aten.reshape(x, shape)

    return respelled


@where.predicate("tensors", text="only_one_is_not_empty")
def _only_one_is_not_empty(tensors: Any) -> bool:
    return isinstance(tensors, (list, tuple)) and len(_not_empty(tensors)) == 1 < len(tensors)


def _not_empty(tensors: Any) -> list[Any]:
    return [t for t in tensors if not any(is_same_size(size, 0) for size in fake_value(t).shape)]


drop_empty_cat = Rule(
    "normal_forms.drop_empty_cat",
    Pattern((loose(op("aten::cat", cap("tensors", "any"))),), (_only_one_is_not_empty,)),
    optional=True,
)


@drop_empty_cat.replacement
def _(match: Match) -> fx.Proxy:
    """the one tensor that is not empty; a cache that was empty gives such a cat"""
    (kept,) = _not_empty(match["tensors"])
    return match.proxy(kept)


@drop_empty_cat.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples one tensor among empty ones, as a cache is before its first token."""
    shape = draw.shape(draw.integer(1, 4))
    dim = draw.integer(0, len(shape) - 1)
    empty = draw.choice((0,), (*shape[:dim], 0, *shape[dim + 1 :]))
    tensors = [draw.tensor(*empty) for _ in range(draw.integer(1, 2))]
    tensors.insert(draw.integer(0, len(tensors)), draw.tensor(*shape))
    return {"tensors": tensors}


squeeze_to_select = Rule(
    "normal_forms.squeeze_to_select",
    Pattern((loose(op("aten::squeeze", cap("x"))),)),
    optional=True,
)


@squeeze_to_select.replacement
def _(match: Match, x: fx.Proxy) -> fx.Proxy:
    """select(x, dim, 0) for each removed dimension, so that these do not depend on sizes at run time"""
    shape = fake_value(match["x"]).shape
    dims = bind(match.root).get("dim")
    dims = range(len(shape)) if dims is None else dims if isinstance(dims, (list, tuple)) else [dims]
    dims = dims if shape else ()  # a 0-dim tensor accepts 0 and -1, but has no such dimension
    for dim in sorted({dim % len(shape) for dim in dims if is_same_size(shape[dim], 1)}, reverse=True):
        x = torch.ops.aten.select(x, dim, 0)
    return x


type_as_to_to = Rule(
    "normal_forms.type_as_to_to", Pattern((op("aten::type_as", cap("x"), cap("other")),)), optional=True
)


@type_as_to_to.replacement
def _(match: Match, x: fx.Proxy, other: fx.Proxy) -> fx.Proxy:
    """to(x, dtype of other), because nothing else of `other` is read"""
    wanted = fake_value(match["other"])
    if wanted.device != fake_value(match["x"]).device:
        refuse("the two are on different devices", hint="the cast is left unchanged")
    return torch.ops.aten.to(x, wanted.dtype)


@where.predicate("root", text="states_its_size")
def _states_its_size(root: fx.Node) -> bool:
    return bind(root).get("output_size") is not None


_repeated = op(
    "aten::repeat_interleave", cap("x"), cap("repeats", Literal), cap("dim", Literal), output_size=cap("size", "any")
)
drop_output_size = Rule("normal_forms.drop_output_size", Pattern((_repeated,), (_states_its_size,)), optional=True)


@drop_output_size.replacement
def _(x: fx.Proxy, repeats: int, dim: int | None) -> fx.Proxy:
    """repeat_interleave(x, repeats, dim); the size follows from a single number of repeats"""
    return torch.ops.aten.repeat_interleave(x, repeats, dim)


@drop_output_size.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples repeats along any dimension, or of all entries, with the resulting size."""
    shape, repeats = draw.shape(draw.integer(1, 4)), draw.integer(1, 3)
    dim = draw.choice(None, draw.integer(-len(shape), len(shape) - 1))
    size = repeats * (math.prod(shape) if dim is None else shape[dim])
    return {"x": draw.tensor(*shape), "repeats": repeats, "dim": dim, "size": size}


def _new_to(name: str, *values: str) -> Rule:
    pattern = Pattern((loose(op(f"aten::new_{name}", cap("x"), cap("size", "any"), *(cap(v, "any") for v in values))),))
    made = Rule(f"normal_forms.new_{name}_to_{name}", pattern, optional=True)

    @made.replacement
    def _(match: Match, x: fx.Proxy) -> fx.Proxy:
        """a tensor of the size, with the dtype and device of x"""
        args, like = bind(match.root), fake_value(match["x"])
        if args["layout"] not in (None, torch.strided):
            refuse(f"its layout is {args['layout']}", hint="the call is left unchanged")
        return match.call(
            getattr(torch.ops.aten, name).default,
            args["size"],
            *(args[value] for value in values),
            dtype=like.dtype if args["dtype"] is None else args["dtype"],
            device=like.device if args["device"] is None else args["device"],
            pin_memory=args["pin_memory"],
        )

    @made.sampler
    def _(draw: Draw) -> dict[str, Any]:
        """Samples any size, and a fill value."""
        size = list(draw.shape(draw.integer(0, 3)))
        return {"x": draw.tensor(3), "size": size, **{value: draw.integer(-2, 2) for value in values}}

    return made


drop_to = _drop("to")
drop_slice = _drop("slice", cap("dim", "any"), cap("start", "any"), cap("end", "any"))
drop_narrow = _drop("narrow", cap("dim", "any"), cap("start", "any"), cap("length", "any"))


def _sampled(rule: Rule) -> None:
    @rule.sampler
    def _(draw: Draw) -> dict[str, Any]:
        """Samples all of any dimension."""
        shape = draw.shape(draw.integer(1, 4))
        dim = draw.integer(-len(shape), len(shape) - 1)
        length = {"length": shape[dim]} if rule is drop_narrow else {"end": draw.choice(shape[dim], sys.maxsize)}
        return {"x": draw.tensor(*shape), "dim": dim, "start": 0, **length}


_sampled(drop_slice)
_sampled(drop_narrow)
NORMAL_FORMS = RuleSet(
    "normal_forms",
    drop_slice,
    _drop("expand", ...),
    drop_to,
    _drop("alias"),
    drop_narrow,
    drop_empty_cat,
    squeeze_to_select,
    type_as_to_to,
    drop_output_size,
    _to_reshape("view"),
    _to_reshape("_unsafe_view"),
    _new_to("zeros"),
    _new_to("ones"),
    _new_to("full", "fill_value"),
)
