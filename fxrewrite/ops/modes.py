"""Switches of torch's modes in a graph: autograd and autocast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

__all__ = ["sets_mode", "without_gradients"]

_MODE_SWITCHES = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
        torch.autograd.grad_mode._enter_inference_mode,
        torch.autograd.grad_mode._exit_inference_mode,
    }
)


def sets_mode(node: fx.Node) -> bool:
    """True if the node switches a mode of torch (autograd, autocast) and writes to no tensor."""
    return node.target in _MODE_SWITCHES


def without_gradients(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Nodes that run while gradients are off, as under `torch.no_grad()`; of each the node that switched them off."""
    found: dict[fx.Node, fx.Node] = {}
    switch: fx.Node | None = None
    for node in nodes:
        if node.target is torch._C._set_grad_enabled:
            switch = None if node.args[0] else switch or node
        elif switch is not None:
            found[node] = switch
    return found
