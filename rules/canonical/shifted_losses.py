"""A loss of shifted tokens reads all logits: instead of slicing the logits, the labels are padded with ignored ones.

    cross_entropy(f(x[:, a:b]), t, w, reduction, ignore, smoothing)
        ->  cross_entropy(f(x), pad(t, a, S - b, value=ignore), w, reduction, ignore, smoothing)
    nll_loss(f(x[:, a:b]), t, w, reduction, ignore)  ->  the same of nll_loss

Slicing needs the whole sequence; labels are replicated anyway, and small. `f` may be any operators that keep the
entries
of the sliced dimension apart: a cast, a soft cap, a head, log_softmax, a transpose, a reshape. If a layout rule calls
an index independent, slicing after the operator equals slicing before it. With reduction "none" the losses are sliced
instead of the logits.
Matches class indices. Does not match, in these words: "the logits are not sliced"; "the targets are not int64"; "the
slice keeps 3 of 8"; "%index_put writes, or sets a mode, between the slice and the loss". A value between the slice and
the loss that has other users is not part of `f`: those users need it sliced.
Shapes: x [..., S, ...], f(x[:, a:b]) [N, V] or [B, V, b - a], t [N] or [B, b - a].
Numerics: reassociates (a sum over more rows; the ignored ones are zero), if the entries that were cut off are finite.
Source: PyTorch, aten/src/ATen/native/LossNLL.cpp (ignore_index).

>>> import torch, torch.nn.functional as F
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def loss(logits, labels):
...     return F.cross_entropy(logits[:, :-1].reshape(-1, 5), labels[:, 1:].reshape(-1))
>>> inputs = torch.rand(2, 4, 5), torch.zeros(2, 4, dtype=torch.int64)
>>> gm = make_fx(loss, tracing_mode="fake", pre_dispatch=True)(*inputs)
>>> SHIFTED_LOSSES.apply(gm).rewrites > 0
True
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import DeadCode, Literal, Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.ops import bind, fake_value, is_pure, key, mutates
from fxrewrite.spmd import Call, Shard, Size, is_same_size, size_hint, size_proxy
from rules.canonical.entries import below

aten = torch.ops.aten
_NONE = 0
_END = 2**63 - 1  # tracing writes this for a slice without an end


@dataclass(frozen=True, slots=True)
class _Cut:
    """A slice of one dimension, and the operators after it that keep the entries of that dimension apart."""

    slice: fx.Node
    amounts: tuple[int, int]
    """How many entries are cut off at the start and at the end."""
    chain: tuple[tuple[fx.Node, Shard], ...]
    """The operators after the slice, in order, each with the dimension of its result that holds the entries."""

    @property
    def placement(self) -> Shard:
        """The dimension of the last value of the chain that holds the entries, written as a placement."""
        return self.chain[-1][1] if self.chain else Shard(_dim(self.slice), uneven=True)

    @property
    def whole(self) -> fx.Node:
        return self.slice.all_input_nodes[0]

    @property
    def num_whole(self) -> Size:
        return fake_value(self.whole).shape[_dim(self.slice)]

    @property
    def num_left(self) -> Size:
        return fake_value(self.slice).shape[_dim(self.slice)]


def _cuts_above(node: fx.Node) -> Iterator[_Cut]:
    """Yields the slices from which `node` is computed by operators that keep the entries apart, nearest first."""
    readers: dict[fx.Node, tuple[Call, int]] = {}  # each value has one reader, so one way leads down from it
    left = [node]
    while left:
        current = left.pop()
        if len(current.users) > 1 or not isinstance(current.target, torch._ops.OpOverload) or not is_pure(current):
            continue
        amounts = _cut_off(current)
        cut = _Cut(current, amounts, ()) if amounts is not None and sum(amounts) else None
        at = current
        while cut is not None and at in readers:
            call, position = readers[at]
            placement = below(call, {position: cut.placement})
            cut = None if placement is None else replace(cut, chain=(*cut.chain, (call.node, placement)))
            at = call.node
        if cut is not None:
            yield cut
        call = Call.of(current)
        readers |= {operand: (call, position) for position, operand in enumerate(call.operands)}
        left += reversed(call.operands)


def _cut_off(node: fx.Node) -> tuple[int, int] | None:
    """Returns how many entries a slice of a floating value cuts off at start and end; None if these are not numbers."""
    if key(node) != "aten::slice" or bind(node)["step"] != 1 or not fake_value(node).is_floating_point():
        return None
    args, dim = bind(node), _dim(node)
    cut = fake_value(node.all_input_nodes[0]).shape[dim] - fake_value(node).shape[dim]
    before = cut if args["end"] in (None, _END) else args["start"] or 0
    if isinstance(before, fx.Node) or size_hint(before) < 0 or not is_same_size(cut, size_hint(cut)):
        return None
    return size_hint(before), size_hint(cut - before)


def _dim(cut: fx.Node) -> int:
    return bind(cut)["dim"] % fake_value(cut).dim()


def _cut_of(logits: fx.Node) -> _Cut | None:
    """Returns the nearest slice of rows of the logits, `[N, V]` or `[B, V, ...]`."""
    return next((cut for cut in _cuts_above(logits) if cut.placement.dim != 1), None)


@where.predicate("logits", "target", "root", text="is_of_a_cut")
def _is_of_a_cut(logits: fx.Node, target: fx.Node, root: fx.Node) -> bool | str:
    cut = _cut_of(logits)
    if cut is None or fake_value(logits).dim() < 2:
        return "the logits are not sliced"
    if fake_value(target).dtype != torch.int64:
        return "the targets are not int64"
    whole, left = size_hint(cut.num_whole), size_hint(cut.num_left)
    if 2 * left < whole:
        return f"the slice keeps {left} of {whole}"
    node = cut.slice
    while node is not root:
        node = node.next
        if mutates(node):
            return f"%{node.name} writes, or sets a mode, between the slice and the loss"
    return True


def _pad_labels(name: str, *more: str) -> Rule:
    """Makes the rule for a loss whose arguments after the reduction are `more`."""
    captures = cap("logits"), cap("target"), cap("weight", "optional"), cap("reduction", Literal)
    pattern = Pattern((op(name, *captures, *(cap(argument, Literal) for argument in more)),), (_is_of_a_cut,))
    made = Rule(
        f"shifted_losses.pad_labels_of_{name}", pattern, numerics="reassociates", domain="finite", optional=True
    )

    @made.replacement
    def _(match: Match, target: fx.Proxy, weight: fx.Proxy | None, reduction: int) -> Any:
        """the loss of all logits, with ignored labels where the slice removed logits"""
        cut = _cut_of(match["logits"])
        assert cut is not None, "the guard has looked"
        tokens = _Tokens(match, cut)
        logits, labels = match.proxy(_uncut(match, cut, made.id)), tokens.padded(target)
        loss = getattr(aten, name)(logits, labels, weight, reduction, *(match[argument] for argument in more))
        return tokens.cut(loss) if reduction == _NONE else loss

    return made


def _uncut(match: Match, cut: _Cut, rule: str) -> fx.Node:
    """Repeats the chain on the value before the slice."""
    made = {cut.slice: cut.whole}
    value = cut.whole
    for node, placement in cut.chain:
        args: Any = map_arg(node.args, lambda n: made.get(n, n))
        kwargs: Any = map_arg(node.kwargs, lambda n: made.get(n, n))
        if key(node) == "aten::reshape" and args[1][placement.dim] != -1:
            size = size_proxy(match, placement.outer * cut.num_whole * placement.inner)
            args = args[0], [*args[1][: placement.dim], getattr(size, "node", size), *args[1][placement.dim + 1 :]]
        value = made[node] = match.edit.call(node.target, args, kwargs, before=match.root, like=node, rule=rule)
    return value


class _Tokens:
    """Pads targets, or slices losses, of shape `[..., outer * entries * inner, ...]`, along the entries."""

    def __init__(self, match: Match, cut: _Cut) -> None:
        self._match, self._cut = match, cut
        self._shape = fake_value(match["target"]).shape
        self._dim = max(0, cut.placement.dim - 1)  # one less than in the logits, whose dimension 1 has the classes

    def padded(self, targets: Any) -> Any:
        """Returns the targets, with ignored ones where the slice removed logits."""
        inside = [0, 0] * (len(self._shape) - self._dim)
        runs = aten.reshape(targets, self._runs(self._cut.num_left))
        padded = aten.constant_pad_nd(runs, [*inside, *self._cut.amounts], self._match["ignore_index"])
        return aten.reshape(padded, self._joined(self._cut.num_whole))

    def cut(self, losses: Any) -> Any:
        """Returns the losses that the slice keeps."""
        before, left = self._cut.amounts[0], self._cut.num_left
        runs = aten.reshape(losses, self._runs(self._cut.num_whole))
        kept = aten.slice(runs, self._dim + 1, before, size_proxy(self._match, before + left))
        return aten.reshape(kept, self._joined(left))

    def _runs(self, entries: Size) -> list[Any]:
        return self._with(self._cut.placement.outer, entries, self._cut.placement.inner)

    def _joined(self, entries: Size) -> list[Any]:
        return self._with(self._cut.placement.outer * entries * self._cut.placement.inner)

    def _with(self, *sizes: Size) -> list[Any]:
        shape = *self._shape[: self._dim], *sizes, *self._shape[self._dim + 1 :]
        return [size_proxy(self._match, size) for size in shape]


SHIFTED_LOSSES = RuleSet(
    "shifted_losses",
    _pad_labels("cross_entropy_loss", "ignore_index", "label_smoothing"),
    _pad_labels("nll_loss_nd", "ignore_index"),
    DeadCode("cut_logits"),
)
