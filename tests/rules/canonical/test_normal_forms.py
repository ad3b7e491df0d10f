"""Normal forms change the spelling of a graph and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rules.canonical.normal_forms import NORMAL_FORMS
from tests.rewriting import check_rewritten, traced

X = torch.rand(4, 6, dtype=torch.float64)

DROPPED: dict[str, Any] = {
    "drop_slice": lambda x: torch.ops.aten.slice(x, 1, 0, 6) * 2,
    "drop_expand": lambda x: x.expand(4, -1) * 2,
    "drop_to": lambda x: x.to(torch.float64) * 2,
    "drop_alias": lambda x: torch.ops.aten.alias(x) * 2,
    "drop_narrow": lambda x: torch.narrow(x, 1, 0, 6) * 2,
    "squeeze_to_select": lambda x: x.unsqueeze(0).squeeze() * 2,
    "type_as_to_to": lambda x: torch.arange(6).type_as(x) * 2,
    "drop_output_size": lambda x: x.repeat_interleave(2, dim=1, output_size=12) * 2,
    "drop_empty_cat": lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x], -1) * 2,
    "new_zeros_to_zeros": lambda x: x + x.new_zeros(6),
    "new_ones_to_ones": lambda x: x + x.new_ones((4, 1), dtype=torch.float32),
    "new_full_to_full": lambda x: x + x.new_full((x.shape[1],), 2.5),
    "view_to_reshape": lambda x: x.view(24) * 2,
    "_unsafe_view_to_reshape": lambda x: torch.ops.aten._unsafe_view(x, [24]) * 2,
}
KEPT: dict[str, Any] = {
    "a real slice": lambda x: x[:, 1:6] * 2,
    "a real expand": lambda x: x.expand(2, 4, 6) * 2,
    "a real cast": lambda x: x.to(torch.float32) * 2,
    "a copy": lambda x: x.to(torch.float64, copy=True) * 2,
    "repeats without a size": lambda x: x.repeat_interleave(2, dim=1) * 2,
    "a real cat": lambda x: torch.cat([x, x]) * 2,
}


@pytest.mark.parametrize("rule", DROPPED)
def test_fires_once_and_computes_the_same(rule: str) -> None:
    check_rewritten(NORMAL_FORMS, f"normal_forms.{rule}", DROPPED[rule], [X])


@pytest.mark.parametrize("case", KEPT)
def test_leaves_alone(case: str) -> None:
    gm = traced(KEPT[case], X)
    assert NORMAL_FORMS.apply(gm).rewrites == 0


def test_a_view_of_what_is_not_contiguous_becomes_runnable() -> None:
    gm = traced(lambda x: x.view(24), X)
    NORMAL_FORMS.apply(gm)
    shuffled = torch.rand(6, 4, dtype=torch.float64).T
    assert torch.equal(gm(shuffled), shuffled.reshape(24))
