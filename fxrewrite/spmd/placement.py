"""What a rank holds of a value: all of it, a chunk of one dimension, or a summand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.sizes import Size, is_same_size, product, quotient

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


class MisstatedError(FxRewriteError):
    """What is stated is wrong whatever the sizes are: a glob matches nothing, two statements contradict each other, a
    dimension does not exist. An alternative that says so is a mistake, and not one that is impossible."""


def check_num_ranks(value: object) -> None:
    """Raise FxRewriteError where `value` is no number of ranks: an int, 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FxRewriteError(f"{value!r} is not a number of ranks; pass an int, 1 or more")


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh axis: its name, how many ranks it has, and the process group that joins them (none in a dry run).

    Raises:
        FxRewriteError: the size is no int, or less than 1.
    """

    name: str
    size: int
    group: str = ""

    def __post_init__(self) -> None:
        check_num_ranks(self.size)

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank r holds chunk r of dimension `dim`.

    The dimension reads as `outer x (P chunks)`: of each of its `outer` runs a rank holds one contiguous chunk. A
    `[B, S]` that is sharded on S and then flattened to `[B * S]` is `Shard(0, outer=B)`.

    Where `uneven`, P need not divide the number of entries S of a run. Chunks then have `ceil(S / P)` entries, each of
    `inner` elements, and what is beyond S, at the end of the last chunks, is padding: entries as finite as real
    ones, which no real entry depends on. So `[B * S * K]` may be `Shard(0, outer=B, inner=K, uneven=True)`.

    A section of a dimension, as `x[:, 2:-1]` takes it, may stay where its entries are: chunks are then those of
    `before + S + after` entries, of which those before and after are padding too. That is `Shard(1, uneven=True,
    before=2, after=1)`.
    """

    dim: int
    outer: Size = 1
    inner: Size = 1
    uneven: bool = False
    before: Size = 0
    after: Size = 0

    @property
    def is_section(self) -> bool:
        """Whether chunks are those of more entries than the value has."""
        return not (is_same_size(self.before, 0) and is_same_size(self.after, 0))

    def __str__(self) -> str:
        counts = (
            ("outer", self.outer, 1),
            ("inner", self.inner, 1),
            ("before", self.before, 0),
            ("after", self.after, 0),
        )
        said = "".join(f", {name}={n}" for name, n, default in counts if not (isinstance(n, int) and n == default))
        return f"S({self.dim}{said}{', uneven' if self.uneven else ''})"


ReduceOp: TypeAlias = Literal["sum", "max", "min"]
"""How what the ranks hold is combined into the value."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum over the ranks of what they hold, or its elementwise maximum or minimum.

    A maximum or a minimum has no adjoint here: of equal entries on several ranks, one device shares the gradient among
    all of them, and a rank does not know how many there are. So only what is not differentiated can be placed so.

    Raises:
        FxRewriteError: the operator is not one of "sum", "max" and "min".
    """

    reduce_op: ReduceOp = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in get_args(ReduceOp):
            raise FxRewriteError(f"Partial({self.reduce_op!r}) is not supported; use one of {get_args(ReduceOp)}")

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Of 2P equal blocks of dimension `dim`, rank r holds blocks r and 2P - 1 - r, one after the other.

    Work that grows along the dimension is then the same on every rank. Only inputs are held so, as a loader cuts them:
    `Place` puts them in order before any use.
    """

    dim: int

    def __str__(self) -> str:
        return f"Z({self.dim})"

    @staticmethod
    def order(num_ranks: int) -> list[int]:
        """Where each of the 2P blocks is, of those of rank 0, rank 1, ... one after the other."""
        last = 2 * num_ranks - 1
        return [2 * block if block < num_ranks else 2 * (last - block) + 1 for block in range(2 * num_ranks)]


Placement: TypeAlias = Replicate | Shard | Partial
AnyPlacement: TypeAlias = "Placement | TorchPlacement"
"""A placement, or one of torch.distributed.tensor: Shard(dim), Replicate() or Partial(reduce_op)."""


def as_placement(placement: Any) -> Any:
    """The same placement in the classes of this module, if it is one of `torch.distributed.tensor`; else what it was.

    Raises:
        FxRewriteError: it is one of torch's that is not supported.
    """
    dtensor = sys.modules.get("torch.distributed.tensor")  # whoever has an instance has imported the module
    if dtensor is None or isinstance(placement, (Replicate, Shard, Partial)):
        return placement
    if isinstance(placement, dtensor.Replicate):
        return Replicate()
    if isinstance(placement, dtensor.Partial):
        return Partial(placement.reduce_op)
    if type(placement) is dtensor.Shard:
        return Shard(placement.dim)
    if isinstance(placement, dtensor.placement_types.Placement):
        raise FxRewriteError(
            f"{placement!r} is not supported; Shard(dim, outer=n) of fxrewrite.spmd has chunks of runs"
        )
    return placement


def check_placement(placement: object, shape: Sequence[Size], of: str) -> None:
    """Raise FxRewriteError where no value of this global shape can be placed so; `of` says what is placed.

    Whether the ranks divide the dimension is not looked at.
    """
    if not isinstance(placement, (Replicate, Shard, Partial)):
        raise MisstatedError(f"{of}: {placement!r} is not a placement; there are Replicate(), Shard(dim) and Partial()")
    if isinstance(placement, Shard) and type(placement.dim) is not int:  # True is no dimension
        raise MisstatedError(f"{of}: Shard({placement.dim!r}): a dimension is an int, counted from the front, from 0")
    if isinstance(placement, Shard) and placement.dim not in range(len(shape)):
        raise MisstatedError(
            f"{of}: {placement} of a value with {len(shape)} dimensions; a dimension is counted from the front, from 0"
        )


def is_same_placement(a: Placement, b: Placement) -> bool:
    """Whether both say the same, with symbolic run counts compared without a guard."""
    if isinstance(a, Shard) and isinstance(b, Shard):
        counts = ((a.outer, b.outer), (a.inner, b.inner), (a.before, b.before), (a.after, b.after))
        return (a.dim, a.uneven) == (b.dim, b.uneven) and all(is_same_size(*pair) for pair in counts)
    return a == b


def num_entries(shape: Sequence[Size], placement: Shard) -> Size:
    """How many entries of a value of global `shape` are cut into chunks, in each run: S."""
    return quotient(quotient(shape[placement.dim], placement.outer), placement.inner)


def local_shape(shape: Sequence[Size], placement: Placement, num_ranks: int) -> list[Size]:
    """The shape that one rank holds of a value of global `shape`."""
    local = list(shape)
    if isinstance(placement, Shard):
        entries = num_entries(shape, placement)
        padded = placement.before + entries + placement.after + num_ranks - 1 if placement.uneven else entries
        chunk = quotient(padded, num_ranks)
        local[placement.dim] = product((placement.outer, chunk, placement.inner))
    return local
