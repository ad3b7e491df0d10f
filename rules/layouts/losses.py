"""Losses: a sum over tokens is Partial; `rules.canonical.losses` first makes a mean a sum divided by a global count."""

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Neutral, Terms
from rules.layouts.terms import aligned, aten, broadcast_shape, index_map, indices, names_of

_NONE, _SUM = 0, 2


def cross_entropy(call: Call) -> IndexMap | None:
    """n !c d..., n d..., c? -> partial sum (reduction none: n d...); a mean has no indices"""
    shape = call.shape()
    if call.args["reduction"] not in (_NONE, _SUM) or len(shape) < 2:
        return None
    logits = indices(len(shape))
    tokens = (logits[0], *logits[2:])
    target = logits if len(call.shape(1)) == len(shape) else tokens  # class probabilities, or indices
    operands = {"self": logits, "target": target, "weight": logits[1:2]}
    return _reduced(call, operands, tokens)


def ignored(call: Call) -> Neutral | None:
    """Padding is an ignored target; class probabilities have no such target."""
    is_class = len(call.shape(1)) < len(call.shape())
    return Neutral(1, call.args["ignore_index"]) if is_class else None


def elementwise(call: Call) -> IndexMap | None:
    """p..., p... -> partial sum (reduction none: p...), operands broadcast from the right; a mean has no indices"""
    if call.args["reduction"] not in (_NONE, _SUM):
        return None
    full = broadcast_shape(*(call.shape(position) for position in range(len(call.operands))))
    terms = indices(len(full), "p")
    names = [name for name, value in call.args.items() if value in call.operands]
    operands = {name: aligned(call.shape(position), full, terms) for position, name in enumerate(names)}
    return _reduced(call, operands, terms)


def by_row(call: Call) -> IndexMap | None:
    """n !d, n !d, n -> partial sum (reduction none: n); a mean has no indices"""
    shape = call.shape()
    if call.args["reduction"] not in (_NONE, _SUM) or len(shape) != 2:
        return None
    terms = indices(2)
    names = [name for name in call.args if name in ("input1", "input2", "anchor", "positive", "negative")]
    return _reduced(call, {**dict.fromkeys(names, terms), "target": terms[:1]}, terms[:1])


def _reduced(call: Call, operands: dict[str, Terms], tokens: Terms) -> IndexMap | None:
    if call.args["reduction"] == _SUM:
        return index_map(call, operands, (), summed=names_of(tokens))
    return index_map(call, operands, tokens)


_ELEMENTWISE = """
binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
"""

LAYOUTS = (
    LayoutRule(
        "layout.cross_entropy",
        aten("cross_entropy_loss nll_loss nll_loss2d nll_loss_nd"),
        cross_entropy,
        neutral=ignored,
    ),
    LayoutRule("layout.elementwise_loss", aten(_ELEMENTWISE), elementwise),
    LayoutRule("layout.loss_by_row", aten("cosine_embedding_loss triplet_margin_loss"), by_row),
)
