"""A table keyed by node targets, compared by identity, because hashing a torch overload takes a microsecond."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ByTarget(Generic[T]):
    """Facts by target; method names are compared as text.

    The fact of a function goes with it, and of what Python cannot refer to weakly, the target is kept: ids are not
    reused.

    Attributes:
        facts: by the name of a method, and by the id of any other target, for those who cannot wait for `get`.
    """

    __slots__ = ("__weakref__", "_targets", "facts")

    def __init__(self) -> None:
        self.facts: dict[Any, T] = {}
        self._targets: dict[Any, Any] = {}

    def get(self, target: Any) -> T | None:
        """Returns the fact, or None."""
        return self.facts.get(target if type(target) is str else id(target))

    def set(self, target: Any, fact: T) -> T:
        """Stores the fact, and returns it."""
        name = target if type(target) is str else id(target)
        self._targets[name] = self._held(name, target)
        self.facts[name] = fact
        return fact

    def forget(self, target: Any) -> None:
        """Removes the fact of the target."""
        self._drop(target if type(target) is str else id(target))

    def _held(self, name: Any, target: Any) -> Any:
        try:
            return target if type(target) is str else weakref.ref(target, lambda _: self._drop(name))
        except TypeError:
            return target

    def _drop(self, name: Any) -> None:
        self.facts.pop(name, None)
        self._targets.pop(name, None)
