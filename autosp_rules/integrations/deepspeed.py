"""DeepSpeed's own configuration of AutoSP, run by this backend.

    autosp_rules.integrations.deepspeed.replace_autosp()
    engine, *_ = deepspeed.initialize(model=model, config={
        "compile": {"deepcompile": True, "passes": ["autosp"]}, "sequence_parallel_size": 2, ...})
    engine.compile()

DeepSpeed's engine asks `deepspeed.compile.init_sp.init_autosp(config)` for the backend to compile with. The call puts a
function of ours there, in this process and until the function that it returns is called. A configuration stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autosp_rules.backend import AutoSPBackend, autosp
from autosp_rules.errors import AutoSPError
from autosp_rules.integrations.packages import load

__all__ = ["replace_autosp"]


def replace_autosp(inner: str | Callable[..., Any] = "inductor", **options: Any) -> Callable[[], None]:
    """DeepSpeed's engines compile with `autosp(inner, **options)` where their configuration has the pass "autosp".

    The axis has `sequence_parallel_size` ranks that follow one another, as DeepSpeed lays them out; the ranks of an axis
    pass the same whole batch, and labels that are not shifted. Call it before `engine.compile()`.

    Returns:
        A function that puts DeepSpeed's own back.

    Raises:
        AutoSPError: deepspeed is not installed, or has no AutoSP (it has from 0.18.4 on).
    """
    home = load("deepspeed.compile.init_sp")
    if not hasattr(home, "init_autosp"):
        raise AutoSPError.of(
            "deepspeed.compile.init_sp has no init_autosp, which is where DeepSpeed's engine takes AutoSP from",
            hint="engine.compile(backend=autosp(...)) without the pass autosp in the configuration",
        )
    original = home.init_autosp

    def init_autosp(config: Any) -> AutoSPBackend:
        size, num_ranks = int(config._param_dict.get("sequence_parallel_size", 1)), dist.get_world_size()
        if num_ranks % size:
            raise AutoSPError.of(f"sequence_parallel_size: {size} does not divide the {num_ranks} ranks of the job")
        device = load("deepspeed").get_accelerator().device_name()
        mesh = init_device_mesh(device, (num_ranks // size, size), mesh_dim_names=("dp", "sp"))
        return autosp(inner, mesh=mesh, **options)

    def put_back() -> None:
        home.init_autosp = original

    home.init_autosp = init_autosp
    return put_back
