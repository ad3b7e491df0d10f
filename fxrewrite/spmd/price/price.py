"""What a way to run something costs one rank: bytes that it sends, what it computes, parameters that it holds.

A `Price` is compared by its total, in bytes: operations count as the bytes that are sent in their time. Bytes are
those of the collectives that `fxrewrite.spmd.lower.collectives` makes of redistributions. All ranks take part in a
ring, as NCCL's do for large values, which is the least that can be sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from fxrewrite.graph.sizes import is_read_from_data, size_hint
from fxrewrite.ops import tensors_of
from fxrewrite.report import bytes_text
from fxrewrite.spmd.group import CollectiveKind
from fxrewrite.spmd.placement import Partial, Placement, Replicate, Shard, is_same_placement

FLOPS_PER_BYTE_SENT = 2000.0
"""FLOPs that take as long as sending one byte: half of 1e15 FLOP/s by 250 GB/s, an H100 on NVLink."""


PRICE = "price"
"""In the metadata of an operator that communicates inside: its `Price`, which the program's has in it."""


@dataclass(frozen=True, slots=True)
class Price:
    """What one rank, the busiest, spends on a step.

    The time that a collective needs to start is not counted, nor is what runs while something is sent.

    Attributes:
        forward: bytes that it sends in the forward pass.
        backward: bytes that it sends in the backward pass.
        flops: of matrix products, in both passes.
        held: bytes of parameters that it holds between steps; not a part of the total.
    """

    forward: float = 0.0
    backward: float = 0.0
    flops: float = 0.0
    held: int = 0

    @property
    def total(self) -> float:
        """By which prices are compared: the bytes that are sent, and those that could be sent while it computes."""
        return self.forward + self.backward + self.flops / FLOPS_PER_BYTE_SENT

    def compared_with(self, chosen: Price) -> str:
        """The price as text, with its FLOPs as a ratio to those of the chosen one."""
        computes = "computes as much" if self.flops == chosen.flops else f"computes {_ratio(self, chosen)} as much"
        return f"{self}, the busiest rank {computes}"

    def __str__(self) -> str:
        return f"sends {bytes_text(round(self.forward))} forward and {bytes_text(round(self.backward))} backward"


def _ratio(price: Price, chosen: Price) -> str:
    return f"{price.flops / chosen.flops:.2f} x" if chosen.flops else "infinitely"


def bytes_held(node: fx.Node) -> int:
    """Bytes of the node's tensors at the sizes at hand, without those whose size the data decide."""
    known = [value for value in tensors_of(node) if not is_read_from_data(value.numel())]
    return sum(size_hint(value.numel()) * value.element_size() for value in known)


def bytes_expected(node: fx.Node) -> int:
    """Bytes of the node's tensors at the sizes at hand, with a guess of sizes that the data decide."""
    return sum(math.prod(map(size_hint, value.shape)) * value.element_size() for value in tensors_of(node))


def collective_bytes(kind: CollectiveKind, held: float, num_ranks: int) -> float:
    """Bytes that one rank sends in a collective over `num_ranks`, where it holds `held` bytes before."""
    match kind:
        case "all_to_all" | "reduce_scatter":
            return held * (num_ranks - 1) / num_ranks
        case "all_gather":
            return held * (num_ranks - 1)
        case "all_reduce":
            return 2 * held * (num_ranks - 1) / num_ranks


def redistribution_bytes(num_bytes: float, src: Placement, dst: Placement, num_ranks: int) -> float:
    """Bytes that one rank sends to bring a value of `num_bytes`, the whole of it, from one placement to another."""
    if isinstance(src, Replicate) or is_same_placement(src, dst) or (isinstance(src, Shard) and dst == Partial()):
        return 0
    if isinstance(src, Partial):
        return collective_bytes("all_reduce" if isinstance(dst, Replicate) else "reduce_scatter", num_bytes, num_ranks)
    is_all_to_all = isinstance(dst, Shard) and src.dim != dst.dim
    return collective_bytes("all_to_all" if is_all_to_all else "all_gather", num_bytes / num_ranks, num_ranks)
