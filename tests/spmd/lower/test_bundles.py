"""Values of a bundle travel in one collective and come back as they would alone: on P ranks, forward and backward."""

from __future__ import annotations

from operator import getitem

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fxrewrite import RuleSet
from fxrewrite.spmd import (
    BUNDLE_RULES,
    COLLECTIVE_RULES,
    COLLECTIVES,
    GLOBAL_SHAPE,
    LOCAL_SHAPES,
    Axis,
    Placement,
    Replicate,
    Shard,
    SpmdContext,
    axis_of,
    axis_rank,
    bundle,
    local_shape,
    redistribute,
)
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.known import Known

Move = tuple[tuple[int, ...], Placement, Placement]
HEADS = [((2, 12, 12, 3), Shard(2), Shard(1)), ((2, 12, 24, 5), Shard(2), Shard(1))]
CASES: dict[str, list[Move]] = {
    "heads and lengths that differ": HEADS,
    "other ranks and dimensions": [*HEADS, ((24, 12), Shard(1), Shard(0, outer=2))],
    "gathers": [((2, 3, 12), Shard(2), Replicate()), ((12, 5), Shard(0), Replicate())],
}


def _program(moves: list[Move], axis: Axis, *, together: bool) -> fx.GraphModule:
    """A rank's part of each input, moved, each by itself or in a bundle."""
    graph, mode = fx.Graph(), FakeTensorMode()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(moves))]
    rank = graph.call_function(axis_rank, (axis.group,))
    rank.meta["val"] = 0
    parts: list[fx.Node] = []
    shapes = dict[fx.Node, tuple[int, ...]]()
    for node, (shape, src, _) in zip(inputs, moves, strict=True):
        local = local_shape(shape, src, axis.size)
        node.meta["val"] = mode.from_tensor(torch.empty(axis.size, *local, dtype=torch.float64))
        parts.append(graph.call_function(torch.ops.aten.select.int, (node, 0, rank)))
        parts[-1].meta["val"] = mode.from_tensor(torch.empty(local, dtype=torch.float64))
        shapes[parts[-1]] = shape
    values = parts
    if together:
        made = graph.call_function(bundle, (parts,))
        made.meta["val"] = [part.meta["val"] for part in parts]
        values = [graph.call_function(getitem, (made, i)) for i in range(len(parts))]
        for value, part in zip(values, parts, strict=True):
            value.meta.update(part.meta)
            shapes[value] = shapes[part]
    moved: list[fx.Node] = []
    for value, (shape, src, dst) in zip(values, moves, strict=True):
        moved.append(graph.call_function(redistribute, (value, src, dst, axis)))
        local = torch.empty(local_shape(shape, dst, axis.size), dtype=torch.float64)
        moved[-1].meta["val"] = mode.from_tensor(local)
        shapes[moved[-1]] = shape
    graph.output(tuple(moved))
    gm = fx.GraphModule({}, graph)
    known = Known(GLOBAL_SHAPE, shapes, LOCAL_SHAPES)
    RuleSet("lower", known, BUNDLE_RULES, COLLECTIVE_RULES).apply(gm, context=SpmdContext(axis))
    return gm


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_one_collective_moves_what_several_would(name: str, num_ranks: int) -> None:
    moves = CASES[name]
    torch.manual_seed(0)
    inputs = [
        torch.randn(num_ranks, *local_shape(shape, src, num_ranks), dtype=torch.float64).requires_grad_()
        for shape, src, _ in moves
    ]
    found = {}
    for together in (False, True):
        with fake_mesh((num_ranks,), ("sp",)) as mesh:
            gm = _program(moves, axis_of(mesh, "sp"), together=together)
            sent = [n for n in gm.graph.nodes if n.target in (COLLECTIVES["all_to_all"], COLLECTIVES["all_gather"])]
            assert len(sent) == (1 if together else len(moves))
            _sum_of_squares(gm)
            found[together] = run_on_ranks(gm, inputs, num_ranks, backward=0)
    for rank in range(num_ranks):
        torch.testing.assert_close(found[True].outputs[rank], found[False].outputs[rank], rtol=0, atol=1e-14)
        for grad, expected in zip(found[True].grads[rank], found[False].grads[rank], strict=True):
            assert expected is not None
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-14)


def _sum_of_squares(gm: fx.GraphModule) -> None:
    """A scalar in front of the outputs, in which every entry counts."""
    output = gm.graph.output_node()
    (moved,) = output.args
    aten = torch.ops.aten
    with gm.graph.inserting_before(output):
        squares = [gm.graph.call_function(aten.mul.Tensor, (value, value)) for value in moved]
        sums = [gm.graph.call_function(aten.sum.default, (square,)) for square in squares]
        total = sums[0]
        for other in sums[1:]:
            total = gm.graph.call_function(aten.add.Tensor, (total, other))
    output.args = ((total, *moved),)
    gm.recompile()
