"""Operators on slots as one node: a function of operands of which each is read slot by slot, token by token, or whole.

    slotwise(body, [ids, x, gates, weights])

A router gives each of n tokens k slots, one for each of its experts. The node runs its body on whole values or on the
slots of a rank's own tokens alike, so a layout rule can say of it what it cannot say of the operators in the body:

    (n !k), n, !... -> (n !k)

`rules.experts.fuse` makes such nodes; WRITE_OUT_SLOTS puts the operators back, once it is settled how many slots a
rank has.
Shapes: as the body's; no operator in it states the number of slots.
Numerics: exact.

>>> import torch
>>> from torch import fx
>>> ids = torch.tensor([2, 0, 1, 0])
>>> body = SlotBody(fx.symbolic_trace(lambda ids, table: table[ids] * 2), ("slots", "whole"), per_token=2)
>>> slotwise(body, [ids, torch.tensor([1, 2, 3])])
tensor([6, 2, 4, 2])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import Match, Pattern, Rule, RuleSet, cap, op
from fxrewrite.ops import declare_pure, key
from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms, declare_virtual, divide_exactly, size_proxy

__all__ = ["SLOT_LAYOUTS", "WRITE_OUT_SLOTS", "Read", "SlotBody", "positions", "slotwise"]

aten = torch.ops.aten

Read: TypeAlias = Literal["slots", "tokens", "whole"]
"""What the first dimension of an operand has: an entry for each slot, one for each token, or what all slots read."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotBody:
    """Operators on slots, as a module of their operands that fits any number of slots."""

    module: fx.GraphModule = field(repr=False)
    reads: tuple[Read, ...]
    """For each operand."""
    per_token: int
    """How many slots a token has."""


@declare_virtual()
def slotwise(body: SlotBody, operands: list[torch.Tensor]) -> torch.Tensor:
    """What the body computes: an entry for each slot, which depends on no other slot."""
    return fx.Interpreter(body.module).run(*operands)


@declare_pure
def positions(slots: torch.Tensor) -> torch.Tensor:
    """0, 1, 2 ... as many as there are slots: an `arange` in a body, which states no size."""
    return torch.arange(slots.shape[0], device=slots.device)


def slots_of_tokens(call: Call) -> IndexMap | None:
    """(n !k) for what is read slot by slot, n for tokens, all else whole -> (n !k)"""
    body: SlotBody = call.args["body"]
    result = call.result_shapes()[0]
    tokens = divide_exactly(result[0], body.per_token)
    if tokens is None:
        return None
    operands = tuple(_terms(read, call.shape(i)) for i, read in enumerate(body.reads))
    sizes: dict[str, Size] = {"n": tokens, "k": body.per_token}
    return IndexMap(operands, (_terms("slots", result),), sizes, frozenset({"k"}))


def _terms(read: Read, shape: Sequence[Size]) -> Terms:
    first = {"slots": ("n", "k"), "tokens": ("n",), "whole": ()}[read]
    return (first, *((),) * (len(shape) - 1)) if shape else ()


SLOT_LAYOUTS = (LayoutRule("layout.slots", (key(slotwise),), slots_of_tokens),)


write_out_slots = Rule(
    "slots.write_out",
    Pattern((op(slotwise, cap("body", "literal"), cap("operands", "any")),)),
    shapes="changes",  # the same sizes, in other terms where they are symbolic
)


@write_out_slots.replacement
def _(match: Match) -> Any:
    """the operators of the body, on the slots at hand"""
    graph = match["body"].module.graph
    made: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), match["operands"], strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            made[node] = _written_out(match, node, made)
    return match.proxy(made[graph.output_node().all_input_nodes[0]])


def _written_out(match: Match, node: fx.Node, made: dict[fx.Node, Any]) -> fx.Node:
    target: Any = node.target
    args: Any = map_arg(node.args, made.__getitem__)
    kwargs: Any = map_arg(node.kwargs, made.__getitem__)
    if target is positions:
        slots = args[0].meta["val"]
        count = size_proxy(match, slots.shape[0])
        target, args = aten.arange.default, (getattr(count, "node", count),)
        kwargs = {"device": slots.device, "pin_memory": False}
    return match.edit.call(target, args, kwargs, before=match.root, like=node, rule=write_out_slots.id)


WRITE_OUT_SLOTS = RuleSet("write_out_slots", write_out_slots)
