"""Runs a function of a sequence one tile at a time, so that its intermediate values exist for one tile only.

    mlp(x)                               ->  cat([mlp(tile) for tile in split(x)])
    cross_entropy(head(x), t, "sum")     ->  sum(of the tiles) / count

The backward pass recomputes a tile for its gradients, then the tile before it (`torch.utils.checkpoint`). So everything
that fn reads gets its exact gradient: sharded tensors, passed tensors, parameters, whether used elsewhere or not.
The arguments are those of DeepSpeed's `sequence_tiled_compute`, so that calls written for it run.
Numerics: reassociates. Source: Bekman et al., Arctic Long Sequence Training, arXiv 2506.13996 (tiled compute).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from autosp_rules.errors import AutoSPError


def tiled_compute(
    fn: Callable[..., torch.Tensor],
    *,
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any] | None = None,
    grad_requiring_tensor_key: str | None = None,
    compute_params: Iterable[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Literal["mean", "sum"] | None = "mean",
    shard_dimension: int = 1,
    count: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Computes `fn(**kwargs_to_shard, **kwargs_to_pass)`, and its gradients, one tile at a time.

    Args:
        fn: computes each part of the sequence independently; called with the keyword arguments of a tile.
        seqlen: size of the dimension that is split.
        shards: number of tiles; if it does not divide `seqlen`, tile sizes differ by one.
        kwargs_to_shard: tensors that have the sequence as `shard_dimension`.
        kwargs_to_pass: arguments that every tile gets unchanged.
        grad_requiring_tensor_key: as a check, the sharded tensor that must exist and require a gradient. All others
            that require a gradient get theirs too.
        compute_params: not needed, because parameters get their gradients in any case.
        output_unshard_dimension: the dimension along which the tiles' results are concatenated, if `output_reduction`
            is None; scalar results are stacked.
        output_reduction: None, "sum" of all results, or "mean". If a tile's result is a scalar, it must be the mean
            of the tile's tokens; tiles are then weighted by their lengths.
        shard_dimension: the dimension of the sequence.
        count: number of tokens of the "mean", if some do not count; then fn returns sums, and the result is their sum
            divided by this count: `(labels != -100).sum()`.

    Raises:
        AutoSPError: arguments contradict each other, or a result does not fit its tile.
    """
    passed = dict(kwargs_to_pass or {})
    _check(seqlen, shards, kwargs_to_shard, passed, grad_requiring_tensor_key, output_reduction, shard_dimension, count)
    sizes = _sizes(seqlen, min(shards, seqlen))
    cut = {name: torch.split(x, sizes, shard_dimension) for name, x in kwargs_to_shard.items()}
    calls = (partial(fn, **{name: tiles[i] for name, tiles in cut.items()}, **passed) for i in range(len(sizes)))
    results = [checkpoint(call, use_reentrant=False) for call in calls]
    if output_reduction is None:
        return _joined(results, sizes, output_unshard_dimension)
    total = torch.stack([result.sum() for result in results]).sum()
    if output_reduction == "sum":
        return total
    if count is not None:
        return total / count
    if results[0].dim():
        return total / sum(result.numel() for result in results)
    return torch.stack([result * (size / seqlen) for result, size in zip(results, sizes, strict=True)]).sum()


def _sizes(length: int, parts: int) -> list[int]:
    """Returns the sizes of `parts` parts of `length`, which differ by at most one, the longer ones first."""
    return [length // parts + (i < length % parts) for i in range(parts)]


def _joined(results: list[torch.Tensor], sizes: list[int], dim: int) -> torch.Tensor:
    if not results[0].dim():
        return torch.stack(results)
    for result, size in zip(results, sizes, strict=True):
        if not -result.dim() <= dim < result.dim() or result.shape[dim] != size:
            shape = tuple(result.shape)
            raise _wrong(
                f"a tile of {size} gave a result of shape {shape}, which has not {size} in dimension {dim}",
                "name the sequence's dimension of the result as output_unshard_dimension, or an output_reduction",
            )
    return torch.cat(results, dim)


def _check(
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    passed: Mapping[str, Any],
    grad_key: str | None,
    reduction: str | None,
    dim: int,
    count: Any,
) -> None:
    if shards < 1 or seqlen < 1:
        raise _wrong(f"{shards} tiles of a sequence of {seqlen}", "pass shards=1 or more, and a sequence")
    if not kwargs_to_shard:
        raise _wrong("nothing to shard", "name the tensors that have the sequence in kwargs_to_shard")
    for name, x in kwargs_to_shard.items():
        if name in passed:
            raise _wrong(f"{name} is both in kwargs_to_shard and in kwargs_to_pass", "leave it in one of them")
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != seqlen:
            raise _wrong(
                f"{name} has shape {tuple(x.shape)}, which has not {seqlen} in dimension {dim}",
                "pass the size of that dimension as seqlen, the sequence's dimension as shard_dimension, or the tensor "
                "in kwargs_to_pass",
            )
    if grad_key is not None and (grad_key not in kwargs_to_shard or not kwargs_to_shard[grad_key].requires_grad):
        raise _wrong(
            f"grad_requiring_tensor_key={grad_key!r} names no tensor of kwargs_to_shard that requires a gradient",
            f"name one of {', '.join(kwargs_to_shard)}, or leave it out: what requires a gradient gets one",
        )
    if reduction not in (None, "mean", "sum"):
        raise _wrong(f"output_reduction={reduction!r}", "use 'mean', 'sum' or None")
    if count is not None and reduction != "mean":
        raise _wrong(f"a count with output_reduction={reduction!r}", "a count is what a mean is over; use 'mean'")


def _wrong(reason: str, hint: str) -> AutoSPError:
    return AutoSPError.of(reason, rule="tiled_compute", hint=hint)
