"""AutoSP, as a rule set: `print(RULES)` is the whole method on a page.

    canonicalize                  one spelling; a mean over tokens becomes a sum by a global count; a dense mask becomes
                                  what it means; attention is one operator, however it is spelled, where that is equal
                                  in every row; heads that are repeated for groups of queries are shared by them; at
                                  its end, rules that were given to `autosp(rules=...)`
    fuse_slots                    experts between a sort of slots and its inverse become one node, slot by slot
    shard_inputs                  hidden states start sharded on the sequence
    choose_attention              how each attention runs, by its heads; what that strategy needs is written out
    shard_seq_dim                 layout rules by worklist; a redistribution wherever two layouts disagree
    insert_attention_all_to_all   those at attention go together
    propagate_shapes              S -> S/P
    lower_ring                    attention over a ring becomes the operator that sends k and v round
    shard_label_ids, ...          redistributions become slices and collectives
    write_out_slots               the operators of experts again, on the slots of a rank's tokens
    attention_by_rows             a mask that is left is computed a block of rows at a time, and held no longer
    flex_attention                if asked for, that becomes torch's flex attention where inductor has a kernel for it
    attention_repeat_heads        shared heads are repeated where no kernel of the device takes groups of queries
    lower_attention               what is left of attention is torch's operator, or written out where it has sinks
    draw_by_rank                  what draws on a chunk, noise or dropout, draws other numbers on each rank
    tiled_loss                    the head and its loss in tiles, where nobody reads the logits
    checkpoint                    tags: what layers keep, and what they compute again
    tile_mlps                     MLPs in tiles, where layers compute them again; before the tags where asked for
    skip_attention                if asked for, every attention but the last gives zeros, to measure memory

Numerics and sources stand with the rules, each in its own file.
"""

from functools import cache
from typing import Literal

from autosp_rules.attention import (
    ATTENTION_RULES,
    RING_LAYOUTS,
    RING_RULES,
    SKIP_ALL_BUT_LAST,
    AttentionOption,
    choose_attention,
)
from autosp_rules.masks import DescribeMasks
from autosp_rules.memory.checkpoint import CheckpointOption, TagCheckpoints
from autosp_rules.memory.mlps import MlpTileOption, tile_mlps
from autosp_rules.sequence import ShardInputs, along_sequence
from autosp_rules.slices import SLICE_RULES
from fxrewrite import DeadCode, Rule, RuleSet
from fxrewrite.spmd import (
    BUNDLE_RULES,
    COLLECTIVE_RULES,
    REDUCTIONS,
    LayoutRule,
    LayoutRules,
    LocalizeShapes,
    PropagateLayouts,
    joined_layouts,
)
from rules.attention.by_rows import BY_ROWS
from rules.attention.composite import ATTENTION_UNBIASED
from rules.attention.flex import MaskKernel, flex_rules
from rules.attention.groups import REPEAT_HEADS, SHARE_HEADS
from rules.attention.operator import ATTENTION_LAYOUTS, LOWER_ATTENTION, RAISE_ATTENTION
from rules.canonical.losses import LOSSES
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.experts.fuse import FuseSlots
from rules.experts.slots import SLOT_LAYOUTS, WRITE_OUT_SLOTS
from rules.layouts import LAYOUTS
from rules.masks.dense import MASKS
from rules.masks.kinds import NameMasks
from rules.random import DRAW_WHOLE, DrawByRank
from rules.tiling.loss import tiled_loss_rules
from rules.tiling.tiles import TILE_BYTES

__all__ = ["RULES", "layouts_with", "rule_set"]

_ALL_LAYOUTS = LayoutRules((*LAYOUTS, *ATTENTION_LAYOUTS, *SLOT_LAYOUTS, *RING_LAYOUTS))


@cache
def layouts_with(own: tuple[LayoutRule, ...] = ()) -> LayoutRules:
    """All layout rules of AutoSP, these, and those that installed packages register; read once in a process.

    Raises:
        RuleDefinitionError: one of these is for an operator that has a layout rule already.
    """
    return joined_layouts((*_ALL_LAYOUTS, *own))


@cache
def rule_set(
    attention: AttentionOption = "auto",
    rng: Literal["local", "global"] = "local",
    checkpoint: CheckpointOption = "auto",
    loss_tile: int = TILE_BYTES,
    mlp_tile: MlpTileOption = "auto",
    mask_kernel: MaskKernel = "rows",
    *,
    skip_all_but_last_attention: bool = False,
    sequence_dim: int | None = None,
    rules: tuple[Rule | RuleSet, ...] = (),
    layouts: LayoutRules = _ALL_LAYOUTS,
) -> RuleSet:
    """AutoSP with these settings of `AutoSPConfig`, and with all layout rules that it uses."""
    tags, tiles = TagCheckpoints(checkpoint), () if mlp_tile is None else (tile_mlps(mlp_tile),)
    own = (RuleSet("own_rules", *rules),) if rules else ()
    return RuleSet(
        "autosp",
        RuleSet(
            "canonicalize",
            *(NORMAL_FORMS, LOSSES, ATTENTION_UNBIASED, MASKS, RAISE_ATTENTION, SHARE_HEADS),
            *own,
            DeadCode(),
        ),
        *((DRAW_WHOLE,) if rng == "global" else ()),
        FuseSlots("fuse_slots", layouts),
        ShardInputs("shard_inputs", layouts, sequence_dim),
        NameMasks(),
        choose_attention(attention),
        PropagateLayouts("shard_seq_dim", layouts, along_sequence),
        ATTENTION_RULES,
        REDUCTIONS,
        LocalizeShapes("propagate_shapes", layouts),
        SLICE_RULES,
        RING_RULES,
        BUNDLE_RULES,
        COLLECTIVE_RULES,
        WRITE_OUT_SLOTS,
        BY_ROWS,
        *(() if mask_kernel == "rows" else (flex_rules(mask_kernel),)),
        DescribeMasks(mask_kernel),
        REPEAT_HEADS,
        LOWER_ATTENTION,
        *((DrawByRank(),) if rng == "local" else ()),
        tiled_loss_rules(loss_tile),
        *((tags, *tiles) if mlp_tile == "auto" else (*tiles, tags)),
        *((SKIP_ALL_BUT_LAST,) if skip_all_but_last_attention else ()),
        atomic=True,
    )


RULES = rule_set()
