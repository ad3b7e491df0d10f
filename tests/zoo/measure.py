"""One model against one device: loss and every gradient, for each attention implementation and number of ranks."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import fx
from torch.utils._pytree import tree_map

from autosp_rules import AutoSPConfig, AutoSPError
from tests.autosp.one_device import captured, on_ranks
from tests.zoo import diffusion
from tests.zoo.models import build, inputs_of
from tests.zoo.others import others

ATTENTIONS = ("sdpa", "eager")
RANKS = (2, 4)
LOSS_TOLERANCE, GRAD_TOLERANCE = 1e-6, 1e-9
FLOAT32_NOISE = 1e-4
"""Where a gradient's error is above the tolerance, and none is more than this part of the largest entry of all of them,
it is measured again without the model's casts to float32."""

Status = Literal["exact", "wrong", "refused", "not applicable", "failed"]


class Cell(BaseModel):
    """What came of one model, attention implementation and number of ranks."""

    model: str
    attention: str
    num_ranks: int
    status: Status
    why: str = ""
    loss_error: float = 0.0
    """Relative to the loss."""
    grad_error: float = 0.0
    """Relative to the largest entry of the gradient: that of the worst parameter, named by `worst`."""
    worst: str = ""
    float32: bool = False
    """The model computes in float32 somewhere, so the errors are of the same graph with float64 there."""
    sharded: bool = True
    whole: float = 0.0
    """Share of the operations of matrix products that every rank computes whole."""
    forward_bytes: int = 0
    """Bytes that a rank sends in the forward pass."""
    bytes_by_hand: int = 0
    """Those of Ulysses by hand, of a diffusion transformer."""
    lines: list[str] = []
    """What AutoSP reports that it did not do, or not as well as it could be."""
    seconds: float = 0.0
    mesh: str = ""
    """Of a mesh of several axes: the axes that were asked for, such as "dp=2,sp=2,tp=2"."""
    over: str = ""
    """Those of them that the model was run over."""
    sent: dict[str, int] = {}
    """Collectives over each of them in the forward program."""
    held: dict[str, float] = {}
    """Of the entries of parameters, the share that is in shards over each of them."""

    def __str__(self) -> str:
        errors = f"loss {self.loss_error:.0e}, gradients {self.grad_error:.0e} ({self.worst})"
        said = errors if self.status in ("exact", "wrong") else self.why
        return f"{self.model} {self.attention} P={self.num_ranks} {self.status}: {said}"


class NotApplicable(Exception):  # noqa: N818  # no error: the model has no place in the table
    """Why a model does not build, run or compile to one graph on one device."""


@dataclass(frozen=True)
class OneDevice:
    """A captured model, what it was called with, and the loss and gradients that it gives on one device."""

    gm: fx.GraphModule
    inputs: list[Any]
    loss: torch.Tensor
    grads: dict[int, torch.Tensor | None]
    """By the id of the parameter, which is one of `inputs`."""
    names: dict[int, str]
    config: AutoSPConfig = field(default_factory=AutoSPConfig)
    model: torch.nn.Module | None = None
    called_with: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the call, those among `inputs` by identity."""

    @classmethod
    def of(cls, model: torch.nn.Module, inputs: dict[str, Any], config: AutoSPConfig | None = None) -> OneDevice:
        """The model run on one device, and captured; raises NotApplicable where it cannot be."""
        try:
            loss = model(**inputs).loss
            loss.backward()
        except Exception as error:
            raise NotApplicable(f"does not run: {line_of(error)}") from error
        if not bool(loss.isfinite()):
            raise NotApplicable("its loss is not finite")
        grads = {id(p): p.grad for p in model.parameters()}
        names = {id(p): name for name, p in model.named_parameters()}
        model.zero_grad()
        try:
            gm, example_inputs = captured(model, inputs)
        except Exception as error:
            raise NotApplicable(f"does not compile to one graph: {line_of(error)}") from error
        return cls(gm, example_inputs, loss.detach(), grads, names, config or AutoSPConfig(), model, inputs)

    @property
    def loss_at(self) -> int:
        """The position of the loss among the graph's outputs."""
        return _loss_at(self.gm)

    def errors(
        self, losses: Sequence[torch.Tensor], found: Sequence[Sequence[torch.Tensor | None]], loss_tolerance: float
    ) -> dict[str, Any]:
        """The fields of a cell that say how far ranks are from one device, and `noise`, by the largest entry of all.

        Args:
            losses: of the ranks.
            found: of each input, the gradients that ranks have, or the one that all of them together have.
            loss_tolerance: up to which the loss is exact.
        """
        loss_error = max(relative(loss, self.loss) for loss in losses)
        largest = max(grad.abs().max().item() for grad in self.grads.values() if grad is not None)
        grad_error, worst, noise = 0.0, "", 0.0
        for value, of_value in zip(self.inputs, found, strict=True):
            for grad in of_value if id(value) in self.grads else ():
                want, zero = self.grads[id(value)], torch.zeros_like(value)
                have, wanted = (zero if grad is None else grad), (zero if want is None else want)
                error = relative(have, wanted, 1e-6 * largest)
                noise = max(noise, relative(have, wanted, largest))
                if not error <= grad_error:
                    grad_error, worst = error, self.names[id(value)]
        is_exact = loss_error <= loss_tolerance and grad_error <= GRAD_TOLERANCE
        status = "exact" if is_exact else "wrong"
        return {"status": status, "loss_error": loss_error, "grad_error": grad_error, "worst": worst, "noise": noise}

    def in_float64(self) -> OneDevice:
        """The same with float64 wherever the model has float32: in its casts, parameters and buffers.

        A sum over tokens in float32 has an error of 1e-7 on one device already; what is left in float64 is ours.
        """
        gm = _in_float64(self.gm)
        inputs = [_wider(value) for value in self.inputs]
        loss = fx.Interpreter(gm).run(*inputs)[_loss_at(gm)]
        loss.backward()
        grads: dict[int, torch.Tensor | None] = {}
        names: dict[int, str] = {}
        for value, before in zip(inputs, self.inputs, strict=True):
            if id(before) in self.grads:
                grads[id(value)], names[id(value)] = value.grad, self.names[id(before)]
                value.grad = None
        wide = {id(before): value for value, before in zip(inputs, self.inputs, strict=True)}
        called = {name: wide.get(id(value), value) for name, value in self.called_with.items()}
        return replace(self, gm=gm, inputs=inputs, loss=loss.detach(), grads=grads, names=names, called_with=called)


def _in_float64(of: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, and of the bodies of its checkpointed layers."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(of.graph, {}))
    gm = fx.GraphModule(of, graph)
    gm.meta = of.meta
    for node in gm.graph.nodes:
        if node.op == "call_method" and node.target == "float":
            node.target = "double"
        if node.op in ("call_function", "call_method"):
            node.args, node.kwargs = tree_map(_wider_dtype, (node.args, node.kwargs))
        if node.op == "placeholder":
            node.meta = {key: _wider(value) for key, value in node.meta.items()}
        body = getattr(of, node.target, None) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            setattr(gm, node.target, _in_float64(body))
    gm.recompile()
    return gm


def _wider_dtype(value: Any) -> Any:
    return torch.float64 if value in (torch.float32, torch.bfloat16) else value


def _wider(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    wide = value.detach().double()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(wide, value.requires_grad)
    return wide.requires_grad_(value.requires_grad)


def _loss_at(gm: fx.GraphModule) -> int:
    for at, node in enumerate(gm.graph.output_node().all_input_nodes):
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
            return at
    raise NotApplicable("its graph returns no scalar loss")


def attentions_of(name: str) -> tuple[str, ...]:
    """The attention implementations that a model is measured with."""
    return ATTENTIONS[:1] if name in diffusion.MODELS else ATTENTIONS


def ranks_of(name: str) -> tuple[int, ...]:
    """The numbers of ranks that a model is measured on."""
    return diffusion.RANKS if name in diffusion.MODELS else RANKS


def measure(name: str, attention: str, ranks: tuple[int, ...] | None = None) -> list[Cell]:
    """The cells of one model, one for each number of ranks."""
    ranks = ranks or ranks_of(name)
    started = time.perf_counter()
    made: dict[str, Any] = {"model": name, "attention": attention}
    try:
        one_device, is_wide = on_one_device(name, attention)
    except NotApplicable as error:
        seconds = time.perf_counter() - started
        return [Cell(**made, num_ranks=n, status="not applicable", why=str(error), seconds=seconds) for n in ranks]
    return [_cell(made | {"num_ranks": n}, one_device, is_wide) for n in ranks]


def on_one_device(name: str, attention: str) -> tuple[OneDevice, bool]:
    """The model run and captured, and whether it had to be in float32 for that, as some only are.

    Raises NotApplicable with the reason where it cannot be.
    """
    try:
        return _run_and_capture(name, attention, torch.float64), False
    except NotApplicable as error:
        if "does not run" not in str(error):
            raise
        try:
            return _run_and_capture(name, attention, torch.float32).in_float64(), True
        except NotApplicable:
            raise error from None


def _run_and_capture(name: str, attention: str, dtype: torch.dtype) -> OneDevice:
    other = others().get(name) or diffusion.other(name)
    try:
        if other is None:
            model, inputs = build(name, attention, dtype), inputs_of(name)
        else:
            model, inputs = other.build(attention, dtype), other.inputs(dtype)
    except Exception as error:
        raise NotApplicable(f"does not build: {line_of(error)}") from error
    return OneDevice.of(model, inputs, None if other is None else other.config)


def _cell(made: dict[str, Any], one_device: OneDevice, is_wide: bool) -> Cell:
    started = time.perf_counter()
    found: dict[str, Any]
    try:
        found = compare(one_device, made["num_ranks"]) | {"float32": is_wide}
        if found["grad_error"] > GRAD_TOLERANCE and found["noise"] < FLOAT32_NOISE:
            found = compare(one_device.in_float64(), made["num_ranks"]) | {"float32": True}
    except AutoSPError as error:
        found = {"status": "refused", "why": " ".join(str(error).split())}
    except Exception as error:  # noqa: BLE001  # a cell for every model, whatever it brings to light
        found = {"status": "failed", "why": line_of(error)}
    return Cell(**made, **found, seconds=time.perf_counter() - started)


def compare(one_device: OneDevice, num_ranks: int) -> dict[str, Any]:
    """The fields of a cell that say how far `num_ranks` simulated ranks are from one device.

    Raises AutoSPError where AutoSP refuses the model.
    """
    at = one_device.loss_at
    _, report, run = on_ranks(one_device.gm, one_device.inputs, num_ranks, one_device.config, backward=at)
    found = [[grad] for grad in run.gradients()]
    errors = one_device.errors([outputs[at] for outputs in run.outputs], found, LOSS_TOLERANCE)
    sent = sum(one.bytes_sent for one in report.collectives if one.direction == "forward")
    return {
        **errors,
        "sharded": bool(report.collectives),
        "whole": report.whole_share,
        "forward_bytes": sent,
        "bytes_by_hand": diffusion.sent_by_hand(one_device.gm, num_ranks),
        "lines": list(report.lines),
    }


def relative(a: torch.Tensor, b: torch.Tensor, floor: float = 1e-300) -> float:
    """Largest difference by the largest entry of `b`, or by `floor` where that is more."""
    if not bool(a.isfinite().all()):
        return float("inf")
    return ((a - b).abs().max() / b.abs().max().clamp_min(floor)).item()


def line_of(error: BaseException) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
