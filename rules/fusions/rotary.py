"""Decomposed rotary position embedding becomes one node, and back.

    x * cos + cat([-x[..., d/2:], x[..., :d/2]], -1) * sin               <->  rotary_embedding(x, cos, sin, False)
    x * cos + stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin  <->  rotary_embedding(x, cos, sin, True)

The node is a plain function with the same result, so a graph with it runs anywhere; other rules can move it, or replace
it by a kernel. `INLINE_ROTARY` decomposes it again.
Matches halves made by `slice`, `narrow`, `chunk` or `split`, and every second entry made by `slice`; products and sums
in any order. If sizes are symbolic, `rules.canonical.normal_forms` must run first: tracing leaves slices that take
everything.
Does not match parts that are not the halves of the last dimension: "cut at 2 of 8", "the last part ends at 1 of 2",
"size(x, -1) is 7".
Shapes: x [..., d] with d even; cos and sin broadcast against x; the result has the broadcast shape.
Numerics: exact, in both directions; gradients too.
Source: Su et al., RoFormer, arXiv 2104.09864, section 3.4.2; Hugging Face transformers, modeling_llama.py
(rotate_half), modeling_gptj.py (rotate_every_two).

>>> import torch
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def rotary(x, cos, sin):
...     left, right = x.chunk(2, -1)
...     return x * cos + torch.cat([-right, left], -1) * sin
>>> x, cos, sin = torch.rand(2, 3, 8), torch.rand(3, 8), torch.rand(3, 8)
>>> gm = make_fx(rotary, tracing_mode="fake", pre_dispatch=True)(x, cos, sin)
>>> (ROTARY >> INLINE_ROTARY).apply(gm).rewrites
2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite import Constraint, Literal, Match, Pattern, Rule, RuleSet, cap, either, op, where
from fxrewrite.ops import declare_pure, fake_value


@declare_pure
def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotates pairs of entries of `x` by the angles of `cos` and `sin`.

    Args:
        x: [..., d], d even.
        cos: cosines of the angles; broadcasts against x.
        sin: sines of the angles; broadcasts against x.
        interleaved: whether pairs are neighbours, as in GPT-J; otherwise entries i and i + d/2 are a pair, as in Llama.
    """
    return _rotated(x, cos, sin, interleaved)


aten = torch.ops.aten
_LAST = 2**63 - 1  # tracing writes this for a slice without an end


def _rotated(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Overloads of ATen, so that proxies give them: a replacement for what is no call of ATen keeps torch functions."""
    if interleaved:
        odd, even = aten.slice(x, -1, 1, _LAST, 2), aten.slice(x, -1, 0, _LAST, 2)
        turned = aten.flatten(aten.stack([aten.neg(odd), even], -1), -2)
    else:
        half = x.shape[-1] // 2
        left, right = aten.slice(x, -1, 0, half), aten.slice(x, -1, half, _LAST)
        turned = aten.cat([aten.neg(right), left], -1)
    return aten.add(aten.mul(x, cos), aten.mul(turned, sin))


_x: Any = cap("x")
_cos: Any = cap("cos")
_sin: Any = cap("sin")
_cut = cap("cut", Literal)
_end = cap("end", Literal)


@where.predicate("cut", "x", text="is_half")
def _is_half(cut: int | None, x: fx.Node) -> bool | str:
    size = fake_value(x).shape[-1]
    return (cut is not None and 2 * cut == size) or f"cut at {cut} of {size}"


@where.predicate("end", "x", text="is_end")
def _is_end(end: int | None, x: fx.Node) -> bool | str:
    """None, or a number not less than the size, means the end."""
    size = fake_value(x).shape[-1]
    return end is None or end >= size or f"the last part ends at {end} of {size}"


def _rule(name: str, turned: Any, *checks: Constraint, interleaved: bool) -> Rule:
    """Makes the rule for one spelling of `turned`, the factor of the sine."""
    made = Rule(
        f"rotary.{name}",
        Pattern((_x * _cos + turned * _sin,), (*checks, where.divisible("x", -1, 2))),
        optional=True,
    )

    @made.replacement
    def _(match: Match, x: fx.Proxy, cos: fx.Proxy, sin: fx.Proxy) -> fx.Proxy:
        """rotary_embedding"""
        return match.call(rotary_embedding, x, cos, sin, interleaved)

    return made


def _halves(left: Any, right: Any) -> Any:
    return torch.cat([-right, left], -1)


def _parts(pair: Any) -> Any:
    return _halves(pair[0], pair[1])


fuse_halves = _rule(
    "fuse_halves",
    either(
        _halves(op("slice", _x, -1, 0, _cut), op("slice", _x, -1, _cut, _end)),
        _halves(op("narrow", _x, -1, 0, _cut), op("narrow", _x, -1, _cut, _cut)),
        _parts(op("chunk", _x, 2, -1)),
        _parts(op("split", _x, _cut, -1)),
        _parts(op("split_with_sizes", _x, [_cut, _cut], -1)),
    ),
    _is_half,
    _is_end,
    interleaved=False,
)
_odd: Any = op("slice", _x, -1, 1, ..., 2)  # any end: the two together have the size of x
_even: Any = op("slice", _x, -1, 0, ..., 2)
_pairs: Any = torch.stack([-_odd, _even], -1)
fuse_pairs = _rule("fuse_pairs", _pairs.flatten(-2), interleaved=True)

inline = Rule(
    "rotary.inline", Pattern((op(rotary_embedding, _x, _cos, _sin, cap("interleaved", Literal)),)), optional=True
)


@inline.replacement
def _(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """what rotary_embedding computes"""
    return _rotated(x, cos, sin, interleaved)


ROTARY = RuleSet("rotary", fuse_halves, fuse_pairs)
INLINE_ROTARY = RuleSet("inline_rotary", inline)
