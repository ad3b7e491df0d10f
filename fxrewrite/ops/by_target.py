"""A table keyed by node targets, compared by identity, because hashing a torch overload takes a microsecond."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["ByTarget"]

Fact = TypeVar("Fact")


class ByTarget(Generic[Fact]):
    """Facts by target; method names are compared as text. Keeps its targets alive, so that ids are not reused."""

    __slots__ = ("_facts", "_targets")

    def __init__(self) -> None:
        self._facts: dict[Any, Fact] = {}
        self._targets: dict[Any, Any] = {}

    def get(self, target: Any) -> Fact | None:
        """Returns the fact, or None."""
        return self._facts.get(target if type(target) is str else id(target))

    def set(self, target: Any, fact: Fact) -> Fact:
        """Stores the fact, and returns it."""
        name = target if type(target) is str else id(target)
        self._targets[name] = target
        self._facts[name] = fact
        return fact

    def forget(self, target: Any) -> None:
        """Removes the fact of the target."""
        name = target if type(target) is str else id(target)
        self._facts.pop(name, None)
        self._targets.pop(name, None)
