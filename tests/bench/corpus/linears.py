"""Products of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from tests.bench.corpus.cases import Family, floats

LINEARS = Family("linears", numerics="reassociates", domain="moderate")
_SQUARE = [*floats("a", "b"), "rank(a) == 2", "shape(a) == shape(b)", "size(a, 0) == size(a, 1)"]

LINEARS.pair(
    "transpose_product",
    lambda a, b: torch.matmul(a, b).t().contiguous(),
    true=lambda a, b: torch.matmul(b.t(), a.t()).contiguous(),
    false=lambda a, b: torch.matmul(a.t(), b.t()).contiguous(),
    why="the factors change their order",
    where=_SQUARE,
)

LINEARS.pair(
    "to_addmm",
    lambda b, x, w: b + 2.0 * torch.mm(x, w),
    true=lambda b, x, w: torch.addmm(b, x, w, alpha=2.0),
    false=lambda b, x, w: torch.addmm(b, x, w, beta=2.0),
    why="beta scales the summand, not the product",
    numerics="approximate",
    where=["dtype(b) in {float32, float64}", "same_dtype(b, x, w)", "rank(b) == 1", "size(b, 0) == size(w, 1)"],
)

_LINEAR = ["dtype(x) in {float32, float64}", "rank(x) == 2", "rank(w) == 2", "same_dtype(x, w)"]
_BIASED = [*_LINEAR, "rank(b) == 1", "same_dtype(x, b)"]
LINEARS.pair(
    "split_sum",
    lambda x, y, w, b: F.linear(x + y, w, b),
    true=lambda x, y, w, b: F.linear(x, w, b) + F.linear(y, w),
    false=lambda x, y, w, b: F.linear(x, w, b) + F.linear(y, w, b),
    why="the bias is added twice",
    numerics="approximate",
    where=[*_BIASED, "shape(x) == shape(y)", "same_dtype(x, y)"],
    terminates=False,
)

LINEARS.pair(
    "scale_input",
    lambda x, w, b, c: F.linear(x, w, b) * c,
    true=lambda x, w, b, c: F.linear(x * c, w, b * c),
    false=lambda x, w, b, c: F.linear(x * c, w, b),
    why="the bias is not scaled",
    literals="c",
    numerics="approximate",
    where=[*_BIASED, "c > 0", "c < 4"],
)

LINEARS.pair(
    "merge_two",
    lambda x, w, u: torch.cat([F.linear(x, w), F.linear(x, u)], -1),
    true=lambda x, w, u: F.linear(x, torch.cat([w, u], 0)),
    false=lambda x, w, u: F.linear(x, torch.cat([u, w], 0)),
    why="the weights change their order",
    numerics="approximate",
    where=[*_LINEAR, "same_dtype(w, u)", "rank(u) == 2"],
)

_BATCHES = [*floats("a", "b"), "rank(a) == 3", "rank(b) == 3", "shape(a) == shape(b)", "size(b, 1) == size(b, 2)"]
LINEARS.pair(
    "einsum_to_bmm",
    lambda a, b: torch.einsum("bij,bkj->bik", a, b),
    true=lambda a, b: torch.bmm(a, b.transpose(1, 2)),
    false=lambda a, b: torch.bmm(a, b),
    why="the second factor is not transposed",
    where=_BATCHES,
)

LINEARS.pair(
    "drop_beta",
    lambda c, a, b: torch.baddbmm(c, a, b, beta=0.0),
    true=lambda c, a, b: torch.bmm(a, b),
    false=lambda c, a, b: 0.0 * c + torch.bmm(a, b),
    why="with beta 0 a NaN in the summand is ignored",
    where=["dtype(c) in {float32, float64}", "same_dtype(c, a, b)", "rank(c) == 3"],
    domain="all",
)

LINEARS.pair(
    "scale_rows",
    lambda d, x: torch.mm(torch.diag(d), x),
    true=lambda d, x: d.unsqueeze(1) * x,
    false=lambda d, x: d.unsqueeze(0) * x,
    why="a diagonal matrix from the left scales rows, not columns",
    where=[*floats("d", "x"), "rank(d) == 1", "rank(x) == 2", "size(x, 0) == size(x, 1)"],
)

LINEARS.true(
    "multiply_wide",
    lambda a, b: torch.mm(a, b),
    lambda a, b: torch.mm(a.float(), b.float()).to(torch.bfloat16),
    where=["dtype(a) in {bfloat16}", "same_dtype(a, b)"],
    domain="all",
)
LINEARS.false(
    "multiply_narrow",
    lambda a, b: torch.mm(a.to(torch.float32), b.to(torch.float32)),
    lambda a, b: torch.mm(a, b).to(torch.float32),
    "the product is rounded to bfloat16",
    where=["dtype(a) in {bfloat16}", "same_dtype(a, b)"],
    numerics="exact",
    domain="all",
)
