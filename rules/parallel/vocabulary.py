"""Embeddings and losses whose vocabulary is sharded: each rank has some rows of the embedding and of the head.

    embedding(w, ids)           ->  lookup_rows(w, arange(V), ids)           w stored as Shard(0)
    embedding_bag(w, ids, at)   ->  sum_rows(w, arange(V), ids, at)          the same; a mean is divided by counts
    cross_entropy(x, target)    ->  logsumexp(x) - take_class(x, arange(V), target)
                                                                             x computed from a head stored as Shard(0)
    gather(x, -1, i)            ->  take_class(x, arange(V), i)              x may be a log_softmax

A rank looks up the ids that it has rows of, and gets zeros for the others: the result is a sum over ranks, one
all-reduce of activations. The loss needs the greatest logit, the sum of exponentials and the label's logit of each row:
three all-reduces of one number a row, and a fourth one with label smoothing. So do log probabilities of chosen classes,
which losses of preferences and policies read. No rank has whole logits.
The rules write operators for whole values. The layout rules of those here say that they are sums over the vocabulary;
logsumexp and log_softmax run in parts, as over any sharded dimension (`rules.layouts.parts`).

They refuse class weights, class probabilities, logits that are not [rows, classes], maxima of bags, and embeddings
whose gradients are scaled by frequency: propagation then gathers what is sharded, with a line in the report. A target
that is neither a class nor ignored has the logit 0 here; torch fails on it.
Shapes: w [V, d], ids any, x [N, V], target [N]; of the others x [..., V], i [..., k].
Numerics: reassociates; half-precision logits are summed in float32.
Source: Megatron-LM, megatron/core/tensor_parallel/layers.py (VocabParallelEmbedding) and cross_entropy.py.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import Literal, Match, Maybe, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.graph import is_same_size
from fxrewrite.ops import bind, fake_value, key
from fxrewrite.spmd import LayoutRule, LayoutRules, Shard, held_as

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2


def lookup_rows(weight: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> torch.Tensor:
    """The rows of the weight with these ids, of which `rows`, consecutive, are here; zeros for others.

    Args:
        weight: [V, d].
        rows: the ids of the weight's rows, int64 [V].
        ids: int64, any shape.
        padding_idx: the id whose row gets no gradient; -1 if there is none.
    """
    at, is_here = _position(rows, ids)
    found = F.embedding(at, weight)
    if padding_idx >= 0:
        found = torch.where((ids == padding_idx).unsqueeze(-1), found.detach(), found)
    return found.masked_fill(torch.logical_not(is_here).unsqueeze(-1), 0)


def take_class(logits: torch.Tensor, classes: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Each row's logits of some classes, of which `classes`, consecutive, are here; zero for others.

    Args:
        logits: [..., V].
        classes: the classes of the logits' columns, int64 [V].
        target: int64 [..., k].
    """
    at, is_here = _position(classes, target)
    return logits.gather(-1, at).masked_fill(torch.logical_not(is_here), 0)


def sum_rows(
    weight: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    scales: torch.Tensor | None,
    has_last: bool,
    padding_idx: int,
) -> torch.Tensor:
    """For each bag the sum of the rows of the weight with its ids, of which `rows`, consecutive, are here.

    Args:
        weight: [V, d].
        rows: the ids of the weight's rows, int64 [V].
        ids: int64 [n].
        offsets: where bags start among the ids, and with `has_last` where the last one ends.
        scales: of each row that is summed, [n].
        has_last: see `offsets`.
        padding_idx: the id that counts nothing; -1 if there is none.
    """
    at, is_here = _position(rows, ids)
    scale = torch.logical_and(is_here, ids != padding_idx).to(weight.dtype)
    scale = scale if scales is None else scale * scales
    return F.embedding_bag(at, weight, offsets, mode="sum", per_sample_weights=scale, include_last_offset=has_last)


def _position(numbers: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where among consecutive numbers the wanted ones are, and whether they are among them."""
    at = wanted - numbers[0]
    is_here = torch.logical_and(at >= 0, at < numbers.shape[0])
    return torch.where(is_here, at, 0), is_here


# CompositeImplicitAutograd: they stay one node of a graph, and when they run they are operators of ATen.
for _operator in (lookup_rows, sum_rows, take_class):
    _name = f"fxrewrite_rules::{_operator.__name__}"
    torch.library.define(_name, torch.library.infer_schema(_operator, mutates_args=()))
    torch.library.impl(_name, "CompositeImplicitAutograd")(_operator)
LOOKUP_ROWS = torch.ops.fxrewrite_rules.lookup_rows.default
SUM_ROWS = torch.ops.fxrewrite_rules.sum_rows.default
TAKE_CLASS = torch.ops.fxrewrite_rules.take_class.default

VOCABULARY_LAYOUTS = LayoutRules(
    (
        LayoutRule("layout.lookup_rows", (key(LOOKUP_ROWS),), "v d, v, i... -> i... d"),
        LayoutRule("layout.sum_rows", (key(SUM_ROWS),), "v d, v, !i, !o, !i? -> n d"),
        LayoutRule("layout.take_class", (key(TAKE_CLASS),), "n... c, c, n... k -> n... k"),
    )
)
"""Sums over the vocabulary."""


@where.predicate("w", text="is_sharded_by_rows")
def _is_sharded_by_rows(w: fx.Node) -> bool:
    return held_as(w) == Shard(0)


@where.predicate("is_scaled", text="is_not_scaled_by_frequency")
def _is_not_scaled(is_scaled: bool) -> bool | str:
    return not is_scaled or "gradients are scaled by the frequency of all ids"


embed_rows = Rule(
    "vocabulary.embed_rows",
    Pattern(
        (
            op(
                "embedding",
                cap("w"),
                cap("ids"),
                cap("padding", Literal),
                cap("is_scaled", Literal),
                cap("is_sparse", Literal),
            ),
        ),
        (_is_sharded_by_rows, _is_not_scaled),
    ),
)


@embed_rows.replacement
def _(match: Match, w: Any, ids: Any, padding: int) -> Any:
    """lookup_rows(w, arange(V), ids)"""
    return match.call(LOOKUP_ROWS, w, _numbers(match, match["w"], 0), ids, padding)


@where.predicate("mode", text="is_sum_or_mean_of_bags")
def _is_sum_or_mean(mode: int) -> bool | str:
    return mode in (_BAG_SUM, _BAG_MEAN) or "a maximum over the rows of a bag is no sum over ranks"


_BAG_SUM, _BAG_MEAN = 0, 1
embed_bags = Rule(
    "vocabulary.embed_bags",
    Pattern(
        (
            op(
                operator.getitem,
                op(
                    torch.ops.aten.embedding_bag.padding_idx,
                    *(cap("w"), cap("ids"), cap("offsets"), cap("is_scaled", Literal), cap("mode", Literal)),
                    *(
                        cap("is_sparse", Literal),
                        cap("scales", Maybe),
                        cap("has_last", Literal),
                        cap("padding", Literal),
                    ),
                ),
                0,
            ),
        ),
        (_is_sharded_by_rows, _is_not_scaled, _is_sum_or_mean),
    ),
    numerics="reassociates",
)


@embed_bags.replacement
def _(match: Match, w: Any, ids: Any, offsets: Any, mode: int, scales: Any, has_last: bool, padding: int | None) -> Any:
    """sum_rows(w, arange(V), ids, offsets), divided by the number of ids in the bag where it is a mean"""
    padding = -1 if padding is None else padding
    found = match.call(SUM_ROWS, w, _numbers(match, match["w"], 0), ids, offsets, scales, has_last, padding)
    if mode == _BAG_SUM:
        return found
    like = fake_value(match["w"])
    one = match.call(aten.ones.default, [1, 1], dtype=like.dtype, device=like.device, pin_memory=False)
    none, counted = aten.zeros_like(ids), aten.to(aten.ne(ids, padding), like.dtype)
    counts = aten.embedding_bag(one, none, offsets, False, _BAG_SUM, False, counted, has_last)[0]
    return aten.div(found, aten.clamp_min(counts, 1))


@where.predicate("logits", text="is_sharded_by_class")
def _is_sharded_by_class(logits: fx.Node) -> bool | str:
    """Whether the logits are a linear of a weight in rows, but for operators on one value each."""
    node = logits
    while key(node) != "aten::linear":
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            return f"%{node.name} is between the loss and the head"
        node = node.all_input_nodes[0]
    return held_as(bind(node)["weight"]) == Shard(0) or "the head is not sharded by classes"


@where.predicate("logits", "target", text="is_rows_of_classes")
def _is_rows_of_classes(logits: fx.Node, target: fx.Node) -> bool | str:
    if fake_value(target).is_floating_point():
        return "the targets are class probabilities"
    return fake_value(logits).dim() == 2 or f"the logits have rank {fake_value(logits).dim()}"


@where.predicate("reduction", text="is_sum_or_none")
def _is_sum_or_none(reduction: int) -> bool | str:
    return reduction != _MEAN or "rules.losses makes a mean a sum first"


split_loss = Rule(
    "vocabulary.split_loss",
    Pattern(
        (
            op(
                "cross_entropy_loss",
                cap("logits"),
                cap("target"),
                None,
                cap("reduction", Literal),
                cap("ignore_index", Literal),
                cap("label_smoothing", Literal),
            ),
        ),
        (_is_rows_of_classes, _is_sum_or_none, _is_sharded_by_class),
    ),
    numerics="reassociates",
    domain="finite",
)


@split_loss.replacement
def _(match: Match, logits: Any, target: Any, reduction: int, ignore_index: int, label_smoothing: float) -> Any:
    """logsumexp(x) - take_class(x, arange(V), target)"""
    given = fake_value(match["logits"])
    wide = torch.promote_types(given.dtype, torch.float32)
    x = logits if wide == given.dtype else aten.to(logits, wide)
    taken = match.call(TAKE_CLASS, x, _numbers(match, match["logits"], 1), aten.unsqueeze(target, 1))
    normalizer = aten.logsumexp(x, [1])
    loss = aten.sub(normalizer, aten.squeeze(taken, 1))
    if label_smoothing:
        of_all = aten.sub(normalizer, aten.div(aten.sum(x, [1]), given.shape[1]))
        loss = aten.add(aten.mul(loss, 1 - label_smoothing), aten.mul(of_all, label_smoothing))
    loss = aten.masked_fill(loss, aten.eq(target, ignore_index), 0)
    loss = aten.sum(loss) if reduction == _SUM else loss
    return loss if wide == given.dtype else aten.to(loss, given.dtype)


@where.predicate("logits", "dim", text="runs_along_classes")
def _runs_along_classes(logits: fx.Node, dim: int) -> bool | str:
    last = fake_value(logits).dim() - 1
    return dim in (-1, last) or f"it runs along {dim}, and classes are the last dimension"


@where.predicate("logits", "index", text="has_rows_of_logits")
def _has_rows_of_logits(logits: fx.Node, index: fx.Node) -> bool | str:
    rows, chosen = fake_value(logits).shape[:-1], fake_value(index).shape[:-1]
    is_same = len(rows) == len(chosen) and all(map(is_same_size, rows, chosen))
    return is_same or "the index has other rows than the logits"


take_logits = Rule(
    "vocabulary.take_logits",
    Pattern(
        (op("gather", cap("logits"), cap("dim", Literal), cap("index")),),
        (_runs_along_classes, _has_rows_of_logits, _is_sharded_by_class),
    ),
)


@take_logits.replacement
def _(match: Match, logits: Any, index: Any) -> Any:
    """take_class(x, arange(V), i)"""
    return match.call(TAKE_CLASS, logits, _numbers(match, match["logits"], -1), index)


def _numbers(match: Match, value: fx.Node, dim: int) -> Any:
    """0, 1, ..., one for each entry of the dimension."""
    size, device = fake_value(value).shape[dim], fake_value(value).device
    return match.call(aten.arange.default, size, device=device, pin_memory=False)


VOCABULARY = RuleSet("vocabulary", embed_rows, embed_bags, split_loss, take_logits)
"""Runs after the placements of weights are annotated, before propagation."""
