"""A model under a parallelism on simulated ranks: exact, and what it sends is what the report says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.traceback import preserve_node_meta

from fxrewrite.graph.differentiable import requires_gradient
from fxrewrite.ops import key
from fxrewrite.spmd import Parallelism, Parallelisms, bytes_held, collective_bytes
from fxrewrite.spmd.group import CollectiveKind
from fxrewrite.testing import Simulated, fake_mesh, simulate

IDS = torch.arange(48).reshape(4, 12) % 61
LABELS = torch.where(IDS % 7 == 3, -100, IDS)
KINDS: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "send_rows": "all_to_all",
}
"""The kind of each operator that sends, by its name."""
M = TypeVar("M", bound=nn.Module)


def backward_collectives(program: fx.GraphModule, ranks: int) -> dict[CollectiveKind, tuple[int, int]]:
    """How many collectives of each kind the backward pass has, as inductor's partitioner makes it, and their bytes."""
    found, num_bytes = Counter[CollectiveKind](), Counter[CollectiveKind]()

    def run(gm: fx.GraphModule, example_inputs: Any) -> Any:  # torch passes them by name
        return make_boxed_func(gm.forward)

    def count(gm: fx.GraphModule, example_inputs: Any) -> Any:
        for node in gm.graph.nodes:
            kind = KINDS.get(key(node).partition("::")[2])
            if kind is not None:
                found[kind] += 1
                num_bytes[kind] += round(collective_bytes(kind, bytes_held(node.all_input_nodes[0]), ranks))
        return run(gm, example_inputs)

    inputs = program.graph.find_nodes(op="placeholder")
    with preserve_node_meta():  # such as what is to be computed again
        local = [
            torch.zeros(node.meta["val"].shape, dtype=node.meta["val"].dtype).requires_grad_(requires_gradient(node))
            for node in inputs
        ]
        aot_function(
            lambda *args: fx.Interpreter(program).run(*args)[0],
            fw_compiler=run,
            bw_compiler=count,
            partition_fn=min_cut_rematerialization_partition,
        )(*local).backward()
    return {kind: (found[kind], num_bytes[kind]) for kind in found}


def compared(
    model: nn.Module,
    plan: Parallelism | Parallelisms,
    inputs: dict[str, Any] | None = None,
    ranks: int = 2,
    tolerance: float = 1e-6,
) -> Simulated:
    """The model returns its loss alone; norms and losses of transformers are in float32, hence the tolerance.

    What the report says of the backward pass is what AOTAutograd makes of the program.
    """
    given = inputs or {"input_ids": IDS, "labels": LABELS}
    mesh = {member.axis: ranks for member in plan.members}
    found = simulate(model, given, plan, mesh)
    assert found.error < tolerance, str(found)
    with fake_mesh(tuple(mesh.values()), tuple(mesh)):  # groups of the same names
        backward = backward_collectives(found.program, ranks)
    said = {
        kind: (sum(c.count for c in of_kind), sum(c.bytes_sent for c in of_kind))
        for kind in dict.fromkeys(KINDS.values())
        if (of_kind := [c for c in found.report.collectives if c.kind == kind and c.direction != "forward"])
    }
    if any(key(node).endswith("send_rows") for node in found.program.graph.nodes):  # data decide the rows
        backward, said = ({kind: (count, 0) for kind, (count, _) in of.items()} for of in (backward, said))
    assert said == backward
    return found


def sent_backward(found: Simulated) -> dict[CollectiveKind, int]:
    """The collectives of the backward pass by kind, over all axes."""
    counts = Counter[CollectiveKind]()
    for collective in found.report.collectives:
        if collective.direction != "forward":
            counts[collective.kind] += collective.count  # pyright: ignore[reportArgumentType]
    return dict(counts)


def _own_loss(output: Any, **_: Any) -> torch.Tensor:
    return output.loss


def loss_of(model: M, read: Callable[..., torch.Tensor] = _own_loss) -> M:
    """The model, which returns from now on what is read of its output and inputs, and no logits, which leave whole.

    By a class of its own: a function in place of `forward` would hide the names of modules from Dynamo.
    """
    whole = type(model)

    def forward(self: nn.Module, **inputs: Any) -> torch.Tensor:
        return read(whole.forward(self, **inputs), **inputs)

    model.__class__ = type(whole.__name__, (whole,), {"forward": forward})
    return model
