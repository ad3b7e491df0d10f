"""What DeepSpeed does to gradients: which ranks it reduces them over, and by what it divides.

DeepSpeed divides the sum over its sequence-data group R by |R| / sp, where sp is its sequence-parallel size.
Source: deepspeed/runtime/engine.py (`_reduce_non_expert_gradients`), runtime/zero/stage_1_and_2.py, 0.19.8.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from fxrewrite.backends import GradientReduction


def deepspeed_reduction() -> GradientReduction | None:
    """What DeepSpeed does to gradients, if it is loaded and was told of sequence parallelism; else None."""
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None or (groups.mpu is None and groups.mesh_device is None):
        return None
    size = groups._get_sequence_parallel_world_size()
    if size == 1:
        return None
    ranks = dist.get_process_group_ranks(groups._get_sequence_data_parallel_group())
    return GradientReduction("DeepSpeed", frozenset(ranks), size / len(ranks))
