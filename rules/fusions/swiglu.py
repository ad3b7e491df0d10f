"""The gated activation of Llama's MLP becomes one node, and back.

    silu(gate) * up   <->   swiglu(gate, up)

The node is a plain function with the same result, so a graph with it runs anywhere; `INLINE_SWIGLU` decomposes it.
After `rules.fusions.activations`, `gate * sigmoid(gate) * up` matches too; after `rules.fusions.linears`, gate and up
are two parts of one linear.
Does not match different shapes ("shapes are (2, 4) and (4,)") or dtypes ("dtypes are float32, bfloat16"), which a
kernel for the pair does not take. A gate whose activation has another user is left alone.
Shapes: gate and up [..., d].
Numerics: exact, in both directions; gradients too.
Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202, equation 6; Hugging Face transformers,
modeling_llama.py (LlamaMLP).

>>> import torch, torch.nn.functional as F
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> mlp = lambda gate, up: F.silu(gate) * up
>>> gm = make_fx(mlp, tracing_mode="fake", pre_dispatch=True)(torch.rand(3, 4), torch.rand(3, 4))
>>> (SWIGLU >> INLINE_SWIGLU).apply(gm).rewrites
2
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import Match, Pattern, Rule, RuleSet, cap, op, rule, where
from fxrewrite.ops import declare_pure

aten = torch.ops.aten


@declare_pure
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns `silu(gate) * up`; both have shape [..., d] and the same dtype."""
    return F.silu(gate) * up


@rule("swiglu.fuse", where=[where.shape_eq("gate", "up"), where.same_dtype("gate", "up")], optional=True)
def fuse(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@fuse.replacement
def _(match: Match, gate: fx.Proxy, up: fx.Proxy) -> fx.Proxy:
    """swiglu(gate, up)"""
    return match.call(swiglu, gate, up)


inline = Rule("swiglu.inline", Pattern((op(swiglu, cap("gate"), cap("up")),)), optional=True)


@inline.replacement
def _(gate: Any, up: Any) -> Any:
    """silu(gate) * up"""
    return aten.mul(aten.silu(gate), up)


SWIGLU = RuleSet("swiglu", fuse)
INLINE_SWIGLU = RuleSet("inline_swiglu", inline)
