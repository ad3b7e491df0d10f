"""Ranks that come to an agreement, or do not; `tests/autosp/test_gloo.py` has what real ones are told."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import fxrewrite.spmd.runtime.agree as module
from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd import Axis, agree


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
