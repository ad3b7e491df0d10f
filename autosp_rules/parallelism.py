"""AutoSP as a parallelism, to be composed with others over the axes of a mesh: `ZERO3 | AUTOSP | MEGATRON`.

    AUTOSP          every rank has the whole batch, and computes its part of each sequence
    AUTOSP_ZERO3    the same, and the ranks of the sequence hold parameters in shards, too; under `ZERO3 | AUTOSP_ZERO3`
                    a rank holds 1 / (ranks of dp x ranks of sp) of them, as under DeepSpeed's Ulysses with ZeRO-3
    CONTEXT         each rank has its part of each sequence; CONTEXT_ZIGZAG two blocks of it
    CONTEXT_ZERO3   as CONTEXT, and parameters in shards

Any of them can be held in shards: `replace(CONTEXT_ZIGZAG, place={**CONTEXT_ZIGZAG.place, **ZERO3.place})`.
"""

from dataclasses import replace

from autosp_rules.config import AutoSPConfig
from autosp_rules.rule_set import rule_set
from fxrewrite.spmd import Parallelism, Shard, Zigzag, inputs
from rules.parallel import ZERO3


def autosp_parallelism(config: AutoSPConfig | None = None) -> Parallelism:
    """AutoSP with these settings over `config.axis`, as one of several parallelisms of a mesh."""
    config = config or AutoSPConfig()
    return Parallelism("autosp", axis=config.axis, method=rule_set(config))


AUTOSP = autosp_parallelism()
AUTOSP_ZERO3 = replace(AUTOSP, name="autosp_zero3", place=ZERO3.place)

TOKENS = inputs("{input_ids,inputs_embeds,labels,shift_labels,position_ids,attention_mask,token_type_ids}")
"""Arguments whose dimension 1 is the sequence."""
CONTEXT = replace(AUTOSP, name="context", place={TOKENS: Shard(1)})
CONTEXT_ZERO3 = replace(CONTEXT, name="context_zero3", place={**CONTEXT.place, **ZERO3.place})
CONTEXT_ZIGZAG = replace(AUTOSP, name="context_zigzag", place={TOKENS: Zigzag(1)})
