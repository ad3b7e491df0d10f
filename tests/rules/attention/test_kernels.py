"""Attention to blocks of keys, merged, is scaled_dot_product_attention to all of them, and so are its gradients."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from rules.attention import kernels
from rules.attention.kernels import attend_block, attend_block_backward, has_kernel, merge_blocks

BATCH, ROWS, COLUMNS, SCALE = 2, 6, 9, 0.3
MASKS = ("none", "bool", "hides rows", "hides rows by infinity", "bias", "two dimensions")
HEADS = {"heads": (4, 4, 8, 8), "groups": (4, 2, 8, 8), "one kv head": (6, 1, 8, 8), "wider values": (4, 2, 5, 8)}


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, softcap: float
) -> torch.Tensor:
    """The operator; with a softcap, written out, where rows that keep no key are 0."""
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=SCALE, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.tanh(q @ k.mT * SCALE / softcap) * softcap
    if mask is not None:
        scores = scores + (added(mask, -torch.inf, q.dtype) if mask.dtype == torch.bool else mask)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


def added(kept: torch.Tensor, fill: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, fill)


def mask_of(kind: str, heads: int, dtype: torch.dtype) -> torch.Tensor | None:
    kept = torch.rand(BATCH, 1, ROWS, COLUMNS) > 0.4
    kept[..., 0] = True
    if kind.startswith("hides rows"):
        kept[:, :, 2] = False
    if kind == "none":
        return None
    if kind == "bias":
        return torch.randn(1, heads, ROWS, COLUMNS, dtype=dtype)
    if kind == "two dimensions":
        return kept[0, 0]
    return added(kept, -torch.inf, dtype) if kind == "hides rows by infinity" else kept


def operands(heads: str, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    num_heads, kv_heads, depth, width = HEADS[heads]
    shapes = [(num_heads, ROWS, depth), (kv_heads, COLUMNS, depth), (kv_heads, COLUMNS, width)]
    return [torch.randn(BATCH, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_two_blocks_of_keys(heads: str, kind: str, softcap: float) -> None:
    torch.manual_seed(0)
    q, k, v = operands(heads)
    mask = mask_of(kind, q.shape[1], q.dtype)
    expected = reference(q, k, v, mask, softcap)
    dout = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (q, k, v), dout)

    blocks = [slice(0, 4), slice(4, COLUMNS)]
    given = [(q, k[:, :, keys], v[:, :, keys], None if mask is None else mask[..., keys]) for keys in blocks]
    with torch.no_grad():
        out, lse = merge_blocks(*(part for block in given for part in attend_block(*block, SCALE, softcap)))
        (dq, dk, dv), (dq_1, dk_1, dv_1) = (
            attend_block_backward(dout, q, k, v, out, lse, mask, SCALE, softcap) for q, k, v, mask in given
        )
    grads = (dq + dq_1, torch.cat([dk, dk_1], 2), torch.cat([dv, dv_1], 2))
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("heads", ["heads", "wider values"])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_a_row_that_the_lowest_number_hides_attends_to_all_keys_alike(heads: str, softcap: float) -> None:
    """And has the gradients that scaled_dot_product_attention has there, which differ between its kernels."""
    torch.manual_seed(0)
    q, k, v = operands(heads)
    mask = added(torch.arange(ROWS)[:, None].expand(ROWS, COLUMNS) != 2, torch.finfo(q.dtype).min, q.dtype)
    expected = reference(q, k, v, mask, softcap)
    dout = torch.randn_like(expected)
    with torch.no_grad():
        out, lse = attend_block(q, k, v, mask, SCALE, softcap)
        grads = attend_block_backward(dout, q, k, v, out, lse, mask, SCALE, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(out[:, 0, 2], v[:, 0].mean(1), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (q, k, v), dout), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fill", [-1e9, -1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_number_that_hides_a_row_keeps_its_gradients(fill: float, dtype: torch.dtype) -> None:
    """As products of matrices have them: the logsumexp has no digits left for how many keys there are."""
    torch.manual_seed(0)
    q, k, v = operands("groups", dtype)
    mask = added(torch.arange(ROWS)[:, None].expand(ROWS, COLUMNS) != 2, fill, dtype)
    expected = reference(q, k, v, mask, 0.7)
    dout = torch.randn_like(expected)
    with torch.no_grad():
        out, lse = attend_block(q, k, v, mask, SCALE, 0.7)
        grads = attend_block_backward(dout, q, k, v, out, lse, mask, SCALE, 0.7)
    bound = 16 * torch.finfo(dtype).eps
    wanted = torch.autograd.grad(expected, (q, k, v), dout)
    torch.testing.assert_close((out, *grads), (expected, *wanted), rtol=bound, atol=bound)


@pytest.mark.parametrize("heads", ["groups", "wider values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_round_as_the_operator_does(heads: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = operands(heads, dtype)
    kept = mask_of("hides rows", 1, dtype)
    expected = F.scaled_dot_product_attention(q, k, v, kept, scale=SCALE, enable_gqa=True)
    dout = torch.randn_like(expected)
    with torch.no_grad():
        out, lse = attend_block(q, k, v, kept, SCALE, 0.0)
        grads = attend_block_backward(dout, q, k, v, out, lse, kept, SCALE, 0.0)
    assert lse.dtype == torch.float32
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=bound, atol=bound)
    rounded = tuple(grad.to(dtype) for grad in grads)
    torch.testing.assert_close(rounded, torch.autograd.grad(expected, (q, k, v), dout), rtol=bound, atol=4 * bound)


def test_a_part_of_a_gradient_is_not_rounded_to_a_narrow_dtype() -> None:
    """Where no kernel does it: parts are summed over blocks of keys or queries, and the sum is rounded."""
    torch.manual_seed(0)
    q, k, v = operands("wider values", torch.bfloat16)
    wide_q, wide_k, wide_v = q.double(), k.double(), v.double()
    with torch.no_grad():
        out, lse = attend_block(wide_q, wide_k, wide_v, None, SCALE, 0.0)
        dout = torch.randn_like(out).bfloat16()
        expected = attend_block_backward(dout.double(), wide_q, wide_k, wide_v, out, lse, None, SCALE, 0.0)
        found = attend_block_backward(dout, q, k, v, out.float(), lse.float(), None, SCALE, 0.0)
    assert {grad.dtype for grad in found} == {torch.float32}
    torch.testing.assert_close(tuple(grad.double() for grad in found), expected, rtol=1e-5, atol=1e-5)


def test_groups_of_heads_are_within_reach_of_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory-efficient attention, where one sequence has 2^31 entries or more."""
    monkeypatch.setattr(kernels, "_REACH", 3 * COLUMNS * 8)
    q, k, v = operands("groups")
    mask = mask_of("bias", 4, torch.float64)
    parts = kernels._parts_of_heads(mask, q, k, v)
    assert [[x.shape[1] for x in part] for part in parts] == [[2, 2, 1, 1]] * 2
    for joined, whole in zip(zip(*parts, strict=True), (mask, q, k, v), strict=True):
        assert torch.equal(torch.cat(joined, 1), whole)
    far = torch.empty(2, 4, COLUMNS, 3 * 8)[..., :8]
    assert kernels._within_reach(far).is_contiguous()
    assert kernels._within_reach(far[:, :1, :2]).stride() == far.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("reach", [2**31, 3 * 117 * 8])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_of_cuda(kind: str, dtype: torch.dtype, reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of keys, of sizes that no kernel likes, against the operator in float64 on the CPU."""
    monkeypatch.setattr(kernels, "_REACH", reach)
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 83)
    monkeypatch.setattr(sys.modules[__name__], "COLUMNS", 117)
    torch.manual_seed(0)
    q, k, v = (x.detach().to(dtype) for x in operands("groups"))
    mask = mask_of(kind, q.shape[1], dtype)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    expected = reference(*wide, wide_mask, 0.0)
    dout = torch.randn_like(expected).to(dtype)
    wanted = torch.autograd.grad(expected, wide, dout.double())

    q, k, v, dout = (x.cuda() for x in (q, k, v, dout))
    mask = None if mask is None else mask.cuda()
    assert has_kernel(q, v, 0.0)
    given = [
        (q, k[:, :, keys], v[:, :, keys], None if mask is None else mask[..., keys])
        for keys in (slice(0, 37), slice(37, COLUMNS))
    ]
    out, lse = merge_blocks(*(part for block in given for part in attend_block(*block, SCALE, 0.0)))
    (dq, dk, dv), (dq_1, dk_1, dv_1) = (attend_block_backward(dout, *b[:3], out, lse, b[3], SCALE, 0.0) for b in given)
    found = (out, dq + dq_1, torch.cat([dk, dk_1], 2), torch.cat([dv, dv_1], 2))
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for mine, theirs in zip(found, (expected, *wanted), strict=True):
        assert (mine.cpu().double() - theirs).abs().max() <= bound * theirs.abs().max()
