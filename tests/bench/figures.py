"""What `long_context.py` measured, one line of JSON for each row of its tables; `plots.py` draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field


class Figures(BaseModel, frozen=True):
    """What one step of one way cost on rank 0."""

    seconds: float = Field(description="of forward and backward, the median")
    peak: int = Field(description="bytes, the most at any time of the step above what was there before")
    saved: int = Field(description="bytes that are left behind the forward")
    sent: int = Field(description="bytes that collectives carry away")
    compile: float = Field(description="seconds of the first step, from an empty cache")
    transform: float = Field(description="seconds of that in the way's own passes")


class Measured(BaseModel, frozen=True):
    """A way, what it ran, and what that cost; of the table "longest", the longest sequence within a budget."""

    table: Literal["steps", "longest", "layers", "lengths"]
    way: str
    ranks: int
    alone: bool = Field(description="rank 0 without the others, so that collectives cost no time and send nothing")
    layers: int
    hidden: int
    vocab: int
    length: int = Field(description="tokens of the batch [1, length]")
    budget: int | None = Field(default=None, description="bytes that the peak of the longest sequence stays within")
    figures: Figures | None = Field(default=None, description="None for the longest sequence")
    machine: str = Field(description="versions of torch and transformers, and the date")


def append(path: Path | None, measured: Measured) -> None:
    """Writes a line at the end of the file; nothing if there is no file."""
    if path is not None:
        with path.open("a", encoding="utf-8") as lines:
            lines.write(measured.model_dump_json(exclude_none=True) + "\n")


def read(path: Path) -> list[Measured]:
    """Returns what was measured; of what was measured twice, the last."""
    found = map(Measured.model_validate_json, path.read_text(encoding="utf-8").splitlines())
    same = {(m.table, m.way, m.ranks, m.alone, m.layers, m.hidden, m.vocab, m.figures and m.length): m for m in found}
    return list(same.values())
