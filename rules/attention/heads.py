"""Attention by bmm, with batch and heads merged in one dimension, is attention by matmul, with both.

    view(bmm(q, k^T), [B, H, L, S])            ->  matmul(view(q), view(k^T))
    view(baddbmm(bias, q, k^T, beta, alpha), [B, H, L, S])
                                               ->  matmul(view(q), view(k^T)) * alpha + view(bias) * beta
    softmax(view(x, [B * H, L, S]))            ->  view(softmax(x), [B * H, L, S])
    bmm(view(softmax(x), [B * H, L, S]), v)    ->  view(matmul(softmax(x), view(v)), [B * H, L, D])
    bmm(x, y), baddbmm(bias, x, y)             ->  matmul(x, y), matmul(x, y) * alpha + bias * beta

Matches products next to a softmax, scaled before the view or not, with a cast and a dropout after the softmax, and
reshape, unflatten and flatten for `view`. BLOOM, MBart and fairseq write attention so; rules/attention/composite.py
matches the result. Leaves alone, in these words, "the view makes [4, 2, 12, 3] of [8, 6, 6]", and "the bias has 1
entries in the first dimension, the scores have 8" before a view.
Numerics: exact; a baddbmm reassociates.
Source: Hugging Face transformers, modeling_bloom.py (BloomAttention).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, either, op, where
from fxrewrite.ops import bind, has_trait, key, value
from fxrewrite.spmd import is_same_size
from rules.attention.parts import SAFE_SOFTMAX, cast_and_dropout, divides, is_number, scaled, softmax

if TYPE_CHECKING:
    from fxrewrite.verify import Draw

_X, _Y, _BIAS = cap("x"), cap("y"), cap("bias")
_BETA, _ALPHA, _SHAPE = cap("beta", Literal), cap("alpha", Literal), cap("shape", "any")
_bmm: Any = op("bmm", _X, _Y)
_baddbmm: Any = op("baddbmm", _BIAS, _X, _Y, beta=_BETA, alpha=_ALPHA)
_NUMBERS = (is_number("alpha"), is_number("beta"))
_SCALES = (is_number("scale"), divides("divisor"))
_BETWEEN = {"aten::add", "aten::mul", "aten::div", "aten::masked_fill", "aten::where", "aten::dropout"}
_MOST_STEPS = 8
"""How many operators may be between a product and its softmax."""
_TO_SPLIT: Any = either(_baddbmm, scaled(_bmm))


def _viewed(x: Any, *others: Any) -> Any:
    return either(op("view", x, _SHAPE), op("reshape", x, _SHAPE), *others)


def _is_softmax(node: fx.Node) -> bool:
    return key(node) in ("aten::softmax", SAFE_SOFTMAX)


def _leads_to_softmax(root: fx.Node, *, reads: bool) -> bool:
    """Whether what the root reads, or what reads it, is a softmax, through steps that attention has between the two."""
    seen, front = {root}, [root]
    for _ in range(_MOST_STEPS):
        near = {n for node in front for n in (node.all_input_nodes if reads else node.users)} - seen
        if any(_is_softmax(node) for node in near):
            return True
        seen |= near
        front = [node for node in near if key(node) in _BETWEEN or has_trait(node, "cast", "reshape")]
    return False


@where.predicate("root", text="is_beside_softmax")
def _is_beside_softmax(root: fx.Node) -> bool | str:
    return (
        any(_leads_to_softmax(root, reads=reads) for reads in (False, True)) or "no softmax reads it, and it reads none"
    )


@where.predicate("root", "x", "y", text="splits_the_first")
def _splits_the_first(root: fx.Node, x: fx.Node, y: fx.Node) -> bool | str:
    """The root has the dimensions of the product, with the first of them split in two."""
    made, scores = list(value(root).shape), [*value(x).shape[:2], value(y).shape[2]]
    fits = len(made) == 4 and is_same_size(made[0] * made[1], scores[0])
    return (fits and all(map(is_same_size, made[2:], scores[1:]))) or f"the view makes {made} of {scores}"


@where.predicate("root", "bias", text="has_a_bias_per_head")
def _has_a_bias_per_head(root: fx.Node, bias: fx.Node) -> bool | str:
    batch, first = value(root).shape[0] * value(root).shape[1], value(bias).shape[0]
    fits = value(bias).dim() < 3 or is_same_size(first, batch)
    return fits or f"the bias has {first} entries in the first dimension, the scores have {batch}"


split_scores = Rule(
    "attention.split_scores",
    Pattern(
        (_viewed(_TO_SPLIT, op("unflatten", _TO_SPLIT, 0, cap("sizes", "any"))),),
        (_is_beside_softmax, _splits_the_first, _has_a_bias_per_head, *_NUMBERS, *_SCALES),
    ),
    numerics="reassociates",
    optional=True,
)


@split_scores.replacement
def _(match: Match, x: Any, y: Any, bias: Any) -> Any:
    """matmul(view(x), view(y)), scaled or with view(bias), as the product was"""
    batch, heads = value(match.root).shape[:2]

    def split(t: Any) -> Any:
        return torch.reshape(t, [batch, heads, t.shape[1], t.shape[2]])

    made = torch.matmul(split(x), split(y))
    if match["alpha"] is not None:
        return _sum(match, made, split(bias) if bias.ndim == 3 else bias)
    if match["divisor"] is not None:
        return made / match["divisor"]
    return made if match["scale"] is None else made * match["scale"]


def _sum(match: Match, made: Any, bias: Any) -> Any:
    """Returns alpha times the product and beta times the bias; torch does not read the bias for a beta of 0."""
    made = made if match["alpha"] == 1 else made * match["alpha"]
    if match["beta"] == 0:
        return made
    return made + (bias if match["beta"] == 1 else bias * match["beta"])


def _merges(before: list[Any], made: list[Any]) -> bool | str:
    """`made` has the dimensions of `before`, with the first two of them merged."""
    fits = len(before) == 4 and len(made) == 3 and is_same_size(made[0], before[0] * before[1])
    return (fits and all(map(is_same_size, made[1:], before[2:]))) or f"the view makes {made} of {before}"


@where.predicate("x", "root", text="merges_the_first")
def _merges_the_first(x: fx.Node, root: fx.Node) -> bool | str:
    return _merges(list(value(x).shape), list(value(root).shape))


@where.predicate("x", "root", "y", text="are_merged_weights")
def _are_merged_weights(x: fx.Node, root: fx.Node, y: fx.Node) -> bool | str:
    return _merges(list(value(x).shape), [*value(root).shape[:2], value(y).shape[1]])


@where.predicate("x", text="is_a_softmax")
def _is_a_softmax(x: fx.Node) -> bool | str:
    """BLOOM's cast and dropout may come before the view."""
    node = x
    while not _is_softmax(node) and (key(node) == "aten::dropout" or has_trait(node, "cast")):
        node = node.all_input_nodes[0]
    return _is_softmax(node) or f"%{node.name} is not a softmax"


_merged: Any = _viewed(_X, op("flatten", _X, 0, 1))
_dtype = cap("dtype", Literal)
softmax_before_merge = Rule(
    "attention.softmax_before_merge",
    Pattern(
        (either(op("softmax", _merged, -1, _dtype), op(SAFE_SOFTMAX, _merged, -1, _dtype)),),
        (_merges_the_first,),
    ),
    optional=True,
)
merge_result = Rule(
    "attention.merge_result",
    Pattern((op("bmm", cast_and_dropout(_merged), _Y),), (_are_merged_weights, _is_a_softmax)),
    optional=True,
)
bmm_to_matmul = Rule("attention.bmm_to_matmul", Pattern((_bmm,), (_is_beside_softmax,)), optional=True)
write_out_baddbmm = Rule(
    "attention.write_out_baddbmm",
    Pattern((_baddbmm,), (_is_beside_softmax, *_NUMBERS)),
    numerics="reassociates",
    optional=True,
)


@softmax_before_merge.replacement
def _(match: Match, x: Any, dtype: torch.dtype | None) -> Any:
    """view(softmax(x, -1, dtype))"""
    made = softmax(match, x, dtype, is_safe=key(match.root) == SAFE_SOFTMAX)
    return torch.reshape(made, list(value(match.root).shape))


@merge_result.replacement
def _(match: Match, x: Any, y: Any) -> Any:
    """view(matmul(x, view(y))), with the cast and the dropout of x"""
    batch, heads = value(match["x"]).shape[:2]
    steps, node = list[fx.Node](), bind(match.root)["self"]
    while not has_trait(node, "reshape"):
        steps.append(node)
        node = node.all_input_nodes[0]
    for step in reversed(steps):
        is_dropout = key(step) == "aten::dropout"
        x = torch.dropout(x, match["p"], match["train"]) if is_dropout else torch.ops.aten.to(x, value(step).dtype)
    made = torch.matmul(x, torch.reshape(y, [batch, heads, y.shape[1], y.shape[2]]))
    return torch.reshape(made, list(value(match.root).shape))


@bmm_to_matmul.replacement
def _(x: Any, y: Any) -> Any:
    """matmul(x, y)"""
    return torch.matmul(x, y)


@write_out_baddbmm.replacement
def _(match: Match, x: Any, y: Any, bias: Any) -> Any:
    """matmul(x, y) * alpha + bias * beta"""
    return _sum(match, torch.matmul(x, y), bias)


def _sampled(rule: Rule) -> None:
    """Adds a sampler of products of merged heads, and of views that split or merge them."""

    @rule.sampler
    def _(draw: Draw) -> dict[str, Any]:
        heads = draw.shape(2)
        rows, depth, columns = draw.shape(3)
        merged, is_split = math.prod(heads), rule is split_scores
        on_heads = rule in (softmax_before_merge, merge_result)
        found = {
            "x": draw.tensor(*(heads if on_heads else [merged]), rows, depth),
            "y": draw.tensor(merged, depth, columns),
            "bias": draw.tensor(merged, draw.choice(1, rows), columns),
            "shape": [*heads, rows, columns] if is_split else [merged, rows, depth],
            "sizes": list(heads),
            "scale": draw.choice(0.125, -0.5, 2),
            "divisor": draw.choice(8.0, -2.0, 3),
            "beta": draw.choice(1, 0.5, 0),
            "alpha": draw.choice(1, 0.125, -2),
            "dtype": draw.choice(None, torch.float32, torch.float64),
            "p": 0.0,
            "train": draw.flag(),
        }
        captured = {capture.name for capture in rule.pattern.captures}
        return {name: given for name, given in found.items() if name in captured}


for _rule in (split_scores, softmax_before_merge, merge_result, bmm_to_matmul, write_out_baddbmm):
    _sampled(_rule)

HEADS = RuleSet(
    "attention.heads",
    RuleSet("attention.views_of_heads", split_scores, softmax_before_merge),
    RuleSet("attention.merged_heads", merge_result),
    RuleSet("attention.products_of_heads", bmm_to_matmul, write_out_baddbmm),
)
"""Afterwards products that attention writes by bmm and baddbmm are matmul, with heads in a dimension of their own."""
