"""Calls of flash attention's kernels, of torch and of packages, read by the names in their schemas.

    flash_attn::_flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, ...)     q [B, L, H, E], k [B, S, KV, E]
    flash_attn::_flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, ...)    q [T, H, E], k [U, KV, E]
    torch_attn::_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, ...)                the same

Builds of one kernel differ in their namespaces, as `flash_attn_3` and `_flash_attn2_588b404` of the kernel hub, in the
order of arguments and in what else they take. A query at i, counted from the end of its keys, reads keys from i - left
to i + right.
Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py;
huggingface/kernels-community, flash-attn2 and vllm-flash-attn3; PyTorch, torch/nn/attention/varlen.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from fxrewrite.ops import bind

_FORWARD = {"_flash_attn_forward", "_flash_attn_varlen_forward", "_varlen_attn", "fwd"}
_BACKWARD = {"_flash_attn_backward", "_flash_attn_varlen_backward", "_varlen_attn_backward", "bwd"}
_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "cu_seqlens_q": "cu_seq_q",
    "cu_seqlens_k": "cu_seq_k",
    "softmax_scale": "scale",
    "is_causal": "causal",
    "s_aux": "sinks",
    "learnable_sink": "sinks",
}
"""What kernels call arguments, and what they are called here."""
_WINDOW = ("window_size_left", "window_size_right")
_NO_MATTER = {
    *("max_q", "max_k", "max_seqlen_q", "max_seqlen_k", "enable_gqa"),  # which the other arguments say
    *("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"),  # how a kernel works
    *("rotary_interleaved", "is_rotary_interleaved", "cp_rank", "cp_tot_seqused_k"),  # without what they are of
    *("return_softmax", "zero_tensors"),
}
"""Arguments that do not change the result, as `FlashCall` reads it."""


class FlashCall(NamedTuple):
    """The arguments of a kernel that computes attention.

    Attributes:
        q, k, v: [B, L, H, E], [B, S, KV, E] and [B, S, KV, D]; KV divides H. With `cu_seq_q`, B and L are one.
        cu_seq_q, cu_seq_k: where documents begin and the last ends, [N + 1]; None for rows of a batch.
        scale: factor of the scores; None for E ** -0.5.
        causal: whether a query reads no later key.
        left, right: how many earlier and later keys a query reads; -1 for all.
        softcap: between which number and its negative scores are bent; 0 for not.
        sinks: a logit for each head that reads no value, [H]; None.
        dropout_p: how likely a weight is dropped.
        others: further arguments that are given, by the kernel's names.
    """

    q: Any
    k: Any
    v: Any
    cu_seq_q: Any = None
    cu_seq_k: Any = None
    scale: Any = None
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: Any = None
    dropout_p: float = 0.0
    others: frozenset[str] = frozenset()

    @classmethod
    def of(cls, node: fx.Node) -> FlashCall:
        """Reads a call of an operator for which `is_flash_forward` is true."""
        given = {_NAMES.get(name, name): argument for name, argument in bind(node).items()}
        window = given.pop("window_size", None) or (-1, -1)
        left, right = (given.pop(name, side) for name, side in zip(_WINDOW, window, strict=True))
        causal = bool(given.pop("causal", False))
        known = {name: given.pop(name) for name in cls._fields if name in given}
        defaults = {argument.name: argument.default_value for argument in node.target._schema.arguments}  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        others = frozenset(
            name for name, x in given.items() if name not in _NO_MATTER and x is not None and x != defaults.get(name)
        )
        return cls(**known, causal=causal, left=left, right=0 if causal else right, others=others)


def is_flash_forward(node: fx.Node) -> bool:
    """Whether a node calls a kernel that computes attention."""
    return _is_kernel(node, _FORWARD)


def is_flash_backward(node: fx.Node) -> bool:
    """Whether a node calls a kernel that computes the gradients of attention."""
    return _is_kernel(node, _BACKWARD)


def _is_kernel(node: fx.Node, names: set[str]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace, _, name = node.target._schema.name.partition("::")
    if name not in names or not ("flash_attn" in namespace or namespace == "torch_attn"):
        return False
    given = {_NAMES.get(argument.name, argument.name) for argument in node.target._schema.arguments}
    return given >= {"q", "k", "v"}
