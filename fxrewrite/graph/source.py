"""Where in the user's program a node comes from, and what of that a node made from it takes over."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import fx

__all__ = ["CHECKPOINT_TAGS", "copied_meta", "source_line"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
CHECKPOINT_TAGS = ("recompute", "ac_graph_id")
"""Metadata by which AOTAutograd's partitioner knows what belongs to a checkpoint, and to which one."""
_COPIED = (
    *("stack_trace", "nn_module_stack", "custom"),
    *CHECKPOINT_TAGS,
    *("partitioner_tag", "autograd_backward", "seq_nr"),
)
"""Where a node comes from, how it is checkpointed, and in a joint graph whether it is forward or backward."""


def copied_meta(like: fx.Node) -> dict[str, Any]:
    """The metadata that a new node takes over from the node it stands for."""
    meta = like.meta
    return {name: meta[name] for name in _COPIED if name in meta}


def source_line(node: fx.Node) -> str:
    """The last user frame of the node's stack trace as "file.py:41"; empty when there is none.

    Frames inside torch and in generated code are not the user's: a linear layer is reported where it is called.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    for path, line in reversed(_FRAME.findall(trace)):
        if not path.startswith((_TORCH, "<")):
            return f"{PurePath(path).name}:{line}"
    return ""
