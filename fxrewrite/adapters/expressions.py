"""Pattern expressions of inductor's matcher, as terms: `CallFunction(aten.mm, KeywordArg("a"), Arg())`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.match import Match, Program
from fxrewrite.pattern import Capture, Either, Ignore, Op, Pattern, Term
from fxrewrite.pattern.terms import call

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
    "MultiOutputPattern",
    "Multiple",
    "PatternExpr",
    "RepeatedExpr",
    "TranslatedPattern",
]


class Multiple:
    """The class of `MULTIPLE`."""

    def __repr__(self) -> str:
        return "MULTIPLE"


MULTIPLE = Multiple()
"""As `_users`: the node may have users outside of the match, and then stays."""


class PatternExpr:
    """Base class of pattern expressions; one object at two places is one value."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Arg(PatternExpr):
    """Captures anything; the handler gets it by position, in the order in which the expression is written."""


class Ignored(PatternExpr):
    """Matches anything."""


class KeywordArg(PatternExpr):
    """Captures anything; the handler gets it by name. One name at two places must capture one value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class ExclusiveKeywordArg(KeywordArg):
    """Captures anything that no other `ExclusiveKeywordArg` of the match captures."""


class _Call(PatternExpr):
    def __init__(self, fns: Any, *args: Any, _users: int | Multiple = 1, **kwargs: Any) -> None:
        self.fns: list[Any] = [fns] if callable(fns) or isinstance(fns, str) else list(fns)
        self.args, self.kwargs, self.users = args, kwargs, _users

    def __repr__(self) -> str:
        said = [" | ".join(map(str, self.fns)), *map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join(said)})"


class CallFunction(_Call):
    """A call of one of the functions, in any spelling; arguments that are not mentioned are at their defaults.

    Args:
        fns: a function, an overload or a packet; or several.
        args, kwargs: expressions, lists of them, or Python values that must be equal.
        _users: 1, or MULTIPLE if there may be users outside of the match; other numbers mean MULTIPLE, if the
            expression does not occur so many times in the pattern.
    """


class CallMethod(_Call):
    """A call of one of the tensor methods, in any spelling."""


class CallFunctionVarArgs(_Call):
    """A call of one of the functions with any arguments, all of which the handler gets; only as a whole pattern."""

    def __init__(self, fns: Any, users: int | Multiple = 1) -> None:
        super().__init__(fns, _users=users)


class ListOf(PatternExpr):
    """A list or tuple of one or more items, each of which matches the pattern; the handler gets a tuple of tuples.

    Args:
        pattern: of each item.
        partial: whether it is enough that one item matches.
    """

    def __init__(self, pattern: PatternExpr, partial: bool = False) -> None:
        self.pattern, self.partial = pattern, partial

    def __repr__(self) -> str:
        return f"ListOf({self.pattern!r})"


class MultiOutputPattern(PatternExpr):
    """Several outputs of one match."""

    def __init__(self, outputs: Sequence[PatternExpr | None]) -> None:
        self.outputs = list(outputs)

    def __repr__(self) -> str:
        return f"MultiOutputPattern({self.outputs!r})"


class RepeatedExpr(PatternExpr):
    """A call, and every other call of its functions that reads one of its operands; each of them must match.

    Items of one list count as one operand: with `CallFunction(operator.getitem, parts, Arg())` as operand, the calls on
    all parts are looked at, as `GetItem` of inductor's split_cat.py does. What is captured by name must be equal in all
    of them. The handler gets what they capture by position one after the other, `match.nodes` has the nodes of all, and
    `match.output_node()` is one of the calls. It is only possible as a whole pattern.
    """

    def __init__(self, inner_pattern: PatternExpr) -> None:
        self.inner_pattern = inner_pattern

    def __repr__(self) -> str:
        return f"RepeatedExpr({self.inner_pattern!r})"


class TranslatedPattern:
    """A pattern expression as a pattern, and how the arguments of its handler are read from a match.

    Raises:
        RuleDefinitionError: the expression cannot be said as a pattern.
    """

    def __init__(self, expression: PatternExpr) -> None:
        is_repeated = isinstance(expression, RepeatedExpr)
        if is_repeated:
            if not isinstance(expression.inner_pattern, (CallFunction, CallMethod)):
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
        if isinstance(value, (Arg, KeywordArg, ListOf)):
            name = value.name if isinstance(value, KeywordArg) else f"arg_{len(self._order)}"
            self._order.append((name, value))
            if isinstance(value, ListOf):
                inner = TranslatedPattern(value.pattern)
                self._lists[name] = value, inner, Program([(None, inner.pattern)])
            return Capture(name, "any")
        if not isinstance(value, _Call):
            raise RuleDefinitionError(f"{value!r} is not an expression that a pattern holds")
        is_loose = isinstance(value, CallFunctionVarArgs)
        args = tuple(self._term(arg) for arg in value.args)
        kwargs = {name: self._term(arg) for name, arg in value.kwargs.items()}
        found = [_any_call(fn) if is_loose else call(fn, args, kwargs) for fn in value.fns]
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
            if isinstance(expression, KeywordArg):
                kwargs[name] = value
                if isinstance(expression, ExclusiveKeywordArg):
                    if any(value is other for other in exclusive):
                        return f"{name} is what another exclusive argument is"
                    exclusive.append(value)
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


def _any_call(fn: Any) -> Op:
    return Op(ops.key(fn), (), loose=True)


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
