"""Attention is one graph operator, whichever way a model writes it: rules and placements match only this one.

    scaled_dot_product_attention(q, k, v, mask, ...)  ->  attention(q, k, v, mask, ...)                  RAISE_ATTENTION
    attention(q, k, v, mask, ...)                     ->  scaled_dot_product_attention(q, k, v, mask, ...)
    attention(q, k, v, mask, sinks, scale=c)          ->  softmax(cat([q @ k^T * c + mask, sinks], -1))[..., :-1] @ v
    attention(q, k, v, mask, scale=c, softcap=s)      ->  softmax(tanh(q @ k^T * c / s) * s + mask) @ v

The last three are LOWER_ATTENTION, after which the graph has no `attention`. `attention` has the arguments of
scaled_dot_product_attention, sinks and a softcap. Sinks are one additional logit per row, which takes a share of the
softmax and reads no value. A softcap bends scores to stay between -softcap and softcap, before masks and sinks; 0, the
default, leaves them. A window is part of the mask. Decomposed attention reaches the operator through
scaled_dot_product_attention (rules/attention/composite.py), or directly if that has no argument for a part of it
(rules/attention/sinks.py, rules/attention/softcap.py).
`attention_rule` makes a rule on a call of attention; its replacement changes some arguments with `attend_with`.
Dropout together with sinks or a softcap is refused when it runs, because no rule makes both.
Shapes: q [*, L, E], k [*, S, E], v [*, S, D], mask broadcasts to [*, L, S], sinks [*, L, 1] -> [*, L, D]; `*` is a
batch, or batch and heads. With enable_gqa the heads of k and v divide those of q.
Numerics: exact.
Source: PyTorch, torch/nn/functional.py (scaled_dot_product_attention); sinks: arXiv 2309.17453;
softcap: Gemma 2 (arXiv 2408.00118).

>>> q, k, v = torch.rand(3, 2, 4, 6, 8)
>>> bool(torch.equal(ATTEND(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True)))
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import Constraint, Literal, Match, Maybe, Pattern, Rule, RuleSet, cap, op, refuse, where
from fxrewrite.ops import bind, fake_value, key
from fxrewrite.spmd import PLACEMENT, LayoutRule, is_same_size, placement_of, size_proxy
from rules.attention.flops import declare_attention
from rules.attention.kernels import capped
from rules.layouts.attention import attention as attention_layout

if TYPE_CHECKING:
    from fxrewrite.verify import Domain, Draw

aten = torch.ops.aten


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Computes the operator's result.

    Raises:
        ValueError: there are a mask and `is_causal`, as from scaled_dot_product_attention (RuntimeError there); there
            are more or fewer values than keys, of which ATen's kernels for CPUs read memory that is not theirs; or
            sinks are not one column.
        NotImplementedError: there is dropout together with sinks or a softcap.
    """
    if (num_keys := key.shape[-2]) != (num_values := value.shape[-2]):
        raise ValueError(f"attention takes {num_keys} keys, but {num_values} values")
    if sinks is not None and (columns := sinks.shape[-1]) != 1:
        raise ValueError(f"attention takes one column of sinks, not {columns}")
    if sinks is None and not softcap:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if is_causal and attn_mask is not None:
        raise ValueError("attention takes a mask or is_causal, not both")
    if dropout_p:
        what = "a softcap" if sinks is None else "sinks"
        raise NotImplementedError(f"attention with {what} does not support dropout, but dropout_p is {dropout_p}")
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = capped(scores, softcap)
    if is_causal:
        kept = query.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril()
        scores = scores.masked_fill(torch.logical_not(kept), -math.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(torch.logical_not(attn_mask), -math.inf) if is_bool else scores + attn_mask
    if sinks is not None:
        return _read(torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1], value)
    if attn_mask is None:
        return torch.softmax(scores, -1) @ value
    keeps_none = torch.isneginf(torch.amax(scores, -1, True))
    return _read(torch.softmax(scores.masked_fill(keeps_none, 0.0), -1).masked_fill(keeps_none, 0.0), value)


def _read(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the weighted values; beside a mask of a wider dtype, the weights are of that."""
    return (weights if weights.dtype == value.dtype else weights.to(value.dtype)) @ value


_LIBRARY = torch.library.Library("fxrewrite_rules", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? sinks=None, *,"
    " float dropout_p=0.0, bool is_causal=False, float? scale=None, bool enable_gqa=False,"
    " float softcap=0.0) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),  # as ATen's operator: with dropout it draws
)
_LIBRARY.impl("attention", attention, "CompositeImplicitAutograd")
ATTEND = torch.ops.fxrewrite_rules.attention.default
"""The registered operator of `attention`; graphs call this."""
declare_attention(key(ATTEND))
SDPA = "scaled_dot_product_attention"

ATTENTION_LAYOUTS = (LayoutRule("layout.attention_operator", (key(ATTEND),), attention_layout, move_to=("h", "g")),)
"""The sharding rule of the operator; it treats sinks as a mask with one column."""

_DEFAULTS = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
_OWN_DEFAULTS = {"softcap": 0.0}
"""Of options that scaled_dot_product_attention does not have."""


def attentions(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns those of the nodes that call the operator."""
    return [node for node in nodes if node.target is ATTEND]


def is_sdpa(attention: fx.Node) -> bool:
    """Whether scaled_dot_product_attention computes this call of the operator: it has no sinks and no softcap."""
    given = bind(attention)
    return given["sinks"] is None and not given["softcap"]


def attention_rule(
    name: str,
    *conditions: Constraint,
    of: Any = ATTEND,
    renames: bool = False,
    optional: bool = False,
    domain: Domain = "finite",
    **given: Any,
) -> Rule:
    """Returns a rule on one call of attention, with a sampler to verify it; the caller adds the replacement.

    It captures q, k, v, mask, sinks, dropout_p, is_causal, scale, enable_gqa and softcap, except arguments of the
    operator that are `given`: as terms, or as values that they must have. A rule that only `renames` the operator is
    exact, and draws the same numbers by another operator; any other rule reassociates, and holds for values of its
    `domain`. A rule `of` SDPA is on a call of scaled_dot_product_attention, which has no sinks and no softcap.
    """
    operands = {"query": cap("q"), "key": cap("k"), "value": cap("v"), "attn_mask": cap("mask", Maybe)}
    options: dict[str, Any] = {option: cap(option, Literal) for option in _DEFAULTS}
    if of is ATTEND:
        options |= {"sinks": cap("sinks", Maybe)} | {option: cap(option, Literal) for option in _OWN_DEFAULTS}
    pattern = Pattern((op(of, **{**operands, **options, **given}),), conditions)
    numerics, domain = ("exact", "all") if renames else ("reassociates", domain)
    rng = "changes" if renames else "preserves"  # the draws are equal, but another operator makes them
    made = Rule(name, pattern, numerics=numerics, domain=domain, rng=rng, optional=optional)
    captured = {capture.name for capture in pattern.captures}

    @made.sampler
    def _(draw: Draw) -> dict[str, Any]:
        return {name: value for name, value in _sample(draw, given).items() if name in captured}

    return made


def _sample(draw: Draw, given: dict[str, Any]) -> dict[str, Any]:
    """Samples operands of attention: with or without grouped heads, with different lengths of queries and keys, with at
    most one of a mask and `is_causal`, with or without sinks or a softcap."""
    batch, kv_heads, repeats, rows, columns, depth = draw.shape(6)
    enable_gqa = given.get("enable_gqa", draw.flag())
    heads = 2 * kv_heads * repeats if enable_gqa else kv_heads
    is_causal = given.get("is_causal", draw.flag())
    return {
        "q": draw.tensor(batch, heads, rows, depth),
        "k": draw.tensor(batch, kv_heads, columns, depth),
        "v": draw.tensor(batch, kv_heads, columns, depth),
        "mask": None if is_causal else draw.choice(None, draw.mask(1, columns)),
        "sinks": draw.choice(None, draw.tensor(batch, heads, rows, 1)),
        "dropout_p": 0.0,
        "is_causal": is_causal,
        "scale": draw.choice(None, 0.5),
        "enable_gqa": enable_gqa,
        "softcap": draw.choice(0.0, 0.0, 1.5),
    }


def attend_with(match: Match, **changed: Any) -> fx.Proxy:
    """Calls `attention` with the arguments of the matched call, except those that are `changed`."""
    given = bind(match.root) | changed
    operands = [given.get(name) for name in ("query", "key", "value", "attn_mask", "sinks")]
    defaults = _DEFAULTS | _OWN_DEFAULTS
    options = {name: given[name] for name, default in defaults.items() if given.get(name, default) != default}
    return match.call(ATTEND, *operands, **options)


def call_attention(
    match: Match, q: Any, k: Any, v: Any, mask: Any = None, sinks: Any = None, *, softcap: float = 0.0, **options: Any
) -> Any:
    """Calls scaled_dot_product_attention, or `attention` if that has no argument for something.

    Args:
        match: whose replacement runs.
        q, k, v, mask: proxies, as the operator has them.
        sinks: a proxy that broadcasts to [*, L, 1], in any dtype.
        softcap: as the operator has it.
        options: `dropout_p`, `is_causal` and `scale`; a value that is the default is not written.
    """
    given = {name: x for name, x in options.items() if x is not None and x != _DEFAULTS[name]}
    if not is_same_size(q.shape[-3], k.shape[-3]):
        given["enable_gqa"] = True
    if sinks is None and not softcap:
        return match.call(aten.scaled_dot_product_attention.default, q, k, v, mask, **given)
    if softcap:
        given["softcap"] = softcap
    if sinks is not None:  # sizes of q are those of the inputs: q may be in shards
        rows = (size_proxy(match, size) for size in fake_value(q.node).shape[:-1])
        sinks = sinks.to(q.dtype).expand(*rows, 1)
    return match.call(ATTEND, q, k, v, mask, sinks, **given)


_ANY_SCALE = cap("scale", "any")
"""Captures any scale, because in a graph with symbolic floats the scale is a node, not a literal."""
raise_sdpa = attention_rule("attention.raise_sdpa", of=SDPA, renames=True, scale=_ANY_SCALE)
lower_to_sdpa = attention_rule("attention.lower_to_sdpa", renames=True, sinks=None, softcap=0.0, scale=_ANY_SCALE)


def check_scale_of_causal(scale: Any) -> None:
    """Refuse `is_causal` with a scale of 0 or less: torch's kernel for CPUs multiplies hidden scores, -inf, by it."""
    if isinstance(scale, (int, float)) and not scale > 0:
        refuse(f"is_causal multiplies hidden scores, which are -inf, by the scale {scale}")


@where.predicate("root", text="is_no_sdpa")
def _is_no_sdpa(root: fx.Node) -> bool | str:
    return not is_sdpa(root) or "it has no sinks and no softcap"


write_out = attention_rule("attention.write_out", _is_no_sdpa, scale=_ANY_SCALE)


@raise_sdpa.replacement
def _(match: Match) -> fx.Proxy:
    """attention(q, k, v, mask, ...)"""
    return attend_with(match)


@lower_to_sdpa.replacement
def _(match: Match, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Any) -> fx.Proxy:
    """scaled_dot_product_attention(q, k, v, mask, ...)"""
    options = {"enable_gqa": True} if match["enable_gqa"] else {}
    made = aten.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, **options)
    match.edit.set_fact(made.node, PLACEMENT, placement_of(match.root))  # dropout draws by this placement
    return made


@write_out.replacement
def _(match: Match, q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: Any) -> Any:
    """softmax(cat([capped(q @ k^T * scale) + mask, sinks], -1))[..., :-1] @ v"""
    options = {name: match[name] for name in ("dropout_p", "is_causal", "enable_gqa", "softcap")}
    return attention(q, k, v, mask, sinks, scale=scale, **options)


def _none_is_left(nodes: Sequence[fx.Node]) -> str:
    left = attentions(nodes)
    return f"{len(left)} calls of attention are left, the first is %{left[0].name}" if left else ""


RAISE_ATTENTION = RuleSet("raise_attention", raise_sdpa)
LOWER_ATTENTION = RuleSet("lower_attention", lower_to_sdpa, write_out, invariant=_none_is_left)
