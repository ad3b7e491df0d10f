"""AutoSP as a named backend, which torch imports for `torch.compile(model, backend="autosp", options={...})`.

Importing this module keeps Dynamo from splitting graphs under DDP, as `autosp()` does; torch imports it when the model
is compiled, before any graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autosp_rules.backend import AutoSPBackend, autosp
from autosp_rules.config import AutoSPConfig
from fxrewrite.backends import keep_graph_whole_under_ddp

keep_graph_whole_under_ddp()
_backends: dict[tuple[AutoSPConfig, DeviceMesh | None], AutoSPBackend] = {}
"""One backend per choice of settings, because a model with graph breaks calls it for each part."""


def autosp_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """Returns this rank's compiled program; `options` are those of `autosp`, `others` what torch passes besides."""
    backend = autosp(**dict(options or {}))
    return _backends.setdefault((backend.config, backend.mesh), backend)(gm, example_inputs, **others)
