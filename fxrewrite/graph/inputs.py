"""Names of a graph's inputs as the model and its caller know them."""

from __future__ import annotations

import re

import torch
from torch import fx

from fxrewrite.ops import value

_MEMBER = re.compile(r"\.(?:__dict__\[')?_(?:modules|parameters|buffers)(?:'\])?\['([^']+)'\]")
"""What Dynamo writes for a module, a parameter or a buffer in the place where an input comes from; by `__dict__` where
the module that has it looks its parts up by itself, as peft's do."""
_CONTAINER = re.compile(r"_(?:modules|parameters|buffers)_")


def input_name(placeholder: fx.Node) -> str:
    """Returns the name of an input: `layers.0.q_proj.weight` for a parameter or buffer, `input_ids` for an argument.

    Dynamo says where an input comes from; in the placeholder's name, which is read where that is lost, the path is in
    lower case: `L_self_modules_layers_modules_0_..._parameters_weight_`, with `G_` where the model is a global of the
    compiled function. Inputs of other graphs keep their names. A symbolic size is named by its symbol. An input that
    is known by a name in the model (`meta["argument"]`) has it.
    """
    if argument := placeholder.meta.get("argument"):
        return argument
    size = value(placeholder)
    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
        return str(size.node.expr)
    source = getattr(placeholder, "_dynamo_source", None)
    path = _MEMBER.findall(source.name) if source is not None else []
    if path:
        return ".".join(path)
    if not _is_path(placeholder.name):
        return placeholder.name
    owner, *path = _CONTAINER.split(placeholder.name[2:].rstrip("_"))
    return ".".join(path) or owner


def is_buffer(placeholder: fx.Node) -> bool:
    """Whether Dynamo's name of an input says that it is a buffer of a module."""
    containers = re.findall(r"_(modules|parameters|buffers)_", placeholder.name)
    return _is_path(placeholder.name) and containers[-1:] == ["buffers"]


def _is_path(name: str) -> bool:
    """Whether Dynamo wrote a path in the name: from a local of the frame, or to what a global module has."""
    return name.startswith("l_") or (name.startswith("g_") and _CONTAINER.search(name) is not None)
