"""A model under a parallelism on simulated ranks, compared with one device: the loss and every gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.traceback import preserve_node_meta

from fxrewrite.backends import normalized
from fxrewrite.graph import input_name
from fxrewrite.ops import key
from fxrewrite.spmd import SEND_ROWS, Parallelism, Parallelisms, SpmdReport, bytes_held, collective_bytes, contexts
from fxrewrite.spmd.group import CollectiveKind
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.autosp.one_device import captured

IDS = torch.arange(48).reshape(4, 12) % 61
LABELS = torch.where(IDS % 7 == 3, -100, IDS)


@dataclass
class Comparison:
    """What was found on ranks that agree with one device."""

    forward: Counter[tuple[str, str]]
    """Collectives of the forward pass by axis and kind."""
    backward: Counter[str]
    """Collectives of AOTAutograd's backward pass by kind, over all axes."""
    program: fx.GraphModule
    report: SpmdReport
    largest_error: float
    """Of gradients, relative to the largest gradient."""


def sent_backward(program: fx.GraphModule, values: list[Any], ranks: int) -> tuple[Counter[str], Counter[str]]:
    """The collectives of the backward pass, as inductor's partitioner makes it, by operator; and the bytes sent."""
    found, num_bytes = Counter[str](), Counter[str]()
    kinds = {name: kind for kind, names in _NAMES.items() for name in names}

    def run(gm: fx.GraphModule, example_inputs: Any) -> Any:  # torch passes them by name
        return make_boxed_func(gm.forward)

    def count(gm: fx.GraphModule, example_inputs: Any) -> Any:
        for node in gm.graph.nodes:
            if _is_collective(node) or node.target is SEND_ROWS:
                name = key(node).partition("::")[2]
                found[name] += 1
                num_bytes[name] += round(collective_bytes(kinds[name], bytes_held(node.all_input_nodes[0]), ranks))
        return run(gm, example_inputs)

    placeholders = program.graph.find_nodes(op="placeholder")
    local = [
        torch.zeros(node.meta["val"].shape, dtype=value.dtype).requires_grad_(value.requires_grad)
        for node, value in zip(placeholders, values, strict=True)
    ]
    with preserve_node_meta():  # such as what is to be computed again
        aot_function(
            lambda *args: fx.Interpreter(program).run(*args)[0],
            fw_compiler=run,
            bw_compiler=count,
            partition_fn=min_cut_rematerialization_partition,
        )(*local).backward()
    return found, num_bytes


_NAMES: dict[CollectiveKind, tuple[str, ...]] = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_into_tensor",),
    "reduce_scatter": ("reduce_scatter_tensor",),
    "all_to_all": ("all_to_all_single", "send_rows"),
}
"""The operators of each kind of collective."""


def _is_collective(node: fx.Node) -> bool:
    return "c10d" in key(node) and "wait" not in key(node)


def compared(
    model: Callable[..., Any],
    parameters: nn.Module,
    plan: Parallelism | Parallelisms,
    inputs: dict[str, Any] | None = None,
    ranks: int = 2,
    tolerance: float = 1e-6,
) -> Comparison:
    """The model returns its loss alone; norms and losses of transformers are in float32, hence the tolerance."""
    given = inputs or {"input_ids": IDS, "labels": LABELS}
    loss = model(**given)
    loss.backward()
    expected = {name: p.grad for name, p in parameters.named_parameters() if p.grad is not None}
    parameters.zero_grad()
    gm, values = captured(model, given)
    program = normalized(gm)
    axes = tuple(member.axis for member in plan.members)
    with fake_mesh((ranks,) * len(axes), axes) as mesh:
        made = plan.plan().apply(program, context=contexts(mesh))
        report = SpmdReport.of(made, program, dict.fromkeys(axes, ranks))
        run = run_on_ranks(program, values, mesh, backward=0)
        backward, num_bytes = sent_backward(program, values, ranks)
    for outputs in run.outputs:
        torch.testing.assert_close(outputs[0], loss.detach(), rtol=tolerance, atol=0)
    names = map(input_name, gm.graph.find_nodes(op="placeholder"))
    grads = zip(names, run.gradients(), strict=True)
    found = {name: grad for name, grad in grads if grad is not None}
    largest = max(grad.abs().max().item() for grad in expected.values())
    assert found.keys() <= expected.keys() | given.keys()
    assert len(found.keys() & expected.keys()) == len(expected)
    errors = [(found[name] - grad).abs().max().item() / largest for name, grad in expected.items()]
    assert max(errors) < tolerance, max(errors)
    sent = filter(_is_collective, program.graph.nodes)
    forward = Counter((node.meta["axis"], key(node).partition("::")[2]) for node in sent)
    for kind, names in _NAMES.items():
        said = [c for c in report.collectives if c.kind == kind and c.direction != "forward"]
        assert sum(c.count for c in said) == sum(backward[name] for name in names), kind
        if not backward["send_rows"]:  # of which data decide the rows
            assert sum(c.bytes_sent for c in said) == sum(num_bytes[name] for name in names), kind
    return Comparison(forward, backward, program, report, max(errors))


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model's loss alone: logits that leave a program leave it whole."""

    def loss(**inputs: Any) -> torch.Tensor:
        return model(**inputs).loss

    return loss
