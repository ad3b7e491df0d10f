"""Attention that no rule made the one operator is reported: what a model writes out, and its calls of a library.

Attention that is written out is exact, and is sharded by heads or rows as its operators are, but no strategy is chosen
for it, and the backward pass reads S x S scores. The report says which condition of the fusions in
`rules.attention.composite` failed. A call of flex or flash attention that stays one runs whole on every rank; the
report says why `rules.attention.from_flex` or `from_flash` left it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import fx

from autosp_rules.config import AttentionOption
from fxrewrite import Edit, Event, Report, Rule
from fxrewrite.graph import product, reached, size_hint, source_line
from fxrewrite.ops import bind, fake_value, key, value
from fxrewrite.report import bytes_text
from fxrewrite.spmd import Size
from rules.attention import from_flash, from_flex
from rules.attention.flex_operator import FLEX_ATTENTION

_SOFTMAX = {"aten::softmax", "aten::_softmax", "aten::_safe_softmax"}
_PRODUCTS = {"aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum"}
"""Products of activations: a linear layer has a weight."""
_RAISES = {rule.id for rules in (from_flash.RAISE_FLASH, from_flex.RAISE_FLEX) for rule in rules.rules()}


class AttentionWrittenOut(Event, frozen=True):
    """Products and softmaxes that are attention stay separate operators."""

    kind: Literal["attention written out"] = "attention written out"
    num_calls: int
    why: str = Field(description="what the rule that came nearest expected, and what it found")
    num_bytes: int = Field(description="of the scores of one call, over all ranks")
    asked: str = Field(default="auto", description="the strategy that was asked for, which does not apply to it")
    is_bent: bool = Field(default=False, description="a tanh bends the scores, for which sdpa has no argument")
    first: str = Field(default="", description="the first softmax")
    source: str = ""

    def __str__(self) -> str:
        where = f"%{self.first} {self.source}".rstrip()
        asked = "" if self.asked == "auto" else f" without {self.asked}, which was asked for"
        held = f"its scores take {bytes_text(self.num_bytes)} over all ranks"
        if not self.is_bent:
            held += " (scaled_dot_product_attention holds none; in transformers, attn_implementation='sdpa')"
        left = f"{self.num_calls} x written out by the model, and left so{asked}: expected {self.why}"
        return f"attention: {left}; {held}; the first is {where}"


class AttentionCallLeft(Event, frozen=True):
    """Calls of a library's attention, of the model, run whole on every rank."""

    kind: Literal["attention call left"] = "attention call left"
    num_calls: int
    operator: str = Field(default="", description="the library's")
    why: str = Field(description="what is not attention with a mask or a bias in the call")
    first: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f"%{self.first} {self.source}".rstrip()
        left = f"{self.num_calls} x {self.operator} of the model, which runs whole on every rank: {self.why}"
        return f"attention: {left}; the first is {where}"


class FindWrittenOut:
    """A step that reports attention which the rules given left in separate operators, or in a library's."""

    name = "find_written_out"

    def __init__(self, fusions: Iterable[Rule], asked: AttentionOption = "auto") -> None:
        self._fusions, self._asked = tuple(fusions), asked

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        alike: dict[tuple[Any, ...], list[tuple[fx.Node, fx.Node]]] = {}
        for node in edit.nodes():
            if key(node) in _SOFTMAX and (found := _weighted(node)) is not None:
                weighted, between = found
                alike.setdefault((str(fake_value(node).shape), key(weighted), *between), []).append((node, weighted))
        for (_, _, *between), calls in alike.items():
            first, weighted = calls[0]
            scores = fake_value(first)
            num_bytes = product(map(size_hint, scores.shape)) * scores.element_size()
            event = AttentionWrittenOut(num_calls=len(calls), why=self._why(weighted), num_bytes=num_bytes)
            where = {"first": first.name, "source": source_line(first), "asked": self._asked}
            report.events.append(event.model_copy(update=where | {"is_bent": "aten::tanh" in between}))
        refused = {refusal.node: refusal.reason for refusal in report.refusals if refusal.rule in _RAISES}
        left: dict[tuple[str, str], list[fx.Node]] = {}
        for node in edit.nodes():
            if (found := _left(node)) is not None:
                operator, why = found
                why = why or next((refused[user.name] for user in node.users if user.name in refused), "")
                left.setdefault((operator, why), []).append(node)
        for (operator, why), calls in left.items():
            event = AttentionCallLeft(num_calls=len(calls), operator=operator, why=why, first=calls[0].name)
            report.events.append(event.model_copy(update={"source": source_line(calls[0])}))
        return 0

    def text(self) -> str:
        return "an event for attention that no rule made one operator, with the condition that failed"

    def _why(self, weighted: fx.Node) -> str:
        """Returns what the rule expected that came nearest, and what it found."""
        misses = [miss for rule in self._fusions for miss in rule.explain_in([weighted]).misses]
        if not misses:
            return f"a matmul of the weights and the values, found {key(weighted)}"
        nearest = max(misses, key=lambda miss: miss.failure.passed / miss.num_conditions)
        return f"{nearest.failure.expected}, found {nearest.failure.found}"


def _left(node: fx.Node) -> tuple[str, str] | None:
    """The library's attention that a node calls, and why no rule made it the one operator; None if it calls none."""
    if node.target is FLEX_ATTENTION:
        return "flex_attention", from_flex.why_not_raised(node)
    kernel = from_flash.flash_kernel(node)
    return None if kernel is None else (key(kernel), from_flash.why_not_raised(node))


def _weighted(softmax: fx.Node) -> tuple[fx.Node, list[str]] | None:
    """The product of weights and values, if this softmax over the last dimension is of scores, and what is before it.

    The latter are the operators from which calls that are alike, as those of equal layers, can be told.

    Scores are products of activations, weights are read by another one as its first operand. On the way to both,
    values keep their rows and columns.
    """
    rank, sides = fake_value(softmax).dim(), _sides(softmax)
    if rank < 3 or bind(softmax)["dim"] not in (-1, rank - 1):
        return None

    def operands(node: fx.Node) -> list[fx.Node]:
        return [] if key(node) in _PRODUCTS else [x for x in node.all_input_nodes if _sides(x) == sides]

    def users(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if key(user) not in _PRODUCTS and _sides(user) == sides]

    between = sorted(map(key, reached([softmax], operands)))
    if _PRODUCTS.isdisjoint(between):
        return None
    readers = ((weights, user) for weights in reached([softmax], users) for user in weights.users)
    products = (user for x, user in readers if key(user) in _PRODUCTS and user.all_input_nodes[0] is x)
    weighted = next(products, None)
    return None if weighted is None else (weighted, between)


def _sides(node: fx.Node) -> tuple[Size, ...]:
    found = value(node)
    return tuple(found.shape[-2:]) if isinstance(found, torch.Tensor) else ()
