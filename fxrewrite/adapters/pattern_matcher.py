"""Inductor's pattern matcher by rules: `register_replacement`, `register_graph_pattern` and `PatternMatcherPass`.

    from fxrewrite.adapters.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

A pass that was written for `torch._inductor.pattern_matcher` runs after this change of its import, and its patterns are
rules: `patterns.explain(gm)`, `patterns.report`, `patterns.rules.verify()`, `patterns.plan`.

Differences: a call matches in all of its spellings, and with commuted operands; `apply` is a transaction; what would
change random draws, or cross a write, is refused and in the report.
Source: PyTorch, torch/_inductor/pattern_matcher.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fxrewrite import ops
from fxrewrite.adapters.expressions import (
    MULTIPLE,
    Arg,
    CallFunction,
    CallFunctionVarArgs,
    CallMethod,
    ExclusiveKeywordArg,
    Ignored,
    KeywordArg,
    ListOf,
    MultiOutputPattern,
    PatternExpr,
    Reading,
)
from fxrewrite.adapters.traced import computed_by, correspondence, insert, outputs_of, placeholders, terms
from fxrewrite.backends.traces import (
    fwd_only,
    joint_fwd_bwd,
    of_shape,
    on_fake_values,
)
from fxrewrite.errors import FxRewriteError, Reason, RuleDefinitionError, refuse
from fxrewrite.graph import Edit
from fxrewrite.match import Explanation, Match as Found
from fxrewrite.match.safety import Effects, check_region
from fxrewrite.pattern import Capture, Ignore, Pattern
from fxrewrite.pattern.terms import freeze
from fxrewrite.plan import Plan, RuleSet
from fxrewrite.report import Report
from fxrewrite.rule import Rule
from fxrewrite.verify.rewrite import quiet
from fxrewrite.verify.sample import TORCH_ERRORS

__all__ = [
    "MULTIPLE",
    "Arg",
    "CallFunction",
    "CallFunctionVarArgs",
    "CallMethod",
    "ExclusiveKeywordArg",
    "Ignored",
    "KeywordArg",
    "ListOf",
    "Match",
    "MultiOutputPattern",
    "PatternExpr",
    "PatternMatcherPass",
    "fwd_only",
    "joint_fwd_bwd",
    "register_graph_pattern",
    "register_lowering_pattern",
    "register_replacement",
    "stable_topological_sort",
]

Check = Callable[["Match"], Any]
Handler = Callable[..., Any]
Trace = Callable[..., fx.GraphModule]


def _always(_: Match) -> bool:
    return True


def stable_topological_sort(graph: fx.Graph) -> None:
    """Moves each node that reads a later one behind it, and leaves all others in their order."""
    placed: set[fx.Node] = set()
    waiting = list(graph.nodes)
    while waiting:
        ready = [node for node in waiting if placed.issuperset(node.all_input_nodes)]
        if not ready:
            raise FxRewriteError(f"the graph has a cycle through %{waiting[0].name}; no order is topological")
        first = ready[0]
        if first is not waiting[0]:
            waiting[0].prepend(first)
        waiting.remove(first)
        placed.add(first)


class Match:
    """What checks and handlers see of a match.

    Attributes:
        nodes: the matched nodes, in graph order; the last one is the output, or the last of them.
        args, kwargs: what was captured, by position and by name.
        graph: the graph under edit: `erase_node` erases when the transaction ends, all else is the `fx.Graph`.
    """

    def __init__(self, found: Found, args: list[Any], kwargs: dict[str, Any], items: Iterable[fx.Node] = ()) -> None:
        self.found, self.args, self.kwargs = found, args, kwargs
        self.nodes = sorted({*found.nodes, *items})
        self.graph: Any = _Graph(found.edit)

    def output_nodes(self) -> list[fx.Node]:
        """The nodes that the match replaces."""
        return list(self.found.outputs)

    def output_node(self) -> fx.Node:
        """The first of the nodes that the match replaces."""
        return self.found.root

    def erase_nodes(self) -> None:
        """Erases the matched nodes that nothing reads any more."""
        for node in reversed(self.nodes):
            if not node.users and node not in self.found.edit.erased:
                self.found.edit.erase(node)

    def replace_by_example(
        self, replacement_fn: Callable[..., Any], args: Sequence[Any], trace_fn: Trace | None = None,
        run_functional_passes: bool = True,
    ) -> list[fx.Node]:  # fmt: skip
        """Replaces the match by the calls of a function of `args`, traced on their fake values; returns new nodes."""
        options = {} if trace_fn else {"run_functional_passes": run_functional_passes}
        gm = on_fake_values(trace_fn or fwd_only, replacement_fn, _values(args, self.found), **options)
        return self.replace_with_graph(gm.graph, tree_leaves(list(args)))

    def replace_with_graph(self, replacement_graph: fx.Graph | fx.GraphModule, args: Sequence[Any]) -> list[fx.Node]:
        """Replaces the match by the calls of a graph, whose inputs are `args`; returns new nodes."""
        graph = replacement_graph.graph if isinstance(replacement_graph, fx.GraphModule) else replacement_graph
        return self.graph.replace(self.found, lambda match: _inserted(graph, args, match))

    def __repr__(self) -> str:
        return f"Match(..., {self.args}, {self.kwargs})"


class _Graph:
    """The graph of a match for handlers: what they erase is erased when the transaction ends."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self.replace: Callable[..., list[fx.Node]] = _cannot_replace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._edit.graph, name)

    def erase_node(self, node: fx.Node) -> None:
        """Erases a node that nothing reads."""
        if node not in self._edit.erased:
            self._edit.erase(node)

    def eliminate_dead_code(self, *_: Any) -> None:
        """Does nothing: dead nodes go with the pass."""


def _cannot_replace(*_: Any) -> list[fx.Node]:
    raise RuleDefinitionError("an extra_check cannot replace the match; do that in the handler")


class PatternMatcherPass:
    """Patterns and what replaces them, in the order in which they were registered.

    Attributes:
        pass_name: part of the ids of its rules.
        report: what the last `apply` did and refused; None before.
    """

    def __init__(self, pass_name: str | None = None, subsystem: str | None = None) -> None:
        del subsystem
        self.pass_name = pass_name or "pattern_matcher"
        self.report: Report | None = None
        self._rules: list[Rule] = []

    @property
    def patterns(self) -> list[Rule]:
        """The rules, one for each registered pattern."""
        return self._rules

    @property
    def rules(self) -> RuleSet:
        """The patterns as a rule set."""
        return RuleSet(self.pass_name, *self._rules)

    @property
    def plan(self) -> Plan:
        """The patterns as a plan, for a backend or an inductor slot."""
        return self.rules.once()

    def apply(self, gm: fx.GraphModule | fx.Graph) -> int:
        """Rewrites the graph in one transaction, users first; returns the number of matches that were replaced.

        Raises:
            FxRewriteError: a pattern or a handler is wrong; the graph is as before.
        """
        module = gm.owning_module if isinstance(gm, fx.Graph) else gm
        if not isinstance(module, fx.GraphModule):
            raise RuleDefinitionError(f"apply takes a GraphModule, or the graph of one, not {gm!r}")
        if not self._rules:
            return 0
        self.report = self.plan.apply(module, bodies=False)
        return self.report.rewrites

    def explain(self, gm: fx.GraphModule) -> list[Explanation]:
        """Why each pattern does or does not match, in their order."""
        return [rule.explain(gm) for rule in self._rules]

    def clear(self) -> None:
        """Forgets all patterns."""
        self._rules.clear()

    def add(self, rule: Rule, *, prepend: bool = False) -> None:
        """Adds a rule, which any other engine's pass could not: one that `@rule` made, or an adapter."""
        self._rules.insert(0 if prepend else len(self._rules), rule)

    def _id(self, name: str) -> str:
        name = "".join(c if c.isalnum() else "_" for c in name).strip("_")
        known = {rule.id for rule in self._rules}
        ids = (f"{self.pass_name}.{name}{f'_{n}' * bool(n)}" for n in itertools.count())
        return next(one for one in ids if one not in known)

    def __str__(self) -> str:
        return str(self.rules)


def register_replacement(
    search_fn: Callable[..., Any],
    replace_fn: Callable[..., Any],
    example_inputs: Sequence[Any],
    trace_fn: Trace,
    pass_dicts: PatternMatcherPass | Sequence[PatternMatcherPass],
    extra_check: Check = _always,
    scalar_workaround: Mapping[str, float | int] | None = None,
    exclusive_arg_names: Sequence[str] = (),
    search_fn_pattern: PatternExpr | None = None,
    skip_duplicates: bool = False,
    pattern_name: str | None = None,
    get_decomp_fn: Callable[..., Any] | None = None,
    **promises: Any,
) -> bool:
    """Registers a replacement of what `search_fn` computes by what `replace_fn` does; both are traced.

    `search_fn` is traced on the examples, and on others of other sizes, so that numbers that are sizes are known. Where
    it matches, it is traced again for the shapes and dtypes there, and must be what the graph computes.

    Args:
        search_fn, replace_fn: of the same parameters, by position.
        example_inputs: tensors and numbers, also fake ones, for the parameters that `scalar_workaround` does not have.
        trace_fn: `fwd_only`, `joint_fwd_bwd`, or a function of these parameters around one of them.
        pass_dicts: where it is registered.
        extra_check: called with the `Match`; if false, it is not replaced.
        scalar_workaround: a number for each parameter that is no tensor: where it is in the trace, any.
        exclusive_arg_names: parameters no two of which may be one value.
        search_fn_pattern: the pattern, in place of the trace of `search_fn`; then sizes are not compared.
        skip_duplicates: whether a pattern that the pass has already is left out; else it is an error.
        pattern_name: the end of the rule's id; by default the name of `search_fn`.
        get_decomp_fn: returns the table of decompositions, for `trace_fn`.
        promises: `numerics`, `rng`, `domain`, `gradients` and others of `Rule`; by default approximate.

    Returns:
        False if it is a duplicate.

    Raises:
        RuleDefinitionError: a function cannot be traced, a parameter of `search_fn` is not in its graph, or it is there
            already.
    """
    passes = [pass_dicts] if isinstance(pass_dicts, PatternMatcherPass) else list(pass_dicts)
    wrong = [one for one in passes if not isinstance(one, PatternMatcherPass)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong:
        raise RuleDefinitionError(
            f"pass_dicts takes passes of this module, not {wrong[0]!r}; import its PatternMatcherPass"
        )
    options = {} if get_decomp_fn is None else {"get_decomp_fn": get_decomp_fn}
    search = _Search(search_fn, example_inputs, trace_fn, dict(scalar_workaround or {}), options)
    pattern = Reading(search_fn_pattern).pattern if search_fn_pattern is not None else search.pattern()
    for one in passes:
        if any(rule.pattern == pattern for rule in one.patterns):
            if skip_duplicates:
                return False
            raise RuleDefinitionError(f"{one.pass_name} has the pattern {pattern} already; say skip_duplicates=True")
    exclusive = tuple(exclusive_arg_names)

    def body(match: Found) -> Any:
        kwargs = {name: match.captures[name] for name in match.captures if name != "root"}
        given = [kwargs[name] for name in exclusive]
        if any(a is b for a, b in itertools.combinations(given, 2)):
            refuse(f"two of {', '.join(exclusive)} are one value", kind=Reason.CONSTRAINT)
        if search_fn_pattern is None:
            why = search.differs(match)
            if why:
                refuse(f"for these shapes {search.name} computes something else: {why}", kind=Reason.CONSTRAINT)
        _refuse_unless(extra_check, Match(match, [], kwargs))
        gm = search.trace(replace_fn, match)
        args = [kwargs[name] for name in (*search.names, *search.tangents) if name in kwargs]
        return _inserted(gm.graph, args, match)

    said: dict[str, Any] = {"numerics": "approximate", **promises}
    for one in passes:
        named = one._id(pattern_name or search.name)  # pyright: ignore[reportPrivateUsage]
        one.add(Rule(named, pattern, body, doc=getattr(replace_fn, "__name__", ""), **said))
    return True


def register_graph_pattern(
    pattern: PatternExpr,
    extra_check: Check = _always,
    *,
    pass_dict: PatternMatcherPass,
    prepend: bool = False,
    **promises: Any,
) -> Callable[[Handler], Handler]:
    """Decorator: where the pattern matches, the function is called with the `Match` and what was captured.

    It may call `match.replace_by_example`, or change the graph through `match.graph` and its nodes; an exception undoes
    what it did.

    Args:
        pattern: an expression.
        extra_check: called with the `Match`; if false, the handler is not called.
        pass_dict: where it is registered.
        prepend: whether it goes before all that are registered.
        promises: `numerics`, `rng`, `domain`, `gradients` and others of `Rule`; by default approximate.
    """
    reading = Reading(pattern)

    def register(handler: Handler) -> Handler:
        name = pass_dict._id(getattr(handler, "__name__", "handler"))  # pyright: ignore[reportPrivateUsage]
        pass_dict.add(
            _Handled(name, reading, handler, extra_check, {"numerics": "approximate", "shapes": "changes", **promises}),
            prepend=prepend,
        )
        return handler

    return register


def register_lowering_pattern(
    pattern: PatternExpr,
    extra_check: Check = _always,
    *,
    pass_dict: PatternMatcherPass,
    prepend: bool = False,
    **promises: Any,
) -> Callable[[Handler], Handler]:
    """Decorator: where the pattern matches, inductor lowers one call of the function to its own code.

    The function is called while inductor lowers the graph, with the `Match` and what was captured, of which tensors are
    inductor's `TensorBox`; it returns one. So the pass is for the slot after autograd, and cannot run outside inductor,
    nor be verified.

    Args:
        pattern, extra_check, pass_dict, prepend, promises: as of `register_graph_pattern`.
    """

    def register(handler: Handler) -> Handler:
        def lowered(match: Match, *args: Any, **kwargs: Any) -> None:
            node = match.output_node()
            lowering: Any = functools.wraps(handler)(functools.partial(handler, match))
            lowering._inductor_lowering_function = True  # what inductor's lowering asks of a target
            call = match.graph.call_function(lowering, args, kwargs)
            call.meta.update(node.meta)
            node.replace_all_uses_with(call)
            match.erase_nodes()

        functools.update_wrapper(lowered, handler)
        register_graph_pattern(pattern, extra_check, pass_dict=pass_dict, prepend=prepend, **promises)(lowered)
        return handler

    return register


class _Search:
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
        values = _values([match.captures.get(name) for name in self.names], match)
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
    """What stands in a pattern for a literal of a trace."""

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


class _Handled(Rule):
    """A rule whose replacement is a handler, which changes the graph by itself."""

    def __init__(
        self,
        id: str,  # noqa: A002
        reading: Reading,
        handler: Handler,
        extra_check: Check,
        promises: Mapping[str, Any],
    ) -> None:
        super().__init__(id, reading.pattern, handler_body(handler), doc=getattr(handler, "__name__", ""), **promises)
        self._reading, self._handler, self._check = reading, handler, extra_check

    def _rewrite(self, edit: Edit, match: Found, effects: Effects) -> None:
        match.edit = edit
        arguments = self._reading.arguments(match)
        if isinstance(arguments, str):
            refuse(arguments, kind=Reason.CONSTRAINT)
        view = Match(match, *arguments)
        _refuse_unless(self._check, view)
        if effects.writers:
            check_region(match, effects)

        def replace(match: Found, body: Callable[[Found], Any]) -> list[fx.Node]:
            def replacement(match: Found) -> Any:
                return body(match)

            before = set(edit.graph.nodes)
            said: dict[str, Any] = {"rng": self.rng, "shapes": self.shapes}
            Rule(self.id, self.pattern, replacement, **said)._rewrite(edit, match, effects)
            return [node for node in edit.graph.nodes if node not in before]

        view.graph.replace = replace
        with edit.raw(), edit.graph.inserting_before(match.root):
            self._handler(view, *view.args, **view.kwargs)


def handler_body(handler: Handler) -> Callable[[Found], Any]:
    """The handler under the signature of a replacement, for digests."""

    def body(match: Found) -> Any:
        raise RuleDefinitionError(f"{handler} is run by its pass alone")

    return body


def _refuse_unless(check: Check, match: Match) -> None:
    try:
        passes = check(match)
    except FxRewriteError:
        raise
    except Exception as error:
        raise FxRewriteError(
            f"extra_check {getattr(check, '__qualname__', check)} raised {type(error).__name__} "
            f"at %{match.found.root.name}: {error}"
        ) from error
    if not passes:
        refuse("extra_check is false", kind=Reason.CONSTRAINT)


def _inserted(graph: fx.Graph, args: Sequence[Any], match: Found) -> Any:
    """The calls of a graph in that of the match, and its results."""
    inputs = placeholders(graph)
    args = tree_leaves(list(args))
    if len(inputs) != len(args):
        nodes = [arg for arg in args if isinstance(arg, fx.Node)]
        if len(nodes) != len(inputs):
            raise RuleDefinitionError(f"the replacement has {len(inputs)} inputs, the match gives {len(args)} values")
        args = nodes
    results = insert(graph, dict(zip(inputs, args, strict=True)), match)
    return tuple(results) if len(results) > 1 else results[0]


def _values(args: Sequence[Any], match: Found) -> list[Any]:
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
