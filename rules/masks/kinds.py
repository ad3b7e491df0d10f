"""What a mask means: causal, a window, chunks, a prefix, documents, padding, a bias, or several of them.

Cost models read a `MaskKind`, and reports print it; no rule computes attention from it. `rules.masks.naming` finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import fx

from fxrewrite import Edit
from fxrewrite.graph import Fact


class MaskCondition(Enum):
    """What a part of a mask compares; `{}` in the text is the number of the `MaskPart`."""

    CAUSAL = "causal"
    WINDOW = "window {}"
    WINDOW_TO_BOTH_SIDES = "window {} to both sides"
    CHUNKS = "chunks of {}"
    PREFIX = "causal after a prefix of {}"
    POSITIONS = "a condition on positions"
    BIAS_OF_POSITIONS = "a bias of positions"
    KEY_PADDING = "key padding"
    QUERY_PADDING = "query padding"
    DOCUMENTS = "documents"
    GIVEN_POSITIONS = "order of given positions"
    BIAS = "a bias"
    DATA = "a condition on data"


@dataclass(frozen=True, slots=True)
class MaskPart:
    """One of the conditions whose conjunction is the mask."""

    condition: MaskCondition
    number: int = 0
    """Number of keys of a window, a chunk or a prefix; 0 for other conditions."""

    def __str__(self) -> str:
        return self.condition.value.format(self.number)


@dataclass(frozen=True, slots=True)
class MaskKind:
    """What a mask means: it keeps the keys that all parts keep."""

    parts: tuple[MaskPart, ...] = ()

    @property
    def hides_later_keys(self) -> bool:
        """Whether no row keeps a key at a later position."""
        return any(part.condition is MaskCondition.CAUSAL for part in self.parts)

    def __str__(self) -> str:
        return " and ".join(map(str, self.parts)) or "nothing hidden"


MASK_KIND = Fact[MaskKind]("mask kind")
"""What a mask means, or the mask that attention has inside."""
CAUSAL = MaskKind((MaskPart(MaskCondition.CAUSAL),))
NOTHING_HIDDEN = MaskKind()


def kind_of(node: fx.Node) -> MaskKind | None:
    """What was written down of a mask, of what it is a part of, or of attention that reads it; None for all others."""
    while (kind := MASK_KIND.of(node)) is None and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return kind


def name_mask(edit: Edit, node: fx.Node, kind: MaskKind | None) -> None:
    """Records what a mask means, if that is known."""
    if kind is not None:
        edit.set_fact(node, MASK_KIND, kind)
