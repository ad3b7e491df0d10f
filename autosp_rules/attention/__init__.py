"""Attention over a sharded sequence: interchangeable strategies behind one contract, one file each.

    strategy      the contract: when it serves a call, what it costs, and its rules
    ulysses       whole sequences of some heads on each rank, by all-to-all
    gather_kv     a rank's own queries against all keys, k and v gathered
    ring          a rank's own queries; k and v are sent from rank to rank; or a ring over groups of ranks
    exchange      the placement of values in a ring, and the operator that moves them there and back
    ring_kernel   the ring itself, forward and backward
    together      q, k and v in one collective
    skip          every attention but the last gives zeros, to measure memory
    choose        which strategy serves which call, and the events about it in the report

A strategy that the user requests is applied or refused; without a request, the cheapest strategy that serves a call is
chosen. Propagation does the rest: the layout rule of attention (`rules.layouts.attention`) moves the shards to the
heads if these divide over the axis, and otherwise leaves queries in place.
"""

from functools import cache

from autosp_rules.attention.choose import ChooseAttention, DescribeAttention
from autosp_rules.attention.gather_kv import GATHER_KV
from autosp_rules.attention.ring import RING, RING_LAYOUTS, RING_RULES, RING_ULYSSES
from autosp_rules.attention.skip import SKIP_ALL_BUT_LAST
from autosp_rules.attention.together import MoveTogether
from autosp_rules.attention.ulysses import ULYSSES
from autosp_rules.attention.written_out import FindWrittenOut
from autosp_rules.config import AttentionOption
from fxrewrite import DeadCode, RuleSet

__all__ = [
    "ATTENTION_RULES",
    "RING_LAYOUTS",
    "RING_RULES",
    "SKIP_ALL_BUT_LAST",
    "AttentionOption",
    "FindWrittenOut",
    "choose_attention",
]

_STRATEGIES = (ULYSSES, GATHER_KV, RING, RING_ULYSSES)


@cache
def choose_attention(asked: AttentionOption = "auto") -> RuleSet:
    """Returns the rules that run before propagation: strategy `asked` for every call, or the cheapest for each."""
    return RuleSet(
        "choose_attention",
        ChooseAttention(_STRATEGIES, asked),
        *(rule for strategy in _STRATEGIES for rule in strategy.rules),
        DeadCode("drop_masks"),
    )


ATTENTION_RULES = RuleSet("insert_attention_all_to_all", MoveTogether(), DescribeAttention())
"""Runs after propagation."""
