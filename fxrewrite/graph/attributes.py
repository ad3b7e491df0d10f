"""Attributes of a graph's module: added under a free name, and dropped when no node reads them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx


def add_attribute(gm: fx.GraphModule, value: torch.nn.Module | torch.Tensor, name: str) -> str:
    """Adds a module, a parameter or a buffer under a name, to which a number is appended if it is taken; returns it."""
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
    path = next(path for path in names if not hasattr(gm, path))
    if isinstance(value, torch.nn.Module):
        gm.add_module(path, value)
    elif isinstance(value, torch.nn.Parameter):
        gm.register_parameter(path, value)
    else:
        gm.register_buffer(path, value)
    return path


def drop_attribute(gm: fx.GraphModule, path: str) -> None:
    """Removes an attribute that no node reads, unless it belongs to a module that some node uses.

    A module with code of its own may be the user's: it leaves this module as a whole, and keeps its attributes.
    """
    read = [str(node.target) for op in ("get_attr", "call_module") for node in gm.graph.find_nodes(op=op)]
    owner: Any = gm
    atoms = path.split(".")
    for depth, atom in enumerate(atoms, 1):
        child = getattr(owner, atom, None)
        if depth == len(atoms) or type(child) is not torch.nn.Module:
            dropped = ".".join(atoms[:depth])
            if child is not None and not any(f"{one}.".startswith(f"{dropped}.") for one in read):
                delattr(owner, atom)
            return
        owner = child
