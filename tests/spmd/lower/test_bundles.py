"""Values of a bundle travel in one collective and come back as they would alone: on P ranks, forward and backward."""

from __future__ import annotations

from functools import partial, reduce
from operator import getitem

import pytest
import torch
from torch import fx

from fxrewrite import RuleSet
from fxrewrite.spmd import (
    BUNDLE_RULES,
    COLLECTIVE_RULES,
    COLLECTIVES,
    LOCAL_SHAPES,
    Axis,
    Placement,
    Replicate,
    Shard,
    axis_of,
    bundle,
    local_shape,
)
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.spmd.lower.test_collectives import Program

aten = torch.ops.aten
Move = tuple[tuple[int, ...], Placement, Placement]
HEADS = [((2, 12, 12, 3), Shard(2), Shard(1)), ((2, 12, 24, 5), Shard(2), Shard(1))]
CASES: dict[str, list[Move]] = {
    "heads and lengths that differ": HEADS,
    "other ranks and dimensions": [*HEADS, ((24, 12), Shard(1), Shard(0, outer=2))],
    "gathers": [((2, 3, 12), Shard(2), Replicate()), ((12, 5), Shard(0), Replicate())],
}


def _program(moves: list[Move], inputs: list[torch.Tensor], axis: Axis, *, together: bool) -> fx.GraphModule:
    """A rank's part of each input, moved, each by itself or in a bundle, after the sum of their squares."""
    program = Program(inputs, [shape for shape, *_ in moves], axis)
    values = program.parts
    if together:
        made = program.graph.call_function(bundle, (values,))
        made.meta["val"] = [value.meta["val"] for value in values]
        values = [program.call(getitem, made, i) for i in range(len(values))]
        program.shapes |= dict(zip(values, program.shapes.values(), strict=True))
    moved = [program.move(value, src, dst) for value, (_, src, dst) in zip(values, moves, strict=True)]
    sums = [program.call(aten.sum.default, program.call(aten.mul.Tensor, value, value)) for value in moved]
    total = reduce(partial(program.call, aten.add.Tensor), sums)
    return program.lowered(RuleSet("both", BUNDLE_RULES, COLLECTIVE_RULES, needs=(LOCAL_SHAPES,)), total, *moved)[0]


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
            gm = _program(moves, inputs, axis_of(mesh, "sp"), together=together)
            sent = [n for n in gm.graph.nodes if n.target in (COLLECTIVES["all_to_all"], COLLECTIVES["all_gather"])]
            assert len(sent) == (1 if together else len(moves))
            found[together] = run_on_ranks(gm, inputs, num_ranks, backward=0)
    for rank in range(num_ranks):
        torch.testing.assert_close(found[True].outputs[rank], found[False].outputs[rank], rtol=0, atol=1e-14)
        for grad, expected in zip(found[True].grads[rank], found[False].grads[rank], strict=True):
            assert expected is not None
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-14)
