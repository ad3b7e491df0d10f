"""Experts over ranks: each holds 1/P of the experts of every mixture, and computes the pairs that go to them.

    EXPERTS        every rank has all tokens: one sum of each mixture's output forward, and one of its gradients
                   backward. Where a plan cuts the tokens over the same axis, they are gathered and the sum is
                   scattered, or pairs are sent to their experts and back by all-to-all, whichever sends less.
    EXPERT_DATA    each rank has its own part of the batch: three all-to-alls a mixture forward, of counts, of pairs and
                   of results; two backward. Other parameters are whole, and their gradients averaged.
    EXPERT_ZERO3   the same, and other parameters are held in shards, and gathered before use

Routers, shared experts and whatever else is not in a module `experts` is not cut into experts, so losses which balance
the load see all tokens of a batch; with EXPERT_DATA and EXPERT_ZERO3 those of the rank's own batch. The experts of a
mixture must run as grouped products, which transformers does by default; where they do not, their matrices are
gathered, with a line in the report.
Source: Lepikhin et al., GShard (arXiv 2006.16668); Fedus et al., Switch Transformers (arXiv 2101.03961); Rajbhandari et
al., DeepSpeed-MoE (arXiv 2201.05596).
"""

from dataclasses import replace

from fxrewrite.spmd import Parallelism, Shard, Stored, param
from rules.experts.exchange import ExchangePairs
from rules.experts.fuse import FuseSlots
from rules.experts.over_ranks import EXPERT_LAYOUTS, EXPERTS_OVER_RANKS, WRITE_OUT_EXPERTS
from rules.experts.slots import SLOT_LAYOUTS, WRITE_OUT_SLOTS
from rules.layouts import LAYOUTS

EXPERTS = Parallelism(
    "experts",
    axis="ep",
    place={param("*.experts.*"): Shard(0)},
    rules=[FuseSlots(LAYOUTS), EXPERTS_OVER_RANKS],
    placed=[ExchangePairs()],
    lowered=[WRITE_OUT_EXPERTS, WRITE_OUT_SLOTS],
    layouts=(*SLOT_LAYOUTS, *EXPERT_LAYOUTS),
)

EXPERT_DATA = replace(EXPERTS, name="expert_data", axis="dp", data="own")
_OTHERS = param("*", but="*.experts.*")
EXPERT_ZERO3 = replace(
    EXPERT_DATA, name="expert_zero3", place={**EXPERTS.place, _OTHERS: Stored(Shard(0), or_whole=True)}
)
