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
from fxrewrite.testing import RankRun, fake_mesh, run_on_ranks, simulate
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
    """`redistribute(parts[rank], src, dst)` as a graph, and the sum of its result by `weights[rank]`."""

    def __init__(self, parts: torch.Tensor, weights: torch.Tensor, shape: Sequence[int], axis: Axis) -> None:
        self.graph, self.mode, self.axis, self.shape = fx.Graph(), FakeTensorMode(), axis, tuple(shape)
        self.inputs = [parts, weights]
        nodes = [self._input(name, value) for name, value in (("parts", parts), ("weights", weights))]
        self.rank = self.graph.call_function(axis_rank, (axis.group,))
        self.rank.meta["val"] = 0
        self.part, self.weight = (self.call(aten.select.int, node, 0, self.rank) for node in nodes)
        self.shapes = {self.part: self.shape}

    def _input(self, name: str, value: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
        return node

    def move(self, src: Placement, dst: Placement) -> fx.Node:
        node = self.graph.call_function(redistribute, (self.part, src, dst, self.axis))
        with self.mode:
            local = part(torch.empty(self.shape, dtype=self.part.meta["val"].dtype), dst, 0, self.axis.size)
        node.meta["val"] = local
        self.shapes[node] = self.shape
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
        program = Program(parts.detach(), weights, shape, axis_of(mesh, "sp"))
        value = program.move(src, dst)
        total = program.call(aten.sum.default, program.call(aten.mul.Tensor, value, program.weight))
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


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.some(1)
def test_the_mean_gradient_is_that_of_the_whole(num_ranks: int) -> None:
    """Whole inputs, a cut, a move, and the global loss on every rank: what data parallelism averages is right."""
    shape = (2 * num_ranks, 4 * num_ranks)
    shards = [placement for placement in placements(shape, num_ranks) if isinstance(placement, Shard)]
    for src, dst in itertools.product(shards, [Replicate(), *shards]):
        run = _loss_of_moved(num_ranks, shape, src, dst)
        weights = _weights(shape)
        for outputs in run.outputs:
            torch.testing.assert_close(outputs[0], (_weights(shape, seed=1) * weights).sum(), rtol=0, atol=1e-12)
        torch.testing.assert_close(run.gradients()[0], weights, rtol=0, atol=1e-14)


def _weights(shape: Sequence[int], seed: int = 2) -> torch.Tensor:
    return torch.randn(tuple(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _loss_of_moved(num_ranks: int, shape: tuple[int, ...], src: Shard, dst: Placement) -> RankRun:
    """sum(x * weights), with both cut: x by `src` and moved to `dst`, the weights by `dst`."""
    whole, weights = _weights(shape, seed=1).requires_grad_(), _weights(shape)
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        axis = axis_of(mesh, "sp")
        graph, mode, shapes = fx.Graph(), FakeTensorMode(), dict[fx.Node, Sequence[int]]()
        inputs = [graph.placeholder(name) for name in ("x", "weights")]
        for node, value in zip(inputs, (whole, weights), strict=True):
            node.meta["val"] = mode.from_tensor(value)

        def move(node: fx.Node, src: Placement, dst: Placement) -> fx.Node:
            if src == dst:
                return node
            moved = graph.call_function(redistribute, (node, src, dst, axis))
            of = shapes[moved] = shapes.get(node, node.meta["val"].shape)
            with mode:
                local = part(torch.empty(of, dtype=torch.float64), dst, 0, num_ranks)
            moved.meta["val"] = local
            return moved

        x = move(move(inputs[0], Replicate(), src), src, dst)
        product = graph.call_function(aten.mul.Tensor, (x, move(inputs[1], Replicate(), dst)))
        total = graph.call_function(aten.sum.default, (product,))
        with mode:
            product.meta["val"] = aten.mul.Tensor(x.meta["val"], x.meta["val"])
            total.meta["val"] = aten.sum.default(product.meta["val"])
        graph.output((move(total, Partial(), Replicate()) if isinstance(dst, Shard) else total,))
        gm = fx.GraphModule({}, graph)
        RuleSet("lower", Known(GLOBAL_SHAPE, shapes, LOCAL_SHAPES), COLLECTIVE_RULES).apply(
            gm, context=SpmdContext(axis)
        )
        return run_on_ranks(gm, [whole, weights], num_ranks, backward=0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("are_labels", [True, False])
def test_slices_that_have_names(num_ranks: int, are_labels: bool) -> None:
    """Integers that a loss reads are labels, others positions; AutoSP says which it cut."""
    ids, logits = torch.arange(2 * num_ranks) % 3, torch.randn(num_ranks, 2, 3)
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        program = Program(torch.stack([ids] * num_ranks), logits, ids.shape, axis_of(mesh, "sp"))
        moved = program.move(Replicate(), Shard(0))
        read = [program.call(aten.cross_entropy_loss.default, program.weight, moved)] if are_labels else []
        gm, fired = program.lowered(
            RuleSet("slices", SLICE_RULES, COLLECTIVE_RULES, needs=(LOCAL_SHAPES,)), moved, *read
        )
        run = run_on_ranks(gm, program.inputs, num_ranks)
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
