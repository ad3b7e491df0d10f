"""What a child process does: it measures named figures one by one, and writes each as a line of JSON."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

Figures: TypeAlias = Mapping[str, Callable[[], dict[str, Any]]]
"""What measures each figure, by name, in order. `holds` in a result says whether what the figure checks is true."""


@dataclass(frozen=True)
class Setting:
    """Where to measure, and how much.

    Attributes:
        device: "cuda", or "cpu", where what only CUDA can tell is None.
        tiny: sizes with which every section ends in a minute on two cores; they measure nothing.
        layers: how many layers of the models that are timed are there; 0: all.
        memory: bytes of the card that this process may take, where a section asks; None on a CPU.
        turns: a file that processes lock in turn to measure; None where there is one process.
    """

    device: str
    tiny: bool
    layers: int
    memory: int | None = None
    turns: Path | None = None

    @contextmanager
    def alone(self) -> Generator[None]:
        """Other processes of this run neither measure nor are `using` the card meanwhile. It cannot be nested."""
        with self._locked(fcntl.LOCK_EX):
            try:
                yield
            finally:
                if self.is_cuda:
                    torch.cuda.empty_cache()  # the others need the card's memory

    @contextmanager
    def using(self) -> Generator[None]:
        """Compiling, which tries kernels on the card: with others that do so, and with nobody who measures."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _locked(self, how: int) -> Generator[None]:
        if self.turns is None:
            yield
            return
        with self.turns.open() as file:
            fcntl.flock(file, how)  # closing the file gives it back
            yield

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def backend(self) -> str:
        """Of real process groups."""
        return "nccl" if self.is_cuda else "gloo"


def write_figures(figures: Figures, lines: Path, leave_out: Sequence[str], part: int = 0, parts: int = 1) -> None:
    """Measures the figures of one of several parts but those to leave out; an error of one does not stop the others."""
    with lines.open("a") as file:

        def write(**said: Any) -> None:
            file.write(json.dumps(said) + "\n")
            file.flush()

        own = dict(list(figures.items())[part::parts])
        write(names=list(own))
        for name, measure in own.items():
            if name in leave_out:
                continue
            write(begins=name)
            try:
                write(figure=name, found=measure())
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the result
                write(figure=name, found={"error": _text(error)})
                if "CUDA error" in str(error):
                    os._exit(3)  # nothing of CUDA works in this process any more
            _forget()


def _text(error: Exception) -> str:
    last = "".join(traceback.format_exception(error)[-3:])
    return f"{type(error).__name__}: {error}"[:1500] + f"\n{last[-1500:]}"


def _forget() -> None:
    """Frees what the last figure has left."""
    torch._dynamo.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
