"""The contract of strategies for attention over a sharded sequence: when one can serve a call, its cost, its rules.

A strategy is chosen for each call before placements are propagated, from shapes and the axis alone. The choice is a
fact of the call, which the strategy's rules read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from autosp_rules.lengths import planned_size
from autosp_rules.memory.costs import ATTENTION_PASSES
from fxrewrite import Constraint, Edit, Match, Rule, where
from fxrewrite.graph import Fact
from fxrewrite.ops import bind
from fxrewrite.spmd import (
    REQUIRED,
    Axis,
    Placement,
    Price,
    Size,
    operations,
    size_hint,
)
from rules.attention.flops import hides_later_keys


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention: q [..., H, S, E], k [..., KV, T, E], v [..., KV, T, D]; without heads H is 1."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: fx.Node | None
    sinks: fx.Node | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    hides_later_keys: bool
    flops: float
    """FLOPs of the call on one device, forward and backward, without what a causal mask hides, for each token that it
    has, in a sequence of the length that the program is planned for."""

    @staticmethod
    def of(node: fx.Node) -> AttentionCall:
        """Reads the operands and options of a call of `rules.attention.operator.ATTEND`."""
        q, k, v, mask, sinks, dropout_p, is_causal, _, enable_gqa, *_ = bind(node).values()
        q, k, v = (x.meta["val"] for x in (q, k, v))
        # In a sequence `longer` times as long, a token sends as much but computes `longer` times as much.
        longer = planned_size(k.shape[-2]) / max(1, size_hint(k.shape[-2]))  # it may be empty
        hides, flops = hides_later_keys(node), ATTENTION_PASSES * operations(node) * longer
        return AttentionCall(q, k, v, mask, sinks, dropout_p, is_causal, enable_gqa, hides, flops)

    @property
    def heads(self) -> Size:
        """Number of query heads; 1 for operands without heads."""
        return self.q.shape[-3] if self.q.dim() > 2 else 1

    @property
    def kv_heads(self) -> Size:
        """Number of key heads before repeating; 1 for operands without heads."""
        return self.k.shape[-3] if self.k.dim() > 2 else 1

    @property
    def result_numel(self) -> int:
        """Number of entries of the result, at the traced size."""
        return size_hint(self.q.numel()) // size_hint(self.q.shape[-1]) * size_hint(self.v.shape[-1])

    def kv_bytes(self, heads: int | None = None) -> float:
        """Bytes of whole k and v, if they had `heads` heads."""
        repeats = 1 if heads is None else heads / size_hint(self.kv_heads)
        return repeats * self.q.element_size() * (size_hint(self.k.numel()) + size_hint(self.v.numel()))

    @property
    def qo_bytes(self) -> float:
        """Bytes of whole q and result, and of sinks if there are any."""
        sinks = 0 if self.sinks is None else size_hint(self.sinks.meta["val"].numel())
        return self.q.element_size() * (size_hint(self.q.numel()) + self.result_numel + sinks)


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy for one call, why it was chosen, and the id of the rule that must rewrite the call first."""

    strategy: str
    why: str
    rewrite: str = ""
    others: str = ""
    """What the other strategies would cost, or why they cannot serve the call."""
    sent: int | None = None
    """Bytes that a rank sends forward, if no redistribution shows them."""
    required: Placement | None = None
    """The placement that the call must produce its result with; None where propagation may find a cheaper one."""


CHOICE = Fact[Choice]("attention choice")
"""How a call of attention is to run."""


@dataclass(frozen=True, slots=True)
class AttentionStrategy:
    """One way to run attention."""

    name: str
    why_not: Callable[[AttentionCall, Axis], str]
    """Says why the strategy cannot serve a call; empty if it can."""
    choose: Callable[[AttentionCall, Axis, bool], Choice]
    """Returns the choice of this strategy for a call that it serves; the bool says whether the user requested it."""
    cost: Callable[[AttentionCall, Axis], Price]
    rules: tuple[Rule, ...] = ()
    """Rules that run before propagation, on calls whose choice needs them."""


def write_choice(edit: Edit, node: fx.Node, choice: Choice) -> None:
    """Writes the choice down, and for propagation the placement that it requires."""
    edit.set_fact(node, CHOICE, choice)
    if choice.required is not None:
        edit.set_fact(node, REQUIRED, choice.required)


def serve(match: Match, attended: fx.Proxy) -> fx.Proxy:
    """Copies the matched call's choice to its replacement, and marks the pending rewrite as done."""
    choice = CHOICE.of(match.root)
    assert choice is not None, "rules of a strategy match chosen calls"
    write_choice(match.edit, attended.node, replace(choice, rewrite=""))
    return attended


def needs(rewrite: str) -> Constraint:
    """Whether the call's choice requires this rule."""

    @where.predicate("root", text=f"needs[{rewrite}]")
    def asks(root: fx.Node) -> bool:
        choice = CHOICE.of(root)
        return choice is not None and choice.rewrite == rewrite

    return asks
