"""A lowered redistribution moves what it says, forward and backward: on P ranks, against cutting and joining the whole.

A rank's part of a value is cut from the whole here, in torch functions alone; the rules do it with slices and
collectives. A redistribution is linear in the parts of all ranks, so its backward must be the transpose: that of the
cutting and joining, which autograd knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autosp_rules.slices import SLICE_RULES
from fxrewrite import RefusedError, RuleSet
from fxrewrite.ops import key
from fxrewrite.spmd import (
    COLLECTIVE_RULES,
    GLOBAL_SHAPE,
    LOCAL_SHAPES,
    Axis,
    Parallelism,
    Partial,
    Placement,
    Replicate,
    Shard,
    SpmdContext,
    axis_of,
    axis_rank,
    param,
    redistribute,
)
from fxrewrite.testing import fake_mesh, run_on_ranks, simulate
from tests.known import Known

aten = torch.ops.aten
SHAPES = {2: [(4,), (4, 3, 8), (8, 4)], 3: [(6,), (3, 12), (6, 2, 9)], 4: [(8,), (16, 3, 8), (4, 2, 4)]}
RULES = {
    (Replicate, Shard): "collectives.slice",
    (Shard, Replicate): "collectives.all_gather",
    (Shard, Shard): "collectives.all_to_all",
    (Partial, Replicate): "collectives.all_reduce",
    (Partial, Shard): "collectives.reduce_scatter",
    (Shard, Partial): "collectives.own_chunk",
}
"""Which rule lowers what propagation asks for."""


def placements(shape: Sequence[int], num_ranks: int) -> Iterator[Placement]:
    """Every placement that a value of this shape can have, with one run of a dimension, two and four."""
    yield Replicate()
    yield Partial()
    for dim, size in enumerate(shape):
        yield from (Shard(dim, outer) for outer in (1, 2, 4) if size % (outer * num_ranks) == 0)


def moves() -> Iterator[tuple[int, tuple[int, ...], Placement, Placement]]:
    for num_ranks, shapes in SHAPES.items():
        for shape in shapes:
            for src, dst in itertools.permutations(placements(shape, num_ranks), 2):
                if (type(src), type(dst)) in RULES:
                    yield num_ranks, shape, src, dst


def part(whole: torch.Tensor, placement: Placement, rank: int, num_ranks: int) -> torch.Tensor:
    """What a rank holds of a value that is no sum: all of it, or its chunk of each run."""
    if not isinstance(placement, Shard):
        return whole
    runs = whole.unflatten(placement.dim, (placement.outer, num_ranks, -1))
    return runs.select(placement.dim + 1, rank).flatten(placement.dim, placement.dim + 1)


def moved(parts: Sequence[torch.Tensor], src: Placement, dst: Placement, rank: int) -> torch.Tensor:
    """What a rank has after a move; a summand is the rank's chunk, with zeros in place of the others."""
    if isinstance(src, Shard) and isinstance(dst, Partial):
        parts = [own if i == rank else torch.zeros_like(own) for i, own in enumerate(parts)]
    return part(joined(parts, src, rank), dst, rank, len(parts))


def joined(parts: Sequence[torch.Tensor], placement: Placement, rank: int) -> torch.Tensor:
    """The whole value, as a rank knows it when all have told theirs."""
    if isinstance(placement, Replicate):
        return parts[rank]
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0)
    runs = [each.unflatten(placement.dim, (placement.outer, -1)) for each in parts]
    return torch.stack(runs, placement.dim + 1).flatten(placement.dim, placement.dim + 2)


class Program:
    """A graph of a rank's parts of values: `inputs` are the parts of all ranks, of values with these global shapes."""

    def __init__(self, inputs: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], axis: Axis) -> None:
        self.graph, self.mode, self.axis = fx.Graph(), FakeTensorMode(), axis
        nodes = [self.graph.placeholder(f"x{i}") for i in range(len(inputs))]
        for node, value in zip(nodes, inputs, strict=True):
            node.meta["val"] = self.mode.from_tensor(value.detach())
        rank = self.graph.call_function(axis_rank, (axis.group,))
        rank.meta["val"] = 0
        self.parts = [self.call(aten.select.int, node, 0, rank) for node in nodes]
        self.shapes = dict(zip(self.parts, map(tuple, shapes), strict=False))

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        return node

    def move(self, value: fx.Node, src: Placement, dst: Placement) -> fx.Node:
        node = self.graph.call_function(redistribute, (value, src, dst, self.axis))
        self.shapes[node] = self.shapes[value]
        with self.mode:
            local = part(torch.empty(self.shapes[node], dtype=value.meta["val"].dtype), dst, 0, self.axis.size)
        node.meta["val"] = local
        return node

    def lowered(self, rules: RuleSet, *outputs: fx.Node) -> tuple[fx.GraphModule, list[str]]:
        """The local program, and the rules that made it."""
        self.graph.output(outputs)
        gm = fx.GraphModule({}, self.graph)
        report = RuleSet("lower", Known(GLOBAL_SHAPE, self.shapes, LOCAL_SHAPES), rules).apply(
            gm, context=SpmdContext(self.axis)
        )
        assert not [node for node in gm.graph.nodes if key(node).endswith("redistribute")]
        return gm, [entry.rule for entry in report.rules if entry.rewrites]


def numbered(num_ranks: int, shape: Sequence[int], placement: Placement, *, seed: int) -> torch.Tensor:
    """Random parts of all ranks, stacked: equal where every rank holds the whole, else each its own."""
    torch.manual_seed(seed)
    like = part(torch.empty(tuple(shape)), placement, 0, num_ranks)
    each = [torch.randn(like.shape, dtype=torch.float64) for _ in range(num_ranks)]
    return torch.stack([each[0]] * num_ranks if isinstance(placement, Replicate) else each)


@pytest.mark.parametrize(("num_ranks", "shape", "src", "dst"), list(moves()), ids=str)
def test_every_move(num_ranks: int, shape: tuple[int, ...], src: Placement, dst: Placement) -> None:
    parts = numbered(num_ranks, shape, src, seed=0).requires_grad_()
    weights = torch.randn(num_ranks, *part(torch.empty(shape), dst, 0, num_ranks).shape, dtype=torch.float64)
    expected = [moved(parts.unbind(), src, dst, rank) for rank in range(num_ranks)]
    (gradient,) = torch.autograd.grad((torch.stack(expected) * weights).sum(), parts)

    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        program = Program([parts, weights], [shape], axis_of(mesh, "sp"))
        own, weight = program.parts
        value = program.move(own, src, dst)
        total = program.call(aten.sum.default, program.call(aten.mul.Tensor, value, weight))
        gm, fired = program.lowered(COLLECTIVE_RULES, total, value)
        run = run_on_ranks(gm, [parts, weights], num_ranks, backward=0)

    assert fired == [RULES[type(src), type(dst)]]
    value = gm.graph.output_node().args[0][1].meta["val"]
    for rank in range(num_ranks):
        found = run.outputs[rank][1]
        assert value.shape == found.shape == expected[rank].shape
        torch.testing.assert_close(found, expected[rank].detach(), rtol=0, atol=1e-14)
        own = run.grads[rank][0]  # a rank reads its own part alone, so the gradient of the others is 0
        assert own is not None
        torch.testing.assert_close(own[rank], gradient[rank], rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("are_labels", [True, False])
def test_slices_that_have_names(num_ranks: int, are_labels: bool) -> None:
    """Integers that a loss reads are labels, others positions; AutoSP says which it cut."""
    ids, logits = torch.arange(2 * num_ranks) % 3, torch.randn(num_ranks, 2, 3)
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        given = [torch.stack([ids] * num_ranks), logits]
        program = Program(given, [ids.shape], axis_of(mesh, "sp"))
        whole, weight = program.parts
        moved = program.move(whole, Replicate(), Shard(0))
        read = [program.call(aten.cross_entropy_loss.default, weight, moved)] if are_labels else []
        gm, fired = program.lowered(
            RuleSet("slices", SLICE_RULES, COLLECTIVE_RULES, needs=(LOCAL_SHAPES,)), moved, *read
        )
        run = run_on_ranks(gm, given, num_ranks)
    assert fired == ["autosp.shard_label_ids" if are_labels else "autosp.shard_position_ids"]
    for rank in range(num_ranks):
        assert torch.equal(run.outputs[rank][0], part(ids, Shard(0), rank, num_ranks))


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum() + self.weight.detach().to(torch.int16).amax(0).sum()


def test_what_no_process_group_sends_is_said() -> None:
    plan = Parallelism("rows", axis="tp", place={param("weight"): Shard(0)})
    with pytest.raises(RefusedError, match=r"process groups do not send torch.int16 at .*; cast it to int32 before"):
        simulate(Narrow(), {"x": torch.ones(4, 8)}, plan, {"tp": 2})
