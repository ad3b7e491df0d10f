"""A table by node target: targets are told apart by identity, since hashing a torch overload takes a microsecond."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["ByTarget"]

Fact = TypeVar("Fact")


class ByTarget(Generic[Fact]):
    """Facts by target; names of methods are told apart by their text. Keeps its targets alive, so no id comes twice."""

    __slots__ = ("_facts", "_targets")

    def __init__(self) -> None:
        self._facts: dict[Any, Fact] = {}
        self._targets: dict[Any, Any] = {}

    def get(self, target: Any) -> Fact | None:
        """The fact, or None."""
        return self._facts.get(target if type(target) is str else id(target))

    def set(self, target: Any, fact: Fact) -> Fact:
        """Keep the fact, and give it back."""
        name = target if type(target) is str else id(target)
        self._targets[name] = target
        self._facts[name] = fact
        return fact

    def forget(self, target: Any) -> None:
        """Afterwards `get` gives None."""
        name = target if type(target) is str else id(target)
        self._facts.pop(name, None)
        self._targets.pop(name, None)
