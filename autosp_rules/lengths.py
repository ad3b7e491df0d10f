"""The sequence length that decisions are made for where a program serves any length."""

from __future__ import annotations

import torch

from fxrewrite.graph import size_hint

PLANNED_LENGTH = 32_768
"""The length (tokens) that a program for any length is planned for, where the one at hand is shorter."""


def planned_size(size: int | torch.SymInt) -> int:
    """The size where a symbolic sequence length is at least `PLANNED_LENGTH`; adds no guard."""
    return size_hint(size, at_least=PLANNED_LENGTH)
