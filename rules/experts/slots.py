"""Operators on token-expert pairs as one node; each operand is read per pair ("slot"), per token, or whole.

    slotwise(body, [ids, x, gates, weights])

A router gives each of n tokens k token-expert pairs, called slots in names. The node runs its subgraph on all pairs or
on the pairs of a rank's own tokens, so its layout rule can say what rules of the operators inside cannot say:

    (n !k), n, !... -> (n !k)

`rules.experts.fuse` makes such nodes. WRITE_OUT_SLOTS inlines the operators again, once the number of pairs per rank is
known.
Shapes: those of the subgraph; none of its operators states the number of pairs.
Numerics: exact.

>>> import torch
>>> from torch import fx
>>> ids = torch.tensor([2, 0, 1, 0])
>>> body = SlotBody(fx.symbolic_trace(lambda ids, table: table[ids] * 2), ("slots", "whole"), per_token=2)
>>> slotwise(body, [ids, torch.tensor([1, 2, 3])])
tensor([6, 2, 4, 2])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import Match, Pattern, Rule, RuleSet, cap, op
from fxrewrite.ops import declare_pure, key
from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms, declare_virtual, divide_exactly, size_proxy

aten = torch.ops.aten

Read: TypeAlias = Literal["slots", "tokens", "whole"]
"""What the first dimension of an operand has: an entry for each pair, one for each token, or what all pairs read."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotBody:
    """Operators on token-expert pairs, as a module that fits any number of pairs."""

    module: fx.GraphModule = field(repr=False)
    reads: tuple[Read, ...]
    """How each operand is read."""
    per_token: int
    """Number of pairs per token."""


@declare_virtual()
def slotwise(body: SlotBody, operands: list[torch.Tensor]) -> torch.Tensor:
    """Runs the subgraph; each entry of the result depends on one pair only."""
    return fx.Interpreter(body.module).run(*operands)


@declare_pure
def positions(slots: torch.Tensor) -> torch.Tensor:
    """Returns 0, 1, 2 ... up to the number of pairs: an `arange` for the subgraph that does not state a size."""
    return torch.arange(slots.shape[0], device=slots.device)


def slots_of_tokens(call: Call) -> IndexMap | None:
    """(n !k) for operands read per pair, n for tokens, the others whole -> (n !k)"""
    body: SlotBody = call.args["body"]
    result = call.result_shapes()[0]
    tokens = divide_exactly(result[0], body.per_token)
    if tokens is None:
        return None
    operands = tuple(slot_terms(read, call.shape(i)) for i, read in enumerate(body.reads))
    sizes: dict[str, Size] = {"n": tokens, "k": body.per_token}
    return IndexMap(operands, (slot_terms("slots", result),), sizes, frozenset({"k"}))


def slot_terms(read: Read, shape: Sequence[Size]) -> Terms:
    """The terms of an operand that is read so."""
    first = {"slots": ("n", "k"), "tokens": ("n",), "whole": ()}[read]
    return (first, *((),) * (len(shape) - 1)) if shape else ()


SLOT_LAYOUTS = (LayoutRule("layout.slots", (key(slotwise),), slots_of_tokens),)


write_out_slots = Rule(
    "slots.write_out",
    Pattern((op(slotwise, cap("body", "literal"), cap("operands", "any")),)),
    shapes="changes",  # symbolic sizes are equal, but other expressions
)


@write_out_slots.replacement
def _(match: Match) -> Any:
    """the operators of the subgraph, on the pairs of this rank"""
    graph = match["body"].module.graph
    made: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), match["operands"], strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            made[node] = written_out(match, node, made, match.root, write_out_slots.id)
    return match.proxy(made[graph.output_node().all_input_nodes[0]])


def written_out(match: Match, node: fx.Node, made: Mapping[fx.Node, Any], before: fx.Node, rule: str) -> fx.Node:
    """The operator of a subgraph's node, on what its operands were made."""
    target: Any = node.target
    args: Any = map_arg(node.args, made.__getitem__)
    kwargs: Any = map_arg(node.kwargs, made.__getitem__)
    if target is positions:
        slots = args[0].meta["val"]
        count = size_proxy(match, slots.shape[0])
        target, args = aten.arange.default, (getattr(count, "node", count),)
        kwargs = {"device": slots.device, "pin_memory": False}
    return match.edit.call(target, args, kwargs, before=before, like=node, rule=rule)


WRITE_OUT_SLOTS = RuleSet("write_out_slots", write_out_slots)
