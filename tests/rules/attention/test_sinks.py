"""Attention with sinks, in every spelling, is one operator, and holds no scores by rows: values, every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxrewrite import DeadCode, RuleSet
from rules.attention.by_rows import ATTENTION_BY_ROWS, BY_ROWS
from rules.attention.composite import ATTENTION_UNBIASED
from tests.rewriting import check_left_alone, check_stages, traced
from tests.rules.attention.cases import LOW, B, D, H, S, added, dense_values, kept, results

pytestmark = pytest.mark.usefixtures("three_rows_a_block")
RULES = RuleSet("sinks", DeadCode("drop_first"), ATTENTION_UNBIASED, BY_ROWS)
Function = Callable[..., torch.Tensor]


def operands(width: int = D) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, S, D), (B, H, S, D), (B, H, S, width), (H,)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-2, -1) * 0.5


def column(sinks: torch.Tensor) -> torch.Tensor:
    return sinks.reshape(1, -1, 1, 1).expand(B, H, S, 1)


def joined(q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    return torch.cat([scores(q, k) + added(LOW), column(sinks)], -1)


def shifted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = joined(q, k, sinks)
    weights = torch.softmax(both - both.max(-1, keepdim=True).values, -1, dtype=both.dtype)[..., :-1]
    return torch.dropout(weights, 0.0, True).to(v.dtype) @ v


def shifted_by_amax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = joined(q, k, sinks)
    return torch.softmax(both - both.amax(-1, keepdim=True), -1)[..., :S] @ v


def in_front(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = torch.cat([column(sinks), scores(q, k) + added(LOW, window=3)], -1)
    return torch.softmax(both, -1)[..., 1:] @ v


def narrowed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    return torch.softmax(joined(q, k, sinks), -1).narrow(-1, 0, S) @ v


def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    both = torch.cat([scores(q, k).masked_fill(~kept(window=3), -torch.inf), column(sinks)], -1)
    return torch.softmax(both, -1)[..., :-1] @ v


def open_to_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.cat([scores(q, k), column(sinks)], -1), -1)[..., :-1] @ v


def by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Sinks that are computed from the tokens."""
    both = torch.cat([scores(q, k) + added(LOW), q.sum(-1, keepdim=True) * column(sinks)], -1)
    return torch.softmax(both, -1)[..., :-1] @ v


def without_keys(fill: float) -> Function:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        both = torch.cat([scores(q, k) + added(fill, window=2, first=4), column(sinks)], -1)
        return torch.softmax(both, -1)[..., :-1] @ v

    return attend


SPELLINGS: dict[str, Function] = {
    "shifted": shifted,
    "shifted by amax": shifted_by_amax,
    "in front": in_front,
    "narrowed": narrowed,
    "filled": filled,
    "open to all": open_to_all,
    "by token": by_token,
    "rows without keys, by the lowest number": without_keys(LOW),
    "rows without keys, by -inf": without_keys(-torch.inf),
}


@pytest.mark.parametrize("width", [D, D + 2])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(name: str, width: int) -> None:
    """With the kernel for CPUs (a width of 4), and with products of matrices."""
    given = operands(width)
    gm = traced(SPELLINGS[name], *given)
    rewrites = {entry.rule: entry.rewrites for entry in RULES.apply(gm).rules}
    assert rewrites["masks.attend_by_rows"] == 1
    assert not dense_values(gm)
    assert not RULES.apply(gm).rewrites
    torch.testing.assert_close(results(gm, given), results(SPELLINGS[name], given), rtol=1e-12, atol=1e-13)


REFUSED: dict[str, tuple[Function, str]] = {
    "two columns": (
        lambda q, k, v, s: torch.softmax(torch.cat([scores(q, k), column(s).expand(B, H, S, 2)], -1), -1)[..., :S] @ v,
        "2 columns are concatenated with the keys",
    ),
    "fewer values": (
        lambda q, k, v, s: torch.softmax(torch.cat([scores(q, k), column(s)], -1), -1)[..., : S - 1] @ v[:, :, 1:],
        "the values have 6 rows, the keys 7",
    ),
    "a dropout": (
        lambda q, k, v, s: (
            torch.dropout(torch.softmax(torch.cat([scores(q, k), column(s)], -1), -1)[..., :-1], 0.1, True) @ v
        ),
        "a dropout of 0.1 draws",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stays_says_why(case: str) -> None:
    attend, why = REFUSED[case]
    check_left_alone(RULES, "attention.fuse_sinks", attend, operands(), why)


def test_heads_in_the_batch_are_those_of_one_sequence() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.cat([scores(q, k), sinks.reshape(-1, 1, 1).expand(H, S, 1)], -1), -1)[..., :-1] @ v

    q, k, v, sinks = operands()
    given = [x.detach() for x in (q[0], k[0], v[0], sinks)]
    gm = traced(attend, *given)
    report = RULES.apply(gm)
    assert report["attention.fuse_sinks"].rewrites == report["masks.attend_by_rows"].rewrites == 1
    torch.testing.assert_close(gm(*given), attend(*given), rtol=1e-12, atol=1e-13)


def test_graph(fx_snapshot: Any) -> None:
    fuse = RuleSet("fuse", DeadCode(), ATTENTION_UNBIASED)
    check_stages(traced(shifted, *operands()), fx_snapshot, **{"one operator": fuse, "by rows": BY_ROWS})


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.15's own
def test_the_operator_is_one_for_torch() -> None:
    q, k, v, sinks = operands()
    positions = torch.arange(S)
    arguments = (
        q,
        k,
        v,
        [positions, positions[:, None]],
        "le(x0, x1)",
        0.5,
        0.0,
        column(sinks).detach().requires_grad_(),
        None,
    )
    torch.library.opcheck(ATTENTION_BY_ROWS, arguments)
