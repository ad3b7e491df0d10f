"""Names of a graph's inputs as the model and its caller know them."""

from __future__ import annotations

import re

import torch
from torch import fx

__all__ = ["input_name"]

_CONTAINER = re.compile(r"_(?:modules|parameters|buffers)_")


def input_name(placeholder: fx.Node) -> str:
    """Returns the name of an input: `layers.0.q_proj.weight` for a parameter or buffer, `input_ids` for an argument.

    Dynamo encodes the path of an input in its name, `L_self_modules_layers_modules_0_..._parameters_weight_`; inputs of
    other graphs keep their names. A symbolic size is named by its symbol.
    """
    value = placeholder.meta.get("val", placeholder.meta.get("example_value"))
    if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        return str(value.node.expr)
    if not placeholder.name.startswith("l_"):
        return placeholder.name
    owner, *path = _CONTAINER.split(placeholder.name.removeprefix("l_").rstrip("_"))
    return ".".join(path) or owner
