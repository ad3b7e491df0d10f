"""What the constraints of a pattern say about its inputs before a graph is built, so that few guesses are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import LiteralValue
from fxrewrite.pattern.where.facts import Dtype, Is, Same, ShapeEq
from fxrewrite.pattern.where.numbers import RankOf, Relation
from fxrewrite.verify.draw import Draw
from fxrewrite.verify.literals import numbers_in
from fxrewrite.verify.tensors import InputSpec

_LARGEST_SIZE = 64
_ALSO = (torch.int64, torch.bool, torch.int32)


class Facts:
    """The constraints of a pattern, by capture.

    Attributes:
        ranks, dtypes: of captures, as far as they are stated.
        params: captures that a constraint requires to be parameters.
        constants: for each capture, the constants that constraints compare it with.
        sizes: those of the constants that may be sizes, and twice these.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.ranks: dict[str, int] = {}
        self.dtypes: dict[str, tuple[torch.dtype, ...]] = {}
        self._same_dtype: list[tuple[str, ...]] = []
        self._same_shape: list[tuple[str, ...]] = []
        self.params: set[str] = set()
        self.constants: dict[str, list[Any]] = {}
        for constraint in pattern.where:
            if isinstance(constraint, Dtype):
                self.dtypes[constraint.name] = constraint.dtypes
            elif isinstance(constraint, Same) and constraint.what == "dtype":
                self._same_dtype.append(constraint.names)
            elif isinstance(constraint, ShapeEq):
                self._same_shape.append(constraint.names)
            elif isinstance(constraint, Is) and constraint.asked == "is_param":
                self.params.add(constraint.name)
            elif isinstance(constraint, Relation) and constraint.relation == "==":
                left, right = constraint.left, constraint.right
                if isinstance(left, RankOf) and isinstance(right, LiteralValue):
                    self.ranks[left.name] = right.value
            for name in constraint.names:
                self.constants.setdefault(name, []).extend(numbers_in(constraint))
        numbers = {n for found in self.constants.values() for n in found if type(n) is int}
        self.sizes = tuple(sorted(n for n in numbers | {2 * n for n in numbers} if 1 <= n <= _LARGEST_SIZE))

    def drawn(self, dtypes: Sequence[torch.dtype]) -> tuple[torch.dtype, ...]:
        """Returns these dtypes, and the others of real and complex numbers that a constraint names."""
        named = [dtype for allowed in self.dtypes.values() for dtype in allowed]
        return tuple(dict.fromkeys([*dtypes, *(d for d in named if d.is_floating_point or d.is_complex)]))

    def tensor(
        self,
        name: str,
        context: Sequence[torch.Tensor],
        bound: Mapping[str, Any],
        draw: Draw,
        attempt: int,
        stated: Sequence[int] | None = None,
    ) -> InputSpec:
        """Guesses the tensor that is captured as `name`, for a call with these other tensors.

        Args:
            name: the capture without the number of a sibling; empty if the value is ignored.
            context: tensors that the operator is called with.
            bound: specs of the captures so far.
            draw: random choices.
            attempt: how many guesses failed; later guesses are bolder.
            stated: the shape that the operator takes, if that is known.
        """
        partner = self._partner(name, self._same_shape, bound)
        rank = self.ranks.get(name)
        if partner is not None:
            shape = partner.shape
        elif stated is not None and rank in (None, len(stated)):
            shape = stated
        else:
            shape = _shape(rank, context, draw)
        return draw.spec(shape, self._dtype(name, bound, draw, attempt), is_param=name in self.params)

    def _dtype(self, name: str, bound: Mapping[str, Any], draw: Draw, attempt: int) -> torch.dtype:
        partner = self._partner(name, self._same_dtype, bound)
        if partner is not None:
            return partner.dtype
        allowed = self.dtypes.get(name)
        if allowed is not None:
            wanted = [dtype for dtype in allowed if dtype in draw.dtypes or not dtype.is_floating_point]
            wanted = [dtype for dtype in wanted if dtype.is_complex == draw.dtype.is_complex] or wanted or allowed
            if draw.dtype not in allowed:
                return wanted[draw.index % len(wanted)]  # the same for all tensors of a sample
            return draw.dtype if draw.flag(0.9) else draw.choice(*wanted)
        if draw.wide and draw.flag(0.15):
            return draw.choice(*draw.dtypes, *_ALSO)
        if draw.flag(0.1):
            return draw.choice(*draw.dtypes)
        is_bold = attempt > 3 and not draw.dtype.is_complex  # a sample of complex numbers is of nothing else
        return draw.choice(*_ALSO) if is_bold and draw.flag(0.4) else draw.dtype

    def _partner(self, name: str, groups: Sequence[tuple[str, ...]], bound: Mapping[str, Any]) -> InputSpec | None:
        names = (other for group in groups if name in group for other in group)
        return next((bound[other] for other in names if isinstance(bound.get(other), InputSpec)), None)


def _shape(rank: int | None, context: Sequence[torch.Tensor], draw: Draw) -> tuple[int, ...]:
    if context and draw.flag(0.85):
        shape = _related(list(draw.choice(*context).shape), draw)
        if rank is None or len(shape) == rank:
            return tuple(shape)
    return draw.shape(rank if rank is not None else draw.choice(0, 1, 1, 2, 2, 2, 2, 3, 3, 4), least=0)


def _related(shape: list[int], draw: Draw) -> list[int]:
    """Returns a shape that fits `shape`: equal, broadcast against it, a factor of a product, its last size."""
    way = draw.integer(0, 9)
    if way < 3 or not shape:
        return shape
    if way == 3:
        return [1 if draw.flag() else size for size in shape]
    if way == 4:
        return shape[draw.integer(0, len(shape)) :]
    if way == 5:
        return shape[-1:]
    if way == 6:
        return [draw.size(), shape[-1]]
    if way == 7:
        return [*shape[:-2], shape[-1], draw.size()]
    if way == 8:
        return [*draw.shape(1), *shape]
    return draw.rng.sample(shape, len(shape))
