"""Layout rules of the ATen operators: which of their dimensions are independent, one family per file."""

from fxrewrite.spmd import LayoutRules
from rules.layouts import (
    attention,
    collectives,
    convolutions,
    cuts,
    indexing,
    linear,
    losses,
    norms,
    pointwise,
    quantized,
    reductions,
    shapes,
)

__all__ = ["LAYOUTS"]

LAYOUTS = LayoutRules(
    (
        *pointwise.LAYOUTS,
        *reductions.LAYOUTS,
        *norms.LAYOUTS,
        *linear.LAYOUTS,
        *quantized.LAYOUTS,
        *shapes.LAYOUTS,
        *cuts.LAYOUTS,
        *indexing.LAYOUTS,
        *attention.LAYOUTS,
        *convolutions.LAYOUTS,
        *losses.LAYOUTS,
        *collectives.LAYOUTS,
    )
)
