"""Where sharding starts: at the first operators that compute hidden states from the model's inputs.

    embedding(weight, ids)     ->  embedding(weight, redistribute(ids, R -> S))
    linear(features, weight)   ->  linear(redistribute(features, R -> S), weight)

Every value is traced to its origin: the model only (parameters, positions, tables), the call, or hidden states. Two
kinds of operators start hidden states, in any model:

- a lookup by integers that come from the call: token ids, shifted labels, hashed ids, positions counted from a mask;
- a projection or norm over the last dimension of floating values [batch, sequence, features] that come from the call:
  `inputs_embeds`, one-hot vectors, patches and frames after their convolution, an encoder's states.

The sequence is the last dimension of ids, or the dimension next to the features; it is followed through transposes
from the inputs on. For a floating input [a, b, features] it is the longer of a and b; `sequence_dim` overrides that.
Ids of one dimension are one for each row of a batch, unless `sequence_dim` is 0 or they are a row of ids [batch, S].
Features of the call that one row of hidden states modulates, as patches are scaled by what is pooled of a text, start
hidden states themselves. Whether a dimension is symbolic does not matter, because batch sizes vary, too. All this
decides only what is fast: results are exact whatever is sharded.
A length that the number of ranks does not divide is sharded in padded chunks, with a line in the report. A length
shorter than the number of ranks stays whole if there is a longer one, with a line. A call of one token runs whole on
every rank, with a line.
Everything else is sharded because a sharded value requires it. Rotary tables, learned positions and shifted labels are
computed from whole inputs and sliced, so a label is shifted before it is sliced.
Numerics: exact. Source: AutoSP (arXiv 2604.27089, section 3), which slices ids, labels and positions at the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
from pydantic import Field
from torch import fx

from autosp_rules.errors import AutoSPError
from fxrewrite import Edit, Event, Report
from fxrewrite.graph import Fact, input_name, source_line
from fxrewrite.ops import Trait, bind, factors, has_trait, is_parameter, is_tensor, key
from fxrewrite.spmd import (
    Axis,
    Call,
    LayoutRules,
    Placement,
    Replicate,
    Shard,
    Size,
    SpmdContext,
    held_as,
    hold_chunks,
    is_divided_by,
    is_read_from_data,
    is_same_size,
    local_shape,
    product,
    redistribute,
    size_hint,
)

_TOKENS = Fact[int]("tokens per rank")
"""Fact of the output node: number of tokens of the batch in a rank's chunks."""
_LENGTHS = Fact["tuple[tuple[Size, bool], ...]"]("lengths")
"""Fact of the output node: lengths of the sequences where sharding starts, and whether their chunks are padded."""
_LOOKUPS = {"aten::embedding": ("weight", "indices"), "aten::index": ("self", "indices")}
"""Operators that look up rows of a table, and the names of the table and the ids."""
_NORMS = ("aten::layer_norm", "aten::rms_norm")
_SAME_NUMBERS: tuple[Trait, ...] = ("same", "cast", "reshape", "squeeze", "expand")
"""Traits of operators through which a value is still the same numbers in the same order."""


class Origin(IntEnum):
    """Where the numbers of a value come from; the highest among several operands counts."""

    MODEL = 0
    CALL = 1
    HIDDEN = 2


@dataclass(frozen=True, slots=True)
class Trace:
    """The origin of a value, and which of its dimensions is the sequence, as far as that could be followed."""

    origin: Origin = Origin.MODEL
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Hidden states start at `node`; `reader`, which is `node` or a view before it, reads `value`."""

    node: fx.Node
    reader: fx.Node
    value: fx.Node
    dim: int

    @property
    def length(self) -> Size:
        """Size of the sequence dimension."""
        return _shape(self.value)[self.dim]


class OneToken(Event, frozen=True):
    """The call is of one token, so that there is no sequence."""

    kind: Literal["one token"] = "one token"

    def __str__(self) -> str:
        return "whole: the call is of one token, which every rank computes"


class Padded(Event, frozen=True):
    """The ranks do not divide a sequence, so that chunks are padded where hidden states start."""

    kind: Literal["padded"] = "padded"
    node: str
    source: str
    length: int = Field(description="of the sequence; of a symbolic one, at the size at hand")
    num_ranks: int
    is_doubtful: bool = Field(description="whether another dimension of the value is longer")

    def __str__(self) -> str:
        chunk = -(-self.length // self.num_ranks)
        padding = f"the last {chunk * self.num_ranks - self.length} entries are padding, which nothing reads"
        hint = "; if another dimension is the sequence, pass its number: autosp(sequence_dim=...)"
        return (
            f"padded: %{self.node} {self.source} starts hidden states in {self.num_ranks} chunks of {chunk}, of which "
            f"{padding}{hint * self.is_doubtful}"
        )


class TooShort(Event, frozen=True):
    """A sequence beside a longer one has fewer entries than there are ranks, and stays whole."""

    kind: Literal["too short"] = "too short"
    node: str
    source: str
    length: int
    num_ranks: int

    def __str__(self) -> str:
        where = f"%{self.node} {self.source} starts hidden states"
        return f"whole: {where} whole: a length of {self.length} for {self.num_ranks} ranks"


class ShardInputs:
    """A step that shards the sequence where hidden states start."""

    def __init__(self, name: str, rules: LayoutRules, sequence_dim: int | None = None) -> None:
        self.name = name
        self.rules = rules
        self.sequence_dim = sequence_dim

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        """Inserts a redistribution at every start, reports padding, and returns the number of starts."""
        axis = SpmdContext.required(context, self.name).axis
        held = hold_chunks(edit, axis)
        self._check_sequence_dim(edit.nodes())
        tracing = _Tracing(self.rules, self.sequence_dim)
        starts = list(tracing.starts(edit.nodes()))
        for node, placement in held.items():
            _note_sharded(edit, node, placement, axis)
        if not starts and not held and _is_one_token(edit):
            edit.set_fact(edit.graph.output_node(), _TOKENS, 1)
            report.events.append(OneToken())
        longest = max((size_hint(start.length) for start in starts), default=0)
        for start in starts:
            if is_divided_by(start.length, axis.size):
                self._shard(edit, start, axis)
            elif axis.size <= size_hint(start.length) or size_hint(start.length) == longest:
                self._shard(edit, start, axis, uneven=True)
                report.events.append(_padded(start, axis))
            else:
                node, source, length = start.node.name, source_line(start.node), size_hint(start.length)
                report.events.append(TooShort(node=node, source=source, length=length, num_ranks=axis.size))
        _note_joined(edit, axis, tracing)
        return len(starts)

    def _check_sequence_dim(self, nodes: Sequence[fx.Node]) -> None:
        """Refuse a stated dimension that no input of the call can have its sequence in."""
        called_with = [n for n in nodes if n.op == "placeholder" and is_tensor(n) and not is_parameter(n)]
        if self.sequence_dim is None or any(self.sequence_dim < _num_dims(node) for node in called_with):
            return
        shapes = ", ".join(f"{input_name(node)} {[size_hint(n) for n in _shape(node)]}" for node in called_with)
        raise AutoSPError.of(
            f"sequence_dim={self.sequence_dim}: no input has its sequence there: {shapes}",
            hint="pass the number of a dimension of the token ids, or of the first two of hidden states",
        )

    def _shard(self, edit: Edit, start: Start, axis: Axis, *, uneven: bool = False) -> None:
        placement = Shard(start.dim, uneven=uneven)
        moved = edit.call(
            redistribute,
            (start.value, Replicate(), placement, axis),
            before=start.reader,
            like=start.reader,
            rule=self.name,
            val=start.value.meta["val"],
        )
        edit.replace_uses(start.value, moved, users=[start.reader])
        _note_sharded(edit, start.value, placement, axis)

    def text(self) -> str:
        return "lookups by integers of the call, projections and norms of its features: sharded on the sequence"


def _note_sharded(edit: Edit, value: fx.Node, placement: Shard, axis: Axis) -> None:
    """Records the length of a sequence that is sharded, and how many tokens of it a rank holds."""
    output, shape = edit.graph.output_node(), _token_shape(value)
    if placement.dim >= len(shape):
        return  # features are sharded
    tokens = max(size_hint(product(local_shape(shape, placement, axis.size))), tokens_per_rank(edit.gm))
    edit.set_fact(output, _TOKENS, tokens)
    edit.set_fact(output, _LENGTHS, (*(_LENGTHS.of(output) or ()), (shape[placement.dim], placement.uneven)))


def _note_joined(edit: Edit, axis: Axis, tracing: _Tracing) -> None:
    """Records lengths of longer sequences: tokens may be joined to one, as a class token, a prompt or an image's.

    Tokens of the call that start no hidden states before they are joined are a sequence of their own, once they are cut
    off again: patches that text comes before, and positions are added to both.
    """
    output = edit.graph.output_node()
    for node in edit.nodes() if _LENGTHS.of(output) else ():
        if key(node) != "aten::cat" or not is_tensor(node) or not _is_floating(node):
            continue
        args, joined = bind(node), _shape(node)
        dim = args["dim"] % len(joined)
        if len(joined) < 3 and dim != 0:
            continue  # features
        parts = [part for part in args["tensors"] if len(_shape(part)) == len(joined)]
        if any(_is_length(edit, _shape(part)[dim]) for part in parts):
            called = [part for part in parts if tracing.origin(part) == Origin.CALL]
            for size in (joined[dim], *(_shape(part)[dim] for part in called)):
                if not _is_length(edit, size) and not is_read_from_data(size) and size_hint(size) >= axis.size:
                    found = (*(_LENGTHS.of(output) or ()), (size, not is_divided_by(size, axis.size)))
                    edit.set_fact(output, _LENGTHS, found)


def _is_length(edit: Edit, size: Size) -> bool:
    return any(is_same_size(size, length) for length, _ in _LENGTHS.of(edit.graph.output_node()) or ())


def along_sequence(node: fx.Node, value: torch.Tensor) -> Placement:
    """Returns the placement of a value that was computed whole from sharded ones: sharded if as long as a sequence.

    That is a guess at what is fast; results are exact either way.
    """
    lengths = _LENGTHS.of(node.graph.output_node()) or ()
    found = (
        Shard(dim, uneven=uneven)
        for dim, size in enumerate(value.shape)
        for length, uneven in lengths
        if is_same_size(size, length)
    )
    return next(found, Replicate())


def tokens_per_rank(gm: fx.GraphModule) -> int:
    """Returns the number of tokens of the batch in a rank's chunks; 0 if no sequence was found."""
    return _TOKENS.of(gm.graph.output_node()) or 0


class _Tracing:
    """One pass over a graph, in the order in which it runs."""

    def __init__(self, rules: LayoutRules, sequence_dim: int | None) -> None:
        self._rules, self._sequence_dim = rules, sequence_dim
        self._traces: dict[fx.Node, Trace] = {}

    def starts(self, nodes: Iterable[fx.Node]) -> Iterator[Start]:
        for node in nodes:
            if node.op == "placeholder":
                self._traces[node] = _of_input(node, self._sequence_dim)
            elif node.op == "call_function":
                start = self._start(node)
                self._traces[node] = Trace(Origin.HIDDEN) if start else self._followed(node)
                if start:
                    yield start

    def origin(self, node: fx.Node) -> Origin:
        return self._trace(node).origin

    def _trace(self, node: fx.Node) -> Trace:
        return self._traces.get(node, Trace())

    def _followed(self, node: fx.Node) -> Trace:
        if not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)):
            return Trace()  # a size does not influence the numbers
        operands = [operand for operand in node.all_input_nodes if not self._is_spread(operand, node)]
        origin = max((self._trace(operand).origin for operand in operands), default=Origin.MODEL)
        return Trace(origin, self._dim(node) if origin == Origin.CALL else None)

    def _is_spread(self, operand: fx.Node, node: fx.Node) -> bool:
        """Whether one row of hidden states meets all tokens of another operand, whose hidden states start later.

        Of such a row are scales and gates that are computed of a text, and modulate patches.
        """
        if self._trace(operand).origin != Origin.HIDDEN or not is_tensor(node):
            return False
        shape = _shape(node)
        for tokens in node.all_input_nodes if len(shape) == 3 else ():
            trace = self._trace(tokens)
            if trace.origin == Origin.CALL and is_tensor(tokens) and tuple(_shape(tokens)) == tuple(shape):
                row, dim = _shape(operand), trace.dim if trace.dim in (0, 1) else 1
                return len(row) < 3 - dim or is_same_size(row[dim - 3], 1)
        return False

    def _dim(self, node: fx.Node) -> int | None:
        """Returns where the first operand's sequence is in the result, by the operator's layout rule, or None."""
        if not isinstance(node.target, torch._ops.OpOverload) or not is_tensor(node):
            return None
        call = Call.of(node)
        rule = self._rules.get(call.key)
        indices = rule.map(call) if rule is not None else None
        if indices is None:
            return None
        for terms, operand in zip(indices.operands, call.operands, strict=True):
            dim = self._trace(operand).dim
            part = indices.locate(terms, Shard(dim)) if dim is not None else None
            if part is not None:
                placement = indices.placement(indices.results[0], part)
                return placement.dim if isinstance(placement, Shard) and is_same_size(placement.outer, 1) else None
        return None

    def _start(self, node: fx.Node) -> Start | None:
        name, start = key(node), None
        if name in _LOOKUPS:
            start = self._lookup(node, *_LOOKUPS[name])
        elif name in _NORMS or has_trait(name, "product"):
            start = self._projection(node, (factors(name) or ("input",))[0])
        if start is None or any(is_read_from_data(size) for size in _shape(start.value)):
            return None  # a data-dependent length is not that of the sequence
        return start

    def _lookup(self, node: fx.Node, table: str, indices: str) -> Start | None:
        args = bind(node)
        ids = args[indices]
        if isinstance(ids, (list, tuple)):  # x[ids] gives one index for each leading dimension of x
            ids = ids[0] if len(ids) == 1 else None
        if not isinstance(ids, fx.Node) or _is_floating(ids) or not _is_floating(args[table]):
            return None
        shape, trace = _shape(ids), self._trace(ids)
        if trace.origin != Origin.CALL or self._trace(args[table]).origin != Origin.MODEL:
            return None
        if len(shape) < 2 and trace.dim is None:
            return None  # an id for each row of the batch: a language, a time
        dim = trace.dim if trace.dim is not None else len(shape) - 1
        pairs = sum(is_same_size(size, shape[dim]) for size in shape[1:]) > 1  # an id for each pair of tokens
        of_whole = is_same_size(shape[dim], 1)  # one id for a whole sequence: a language, a task
        if pairs or of_whole or _is_empty(shape):
            return None
        return Start(node, node, ids, dim)

    def _projection(self, node: fx.Node, operand: str) -> Start | None:
        reader, value = node, bind(node)[operand]
        others = [n for n in node.all_input_nodes if n is not value]
        while len(_shape(value)) == 2 and has_trait(value, *_SAME_NUMBERS):
            reader, value = value, value.all_input_nodes[0]
        shape, trace = _shape(value), self._trace(value)
        if trace.origin != Origin.CALL or len(shape) != 3 or not _is_floating(value) or _is_empty(shape):
            return None
        if any(self._trace(other).origin != Origin.MODEL for other in others):
            return None
        likely = (trace.dim if trace.dim in (0, 1) else 1, 0)
        return next((Start(node, reader, value, dim) for dim in likely if not is_same_size(shape[dim], 1)), None)


def _is_empty(shape: Sequence[Size]) -> bool:
    return any(is_same_size(size, 0) for size in shape)


def _is_one_token(edit: Edit) -> bool:
    """Whether all tensors that are passed have size 1 in their first two dimensions, and there is such a tensor."""
    passed = (n for n in edit.nodes() if n.op == "placeholder" and is_tensor(n) and not is_parameter(n))
    shapes = [_shape(node)[:2] for node in passed if len(_shape(node)) >= 2]
    return bool(shapes) and all(is_same_size(size, 1) for shape in shapes for size in shape)


def _of_input(placeholder: fx.Node, sequence_dim: int | None) -> Trace:
    if not is_tensor(placeholder) or is_parameter(placeholder):
        return Trace()
    shape = _shape(placeholder)
    if len(shape) == 1 and sequence_dim == 0 and not _is_floating(placeholder):
        return Trace(Origin.CALL, 0)
    if len(shape) < 2 or (_is_floating(placeholder) and len(shape) > 3):
        return Trace(Origin.CALL)
    has_either = _is_floating(placeholder) and len(shape) == 3  # [batch, sequence, features], or the sequence first
    stated = held_as(placeholder)
    if isinstance(stated, Shard):
        return Trace(Origin.CALL, stated.dim)
    dims = range(2) if has_either else range(1, 2 if _is_floating(placeholder) else len(shape))
    if sequence_dim is not None and sequence_dim < _num_dims(placeholder):
        return Trace(Origin.CALL, sequence_dim)
    return Trace(Origin.CALL, max(dims, key=lambda dim: (size_hint(shape[dim]), dim)))


def _num_dims(placeholder: fx.Node) -> int:
    """How many dimensions of an input may be its sequence, from the first on."""
    return 2 if _is_floating(placeholder) else len(_shape(placeholder))


def _padded(start: Start, axis: Axis) -> Padded:
    length = size_hint(start.length)
    others = (size_hint(size) for dim, size in enumerate(_shape(start.value)[:2]) if dim != start.dim)
    return Padded(
        node=start.node.name,
        source=source_line(start.node),
        length=length,
        num_ranks=axis.size,
        is_doubtful=any(other > length for other in others),
    )


def _token_shape(value: fx.Node) -> Sequence[Size]:
    return _shape(value)[:-1] if _is_floating(value) else _shape(value)


def _is_floating(node: fx.Node) -> bool:
    return node.meta["val"].is_floating_point()


def _shape(node: fx.Node) -> Sequence[Size]:
    return node.meta["val"].shape
