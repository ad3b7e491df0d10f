"""Layout rules of the ATen operators: which of their dimensions are independent, one family per file."""

from fxrewrite.spmd import LayoutRules
from rules.layouts import attention, linear, losses, pointwise, reductions, shapes

__all__ = ["LAYOUTS"]

LAYOUTS = LayoutRules(
    (
        *pointwise.LAYOUTS,
        *reductions.LAYOUTS,
        *linear.LAYOUTS,
        *shapes.LAYOUTS,
        *attention.LAYOUTS,
        *losses.LAYOUTS,
    )
)
