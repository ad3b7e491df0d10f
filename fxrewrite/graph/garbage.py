"""Fewer garbage collections while graphs are read and rewritten, which make many objects and few cycles."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator

_OBJECTS = 200_000
"""So many more objects than at the last collection start one."""
_YOUNGER_COLLECTIONS = 1_000
"""So many collections of younger objects start one of all: more than a plan has."""


class _Limit:
    """The limits of collections, for as long as somebody is within; several threads may be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._before = (0, 0, 0)

    def enter(self) -> None:
        with self._lock:
            self._num_within += 1
            if self._num_within == 1:
                self._before = new, younger, oldest = gc.get_threshold()
                if 0 < new < _OBJECTS:  # 0: the caller switched collections off
                    gc.set_threshold(_OBJECTS, younger, max(oldest, _YOUNGER_COLLECTIONS))

    def leave(self) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within and gc.get_threshold()[0] == _OBJECTS:
                gc.set_threshold(*self._before)


_LIMIT = _Limit()


@contextlib.contextmanager
def few_collections() -> Generator[None]:
    """Within it, Python looks for cycles after `_OBJECTS` new objects, in place of 700, unless the caller set more.

    By default a third of the time of a long plan goes into collections, each of which walks over objects that are all
    alive. Those of the whole process, which torch fills with some 800,000, wait until the plan is done. It can be
    nested, and be in several threads at once: the last to leave sets the limits back.
    """
    _LIMIT.enter()
    try:
        yield
    finally:
        _LIMIT.leave()
