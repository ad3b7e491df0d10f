"""`python -m tests.zoo`: every model against one device, each in a process of its own; resumes where it was stopped.

    python -m tests.zoo                                                AutoSP over one axis of 2 and of 4 ranks
    python -m tests.zoo --diffusion --out zoo-diffusion.jsonl          diffusion transformers, over 2, 3 and 4 ranks
    python -m tests.zoo --mesh dp=2,sp=2,tp=2 --out zoo-mesh.jsonl     ZeRO-3, AutoSP and the models' own tensor plans

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

from tests.zoo import diffusion, worker
from tests.zoo.measure import Cell, attentions_of, ranks_of
from tests.zoo.models import names
from tests.zoo.others import others
from tests.zoo.table import diffusion_markdown, markdown, mesh_markdown, read


def main() -> int:
    """Measures what is missing, then writes the table; 1 where a cell is wrong or failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", metavar="CLASS", help="measure these alone")
    parser.add_argument("--diffusion", action="store_true", help="measure the transformers of diffusers")
    parser.add_argument("--mesh", help="causal language models over these axes, such as dp=2,sp=2,tp=2")
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"), help="cells measured so far [%(default)s]")
    parser.add_argument("--table", type=Path, help="file that the Markdown table is written to")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time [%(default)s]")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one model [%(default)s]")
    args = parser.parse_args()
    done = {(cell.model, cell.mesh or cell.attention) for cell in read(args.out)}
    if args.diffusion and not diffusion.is_installed():
        parser.error("diffusers is not installed: make zoo-diffusion")
    of_kind = list(diffusion.MODELS) if args.diffusion else names() if args.mesh else [*names(), *others()]
    models = args.models or of_kind
    todo = [
        (name, how)
        for name in models
        for how in ([args.mesh] if args.mesh else attentions_of(name))
        if (name, how) not in done
    ]
    started = time.perf_counter()
    with args.out.open("a") as out:
        for count, cells in enumerate(_measured(todo, args.jobs, args.timeout), 1):
            out.writelines(cell.model_dump_json() + "\n" for cell in cells)
            out.flush()
            print(
                f"[{count}/{len(todo)} {time.perf_counter() - started:.0f} s]", "; ".join(map(str, cells)), flush=True
            )
    cells = [cell for cell in read(args.out) if cell.model in models and (not args.mesh or cell.mesh == args.mesh)]
    if args.table:
        found = {cell.model for cell in cells}
        missing = [name for name in models if name not in found]
        page = (
            mesh_markdown(cells, missing) if args.mesh else (diffusion_markdown if args.diffusion else markdown)(cells)
        )
        args.table.write_text(page)
    return int(any(cell.status in ("wrong", "failed") for cell in cells))


def _measured(todo: list[tuple[str, str]], jobs: int, timeout: float) -> Iterator[list[Cell]]:
    context = multiprocessing.get_context("forkserver")
    is_mesh = any(worker.is_mesh(how) for _, how in todo)
    context.set_forkserver_preload([worker.__name__, *(["tests.zoo.warm"] if is_mesh else [])])
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(_in_a_process, context, *job, timeout) for job in todo]):
            yield future.result()


def _in_a_process(context: Any, name: str, how: str, timeout: float) -> list[Cell]:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=worker.child, args=(name, how, there), daemon=True)
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
    if worker.is_mesh(how):
        return [Cell(model=name, attention="", num_ranks=0, mesh=how, status="failed", why=why)]
    return [Cell(model=name, attention=how, num_ranks=n, status="failed", why=why) for n in ranks_of(name)]


if __name__ == "__main__":
    sys.exit(main())
