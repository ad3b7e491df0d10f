"""Each rank has its own part of the batch: parameters are held whole, or in shards that are gathered before use.

    DATA      an all-reduce of each layer's gradients
    ZERO2     an all-gather of each layer before use, and one reduce-scatter of its gradients; parameters, gradients and
              optimizer states at rest are 1/P, and the whole model is there from its forward to its backward pass
    ZERO3     the same, and an all-gather of each layer again in the backward pass, but for the last one; so few layers
              are whole at a time

`dp` is the name of the axis; `dataclasses.replace(ZERO3, axis="shard")` is the same over another one, and
`replace(DATA, axis="replicate") | replace(ZERO3, axis="shard")` are replicas of a sharded model (HSDP).
Source: Rajbhandari et al., ZeRO (arXiv 1910.02054), stages 2 and 3; Zhao et al., PyTorch FSDP (arXiv 2304.11277).
"""

from fxrewrite.spmd import Parallelism, Shard, Stored, param

DATA = Parallelism("data", axis="dp", data="own")
ZERO2 = Parallelism("zero2", axis="dp", data="own", place={param("*"): Stored(Shard(0), or_whole=True, kept=True)})
ZERO3 = Parallelism("zero3", axis="dp", data="own", place={param("*"): Stored(Shard(0), or_whole=True)})
