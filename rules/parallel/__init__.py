"""Parallelisms as data, one file each: every one is a few placements, and everything else follows from them.

    plan = ZERO3 | MEGATRON
    step = torch.compile(shard_parameters(model, plan, mesh), backend=spmd(plan, mesh=mesh))

`docs/parallel.md` says what each sends; `docs/write-a-parallelism.md` shows how to write one.
"""

from rules.parallel.data import DATA as DATA, ZERO2 as ZERO2, ZERO3 as ZERO3
from rules.parallel.experts import EXPERT_DATA as EXPERT_DATA, EXPERT_ZERO3 as EXPERT_ZERO3, EXPERTS as EXPERTS
from rules.parallel.heads import WHOLE_HEADS as WHOLE_HEADS
from rules.parallel.megatron import (
    MEGATRON as MEGATRON,
    MEGATRON_LAYERS as MEGATRON_LAYERS,
    MEGATRON_SP as MEGATRON_SP,
)
from rules.parallel.transformers_plans import from_transformers as from_transformers
from rules.parallel.vocabulary import VOCABULARY as VOCABULARY, VOCABULARY_LAYOUTS as VOCABULARY_LAYOUTS
