"""Switches of torch's modes in a graph: autograd, autocast and vmap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch

VMAP_OPENS, VMAP_CLOSES = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
"""What Dynamo calls where a `torch.vmap` begins and ends."""

_MODE_SWITCHES: Mapping[Any, str] = {
    torch._C._set_grad_enabled: "switches gradients on or off",
    torch.amp.autocast_mode._enter_autocast: "begins an autocast region",
    torch.amp.autocast_mode._exit_autocast: "ends an autocast region",
    torch.autograd.grad_mode._enter_inference_mode: "begins an inference_mode region",
    torch.autograd.grad_mode._exit_inference_mode: "ends an inference_mode region",
}
"""What switches a mode of torch, and what it does."""
_ENDS = (torch.amp.autocast_mode._exit_autocast, torch.autograd.grad_mode._exit_inference_mode)


def sets_mode(node: fx.Node) -> bool:
    """True if the node switches a mode of torch (autograd, autocast) and writes to no tensor."""
    return node.target in _MODE_SWITCHES


def switches_gradients(node: fx.Node) -> bool:
    """Whether the node switches gradients on or off, as its argument says."""
    return node.target is torch._C._set_grad_enabled


def without_gradients(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Nodes that run while gradients are off, as under `torch.no_grad()`; of each the node that switched them off."""
    found: dict[fx.Node, fx.Node] = {}
    switch: fx.Node | None = None
    for node in nodes:
        if switches_gradients(node):
            switch = None if node.args[0] else switch or node
        elif switch is not None:
            found[node] = switch
    return found


def says_of_mode(switch: fx.Node) -> str:
    """What a node that sets a mode does, as "begins an autocast region"."""
    return _MODE_SWITCHES[switch.target]


def modes_at(node: fx.Node, switches: Sequence[fx.Node]) -> tuple[object, ...]:
    """The modes in which a node runs, of those that the switches of its graph set: equal where they are the same.

    Before the first switch of gradients they are what it changes.
    """
    gradients: object = next((not switch.args[0] for switch in switches if switches_gradients(switch)), None)
    regions: list[object] = []
    for switch in switches:
        if not switch < node:
            break
        if switches_gradients(switch):
            gradients = switch.args[0]
        elif switch.target in _ENDS:
            regions = [region for region in regions if region is not switch.args[0]]
        else:
            regions.append(switch)
    return gradients, *regions


def autocasts_at(node: fx.Node) -> tuple[tuple[Any, ...], ...]:
    """Returns device type, dtype and whether it is on of each autocast region that a node runs in, outermost first."""
    enter, leave = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
    begun = [one for one in node.graph.find_nodes(op="call_function", target=enter) if one < node]
    ended = (
        {one.args[0] for one in node.graph.find_nodes(op="call_function", target=leave) if one < node} if begun else ()
    )
    return tuple(one.args[:3] for one in begun if one not in ended)


def vmap_around(node: fx.Node) -> fx.Node | None:
    """Returns where the outermost vmap begins that the node is in, or None."""
    opened: list[fx.Node] = []
    for one in node.graph.nodes:
        if one is node:
            break
        if one.target is VMAP_OPENS:
            opened.append(one)
        elif one.target is VMAP_CLOSES:
            opened.pop()
    return opened[0] if opened else None


def modes_now() -> tuple[bool, ...]:
    """The modes that decide what a call computes, and of which its node says nothing."""
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast)
