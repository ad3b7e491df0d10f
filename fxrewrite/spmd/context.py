"""What a plan over one mesh axis is told; given to `plan.apply(gm, context=...)`. It may be used for any graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd.layout import Axis, Layout, Replicated

__all__ = ["SpmdContext"]


def _whole(node: fx.Node, layout: Layout) -> Layout:
    return Replicated()


@dataclass(frozen=True, slots=True)
class SpmdContext:
    """The axis of a plan, and what its user allows."""

    axis: Axis
    strict: bool = False
    """Refuse an operator without a layout rule instead of gathering its operands."""
    output_layout: Callable[[fx.Node, Layout], Layout] = _whole
    """How an output of the graph that lies as the given layout is returned."""

    @staticmethod
    def required(context: Any, by: str) -> SpmdContext:
        """The context, if there is one.

        Raises:
            FxRewriteError: the plan was applied without one, or with something else; says who needs it.
        """
        if not isinstance(context, SpmdContext):
            found = "" if context is None else f", not {context!r}"
            raise FxRewriteError(
                f"{by} needs to know the mesh axis; pass plan.apply(gm, context=SpmdContext(Axis(name, size))){found}"
            )
        return context
