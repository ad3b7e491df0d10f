"""Figures measured in a process of their own, which may crash or hang: each is kept as soon as it is there.

The child writes lines of JSON: the names of all figures, then for each that it begins, and what it found. When it dies,
it is started again without the figures that it has begun; one that takes too long is stopped in the same way.
This file imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, TypeAlias

Section: TypeAlias = dict[str, Any]
"""`figures` by name, each a dict or {"error": text}; `left_out`, the names of those that did not fit into the time;
`seconds`; `error` if the process failed before its first figure."""

_POLL = 0.2
"""Seconds between two looks at what the child has written."""
_TAIL = 20_000
"""Characters of the child's output that an error keeps, from its end: room for the stacks of compilers that hang."""
_ABORTS = 2.0
"""Seconds for the processes of a child that is stopped to write their stacks."""

_SAYS_STACKS = {"PYTHONFAULTHANDLER": "1", "TORCHINDUCTOR_WORKER_SUPPRESS_LOGGING": "0"}
"""With it Python writes its stacks on SIGABRT, and so do inductor's workers."""


def run_section(
    commands: Sequence[Sequence[str]], seconds: float, *, a_figure: float, on_change: Callable[[Section], None]
) -> Section:
    """What children that run at once have measured, each some figures of the section.

    Args:
        commands: how each child is started; the file for its lines and a JSON list of figures to leave out follow.
        seconds: limit of the section.
        a_figure: limit of each figure, in seconds.
        on_change: is called with the section whenever a figure was added, by one thread at a time.
    """
    parts: list[Section] = [{"figures": {}, "left_out": [], "seconds": 0.0} for _ in commands]
    lock = Lock()

    def changed(_: Section) -> None:
        with lock:
            on_change(_joined(parts))

    with ThreadPoolExecutor(len(commands)) as pool:
        runs = [
            pool.submit(_run_part, part, command, seconds, a_figure=a_figure, on_change=changed)
            for part, command in zip(parts, commands, strict=True)
        ]
    for run in runs:
        run.result()
    return _joined(parts)


def _joined(parts: Sequence[Section]) -> Section:
    found: Section = {
        "figures": {name: figure for part in parts for name, figure in list(part["figures"].items())},
        "left_out": [name for part in parts for name in part["left_out"]],
        "seconds": max(part["seconds"] for part in parts),
    }
    errors = dict.fromkeys(part["error"] for part in parts if "error" in part)
    return {**found, "error": "\n".join(errors)} if errors else found


def _run_part(
    section: Section,
    command: Sequence[str],
    seconds: float,
    *,
    a_figure: float,
    on_change: Callable[[Section], None],
) -> None:
    """Fills the section with what one child measures; it is started again without what it did not survive."""
    started = time.monotonic()
    begun: list[str] = []
    names: list[str] = []
    is_done = False
    while (left := seconds - (time.monotonic() - started)) > 0:
        with TemporaryDirectory() as folder:
            lines, output = Path(folder, "lines"), Path(folder, "output")
            lines.touch()
            with output.open("wb") as file:
                child = subprocess.Popen(
                    [*command, str(lines), json.dumps(begun)],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **_SAYS_STACKS},
                    start_new_session=True,
                )
            try:
                why = _watch(child, lines, left, a_figure, partial(_read, lines, section, begun, names, on_change))
                if child.poll() is None:
                    _abort(child)
            finally:
                _stop(child)
            _read(lines, section, begun, names, on_change)
            said = output.read_text(errors="replace")[-_TAIL:]
        open_figures = [name for name in begun if name not in section["figures"]]
        for name in open_figures:
            section["figures"][name] = {"error": f"{why}\n{said}"}
        if not why:
            is_done = True
            break
        if not names:
            section["error"] = f"{why}\n{said}"
            break
        if not open_figures and len(begun) == len(names):
            break
    if not (names or is_done) and "error" not in section:
        section["error"] = "no time was left for it"
    section["seconds"] = round(time.monotonic() - started, 1)
    section["left_out"] = [name for name in names if name not in begun]
    on_change(section)


def _watch(
    child: subprocess.Popen[bytes], lines: Path, seconds: float, a_figure: float, read: Callable[[], bool]
) -> str:
    """Waits for the child; says why it ended, or '' if it is done."""
    started = changed = time.monotonic()
    while True:
        ended = child.poll()
        if read():
            changed = time.monotonic()
        if ended is not None:
            return "" if ended == 0 else _how_it_ended(ended)
        now = time.monotonic()
        if now - started > seconds:
            return f"stopped: the section's time was over, {now - changed:.0f} s after this began"
        if now - changed > a_figure:
            return f"stopped after {now - changed:.0f} s, the most that a figure may take"
        time.sleep(_POLL)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"the process exited with status {status}"
    name = signal.Signals(-status).name
    return f"the process was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def _abort(child: subprocess.Popen[bytes]) -> None:
    """Ends the child, and all that it started, each with its stacks in the output."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_ABORTS)
    time.sleep(_ABORTS / 4)  # of the others, whose end nobody is told


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ends the child with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read(
    lines: Path, section: Section, begun: list[str], names: list[str], on_change: Callable[[Section], None]
) -> bool:
    """Takes over what the child has written; True if there is something new."""
    before = len(begun), len(section["figures"]), len(names)
    for line in lines.read_text().splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            break  # the child is writing it
        if "names" in said:
            names[:] = said["names"]
        elif "begins" in said:
            if said["begins"] not in begun:
                begun.append(said["begins"])
        else:
            section["figures"].setdefault(said["figure"], said["found"])
    has_changed = before != (len(begun), len(section["figures"]), len(names))
    if len(section["figures"]) > before[1]:
        on_change(section)
    return has_changed
