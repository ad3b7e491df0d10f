"""Experts over ranks: each holds 1/P of the experts of every mixture, and computes the pairs that go to them.

EXPERTS  One sum of each mixture's output forward, and one of its gradients backward; every rank has all tokens.

Routers, shared experts and whatever else is not in a module `experts` is whole, so that losses which balance the load
see all tokens. The experts of a mixture must run as grouped products, which transformers does by default; where they do
not, their matrices are gathered, with a line in the report.
Source: Lepikhin et al., GShard (arXiv 2006.16668); Fedus et al., Switch Transformers (arXiv 2101.03961).
"""

from fxrewrite.spmd import Parallelism, Shard, param
from rules.experts.fuse import FuseSlots
from rules.experts.over_ranks import EXPERT_LAYOUTS, EXPERTS_OVER_RANKS, WRITE_OUT_EXPERTS
from rules.experts.slots import SLOT_LAYOUTS, WRITE_OUT_SLOTS
from rules.layouts import LAYOUTS

__all__ = ["EXPERTS"]

EXPERTS = Parallelism(
    "experts",
    axis="ep",
    place={param("*.experts.*"): Shard(0)},
    rules=[FuseSlots("fuse_slots", LAYOUTS), EXPERTS_OVER_RANKS],
    lowered=[WRITE_OUT_EXPERTS, WRITE_OUT_SLOTS],
    layouts=(*SLOT_LAYOUTS, *EXPERT_LAYOUTS),
)
