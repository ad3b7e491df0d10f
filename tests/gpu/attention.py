"""Which kernel computes attention, for masks, groups of heads and sizes of heads; what it costs.

    sdpa    torch's operator as it is, with the mask as a whole
    rows    `rules.attention.by_rows`: the mask is computed a block of rows at a time
    flex    `rules.attention.flex`: torch's flex attention

All are compiled by inductor; a figure is forward and backward of one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from fxrewrite import RuleSet
from rules.attention.by_rows import BY_ROWS
from rules.attention.flex import flex_rules
from rules.attention.operator import RAISE_ATTENTION
from tests.gpu.card import measured
from tests.gpu.figures import Figures, Setting

Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The mask of rows [S, 1] and columns [S]."""


def _causal(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return columns <= rows


def _alibi(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    slopes = 2.0 ** -torch.arange(1, 9, device=columns.device)
    return ((columns - rows) * slopes[:, None, None]).masked_fill(columns > rows, -torch.inf)


def _part(columns: torch.Tensor) -> int:
    """Tokens of a window, a document, a prefix, the padding: 1,024 of 8,192."""
    return columns.shape[0] // 8


MASKS: dict[str, Mask] = {
    "documents": lambda r, c: _causal(r, c) & (r // _part(c) == c // _part(c)),
    "window": lambda r, c: _causal(r, c) & (c > r - _part(c)),
    "causal and padding": lambda r, c: _causal(r, c) & (c < 7 * _part(c)),
    "prefix": lambda r, c: _causal(r, c) | (c < _part(c)),
    "alibi": _alibi,
}
_RULES: dict[str, tuple[RuleSet, str]] = {
    "rows": (RuleSet("rows", RAISE_ATTENTION, BY_ROWS), "masks.attend_by_rows"),
    "flex": (RuleSet("flex", RAISE_ATTENTION, BY_ROWS, flex_rules("flex"), atomic=True), "masks.attend_by_flex"),
}


@dataclass(frozen=True)
class Case:
    """One call of attention with 8 query heads: q [1, 8, S, head_dim], k and v [1, kv_heads, S, head_dim]."""

    mask: str
    way: str
    kv_heads: int = 2
    head_dim: int = 64

    def __str__(self) -> str:
        return f"{self.mask}, {self.way}, {self.kv_heads} KV heads of {self.head_dim}"


def _cases() -> list[Case]:
    found = [Case(mask, way) for mask in MASKS for way in ("flex", "rows", "sdpa")]
    found += [Case(mask, "sdpa") for mask in ("causal", "none")]
    sizes = [(2, 128), (2, 256), (2, 80), (2, 16), (8, 64), (1, 64)]
    return found + [
        Case(mask, way, *size) for size in sizes for mask, way in (("documents", "flex"), ("causal", "sdpa"))
    ]


def figures(setting: Setting) -> Figures:
    cases = _cases()
    if setting.tiny:
        cases = [
            case for case in cases if case.mask in ("window", "causal") and case.head_dim == 64 and case.kv_heads < 8
        ]
    return {str(case): lambda case=case: _measure(case, setting) for case in cases}


def _attend(case: Case) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if case.mask not in MASKS:
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.mask == "causal", enable_gqa=True)
        columns = torch.arange(q.shape[2], device=q.device)
        mask = MASKS[case.mask](columns[:, None], columns)
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    return attend


def _measure(case: Case, setting: Setting) -> dict[str, Any]:
    length = 128 if setting.tiny else 64 * max(128, case.head_dim)  # so that a square is more than any operand
    dtype = torch.bfloat16 if setting.is_cuda else torch.float32
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, case.head_dim) for heads in (8, case.kv_heads, case.kv_heads)]
    qkv = [torch.randn(shape, generator=generator).to(setting.device, dtype).requires_grad_() for shape in shapes]
    attend = _attend(case)
    # inductor's flex attention for CPUs has no backward pass: there torch computes it, with all scores
    inner = "aot_eager" if case.way == "flex" and not setting.is_cuda else "inductor"
    backend: Any = inner
    if case.way in _RULES:
        rules, expected = _RULES[case.way]
        backend = rules.once().expect(expected).backend(inner)
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    found: dict[str, Any] = {"length": length, "dtype": str(dtype).removeprefix("torch."), "inner": inner}
    found |= _errors(compiled, attend, qkv, setting)
    with setting.alone():
        found |= measured(
            lambda: compiled(*qkv), lambda out: torch.autograd.grad(out.float().sum(), qkv), setting, rounds=10
        )
    found["holds"] = found["worst"] <= found["bound"]
    if setting.is_cuda:
        # a mask has a byte for each row and column, what is added to scores, as they are, two or more for each head
        found["has_square"] = found["largest"] >= length * length * (8 * dtype.itemsize if case.mask == "alibi" else 1)
        found["holds"] = found["holds"] and (case.way == "sdpa" or not found["has_square"])
    return found


def _errors(
    compiled: Callable[..., torch.Tensor],
    attend: Callable[..., torch.Tensor],
    qkv: list[torch.Tensor],
    setting: Setting,
) -> dict[str, Any]:
    """The largest difference of the result and its gradients from float32, by the largest entry."""
    wide = [x.detach().float().requires_grad_() for x in qkv]
    found = compiled(*qkv)
    grads = torch.autograd.grad(found.float().square().sum(), qkv)
    with setting.alone():  # all scores in float32
        expected = attend(*wide)
        wanted = torch.autograd.grad(expected.square().sum(), wide)
    worst = max(
        ((mine.float() - theirs).abs().max() / theirs.abs().max()).item()
        for mine, theirs in zip((found.detach(), *grads), (expected.detach(), *wanted), strict=True)
    )
    return {"worst": worst, "bound": 2e-2 if qkv[0].dtype == torch.bfloat16 else 1e-4}
