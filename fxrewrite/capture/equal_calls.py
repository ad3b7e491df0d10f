"""Equal calls of a program are traced once; what further ones become is written from what the first one became.

    layer 1: linear(x, w1), silu(h)    ->   traced: autograd, the tracer and fake tensors run each operator
    layer 2: linear(y, w2), silu(i)    ->   the nodes of layer 1 again, on y, w2 and i, with layer 2's source lines

Two calls are equal if they call one function with equal literals on operands that look alike (dtype, sizes as
expressions, strides, device, gradient), under equal modes. Tracing takes a millisecond or more for each call, most of
it arithmetic on symbolic sizes, and a model of many layers has few distinct calls.

A call is known again only if it becomes a list of operators that write to nothing, on its operands and on sizes;
others are traced each time. A value of a further call is a node and a tensor that looks like it; it becomes a tensor
of its own when a call that must be traced reads it. Nodes of equal calls share one fake value in `meta["val"]`, and
with it the memory by which views are told, so what may share memory with a value that is written to is traced each
time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from fxrewrite.capture.autocast import casting
from fxrewrite.capture.running import Running
from fxrewrite.capture.traced_values import TracedValue, current_tracer, slot_of
from fxrewrite.graph.argument_keys import argument_key
from fxrewrite.graph.fake_values import look_of
from fxrewrite.graph.sizes import is_read_from_data
from fxrewrite.ops import is_barrier, memory_written, mutated, sets_mode, tensors_of

_LITERALS = (int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, type(...))
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OF_CALL = ("val", "tensor_meta", "original_aten")
"""Metadata that equal calls share; the tracer makes the other ones of where a call is."""


class _UnknownError(Exception):
    """It cannot be said what is equal to this; the call is traced."""


@dataclass(frozen=True, slots=True)
class _Operand:
    """A result that is an operand of the call."""

    position: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A result that a traced node has."""

    node: fx.Node
    like: torch.Tensor
    look: int


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call becomes, as it did when it was traced."""

    operands: tuple[fx.Node, ...]
    """The nodes of its distinct operands."""
    nodes: tuple[tuple[fx.Node, str | None, dict[str, Any]], ...]
    """Its operators, each with the name that it asks for and the metadata that do not depend on where the call is."""
    result: Any
    """What it returns, with `_Operand` and `_Made` for tensors."""
    renamed: tuple[tuple[int, fx.Node], ...]
    """Operands that another node has from then on, as `to` of a tensor's own dtype returns the tensor."""
    memory: frozenset[StorageWeakRef]
    """The memory of the fake values."""


@dataclass
class EqualCalls:
    """The calls of one trace."""

    known: dict[Any, _Call | None] = field(default_factory=dict[Any, "_Call | None"])
    """What calls become; None for those that are traced each time."""
    shared: set[StorageWeakRef] = field(default_factory=set[StorageWeakRef])
    """Memory of fake values that nodes of several calls share."""
    values: dict[int, TracedValue] = field(default_factory=dict[int, TracedValue])
    """By the address of the tensor, which the value keeps alive."""
    looks: dict[Any, int] = field(default_factory=dict[Any, int])

    def is_written(self, graph: fx.Graph) -> bool:
        """Whether a node of the traced graph writes to memory of values that several calls share."""
        written = (tensor for node in graph.nodes for target in mutated(node) for tensor in tensors_of(target))
        return bool(self.shared) and any(_memory(tensor) in self.shared for tensor in written)

    def value(self, tensor: torch.Tensor) -> TracedValue:
        """The value that is this tensor."""
        if id(tensor) not in self.values:
            self.values[id(tensor)] = TracedValue(tensor)
        return self.values[id(tensor)]

    def look(self, value: TracedValue) -> int:
        """A number that is equal for values that look alike."""
        if value.look is None:
            look = look_of(value.like)
            if look is None:
                raise _UnknownError
            value.look = self.looks.setdefault(look, len(self.looks))
        return value.look

    def key(self, argument: Any, operands: dict[TracedValue, int]) -> Hashable:
        """What an argument has in common with those of equal calls; adds its values to the distinct operands."""

        def of_leaf(leaf: Any) -> Hashable:
            if isinstance(leaf, TracedValue):
                return operands.setdefault(leaf, len(operands)), self.look(leaf)
            if isinstance(leaf, _SYMBOLS):
                return type(leaf), leaf.node.expr
            raise _UnknownError

        return argument_key(argument, of_leaf)


class Once(Running):
    """Runs a graph under a tracer, with equal calls traced once."""

    calls: EqualCalls | None = None
    """The calls of the trace, shared by all graphs that run under it; None traces each call."""

    def __init__(self, gm: fx.GraphModule, **options: Any) -> None:
        super().__init__(gm, **options)
        self._written = memory_written(gm.graph)

    def run_node(self, n: fx.Node) -> Any:
        calls = self.calls
        if calls is None or n.op == "output":
            return super().run_node(n)
        self.current = n
        if n.op not in ("call_function", "call_method") or isinstance(n.target, HigherOrderOperator) or sets_mode(n):
            return self._values(super().run_node(n))
        operands: dict[TracedValue, int] = {}
        try:
            if is_barrier(n) or n in self._written or not self._written.isdisjoint(n.all_input_nodes):
                raise _UnknownError
            arguments = super().fetch_args_kwargs_from_env(n)
            target = n.target if isinstance(n.target, str) else id(n.target)
            key = n.op, target, calls.key(arguments, operands), _modes()
        except _UnknownError:
            return self._traced(n)
        if key not in calls.known:
            return self._traced_first(n, key, list(operands))
        call = calls.known[key]
        return self._traced(n) if call is None else self._repeated(n, call, list(operands))

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        fetched = super().fetch_args_kwargs_from_env(n)
        return (
            fetched
            if self.calls is None
            else _mapped(fetched, lambda v: v.tensor() if isinstance(v, TracedValue) else v)
        )

    def _values(self, result: Any) -> Any:
        calls = self.calls
        assert calls is not None
        return _mapped(result, lambda leaf: calls.value(leaf) if isinstance(leaf, torch.Tensor) else leaf)

    def _traced(self, n: fx.Node) -> Any:
        """Runs a call that is traced each time, of which it is not known what it does to its operands."""
        assert self.calls is not None
        operands = [self.env[operand] for operand in n.all_input_nodes]
        result = super().run_node(n)
        _mapped(operands, lambda v: v.forget_look() if isinstance(v, TracedValue) else None)
        self._forget_calls(n, result)
        return self._values(result)

    def _traced_first(self, n: fx.Node, key: Any, operands: Sequence[TracedValue]) -> Any:
        """Runs a call, and learns what it becomes."""
        assert self.calls is not None
        tracer = current_tracer()
        before = [slot_of(operand.tensor(), tracer) for operand in operands]
        looks = [operand.look for operand in operands]
        last = next(iter(reversed(tracer.graph.nodes)), None)
        result = super().run_node(n)
        made: list[fx.Node] = []
        for node in reversed(tracer.graph.nodes):
            if node is last:
                break
            made.insert(0, node)
        for operand in operands:
            operand.forget_look()
        is_changed = [self.calls.look(operand) for operand in operands] != looks
        call = None if is_changed else _learned(self.calls, made, result, operands, before, tracer)
        self.calls.known[key] = call
        if call is None:
            self._forget_calls(n, result)
        return self._values(result)

    def _forget_calls(self, n: fx.Node, result: Any) -> None:
        """Forgets what calls become after one that may have set what decides this."""
        if result is None and not mutated(n) and self.calls is not None:
            self.calls.known.clear()

    def _repeated(self, n: fx.Node, call: _Call, operands: Sequence[TracedValue]) -> Any:
        """Writes what an equal call became."""
        assert self.calls is not None
        tracer = current_tracer()
        at = {node: operand.node(tracer) for node, operand in zip(call.operands, operands, strict=True)}
        with self._set_current_node(n):
            self.tag_new_nodes()
            for node, name, meta in call.nodes:
                args: Any = map_arg(node.args, lambda used: at.get(used, used))
                kwargs: Any = map_arg(node.kwargs, lambda used: at.get(used, used))
                made = at[node] = tracer.create_node("call_function", node.target, args, kwargs, name)
                made.meta.update(meta)
        self.calls.shared |= call.memory
        for i, node in call.renamed:
            operands[i].rename(at[node])

        def value(found: Any) -> Any:
            if isinstance(found, _Operand):
                return operands[found.position]
            return TracedValue(found.like, at[found.node], found.look) if isinstance(found, _Made) else found

        return _mapped(call.result, value)

    def tag_new_nodes(self) -> None:
        """Adds to the current metadata, which torch sets per node and the tracer copies to new nodes."""


def _learned(
    calls: EqualCalls,
    made: Sequence[fx.Node],
    result: Any,
    operands: Sequence[TracedValue],
    before: Sequence[Any],
    tracer: Any,
) -> _Call | None:
    """Returns what a call becomes, of the nodes that were made of it; None if another one may become something else."""
    if result is None or any(slot is None or slot.constant is not None for slot in before):
        return None
    given = tuple(slot.proxy.node for slot in before)
    own = [node for node in made if not _is_size(node)]
    read = (used for node in own for used in node.all_input_nodes if not _is_size(used))
    now = [operand.node(tracer) for operand in operands]
    renamed = tuple((i, node) for i, node in enumerate(now) if node is not given[i])
    known = {*own, *given}
    is_of_operands = known.issuperset(read) and known.issuperset(node for _, node in renamed)
    if not is_of_operands or len(set(given)) < len(given) or not all(map(_is_plain, own)):
        return None
    positions = {id(operand.tensor()): _Operand(i) for i, operand in enumerate(operands)}

    def returned(leaf: Any) -> Any:
        if id(leaf) in positions:
            return positions[id(leaf)]
        if isinstance(leaf, _LITERALS):
            return leaf
        slot = slot_of(leaf, tracer) if isinstance(leaf, torch.Tensor) else None
        if slot is None or slot.constant is not None or slot.proxy.node not in known:
            raise _UnknownError
        return _Made(slot.proxy.node, leaf, calls.look(calls.value(leaf)))

    try:
        template = _mapped(result, returned)
    except _UnknownError:
        return None
    memory = frozenset(_memory(tensor) for node in own for tensor in tensors_of(node))
    return _Call(given, tuple(_written(node, tracer) for node in own), template, renamed, memory)


def _written(node: fx.Node, tracer: Any) -> tuple[fx.Node, str | None, dict[str, Any]]:
    """A node as `_Call.nodes` has it: the graph numbers the name that the tracer asks for."""
    target = node.target
    is_operator = isinstance(target, OpOverload)
    name = tracer.graph._target_to_str(target.overloadpacket.__name__) if is_operator else None
    return node, name, {of: node.meta[of] for of in _OF_CALL if of in node.meta}


def _mapped(tree: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """The lists, tuples and dicts with other leaves; what else holds values, as a named tuple, is a leaf."""
    kind = type(tree)
    if kind in (list, tuple, immutable_list):
        return kind(_mapped(item, of_leaf) for item in tree)
    if kind in (dict, immutable_dict):
        return {name: _mapped(item, of_leaf) for name, item in tree.items()}
    return of_leaf(tree)


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a size, which all calls may read, because it is a function of the program's inputs."""
    return isinstance(node.meta.get("val"), _SYMBOLS)


def _is_plain(node: fx.Node) -> bool:
    """Whether a node calls an operator that writes to nothing, or takes one of its results."""
    target = node.target
    if node.op != "call_function" or not tensors_of(node) or any(map(is_read_from_data, tensors_of(node))):
        return False  # sizes that data decide are not equal for equal calls
    return target is operator.getitem or (isinstance(target, OpOverload) and not target._schema.is_mutable)


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _modes() -> tuple[Any, ...]:
    """The modes of torch that decide what a call becomes."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *casting().items()
