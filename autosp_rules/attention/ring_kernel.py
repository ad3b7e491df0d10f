"""Ring attention: keys and values are sent from rank to rank, and each rank merges the results of its queries.

    for each of R groups: send k, v to the next; attend to the present ones; merge by logsumexp; receive the next

The transfer of the next k and v starts before the present ones are read. If no kernel reads them, scores are computed
for a block of rows at a time. A rank computes the blocks of the mask for its own rows from leaves that are replicated;
keys that the mask hides from a whole block of rows are skipped. Which those are, the host reads once for all groups.
The backward saves q, k, v and the sinks of a rank's own rows, the result and its logsumexp. There dk and dv are sent
along with k and v, and one step further, to their owner. They and dq are summed over the steps in at least float32, and
rounded at the end; the CPU kernel itself rounds what it adds in each step.
Shapes: as `exchange` gives them, q [B, H / U, S / R, E], k [B, KV / U, S / R, E], v [B, KV / U, S / R, D].
Numerics: reassociates; sums over keys are sums over blocks of keys.
Source: Ring Attention (arXiv 2310.01889); PyTorch, torch/distributed/tensor/experimental/_context_parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from autosp_rules.attention.exchange import PLACE, Ring, send
from fxrewrite.ops import HOST_WAITS, communicates, key
from fxrewrite.spmd import COLLECTIVES
from rules.attention.blocks import tiles_of_parts
from rules.attention.by_rows import attention_by_rows, attention_by_rows_backward, differentiate
from rules.attention.flops import declare_attention
from rules.attention.kernels import lse_dtype, merge_blocks, with_sinks


def _to_next(values: Sequence[torch.Tensor], ring: Ring) -> torch.Tensor:
    """Starts to send the values to the next group of the ring, in one piece."""
    ahead, behind = ((ring.group + step) % ring.num_groups for step in (1, ring.num_groups - 1))
    return send(torch.cat([x.reshape(1, -1) for x in values], 1), ring, ring.to([ahead]), ring.to([behind]))


def _arrived(sent: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = COLLECTIVES["wait"](sent).split([x.numel() for x in like], 1)
    return [part.reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def _of_group(leaf: torch.Tensor, dim: int, group: Any, ring: Ring) -> torch.Tensor:
    """Returns a group's rows or columns of a leaf, in the group's order."""
    if leaf.dim() < -dim or leaf.shape[dim] == 1:
        return leaf
    if not ring.zigzag:
        size = leaf.shape[dim] // ring.num_groups
        return leaf.narrow(dim, group * size, size)
    size, last = leaf.shape[dim] // (2 * ring.num_groups), 2 * ring.num_groups - 1
    return torch.cat([leaf.narrow(dim, half * size, size) for half in (group, group * -1 + last)], dim)


def _of_heads(leaf: torch.Tensor, ring: Ring) -> torch.Tensor:
    if leaf.dim() < 3 or leaf.shape[-3] == 1:
        return leaf
    size = leaf.shape[-3] // ring.per_group
    return leaf.narrow(-3, ring.member * size, size)


class _Step(NamedTuple):
    """The keys of one group, the mask's leaves cut to the rank's rows and these columns, and the tiles to compute."""

    k: torch.Tensor
    v: torch.Tensor
    leaves: list[torch.Tensor]
    kept: torch.Tensor | None


def _around(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, leaves: Sequence[torch.Tensor], mask: str, ring: Ring
) -> Iterator[_Step]:
    """Yields the keys of the rank's group, then of each group before it.

    Step s has the keys of group g - s, while those of the next step arrive.
    """
    own = [_of_group(_of_heads(leaf, ring), -2, ring.group, ring) for leaf in leaves]
    sources = [(ring.group + (ring.num_groups - step)) % ring.num_groups for step in range(ring.num_groups)]
    cut = [[_of_group(x, -1, source, ring) for x in own] for source in sources]
    last = len(sources) - 1
    coming = _to_next([k, v], ring) if last else None  # before the host waits for the bounds of the mask
    for step, kept in enumerate(tiles_of_parts(cut, mask, q, k)):
        yield _Step(k, v, cut[step], kept)
        if coming is not None:
            k, v = _arrived(coming, [k, v])
            coming = _to_next([k, v], ring) if step + 1 < last else None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    mask: str,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    *place: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of a rank's queries to all keys, and the logsumexp of their scores, without a gradient.

    Args:
        q, k, v: of a rank in the ring; see the shapes of this module.
        leaves: of the mask, for all rows, columns and heads; they broadcast to [B, H, S, S].
        mask: an expression of them, as `rules.masks.expressions` reads it; "" hides nothing. It must be bool, or there
            must be sinks: a row whose keys are all hidden by one finite number attends to all of them equally, but
            parts of the keys do not show that.
        scale: factor of the scores.
        softcap: what scores are bent to stay below, before the mask; 0 leaves them.
        sinks: an additional score for each row of q, [B, H / U, S / R, 1], of a key whose value is 0; the logsumexp
            includes it.
        place: position in the ring; see `autosp_rules.attention.exchange.Ring`.
    """
    found: tuple[torch.Tensor, torch.Tensor] | None = None
    for step in _around(q, k, v, leaves, mask, Ring(*place)):
        out, lse = attention_by_rows(q, step.k, step.v, step.leaves, mask, scale, softcap, None, step.kept)
        out = out.to(lse.dtype)
        found = (out, lse) if found is None else merge_blocks(*found, out, lse)
    assert found is not None, "a ring has a group"
    out, lse = found
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype).contiguous(), lse.contiguous()


def _gradients_of(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    leaves: Sequence[torch.Tensor],
    mask: str,
    scale: float,
    softcap: float,
    *place: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of a rank's q, k and v."""
    ring = Ring(*place)
    dq, home = torch.zeros_like(q, dtype=lse.dtype), None
    # The gradients of a chunk follow it around the ring; each group adds its part and sends them on.
    for step in _around(q, k, v, leaves, mask, ring):
        how = (step.leaves, mask, scale, softcap, step.kept, lse.dtype)
        dq_part, *given = attention_by_rows_backward(dout, q, step.k, step.v, out, lse, *how)
        dq = dq + dq_part
        if home is not None:
            given = [x + y for x, y in zip(_arrived(home, given), given, strict=True)]
        home = _to_next(given, ring)
    assert home is not None, "a ring has a group"
    dk, dv = _arrived(home, [k, v])
    # dk and dv arrived in one piece of memory, so they are copied.
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


_MASK = "Tensor[] leaves, str mask, float scale, float softcap"

ring_attention = torch.library.custom_op(
    "autosp::ring_attention",
    _attend,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_MASK}, Tensor? sinks, {PLACE}) -> (Tensor, Tensor)",
    tags=HOST_WAITS,
)
ring_attention_backward = torch.library.custom_op(
    "autosp::ring_attention_backward",
    _gradients_of,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_MASK}, {PLACE})"
    " -> (Tensor, Tensor, Tensor)",
    tags=HOST_WAITS,
)
communicates(ring_attention, _attend)
communicates(ring_attention_backward, _gradients_of)


@ring_attention.register_fake
def _(q: Any, k: Any, v: Any, *how: Any) -> Any:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))


@ring_attention_backward.register_fake
def _(dout: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


differentiate(ring_attention, ring_attention_backward)
RING_ATTENTION = torch.ops.autosp.ring_attention.default
"""The registered operator of `ring_attention`; graphs call this."""
declare_attention(key(RING_ATTENTION), lambda call: call.args["num_ranks"] // call.args["per_group"])
