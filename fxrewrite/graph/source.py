"""Where in the user's program a node comes from."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

import torch
from torch import fx

__all__ = ["source_line"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)


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
