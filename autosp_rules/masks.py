"""Reports what masks mean and what they cost: a line for every kind of mask that attention reads."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxrewrite import Edit, Report, refuse
from fxrewrite.graph import product, size_hint, source_line
from fxrewrite.ops import bind, fake_value
from rules.attention.by_rows import ATTENTION_BY_ROWS, why_not_by_rows
from rules.attention.flex import MaskKernel, why_not_flex
from rules.attention.flex_operator import FLEX_ATTENTION
from rules.attention.operator import ATTEND
from rules.masks.kinds import kind_of
from rules.masks.reading import is_dense

__all__ = ["DescribeMasks", "check_flex"]

_LONG = 131_072
"""Length (tokens) at which the report prices a dense mask: a typical long context."""


class DescribeMasks:
    """A step that reports masks that are never held, with how they are computed, and dense masks with their price."""

    name = "describe_masks"

    def __init__(self, kernel: MaskKernel = "auto") -> None:
        self._kernel: MaskKernel = kernel

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Adds a line to the report for every kind of mask. Changes no node."""
        alike: dict[str, list[fx.Node]] = {}
        for node in edit.nodes():
            line = self._line(node)
            if line:
                alike.setdefault(line, []).append(node)
        for line, (first, *more) in alike.items():
            where = f"; the first is %{first.name} {source_line(first)}".rstrip()
            report.lines.append(f"masks: {1 + len(more)} x {line}{where}")
        return 0

    def text(self) -> str:
        return "a line in the report for every kind of mask: what it means, or why it is dense and what it costs"

    def _line(self, node: fx.Node) -> str:
        if node.target in (ATTENTION_BY_ROWS, FLEX_ATTENTION):
            return f"{kind_of(node) or 'an expression of rows and columns'}, {self._how(node)}"
        return _dense(node) if node.target is ATTEND else ""

    def _how(self, node: fx.Node) -> str:
        if node.target is FLEX_ATTENTION:
            return "by flex attention"
        is_asked = self._kernel != "rows" and fake_value(node.all_input_nodes[0]).device.type == "cuda"
        return "computed by rows" + (f": {why_not_flex(node)}" if is_asked else "")


def check_flex(gm: fx.GraphModule, inner: object) -> list[str]:
    """Returns a line for the report if flex attention has no kernel; refuses inductor on CPU: it has no backward."""
    node = next((node for node in gm.graph.nodes if node.target is FLEX_ATTENTION), None)
    if node is None:
        return []
    if inner != "inductor":
        return ["mask_kernel: flex attention is a kernel in inner='inductor' on CUDA; here it may hold all scores"]
    if fake_value(node.all_input_nodes[0]).device.type == "cpu":
        refuse(
            "inductor has no backward pass of flex attention on the CPU",
            hint="use mask_kernel='auto' or 'rows', or inner='aot_eager', which holds all scores",
            node=node,
        )
    return []


def _dense(node: fx.Node) -> str:
    """Returns the reason for a dense mask, and its price."""
    q, k, v, mask, _, dropout_p, *_ = bind(node).values()
    if mask is None or not is_dense(mask):
        return ""
    why = why_not_by_rows(q, k, v, mask, dropout_p)
    return f"dense: {why}; {_price(mask):,} bytes at {_LONG:,} tokens"


def _price(mask: fx.Node) -> int:
    """Returns how many bytes a rank's part of the mask takes at `_LONG` tokens."""
    found = fake_value(mask)
    *outer, rows, columns = map(size_hint, found.shape)
    return round(product(outer) * _LONG * (_LONG * rows / columns)) * found.element_size()
