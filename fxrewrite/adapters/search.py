"""A search function: its pattern, and what it computes for the shapes of a match."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.adapters.traced import computed_by, correspondence, outputs_of, placeholders, terms
from fxrewrite.backends.traces import of_shape, on_fake_values
from fxrewrite.errors import RuleDefinitionError, refuse
from fxrewrite.match import Match as Found
from fxrewrite.pattern import Capture, Ignore, Pattern
from fxrewrite.pattern.terms import freeze
from fxrewrite.verify.rewrite import quiet
from fxrewrite.verify.sample import TORCH_ERRORS

Trace = Callable[..., fx.GraphModule]


class Search:
    """A search function: its pattern, and what it computes for the shapes of a match."""

    def __init__(
        self,
        function: Callable[..., Any],
        examples: Sequence[Any],
        trace: Trace,
        scalars: dict[str, float | int],
        options: Mapping[str, Any],
    ) -> None:
        self.function, self.name = function, getattr(function, "__name__", "pattern")
        self.names = list(inspect.signature(function).parameters)
        if not isinstance(examples, (list, tuple)):
            raise RuleDefinitionError(f"example_inputs is a list or a tuple, not {type(examples).__name__}")
        unknown = [name for name in scalars if name not in self.names]
        if unknown or len(examples) + len(scalars) != len(self.names):
            raise RuleDefinitionError(
                f"{self.name} has the parameters {', '.join(self.names)}; example_inputs has {len(examples)} values "
                f"and scalar_workaround {list(scalars)}"
            )
        given = iter(examples)
        self.examples = [scalars[name] if name in scalars else next(given) for name in self.names]
        self.scalars, self._trace, self._options = scalars, trace, options
        self.tangents: list[str] = []
        self._graphs: dict[Any, fx.GraphModule | str] = {}
        self._gradients = [isinstance(v, torch.Tensor) and v.requires_grad for v in self.examples]

    def pattern(self) -> Pattern:
        """The pattern of its graph; where other sizes give other numbers, any number matches."""
        gm = self._traced(self.function, self.examples)
        other = self._at_other_sizes()
        twins: dict[fx.Node, fx.Node | None] = dict.fromkeys(gm.graph.nodes)
        if other is not None and [n.target for n in other.graph.nodes][:-1] == [n.target for n in gm.graph.nodes][:-1]:
            twins = dict(zip(gm.graph.nodes, other.graph.nodes, strict=True))
        scalars = {value: name for name, value in self.scalars.items()}
        numbers = _Numbers(twins, scalars)
        found = terms(gm.graph, self._inputs(gm.graph), numbers.term)
        pattern = Pattern(found)
        has = {capture.name for capture in pattern.captures}
        unused = [name for name in self.names if name not in has]
        if unused:
            raise RuleDefinitionError(
                f"{self.name}: {', '.join(unused)} are not in its graph, {pattern}; leave them out, or name a number "
                "in scalar_workaround"
            )
        return pattern

    def _inputs(self, graph: fx.Graph) -> dict[fx.Node, Any]:
        """A capture for each input; of a joint graph also for the gradients of the results, tangents_1 and so on."""
        nodes = placeholders(graph)
        tensors = [n for n, v in zip(self.names, self.examples, strict=True) if isinstance(v, torch.Tensor)]
        names = self.names if len(nodes) == len(self.names) else tensors
        self.tangents = [f"tangents_{i + 1}" for i in range(len(nodes) - len(names))]
        return {node: Capture(name, "any") for node, name in zip(nodes, [*names, *self.tangents], strict=True)}

    def _at_other_sizes(self) -> fx.GraphModule | None:
        """Its graph where each size of the examples is another one; None if it does not run there."""
        sizes = {size for v in self.examples if isinstance(v, torch.Tensor) for size in v.shape if size > 1}
        others = dict(zip(sorted(sizes), (size for size in itertools.count(2) if size not in sizes), strict=False))

        def resized(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            shape = [others.get(size, size) for size in value.shape]
            return of_shape(shape, value)

        log = logging.getLogger("torch._subclasses.fake_tensor")  # it logs a traceback of each operator that raises
        was, log.disabled = log.disabled, True
        try:
            return self._traced(self.function, [resized(value) for value in self.examples])
        except Exception:  # noqa: BLE001  # a function for some sizes alone: then no number says anything
            return None
        finally:
            log.disabled = was

    def _traced(self, function: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
        names = self.names

        def called(*args: Any) -> Any:
            return function(*args)

        called.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        called.__name__ = getattr(function, "__name__", "pattern")
        return on_fake_values(self._trace, called, args, **self._options)

    def trace(self, function: Callable[..., Any], match: Found) -> fx.GraphModule:
        """The graph of a function of the same parameters, for the values of a match, traced once for equal ones."""
        values = fake_values([match.captures.get(name) for name in self.names], match)
        values = [_with_grad(v, grad) for v, grad in zip(values, self._gradients, strict=True)]
        key = function, tuple(map(_key, values))
        if key not in self._graphs:
            self._graphs[key] = self._traced(function, values)
        found = self._graphs[key]
        assert isinstance(found, fx.GraphModule)
        return found

    def differs(self, match: Found) -> str:
        """Where the function, for the values of a match, computes something else than the match; empty if nowhere."""
        try:
            with quiet():
                gm = self.trace(self.function, match)
        except TORCH_ERRORS as error:
            return f"it raises {type(error).__name__}: {error}"
        inputs = self._inputs(gm.graph)
        if len(computed_by(gm.graph)) != len(match.outputs):
            return f"{len(outputs_of(gm.graph))} results"
        found = correspondence(gm.graph, {node: match[capture.name] for node, capture in inputs.items()}, match)
        return found if isinstance(found, str) else ""


class _Numbers:
    """The terms that replace literals of a trace in a pattern."""

    def __init__(self, twins: Mapping[fx.Node, fx.Node | None], scalars: Mapping[float | int, str]) -> None:
        self._twins, self._scalars = twins, scalars
        self._at: dict[fx.Node, Iterator[Any]] = {}

    def term(self, node: fx.Node, value: Any) -> Any:
        """The literal, or a capture for one of `scalar_workaround`; sizes, dtypes and devices are ignored."""
        twin = self._twins[node]
        if node not in self._at:
            self._at[node] = iter(
                _literals((node.args, dict(node.kwargs)) if twin is None else (twin.args, dict(twin.kwargs)))
            )
        other = next(self._at[node], ...)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value in self._scalars:
            return Capture(self._scalars[value], "any")
        if isinstance(value, (torch.dtype, torch.device)):
            return Ignore()
        if type(value) in (int, float) and not ops.key(node).endswith("getitem"):
            same = twin is not None and type(other) is type(value) and freeze(other) == freeze(value)
            return value if same else Ignore()
        return value


def _literals(value: Any) -> Iterator[Any]:
    """What holds no node, in the order in which terms are made of arguments."""
    if isinstance(value, fx.Node):
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _literals(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _literals(item)
    elif isinstance(value, slice):
        yield from _literals((value.start, value.stop, value.step))
    else:
        yield value


def fake_values(args: Sequence[Any], match: Found) -> list[Any]:
    """The fake values of nodes; other arguments as they are.

    Raises:
        RefusedError: a node has no fake value.
    """
    found = [ops.value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    missing = [arg for arg, value in zip(args, found, strict=True) if value is ops.MISSING]
    if missing:
        refuse(
            f"%{missing[0].name} has no fake value, for which functions could be traced",
            hint="propagate fake values first, as torch.compile, torch.export and make_fx do",
            node=match.root,
        )
    return found


def _with_grad(value: Any, requires_grad: bool) -> Any:
    if not isinstance(value, torch.Tensor) or value.requires_grad == requires_grad:
        return value
    return value.detach().requires_grad_(requires_grad and value.is_floating_point())


def _key(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), str(value)
    return (
        tuple(map(str, (*value.shape, *value.stride()))),
        len(value.shape),
        value.dtype,
        value.device,
        value.requires_grad,
    )
