"""The settings of AutoSP, as one frozen value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AutoSPConfig"]


class AutoSPConfig(BaseModel):
    """Settings of the `autosp` backend; unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inner: str | Callable[..., Any] = Field(
        default="inductor", description="backend that compiles the rewritten graph: a registered name or a callable"
    )
    axis: str = Field(default="sp", description="name of the mesh axis over which the sequence is sharded")
    strict: bool = Field(
        default=False,
        description="refuse an operator without a layout rule instead of running it on the gathered value",
    )
    outputs: Literal["auto", "shard", "gather"] = Field(
        default="auto",
        description="how sharded outputs other than scalars return: each rank's own chunk (shard), whole on every rank "
        "(gather), or auto: chunks where the graph also returns a scalar loss, else whole",
    )
    timeout: float = Field(
        default=300.0, gt=0, description="seconds to wait at compile time for the other ranks to show the same graph"
    )
