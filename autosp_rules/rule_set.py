"""AutoSP, as a rule set: `print(rule_set(config))` is the whole method on a page, and docs/architecture.md explains it.

The order is checked: each stage says what it needs, gives and precedes, by the properties below. Numerics and sources
are stated with the rules, each in its own file.
"""

from functools import cache, lru_cache

from autosp_rules.attention import (
    ATTENTION_RULES,
    RING_LAYOUTS,
    RING_RULES,
    SKIP_ALL_BUT_LAST,
    FindWrittenOut,
    choose_attention,
)
from autosp_rules.config import AutoSPConfig
from autosp_rules.masks import DescribeMasks
from autosp_rules.memory.budget import DECIDED, FitMemory
from autosp_rules.memory.checkpoint import FindUnreadTags, TagCheckpoints
from autosp_rules.memory.logits import DropLogits, FindHeldLogits
from autosp_rules.memory.mlps import tile_mlps
from autosp_rules.sequence import ShardInputs, along_sequence
from autosp_rules.slices import SLICE_RULES
from autosp_rules.strict import RefuseWhole
from fxrewrite import DeadCode, Property, RuleSet, Step, staged
from fxrewrite.spmd import (
    BUNDLE_RULES,
    COLLECTIVE_CALLS,
    COLLECTIVE_RULES,
    LOCAL_SHAPES,
    PLACEMENTS,
    REDUCTIONS,
    DecomposeUnknown,
    LayoutRule,
    LayoutRules,
    LocalizeShapes,
    PropagatePlacements,
    RefuseShardedDraws,
    joined_layouts,
)
from rules.attention.by_rows import BY_ROWS
from rules.attention.composite import ATTENTION_UNBIASED, FUSIONS_UNBIASED
from rules.attention.flex import flex_rules
from rules.attention.from_flash import RAISE_FLASH
from rules.attention.from_flex import RAISE_FLEX
from rules.attention.groups import REPEAT_HEADS, SHARE_HEADS
from rules.attention.operator import ATTENTION_LAYOUTS, LOWER_ATTENTION, RAISE_ATTENTION
from rules.canonical.early_cuts import EARLY_CUTS
from rules.canonical.joined_parts import JOINED_PARTS
from rules.canonical.losses import LOSSES
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.experts.exchange import ExchangePairs
from rules.experts.fuse import FuseSlots
from rules.experts.over_ranks import EXPERT_LAYOUTS, EXPERTS_OVER_RANKS, WRITE_OUT_EXPERTS
from rules.experts.slots import SLOT_LAYOUTS, WRITE_OUT_SLOTS
from rules.halos import LOWER_CONVOLUTIONS, RAISE_CONVOLUTIONS
from rules.layouts import LAYOUTS
from rules.masks.dense import MASKS
from rules.masks.naming import NameMasks
from rules.random import DRAW_WHOLE, DrawByRank
from rules.tiling.loss import tiled_loss_rules

_ALL_LAYOUTS = LayoutRules((*LAYOUTS, *ATTENTION_LAYOUTS, *SLOT_LAYOUTS, *EXPERT_LAYOUTS, *RING_LAYOUTS))
CANONICAL = Property("canonical graph", "canonicalize")
"""Each thing is spelled in one way, attention as one operator."""
SLOTS = Property("fused slots", "a FuseSlots step")
"""Experts are one node, slot by slot."""
SEQUENCE = Property("sequence", "a ShardInputs step")
"""Where the sequence starts is sharded, and its lengths are known."""
MASK_KINDS = Property("mask kinds", "a NameMasks step")
"""What dense masks mean is known."""
STRATEGIES = Property("attention strategies", "choose_attention")
"""How each call of attention runs is known, and what that needs is in the graph."""
BLOCKS = Property("masks by blocks", "BY_ROWS")
"""No mask is left that could be computed a block of rows at a time."""
MASK_KERNELS = Property("mask kernels", "a DescribeMasks step")
"""What computes each mask is known, and reported."""
ALL_HEADS = Property("all heads", "REPEAT_HEADS")
"""k and v have as many heads as their kernel takes."""
KERNELS = Property("attention kernels", "LOWER_ATTENTION")
"""Attention is what the device runs."""
DRAWS = Property("draws", "a DrawByRank step")
"""What draws random numbers draws those that it should, on each rank."""
LOSS = Property("loss", "tiled_loss_rules(...)")
"""The loss is in tiles where it can be."""
CHECKPOINTS = Property("checkpoints", "a TagCheckpoints step")
"""What layers keep is decided."""

ONE_DEVICES_DRAWS = RefuseShardedDraws(
    "refuse_own_draws", hint="use rng='local', or for attention with dropout the eager implementation"
)
"""What is left of random draws after `DRAW_WHOLE`, under rng="global"."""


@cache
def layouts_with(own: tuple[LayoutRule, ...] = ()) -> LayoutRules:
    """All layout rules of AutoSP, these, and those that installed packages register; read once in a process.

    Raises:
        RuleDefinitionError: one of these is for an operator that has a layout rule already.
    """
    return joined_layouts(_ALL_LAYOUTS, own)


def rule_set(config: AutoSPConfig | None = None) -> RuleSet:
    """AutoSP with these settings: all that is done to a graph, from the capture to the inner backend.

    Equal configurations get one set; callables as `inner` are equal here.

    Raises:
        RuleDefinitionError: one of `config.layouts` is for an operator that has a layout rule already.
    """
    config = config or AutoSPConfig()
    inner = config.inner if isinstance(config.inner, str) else "a callable"
    given = frozenset(config.model_fields_set & set(DECIDED))
    return _rule_set(config.model_copy(update={"inner": inner}), given)  # pyright: ignore[reportArgumentType]  # frozen models have a hash


@lru_cache(maxsize=64)
def _rule_set(config: AutoSPConfig, given: frozenset[str]) -> RuleSet:
    layouts = layouts_with(config.layouts)
    flex = "rows" if config.mask_kernel == "auto" and config.inner != "inductor" else config.mask_kernel
    is_global = config.rng == "global"
    return RuleSet(
        "autosp",
        *((staged(DropLogits(), precedes=(CANONICAL,)),) if config.logits == "drop" else ()),
        RuleSet(
            "canonicalize",
            *(NORMAL_FORMS, RAISE_FLEX, RAISE_FLASH, JOINED_PARTS, EARLY_CUTS, LOSSES, ATTENTION_UNBIASED),
            *_own_rules(config),
            *(
                MASKS,
                RAISE_ATTENTION,
                SHARE_HEADS,
                RAISE_CONVOLUTIONS,
                DecomposeUnknown("decompose_unknown", layouts),
                DeadCode(),
            ),
            gives=(CANONICAL,),
        ),
        *((staged(DRAW_WHOLE, precedes=(PLACEMENTS,)),) if is_global else ()),
        staged(FuseSlots(layouts), needs=(CANONICAL,), gives=(SLOTS,)),
        staged(EXPERTS_OVER_RANKS, needs=(SLOTS,), precedes=(PLACEMENTS,)),
        staged(ShardInputs("shard_inputs", layouts, config.sequence_dim), needs=(SLOTS,), gives=(SEQUENCE,)),
        staged(FindWrittenOut(FUSIONS_UNBIASED.rules(), config.attention), needs=(CANONICAL,), precedes=(PLACEMENTS,)),
        staged(NameMasks(), needs=(CANONICAL,), gives=(MASK_KINDS,)),
        staged(choose_attention(config.attention), needs=(MASK_KINDS,), gives=(STRATEGIES,)),
        staged(PropagatePlacements("shard_seq_dim", layouts, along_sequence), needs=(SEQUENCE, STRATEGIES)),
        *((RefuseWhole(),) if config.strict else ()),
        staged(ExchangePairs(config.experts), needs=(PLACEMENTS,), precedes=(LOCAL_SHAPES,)),
        staged(ATTENTION_RULES, needs=(PLACEMENTS, STRATEGIES), precedes=(LOCAL_SHAPES,)),
        REDUCTIONS,
        LocalizeShapes("propagate_shapes", layouts),
        SLICE_RULES,
        RING_RULES,
        LOWER_CONVOLUTIONS,
        BUNDLE_RULES,
        COLLECTIVE_RULES,
        staged(WRITE_OUT_EXPERTS, needs=(SLOTS, COLLECTIVE_CALLS), precedes=(CHECKPOINTS,)),
        staged(WRITE_OUT_SLOTS, needs=(SLOTS, COLLECTIVE_CALLS), precedes=(CHECKPOINTS,)),
        staged(BY_ROWS, needs=(COLLECTIVE_CALLS, MASK_KINDS), gives=(BLOCKS,)),
        *(() if flex == "rows" else (staged(flex_rules(flex), needs=(BLOCKS,), precedes=(MASK_KERNELS,)),)),
        staged(DescribeMasks(flex, config.inner), needs=(BLOCKS,), gives=(MASK_KERNELS,)),
        staged(REPEAT_HEADS, needs=(MASK_KERNELS,), gives=(ALL_HEADS,)),
        staged(LOWER_ATTENTION, needs=(ALL_HEADS,), gives=(KERNELS,)),
        staged(ONE_DEVICES_DRAWS if is_global else DrawByRank(), needs=(KERNELS,), gives=(DRAWS,)),
        *(_memory(config) if config.memory is None else (_fit_memory(config, given),)),
        *((staged(FindHeldLogits(config.loss_tile), needs=(LOSS,)),) if config.logits == "drop" else ()),
        *((staged(FindUnreadTags(), needs=(CHECKPOINTS,)),) if config.inner == "eager" else ()),
        *((staged(SKIP_ALL_BUT_LAST, needs=(CHECKPOINTS,)),) if config.skip_all_but_last_attention else ()),
        atomic=True,
    )


def _own_rules(config: AutoSPConfig) -> tuple[RuleSet, ...]:
    """The rules of the user, and attention again, in the spellings that these give."""
    if not config.rules:
        return ()
    return RuleSet("own_rules", *config.rules), RuleSet("attention_of_own_rules", ATTENTION_UNBIASED)


def _memory(config: AutoSPConfig) -> tuple[RuleSet | Step, ...]:
    """The loss in tiles, what layers keep, and MLPs in tiles.

    "auto" tiles MLPs by what layers keep, a number of bytes comes before that is decided.
    """
    loss = staged(
        tiled_loss_rules(None if config.loss_tile == "auto" else config.loss_tile),
        needs=(COLLECTIVE_CALLS,),
        gives=(LOSS,),
    )
    tags = staged(TagCheckpoints(config.checkpoint), needs=(KERNELS, DRAWS, LOSS), gives=(CHECKPOINTS,))
    if config.mlp_tile is None:
        return loss, tags
    if config.mlp_tile == "auto":
        return loss, tags, staged(tile_mlps("auto"), needs=(CHECKPOINTS,))
    return loss, staged(tile_mlps(config.mlp_tile), needs=(KERNELS,), precedes=(CHECKPOINTS,)), tags


def _fit_memory(config: AutoSPConfig, given: frozenset[str]) -> Step:
    """The same, with settings that a budget decides."""
    needs = (COLLECTIVE_CALLS, KERNELS, DRAWS)

    def rules(settings: AutoSPConfig) -> RuleSet:
        return RuleSet("memory", *_memory(settings), needs=needs)

    return staged(FitMemory(config, given, rules), needs=needs, gives=(LOSS, CHECKPOINTS))


RULES = rule_set()
