"""The tiles of a mask are those that torch finds by looking at all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from fxrewrite import FxRewriteError
from rules.masks.tiles import MASK_TILES

IDS = torch.arange(300).repeat(2, 1) // torch.tensor([[70], [150]])
ROWS, COLUMNS = torch.arange(384)[:, None], torch.arange(384)
PADDING = torch.stack([torch.arange(300) < 290, torch.arange(300) >= 140])
CPU, INF = torch.device("cpu"), float("inf")
LOW = torch.finfo(torch.float32).min
EXACT: dict[str, tuple[str, list[torch.Tensor], Callable[..., torch.Tensor]]] = {
    "causal": ("le(x0, x1)", [COLUMNS, ROWS], lambda b, h, q, k: k <= q),
    "causal and padding": (
        "bitwise_and(le(x0, x1), x2)",
        [COLUMNS, ROWS, PADDING[:, None, None]],
        lambda b, h, q, k: (k <= q) & PADDING[b, k],
    ),
    "documents": (
        "eq(x0, x1)",
        [IDS[:, None, :, None], IDS[:, None, None]],
        lambda b, h, q, k: IDS[b, q] == IDS[b, k],
    ),
    "all": ("full(1, torch.bool)", [], lambda b, h, q, k: k >= 0),
}


@pytest.mark.parametrize(("length", "num_keys"), [(300, 300), (256, 256), (300, 128), (5, 290)])
@pytest.mark.parametrize("name", EXACT)
def test_tiles_are_those_of_the_whole_mask(name: str, length: int, num_keys: int) -> None:
    """Which are kept in part and which all, by rows and by columns; lengths that tiles divide, and that they do not."""
    text, whole, mask_mod = EXACT[name]
    leaves = [_cut(_cut(leaf, -2, length), -1, num_keys) for leaf in whole]
    found = MASK_TILES(leaves, text, length, num_keys, -INF, CPU)
    batch, heads = found[0].shape[:2]
    expected = create_block_mask(mask_mod, batch, heads, length, num_keys, device="cpu").as_tuple()[2:10]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.is_contiguous()
        assert mine.dtype == torch.int32


def _cut(leaf: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return leaf if leaf.dim() < -dim or leaf.shape[dim] == 1 else leaf.narrow(dim, 0, size)


WINDOWS = torch.tensor([1, 130, 400])[:, None, None]


def test_what_some_head_keeps_is_kept() -> None:
    in_part, _, full, *_ = MASK_TILES([ROWS, COLUMNS, WINDOWS], "lt(sub(x0, x1), x2)", 384, 384, -INF, CPU)
    assert in_part.tolist() == [[[1, 2, 3]]], "the diagonal, and all below it, which the first head hides"
    assert full.tolist() == [[[2, 1, 0]]], "all above the diagonal"


def test_the_operator_is_one_for_torch() -> None:
    """Schema, fake values, dynamic shapes."""
    for name in ("causal and padding", "all"):
        text, leaves, _ = EXACT[name]
        torch.library.opcheck(MASK_TILES, (leaves, text, 300, 300, -INF, CPU))
    torch.library.opcheck(MASK_TILES, ([COLUMNS, ROWS, SLOPES], CAUSAL_BIAS, 300, 300, -INF, CPU))


CAUSAL_BIAS = "add(mul(sub(x0, x1), x2), masked_fill(full(0, torch.float32), gt(x0, x1), -inf))"
SLOPES = torch.tensor([0.5, 0.25])[:, None, None]


def test_what_an_added_mask_hides() -> None:
    counts, which, full, *_ = MASK_TILES([COLUMNS, ROWS, SLOPES], CAUSAL_BIAS, 300, 300, -INF, CPU)
    assert counts.tolist() == [[[1, 2, 3]]]
    assert which.tolist() == [[[[0, 1, 2], [0, 1, 2], [0, 1, 2]]]]
    assert not full.any(), "a score is changed in every tile"


HIDDEN: dict[str, tuple[str, list[torch.Tensor]]] = {
    "by a leaf": ("add(x0, masked_fill(full(0, torch.float32), gt(x1, x2), -inf))", [LOW * ~PADDING[0], COLUMNS, ROWS]),
    "by a slope": (CAUSAL_BIAS, [COLUMNS, ROWS, SLOPES * 1.2e36]),
    "nobody knows": ("add(exp(x0), masked_fill(full(0, torch.float32), gt(x1, x2), -inf))", [SLOPES, COLUMNS, ROWS]),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_a_finite_number_that_hides_is_an_error(case: str) -> None:
    text, leaves = HIDDEN[case]
    with pytest.raises(FxRewriteError, match="may hide keys by a finite number"):
        MASK_TILES(leaves, text, 300, 300, -INF, CPU)


def test_beside_sinks_any_number_hides() -> None:
    text = f"masked_fill(full(0, torch.float32), gt(x0, x1), {LOW})"
    counts, *_ = MASK_TILES([COLUMNS, ROWS], text, 300, 300, LOW / 2, CPU)
    assert counts.flatten().tolist() == [1, 2, 3]
