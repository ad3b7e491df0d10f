"""AutoSP, as a rule set: `print(RULES)` is the whole method on a page.

    canonicalize                  one spelling; a mean over tokens becomes a sum by a global count
    shard_input_ids               hidden states start sharded on the sequence
    shard_seq_dim                 layout rules by worklist; a redistribution wherever two layouts disagree
    insert_attention_all_to_all   those at attention move in front of the repeat of k and v
    propagate_shapes              S -> S/P
    shard_label_ids, ...          redistributions become slices and collectives

Numerics and sources stand with the rules, each in its own file.
"""

from autosp_rules.attention import ATTENTION_RULES
from autosp_rules.sequence import SEQUENCE_RULES
from autosp_rules.slices import SLICE_RULES
from fxrewrite import RuleSet
from fxrewrite.spmd import LocalizeShapes, PropagateLayouts
from rules.collectives import COLLECTIVE_RULES
from rules.layouts import LAYOUTS
from rules.losses import LOSSES
from rules.normal_forms import NORMAL_FORMS
from rules.reductions import REDUCTIONS

__all__ = ["RULES"]

RULES = RuleSet(
    "autosp",
    RuleSet("canonicalize", NORMAL_FORMS, LOSSES),
    SEQUENCE_RULES,
    PropagateLayouts("shard_seq_dim", LAYOUTS),
    ATTENTION_RULES,
    REDUCTIONS,
    LocalizeShapes("propagate_shapes", LAYOUTS),
    SLICE_RULES,
    COLLECTIVE_RULES,
    atomic=True,
)
