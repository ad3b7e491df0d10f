"""`python -m tests.gpu`: what this project does on one CUDA card, as one JSON file and a table, failures first.

    python -m tests.gpu                                  all sections but `longest`, within ten minutes
    python -m tests.gpu --only training --layers 0 --budget 3600
    python -m tests.gpu --only training --figures "*1B*"     those of these names
    python -m tests.gpu --only longest --layers 0 --jobs 1   sequences that fill the card; not among all sections
    python -m tests.gpu --device cpu --tiny              that the sections run, on any machine

Each section runs in processes of its own (`processes.py`), so what crashes, hangs or has not enough memory is one
figure with an error. They compile at the same time, and measure in turn. The file is written again whenever a figure
was added.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.gpu.processes import Section, run_section
from tests.gpu.table import choose_mask_kernel, status_of, table

SECTIONS = {
    "card": 20,
    "suite": 90,
    "exactness": 50,
    "attention": 45,
    "compilers": 110,
    "training": 285,
    "longest": 285,
}
"""The modules of this folder that have figures, in order, each with its share of the time. What a section leaves is
for those after it."""
_BY_DEFAULT = [name for name in SECTIONS if name != "longest"]
_CHILD = ("SECTION", "PART", "PARTS", "TURNS", "LINES", "LEAVE_OUT")
_USABLE = 0.95
"""Share of the card's memory that allocations can take; contexts of CUDA take the rest."""
_LONGEST_SHARE = 0.9
"""The most of a section's time that one figure may take."""


def main() -> int:
    """1 where a figure failed, or found that something is not so."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=_BY_DEFAULT, help="these sections alone")
    parser.add_argument("--figures", nargs="*", default=["*"], help="those alone whose names are like these")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="file for the figures [%(default)s]")
    parser.add_argument("--budget", type=float, default=600, help="seconds for all sections [%(default)s]")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="[%(default)s]")
    parser.add_argument("--tiny", action="store_true", help="small sizes, which measure nothing")
    parser.add_argument("--layers", type=int, default=4, help="layers of the models that train; 0: all [%(default)s]")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, _cpus() // 3)), help="processes [%(default)s]")
    parser.add_argument("--memory", type=float, help="GiB for each process of `longest` [its share of the card]")
    parser.add_argument("--child", nargs=6, metavar=_CHILD, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _measure(*options.child, options)
        return 0
    return _measure_all(options)


def _cpus() -> int:
    return os.cpu_count() or 1


def _measure(
    section: str, part: str, parts: str, turns: str, lines: str, leave_out: str, options: argparse.Namespace
) -> None:
    """A part of a section, in this process."""
    if section == "longest":  # what is reserved is what is allocated
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch

    from tests.gpu.figures import Setting, write_figures

    memory = None
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"torch {torch.__version__} finds no CUDA card; --device cpu --tiny runs without one")
        torch.cuda.set_device(0)
        share = _USABLE * torch.cuda.get_device_properties(0).total_memory / int(parts)
        memory = int(options.memory * 2**30 if options.memory else share)
    else:
        torch.set_num_threads(1)
    setting = Setting(options.device, options.tiny, options.layers, memory, Path(turns))
    figures = importlib.import_module(f"tests.gpu.{section}").figures(setting)
    chosen = {name: figure for name, figure in figures.items() if any(fnmatch(name, like) for like in options.figures)}
    write_figures(chosen, Path(lines), json.loads(leave_out), int(part), int(parts))


def _measure_all(options: argparse.Namespace) -> int:
    found: dict[str, Any] = {
        "command": sys.argv[1:],
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": options.device,
        "tiny": options.tiny,
        "sections": {},
        "sections_left_out": list(options.only),
    }
    names = [name for name in SECTIONS if name in options.only]
    ends = time.monotonic() + options.budget

    def write(name: str, section: Section) -> None:
        found["sections"][name] = section
        if name == "attention" and options.device == "cuda" and not options.tiny:
            found["default"] = choose_mask_kernel(section["figures"])
        options.out.write_text(json.dumps(found, indent=1) + "\n")

    with TemporaryDirectory() as cache:  # every run compiles anew
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(8, max(1, _cpus() // options.jobs)))
        turns = Path(cache, "turns")
        turns.touch()
        for name in names:
            share = SECTIONS[name] / sum(SECTIONS[later] for later in names[names.index(name) :])
            seconds = share * (ends - time.monotonic())
            print(f"{name}: at most {seconds:.0f} s", flush=True)
            command = [sys.executable, "-m", "tests.gpu", "--device", options.device, "--layers", str(options.layers)]
            command += ["--figures", *options.figures]
            command += ["--memory", str(options.memory)] if options.memory else []
            command += [*(["--tiny"] if options.tiny else []), "--child", name]
            section = run_section(
                [[*command, str(part), str(options.jobs), str(turns)] for part in range(options.jobs)],
                seconds,
                a_figure=_LONGEST_SHARE * seconds,
                on_change=lambda new, name=name: write(name, new),
            )
            found["sections_left_out"].remove(name)
            write(name, section)
    print("\n".join(table(found)))
    print(f"\nwritten to {options.out}")
    return int(any(status_of(figure) in ("failed", "not so") for figure in _all_figures(found)))


def _all_figures(found: dict[str, Any]) -> list[dict[str, Any]]:
    sections = found["sections"].values()
    broken = [section for section in sections if "error" in section]
    return [*broken, *(figure for section in sections for figure in section["figures"].values())]


if __name__ == "__main__":
    sys.exit(main())
