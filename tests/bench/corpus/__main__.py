"""What `verify` says of the rules of the corpus: python -m tests.bench.corpus.

Resumed where it was stopped: `--out` has a line for each rule.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.corpus import CASES, Case
from tests.bench.proofs import done

_LIMIT = 120.0
"""Longest time for a rule (seconds)."""


class TimeIsUp(BaseException):  # no error: what handles exceptions of operators must not handle it
    """The rule took too long."""


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judged(case: Case, limit: float, seed: int = 0) -> dict[str, Any]:
    """What `verify` says of a rule."""
    begin = time.perf_counter()
    lines, steps = 0, 0
    try:
        with _limit(limit), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = case.rule.verify(seed=seed)
        said = "true" if verdict.ok else "false" if verdict.counterexample is not None else "nothing"
        why = str(verdict).partition("\n")[0]
        if verdict.counterexample is not None:
            code = verdict.counterexample.snippet.splitlines()
            lines = sum(bool(line.strip()) and not line.startswith("#") for line in code)
            steps = verdict.counterexample.num_steps
    except TimeIsUp:
        said, why = "nothing", f"not done after {limit:g} seconds"
    except Exception as error:  # noqa: BLE001  # whatever it raises is what it says of the rule
        said, why = "nothing", f"{type(error).__name__}: {error}".partition("\n")[0]
    seconds = round(time.perf_counter() - begin, 2)
    row = {"id": case.rule.id, "is_true": case.is_true, "said": said, "why": why}
    return row | {"lines": lines, "steps": steps, "seconds": seconds}


def summary(rows: list[dict[str, Any]]) -> str:
    """The counts, then what was judged wrongly, each with the first line of the verdict."""
    true, false = [row for row in rows if row["is_true"]], [row for row in rows if not row["is_true"]]
    refused, missed = [r for r in true if r["said"] != "true"], [r for r in false if r["said"] != "false"]
    found = [row for row in false if row["said"] == "false"]
    lengths = [row["lines"] for row in found] or [0]
    whys = {case.rule.id: case.why for case in CASES}
    return "\n".join(
        [
            f"true rules: {len(true) - len(refused)} of {len(true)} accepted",
            f"false rules: {len(found)} of {len(false)} found",
            f"lines of a counterexample: {statistics.median(lengths):g} (median), {max(lengths)} (most)",
            f"seconds: {sum(row['seconds'] for row in rows):.0f}, the longest {max(r['seconds'] for r in rows):.1f}",
            *(f"refused: {row['why']}" for row in refused),
            *(f"missed ({whys[row['id']]}): {row['why']}" for row in missed),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("corpus.jsonl"))
    parser.add_argument("--rules", nargs="*", default=[], help="ids of rules, or parts of them; by default all")
    parser.add_argument("--seed", type=int, default=0, help="of the samples; another one needs another --out")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds for a rule")
    arguments = parser.parse_args()
    known: dict[str, Any] = done(arguments.out)
    wanted = [c for c in CASES if not arguments.rules or any(part in c.rule.id for part in arguments.rules)]
    with arguments.out.open("a", encoding="utf-8") as out:
        for case in wanted:
            if case.rule.id not in known:
                known[case.rule.id] = judged(case, arguments.limit, arguments.seed)
                print(json.dumps(known[case.rule.id]), file=out, flush=True)
    print(summary([known[case.rule.id] for case in wanted]))


if __name__ == "__main__":
    main()
