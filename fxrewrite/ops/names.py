"""Looks up operators by name, among those that torch and the imported libraries define."""

from __future__ import annotations

from typing import Any

import torch

from fxrewrite.errors import did_you_mean

_NAMESPACES_OF_TORCH = {"aten", "prim", "prims", "quantized", "inductor", "c10d", "_c10d_functional"}
"""Namespaces of operators that exist once torch is imported."""
Operator = torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator


def named_operator(name: str) -> Operator | None:
    """Returns the operator named "aten::mul", or "mul" for short; None if nothing imported so far defines it."""
    namespace, separator, operator = name.rpartition("::")
    found = getattr(getattr(torch.ops, namespace if separator else "aten"), operator, None)
    return found if isinstance(found, Operator) else None


def packet_of(key: str) -> torch._ops.OpOverloadPacket | None:
    """Returns the operator of a key, "aten::mul"; None if it is a higher-order operator or a Python callable."""
    found = named_operator(key) if "::" in key else None
    return found if isinstance(found, torch._ops.OpOverloadPacket) else None


def operator_of(target: Any) -> Any:
    """Returns the operator that a function of `torch.library.custom_op` defines; any other target as it is."""
    return named_operator(target._qualname) if isinstance(target, torch.library.CustomOpDef) else target


def is_of_a_library(target: object) -> bool:
    """Whether a target is an operator that torch itself does not define, so that calling it needs an import."""
    is_operator = isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_operator and str(target).partition(".")[0] not in _NAMESPACES_OF_TORCH


def is_imported(library: str) -> bool:
    """Whether something that was imported defines operators of the library, as of "bitsandbytes"."""
    return any(found.startswith(f"{library}::") for found in torch._C._dispatch_get_all_op_names())


def no_operator(name: str) -> str:
    """Returns a message about a name without an operator: the nearest names, or that a library is missing."""
    namespace, separator, operator = name.rpartition("::")
    known = {found.partition(".")[0] for found in torch._C._dispatch_get_all_op_names()}
    if separator and not is_imported(namespace):
        why = f"; nothing that was imported so far defines operators of {namespace!r}, so import its library first"
    elif elsewhere := sorted(found for found in known if not separator and found.endswith(f"::{operator}")):
        why = f"; did you mean {' or '.join(elsewhere)}?"
    else:
        own = (found for found in known if found.startswith(f"{namespace or 'aten'}::"))
        why = did_you_mean(name, own if separator else (found.removeprefix("aten::") for found in own))
        why = why or "; pass the callable itself, or import the library that defines it"
    return f"there is no operator {name!r}{why}"
