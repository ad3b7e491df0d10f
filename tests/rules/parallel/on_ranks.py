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

from fxrewrite.backends import normalized
from fxrewrite.graph import input_name
from fxrewrite.ops import key
from fxrewrite.spmd import SEND_ROWS, Parallelism, Parallelisms, SpmdReport, contexts
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


def sent_backward(program: fx.GraphModule, values: list[Any]) -> Counter[str]:
    """The collectives of the backward pass, as inductor's partitioner makes it."""
    found = Counter[str]()

    def run(gm: fx.GraphModule, example_inputs: Any) -> Any:  # torch passes them by name
        return make_boxed_func(gm.forward)

    def count(gm: fx.GraphModule, example_inputs: Any) -> Any:
        sent = (node for node in gm.graph.nodes if _is_collective(node) or node.target is SEND_ROWS)
        found.update(key(node).partition("::")[2] for node in sent)
        return run(gm, example_inputs)

    placeholders = program.graph.find_nodes(op="placeholder")
    local = [
        torch.zeros(node.meta["val"].shape, dtype=value.dtype).requires_grad_(value.requires_grad)
        for node, value in zip(placeholders, values, strict=True)
    ]
    aot_function(
        lambda *args: program(*args)[0],
        fw_compiler=run,
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )(*local).backward()
    return found


_NAMES = {
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
        backward = sent_backward(program, values)
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
    said = Counter[str]()
    for collective in report.collectives:
        if collective.direction != "forward":
            said[collective.kind] += collective.count
    assert said == Counter({kind: sum(backward[name] for name in names) for kind, names in _NAMES.items()})
    return Comparison(forward, backward, program, report, max(errors))


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model's loss alone: logits that leave a program leave it whole."""

    def loss(**inputs: Any) -> torch.Tensor:
        return model(**inputs).loss

    return loss
