"""One model trained twice from the same weights on the same batches, on one device and across ranks, and compared.

    job = Job("llama", text_files(None), {"hidden_size": 256, "num_hidden_layers": 4}, ranks=2)
    for row in compare(job, AutoSPBackend(job.config)):    # in every rank of an initialized process group
        print(row)                                       # on rank 0

Both runs are real: each has its own weights and its own AdamW. Their losses stay together but not bit for bit, because
float32 sums in another order round differently, and AdamW divides by the gradient's own size, which lifts that rounding
in every weight whose gradient is near zero. So what decides is measured without that drift: at each step, one device
computes loss and gradients of the same batch also at the weights that the sequence-parallel run has reached.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autosp_rules.demo.job import Job, build_config, build_model, is_masked, make_batch, zero_dropout

LOSS_BOUND = 1e-5
"""Largest relative difference of the losses at equal weights. A float32 mean, summed in another order, moves by a few
6e-8; one label lost at a shard's border, the smallest mistake there is, moves a mean over N targets by about 1 / N."""

GRADIENT_BOUND = 1e-3
"""Largest difference of a parameter's gradients at equal weights, see `gradient_difference`. One device disagrees with
itself by up to 5e-5 when the rows of its batch change places; sharding mistakes start at 1e-2."""

DRIFT_BOUND = 1e-3
"""Largest relative difference of the losses of the two runs, each at its own weights. At this learning rate it stays
below 1e-5 for hundreds of steps."""

LEARNING_RATE = 1e-3

_NEGLIGIBLE = 1e-4


@dataclass(frozen=True)
class StepRow:
    """One optimizer step of both runs, as rank 0 sees it."""

    step: int
    loss_one_device: float
    loss_sharded: float
    loss_difference: float
    """relative, at the sharded run's weights"""
    gradient_difference: float
    """of the worst parameter, at the sharded run's weights"""
    worst_parameter: str

    @property
    def drift(self) -> float:
        """Relative difference of the losses of the two runs, each at its own weights."""
        return relative_difference(self.loss_sharded, self.loss_one_device)

    @property
    def is_equal(self) -> bool:
        """Whether all differences are within their bounds; a NaN is not."""
        return (
            self.loss_difference <= LOSS_BOUND
            and self.gradient_difference <= GRADIENT_BOUND
            and self.drift <= DRIFT_BOUND
        )


class TrainingRun:
    """A model in training: compiled, with its AdamW."""

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any]) -> None:
        self.model = model
        self._compiled = torch.compile(model, backend=backend)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def backward(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of a batch; its gradients are in the parameters' `grad` afterwards."""
        self._optimizer.zero_grad()
        loss = self._compiled(**batch).loss
        loss.backward()
        return loss.item()

    def update(self) -> None:
        """One optimizer step with the gradients of the last `backward`."""
        self._optimizer.step()

    @contextmanager
    def at_weights_of(self, model: nn.Module) -> Generator[None]:
        """Inside, this run computes with the weights of `model` (shared, not copied), which has the same parameters."""
        own = [p.data for p in self.model.parameters()]
        for parameter, other in zip(self.model.parameters(), model.parameters(), strict=True):
            parameter.data = other.data
        try:
            yield
        finally:
            for parameter, data in zip(self.model.parameters(), own, strict=True):
                parameter.data = data


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks, as DDP, FSDP and ZeRO do."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def relative_difference(value: float, expected: float) -> float:
    """|value - expected| / |expected|."""
    return abs(value - expected) / abs(expected)


def worst(differences: Iterable[float]) -> float:
    """The largest of some differences; a NaN is larger than any number."""
    return max(differences, key=lambda value: (math.isnan(value), value))


def gradient_difference(model: nn.Module, expected: nn.Module) -> tuple[float, str]:
    """The worst parameter's max |g - e| / max |e|, and its name; infinite where only one model has a gradient.

    A parameter whose gradients are all below 1e-4 of the model's largest is measured against that: some are zero in
    exact arithmetic (a key's bias under softmax), and only rounding is left to compare.
    """
    parameters = zip(model.named_parameters(), expected.parameters(), strict=True)
    grads = {name: (p.grad, q.grad) for (name, p), q in parameters if p.grad is not None or q.grad is not None}
    least = _NEGLIGIBLE * max(float(e.abs().max()) for _, e in grads.values() if e is not None)
    differences = {name: _difference(g, e, least) for name, (g, e) in grads.items()}
    largest = worst(differences.values())
    return largest, next(name for name, value in differences.items() if value is largest)


def _difference(grad: Tensor | None, expected: Tensor | None, least: float) -> float:
    if grad is None or expected is None:
        return math.inf
    return float((grad - expected).abs().max()) / max(float(expected.abs().max()), least)


def compare(
    job: Job, backend: str | Callable[..., Any], doing: Callable[[str], None] = lambda _: None
) -> Iterator[StepRow]:
    """Train `job` in both ways on the initialized process group; rank 0 yields a row a step, the others nothing.

    `backend` compiles the run across ranks, `job.config.inner` the one on one device; `doing` is told what happens now.
    """
    config = build_config(job.model, job.overrides)
    zero_dropout(config)
    model = build_model(config, job.seed)
    sharded = TrainingRun(model, backend)
    alone = TrainingRun(copy.deepcopy(model), job.config.inner) if dist.get_rank() == 0 else None
    for step in range(1, job.steps + 1):
        batch = make_batch(job, step, masked=is_masked(model))
        doing(f"compiling for {job.ranks} ranks" if step == 1 else "training")
        loss = sharded.backward(batch)
        average_gradients(model)
        if alone is not None:
            doing("compiling for one device" if step == 1 else "training")
            yield _compare_step(step, batch, loss, sharded, alone)
        sharded.update()
    dist.barrier()  # the other ranks stay until rank 0 has done its part


def _compare_step(
    step: int, batch: Mapping[str, Tensor], loss: float, sharded: TrainingRun, alone: TrainingRun
) -> StepRow:
    """One step of the run on one device, and what one device computes at the sharded run's weights."""
    with alone.at_weights_of(sharded.model):
        expected = alone.backward(batch)
        difference, worst = gradient_difference(sharded.model, alone.model)
    own = alone.backward(batch)
    alone.update()
    return StepRow(step, own, loss, relative_difference(loss, expected), difference, worst)
