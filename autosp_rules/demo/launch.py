"""A function on P processes of this machine, by torch's own launcher, with one clear error where a rank fails.

torchrun's Python interface (`elastic_launch`) starts the processes, waits, and ends all of them when one fails, so an
error on one rank is never a hang on the others. Only what it says about the failure is replaced: each rank notes its
own error before it lets go of the others, and the first note is the cause.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fxrewrite import FxRewriteError

T = TypeVar("T")


class RankError(RuntimeError):
    """A rank failed; `str(error)` says in one line which and why.

    `traceback` is that rank's, empty where the error is one of this project, whose message holds everything.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def launch(function: Callable[..., T], *args: Any, ranks: int) -> T:
    """Run `function(*args)` on every rank of a gloo process group on the loopback interface; rank 0's return value.

    `function` belongs to a module and `args` pickle. The machine's cores are shared out evenly as threads.

    Raises:
        RankError: a rank failed, or a signal such as Ctrl-C came; all have ended.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with TemporaryDirectory(prefix="autosp-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            return elastic_launch(config, _run_rank)(Path(folder), function, *args)[0]
        except ChildFailedError as error:
            raise _diagnose(Path(folder), *error.get_first_failure()) from None
        except SignalException as error:
            raise RankError(f"stopped by {error.sigval.name}") from None


def _run_rank(folder: Path, function: Callable[..., T], *args: Any) -> T:
    """One rank's process, from process group to return value."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    dist.init_process_group("gloo")
    dist.barrier()  # gloo connects late: a rank that returned at once would close what another one connects to
    try:
        return function(*args)
    except Exception as error:
        _write_note(folder, error)
        raise
    finally:
        dist.destroy_process_group()


def _write_note(folder: Path, error: Exception) -> None:
    """Note this rank's error, in a file whose name sorts by time."""
    diagnosed = _own_error(error)
    note = {
        "rank": dist.get_rank(),
        "message": f"{type(diagnosed).__name__}: {diagnosed}" if diagnosed else _headline(error),
        "traceback": "" if diagnosed else "".join(traceback.format_exception(error)),
    }
    Path(folder, f"{time.time_ns()}-{note['rank']}.note").write_text(json.dumps(note))


def _own_error(error: BaseException | None) -> FxRewriteError | None:
    """The error of this project that torch.compile wrapped, if it is one."""
    while error is not None and not isinstance(error, FxRewriteError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error


def _headline(error: Exception) -> str:
    """The first paragraph of an error as one line; those of torch go on for pages."""
    paragraph = str(error).strip().split("\n\n")[0]
    return shorten(f"{type(error).__name__}: {paragraph}", 500, placeholder=" ...")


def _diagnose(folder: Path, rank: int, failure: ProcessFailure) -> RankError:
    """The failure that came first; `rank` is the one that the launcher looked at first, which may be a later one."""
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("*.note"))]
    is_noted = any(note["rank"] == rank for note in notes)
    if notes and (is_noted or failure.exitcode == -Signals.SIGTERM):
        first = notes[0]
        return RankError(f"rank {first['rank']}: {first['message']}", first["traceback"])
    if failure.exitcode >= 0:
        return RankError(f"rank {rank} exited with status {failure.exitcode}")
    name = Signals(-failure.exitcode).name
    return RankError(f"rank {rank} was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else ""))
