"""Where in the user's program a node comes from, and which metadata a node that replaces it inherits."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
CHECKPOINT_TAGS = ("recompute", "ac_graph_id")
"""Metadata that tells AOTAutograd's partitioner that a node belongs to a checkpoint, and to which one."""
_COPIED = frozenset(
    {
        *("stack_trace", "nn_module_stack", "custom"),
        *CHECKPOINT_TAGS,
        *("partitioner_tag", "autograd_backward", "seq_nr"),
        *("original_aten", "from_node"),
    }
)
"""Inherited metadata: source, checkpoint tags, in a joint graph whether a node is forward or backward, and what
inductor names kernels after: the operator before decompositions, and the nodes that this one comes from."""


def copied_meta(like: fx.Node) -> dict[str, Any]:
    """Returns the metadata that a new node inherits from the node that it replaces."""
    return {name: value for name, value in like.meta.items() if name in _COPIED}


def source_line(node: fx.Node) -> str:
    """Returns the last user frame of the node's stack trace as "file.py:41"; empty if it has none.

    Frames inside torch and in generated code are skipped: a linear layer is reported where the user calls it.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        return ""
    for path, line in reversed(_FRAME.findall(trace)):
        if not path.startswith((_TORCH, "<")):
            return f"{PurePath(path).name}:{line}"
    return ""


def with_source(node: fx.Node) -> str:
    """Returns "%name (file.py:41)", or "%name" if its source is not known."""
    source = source_line(node)
    return f"%{node.name} ({source})" if source else f"%{node.name}"
