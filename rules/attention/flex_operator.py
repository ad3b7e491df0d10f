"""Torch's flex attention as a graph operator: the order of its arguments.

    flex_attention(q, k, v, score_mod, (L, S, *tiles, *orders, 128, 128, mask_mod), scale, options, leaves, leaves)

`score_mod(score, b, h, q_idx, kv_idx, *leaves)` and `mask_mod(b, h, q_idx, kv_idx, *leaves)` are subgraphs, attributes
of the graph's module (`rules.masks.functions`); `rules.masks.tiles` makes the tiles. The results are attention, the
logsumexp of the scores to base 2, and the greatest score.
This is the only file that uses torch's private parts of flex attention; a test compares its arguments with those that
Dynamo makes.
Source: PyTorch, torch/_higher_order_ops/flex_attention.py, torch/nn/attention/flex_attention.py (BlockMask).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx
from torch._higher_order_ops.flex_attention import flex_attention

from fxrewrite.ops import declare_pure, held, key
from fxrewrite.torch_versions import order_of_writes
from rules.attention.flops import declare_attention
from rules.masks.tiles import TILE

FLEX_ATTENTION: Any = declare_pure(flex_attention)
declare_attention(key(FLEX_ATTENTION))
_ORDER_OF_WRITES = order_of_writes()
"""The part of torch's BlockMask that only the deterministic backward pass of another backend reads."""
_NO_BLOCKS = 1 << 30
"""Rows, and columns, of the one block of a call without a block mask."""


class FlexCall(NamedTuple):
    """The arguments of a call that a model makes, as Dynamo writes them.

    Attributes:
        q, k, v: queries, keys and values.
        score_body, mask_body: subgraphs of ATen operators.
        has_blocks: whether the call has a block mask.
        scale: factor of the scores: a number, or a node.
        score_leaves, mask_leaves: what the subgraphs read beside indices.
    """

    q: fx.Node
    k: fx.Node
    v: fx.Node
    score_body: fx.GraphModule
    mask_body: fx.GraphModule
    has_blocks: bool
    scale: Any
    score_leaves: tuple[Any, ...]
    mask_leaves: tuple[Any, ...]

    @classmethod
    def of(cls, node: fx.Node) -> FlexCall:
        """Reads a call of `FLEX_ATTENTION` in a graph that belongs to a module."""
        given: Any = node.args
        owner: Any = node.graph.owning_module
        q, k, v, score_mod, block_mask, scale, _, *leaves = given
        *_, rows, columns, mask_mod = block_mask
        score_leaves, mask_leaves = leaves or ((), ())
        return cls(
            *(q, k, v),
            score_body=held(owner, score_mod),
            mask_body=held(owner, mask_mod),
            has_blocks=(rows, columns) != (_NO_BLOCKS, _NO_BLOCKS),
            scale=scale,
            score_leaves=tuple(score_leaves),
            mask_leaves=tuple(mask_leaves),
        )


def flex_arguments(
    q: Any,
    k: Any,
    v: Any,
    score_mod: tuple[Any, Sequence[Any]],
    mask_mod: tuple[Any, Sequence[Any]],
    lengths: tuple[Any, Any],
    tiles: Sequence[Any],
    scale: float,
    *,
    keeps_lse: bool,
) -> tuple[Any, ...]:
    """Returns the arguments of `FLEX_ATTENTION` in its order.

    Args:
        q, k, v: queries, keys and values; the number of heads of k divides that of q.
        score_mod, mask_mod: a subgraph, and the leaves that it reads.
        lengths: of q and of k.
        tiles: as `rules.masks.tiles` makes them.
        scale: factor of the scores.
        keeps_lse: whether the kernel writes the logsumexp; the backward pass needs it.
    """
    options = {
        "BACKEND": "TRITON",  # "AUTO" takes a kernel for few queries, which has no configuration for some of them
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": keeps_lse,
        "OUTPUT_MAX": False,
    }
    block_mask = (*lengths, *tiles, *_ORDER_OF_WRITES, TILE, TILE, mask_mod[0])
    return q, k, v, score_mod[0], block_mask, scale, options, tuple(score_mod[1]), tuple(mask_mod[1])
