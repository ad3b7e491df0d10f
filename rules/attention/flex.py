"""Blockwise attention as torch's flex attention, which inductor compiles to one CUDA kernel forward and one backward.

    attention_by_rows(q, k, v, [c, r, padding], "bitwise_and(le(x0, x1), x2)")[0]
            ->  flex_attention(q, k, v, score_mod, (tiles, mask_mod), ...)[0]

A bool mask becomes mask_mod, an added one score_mod, as a softcap does (`rules.masks.functions`). Tiles that hide
everything are skipped, and tiles that keep everything are not masked (`rules.masks.tiles`). Grouped heads are not
repeated. Sinks rescale the result by the logsumexp, which has a gradient. Outside inductor, torch's flex attention
computes all scores at once.
Matches the result of `rules.attention.by_rows` on CUDA, or on every device if the user requests it.
Otherwise it stays blockwise, or, if the user requested flex, the rule refuses, in these words:
    "heads of 8 are narrower than 16"; "q is torch.float64": there are no such kernels
    "%slopes is on cpu, q on cuda:0"; "q is torch.float64 and the logsumexp, which sinks need, float32"
    "the mask adds -3.4e+38, and a row of it alone attends to all keys equally": logsumexp does not say how many.
A row that -inf hides keeps no key, which is fine; with sinks the share of such a row is 0 in any case.
Shapes: q [B, H, L, E], k [B, KV, S, E], v [B, KV, S, D] -> [B, H, L, D].
Numerics: reassociates.
Source: Flex Attention (arXiv 2412.05496); PyTorch, torch/nn/attention/flex_attention.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from fxrewrite import Match, Pattern, Rule, RuleSet, cap, op, refuse, where
from fxrewrite.ops import bind, fake_value
from fxrewrite.spmd import is_same_size, size_hint
from rules.attention.by_rows import ATTENTION_BY_ROWS
from rules.attention.flex_operator import FLEX_ATTENTION, flex_arguments
from rules.masks.expressions import MaskCall, MaskExpression, Term, parse_mask
from rules.masks.functions import indices_of, mask_body, score_body
from rules.masks.kinds import kind_of, name_mask
from rules.masks.tiles import MASK_TILES, NUM_TILE_TENSORS

aten = torch.ops.aten

MaskKernel: TypeAlias = Literal["auto", "rows", "flex"]
"""auto: flex attention where it has a kernel, else blockwise; rows: blockwise everywhere; flex: flex everywhere."""
_ALL = parse_mask("full(True, torch.bool)")
_WIDEST_IN_LITTLE, _SHARED_OF_WIDE = 128, 114_688
"""Head dimension up to which a kernel fits into any card's shared memory, and what it takes beyond, in bytes of a
block; torch, _inductor/template_heuristics/triton.py."""
_NARROWEST = 16
"""Smallest head dimension (elements) for which torch's flex attention has CUDA kernels."""
_RULE = "masks.attend_by_flex"


def is_lowered(flex: fx.Node) -> bool:
    """Whether a call of flex attention is what the rule of this file made, and not one of the model."""
    return _RULE in flex.meta.get("fxrewrite", ())


def why_not_flex(by_rows: fx.Node) -> str:
    """Says why blockwise attention cannot become flex attention; empty if it can."""
    q, k, v, leaves, mask, _, _, sinks, *_ = bind(by_rows).values()
    queries = fake_value(q)
    if queries.device.type != "cpu":
        narrowest = min(queries.shape[-1], fake_value(v).shape[-1])
        if narrowest < _NARROWEST:
            return f"heads of {narrowest} are narrower than {_NARROWEST}"
        if queries.dtype == torch.float64:
            return f"q is {queries.dtype}"
        if why := _why_too_large(fake_value(q), fake_value(k), fake_value(v)):
            return why
    elsewhere = next((leaf for leaf in leaves if fake_value(leaf).device != queries.device), None)
    if elsewhere is not None:
        return f"%{elsewhere.name} is on {fake_value(elsewhere).device}, q on {queries.device}"
    if sinks is not None:
        is_wide = queries.dtype == torch.float64
        return f"q is {queries.dtype} and the logsumexp, which sinks need, float32" if is_wide else ""
    expression, lowest = parse_mask(mask), torch.finfo(queries.dtype).min
    numbers = () if _is_bool(expression, leaves) else _numbers(expression.term)
    hides = next((number for number in numbers if -lowest / 2 <= abs(number) < math.inf), None)
    return "" if hides is None else f"the mask adds {hides:.2g}, and a row of it alone attends to all keys equally"


def _why_too_large(*operands: torch.Tensor) -> str:
    """Says why a kernel of flex attention would read beyond what 32 bits or a card's shared memory hold, or ''."""
    reach = max(
        sum((size_hint(n) - 1) * size_hint(stride) for n, stride in list(zip(x.shape, x.stride(), strict=True))[1:])
        for x in operands
    )
    if reach >= 2**31:
        return f"a sequence of q, k or v reaches over {reach:,} entries, and offsets have 32 bits"
    widest, device = max(x.shape[-1] for x in operands), operands[0].device
    if widest > _WIDEST_IN_LITTLE and device.type == "cuda" and torch.cuda.is_available():
        shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if shared < _SHARED_OF_WIDE:
            return f"heads of {widest} need {_SHARED_OF_WIDE:,} bytes of shared memory, and the card has {shared:,}"
    return ""


def _is_bool(mask: MaskExpression, leaves: Sequence[fx.Node]) -> bool:
    return mask.dtype([fake_value(leaf).dtype for leaf in leaves]) == torch.bool


def _numbers(term: Term) -> Iterator[float]:
    if isinstance(term, MaskCall):
        for arg in term.args:
            yield from _numbers(arg)
    elif isinstance(term, (int, float)):
        yield term


@where.predicate("q", text="has_kernel")
def _has_kernel(q: fx.Node) -> bool | str:
    device = fake_value(q).device.type
    return device == "cuda" or f"q is on {device}"


@where.predicate("root", text="goes_by_flex")
def _goes_by_flex(root: fx.Node) -> bool | str:
    return why_not_flex(root.all_input_nodes[0]) or True


def flex_rules(kernel: MaskKernel) -> RuleSet:
    """Returns the rule set that lowers blockwise attention to flex attention where `kernel` says so."""
    operands = (cap("q"), cap("k"), cap("v"), cap("leaves", "any"), cap("mask", "literal"))
    numbers = (cap("scale", "literal"), cap("softcap", "literal"))
    by_rows: Any = op(ATTENTION_BY_ROWS, *operands, *numbers, cap("sinks", "optional"), None)
    flex = Rule(
        _RULE,
        Pattern((op(operator.getitem, by_rows, 0),), () if kernel == "flex" else (_has_kernel, _goes_by_flex)),
        _by_flex,
        numerics="reassociates",
        domain="finite",
    )
    return RuleSet("flex_attention", *(() if kernel == "rows" else (flex,)))


def _by_flex(
    match: Match, q: Any, k: Any, v: Any, leaves: Sequence[Any], mask: str, scale: float, softcap: float, sinks: Any
) -> fx.Proxy:
    """flex_attention"""
    given: list[fx.Node] = match["leaves"]
    why = why_not_flex(match.root.all_input_nodes[0])
    if why:
        refuse(why, hint="use mask_kernel='auto' or 'rows', which compute it by rows")
    lengths, device = (q.shape[2], k.shape[2]), q.device
    hidden = -math.inf if sinks is None else torch.finfo(q.dtype).min / 2
    tiles = match.call(MASK_TILES, leaves, mask, *lengths, hidden, device)
    read = [_squeezed(match, leaf) for leaf in leaves]
    (score_mod, by_score), (mask_mod, by_mask) = _functions(parse_mask(mask), given, read, softcap, device)
    arguments = flex_arguments(
        q,
        k,
        v,
        (match.proxy(match.edit.attach(score_mod, "score_mod")), by_score),
        (match.proxy(match.edit.attach(mask_mod, "mask_mod")), by_mask),
        lengths,
        [match.call(operator.getitem, tiles, i) for i in range(NUM_TILE_TENSORS)],
        scale,
        keeps_lse=sinks is not None or device.type != "cpu",  # inductor's CPU kernel returns no logsumexp
    )
    attended = match.call(FLEX_ATTENTION, *arguments)
    name_mask(match.edit, attended.node, kind_of(match.root))
    out = match.call(operator.getitem, attended, 0)
    if sinks is not None:
        lse = match.call(operator.getitem, attended, 1) * math.log(2)
        out = (out * torch.sigmoid(lse - sinks.squeeze(-1)).unsqueeze(-1)).to(q.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2)  # in memory heads follow rows, as attention's result


def _functions(
    mask: MaskExpression, leaves: Sequence[fx.Node], read: Sequence[Any], softcap: float, device: torch.device
) -> tuple[tuple[fx.GraphModule, Sequence[Any]], ...]:
    """Returns score_mod and mask_mod, each with the leaves that it reads."""
    indices = [indices_of(fake_value(leaf)) for leaf in leaves]
    if _is_bool(mask, leaves):
        return (score_body(None, (), softcap, device), ()), (mask_body(mask, indices, device), read)
    return (score_body(mask, indices, softcap, device), read), (mask_body(_ALL, (), device), ())


def _squeezed(match: Match, leaf: Any) -> fx.Proxy:
    ones = [dim for dim, size in enumerate(fake_value(leaf.node).shape) if is_same_size(size, 1)]
    return match.call(aten.squeeze.dims, leaf, ones) if ones else leaf
