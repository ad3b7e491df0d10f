"""Tensors of a program that is traced, of which some are only known by their node and by what they look like."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)


class TracedValue:
    """A tensor of the program, made when it is read.

    Args:
        like: a tensor that looks like it: it would be traced in the same way.
        node: the traced node that has the value; None if `like` is the value itself, which the tracer knows.
        look: a number that is equal for values that look alike; None if it is not known.
    """

    __slots__ = ("_like", "_node", "_tensor", "look")

    def __init__(self, like: torch.Tensor, node: fx.Node | None = None, look: int | None = None) -> None:
        self._like, self._node, self.look = like, node, look
        self._tensor = like if node is None else None

    @property
    def like(self) -> torch.Tensor:
        return self._like

    def node(self, tracer: Any) -> fx.Node:
        """The traced node that has the value."""
        return self._node if self._node is not None else slot_of(self._like, tracer).proxy.node

    def rename(self, node: fx.Node) -> None:
        """From now on another node has the value, which reads what had it."""
        self._node = node

    def forget_look(self) -> None:
        """The value may have been changed, if it is a tensor of its own."""
        if self._tensor is not None:
            self.look = None

    def tensor(self) -> torch.Tensor:
        """The tensor, which the tracer knows by the value's node."""
        tracer = current_tracer()
        if self._tensor is None:
            with disable_proxy_modes_tracing():
                self._like = self._tensor = self._like.detach().requires_grad_(self._like.requires_grad)
        if self._node is not None:
            node, self._node = self._node, None
            meta = dict(node.meta)
            with disable_proxy_modes_tracing():
                track_tensor_tree(self._tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)
            node.meta = meta  # with the fake value that nodes of equal calls share
        return self._tensor


def current_tracer() -> Any:
    """The tracer that records what runs."""
    mode = get_proxy_mode()
    assert mode is not None, "nothing is traced"
    return mode.tracer


def slot_of(tensor: torch.Tensor, tracer: Any) -> Any:
    """What the tracer knows of a tensor: its `proxy`, and its entries if it is a `constant`; None if nothing."""
    return get_proxy_slot(tensor, tracer, None)
