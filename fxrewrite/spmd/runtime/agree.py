"""Ranks show each other what they compiled or are called with, with a time limit, so that none waits in a collective
that the others never enter."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxrewrite.errors import FxRewriteError, named_line
from fxrewrite.spmd.group import axis_rank, global_ranks, is_fake, store_of
from fxrewrite.spmd.placement import Axis

_GONE = "gone"
"""In place of the digest of a rank that waited for others in vain, and does not come to what they agree on later."""
_SAME_GRAPHS = (
    "give every rank the same model and batches of the same shape; a model that iterates over a set does so in another "
    "order in each process"
)
_KEPT = 2
"""Agreements whose entries stay in the store."""
_rounds: Counter[tuple[str, ...]] = Counter()
"""Agreements so far of this process, by what tells the stores of axes apart: the ranks of one come to the same ones in
the same order, in whatever mesh the axis is."""


def agree(
    axis: Axis,
    text: str,
    *,
    timeout: float,
    differ: str = "compiled different graphs",
    absent: str = "compiled nothing",
    hint: str = _SAME_GRAPHS,
    together: str = "every rank must run the same model and compile at the same step",
) -> None:
    """Return once every rank of `axis` has come here with the same `text` (the same graph, in canonical form).

    Raises FxRewriteError on every rank where the texts differ, showing the first differing line, or where a rank does
    not come within `timeout` seconds, naming it. A rank alone on a fake process group has nobody to wait for.

    Args:
        differ: what two ranks did whose texts differ, for the error.
        absent: what a rank did that does not come.
        hint: what to do where texts differ.
        together: what to do where a rank does not come.
    """
    if is_fake(axis):
        return
    store, ranks, me = store_of(axis), global_ranks(axis), axis_rank(axis.group)
    place = (axis.name, *map(str, ranks))
    _rounds[place] += 1
    number = _rounds[place]

    def read(other: int, what: str) -> str:
        try:
            store.wait([f"{number}/{other}/{what}"], timedelta(seconds=timeout))
        except (dist.DistStoreError, RuntimeError) as error:
            store.set(f"{number}/{me}/digest", _GONE)
            raise FxRewriteError(
                f"axis {axis.name}: rank {ranks[other]} {absent} within {timeout:g} s; {together}"
            ) from error
        return store.get(f"{number}/{other}/{what}").decode()

    digest = hashlib.sha256(text.encode()).hexdigest()
    store.set(f"{number}/{me}/digest", digest)
    if number > _KEPT:  # every rank has come to the last agreement, hence has read the one before
        store.delete_key(f"{number - _KEPT}/{me}/digest")
    for other in range(axis.size):
        theirs = read(other, "digest")
        if theirs == _GONE:
            raise FxRewriteError(
                f"axis {axis.name}: rank {ranks[other]} stopped waiting before rank {ranks[me]} came; {together}"
            )
        if theirs != digest:
            store.set(f"{number}/{me}/text", text)  # the other rank comes to the same conclusion, and wants to see it
            raise FxRewriteError(
                f"axis {axis.name}: rank {ranks[me]} and rank {ranks[other]} {differ}; "
                f"first difference: {_first_difference(text, read(other, 'text'))}; {hint}"
            )


def agree_along(texts: Iterable[tuple[Axis, str, Mapping[str, Any]]]) -> None:
    """Agree along several axes, one after the other, with the options of `agree` for each.

    Where ranks of one axis differ, they tell those of the other axes, which raise as well instead of waiting.
    """
    first: FxRewriteError | None = None
    for axis, text, said in texts:
        try:
            agree(axis, text if first is None else f"stopped: {first}", **said)
        except FxRewriteError as error:
            first = first or error
    if first is not None:
        raise first


@contextmanager
def compiling(axes: Sequence[Axis], timeout: float) -> Generator[None]:
    """Inside, a program is compiled that the ranks of these axes agreed on; where one cannot, the others raise as well.

    Raises:
        FxRewriteError: another rank could not compile it, or did not end within `timeout` seconds.
    """
    said = {
        "timeout": timeout,
        "differ": "did not both compile what they agreed on",
        "absent": "did not end compiling",
        "hint": "the rank that could not has the error",
    }
    try:
        yield
    except Exception as error:
        with suppress(FxRewriteError):  # other ranks raise it
            agree_along((axis, f"could not compile: {named_line(error)}", said) for axis in axes)
        raise
    agree_along((axis, "compiled", said) for axis in axes)


class SizesOfCalls:
    """Shows the other ranks of an axis with which sizes this one makes each call of a program for many sizes.

    Nobody waits for what is shown, which costs one message to the store. A rank whose sizes are new reads those of the
    next one on the axis. Where ranks part, one of them is new and has a next one with other sizes: it raises before the
    program runs. Those whose sizes are as before wait in a collective, until their launcher ends them, as torchrun does
    at the first error of a rank.

    Args:
        axis: of the ranks.
        timeout: how long to wait for the next rank to make the call, in seconds.
        hint: what to do where they differ.
    """

    def __init__(self, axis: Axis, timeout: float, hint: str) -> None:
        self._axis, self._timeout, self._hint = axis, timeout, hint
        self._last = ""
        self._is_alone = is_fake(axis)
        if self._is_alone:
            return
        self._store, self._ranks, self._rank = store_of(axis), global_ranks(axis), axis_rank(axis.group)
        place = ("sizes", axis.name, *map(str, self._ranks))
        _rounds[place] += 1
        self._program = f"sizes/{_rounds[place]}"

    def check(self, call: int, sizes: str) -> None:
        """Shows the sizes of this call, which every rank counts alike, and compares them where they are new here.

        Raises:
            FxRewriteError: the next rank makes this call with other sizes, or not within the timeout.
        """
        if self._is_alone:
            return
        self._store.set(self._key(call, self._rank), f"{call} {sizes}")
        is_new, self._last = sizes != self._last, sizes
        if not is_new or call == 1:  # which is compared as a whole
            return
        other = (self._rank + 1) % self._axis.size
        theirs = self._shown(call, other)
        if theirs != sizes:
            raise FxRewriteError(
                f"axis {self._axis.name}: rank {self._ranks[self._rank]} and rank {self._ranks[other]} make call "
                f"{call} of a program with other sizes: {sizes} here, {theirs} there; {self._hint}"
            )

    def _key(self, call: int, rank: int) -> str:
        """Keys are used again, so that the store does not grow; a rank is not so many calls ahead of another."""
        return f"{self._program}/{rank}/{call % 64}"

    def _shown(self, call: int, other: int) -> str:
        """The sizes of another rank at this call."""
        end = time.monotonic() + self._timeout
        with suppress(dist.DistStoreError, RuntimeError):
            self._store.wait([self._key(call, other)], timedelta(seconds=self._timeout))
            while True:
                number, _, theirs = self._store.get(self._key(call, other)).decode().partition(" ")
                if int(number) >= call or time.monotonic() > end:
                    break
                time.sleep(0.001)
            if int(number) == call:
                return theirs
        raise FxRewriteError(
            f"axis {self._axis.name}: rank {self._ranks[other]} did not make call {call} of a program within "
            f"{self._timeout:g} s; every rank makes the same calls"
        )


def _first_difference(mine: str, theirs: str) -> str:
    for number, (a, b) in enumerate(zip(mine.splitlines(), theirs.splitlines(), strict=False), 1):
        if a != b:
            return f"line {number}: {a.strip()!r} here, {b.strip()!r} there"
    return f"{len(mine.splitlines())} lines here, {len(theirs.splitlines())} there"
