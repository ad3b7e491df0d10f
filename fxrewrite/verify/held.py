"""Samples whose parameters are attributes of the module, for rules that compute tensors of them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite.graph.copy import copy_module
from fxrewrite.verify.observe import Runner

__all__ = ["holds", "run_rewritten", "with_attributes"]


def holds(gm: fx.GraphModule) -> list[bool]:
    """Returns, for each input of a sample, whether it is a parameter, which the module can hold."""
    return [bool(node.meta.get("is_parameter")) for node in gm.graph.find_nodes(op="placeholder")]


def with_attributes(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Returns a copy of a sample in which parameters are buffers with the entries that these inputs have."""
    new = copy_module(gm)
    for node, value in zip(list(new.graph.find_nodes(op="placeholder")), inputs, strict=True):
        if node.meta.get("is_parameter"):
            new.register_buffer(str(node.target), value.detach())
            with new.graph.inserting_before(node):
                held = new.graph.get_attr(str(node.target))
            held.meta = dict(node.meta)
            node.replace_all_uses_with(held)
            new.graph.erase_node(node)
    new.recompile()
    return new


def run_rewritten(before: fx.GraphModule, rewrite: Callable[[fx.GraphModule], Any], run: Runner) -> Runner:
    """Returns what runs a rewritten sample as a function of all inputs: its rule is applied for those that it holds.

    A sample that takes all of its inputs runs as it is.
    """

    def applied(rewritten: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        if len(list(rewritten.graph.find_nodes(op="placeholder"))) == len(inputs):
            return run(rewritten, inputs)
        gm = with_attributes(before, inputs)
        rewrite(gm)
        return run(gm, [value for value, is_held in zip(inputs, holds(before), strict=True) if not is_held])

    return applied
