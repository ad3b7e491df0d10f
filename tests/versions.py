"""Which torch the tests run on, for what differs between its versions; docs/compatibility.md has the list."""

from typing import Any

import torch
from torch import fx

from fxrewrite.graph.text import graph_text

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
FAKE_SCATTERS = TORCH >= (2, 13)
"""Whether a reduce-scatter of torch's fake process group writes its result; it left what was in memory."""
NO_DERIVATIVE = {"aminmax", "narrow_copy"} if TORCH < (2, 12) else set[str]()
"""Operators that autograd differentiates since torch 2.12."""

NO_OVERLAP = {"aten_distributed_optimizations.enable_simple_overlap": False} if TORCH >= (2, 14) else dict[str, bool]()
"""Options under which inductor waits for a collective where the graph does; torch 2.14 waits late by default."""


def flex_text(gm: fx.GraphModule) -> str:
    """The canonical text; calls of flex attention as from torch 2.13 on, which has four more entries, not required."""
    text = graph_text(gm)
    return text if TORCH >= (2, 13) else text.replace(", 128, 128, @", ", None, None, None, None, 128, 128, @")


def passes_in(slot: Any) -> Any:
    """The passes of inductor's slot, where it has several: torch 2.13 holds them in a tuple, we do so before."""
    return getattr(slot, "passes", slot)
