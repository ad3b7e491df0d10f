"""Rows that are cut off are not multiplied: a slice comes before the product whose rows it slices.

    slice(linear(x, w, b), 1, a, c)        ->  linear(slice(x, 1, a, c), w, b)
    slice(linear(x, w) / t, 1, a, c)       ->  linear(slice(x, 1, a, c), w) / t
    slice(slice(x, 1, a, c), 1, 0, n)      ->  slice(x, 1, a, a + n)

As of the logits of a completion, `head(hidden)[:, -n:]`: rows of few features are cut, and sent where ranks divide
them anew, and not rows of all classes. Between the product and the slice there may be operators that keep rows apart,
as their layout rules say.
Matches if nothing else reads the rows. Does not match, in these words: "no product is computed of its rows"; "%relu is
read elsewhere"; "%index_put writes, or sets a mode, between the product and the slice".
Shapes: x [..., S, ..., d], w [o, d] -> [..., c - a, ..., o]. Numerics: reassociates (other kernels of the product).
Source: `logits_to_keep` of transformers, which models slice hidden states by.

>>> import torch
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def last(x, w):
...     return torch.nn.functional.linear(x, w)[:, -2:]
>>> gm = make_fx(last, tracing_mode="fake", pre_dispatch=True)(torch.rand(2, 8, 3), torch.rand(5, 3))
>>> EARLY_CUTS.apply(gm).rewrites > 0
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxrewrite import DeadCode, Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.ops import bind, fake_value, has_trait, is_pure, key, mutates
from fxrewrite.spmd import Call, Shard, Size, size_proxy
from rules.canonical.entries import above
from rules.layouts.cuts import section_of

if TYPE_CHECKING:
    from fxrewrite.verify import Draw


@dataclass(frozen=True, slots=True)
class _Rows:
    """The product whose rows are cut, what follows it, and the slices, in order."""

    whole: fx.Node
    """What the product has the rows of, in dimension `dim`."""
    dim: int
    chain: list[tuple[fx.Node, fx.Node]]
    """The product and the operators after it, each with the operand that has the rows."""
    cuts: list[fx.Node]


def _rows(root: fx.Node) -> _Rows | str:
    """Returns what a slice cuts rows of; or why that is no product."""
    node, placement, found = root, Shard(_dim(root), uneven=True), "no product is computed of its rows"
    chain, cuts, rows = list[tuple[fx.Node, fx.Node]](), list[fx.Node](), None
    while node.op == "call_function" and is_pure(node):
        if len(node.users) > 1 and node is not root:
            found = f"%{node.name} is read elsewhere"
            break
        if _cuts(node, placement):
            cuts.insert(0, node)
            node = node.all_input_nodes[0]
            continue
        higher = above(node, placement)
        if higher is None:
            break
        chain.insert(0, (node, higher[0]))
        if has_trait(node, "product"):
            rows = _Rows(higher[0], higher[1].dim, list(chain), list(cuts))
        node, placement = higher
    return rows or found


def _cuts(node: fx.Node, placement: Shard) -> bool:
    return key(node) == "aten::slice" and _dim(node) == placement.dim and bind(node)["step"] == 1


def _dim(cut: fx.Node) -> int:
    return bind(cut)["dim"] % fake_value(cut).dim()


@where.predicate("root", text="is_of_a_product")
def _is_of_a_product(root: fx.Node) -> bool | str:
    rows = _rows(root)
    if isinstance(rows, str):
        return rows
    node = rows.chain[0][0]
    while node is not root:
        node = node.next
        if mutates(node):
            return f"%{node.name} writes, or sets a mode, between the product and the slice"
    return True


RULE = "early_cuts.cut_before_product"
cut_early = Rule(
    RULE,
    Pattern(
        (op("slice", cap("x"), cap("dim", "any"), cap("start", "any"), cap("end", "any")),),
        (_is_of_a_product,),
    ),
    numerics="reassociates",
    optional=True,
)


@cut_early.replacement
def _(match: Match) -> Any:
    """the product of the rows that the slice keeps"""
    rows = _rows(match.root)
    assert not isinstance(rows, str), "the guard has looked"
    value = rows.whole
    for node in rows.cuts:
        start, end = (bind(node)[name] for name in ("start", "end"))
        value = match.edit.call(node.target, (value, rows.dim, start, end), before=match.root, like=node, rule=RULE)
    for node, operand in rows.chain:
        args = tuple(value if arg is operand else arg for arg in node.args)
        value = match.edit.call(node.target, args, node.kwargs, before=match.root, like=node, rule=RULE)
    return match.proxy(value)


@where.predicate("root", text="are_of_one_dimension")
def _are_of_one_dimension(root: fx.Node) -> bool:
    return _joined(root) is not None


def _joined(root: fx.Node) -> tuple[Size, Size] | None:
    """Returns where a slice of a slice starts and ends in the value; None if that is not known."""
    inner, dim = root.all_input_nodes[0], _dim(root)
    sections = [section_of(Call.of(node), dim) if _cuts(node, Shard(dim)) else None for node in (inner, root)]
    if any(section is None for section in sections):
        return None
    start = sum(section.before for section in sections if section is not None)
    return start, start + fake_value(root).shape[dim]


join_slices = Rule(
    "early_cuts.join_slices",
    Pattern(
        (
            op(
                "slice",
                op("slice", cap("x"), *(cap(name, "any") for name in ("dim", "first", "last"))),
                *(cap(name, "any") for name in ("again", "start", "end")),
            ),
        ),
        (_are_of_one_dimension,),
    ),
    optional=True,
)


@join_slices.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples bounds that are counted from either end."""
    shape = draw.shape(draw.integer(1, 3))
    dim = draw.integer(0, len(shape) - 1)
    shape = [size + 6 * (at == dim) for at, size in enumerate(shape)]
    again = draw.choice(dim, dim - len(shape))
    first, last, start, end = (draw.integer(0, 1), draw.choice(-1, -2), draw.choice(0, -3), draw.choice(-1, 9**9))
    return {
        "x": draw.tensor(*shape),
        "dim": dim,
        "first": first,
        "last": last,
        "again": again,
        "start": start,
        "end": end,
    }


@join_slices.replacement
def _(match: Match, x: fx.Proxy, dim: int) -> Any:
    """one slice"""
    bounds = _joined(match.root)
    assert bounds is not None, "the guard has looked"
    return torch.ops.aten.slice(x, dim, *(size_proxy(match, bound) for bound in bounds))


EARLY_CUTS = RuleSet("early_cuts", cut_early, DeadCode("cut_rows"), join_slices, DeadCode("cut_slices"))
