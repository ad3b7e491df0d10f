"""Ranks show each other what they compiled, at compile time and with a time limit, so that none waits in a collective
that the others never enter."""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd.group import axis_rank, global_ranks, is_fake, store_of
from fxrewrite.spmd.layout import Axis

__all__ = ["agree"]

_rounds: Counter[str] = Counter()
"""Graphs compiled so far by this process, by axis: the ranks compile the same ones in the same order."""


def agree(axis: Axis, text: str, *, timeout: float) -> None:
    """Return once every rank of `axis` has come here with the same `text` (the same graph, in canonical form).

    Raises FxRewriteError on every rank where the texts differ, showing the first differing line, or where a rank does
    not come within `timeout` seconds, naming it. A rank alone on a fake process group has nobody to wait for.
    """
    if is_fake(axis):
        return
    store, ranks, me = store_of(axis), global_ranks(axis), axis_rank(axis.group)
    _rounds[axis.group] += 1
    number = _rounds[axis.group]
    digest = hashlib.sha256(text.encode()).hexdigest()
    store.set(f"{number}/{me}/digest", digest)
    for other in range(axis.size):
        if _read(store, f"{number}/{other}/digest", axis, ranks[other], timeout) != digest:
            store.set(f"{number}/{me}/text", text)  # the other rank comes to the same conclusion, and wants to see it
            theirs = _read(store, f"{number}/{other}/text", axis, ranks[other], timeout)
            raise FxRewriteError(
                f"axis {axis.name}: rank {ranks[me]} and rank {ranks[other]} compiled different graphs; "
                f"first difference: {_first_difference(text, theirs)}; "
                "give every rank the same model and batches of the same shape"
            )


def _read(store: dist.Store, key: str, axis: Axis, rank: int, timeout: float) -> str:
    try:
        store.wait([key], timedelta(seconds=timeout))
    except (dist.DistStoreError, RuntimeError) as error:
        raise FxRewriteError(
            f"axis {axis.name}: rank {rank} compiled nothing within {timeout:g} s; every rank must run the same model "
            "and compile at the same step"
        ) from error
    return store.get(key).decode()


def _first_difference(mine: str, theirs: str) -> str:
    for number, (a, b) in enumerate(zip(mine.splitlines(), theirs.splitlines(), strict=False), 1):
        if a != b:
            return f"line {number}: {a.strip()!r} here, {b.strip()!r} there"
    return f"{len(mine.splitlines())} lines here, {len(theirs.splitlines())} there"
