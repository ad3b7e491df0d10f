"""Collections are fewer while a graph is worked on, and as before afterwards, whatever the caller had set."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from fxrewrite import RuleSet, rule
from fxrewrite.graph.garbage import few_collections


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("limits", "within"),
    [
        ((700, 11, 12), (200_000, 11, 1_000)),
        ((700, 11, 2_000), (200_000, 11, 2_000)),
        ((500_000, 11, 12), (500_000, 11, 12)),
        ((0, 11, 12), (0, 11, 12)),
    ],
)
def test_the_limits_of_the_caller_are_set_back(limits: tuple[int, int, int], within: tuple[int, int, int]) -> None:
    gc.set_threshold(*limits)
    with few_collections():
        with contextlib.suppress(KeyError), few_collections():
            assert gc.get_threshold() == within
            raise KeyError
        assert gc.get_threshold() == within
    assert gc.get_threshold() == limits


def test_a_limit_that_is_set_within_stays() -> None:
    with few_collections():
        gc.set_threshold(900)
    assert gc.get_threshold()[0] == 900


def test_the_last_of_several_threads_sets_it_back() -> None:
    gc.set_threshold(700)
    entered, leave = threading.Event(), threading.Event()

    def work() -> None:
        with few_collections():
            entered.set()
            leave.wait()

    other = threading.Thread(target=work)
    other.start()
    entered.wait()
    with few_collections():
        leave.set()
        other.join()
        assert gc.get_threshold()[0] == 200_000
    assert gc.get_threshold()[0] == 700


def test_a_replacement_runs_within() -> None:
    seen: list[int] = []

    @rule("test.seen")
    def seen_rule(x):  # type: ignore[no-untyped-def]
        return torch.relu(x)

    @seen_rule.replacement
    def _(x):  # type: ignore[no-untyped-def]
        seen.append(gc.get_threshold()[0])
        return torch.sigmoid(x)

    gc.set_threshold(700)
    RuleSet("test", seen_rule).apply(fx.symbolic_trace(lambda x: torch.relu(x)))
    assert seen == [200_000]
    assert gc.get_threshold()[0] == 700
