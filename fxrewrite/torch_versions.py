"""What differs between the versions of torch that fxrewrite runs on, from 2.11 to the newest.

The only file of the packages that asks which torch this is; each entry says which version makes it unnecessary.
docs/compatibility.md has the versions that are tested.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx.experimental import symbolic_shapes

__all__ = ["hint_of_expression", "hint_of_size"]


def hint_of_size(size: torch.SymInt, fallback: int) -> int:
    """The value of a symbolic size for the inputs of the trace, without a guard; `fallback` for what data decide."""
    # torch 2.12 renamed `size_hint` of torch 2.11; with 2.12 as the oldest, `optimization_hint` alone remains.
    hint = getattr(symbolic_shapes, "optimization_hint", None) or getattr(symbolic_shapes, "size_hint")  # noqa: B009
    return hint(size, fallback=fallback)


def hint_of_expression(expr: Any, shapes: Any, fallback: int) -> int:
    """The same for an expression over the symbols of a ShapeEnv."""
    if hasattr(shapes, "optimization_hint"):
        return shapes.optimization_hint(expr, fallback=fallback)
    # torch 2.12 has the method; its 2.11 counterpart, `ShapeEnv.size_hint`, takes no fallback.
    known = expr.xreplace(shapes.replacements).xreplace(shapes.backed_var_to_val)
    return int(known.xreplace({symbol: sympy.Integer(fallback) for symbol in known.free_symbols}))
