"""What masks mean and what they cost: an event in the report for every kind of mask that attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import fx

from fxrewrite import Edit, Event, Report, refuse
from fxrewrite.graph import product, size_hint, source_line
from fxrewrite.ops import bind, fake_value
from fxrewrite.report import bytes_text
from fxrewrite.spmd import Size
from rules.attention.by_rows import ATTENTION_BY_ROWS, why_not_by_rows
from rules.attention.flex import MaskKernel, is_lowered, why_not_flex
from rules.attention.flex_operator import FLEX_ATTENTION
from rules.attention.operator import ATTEND, is_sdpa
from rules.masks.kinds import kind_of
from rules.masks.reading import is_dense

_LONG = 131_072
"""Length (tokens) at which the report prices a dense mask: a typical long context."""


class MaskedAttention(Event, frozen=True):
    """Calls of attention read masks that mean the same, and treat them in the same way."""

    kind: Literal["masks"] = "masks"
    num_calls: int
    computed: Literal["rows", "flex", "dense"] = Field(description="dense: the mask is held")
    mask: str = Field(default="", description="what it means, where it is not dense")
    why: str = Field(default="", description="why it is dense, or why it is computed by rows where flex was asked for")
    num_bytes: int = Field(
        default=0,
        description=f"of a rank's part of a dense mask at {_LONG:,} tokens, or of scores beside sinks or a softcap",
    )
    first: str = Field(default="", description="the first call's node")
    source: str = ""

    def __str__(self) -> str:
        where = f"; the first is %{self.first} {self.source}".rstrip()
        return f"masks: {self.num_calls} x {self._said()}{where}"

    def _said(self) -> str:
        match self.computed:
            case "dense":
                return f"dense: {self.why}; {bytes_text(self.num_bytes)} at {_LONG:,} tokens"
            case "flex":
                return f"{self.mask}, by flex attention"
            case "rows":
                return f"{self.mask}, computed by rows" + (f": {self.why}" if self.why else "")


class FlexHoldsScores(Event, frozen=True):
    """Flex attention is not compiled to a kernel."""

    kind: Literal["mask_kernel"] = "mask_kernel"

    def __str__(self) -> str:
        return "mask_kernel: flex attention is a kernel in inner='inductor' on CUDA; here it may hold all scores"


class DescribeMasks:
    """A step that reports masks that are never held, with how they are computed, and dense masks with their price.

    Args:
        kernel: what was asked for.
        inner: the backend that compiles the program.

    Raises:
        RefusedError: inductor is to compile flex attention for the CPU, where it has no backward pass.
    """

    name = "describe_masks"

    def __init__(self, kernel: MaskKernel, inner: object) -> None:
        self._kernel: MaskKernel = kernel
        self._inner = inner

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        found = {node: event for node in edit.nodes() if (event := self._event(node)) is not None}
        alike: dict[MaskedAttention, list[fx.Node]] = {}
        for node, event in found.items():
            alike.setdefault(event, []).append(node)
        for event, (first, *more) in alike.items():
            where = {"num_calls": 1 + len(more), "first": first.name, "source": source_line(first)}
            report.events.append(event.model_copy(update=where))
        flex = next((node for node in found if node.target is FLEX_ATTENTION), None)
        if flex is not None:
            self._check_flex(flex, report)
        return 0

    def _check_flex(self, node: fx.Node, report: Report) -> None:
        if self._inner != "inductor":
            report.events.append(FlexHoldsScores())
        elif fake_value(node.all_input_nodes[0]).device.type == "cpu":
            refuse(
                "inductor has no backward pass of flex attention on the CPU",
                hint="use mask_kernel='auto' or 'rows', or inner='aot_eager', which holds all scores",
                node=node,
            )

    def text(self) -> str:
        return "an event for every kind of mask: what it means, or why it is dense and what it costs"

    def _event(self, node: fx.Node) -> MaskedAttention | None:
        """Of this call alone, equal for calls that are told together; None where no mask is left."""
        if node.target is ATTENTION_BY_ROWS or (node.target is FLEX_ATTENTION and is_lowered(node)):
            mask = str(kind_of(node) or "an expression of rows and columns")
            if node.target is FLEX_ATTENTION:
                return MaskedAttention(num_calls=1, computed="flex", mask=mask)
            is_asked = self._kernel != "rows" and fake_value(node.all_input_nodes[0]).device.type == "cuda"
            return MaskedAttention(num_calls=1, computed="rows", mask=mask, why=why_not_flex(node) if is_asked else "")
        return _dense(node) if node.target is ATTEND else None


def _dense(node: fx.Node) -> MaskedAttention | None:
    """The reason and the price of a mask that is held, or of scores, where the call is written out."""
    q, k, v, mask, _, dropout_p, *_ = bind(node).values()
    if is_sdpa(node):
        if mask is None or not is_dense(mask):
            return None
        num_bytes = _price(fake_value(mask).shape, fake_value(mask))
    else:
        num_bytes = _price((*fake_value(q).shape[:-1], fake_value(k).shape[-2]), fake_value(q))
    why = why_not_by_rows(q, k, v, mask, dropout_p)
    return MaskedAttention(num_calls=1, computed="dense", why=why, num_bytes=num_bytes)


def _price(shape: Sequence[Size], like: torch.Tensor) -> int:
    """Returns how many bytes a rank's part of a value with rows and columns takes at `_LONG` tokens."""
    *outer, rows, columns = map(size_hint, shape)
    return round(size_hint(product(outer)) * _LONG * (_LONG * rows / max(1, columns))) * like.element_size()
