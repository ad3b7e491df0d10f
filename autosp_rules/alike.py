"""What the ranks of an axis must have alike when they call a program: the batch, and generators that draw for all.

    called_alike(run, program, axis)(*inputs)     `run(*inputs)`, or the same error on every rank

Graphs are compared when they are compiled; what only a call shows is compared here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autosp_rules.errors import AutoSPError
from autosp_rules.random import draws_alike
from fxrewrite import FxRewriteError
from fxrewrite.graph import source_line
from fxrewrite.ops import fake_value, is_parameter
from fxrewrite.spmd import COLLECTIVES, Axis, agree

__all__ = ["called_alike", "say_not_compiled"]

_SECONDS = 3600.0
"""By so much a rank may be slower than another to compile."""


def called_alike(run: Callable[..., Any], program: fx.GraphModule, axis: Axis) -> Callable[..., Any]:
    """`run`, the compiled `program`, called only where the ranks are alike; else AutoSPError on every rank.

    The first call compares shapes, and the entries of what is integers, which tell one batch from another. Every call
    of a program in which something must draw the same numbers on every rank compares the states of the generators: it
    sends 16 bytes and waits for them.
    """
    inputs = program.graph.find_nodes(op="placeholder")
    drawn = draws_alike(program)
    devices = sorted({_device_of(node) for node in drawn}, key=str)
    is_first = True

    def call(*values: Any) -> Any:
        nonlocal is_first
        if is_first:
            passed = [(n.target, v) for n, v in zip(inputs, values, strict=True) if not is_parameter(n)]
            _agree_on_call(axis, "\n".join(f"{name}: {_looks(value)}" for name, value in passed))
            is_first = False
        if drawn and _differs(_number([_state_of(device) for device in devices]), values, axis):
            raise AutoSPError.of(
                f"the random number generators of the ranks of axis {axis.name} differ before a call, but "
                f"%{drawn[0].name} {source_line(drawn[0])} must draw the same numbers on every rank",
                hint="seed all ranks alike, torch.manual_seed(seed), and let what only some ranks draw, such as a data "
                "loader's order, draw by a torch.Generator of its own",
            )
        return run(*values)

    return call


def say_not_compiled(axis: Axis, error: Exception) -> None:
    """Let the ranks that have compiled know, in front of their first call, that this one could not."""
    try:
        _agree_on_call(axis, f"could not compile: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    except AutoSPError:
        return  # which is what the others raise


def _agree_on_call(axis: Axis, text: str) -> None:
    try:
        agree(
            axis,
            text,
            timeout=_SECONDS,
            differ="do not make the same call",
            absent="did not call what it had compiled",
            hint="every rank of the axis compiles, and passes the same whole batch: sample by the data axis, as "
            "DistributedSampler(dataset, num_replicas=mesh['dp'].size(), rank=mesh.get_local_rank('dp'))",
        )
    except FxRewriteError as error:
        raise AutoSPError.of(str(error)) from error


def _looks(value: Any) -> str:
    """An input's shape, and a number for its entries where they are integers."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    entries = "" if value.is_floating_point() or value.is_complex() else f" {_number([value]):014x}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{entries}"


def _number(tensors: Sequence[torch.Tensor]) -> int:
    """One number of 56 bits for the entries."""
    data = b"".join(tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors)
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def _differs(number: int, values: Sequence[Any], axis: Axis) -> bool:
    """Whether the number is another on some rank; sent from where the inputs are, as NCCL sends from no CPU."""
    device = max((value.device for value in values if isinstance(value, torch.Tensor)), key=lambda d: d.type != "cpu")
    mine = torch.tensor([number, -number], device=device)
    most = COLLECTIVES["wait"](COLLECTIVES["all_reduce"](mine, "max", axis.group)).tolist()
    return most[0] != -most[1]


def _device_of(node: fx.Node) -> torch.device:
    value = fake_value(node)
    return (value if isinstance(value, torch.Tensor) else value[0]).device


def _state_of(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
