"""Builds a runnable graph from a reading of a pattern and values of its captures; all samples are made here.

Undecided arguments are guessed call by call, and each call is tried at once on small real tensors, so a wrong guess
costs one operator and not a graph. Fake values, which are private to torch, are made only for graphs that worked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from fxrewrite import ops
from fxrewrite.errors import named_line
from fxrewrite.ops.schemas import NO_DEFAULT, Parameter
from fxrewrite.pattern.terms import (
    ARITHMETIC_ON_SIZES,
    Capture,
    Ignore,
    ListOf,
    LiteralValue,
    Op,
    Term,
    is_size,
    parts_of,
)
from fxrewrite.pattern.text import term_text
from fxrewrite.pattern.where.base import why_not_each
from fxrewrite.pattern.where.facts import Is
from fxrewrite.torch_versions import GROUPED_ATTENTION_NEEDS_HEADS
from fxrewrite.verify.calls import NoCallError, emit, signatures
from fxrewrite.verify.guess import Guesses
from fxrewrite.verify.sample import TORCH_ERRORS, Binding, Sample
from fxrewrite.verify.tensors import InputSpec

FakeMode: TypeAlias = FakeTensorMode
"""Torch's FakeTensorMode under a public name; all graphs of a verification share one."""

_GUESSES = 24
"""Number of guesses per call before the sample is given up."""
_ABSENT: Any = object()
_TENSOR = Parameter("self", "Tensor", False, False, NO_DEFAULT)
_NUMBER = Parameter("other", "int", False, False, NO_DEFAULT)


class NoSampleError(ValueError):
    """The reading with these values gives no graph that runs; the message names the operator that failed."""


class Builder:
    """Builds one graph: `Builder(sample, mode).module()` if all bindings are decided, else with `guesses`.

    Attributes:
        bindings: those of the sample, and those that were guessed.
    """

    def __init__(self, sample: Sample, mode: FakeMode, guesses: Guesses | None = None) -> None:
        self.sample = sample
        self.bindings: dict[str, Binding] = {}
        self._decided = sample.bindings
        self._guesses = guesses
        self._mode = mode
        self._graph = fx.Graph()
        self._last_input: fx.Node | None = None
        self._nodes: dict[str, Any] = {}
        self._terms: dict[Op, fx.Node] = {}

    def module(self) -> fx.GraphModule:
        """Returns the graph, with fake values.

        Raises:
            NoSampleError: an operator does not accept its arguments, or a constraint does not hold.
            NoCallError: an operator of the pattern cannot be called in this way, whatever its arguments are.
        """
        outputs = self.calls()
        if self.sample.exposed:
            shared = [node for term, node in self._terms.items() if term.shared]
            outputs += [node for node in dict.fromkeys(shared) if node not in outputs]
        outputs += [self._nodes[name] for name in self.sample.reading.through if isinstance(self._nodes[name], fx.Node)]
        try:
            return fx.GraphModule(torch.nn.Module(), self._finished(outputs))
        except TORCH_ERRORS as error:
            raise NoSampleError(f"on fake tensors: {named_line(error)}") from error

    def calls(self) -> list[fx.Node]:
        """Decides all bindings, by running the reading on small real tensors; returns the outputs.

        Raises:
            NoSampleError: as `module` does.
        """
        terms = enumerate(self.sample.reading.outputs)
        return [self._call(term, f"out{i}") for i, term in terms if isinstance(term, Op)]

    @property
    def complete(self) -> Sample:
        """The sample with the guessed bindings."""
        return replace(self.sample, bindings=dict(self.bindings))

    def _call(self, term: Op, path: str) -> fx.Node:
        if (not self.sample.twice or term.may_draw) and term in self._terms:
            return self._terms[term]
        ready: dict[str, Any] = {}
        for name, part in term.args:
            if not is_size(part) and _has_calls(part):
                ready[name] = self._below(part, f"{path}.{name}")
        mark = (set(self.bindings), set(self._graph.nodes))
        problem = ""
        for attempt in range(_GUESSES if self._guesses is not None else 1):
            try:
                node = self._attempt(term, path, ready, attempt)
                self._check(set(self.bindings) - mark[0])
            except NoCallError as error:
                self._take_back(*mark)
                raise NoCallError(f"{term_text(term)}: {error}") from error
            except TORCH_ERRORS as error:  # a wrong guess, a wrong call, or a predicate that fails on it
                problem = f"{term_text(term)}: {named_line(error)}"
                self._take_back(*mark)
            else:
                self._terms[term] = node
                return node
        raise NoSampleError(problem)

    def _below(self, part: Term, path: str) -> Any:
        """Returns an argument with its operators replaced by their calls; other parts of a list stay terms."""
        if isinstance(part, Op):
            return self._call(part, path)
        assert isinstance(part, ListOf)
        return [
            self._call(item, f"{path}.{index}") if isinstance(item, Op) and not is_size(item) else item
            for index, item in enumerate(part.items)
        ]

    def _take_back(self, names: set[str], nodes: set[fx.Node]) -> None:
        """Forgets all other bindings and nodes. Inputs are always before calls, so the last input is found again."""
        for name in [name for name in self.bindings if name not in names]:
            del self.bindings[name]
            self._nodes.pop(name, None)
        for node in reversed([node for node in self._graph.nodes if node not in nodes]):
            self._graph.erase_node(node)
        inputs = self._graph.find_nodes(op="placeholder")
        self._last_input = inputs[-1] if inputs else None

    def _attempt(self, term: Op, path: str, ready: Mapping[str, Any], attempt: int) -> fx.Node:
        schemas = signatures(term)
        schema = self._guesses.draw.choice(*schemas) if self._guesses is not None else schemas[0]
        parameters = {parameter.name: parameter for parameter in schema.parameters}
        given: dict[str, Any] = {}
        terms = dict(term.args)
        names = [name for name in schema.names if name in terms or term.loose] or list(terms)
        names = [*names, *(name for name in terms if name not in names)]
        context = [_tensor(found) for found in tree_leaves(list(ready.values())) if isinstance(found, fx.Node)]
        shapes: dict[str, Sequence[int]] = {
            name: _tensor(found).shape for name, found in ready.items() if isinstance(found, fx.Node)
        }
        for name in names:
            place = f"{path}.{name}"
            part = ready.get(name, terms.get(name, Ignore()))
            parameter = parameters.get(name, Parameter(name, "", False, False, NO_DEFAULT))
            value = self._argument(part, place, term, parameter, context, shapes, attempt)
            if value is not _ABSENT:
                given[name] = value
                if isinstance(value, fx.Node):
                    shapes[name] = _tensor(value).shape
                elif isinstance(value, list) and all(type(size) is int for size in value):
                    shapes[name] = value
                context += [_tensor(found) for found in tree_leaves(value) if isinstance(found, fx.Node)]
        order = [name for name in names if name in given]
        result = emit(self.sample.form, term.key, schema, {name: given[name] for name in order}, self._make)
        if not isinstance(result, fx.Node):
            raise NoCallError(f"{term.key} on numbers makes no node")
        return result

    def _argument(
        self,
        part: Any,
        place: str,
        term: Op,
        parameter: Parameter,
        context: list[torch.Tensor],
        shapes: Mapping[str, Sequence[int]],
        attempt: int,
    ) -> Any:
        if isinstance(part, LiteralValue):
            return part.value
        if isinstance(part, Op):

            def read(part: Term) -> Any:
                kind = _NUMBER if isinstance(part, Capture) and part.kind == "literal" else _TENSOR
                return self._argument(part, place, term, kind, context, shapes, attempt)

            return self._size(part, read)
        if isinstance(part, (list, ListOf)):
            items = part if isinstance(part, list) else part.items
            element = replace(parameter, kind=parameter.kind.removeprefix("List[").removesuffix("]"))
            found: list[Any] = []
            for index, item in enumerate(items):
                value = self._argument(item, f"{place}.{index}", term, element, context, shapes, attempt)
                found.append(value)
                context = [*context, _tensor(value)] if isinstance(value, fx.Node) else context
            return found
        if not isinstance(part, Term):
            return part
        assert isinstance(part, (Capture, Ignore))
        name = part.name if isinstance(part, Capture) else place
        if name not in self.bindings:
            if name in self._decided:
                binding = self._decided[name]
            elif self._guesses is None:
                binding = ...  # the shrunk sample dropped it
            else:
                binding = self._guesses.value(part, term, parameter, context, shapes, self.bindings, attempt)
            self.bindings[name] = binding
            self._nodes[name] = self._realized(name, binding)
        return self._nodes[name]

    def _size(self, term: Op, base_of: Callable[[Term], Any]) -> Any:
        """Returns a size of a value, a number computed of sizes, or a dtype or device, as the sample spells it."""
        if term.key in ARITHMETIC_ON_SIZES:
            values = [self._number(part, base_of) for _, part in term.args]
            function = ARITHMETIC_ON_SIZES[term.key]
            has_node = any(isinstance(value, fx.Node) for value in values)
            return self._make(function, tuple(values), {}) if has_node else function(*values)
        first = term.args[0][1]
        node = self._terms[first] if isinstance(first, Op) else base_of(first)
        value = _tensor(node)
        if term.key.startswith("prim::"):
            return getattr(value, term.key.removeprefix("prim::"))
        is_aten = self.sample.form == "aten"
        if term.key == "aten::numel":
            call = torch.ops.aten.sym_numel.default if is_aten else "numel"
            return self._make(call, (node,), {}) if self.sample.size_calls else value.numel()
        call = torch.ops.aten.sym_size.int if is_aten else "size"
        dims = [part.value for _, part in term.args[1:] if isinstance(part, LiteralValue)]
        sizes = [
            self._make(call, (node, dim), {}) if self.sample.size_calls else value.shape[dim]
            for dim in dims or range(value.ndim)
        ]
        return sizes[0] if dims else sizes

    def _number(self, part: Any, base_of: Callable[[Term], Any]) -> Any:
        """Returns what is computed with a size: another size, or an integer that is stated or captured."""
        if isinstance(part, LiteralValue):
            return part.value
        return self._size(part, base_of) if isinstance(part, Op) else base_of(part)

    def _realized(self, name: str, binding: Binding) -> Any:
        if binding is ...:
            return _ABSENT
        if isinstance(binding, InputSpec):
            return self._input(name, binding)
        if isinstance(binding, list):
            return [self._input(f"{name}_{i}", b) if isinstance(b, InputSpec) else b for i, b in enumerate(binding)]
        return binding

    def _input(self, name: str, spec: InputSpec) -> fx.Node:
        graph = self._graph
        first = next(iter(graph.nodes), None)
        after = self._last_input
        with graph.inserting_after(after) if after is not None else graph.inserting_before(first):
            node = graph.placeholder(name.replace("@", "_").replace(".", "_"))
        node.meta["val"] = spec.blank()
        node.meta.update(spec=spec, is_parameter=spec.is_param)
        self._last_input = node
        return node

    def _make(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        """Makes a new node and runs it, so its value is known."""
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self._graph.create_node(op, target, tuple(args), dict(kwargs))
        if problem := _unchecked(node):
            raise NoSampleError(problem)
        values, named = map_arg((args, dict(kwargs)), ops.value)  # pyright: ignore[reportArgumentType]
        try:
            node.meta["val"] = _callable(target)(*values, **named)
        except RuntimeError as error:
            if not _is_of_values(error):
                raise
            values, named = tree_map_only(torch.Tensor, _invertible, (values, named))
            node.meta["val"] = _callable(target)(*values, **named)
        return node

    def _check(self, names: set[str]) -> None:
        """Raises if a constraint whose captures are all known does not hold."""
        if self._guesses is None:
            return
        for constraint in self._guesses.pattern.where:
            if isinstance(constraint, Is) and constraint.asked == "no_other_users":
                continue  # its users do not exist yet
            lists = self.sample.reading.lists.keys() & set(constraint.names)
            suffixes = {name.partition("@")[2] for name in names if name.partition("@")[0] in constraint.names}
            for suffix in {""} if lists and suffixes else suffixes:
                found = {name: self._captured(name, suffix) for name in constraint.names}
                values = self._guesses.pattern.values
                if any(v is _ABSENT or (v is None and name not in values) for name, v in found.items()):
                    continue
                if any(item is _ABSENT for name in lists for item in found[name]):
                    continue
                why_not = why_not_each(constraint, found, lists)
                if why_not:
                    raise NoSampleError(f"{constraint} does not hold: {why_not}")

    def _captured(self, name: str, suffix: str) -> Any:
        if name in self.sample.reading.lists:
            count = self.sample.reading.lists[name]
            return [self._nodes.get(f"{name}@{index}", _ABSENT) for index in range(count)]
        with_suffix = f"{name}@{suffix}" if suffix else name
        return self._nodes.get(with_suffix, self._nodes.get(name, _ABSENT))

    def _finished(self, outputs: list[fx.Node]) -> fx.Graph:
        """Copies the graph: names become as if no guess had failed, and fake values replace the real ones."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        inputs: set[str] = set()
        for node in self._graph.nodes:
            if node.op == "placeholder":
                spec: InputSpec = node.meta["spec"]
                name = str(node.target)
                while name in inputs:  # the input of a sibling's `w@1` may collide with the capture `w_1`
                    name += "_"
                inputs.add(name)
                new[node] = graph.placeholder(name)
                new[node].meta["is_parameter"] = spec.is_param
                with self._mode:
                    fake = spec.empty()
            else:
                args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: new[n].meta["val"])
                with self._mode:
                    fake = _callable(node.target)(*args, **kwargs)
                new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta["val"] = fake
        graph.output(tuple(part for node in outputs for part in _parts(graph, new[node])))
        return graph


def _parts(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Returns the node, or if it is a list, its items, as a graph's outputs are tensors."""
    values = node.meta["val"]
    if not isinstance(values, (list, tuple)):
        return [node]
    parts = [graph.call_function(operator.getitem, (node, index)) for index in range(len(values))]
    for part, value in zip(parts, values, strict=True):
        part.meta["val"] = value
    return parts


def _is_of_values(error: RuntimeError) -> bool:
    """Whether an operator took the shapes of its arguments, and not their entries: a divisor 0, a singular matrix."""
    return isinstance(error, torch.linalg.LinAlgError) or "ZeroDivisionError" in str(error)


def _invertible(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor alike that one can divide by: ones if they are integers, else unit matrices."""
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return torch.ones_like(value)
    is_square = value.ndim > 1 and value.shape[-1] == value.shape[-2]
    return torch.zeros_like(value) + torch.eye(value.shape[-1], dtype=value.dtype) if is_square else value


def _has_calls(part: Term) -> bool:
    """Whether a call that is no size is in an argument."""
    return any(isinstance(item, Op) and not is_size(item) for item in (part, *parts_of(part)))


def _callable(target: Any) -> Callable[..., Any]:
    return getattr(torch.Tensor, target) if isinstance(target, str) else target


_UNCHECKED = frozenset({"aten::batch_norm", "aten::instance_norm", "aten::scaled_dot_product_attention"})
"""Operators whose kernels for CPUs read operands as if they had other shapes or strides; see `_unchecked`."""


def _unchecked(node: fx.Node) -> str:
    """Says which operands ATen's kernels for CPUs do not check everywhere, though they need them; empty if none."""
    if dtypes := ops.clashing_dtypes(node):  # taken where a tensor is empty, or in one of several overloads
        said = ", ".join(f"{name} {ops.dtype_name(dtype)}" for name, dtype in dtypes.items())
        return f"{ops.key(node)} takes one dtype, not {said}"
    bound = ops.bind(node) if ops.key(node) in _UNCHECKED else {}
    if "running_var" in bound:
        of_channels = ("weight", "bias", "running_mean", "running_var")
        tensors = {name: _tensor(bound[name]) for name in of_channels if isinstance(bound[name], fx.Node)}
        strided = [name for name, tensor in tensors.items() if not tensor.is_contiguous()]
        return f"the backward pass reads {', '.join(strided)} as if they were contiguous" if strided else ""
    if "key" not in bound:
        return ""
    key, value = _tensor(bound["key"]), _tensor(bound["value"])
    if GROUPED_ATTENTION_NEEDS_HEADS and bound["enable_gqa"] and 0 in key.shape[-3:-2]:
        return "attention with grouped heads needs a head"
    if key.shape[-2:-1] != value.shape[-2:-1]:
        return f"attention needs as many values as keys, not {value.shape[-2]} for {key.shape[-2]}"
    return ""


def _tensor(node: fx.Node) -> torch.Tensor:
    found = ops.value(node)
    return found if isinstance(found, torch.Tensor) else torch.empty(())
