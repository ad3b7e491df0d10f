"""Slices by what they slice: the names that AutoSP's users know.

Matches `redistribute(x, R -> S)` on integers, which are labels where a loss reads them as targets, else positions.
The slice itself is that of `fxrewrite.spmd.lower`; here it gets its name in the report.
"""

from __future__ import annotations

from torch import fx

from fxrewrite import Constraint, Match, Pattern, Rule, RuleSet, where
from fxrewrite.ops import bind, key
from fxrewrite.spmd import COLLECTIVE_CALLS, LOCAL_SHAPES, Replicated, Shard, moves, redistribution, take_chunk

__all__ = ["SLICE_RULES"]


@where.predicate("x", text="is_integer")
def _is_integer(x: fx.Node) -> bool:
    return not x.meta["val"].is_floating_point()


@where.predicate("root", text="is_target")
def _is_target(root: fx.Node) -> bool:
    """Whether a loss reads the value as its target, directly or through views and casts of one input."""
    reached, todo = {root}, [root]
    while todo:
        node = todo.pop()
        for user in node.users:
            if key(user) == "aten::cross_entropy_loss" and bind(user)["target"] is node:
                return True
            if user not in reached and len(user.all_input_nodes) == 1:
                reached.add(user)
                todo.append(user)
    return False


def _slice(name: str, *guards: Constraint) -> Rule:
    made = Rule(f"autosp.{name}", Pattern((redistribution,), (moves(Replicated, Shard), *guards)))

    @made.replacement
    def _(match: Match, x: fx.Proxy, dst: Shard) -> fx.Proxy:
        """the rank's chunk"""
        return take_chunk(match, x, dst)

    return made


SLICE_RULES = RuleSet(
    "shard_label_ids, shard_position_ids",
    _slice("shard_label_ids", _is_integer, _is_target),
    _slice("shard_position_ids", _is_integer),
    needs=(LOCAL_SHAPES,),
    precedes=(COLLECTIVE_CALLS,),
)
