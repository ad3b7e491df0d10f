"""A replacement that is written as an expression: `silu(x)` in the pattern language, with captures for values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason, RuleDefinitionError, refuse
from fxrewrite.match import Match
from fxrewrite.ops.schemas import schemas_of
from fxrewrite.pattern import Capture, Each, ListOf, LiteralValue, Op, Pattern, Siblings, Term, parse_term, term_text
from fxrewrite.pattern.terms import ONCE, CaptureKind, parts_of, subterms
from fxrewrite.pattern.text import column_of, terms_text

_ON_NUMBERS: dict[tuple[str, tuple[str, ...]], Callable[..., Any]] = {
    ("aten::add", ("self", "other")): operator.add,
    ("aten::sub", ("self", "other")): operator.sub,
    ("aten::mul", ("self", "other")): operator.mul,
    ("aten::div", ("self", "other")): operator.truediv,
    ("aten::floor_divide", ("self", "other")): operator.floordiv,
    ("aten::pow", ("self", "exponent")): operator.pow,
    ("aten::neg", ("self",)): operator.neg,
}
"""What is computed when no operand is a tensor: captured numbers at once, sizes of the graph by a node."""

_ONLY_IN_PATTERNS = ("maybe", "either", "shared", "loose", "chain", "siblings", "lit", "opt", "param", "any")


@dataclass(frozen=True, slots=True)
class Expression:
    """The replacement that computes these terms from the captures of a match; equal terms are computed once.

    A value, so that plans made from equal files have equal digests. Its text form is `str(expression)`.
    """

    outputs: tuple[Term, ...]

    def __call__(self, match: Match) -> Any:
        done: dict[Term, Any] = {}
        results = [_compute(term, match.captures, match, done) for term in self.outputs]
        return tuple(results) if len(results) > 1 else results[0]

    def __str__(self) -> str:
        return terms_text(self.outputs)


def _compute(term: Term, captures: Mapping[str, Any], match: Match | _AtOnce, done: dict[Term, Any]) -> Any:
    if isinstance(term, Capture):
        return captures[term.name]
    if isinstance(term, LiteralValue):
        return term.value
    if term in done:
        return done[term]
    if isinstance(term, Op) and term.key == ONCE:
        if isinstance(match, _AtOnce):
            return _compute(term.args[0][1], captures, match, done)
        names = tuple(dict.fromkeys(part.name for part in subterms(term) if isinstance(part, Capture)))
        done[term] = result = match.once(_AtOnce(term.args[0][1], names), *(captures[name] for name in names))
        return result
    if isinstance(term, ListOf):
        return [value for item in term.items for value in _items(item, captures, match, done)]
    assert isinstance(term, Op), f"parse_expression let {term!r} through"
    arguments = {name: _compute(value, captures, match, done) for name, value in term.args}
    done[term] = result = _call(term.key, arguments, match)
    return result


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """The function of tensors that a term is; equal terms of equal tensors are computed once in a transaction."""

    term: Term
    names: tuple[str, ...]

    def __call__(self, *given: Any) -> Any:
        return _compute(self.term, dict(zip(self.names, given, strict=True)), self, {})

    @staticmethod
    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    @staticmethod
    def proxy(value: Any) -> Any:
        return value


def _items(term: Term, captures: Mapping[str, Any], match: Match | _AtOnce, done: dict[Term, Any]) -> list[Any]:
    """Returns one item of a list, or what `*term` is for the items of the captured lists in it."""
    if not isinstance(term, Each):
        return [_compute(term, captures, match, done)]
    lists = {name: captures[name] for name in term.names if isinstance(captures[name], (list, tuple))}
    lengths = {len(items) for items in lists.values()}
    if len(lengths) != 1:
        refuse(f"*{term_text(term.term)}: the lists {', '.join(lists)} have {sorted(lengths)} items", kind=Reason.VALUE)
    return [
        _compute(term.term, {**captures, **{name: items[index] for name, items in lists.items()}}, match, {})
        for index in range(lengths.pop())
    ]


def _call(key: str, arguments: Mapping[str, Any], match: Match | _AtOnce) -> Any:
    given = tuple(arguments.values())
    if key == "operator.getitem" and isinstance(given[0], (list, tuple)) and type(given[1]) is int:
        if not -len(given[0]) <= given[1] < len(given[0]):
            refuse(f"item {given[1]} of a list of {len(given[0])}", kind=Reason.VALUE)
        return given[0][given[1]]
    if key == "operator.getitem":
        return match.call(operator.getitem, *given)
    on_numbers = _ON_NUMBERS.get((key, tuple(arguments)))
    if on_numbers is not None and all(map(_is_number, given)):
        return match.call(on_numbers, *given) if any(map(_is_value, given)) else on_numbers(*given)
    if (key, tuple(arguments)) == ("aten::size", ("self", "dim")):
        return match.call(torch.ops.aten.sym_size.int, *given)  # as tracing has it
    if key in ("prim::dtype", "prim::device"):
        (node,) = given
        return getattr(match.proxy(node) if isinstance(node, fx.Node) else node, key.removeprefix("prim::"))
    target = ops.named_operator(key)
    assert target is not None
    return match.call(target, **arguments)


def _is_value(given: Any) -> bool:
    return isinstance(given, (fx.Node, fx.Proxy))


def _is_number(given: Any) -> bool:
    if isinstance(given, fx.Proxy):
        given = given.node
    return ops.is_scalar(given) if isinstance(given, fx.Node) else isinstance(given, (int, float))


def parse_expression(text: str, pattern: Pattern) -> Expression:
    """The replacement that the text means for matches of this pattern.

    Captures stand by their bare names, whatever their kind. Functions of Python are not called: a rule file is data,
    and what it can run are operators of torch.

    Raises:
        RuleDefinitionError: the text is no expression, takes a name that the pattern does not capture, calls what is no
            operator, or gives another number of values than the pattern has outputs; names the column.
    """
    if any(isinstance(output, Siblings) for output in pattern.outputs):
        raise RuleDefinitionError(
            f"pattern {text!r}: siblings() are as many as the graph has; their replacement is Python"
        )
    captures: dict[str, CaptureKind] = {capture.name: capture.kind for capture in pattern.captures}
    term = _bare(parse_term(text, captures))  # their kinds decide which overload a call means
    for node, what in _misplaced(ast.parse(text, mode="eval").body, tuple(captures)):
        raise RuleDefinitionError(f"pattern {text!r}, column {column_of(text, node)}: {what}")
    for found in subterms(term):
        if isinstance(found, Each) and not any(name in pattern.lists for name in found.names):
            raise RuleDefinitionError(
                f"pattern {text!r}: `{term_text(found)}` has an entry for each item of a captured list, and captures "
                f"that are lists are {', '.join(sorted(pattern.lists)) or 'none'}"
            )
    for name in _unstarred(term, pattern.lists):
        raise RuleDefinitionError(
            f"pattern {text!r}: {name} is a list, and one value stands there; write *{name} in a list"
        )
    is_list = pattern.num_outputs == 1 and isinstance(ast.parse(text.strip(), mode="eval").body, ast.List)
    outputs = term.items if isinstance(term, ListOf) and not is_list else (term,)
    for output in outputs:
        is_value = isinstance(output, (Op, ListOf)) or (
            isinstance(output, Capture) and captures[output.name] != "literal"
        )
        if not is_value:
            raise RuleDefinitionError(f"pattern {text!r}: {term_text(output)} is a Python value, not one of the graph")
    if len(outputs) != pattern.num_outputs:
        raise RuleDefinitionError(
            f"pattern {text!r}: it gives {len(outputs)} values, the pattern has {pattern.num_outputs} outputs"
        )
    return Expression(outputs)


def _bare(term: Term) -> Term:
    """Returns the term with its captures as they are written in a replacement, whatever their kind."""
    if isinstance(term, Capture):
        return Capture(term.name)
    if isinstance(term, Op):
        return replace(term, args=tuple((name, _bare(part)) for name, part in term.args))
    if isinstance(term, ListOf):
        return ListOf(tuple(map(_bare, term.items)))
    return replace(term, term=_bare(term.term)) if isinstance(term, Each) else term


def _unstarred(term: Term, lists: frozenset[str]) -> Iterator[str]:
    """The captured lists that are items of a list, or operands that are no list."""
    if isinstance(term, (Each, Capture)):
        return
    takes: set[str] = set()
    if isinstance(term, Op):
        takes = {"a"} if term.key == "operator.getitem" else _takes_lists(term.key)
    parts = [(name, part) for name, part in term.args] if isinstance(term, Op) else [("", p) for p in parts_of(term)]
    for name, part in parts:
        if isinstance(part, Capture) and part.name in lists and name not in takes:
            yield part.name
        yield from _unstarred(part, lists)


def _takes_lists(key: str) -> set[str]:
    packet = ops.packet_of(key)
    found = schemas_of(packet) if packet is not None else ()  # once() is no operator
    return {parameter.name for schema in found for parameter in schema.parameters if "List[" in parameter.kind}


def _misplaced(node: ast.expr, captures: tuple[str, ...], in_index: bool = False) -> Iterator[tuple[ast.expr, str]]:
    """What has no meaning in a replacement, and why."""
    if isinstance(node, ast.Name) and node.id not in captures and not (in_index and node.id == "Ellipsis"):
        yield node, f"{node.id} is not a capture of the pattern; it captures {', '.join(captures) or 'nothing'}"
    elif isinstance(node, ast.Constant) and node.value is ... and not in_index:
        yield node, "... stands for anything; a replacement says what"
    elif isinstance(node, ast.Attribute):
        return  # torch.float16
    elif isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        if name in _ONLY_IN_PATTERNS:
            yield node, f"{name}() says what may be there; in a replacement a capture stands by its bare name"
        key = node.args[0] if name == "op" else None
        if isinstance(key, ast.Constant) and "::" not in str(key.value) and "." in str(key.value):
            yield node, f"{key.value} is a function of Python; a rule file calls operators of torch only"
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from _misplaced(argument, captures)
    elif isinstance(node, ast.Subscript):
        yield from _misplaced(node.value, captures)
        for item in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            yield from _misplaced(item, captures, in_index=True)
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _misplaced(child, captures)
