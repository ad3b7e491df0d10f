"""Ranks that come to an agreement, or do not; `tests/autosp/test_gloo.py` has what real ones are told."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import fxrewrite.spmd.runtime.agree as module
from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd import Axis, agree
from fxrewrite.spmd.runtime.agree import SizesOfCalls


def test_a_rank_that_comes_when_others_stopped_waiting_does_not_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for them in a collective, for ever."""
    store, axis = dist.HashStore(), Axis("sp", 2, "ranks of a test")
    monkeypatch.setattr(module, "is_fake", lambda axis: False)
    monkeypatch.setattr(module, "store_of", lambda axis: store)
    monkeypatch.setattr(module, "global_ranks", lambda axis: [4, 5])
    for rank, why in ((0, "rank 5 compiled nothing within 0.05 s"), (1, "rank 4 stopped waiting before rank 5 came")):
        module._rounds.clear()  # each of the two has a process of its own
        monkeypatch.setattr(module, "axis_rank", lambda group, rank=rank: rank)
        with pytest.raises(FxRewriteError, match=why):
            agree(axis, "a graph", timeout=0.05)


def test_one_rank_at_least_sees_that_others_make_a_call_with_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three have a new length: the one whose next rank has the old one says so."""
    store, axis = dist.HashStore(), Axis("sp", 3, "ranks of a test")
    monkeypatch.setattr(module, "is_fake", lambda axis: False)
    monkeypatch.setattr(module, "store_of", lambda axis: store)
    monkeypatch.setattr(module, "global_ranks", lambda axis: [4, 5, 6])
    ranks: list[SizesOfCalls] = []
    for rank in range(3):
        module._rounds.clear()  # each has a process of its own
        monkeypatch.setattr(module, "axis_rank", lambda group, rank=rank: rank)
        ranks.append(SizesOfCalls(axis, 0.05, "pass the same batch"))
    for call, sizes in ((1, "ids [2, 8]"), (2, "ids [2, 8]")):
        for rank in reversed(ranks):
            rank.check(call, sizes)
    ranks[2].check(3, "ids [2, 8]")
    with pytest.raises(
        FxRewriteError, match=r"rank 5 and rank 6 make call 3 .*: ids \[2, 9\] here, ids \[2, 8\] there"
    ):
        ranks[1].check(3, "ids [2, 9]")
    ranks[0].check(3, "ids [2, 9]")
    with pytest.raises(FxRewriteError, match=r"rank 6 did not make call 67 of a program within 0\.05 s"):
        ranks[1].check(67, "ids [2, 7]")  # its key still holds call 3
