"""How an operator with an index map runs on placed operands: one of its indices is sharded, or none."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxrewrite.errors import refuse
from fxrewrite.graph.differentiable import is_differentiable
from fxrewrite.graph.sizes import is_same_size, quotient, require_divisible
from fxrewrite.spmd.facts import REQUIRED
from fxrewrite.spmd.layouts.notation import IndexMap, IndexPart
from fxrewrite.spmd.layouts.rule import Call, LayoutRule
from fxrewrite.spmd.placement import Axis, Placement, Shard, is_same_placement
from fxrewrite.spmd.propagation.decision import Decision, replicated, spread


def is_divided(indices: IndexMap, part: IndexPart, axis: Axis) -> bool:
    """Whether every rank can have a chunk of an index."""
    return part.uneven or require_divisible(quotient(indices.sizes[part.index], part.within), axis.size)


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
        clears_padding: whether padding that would count in a sum is cleared before the operator. Bodies of higher-order
            operators hold no such node.
    """

    call: Call
    rule: LayoutRule
    indices: IndexMap
    placements: tuple[Placement, ...]
    preferred: tuple[bool, ...]
    axis: Axis
    clears_padding: bool

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
        blocked = next((part for part in parts if part.index in self.indices.whole or self._is_split(part)), None)
        moved = self._moved(blocked, parts) if blocked is not None else None
        if moved is not None:
            return moved
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
        if self._is_split(blocked):
            part = IndexPart(blocked.index, uneven=blocked.uneven)
            if self._can_shard(part):
                return spread(self.indices, part, home=blocked, why=f"chunks of {blocked.index} must be in one run")
        for index in self.rule.move_to:
            part = IndexPart(index)
            if index in self.indices.sizes.keys() - self.indices.whole and is_divided(self.indices, part, self.axis):
                return spread(self.indices, part, home=home, why=f"{blocked.index} must be whole: moved to {index}")
        return None

    def _sharded(self, part: IndexPart) -> Decision | None:
        """How the operator runs over an index; None if padding would count in a sum."""
        sums_padding = self.clears_padding and self._sums_padding(part)
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
        is_allowed = part.index not in self.indices.whole and not self._is_split(part)
        return is_allowed and is_divided(self.indices, part, self.axis)

    def _is_split(self, part: IndexPart) -> bool:
        """Whether a rank's chunk is in several runs of an index that must be in one."""
        return part.index in self.indices.in_one_run and not is_same_size(part.within, 1)

    def _is_in_results(self, part: IndexPart) -> bool:
        return any(self.indices.has(terms, part.index) for terms in self.indices.results)

    def _sums_padding(self, part: IndexPart) -> bool:
        """Whether a rank that runs on `part` would reduce over padding."""
        return part.uneven and not all(self.indices.has(terms, part.index) for terms in self.indices.results)
