"""Which draws ranks must make alike, and which cannot be those of one device; the rules are in `rules.random`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from fxrewrite import refuse
from fxrewrite.graph import source_line
from fxrewrite.ops import is_random, key
from fxrewrite.spmd import Shard
from rules.random import draw_dropout_by_rank

__all__ = ["generator_text", "refuse_own_draws"]


def refuse_own_draws(program: fx.GraphModule) -> None:
    """Raises RefusedError for a draw on a chunk, which cannot give the numbers that one device draws."""
    for node in program.graph.nodes:
        if is_random(node) and (_is_on_chunk(node) or _is_seed(node)):
            refuse(
                f"{key(node)} draws random numbers for its chunk, which are not those of one device",
                node=node,
                hint="use rng='local', or for attention with dropout the eager implementation",
            )


def generator_text(program: fx.GraphModule) -> str:
    """The state that a program draws from on every rank alike, and what to do where ranks differ; empty if none.

    The state is that of the default generator of the device that draws, at the time of the call.
    """
    drawn = (node for node in program.graph.nodes if is_random(node) and not _is_on_chunk(node) and not _is_seed(node))
    first = next(drawn, None)
    if first is None:
        return ""
    state = hashlib.sha256(_state_of(first.meta["val"]).numpy().tobytes()).hexdigest()
    what = f"%{first.name} {source_line(first)} draws on every rank: seed all ranks alike, torch.manual_seed(seed)"
    return f"random number generator {state[:16]}; {what}\n"


def _is_on_chunk(node: fx.Node) -> bool:
    layouts = node.meta.get("layout")
    return any(isinstance(layout, Shard) for layout in (layouts if isinstance(layouts, tuple) else (layouts,)))


def _is_seed(node: fx.Node) -> bool:
    """Whether it is a seed from which each rank makes numbers of its own."""
    return draw_dropout_by_rank.id in node.meta.get("fxrewrite", ())


def _state_of(value: Any) -> torch.Tensor:
    device = (value if isinstance(value, torch.Tensor) else value[0]).device
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
