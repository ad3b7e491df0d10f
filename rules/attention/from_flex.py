"""Torch's flex attention, as a model calls it, becomes attention whose mask is a value of the graph.

    flex_attention(q, k, v, score_mod, block_mask)[0]
            ->  scaled_dot_product_attention(q, k, v, where(kept, added, -inf))
    out, lse = flex_attention(...); out * sigmoid(lse - sinks)[..., None]
            ->  attention(q, k, v, where(kept, added, -inf), sinks)

`kept` is the block mask's function of (b, h, q_idx, kv_idx), and `added` what the score function adds, both of all
entries at once, as torch.vmap computes them. A part that is not needed is left out; a score function that first bends
scores, `c * tanh(score / c)`, becomes `attention` with a softcap. So the mask is read by its meaning (rules/masks),
computed by rows, and each rank has its rows or heads of it. Sinks match as transformers and torchtitan write them.
Blocks are not read: those of `create_block_mask` are where its function keeps something.
Leaves alone, in these words: "its logsumexp or greatest score is read"; "the score function calls aten::mul, which is
not a bias that is added"; "the block mask has blocks and no function"; "keys have dtype float16, queries float32"; "the
score function detaches a value, which torch.vmap would differentiate".
Shapes: q [B, H, L, E], k [B or 1, KV, S, E], v [B or 1, KV, S, D] -> [B, H, L, D]; KV divides H.
Numerics: reassociates. What is added is in q's dtype, as masks of kernels are, where flex attention adds in float32.
Source: Flex Attention (arXiv 2412.05496); PyTorch, torch/_higher_order_ops/flex_attention.py (math_attention); sinks:
Hugging Face transformers, integrations/flex_attention.py; torchtitan, models/gpt_oss/model.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, maybe, op, where
from fxrewrite.graph import reached
from fxrewrite.ops import dtype_name, fake_value, filled_with, key
from fxrewrite.spmd import is_same_size, size_proxy, traced
from rules.attention.flex_operator import FLEX_ATTENTION, FlexCall
from rules.attention.operator import call_attention

aten = torch.ops.aten


def why_not_raised(flex: fx.Node, *, most: int = 0) -> str:
    """Says why a call of flex attention is not attention with a mask; empty if it is.

    Args:
        flex: the call, or any other node.
        most: which of its results may be read, up to this one: attention, the logsumexp of scores, the greatest score.
    """
    if flex.target is not FLEX_ATTENTION:
        return f"%{flex.name} is {key(flex)}"
    if any(user.target is not operator.getitem or user.args[1] not in range(most + 1) for user in flex.users):
        return "its logsumexp or greatest score is read"
    call = FlexCall.of(flex)
    of_q, of_k = (dtype_name(fake_value(x).dtype) for x in (call.q, call.k))
    if of_q != of_k:
        return f"keys have dtype {of_k}, queries {of_q}"
    if call.has_blocks and _keeps_all(call.mask_body):
        return "the block mask has blocks and no function"
    if call.score_body.graph.find_nodes(op="call_function", target=aten.detach.default):
        return "the score function detaches a value, which torch.vmap would differentiate"
    left = _scores(call.score_body)[0]
    if left is _given(call.score_body):
        return ""
    if not isinstance(left, fx.Node) or left.op == "placeholder":
        return "the score function does not return scores"
    return f"the score function calls {key(left)}, which is not a bias that is added"


@where.predicate("flex", text="is_masked_attention")
def _is_masked_attention(flex: fx.Node) -> bool | str:
    return why_not_raised(flex) or True


@where.predicate("flex", text="is_masked_attention_with_lse")
def _is_masked_attention_with_lse(flex: fx.Node) -> bool | str:
    return why_not_raised(flex, most=1) or True


_flex, _sinks = cap("flex"), cap("sinks")
_out: Any = op(operator.getitem, _flex, 0)
_lse_to_base_2: Any = op(operator.getitem, _flex, 1)
_lse: Any = _lse_to_base_2 * math.log(2)


def _cast(x: Any) -> Any:
    return maybe(op("to", x, cap("dtype", Literal)))


def _raise(name: str, pattern: Any, condition: Any) -> Rule:
    return Rule(name, Pattern((pattern,), (condition,)), numerics="reassociates", domain="finite", optional=True)


_lse_column: Any = op("unsqueeze", _cast(_lse), -1)
_lse_and_sinks: Any = op("logsumexp", op("cat", [_lse_column, _sinks], -1), [-1], True)
_lse_by_rows: Any = op("transpose", _lse, 1, 2)
_share_by_rows: Any = op("unsqueeze", op("sigmoid", _lse_by_rows - _sinks), -1)

raise_flex = _raise("attention.raise_flex", _out, _is_masked_attention)
raise_flex_sinks = _raise(
    "attention.raise_flex_sinks",
    _cast(_out * op("exp", _lse_column - _lse_and_sinks)),
    _is_masked_attention_with_lse,
)
raise_flex_sinks_by_rows = _raise(
    "attention.raise_flex_sinks_by_rows",
    op("transpose", _out, 1, 2) * _cast(_share_by_rows),
    _is_masked_attention_with_lse,
)


@raise_flex.replacement
def _(match: Match) -> Any:
    """attention(q, k, v, where(kept, added, -inf))"""
    return _attention(match)


@raise_flex_sinks.replacement
def _(match: Match, sinks: Any) -> Any:
    """attention(q, k, v, where(kept, added, -inf), sinks)"""
    return _attention(match, sinks)


@raise_flex_sinks_by_rows.replacement
def _(match: Match, sinks: Any) -> Any:
    """attention(q, k, v, where(kept, added, -inf), sinks) with rows before heads"""
    return _attention(match, sinks.transpose(-1, -2).unsqueeze(-1)).transpose(1, 2)


RAISE_FLEX = RuleSet("raise_flex", raise_flex_sinks, raise_flex_sinks_by_rows, raise_flex)


def _attention(match: Match, sinks: Any = None) -> Any:
    """Calls attention as the matched call of flex attention does, with one column of sinks."""
    call = FlexCall.of(match["flex"])
    q, k, v = map(match.proxy, (call.q, call.k, call.v))
    queries, keys = fake_value(call.q), fake_value(call.k)
    if not is_same_size(queries.shape[0], keys.shape[0]):
        k, v = (x.expand(size_proxy(match, queries.shape[0]), -1, -1, -1) for x in (k, v))
    mask, softcap = None, _softcap(call.score_body)
    if not (_keeps_all(call.mask_body) and _adds_nothing(call.score_body)):
        mask = traced(match, _mask_of(call), call.q, call.k, *call.score_leaves, *call.mask_leaves)
    scale = match.proxy(call.scale) if isinstance(call.scale, fx.Node) else call.scale
    return call_attention(match, q, k, v, mask, sinks, softcap=softcap, scale=scale)


def _result(body: fx.GraphModule) -> Any:
    return body.graph.output_node().args[0]


def _given(score_body: fx.GraphModule) -> fx.Node:
    """The scores that a score function is given."""
    return next(iter(score_body.graph.nodes))


def _keeps_all(body: fx.GraphModule) -> bool:
    """Whether a mask function keeps every entry whatever its index."""
    found = _result(body)
    return found is True or (
        isinstance(found, fx.Node) and found.op != "placeholder" and filled_with(found) in (1, True)
    )


def _adds_nothing(body: fx.GraphModule) -> bool:
    """Whether a score function returns scores as they are, or bends them alone."""
    return _scores(body, is_added_to=False)[0] is _given(body)


def _softcap(body: fx.GraphModule) -> float:
    """Between which number and its negative a score function bends scores before it adds to them; 0 if it does not."""
    return _scores(body)[1]


def _scores(body: fx.GraphModule, *, is_added_to: bool = True) -> tuple[Any, float]:
    """Goes from the result of a score function down to its scores.

    Returns the scores, or what cannot be passed, and the softcap below.
    """
    first, found = _given(body), _result(body)
    of_scores = set(reached([first], lambda node: list(node.users)))
    while is_added_to and isinstance(found, fx.Node) and (below := _added_to(found, of_scores)) is not None:
        found = below
    bent = _bent(found) if isinstance(found, fx.Node) else None
    return bent if bent is not None and bent[0] is first else (found, 0.0)


def _added_to(node: fx.Node, of_scores: set[fx.Node]) -> fx.Node | None:
    """Returns to what a node adds something that no score decides; None if it does not."""
    if node.op != "call_function":
        return None
    given = [arg for arg in node.args if isinstance(arg, fx.Node) and arg in of_scores]
    if len(given) != 1 or node.kwargs:
        return None
    (below,) = given
    match key(node):
        case "aten::add":
            return below
        case "aten::sub" if node.args[0] is below:
            return below
        case "aten::where" if below is not node.args[0]:
            other = node.args[2] if below is node.args[1] else node.args[1]
            number = filled_with(other) if isinstance(other, fx.Node) else other
            return below if number == -math.inf else None
        case _:
            return None


def _bent(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Returns x and c of `c * tanh(x / c)`; None for anything else."""
    if key(node) != "aten::mul":
        return None
    tanh, cap_ = node.args[:2] if isinstance(node.args[0], fx.Node) else node.args[1::-1]
    if not (isinstance(tanh, fx.Node) and isinstance(cap_, (int, float)) and key(tanh) == "aten::tanh"):
        return None
    inner = tanh.args[0]
    if not (isinstance(inner, fx.Node) and key(inner) == "aten::div" and inner.args[1] == cap_):
        return None
    return (inner.args[0], float(cap_)) if isinstance(inner.args[0], fx.Node) else None


def _mask_of(call: FlexCall) -> Callable[..., torch.Tensor]:
    """Returns the mask of a call as a function of q, k, and what its score and mask functions read."""
    num_score_leaves = len(call.score_leaves)

    def mask(q: torch.Tensor, k: torch.Tensor, *leaves: Any) -> torch.Tensor:
        lengths = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
        kept = added = None
        if not _keeps_all(call.mask_body):
            kept = _of_all_entries(call.mask_body, lengths, q.device, (), leaves[num_score_leaves:])
        if not _adds_nothing(call.score_body):
            score = torch.zeros((), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
            added = _of_all_entries(call.score_body, lengths, q.device, (score,), leaves[:num_score_leaves])
            added = added.to(q.dtype)
        if added is None or kept is None:
            return kept if added is None else added  # pyright: ignore[reportReturnType]  # one of them is there
        return torch.where(kept, added, -math.inf)

    return mask


def _of_all_entries(
    body: fx.GraphModule, lengths: Sequence[Any], device: torch.device, before: tuple[Any, ...], leaves: Sequence[Any]
) -> torch.Tensor:
    """Returns `body(*before, b, h, q_idx, kv_idx, *leaves)` of all indices; sizes of those that it ignores are 1."""
    placeholders = body.graph.find_nodes(op="placeholder")[len(before) :]
    indices = [
        torch.arange(length if placeholder.users else 1, device=device)
        for length, placeholder in zip(lengths, placeholders, strict=False)
    ]
    function: Callable[..., Any] = body
    for at in reversed(range(len(indices))):
        dims = [None] * (len(before) + len(indices) + len(leaves))
        dims[len(before) + at] = 0  # pyright: ignore[reportArgumentType, reportCallIssue]
        function = torch.vmap(function, in_dims=tuple(dims))
    return function(*before, *indices, *leaves)
