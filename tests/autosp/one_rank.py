"""A rank's program over a process group of one rank: all collectives run, and the result is one device's.

AutoSP itself leaves a model alone where its axis has one rank. Here it is rewritten, so one card runs what P cards do:
real collectives, and whatever a compiler makes of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from autosp_rules import AutoSPConfig, AutoSPReport
from autosp_rules.transform import transform
from fxrewrite.backends import inner_compiler
from fxrewrite.spmd import axis_of, fix_rank


@contextmanager
def one_rank_group(backend: str) -> Generator[None]:
    """A process group of this process alone: "nccl" for the current card, or "gloo"."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def one_rank_backend(
    config: AutoSPConfig, reports: list[AutoSPReport], **options: Any
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Compiles what rank 0 of 1 runs by the config's inner backend; `options` are those of `torch.compile`."""

    def compiled(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        program, report = transform(gm, config, axis_of(None, config.axis))
        reports.append(report)
        fix_rank(program)
        return inner_compiler(config.inner, **options)(program, example_inputs)

    return compiled


def differences(
    step: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], like: nn.Module | None = None
) -> dict[str, float]:
    """How far `step`, made of the model, is from `like` (or the model itself): of the loss, and of the worst gradient.

    Both start from one state of torch's random number generators.
    """
    like = like or model
    return distance(loss_and_gradients(step, model, inputs), loss_and_gradients(like, like, inputs))


Found = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""A loss, and a gradient for each parameter."""


def loss_and_gradients(step: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]) -> Found:
    """What `step`, made of the model, computes of the inputs."""
    torch.manual_seed(0)
    output = step(**inputs)
    loss = output.loss if hasattr(output, "loss") else output[0]
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def distance(found: Found, expected: Found) -> dict[str, float]:
    """Of the loss, relative to it; and of the worst gradient, relative to the largest entry of all."""
    largest = max(gradient.abs().max().item() for gradient in expected[1])
    pairs = zip(found[1], expected[1], strict=True)
    worst = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
    loss = (found[0].double() - expected[0].double()).abs() / expected[0].double().abs()
    return {"loss": loss.item(), "gradient": worst / largest}
