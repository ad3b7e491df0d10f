"""Index, gather, scatter, embedding, masks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from fxrewrite.verify import Draw
from tests.bench.corpus.cases import Family, floats

INDEXING = Family("indexing", numerics="reassociates")


def _picked(draw: Draw) -> dict[str, Any]:
    """Samples a square matrix, and a column for each row."""
    size = draw.size()
    return {"x": draw.tensor(size, size), "i": draw.indices(size, below=size)}


INDEXING.pair(
    "pick_of_rows",
    lambda x, i: x.gather(1, i.unsqueeze(1)).sum(1),
    true=lambda match, x, i: x[match.call(torch.arange, x.shape[0], device=x.device), i],
    false=lambda match, x, i: x[i, match.call(torch.arange, x.shape[0], device=x.device)],
    why="i is a column of each row, not a row of each column",
    sampler=_picked,
)


def _rows(draw: Draw) -> dict[str, Any]:
    """Samples a table, and rows of it, of which some are the first."""
    rows = draw.size()
    return {"w": draw.tensor(rows, draw.size()), "i": draw.indices(draw.size(), draw.size(), below=rows)}


INDEXING.pair(
    "embedding_to_index",
    lambda w, i: F.embedding(i, w),
    true=lambda w, i: w[i],
    false_pattern=lambda w, i: F.embedding(i, w, padding_idx=0),
    why="the row of the padding has no gradient",
    sampler=_rows,
    numerics="exact",
)


def _added(draw: Draw) -> dict[str, Any]:
    """Samples a vector, and summands of some of its entries."""
    size, count = draw.size(), draw.size()
    return {"x": draw.tensor(size), "i": draw.indices(count, below=size), "v": draw.tensor(count)}


INDEXING.pair(
    "scatter_add",
    lambda x, i, v: x.scatter_add(0, i, v),
    true=lambda x, i, v: x.index_add(0, i, v),
    false=lambda x, i, v: x.index_put((i,), x[i] + v),
    why="of equal indices one summand is left",
    domain="moderate",
    where=["dtype(x) in {float32, float64}"],
    sampler=_added,
)

INDEXING.pair(
    "clear_masked",
    lambda x, m: x.masked_fill(m, 0.0),
    true=lambda x, m: torch.where(m, 0.0, x),
    false=lambda x, m: x * torch.logical_not(m),
    why="infinity times 0 is NaN",
    where=[*floats("x"), "dtype(m) in {bool}"],
)

INDEXING.true(
    "first_of_sorted",
    lambda x: torch.sort(x, -1)[0][..., 0] * 2.0,
    lambda x: torch.amin(x, -1) * 2.0,
    domain="finite",
    where=[*floats("x"), "rank(x) >= 1", "size(x, -1) > 0"],
    gradients=False,
)
INDEXING.false(
    "first_of_sorted",
    lambda x: torch.sort(x, -1)[0][..., 0] * 2.0,
    lambda x: torch.amin(x, -1) * 2.0,
    "NaN is sorted to the end, and is every minimum",
    where=[*floats("x"), "rank(x) >= 1", "size(x, -1) > 0"],
    gradients=False,
)


def _columns(draw: Draw) -> dict[str, Any]:
    """Samples rows, and some columns of each."""
    rows, columns = draw.size(), draw.size()
    return {"x": draw.tensor(rows, columns), "i": draw.indices(rows, draw.size(), below=columns)}


INDEXING.pair(
    "gather_first",
    lambda x, i: torch.log_softmax(x, -1).gather(-1, i),
    true=lambda x, i: x.gather(-1, i) - torch.logsumexp(x, -1, True),
    false=lambda x, i: torch.log_softmax(x.gather(-1, i), -1),
    why="the softmax is over all columns, not over those that are taken",
    numerics="approximate",
    domain="moderate",
    where=["dtype(x) in {float32, float64}"],
    sampler=_columns,
)


def _bounds(draw: Draw) -> dict[str, Any]:
    """Samples values, some of which are bounds."""
    bounds = draw.tensor(draw.size()).nan_to_num().contiguous().sort()[0]
    return {"bounds": bounds, "x": bounds.flip(0).clone()}


INDEXING.pair(
    "bucketize",
    lambda x, bounds: torch.bucketize(x, bounds),
    true=lambda x, bounds: torch.searchsorted(bounds, x),
    false=lambda x, bounds: torch.searchsorted(bounds, x, right=True),
    why="a value that is a bound goes to the left of it",
    sampler=_bounds,
    numerics="exact",
)
