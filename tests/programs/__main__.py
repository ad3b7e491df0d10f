"""`python -m tests.programs FIRST LAST` runs the programs of these seeds, makes small what is not exact, and counts."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.programs.cases import Case, Outcome, check, shrunk


def main(first: int, last: int) -> None:
    kinds, reached, said = Counter[str](), Counter[str](), set[str]()
    started = time.monotonic()
    for seed in range(first, last):
        case = Case.of(seed)
        found = check(case)
        kinds[found.kind] += 1
        reached.update(found.reached)
        if found.kind not in ("exact", "nothing"):
            print(f"{seed}: {found.kind}, {found.why}", flush=True)
            if found.kind == "wrong" or found.why[:40] not in said:
                said.add(found.why[:40])
                small = shrunk(case, lambda other, found=found: _is_same(other, found))
                print(f"{small}\n{check(small).why}\n", flush=True)
        if seed % 100 == 99 or seed == last - 1:
            print(f"{seed + 1 - first} in {time.monotonic() - started:.0f} s: {dict(kinds)}", flush=True)
    for name, count in reached.most_common():
        print(f"{count:6d} {name}")


def _is_same(other: Outcome, found: Outcome) -> bool:
    return other.kind == found.kind and (found.kind == "wrong" or other.why[:25] == found.why[:25])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
