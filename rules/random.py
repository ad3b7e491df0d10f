"""Random draws when a value is sharded: the whole value's numbers, or each rank's own.

    dropout(x, p, True)   ->  x * clone(dropout(ones(shape of x), p, True))              DRAW_WHOLE, before propagation
    dropout(x, p, True)   ->  x * rank_noise(randint(2**63 - 1, ()), rank, shape, p)     DRAW_BY_RANK, on local shapes

DRAW_WHOLE takes the draw off the value: what is drawn depends on sizes alone, so every rank draws the numbers of the
whole value, as one device does, and what reads them takes its chunk. With one generator state the numbers are those of
one device, element for element, at the price of drawing (and for a moment holding) all of them on every rank.
DRAW_BY_RANK gives a sharded dropout numbers that differ from rank to rank although all ranks are seeded alike, as
replicated draws need it. The generator advances by one seed on every rank, so the ranks stay alike.
Both are right under activation checkpointing: what is saved is the chunk of the noise, or the seed that it is made of.
Matches dropout in training with 0 < p < 1.
Numerics: exact; DRAW_BY_RANK changes the numbers. inductor draws by a generator of its own, which gives one device's
numbers of eager mode only with `torch._inductor.config.fallback_random = True`.
Source: PyTorch, aten/src/ATen/native/Dropout.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite import Literal, Match, RuleSet, rule, where
from fxrewrite.ops import key
from fxrewrite.spmd import Shard, SpmdContext, layout_of, size_hint, size_proxy

__all__ = ["DRAW_BY_RANK", "DRAW_WHOLE", "rank_noise"]

aten = torch.ops.aten


@where.predicate("p", "train", text="draws")
def _draws(p: float, train: bool) -> bool:
    return train and 0.0 < p < 1.0


@where.predicate("x", text="reads_data")
def _reads_data(x: fx.Node) -> bool:
    """Not what this rule itself makes: ones, in some memory order."""
    return key(x.all_input_nodes[0] if key(x) == "aten::permute" else x) != "aten::ones"


@where.predicate("root", text="is_sharded")
def _is_sharded(root: fx.Node) -> bool:
    return isinstance(layout_of(root), Shard)


def _saved(match: Match, made: fx.Proxy) -> fx.Proxy:
    """A value that the backward reads and must not draw again."""
    match.edit.set_meta(made.node, "recompute", CheckpointPolicy.MUST_SAVE)
    return made


def _drawn(match: Match, made: fx.Proxy) -> fx.Proxy:
    """A draw that is never repeated; nothing but what is made of it need be saved."""
    match.edit.set_meta(made.node, "recompute", None)
    return made


def _whole(match: Match, x: fx.Node, factory: Any) -> fx.Proxy:
    """What `factory` makes in the shape and memory order of the whole value, on which the order of draws depends."""
    value: torch.Tensor = x.meta["val"]
    strides = [size_hint(stride) for stride in torch.empty_like(value).stride()]
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    sizes = [size_proxy(match, value.shape[dim]) for dim in order]
    made = _drawn(match, match.call(factory, sizes, dtype=value.dtype, device=value.device))
    if order == list(range(value.dim())):
        return made
    return _drawn(match, aten.permute(made, [order.index(dim) for dim in range(value.dim())]))


@rule("random.draw_dropout_whole", where=[_draws, _reads_data])
def draw_dropout_whole(x: torch.Tensor, p: Literal, train: Literal) -> torch.Tensor:
    """dropout in training"""
    return aten.dropout(x, p, train)


@draw_dropout_whole.replacement
def _(match: Match, x: fx.Proxy, p: float) -> fx.Proxy:
    """x * dropout(ones), drawn in the shape of the whole value"""
    noise = _drawn(match, aten.dropout(_whole(match, match["x"], aten.ones.default), p, True))
    return aten.mul(x, _saved(match, aten.clone(noise)))


DRAW_WHOLE = RuleSet("draw_whole", draw_dropout_whole)


@torch.library.custom_op(
    "fxrewrite_rules::rank_noise",
    mutates_args=(),
    schema="(Tensor seed, SymInt rank, SymInt[] shape, float p, ScalarType dtype, Device device) -> Tensor",
)
def rank_noise(
    seed: torch.Tensor, rank: int, shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """What dropout multiplies by: 0 with probability `p`, else 1 / (1 - p), drawn by a generator for this rank alone.

    Args:
        seed: a whole number on the CPU, so that no accelerator is waited for.
        rank: this rank's position on the axis.
        shape: of the result, in elements.
        p: probability of a zero.
        dtype: of the result.
        device: of the result.
    """
    generator = torch.Generator(device).manual_seed((int(seed) + rank) % 2**63)
    return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p, generator=generator).div_(1 - p)


@rank_noise.register_fake
def _(
    seed: torch.Tensor, rank: int, shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@rule("random.draw_dropout_by_rank", where=[_draws, _is_sharded], rng="changes")
def draw_dropout_by_rank(x: torch.Tensor, p: Literal, train: Literal) -> torch.Tensor:
    """dropout in training, of a value that is sharded"""
    return aten.dropout(x, p, train)


@draw_dropout_by_rank.replacement
def _(match: Match, x: fx.Proxy, p: float) -> fx.Proxy:
    """x * noise of this rank"""
    value: torch.Tensor = match["x"].meta["val"]
    context = SpmdContext.required(match.context, "this rule")
    seed = match.call(aten.randint.default, 2**63 - 1, [], dtype=torch.int64, device=torch.device("cpu"))
    rank = match.proxy(context.rank_node(match.edit))
    shape = [size_proxy(match, size) for size in value.shape]
    noise = match.call(
        torch.ops.fxrewrite_rules.rank_noise.default, _saved(match, seed), rank, shape, p, value.dtype, value.device
    )
    return aten.mul(x, noise)


DRAW_BY_RANK = RuleSet("draw_by_rank", draw_dropout_by_rank)
