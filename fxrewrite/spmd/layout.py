"""What a rank holds of a value: all of it, a chunk of one dimension, or a summand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fxrewrite.graph.sizes import Size, is_same_size

__all__ = ["Axis", "Layout", "Partial", "Replicated", "Shard", "is_same_layout", "local_shape"]


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis: its name, how many ranks it has, and the process group that joins them (none in a dry run)."""

    name: str
    size: int
    group: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank r holds chunk r of dimension `dim`.

    The dimension reads as `outer x (P chunks)`: of each of its `outer` runs a rank holds one contiguous chunk. A
    flattened batch of sequences `[B * S]` that is sharded on the sequence is `Shard(0, outer=B)`.
    """

    dim: int
    outer: Size = 1

    def __str__(self) -> str:
        runs = "" if isinstance(self.outer, int) and self.outer == 1 else f", outer={self.outer}"
        return f"S({self.dim}{runs})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum over the ranks of what they hold."""

    def __str__(self) -> str:
        return "P(sum)"


Layout: TypeAlias = Replicated | Shard | Partial


def is_same_layout(a: Layout, b: Layout) -> bool:
    """Whether both say the same, with symbolic run counts compared without a guard."""
    if isinstance(a, Shard) and isinstance(b, Shard):
        return a.dim == b.dim and is_same_size(a.outer, b.outer)
    return type(a) is type(b)


def local_shape(shape: Sequence[Size], layout: Layout, num_ranks: int) -> list[Size]:
    """The shape that one rank holds of a value of global `shape`."""
    local = list(shape)
    if isinstance(layout, Shard):
        outer: Any = layout.outer  # torch's stubs let quotients of sizes be floats
        local[layout.dim] = outer * (local[layout.dim] // outer // num_ranks)
    return local
