"""Which draws ranks must make alike, and which cannot be those of one device; the rules are in `rules.random`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autosp_rules.errors import AutoSPError
from fxrewrite import refuse
from fxrewrite.graph import source_line
from fxrewrite.ops import is_random, key
from fxrewrite.spmd import COLLECTIVES, Axis
from rules.random import DrawByRank, draws_on_chunk

__all__ = ["drawing_alike", "draws_alike", "refuse_own_draws"]


def refuse_own_draws(program: fx.GraphModule) -> None:
    """Raises RefusedError for a draw on a chunk, which cannot give the numbers that one device draws."""
    for node in filter(draws_on_chunk, program.graph.nodes):
        refuse(
            f"{key(node)} draws random numbers for its chunk, which are not those of one device",
            node=node,
            hint="use rng='local', or for attention with dropout the eager implementation",
        )


def draws_alike(program: fx.GraphModule) -> list[fx.Node]:
    """What must draw the same numbers on every rank: all but draws on chunks, and the seeds of those."""
    nodes = (node for node in program.graph.nodes if DrawByRank.seed_id not in node.meta.get("fxrewrite", ()))
    return [node for node in nodes if is_random(node) and not draws_on_chunk(node)]


def drawing_alike(run: Callable[..., Any], program: fx.GraphModule, axis: Axis) -> Callable[..., Any]:
    """`run`, the compiled `program`; every call first compares the generators of the ranks, where they must be alike.

    It sends 16 bytes and waits for them. The call raises AutoSPError on every rank where the states of the default
    generators of the devices that draw differ.
    """
    drawn = draws_alike(program)
    if not drawn:
        return run
    devices = sorted({_device_of(node) for node in drawn}, key=str)

    def call(*inputs: Any) -> Any:
        state = hashlib.sha256(b"".join(_state_of(device).numpy().tobytes() for device in devices)).digest()
        number = int.from_bytes(state[:7], "big")
        mine = torch.tensor([number, -number], device=devices[-1])
        most = COLLECTIVES["wait"](COLLECTIVES["all_reduce"](mine, "max", axis.group)).tolist()
        if most[0] != -most[1]:
            raise AutoSPError.of(
                f"the random number generators of the ranks of axis {axis.name} differ before a call, but "
                f"%{drawn[0].name} {source_line(drawn[0])} must draw the same numbers on every rank",
                hint="seed all ranks alike, torch.manual_seed(seed), and let what only some ranks draw, such as a data "
                "loader's order, draw by a torch.Generator of its own",
            )
        return run(*inputs)

    return call


def _device_of(node: fx.Node) -> torch.device:
    value = node.meta["val"]
    return (value if isinstance(value, torch.Tensor) else value[0]).device


def _state_of(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
