"""A model on one device and on simulated ranks: the loss and every gradient are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autosp_rules import AutoSPConfig, AutoSPReport
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import RankRun, fake_mesh, run_on_ranks
from tests.dynamo import caught


class Ranks(NamedTuple):
    """The program that AutoSP made for ranks, what it reported, and what the ranks computed."""

    program: fx.GraphModule
    report: AutoSPReport
    run: RankRun


def captured(model: Callable[..., Any], inputs: dict[str, Any]) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph of the model, and the tensors and sizes that it would be called with."""
    return caught(model, **inputs)


def on_ranks(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    num_ranks: int,
    config: AutoSPConfig | None = None,
    *,
    backward: int | None = None,
    seed: int = 0,
) -> Ranks:
    """A captured graph on simulated ranks, which start with one state of torch's random number generator.

    With `backward`, the output at that position is differentiated.
    """
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        program, report = transform(gm, config or AutoSPConfig(), axis_of(mesh, "sp"))
        torch.manual_seed(seed)
        return Ranks(program, report, run_on_ranks(program, inputs, num_ranks, backward=backward))


class OneDevice:
    """A model on one device: its loss, the gradients of the tensors that require them, by their ids, and its graph.

    The model returns its loss, or an output that has it first.
    """

    def __init__(self, model: Any, inputs: dict[str, Any], *, seed: int = 0) -> None:
        leaves = [v for v in (*model.parameters(), *inputs.values()) if isinstance(v, torch.Tensor) and v.requires_grad]
        torch.manual_seed(seed)
        output = model(**inputs)
        loss = output if isinstance(output, torch.Tensor) else output[0]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        self.loss, self.seed = loss.detach(), seed
        self.grads = {id(leaf): grad for leaf, grad in zip(leaves, grads, strict=True)}
        self._call = model, inputs

    @cached_property
    def graph(self) -> tuple[fx.GraphModule, list[Any]]:
        """Dynamo's graph and its inputs, captured when they are first read: the model may be changed before."""
        return captured(*self._call)

    def check(
        self,
        num_ranks: int,
        config: AutoSPConfig | None = None,
        *,
        loss: float = 1e-12,
        rtol: float = 1e-9,
        grads: float = 1e-12,
        floor: float = 1.0,
    ) -> Ranks:
        """Asserts that every rank has this loss, and that the gradients of ranks are these.

        Args:
            num_ranks: how many ranks are simulated.
            config: the settings of AutoSP.
            loss: of the loss, the relative difference that is allowed.
            rtol: of each entry of a gradient, the same.
            grads: what may differ beside that, as a share of the largest entry of the gradient ...
            floor: ... or of this share of the largest entry of all gradients, if that is more.
        """
        gm, inputs = self.graph
        results = [node.meta["example_value"] for node in gm.graph.output_node().args[0]]  # in Dynamo's order
        at = next(i for i, value in enumerate(results) if isinstance(value, torch.Tensor) and not value.dim())
        made = on_ranks(gm, inputs, num_ranks, config, backward=at, seed=self.seed)
        assert made.report.slices, "nothing was sharded"
        for outputs in made.run.outputs:
            torch.testing.assert_close(outputs[at], self.loss, rtol=loss, atol=0)
        largest = max(grad.abs().max().item() for grad in self.grads.values() if grad is not None)
        compared = 0
        for value, grad in zip(inputs, made.run.gradients(), strict=True):
            if id(value) in self.grads:
                want = self.grads[id(value)]
                assert (grad is None) == (want is None)
                if want is not None:
                    scale = max(want.abs().max().item(), floor * largest)
                    torch.testing.assert_close(grad, want, rtol=rtol, atol=grads * scale)
                    compared += 1
        assert compared == sum(grad is not None for grad in self.grads.values())
        return made


def assert_equal_to_one_device(
    model: Any,
    inputs: dict[str, Any],
    *,
    ranks: Sequence[int] = (2, 4),
    config: AutoSPConfig | None = None,
    **tolerances: float,
) -> AutoSPReport:
    """The loss and gradients are one device's for each number of ranks; the report for the last of them."""
    one_device = OneDevice(model, inputs)
    return [one_device.check(num_ranks, config, **tolerances) for num_ranks in ranks][-1].report


def check_one_program(model: nn.Module, batches: Iterable[torch.Tensor], num_ranks: int) -> None:
    """One program serves ids of all these lengths: loss and gradients of float64 are those of one device."""
    compiled: list[fx.GraphModule] = []
    found: list[tuple[Sequence[Any], Sequence[torch.Tensor | None]]] = []
    torch._dynamo.reset()
    with fake_mesh((num_ranks,), ("sp",)) as mesh:

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled.append(transform(gm, AutoSPConfig(), axis_of(mesh, "sp"))[0])

            def call(*args: Any) -> Any:
                run = run_on_ranks(compiled[-1], args, num_ranks, backward=0)
                found.append((args, run.gradients()))
                return run.outputs[-1]

            return call

        run = torch.compile(model, backend=backend)
        for ids in batches:
            torch._dynamo.mark_dynamic(ids, 1)
            expected = model(ids)
            model.zero_grad()
            expected.backward()
            torch.testing.assert_close(run(ids), expected.detach(), rtol=1e-12, atol=0)
            for value, grad in zip(*found[-1], strict=True):
                if isinstance(value, nn.Parameter):
                    torch.testing.assert_close(grad, value.grad, rtol=1e-9, atol=1e-14)
    assert len(compiled) == 1
