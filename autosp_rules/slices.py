"""Names slices by what they slice, as AutoSP's users know them.

Matches `redistribute(x, R -> S)` on integers: labels if a loss reads them as targets, otherwise positions. The slice
itself is that of `fxrewrite.spmd.lower`; here it only gets its name in the report.
"""

from __future__ import annotations

from torch import fx

from fxrewrite import Constraint, Match, Pattern, Rule, RuleSet, where
from fxrewrite.graph import reached
from fxrewrite.ops import bind, key
from fxrewrite.spmd import COLLECTIVE_CALLS, LOCAL_SHAPES, Replicate, Shard, moves, redistribution, take_chunk


@where.predicate("x", text="is_integer")
def _is_integer(x: fx.Node) -> bool:
    return not x.meta["val"].is_floating_point()


@where.predicate("root", text="is_target")
def _is_target(root: fx.Node) -> bool:
    """Whether a loss reads the value as its target, directly or through views and casts of one input."""
    shown = reached([root], lambda node: [user for user in node.users if len(user.all_input_nodes) == 1])
    losses = ((node, user) for node in shown for user in node.users if key(user) == "aten::cross_entropy_loss")
    return any(bind(loss)["target"] is node for node, loss in losses)


def _slice(name: str, *guards: Constraint) -> Rule:
    made = Rule(f"autosp.{name}", Pattern((redistribution,), (moves(Replicate, Shard), *guards)))

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
