"""Fewer garbage collections while graphs are read and rewritten, which make many objects and few cycles."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator

__all__ = ["few_collections"]

_OBJECTS = 200_000
"""So many more objects than at the last collection start one."""


class _Limit:
    """The limit of new objects, for as long as somebody is within; several threads may be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._before = 0

    def enter(self) -> None:
        with self._lock:
            self._num_within += 1
            if self._num_within == 1:
                self._before, *older = gc.get_threshold()
                if 0 < self._before < _OBJECTS:  # 0: the caller switched collections off
                    gc.set_threshold(_OBJECTS, *older)

    def leave(self) -> None:
        with self._lock:
            self._num_within -= 1
            now, *older = gc.get_threshold()
            if not self._num_within and now == _OBJECTS:
                gc.set_threshold(self._before, *older)


_LIMIT = _Limit()


@contextlib.contextmanager
def few_collections() -> Generator[None]:
    """Within it, Python looks for cycles after `_OBJECTS` new objects, in place of 700, unless the caller set more.

    By default a third of the time of a long plan goes into collections, each of which walks over objects that are all
    alive. It can be nested, and be in several threads at once: the last to leave sets the limit back.
    """
    _LIMIT.enter()
    try:
        yield
    finally:
        _LIMIT.leave()
