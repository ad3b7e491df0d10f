"""Dense attention masks are replaced by what they mean, if that is proved.

    sdpa(q, k, v, mask)  ->  sdpa(q, k, v, is_causal=True)        where mask[..., i, j] is j <= i
    sdpa(q, k, v, mask)  ->  sdpa(q, k, v)                        where mask hides nothing

Matches a mask that depends on sizes only, as Hugging Face models build for every decoder: bool, or added, with 0 and
the least number of a dtype. A dense mask takes S * S bytes (16 GiB at 128K), and its float copy is kept for the
backward. The meaning is proved (`rules.masks.meanings`): for every length from the form of the expression, or, if the
length is a number, tile by tile. Refuses a mask that looks causal or open but has no proof, with a line in the report.
Leaves a mask that depends on data (padding, documents), or that means something else, unchanged.
Shapes: q [B, H, S, E], k [B, H, S, E], v [B, H, S, D], mask broadcasts to [B, H, S, S].
Numerics: reassociates; a kernel without a mask may sum in another order.
Source: PyTorch, torch/nn/functional.py (scaled_dot_product_attention says what is_causal means).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite import Match, Rule, RuleSet, cap, refuse, where
from fxrewrite.ops import fake_value
from fxrewrite.spmd import is_same_size
from rules.attention.operator import SDPA, attention_rule, check_scale_of_causal
from rules.masks.meanings import CAUSAL, OPEN, Claim, Finding, finding

aten = torch.ops.aten


def _found(mask: fx.Node) -> Finding:
    shape = fake_value(mask).shape
    if len(shape) > 1 and is_same_size(shape[-1], 1) and is_same_size(shape[-2], 1):
        return Finding(None, "it is one number for all rows and columns")
    return finding(mask, CAUSAL, OPEN)


def _read(name: str, claim: Claim) -> Rule:
    @where.predicate("mask", text=f"means[{name}]")
    def means(mask: fx.Node) -> bool | str:
        found = _found(mask)
        if not found.is_known and claim is CAUSAL:  # reported once, by the first of the two rules
            refuse(f"what the mask means is not known: {found.why}", node=mask, hint="is_causal=True says it")
        return found.claim is claim or (found.claim.text if found.claim is not None else found.why)

    rule_id = f"masks.{name.replace(' ', '_')}"
    made = attention_rule(rule_id, means, of=SDPA, optional=True, attn_mask=cap("mask"), is_causal=False)

    @made.replacement
    def _(match: Match, q: Any, k: Any, v: Any, dropout_p: float, scale: Any, enable_gqa: bool) -> Any:
        """scaled_dot_product_attention without a mask"""
        if claim is CAUSAL:
            check_scale_of_causal(scale)
        attend = aten.scaled_dot_product_attention
        return attend(q, k, v, None, dropout_p, claim is CAUSAL, scale=scale, enable_gqa=enable_gqa)

    return made


MASKS = RuleSet("masks", _read("causal", CAUSAL), _read("nothing hidden", OPEN))
