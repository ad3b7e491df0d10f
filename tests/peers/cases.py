"""What a case of a peer's test suite is here, and the table of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Verdict = Literal["same", "better", "worse", "n/a"]
TORCH = "https://github.com/pytorch/pytorch/blob/main/test/"
VLLM = "https://github.com/vllm-project/vllm/blob/main/tests/compile/passes/"
SUITES = {
    "test_subgraph_rewriter": f"{TORCH}fx/test_subgraph_rewriter.py",
    "test_matcher_utils": f"{TORCH}fx/test_matcher_utils.py",
    "test_fx_passes": f"{TORCH}test_fx_passes.py",
    "test_pattern_matcher": f"{TORCH}inductor/test_pattern_matcher.py",
    "pattern_test": "https://github.com/microsoft/onnxscript/blob/main/onnxscript/rewriter/pattern_test.py",
    "test_fusion": f"{VLLM}test_fusion.py",
    "test_silu_mul_quant_fusion": f"{VLLM}test_silu_mul_quant_fusion.py",
    "test_sequence_parallelism": f"{VLLM}distributed/test_sequence_parallelism.py",
    "test_async_tp": f"{VLLM}distributed/test_async_tp.py",
}
"""The suites, and where they are."""


@dataclass(frozen=True)
class Case:
    """One case of a suite.

    Attributes:
        suite: one of `SUITES`.
        name: of the test there.
        verdict: what the rewriter does, beside what the suite asserts of its own engine.
        why: how it is better, what is missing, or why it is no question of rewriting.
        check: raises unless the verdict is true; of "worse" it asserts what the suite does, and fails; of "n/a" None.
        part: which of several cases of one test.
    """

    suite: str
    name: str
    verdict: Verdict
    why: str
    check: Callable[[], None] | None
    part: str = ""

    def __str__(self) -> str:
        return f"{self.suite}.{self.name}" + (f"[{self.part}]" if self.part else "")


class Suite:
    """The cases of one suite, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def add(
        self, name: str, check: Callable[[], None] | None, verdict: Verdict = "same", why: str = "", part: str = ""
    ) -> None:
        """Adds a case; what is not the same says why."""
        assert verdict == "same" or why, name
        assert (check is None) == (verdict == "n/a"), name
        self.cases.append(Case(self.name, name, verdict, why, check, part))

    def case(
        self, verdict: Verdict = "same", why: str = "", part: str = "", name: str = ""
    ) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Decorator: the function, whose name is that of the test, checks a case."""

        def add(check: Callable[[], None]) -> Callable[[], None]:
            self.add(name or check.__name__, check, verdict, why, part)
            return check

        return add


def table(cases: Iterable[Case]) -> str:
    """The cases as Markdown: for each suite its sum, and a line for each of its cases."""
    cases = list(cases)
    rows = [f"{len(cases)} cases: {_sum(cases)}.", ""]
    for suite, url in SUITES.items():
        own = [case for case in cases if case.suite == suite]
        rows += [f"## {suite}", "", f"[{url.rpartition('/')[2]}]({url}): {_sum(own)}.", ""]
        rows += ["| case | verdict | |", "|---|---|---|"]
        rows += [f"| {_named(case)} | {case.verdict} | {case.why} |" for case in own]
        rows.append("")
    return "\n".join(rows)


def _named(case: Case) -> str:
    return f"`{case.name}`" + (f" {case.part}" if case.part else "")


def _sum(cases: Iterable[Case]) -> str:
    counts = Counter(case.verdict for case in cases)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])


def of(*suites: Suite) -> Iterator[Case]:
    """The cases of the suites."""
    for suite in suites:
        yield from suite.cases


def update(page: str, found: str) -> str:
    """The page with this table after its marker."""
    head, marker, _ = page.partition("<!-- table -->\n")
    assert marker, "docs/peers.md has lost its marker"
    return f"{head}{marker}\n{found}"
