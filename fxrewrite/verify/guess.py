"""Guesses values of what a pattern captures or ignores, for the call in which they occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxrewrite.ops.schemas import Parameter
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import Capture, Ignore, Op
from fxrewrite.pattern.where.facts import ListRelation
from fxrewrite.verify.draw import Draw
from fxrewrite.verify.facts import Facts
from fxrewrite.verify.literals import legal_value
from fxrewrite.verify.sample import Binding
from fxrewrite.verify.shapes import shape_of
from fxrewrite.verify.tensors import InputSpec

_OF_CLASSES = frozenset({"aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd"})
"""Losses whose target is class numbers, which a guess by shape alone would seldom be."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """The source of values that are not decided yet.

    Attributes:
        pattern: the pattern whose constraints must hold.
        facts: what these constraints say in advance.
        draw: random choices.
    """

    pattern: Pattern
    facts: Facts
    draw: Draw

    def value(
        self,
        part: Capture | Ignore,
        term: Op,
        parameter: Parameter,
        context: Sequence[torch.Tensor],
        given: Mapping[str, Sequence[int]],
        bindings: Mapping[str, Any],
        attempt: int,
    ) -> Binding:
        """Guesses the value of a capture, or of something ignored, as an argument of a call.

        Args:
            part: the capture, or `...`.
            term: the call.
            parameter: the argument.
            context: the tensors that the operator is called with so far.
            given: the shapes of those that are arguments of their own, by name.
            bindings: what is decided.
            attempt: how many guesses failed.

        Raises:
            NoValueError: arguments of this kind cannot be guessed.
        """
        draw = self.draw
        kind = part.kind if isinstance(part, Capture) else "any"
        name = part.name.partition("@")[0] if isinstance(part, Capture) else ""
        if kind == "optional" and draw.flag(0.3):
            return None
        if kind in ("node", "param", "optional") or (kind == "any" and parameter.kind == "Tensor"):
            if kind == "any" and parameter.optional and draw.flag():
                return None
            if term.key in _OF_CLASSES and parameter.name == "target" and self._may_be_classes(name):
                return draw.spec(_of_classes(context), torch.int64)
            stated = shape_of(term.key, parameter.name, given, draw)
            spec = self.facts.tensor(name, context, bindings, draw, attempt, stated)
            before = self._before(part, bindings)
            if before is not None and draw.flag(0.6):
                spec = replace(spec, shape=before.shape, dtype=before.dtype)
            return replace(spec, is_param=spec.is_param or kind == "param")
        if kind == "any" and parameter.kind == "List[Tensor]":
            first = self.facts.tensor(name, context, bindings, draw, attempt)
            others = range(draw.integer(0, 2))
            return [first, *(self.facts.tensor(name, [first.blank()], bindings, draw, attempt) for _ in others)]
        sizes = self._sizes_of_items(name, bindings)
        if sizes is not None:
            return sizes
        constants = self.facts.constants.get(name)
        if constants and draw.flag(0.7):
            return draw.choice(*constants)
        return legal_value(parameter, term.key, context, draw)

    def _may_be_classes(self, name: str) -> bool:
        """Whether a target is of class numbers in this guess; where no constraint says its dtype, in half of them."""
        dtypes = self.facts.dtypes.get(name)
        return self.draw.flag() if dtypes is None else torch.int64 in dtypes

    def _sizes_of_items(self, name: str, bindings: Mapping[str, Any]) -> list[int] | None:
        """Returns the sizes that a list of numbers has by `are_sizes`; None if no such items are known."""
        for constraint in self.pattern.where:
            if not isinstance(constraint, ListRelation) or constraint.dim is None or constraint.names[0] != name:
                continue
            dim = bindings.get(constraint.dim) if isinstance(constraint.dim, str) else constraint.dim
            items = [item for key, item in bindings.items() if key.partition("@")[0] == constraint.names[1]]
            specs = [item for item in items if isinstance(item, InputSpec)]
            if specs and type(dim) is int and all(-len(spec.shape) <= dim < len(spec.shape) for spec in specs):
                return [spec.shape[dim] for spec in specs]
        return None

    def _before(self, part: Capture | Ignore, bindings: Mapping[str, Any]) -> InputSpec | None:
        """Returns the tensor that the item before in a list of any length is; most operators take tensors alike."""
        name, _, number = part.name.partition("@") if isinstance(part, Capture) else ("", "", "")
        if not number.isdigit() or name not in self.pattern.lists:
            return None
        before = bindings.get(f"{name}@{int(number) - 1}")
        return before if isinstance(before, InputSpec) else None


def _of_classes(context: Sequence[torch.Tensor]) -> list[int]:
    """The shape of class numbers for scores [N, C, ...] or [C]."""
    shape = list(context[0].shape) if context else []
    return shape[:1] * (len(shape) > 1) + shape[2:]
