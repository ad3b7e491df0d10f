"""Pattern expressions of inductor's matcher, as terms: `CallFunction(aten.mm, KeywordArg("a"), Arg())`.

The expressions are inductor's own classes; of a call, `_users` other than 1 means MULTIPLE, if the expression does not
occur so many times in the pattern. A `RepeatedExpr` is a call, and every other call of its functions that reads one of
its operands; each of them must match. Items of one list count as one operand: with
`CallFunction(operator.getitem, parts, Arg())` as operand, the calls on all parts are looked at, as `GetItem` of
inductor's split_cat.py does. What is captured by name must be equal in all of them; the handler gets what they capture
by position one after the other.
Source: PyTorch, torch/_inductor/pattern_matcher.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from torch import fx
from torch._inductor.pattern_matcher import (
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
    RepeatedExpr,
)

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.match import Match, Program
from fxrewrite.pattern import Capture, Either, Ignore, Op, Pattern, Term
from fxrewrite.pattern.terms import call

_Call = (CallFunction, CallMethod)


class TranslatedPattern:
    """A pattern expression as a pattern, and how the arguments of its handler are read from a match.

    Raises:
        RuleDefinitionError: the expression cannot be said as a pattern.
    """

    def __init__(self, expression: PatternExpr) -> None:
        is_repeated = isinstance(expression, RepeatedExpr)
        if is_repeated:
            if not isinstance(expression.inner_pattern, _Call):
                raise RuleDefinitionError(f"{expression!r} must hold CallFunction or CallMethod")
            expression = expression.inner_pattern
        self.expression = expression
        self._known: dict[int, Term] = {}
        self._order: list[tuple[str, PatternExpr]] = []
        self._lists: dict[str, tuple[ListOf, TranslatedPattern, Program[None]]] = {}
        self._counts = _counted(expression, {})
        outputs = expression.outputs if isinstance(expression, MultiOutputPattern) else [expression]
        if any(output is None for output in outputs):
            raise RuleDefinitionError(f"{expression!r}: an output that is None replaces nothing; leave it out")
        self.pattern = Pattern(tuple(self._term(output) for output in outputs))
        self._repeated = Program([(None, self.pattern)]) if is_repeated else None

    def _term(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            items = [self._term(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if not isinstance(value, PatternExpr):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = self._new(value)
        return self._known[id(value)]

    def _new(self, value: PatternExpr) -> Term:
        if isinstance(value, Ignored):
            return Ignore()
        if isinstance(value, (Arg, KeywordArg, ExclusiveKeywordArg, ListOf)):
            name = value.name if _has_name(value) else f"arg_{len(self._order)}"
            self._order.append((name, value))
            if isinstance(value, ListOf):
                inner = TranslatedPattern(value.pattern)
                self._lists[name] = value, inner, Program([(None, inner.pattern)])
            return Capture(name, "any")
        if isinstance(value, CallFunctionVarArgs):
            found = [Op(ops.key(fn), (), loose=True) for fn in value.fns]
        elif isinstance(value, _Call):
            args = tuple(self._term(arg) for arg in value.args)
            kwargs = {name: self._term(arg) for name, arg in value.kwargs.items()}
            # Inductor adds all overloads of a packet, and a call of the packet is each of them already.
            fns = [fn for fn in value.fns if getattr(fn, "overloadpacket", None) not in value.fns]
            found = [call(fn, args, kwargs) for fn in fns]
        else:
            raise RuleDefinitionError(f"{value!r} is not an expression that a pattern holds")
        inside = isinstance(value.users, int) and value.users <= self._counts.get(id(value), 1)
        distinct = list(dict.fromkeys(found if inside else [replace(term, shared=True) for term in found]))
        return distinct[0] if len(distinct) == 1 else Either(tuple(distinct))

    def arguments(self, match: Match) -> tuple[list[Any], dict[str, Any], list[fx.Node]] | str:
        """What the handler gets, by position and by name, and the nodes of matched lists and repeated calls.

        Or, as a sentence, why an item of a list, or a repeated call, does not match.
        """
        found = self._of_one(match)
        if self._repeated is None or isinstance(found, str):
            return found
        args, kwargs, nodes = found
        for node, key in self._repeated.roots(_readers(match.root)):
            if node is match.root or node in match.edit.erased:
                continue
            other = next((other for _, other in self._repeated.find(node, key)), None)
            said = "" if other is None else self._of_one(other)
            if other is None or isinstance(said, str):
                return str(said) or f"%{node.name}, which reads an operand of %{match.root.name}, does not match"
            different = _merged(kwargs, said[1])
            if different:
                return f"%{node.name} and %{match.root.name} differ in {different}"
            args += said[0]
            nodes += [*other.nodes, *said[2]]
        return args, kwargs, nodes

    def _of_one(self, match: Match) -> tuple[list[Any], dict[str, Any], list[fx.Node]] | str:
        if isinstance(self.expression, CallFunctionVarArgs):
            return list(match.root.args), dict(match.root.kwargs), []
        args: list[Any] = []
        nodes: list[fx.Node] = []
        kwargs: dict[str, Any] = {}
        exclusive: list[Any] = []
        for name, expression in self._order:
            value = match[name]
            if isinstance(expression, ExclusiveKeywordArg):
                if any(value is other for other in exclusive):
                    return f"{name} is what another exclusive argument is"
                exclusive.append(value)
            if _has_name(expression):
                kwargs[name] = value
            elif isinstance(expression, Arg):
                args.append(value)
            else:
                items = self._items(name, value, kwargs, nodes)
                if isinstance(items, str):
                    return items
                args.append(items)
        return args, kwargs, nodes

    def _items(self, name: str, value: Any, kwargs: dict[str, Any], nodes: list[fx.Node]) -> tuple[Any, ...] | str:
        wanted, inner, program = self._lists[name]
        if not isinstance(value, (list, tuple)) or not value:
            return f"expected a list, found {value!r}"
        found: list[Any] = []
        for index, item in enumerate(value):
            key = ops.key(item) if isinstance(item, fx.Node) else ""
            match = next((match for _, match in program.find(item, key)), None) if key else None
            said = inner.arguments(match) if match is not None else ""
            if match is None or isinstance(said, str):
                if not wanted.partial:
                    return str(said) or f"item {index} of the list, {item}, is not {wanted.pattern!r}"
                continue
            different = _merged(kwargs, said[1])
            if different:
                return f"items of the list differ in {different}"
            found.append(tuple(said[0]))
            nodes += [*match.nodes, *said[2]]
        return tuple(found) or f"no item of the list is {wanted.pattern!r}"


def _has_name(expression: PatternExpr) -> TypeGuard[KeywordArg | ExclusiveKeywordArg]:
    return isinstance(expression, (KeywordArg, ExclusiveKeywordArg))


def _readers(root: fx.Node) -> Iterable[fx.Node]:
    """What reads an operand of a call, or another item of the list that an operand is an item of."""
    operands = dict.fromkeys(root.all_input_nodes)
    for node in root.all_input_nodes:
        if ops.key(node) == "operator.getitem":
            lists = (user for user in node.all_input_nodes[0].users if ops.key(user) == "operator.getitem")
            operands |= dict.fromkeys(lists)
    return dict.fromkeys(user for node in operands for user in node.users)


def _merged(kwargs: dict[str, Any], more: Mapping[str, Any]) -> str:
    """Adds what was captured by name, and returns the names whose values are not equal."""
    return ", ".join(name for name, value in more.items() if kwargs.setdefault(name, value) != value)


def _counted(value: Any, counts: dict[int, int]) -> dict[int, int]:
    """How often each expression object is an argument in the whole expression."""
    parts: Iterable[Any] = ()
    if isinstance(value, _Call):
        parts = (*value.args, *value.kwargs.values())
    elif isinstance(value, MultiOutputPattern):
        parts = value.outputs
    elif isinstance(value, (list, tuple)):
        parts = value
    for part in parts:
        if isinstance(part, PatternExpr):
            counts[id(part)] = counts.get(id(part), 0) + 1
            if counts[id(part)] > 1:
                continue
        _counted(part, counts)
    return counts
