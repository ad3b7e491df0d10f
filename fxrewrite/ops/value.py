"""The fake value that tracing left on a node, whichever name it left it under."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["MISSING", "is_parameter", "is_scalar", "value", "value_key"]


class _Missing:
    """Stands for "no value known", which is not the value None."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
_SCALARS = (int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def value(node: fx.Node) -> Any:
    """`meta["val"]` (normalized and exported graphs) or `meta["example_value"]` (Dynamo); MISSING without either."""
    meta = node.meta
    if "val" in meta:
        return meta["val"]
    return meta.get("example_value", MISSING)


def value_key(node: fx.Node) -> str:
    """The metadata name under which this node's graph keeps values: Dynamo's own graphs use "example_value"."""
    return "example_value" if "example_value" in node.meta and "val" not in node.meta else "val"


def is_scalar(node: fx.Node) -> bool:
    """True when the node is known to hold a Python number or a symbolic one."""
    return isinstance(value(node), _SCALARS)


def is_parameter(node: fx.Node) -> bool:
    """True when the node is known to read a parameter or a buffer of the module."""
    return node.op == "get_attr" or isinstance(value(node), torch.nn.Parameter)
