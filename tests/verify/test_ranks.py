"""Rules with collectives are compared on simulated ranks: what each of them computes, before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxrewrite import Rule, cap, op, where
from fxrewrite.graph import copy_module
from fxrewrite.spmd.group import axis_rank
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.verify.rules import rule_of, verify

NUM_RANKS = 2
GROUP = "0"  # the default process group of a fake mesh
gather, wait = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::wait_tensor"


def on_ranks(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The outputs of all ranks, one after the other; each rank has inputs of its own."""
    of_each_rank = [torch.stack([x * (rank + 1) + rank for rank in range(NUM_RANKS)]) for x in inputs]
    with_rank = copy_module(gm)
    graph = with_rank.graph
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        rank = graph.call_function(axis_rank, (GROUP,))
    for placeholder in placeholders:
        with graph.inserting_after(rank):
            own = graph.call_function(torch.select, (placeholder, 0, rank))
        placeholder.replace_all_uses_with(own, lambda user, own=own: user is not own)
    with_rank.recompile()
    run = run_on_ranks(with_rank, of_each_rank, NUM_RANKS)
    return [value for outputs in run.outputs for value in pytree.tree_leaves(outputs)]


@where.predicate("shape", "x", text="one_part_for_each_rank")
def one_part_for_each_rank(shape: Any, x: fx.Node) -> bool:
    return shape == [NUM_RANKS, *x.meta["val"].shape]


def part_of_gathered(which: Any) -> Rule:
    """The parts of all ranks are gathered and one of them is taken: said to be this rank's own."""
    parts = op("view", op(wait, op(gather, cap("x"), NUM_RANKS, GROUP)), cap("shape", "any"))
    return rule_of(op("select", parts, 0, which), lambda x: x, where.parse("rank(x) >= 1"), one_part_for_each_rank)


@pytest.fixture
def mesh() -> Iterator[None]:
    with fake_mesh((NUM_RANKS,), ("sp",)) as mesh:
        assert mesh.get_group("sp").group_name == GROUP
        yield


@pytest.mark.usefixtures("mesh")
def test_this_ranks_part_of_what_was_gathered_is_what_it_gave() -> None:
    verdict = verify(part_of_gathered(op(axis_rank, GROUP)), run=on_ranks, samples=8)
    assert verdict.ok, str(verdict)
    assert verdict.samples == 8
    assert verdict.gradients == 0, "the outputs of simulated ranks are detached"


@pytest.mark.usefixtures("mesh")
def test_the_first_ranks_part_is_not() -> None:
    verdict = verify(part_of_gathered(0), run=on_ranks, samples=8)
    assert verdict.counterexample is not None
    assert verdict.counterexample.difference.kind == "value"
    assert verdict.counterexample.difference.text.startswith("output 1"), "the second rank's"
