"""AutoSP as a parallelism, to be composed with others over the axes of a mesh: `ZERO3 | AUTOSP | MEGATRON`."""

from dataclasses import replace

from autosp_rules.config import AutoSPConfig
from autosp_rules.rule_set import rule_set
from fxrewrite.spmd import Parallelism, Shard, Zigzag, inputs

__all__ = ["AUTOSP", "CONTEXT", "CONTEXT_ZIGZAG", "autosp_parallelism"]


def autosp_parallelism(config: AutoSPConfig | None = None) -> Parallelism:
    """AutoSP with these settings over `config.axis`, as one of several parallelisms of a mesh."""
    config = config or AutoSPConfig()
    return Parallelism("autosp", axis=config.axis, method=rule_set(config))


AUTOSP = autosp_parallelism()

TOKENS = inputs("{input_ids,inputs_embeds,labels,shift_labels,position_ids,attention_mask,token_type_ids}")
"""Arguments whose dimension 1 is the sequence."""
CONTEXT = replace(AUTOSP, name="context", place={TOKENS: Shard(1)})
CONTEXT_ZIGZAG = replace(AUTOSP, name="context_zigzag", place={TOKENS: Zigzag(1)})
