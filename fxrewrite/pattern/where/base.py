"""What a constraint is, and how it reads a captured value: only from fake values, and without adding guards."""

from __future__ import annotations

from collections.abc import Mapping, Set as AbstractSet
from typing import Any, Protocol

import torch
from torch import fx

from fxrewrite import ops


class Constraint(Protocol):
    """A condition on captures: `names` are the captures that it reads, `str` is its text form."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def why_not(self, captures: Mapping[str, Any]) -> str:
        """Returns an empty string if the condition holds, else a clause that says what was found."""
        ...


def why_not_each(constraint: Constraint, captures: Mapping[str, Any], lists: AbstractSet[str]) -> str:
    """Returns why the condition does not hold; of captures that are lists, it must hold for the items at every place.

    A condition with an attribute `whole` reads these of its captures as lists.
    """
    names = [name for name in constraint.names if name in lists] if lists else ()
    names = [name for name in names if name not in getattr(constraint, "whole", ())]
    if not names:
        return constraint.why_not(captures)
    if len({len(captures[name]) for name in names}) > 1:
        return f"the lists {', '.join(names)} have {', '.join(str(len(captures[name])) for name in names)} items"
    for index in range(len(captures[names[0]])):
        item = {**captures, **{name: captures[name][index] for name in names}}
        why_not = "" if any(item[name] is None for name in names) else constraint.why_not(item)
        if why_not:
            return f"of item {index}: {why_not}"
    return ""


class BaseConstraint:
    """Base of the constraints here: if a capture does not have the asked property, the condition does not hold."""

    __slots__ = ()

    def why_not(self, captures: Mapping[str, Any]) -> str:
        """Returns why the condition does not hold; a capture without the property that it reads is a reason, too."""
        try:
            return self._why_not(captures)
        except NoAnswerError as reason:
            return str(reason)

    def _why_not(self, captures: Mapping[str, Any]) -> str:
        raise NotImplementedError


class OneName(BaseConstraint):
    """A condition on one capture, its field `name`."""

    __slots__ = ()
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


class NoAnswerError(Exception):
    """A capture does not have the property that a condition reads; the message becomes the reason of the failure."""


def node_of(captures: Mapping[str, Any], name: str) -> fx.Node:
    """Returns the captured node.

    Raises:
        NoAnswerError: the capture is a Python value.
    """
    captured = captures[name]
    if not isinstance(captured, fx.Node):
        raise NoAnswerError(f"{name} is {captured!r}, not a value of the graph")
    return captured


def tensor_of(captures: Mapping[str, Any], name: str) -> torch.Tensor:
    """Returns the fake tensor of a captured node.

    Raises:
        NoAnswerError: the capture is a Python value, or the node is not known to be a tensor.
    """
    node = node_of(captures, name)
    found = ops.value(node)
    if found is ops.MISSING:
        raise NoAnswerError(f"%{node.name} has no value in its metadata")
    if not isinstance(found, torch.Tensor):
        raise NoAnswerError(f"%{node.name} is not a tensor")
    return found
