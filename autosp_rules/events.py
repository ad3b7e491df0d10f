"""What reports of AutoSP tell, by class; `report.events_of(AttentionRuns)` gives those of one."""

from autosp_rules.attention.choose import AttentionRuns
from autosp_rules.attention.skip import AttentionSkipped
from autosp_rules.attention.written_out import AttentionCallLeft, AttentionWrittenOut
from autosp_rules.masks import FlexHoldsScores, MaskedAttention
from autosp_rules.memory.budget import MemoryFitted
from autosp_rules.memory.checkpoint import Checkpointed, Recomputation, TagsUnread
from autosp_rules.memory.logits import LogitsDropped, LogitsHeld, LogitsNoOutput
from autosp_rules.memory.mlps import MlpsTiled, MlpsWhole
from autosp_rules.report import LeftAlone
from autosp_rules.sequence import OneToken, Padded, TooShort
from autosp_rules.transform import Offloaded
from fxrewrite.spmd import (
    AtBorder,
    Drawn,
    Gathered,
    OutputSharded,
    ProductsWhole,
    ProgramIsLast,
    RegionsCompiled,
    Summed,
    ZerosHeld,
)

__all__ = [
    "AtBorder",
    "AttentionCallLeft",
    "AttentionRuns",
    "AttentionSkipped",
    "AttentionWrittenOut",
    "Checkpointed",
    "Drawn",
    "FlexHoldsScores",
    "Gathered",
    "LeftAlone",
    "LogitsDropped",
    "LogitsHeld",
    "LogitsNoOutput",
    "MaskedAttention",
    "MemoryFitted",
    "MlpsTiled",
    "MlpsWhole",
    "Offloaded",
    "OneToken",
    "OutputSharded",
    "Padded",
    "ProductsWhole",
    "ProgramIsLast",
    "Recomputation",
    "RegionsCompiled",
    "Summed",
    "TagsUnread",
    "TooShort",
    "ZerosHeld",
]
