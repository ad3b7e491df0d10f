"""FLOPs of attention, without what a causal mask hides: on average, half.

Each operator that is attention is declared a product with them (`fxrewrite.spmd.declare_product`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import fx

from fxrewrite.graph import Size, product
from fxrewrite.ops import bind, key
from fxrewrite.spmd import ATTENTION_BACKWARD, Call, declare_product
from rules.masks.kinds import kind_of
from rules.random import by_rank

ATTENTION_KEYS = set[str]()
"""Keys of operators that are attention; their first operands are q [..., L, E], k [..., S, E], v [..., S, D]."""


def hides_later_keys(node: fx.Node) -> bool:
    """Whether rows of attention read no later key, so that the first read the fewest: by `is_causal` or the mask."""
    given = bind(node)
    mask = given.get("attn_mask", node)  # if the mask is not an operand, the node has its meaning
    kind = None if mask is None else kind_of(mask)
    return given.get("is_causal", False) or (kind is not None and kind.hides_later_keys)


def declare_attention(operator_key: str, num_chunks: Callable[[Call], int] = lambda _: 1) -> None:
    """State that an operator is attention.

    Args:
        operator_key: its key.
        num_chunks: of a call, how many chunks of keys its queries meet, of which it is given one.
    """
    ATTENTION_KEYS.add(operator_key)
    declare_product(operator_key, partial(_flops, num_chunks), ATTENTION_BACKWARD)


def _flops(num_chunks: Callable[[Call], int], call: Call, count: Callable[[Size], int]) -> float:
    """Each query meets each key that is not hidden, and each of their weights a value."""
    q, k, v = (call.shape(i) for i in range(3))
    keys = count(k[-2]) * num_chunks(call)
    flops = 2.0 * count(product(q[:-1])) * keys * (count(q[-1]) + count(v[-1]))
    return flops / 2 if hides_later_keys(call.node) else flops


declare_attention(key(by_rank(torch.ops.aten.scaled_dot_product_attention.default)))
