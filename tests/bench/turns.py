"""Functions on processes of their own take turns: what they time in one round, they time side by side.

A machine's speed changes, so ways that run one after the other are not comparable. Here every way has its processes
from the start, each does its rounds, and a round of one way begins when the round of the way before has ended.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import TCPStore

_PATIENCE = dt.timedelta(hours=1)


@dataclass(frozen=True)
class Turns:
    """The turns of way `index` of `count`, whose `processes` take `rounds` each, by the parent's store at `port`."""

    port: int
    index: int
    count: int
    processes: int
    rounds: int

    @contextmanager
    def take(self, number: int) -> Iterator[None]:
        """Round `number`, from 0, after those of the other ways before it."""
        store = TCPStore("localhost", self.port, is_master=False, timeout=_PATIENCE)
        store.wait([f"begins {number} {self.index}"])
        yield
        if store.add(f"ended {number} {self.index}", 1) == self.processes:
            self._pass_on(store, number)

    def leave(self) -> None:
        """Pass on every turn, for processes that have failed."""
        store = TCPStore("localhost", self.port, is_master=False, timeout=_PATIENCE)
        for number in range(self.rounds):
            store.wait([f"begins {number} {self.index}"])
            self._pass_on(store, number)

    def _pass_on(self, store: TCPStore, number: int) -> None:
        following = self.index + 1
        store.set(f"begins {number + following // self.count} {following % self.count}", "")


def run_in_turns(runs: Sequence[Callable[[Turns], Any]], processes: int, rounds: int) -> list[Any]:
    """What each run returns, or the error that it raises; a run starts its processes, and each takes all rounds."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    store.set("begins 0 0", "")

    def outcome(run: Callable[[Turns], Any], index: int) -> Any:
        turns = Turns(store.port, index, len(runs), processes, rounds)
        try:
            return run(turns)
        except Exception as error:  # noqa: BLE001  # whatever one way raises, the others go on
            turns.leave()
            return error

    with ThreadPoolExecutor(len(runs)) as pool:
        return list(pool.map(outcome, runs, range(len(runs))))
