"""`python -m tests.zoo`: every model against one device, each in a process of its own; resumes where it was stopped.

Cells are kept as lines of JSON in `--out`; what stands there is not measured again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.zoo import worker
from tests.zoo.measure import ATTENTIONS, RANKS, Cell
from tests.zoo.models import names
from tests.zoo.others import others
from tests.zoo.table import markdown, read

__all__ = ["main"]


def main() -> int:
    """Measures what is missing, then writes the table; 1 where a cell is wrong or failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--models", nargs="*", metavar="CLASS", help="measure these alone")
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"), help="cells measured so far [%(default)s]")
    parser.add_argument("--table", type=Path, help="file that the Markdown table is written to")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time [%(default)s]")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one model [%(default)s]")
    args = parser.parse_args()
    done = {(cell.model, cell.attention) for cell in read(args.out)}
    todo = [
        (name, how) for name in args.models or [*names(), *others()] for how in ATTENTIONS if (name, how) not in done
    ]
    started = time.perf_counter()
    with args.out.open("a") as out:
        for count, cells in enumerate(_measured(todo, args.jobs, args.timeout), 1):
            out.writelines(cell.model_dump_json() + "\n" for cell in cells)
            out.flush()
            print(
                f"[{count}/{len(todo)} {time.perf_counter() - started:.0f} s]", "; ".join(map(str, cells)), flush=True
            )
    cells = [cell for cell in read(args.out) if not args.models or cell.model in args.models]
    if args.table:
        args.table.write_text(markdown(cells))
    return int(any(cell.status in ("wrong", "failed") for cell in cells))


def _measured(todo: list[tuple[str, str]], jobs: int, timeout: float) -> Iterator[list[Cell]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_in_a_process, context, *job, timeout) for job in todo]):
            yield future.result()


def _in_a_process(context: Any, name: str, attention: str, timeout: float) -> list[Cell]:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=worker.child, args=(name, attention, there), daemon=True)
    process.start()
    there.close()
    try:
        if here.poll(timeout):
            cells = [Cell.model_validate_json(text) for text in here.recv()]
            process.join(timeout)
            return cells
        why = f"no result within {timeout:g} s"
    except EOFError:
        why = "the process ended without a result"
    finally:
        process.kill()
        process.join()
        here.close()
    return [Cell(model=name, attention=attention, num_ranks=n, status="failed", why=why) for n in RANKS]


if __name__ == "__main__":
    sys.exit(main())
