"""What ranks compute of random programs is what one device computes; those that once failed are kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.programs.cases import Case, check
from tests.programs.text import Program

SEEDS = 20
"""How many programs a test runs."""
REACHED = (
    *("section", "lookup", "outer", "uneven", "partial sum", "many lengths"),
    *("rule joined_parts.compute_whole", "rule attention.raise_flash"),
)
"""What programs must reach, or they test nothing: sections of chunks, entries that ranks look up, chunks of runs,
padding, sums, one program for many lengths, loops over parts, flash attention."""


@pytest.mark.parametrize("block", range(10))
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


def _case(text: str, lengths: tuple[int, ...] = (8,), num_ranks: int = 2, **how: Any) -> Case:
    return Case(Program.of(text), num_ranks, lengths, **how)


FOUND: dict[str, Case] = {
    "attention of what was attended, where chunks may have no entries": _case(
        "v1 = attended(h, h)\nv2 = v1.softmax(2) - v1\nv3 = attended(v2, v2, is_causal=True)\n"
        "return (v3 * v3.softmax(1)).sum()",
        lengths=(8, 16),
        num_ranks=4,
    ),
    "attention with a softcap, beside rows of weights": _case(
        "v1 = flash(h, softcap=2.0)\nreturn v1.exp().sum()", plan="tp=2 embed.weight:0"
    ),
    "attention in a custom function": _case("v1 = attends(h)\nreturn v1.exp().mean()", lengths=(12,)),
    "classes of which those that are cut off are none": _case(
        "v1 = m.head(h)\nv2 = torch.where(torch.arange(S) < 3, 1000, v1.argmax(-1))\n"
        "return m.embed(v2[:, 3:]).mul(h[:, 3:]).exp().sum()",
        lengths=(13,),
        num_ranks=3,
    ),
    "attention to one token, over a ring": _case(
        "v1 = attended(h[:, :1], h[:, :1])\nreturn (v1 * h).exp().sum()", lengths=(15,), attention="ring"
    ),
    "a parameter whose chunks of one axis another axis cuts at places of its own": _case(
        "return h.square().mean()", plan="tq=2 pos:1 | tp=2 up.weight:1"
    ),
    "entries of chunks of one axis, which another axis cuts again": _case(
        "return h.square().mean()", lengths=(9,), plan="sp=2 | tp=2 pos:0"
    ),
    "a program for many lengths that is made for one of which ranks have one entry": _case(
        "return h.square().mean()", lengths=(3, 7), num_ranks=4
    ),
    "a batch of many sizes, made for one of which ranks have one row": _case(
        "return ((h @ h.mT).softmax(-1) @ h).exp().sum()", lengths=(1, 24), num_ranks=3
    ),
    "convolutions on chunks that are in several runs": _case(
        "v1 = h + m.pos[:S]\nv2 = v1.cumsum(1)\nv2[:, -1] = v1[:, 0]\n"
        "v3 = m.thinner(F.glu(m.wider(v2.mT), 1).repeat(1, 2, 1)).mT\nreturn F.cross_entropy(m.tied(v3).mT, labels)",
        lengths=(24,),
        plan="sp=2 | tp=2 pos:1 tied.bias:0 thinner.weight:1 thinner.bias:0",
        rows=1,
    ),
}
"""Programs that failed once, made small."""


@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed(name: str) -> None:
    found = check(FOUND[name])
    assert found.kind == "exact", found.why
