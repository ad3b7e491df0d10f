"""What every process of the zoo is forked from: all that it needs is imported once."""

from __future__ import annotations

import os
import warnings
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch._dynamo

from tests.zoo.measure import measure
from tests.zoo.mesh import measure_on_mesh


def is_mesh(how: str) -> bool:
    """Whether it says the axes of a mesh, and not an attention implementation."""
    return "=" in how


def child(name: str, how: str, pipe: Connection) -> None:
    """Measures one model and sends its cells as JSON; the model's own prints go nowhere."""
    torch.set_num_threads(1)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        cells = [measure_on_mesh(name, how)] if is_mesh(how) else measure(name, how)
        pipe.send([cell.model_dump_json() for cell in cells])
