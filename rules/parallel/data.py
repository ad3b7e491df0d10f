"""Each rank has its own part of the batch: parameters are held whole, or in shards that are gathered before use.

    DATA      one all-reduce of each gradient
    ZERO3     an all-gather of each parameter before use, again in the backward pass, and one reduce-scatter of its
              gradient; what the ranks do not divide is held whole

`dp` is the name of the axis; `dataclasses.replace(ZERO3, axis="shard")` is the same over another one, and
`replace(DATA, axis="replicate") | replace(ZERO3, axis="shard")` are replicas of a sharded model (HSDP).
Source: Rajbhandari et al., ZeRO (arXiv 1910.02054), stage 3; Zhao et al., PyTorch FSDP (arXiv 2304.11277).
"""

from fxrewrite.spmd import Parallelism, Shard, Stored, param

__all__ = ["DATA", "ZERO3"]

DATA = Parallelism("data", axis="dp", data="own")
ZERO3 = Parallelism("zero3", axis="dp", data="own", place={param("*"): Stored(Shard(0), or_whole=True)})
