"""What ranks compute of random programs is what one device computes; those that once failed are kept."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.programs.cases import Case, check
from tests.programs.text import Program

SEEDS = 10
"""How many programs a test runs."""
REACHED = (
    *("section", "lookup", "outer", "uneven", "partial sum", "many lengths"),
    *("rule joined_parts.compute_whole", "rule attention.raise_flash"),
)
"""What programs must reach, or they test nothing: sections of chunks, entries that ranks look up, chunks of runs,
padding, sums, one program for many lengths, loops over parts, flash attention."""


@pytest.mark.parametrize("block", range(20))
@pytest.mark.slow
@pytest.mark.some(1)
def test_random_programs(block: int) -> None:
    reached = Counter[str]()
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        case = Case.of(seed)
        found = check(case)
        assert found.kind in ("exact", "nothing"), f"seed {seed}: {found.why}\n{case}"
        reached.update(found.reached)
    assert block or not [name for name in REACHED if not reached[name]], "the generator finds too little"


FOUND: dict[str, tuple[int, tuple[int, ...], str]] = {
    "attention of what was attended, where chunks may have no entries": (
        4,
        (8, 16),
        "v1 = attended(h, h)\nv2 = v1.softmax(2) - v1\nv3 = attended(v2, v2, is_causal=True)\n"
        "return (v3 * v3.softmax(1)).sum()",
    ),
    "attention with a softcap, beside rows of weights": (2, (8,), "v1 = flash(h, softcap=2.0)\nreturn v1.exp().sum()"),
    "attention in a custom function": (2, (12,), "v1 = attends(h)\nreturn v1.exp().mean()"),
    "classes of which those that are cut off are none": (
        3,
        (13,),
        "v1 = m.head(h)\nv2 = torch.where(torch.arange(S) < 3, 1000, v1.argmax(-1))\n"
        "return m.embed(v2[:, 3:]).mul(h[:, 3:]).exp().sum()",
    ),
    "attention to one token, over a ring": (2, (15,), "v1 = attended(h[:, :1], h[:, :1])\nreturn (v1 * h).exp().sum()"),
}
"""Programs that failed once, made small: ranks, lengths, and the text."""


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed(name: str) -> None:
    num_ranks, lengths, text = FOUND[name]
    plan = "rows" if "rows of weights" in name else ""
    attention = "ring" if "ring" in name else "auto"
    found = check(Case(Program.of(text), num_ranks, lengths, plan, attention))
    assert found.kind == "exact", found.why
