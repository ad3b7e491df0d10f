"""DeepSpeed's own configuration of AutoSP, run by this backend.

    autosp_rules.integrations.deepspeed.replace_autosp()
    engine, *_ = deepspeed.initialize(model=model, config={
        "compile": {"deepcompile": True, "passes": ["autosp"]}, "sequence_parallel_size": 2, ...})
    engine.compile()

DeepSpeed's engine asks its own method `get_autosp_backend` what to compile with. The call replaces that method, in this
process and until the function that it returns is called. A configuration stays as it is, with any stage of ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autosp_rules.backend import AutoSPBackend, autosp
from autosp_rules.errors import AutoSPError
from autosp_rules.integrations.packages import load


def replace_autosp(inner: str | Callable[..., Any] = "inductor", **options: Any) -> Callable[[], None]:
    """DeepSpeed's engines compile with `autosp(inner, **options)` where their configuration has the pass "autosp".

    The axis has `sequence_parallel_size` ranks that follow one another, as DeepSpeed lays them out; the ranks of an
    axis pass the same whole batch. Call it before `engine.compile()`.

    Returns:
        A function that puts DeepSpeed's own method back.

    Raises:
        AutoSPError: deepspeed is not installed, or its engine has no AutoSP.
    """
    engine_class = load("deepspeed.runtime.engine").DeepSpeedEngine
    original = getattr(engine_class, "get_autosp_backend", None)
    if original is None:
        raise AutoSPError.of(
            "this DeepSpeed's engine has no method get_autosp_backend, which is what replace_autosp replaces",
            hint="engine.compile(backend=autosp(...)), with a configuration that does not have the pass autosp",
        )

    def get_autosp_backend(engine: Any, compile_kwargs: dict[str, Any]) -> AutoSPBackend:
        size, num_ranks = int(engine._config._param_dict.get("sequence_parallel_size", 1)), dist.get_world_size()
        if num_ranks % size:
            raise AutoSPError.of(f"sequence_parallel_size: {size} does not divide the {num_ranks} ranks of the job")
        device = load("deepspeed.accelerator").get_accelerator().device_name()
        mesh = init_device_mesh(device, (num_ranks // size, size), mesh_dim_names=("dp", "sp"))
        return autosp(inner, mesh=mesh, **options)

    def put_back() -> None:
        engine_class.get_autosp_backend = original

    engine_class.get_autosp_backend = get_autosp_backend
    return put_back
