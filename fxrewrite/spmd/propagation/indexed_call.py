"""How an operator with an index map runs on placed operands: one of its indices is sharded, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from fxrewrite.errors import refuse
from fxrewrite.graph.differentiable import is_differentiable
from fxrewrite.graph.sizes import is_divided_by, is_same_size, quotient, require_divisible, size_hint
from fxrewrite.graph.walk import reached
from fxrewrite.ops import bind, is_inexact, key
from fxrewrite.spmd.facts import REQUIRED
from fxrewrite.spmd.layouts.notation import IndexMap, IndexPart
from fxrewrite.spmd.layouts.rule import Call, LayoutRule, tensor_of
from fxrewrite.spmd.placement import Axis, Partial, Placement, Replicate, Shard, is_same_placement
from fxrewrite.spmd.price.products import is_product
from fxrewrite.spmd.propagation.decision import Decision, replicated, spread

_MOST_CUT_OFF = 1 / 8
"""Share of the rows of a product that may be computed although they were cut off, rather than send all others."""


_MOST_SENT = 64
"""Users of a value of which each may have its part sent by a collective of its own."""


def is_divided(indices: IndexMap, part: IndexPart, axis: Axis) -> bool:
    """Whether every rank can have a chunk of an index."""
    return part.uneven or require_divisible(quotient(indices.sizes[part.index], part.within), axis.size)


def _leads_to_product(node: fx.Node) -> bool:
    return any(map(is_product, reached([node], lambda found: found.users)))


def _kept_of(value: fx.Node, dim: int) -> Iterator[int]:
    """How many entries of a dimension each slice of a value keeps."""
    for user in value.users:
        if key(user) in ("aten::slice", "aten::narrow") and bind(user)["dim"] % tensor_of(value).dim() == dim:
            yield size_hint(tensor_of(user).shape[dim])


def _is_integer(value: fx.Node) -> bool:
    return not is_inexact(tensor_of(value)) and tensor_of(value).dtype != torch.bool


@dataclass(frozen=True, slots=True)
class IndexedCall:
    """An operator, with the placements that its operands have.

    Attributes:
        call: the operator with its arguments.
        rule: its layout rule.
        indices: what the rule says of this call.
        placements: of the operands.
        preferred: of each operand, whether its placement was merely preferred.
        axis: the mesh axis.
        in_body: whether it is in a body of a higher-order operator, which holds no sections and no lookups.
    """

    call: Call
    rule: LayoutRule
    indices: IndexMap
    placements: tuple[Placement, ...]
    preferred: tuple[bool, ...]
    axis: Axis
    in_body: bool

    def decision(self) -> Decision:
        """Returns how the operator runs.

        Raises:
            RefusedError: it is required to produce a placement that it cannot produce.
        """
        decision = self._decision()
        return replace(decision, preferred=self._is_preferred(decision))

    def _decision(self) -> Decision:
        # Operands may be sharded on different indices, and only one can be kept. A placement that follows from the
        # inputs comes before one that was merely preferred, so that a preference never causes a collective.
        order = sorted(range(len(self.placements)), key=self.preferred.__getitem__)
        located = [self.indices.locate(self.indices.operands[i], self.placements[i]) for i in order]
        parts = [part for part in located if part is not None]
        required = REQUIRED.of(self.call.node)
        if required is not None and parts:
            return self._as_required(parts, required)
        free = [part for part in parts if self._can_shard(part)]
        blocked = next((part for part in parts if self.indices.must_join(part)), None)
        if blocked is not None and (
            found := self._moved(blocked, parts) or self._section() or self._looked_up(blocked)
        ):
            return found
        # An index that results have costs nothing; one that they lack makes them partial, which costs a reduction.
        chosen = next((part for part in free if self._is_in_results(part)), next(iter(free), None))
        sharded = self._sharded(chosen) if chosen is not None else None
        return sharded or self._whole(blocked, sums_padding=chosen is not None)

    def _as_required(self, parts: list[IndexPart], required: Placement) -> Decision:
        """How the operator runs if its result must be produced so; whoever states it knows the price."""
        part = self.indices.locate(self.indices.results[0], required)
        if part is None or not self._can_shard(part):
            why = "its chunks fall between indices"
            if part is not None:
                is_whole = part.index in self.indices.whole
                why = f"{part.index} must be whole" if is_whole else f"{self.axis} ranks do not divide {part.index}"
            refuse(
                f"{self.call.key} is required to produce {required}, and {why}",
                node=self.call.node,
                hint="require a placement that its layout rule allows, or none",
            )
        # As where an index moves: users see the result on the index that the operands came with.
        home = next((p for p in parts if self._is_in_results(p)), part)
        return spread(self.indices, part, f"required to produce {required}", home=home)

    def _moved(self, blocked: IndexPart, parts: list[IndexPart]) -> Decision | None:
        """How the operator runs over another index (heads, for attention), if its rule names one; else None.

        Two all-to-alls send 2/P of what a gather sends. Users see the result on the index it came with ("home"), so
        the way back is decided by who reads it.
        """
        home = next((p for p in parts if self._is_in_results(p)), blocked)
        if self.indices.is_split(blocked):
            part = IndexPart(blocked.index, uneven=blocked.uneven)
            if self._can_shard(part):
                return spread(self.indices, part, home=blocked, why=f"chunks of {blocked.index} must be in one run")
        for index in self.rule.move_to:
            part = IndexPart(index)
            if index in self.indices.sizes.keys() - self.indices.whole and is_divided(self.indices, part, self.axis):
                return spread(self.indices, part, home=home, why=f"{blocked.index} must be whole: moved to {index}")
        return None

    def _section(self) -> Decision | None:
        """How a slice of the sharded dimension runs that stays where its entries are; None where it does not pay.

        Users see it so if no rank then has more rows than all that are kept. Otherwise, or if a product of matrices
        follows that would run on rows which were cut off, they see it in even chunks, or whole if it has fewer entries
        than there are ranks. That pays unless a gather of what such slices read sends less. Integers
        are gathered: of those that were cut off an operator may fail, as a lookup of -100 does.
        """
        section, placement = self.indices.section, self.placements[0]
        if section is None or self.in_body or not isinstance(placement, Shard):
            return None
        if _is_integer(self.call.operands[0]):
            return None
        is_one_run = is_same_size(placement.outer, 1) and is_same_size(placement.inner, 1)
        if placement.dim != section.dim or not is_one_run or (self.preferred[0] and not placement.is_section):
            return None
        before, after = placement.before + section.before, placement.after + section.after
        stays = replace(placement, uneven=True, before=before, after=after)
        size = self.call.result_shapes()[0][section.dim]
        kept, held = size_hint(size), size_hint(before + size + after)
        num_ranks, are_few = self.axis.size, held - kept <= _MOST_CUT_OFF * held
        if kept * num_ranks >= held and (are_few or not _leads_to_product(self.call.node)):
            shown: Placement = stays
        else:
            if len(self.call.operands[0].users) > _MOST_SENT:
                return None
            sent = sum(n for n in _kept_of(self.call.operands[0], section.dim) if n * num_ranks < held)
            if sent * (1 if kept >= num_ranks else 2) > held:
                return None
            is_even = is_divided_by(size, num_ranks)
            shown = Shard(section.dim, uneven=not is_even) if kept >= num_ranks else Replicate()
        return Decision((placement,), (stays,), (shown,), "stays where its entries are", stays=True)

    def _looked_up(self, blocked: IndexPart) -> Decision | None:
        """How entries of the sharded dimension are looked up by the ranks that have them; None where it does not pay.

        It does if what is sent of all that are looked up is less than what a gather sends.
        """
        placement, value = self.placements[0], self.call.operands[0]
        lookup = self.indices.lookups.get(placement.dim) if isinstance(placement, Shard) else None
        if lookup is None or self.in_body or any(isinstance(p, Partial) for p in self.placements):
            return None
        if len(value.users) > _MOST_SENT or tensor_of(value).dtype == torch.bool:
            return None
        is_one_run = is_same_size(blocked.within, 1) and is_same_size(blocked.inner, 1)
        alike = [user for user in value.users if key(user) == self.call.key]
        found = sum(size_hint(tensor_of(user).numel()) for user in alike)
        if not is_one_run or 2 * found > size_hint(tensor_of(value).numel()):
            return None
        required = (placement, *[Replicate()] * (len(self.placements) - 1))
        return Decision(required, (Partial(),), (Partial(),), "each rank looks up what it has", lookup=lookup)

    def _sharded(self, part: IndexPart) -> Decision | None:
        """How the operator runs over an index; None if padding would count in a sum."""
        sums_padding = self._sums_padding(part)
        neutral = self.rule.neutral_of(self.call, self.indices, part.index) if sums_padding else None
        if sums_padding and neutral is None:
            return None
        decision = spread(self.indices, part, f"sharded on {part.index}", reduce_op=self.rule.reduce_op)
        moved = [
            i
            for i, (placement, want) in enumerate(zip(self.placements, decision.required, strict=True))
            if isinstance(placement, Shard) and not is_same_placement(placement, want)
        ]
        why = f"{self.call.key} runs over {part.index}; operand {moved} must be whole there" if moved else ""
        return replace(decision, neutral=neutral, gathered=why)

    def _whole(self, blocked: IndexPart | None, *, sums_padding: bool) -> Decision:
        """How the operator runs if all of its operands are gathered."""
        decision = replicated(len(self.placements), len(self.indices.results))
        if not any(isinstance(placement, Shard) for placement in self.placements):
            return decision  # pending sums only: they are completed, and no shard is lost
        # What runs whole may still be seen as a shard, which is a slice of it for free.
        shown = decision.shown
        if blocked is not None and is_divided(self.indices, blocked, self.axis):
            shown = tuple(self.indices.placement(terms, blocked) for terms in self.indices.results)
        where = "its chunks fall between indices"
        if sums_padding:
            where = "its rule does not say what padding counts nothing in its sum"
        elif blocked is not None:
            where = f"its index {blocked.index} must be whole"
            if self.rule.reduce_op != "sum" and is_differentiable(self.call.node):
                where += f", since its {self.rule.reduce_op} is differentiated; detach() it where it is only a constant"
        return replace(decision, shown=shown, gathered=f"{self.call.key}: {where}")

    def _is_preferred(self, decision: Decision) -> bool:
        """Whether a result has a placement that no operand's placement leads to by the index map: it was preferred.

        Users within the graph may rely on it; outputs do not leave the graph so.
        """
        operands = zip(self.indices.operands, self.placements, self.preferred, strict=True)
        found = [self.indices.locate(terms, placement) for terms, placement, preferred in operands if not preferred]
        parts = [part for part in found if part is not None]
        for terms, shown in zip(self.indices.results, decision.shown, strict=True):
            followed = [self.indices.placement(terms, part) for part in parts if self.indices.has(terms, part.index)]
            if isinstance(shown, Shard) and not any(is_same_placement(shown, placement) for placement in followed):
                return True
        return False

    def _can_shard(self, part: IndexPart) -> bool:
        return not self.indices.must_join(part) and is_divided(self.indices, part, self.axis)

    def _is_in_results(self, part: IndexPart) -> bool:
        return any(self.indices.has(terms, part.index) for terms in self.indices.results)

    def _sums_padding(self, part: IndexPart) -> bool:
        """Whether a rank that runs on `part` would reduce over padding."""
        return part.uneven and not all(self.indices.has(terms, part.index) for terms in self.indices.results)
