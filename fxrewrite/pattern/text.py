"""The text form of patterns: `mul(x, sigmoid(x))`. Parsing the printed form gives the same pattern.

ATen operators are written by name, others as `op("vllm::rms_norm", ...)`; a bare name captures a node; `lit(name)`,
`opt(name)`, `param(name)` and `any(name)` are the other kinds of captures; `...` matches anything; `maybe`, `either`,
`shared`, `loose`, `chain`, `each` and `siblings` are the combinators; `[x, *rest]` is a list of any length. In a
replacement, `once(...)` is computed when the rule is applied.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fxrewrite.errors import RuleDefinitionError, first_line
from fxrewrite.ops import packet_of
from fxrewrite.ops.schemas import schemas_of
from fxrewrite.pattern.combinators import (
    chain,
    each,
    either,
    first_operand,
    functional,
    loose,
    maybe,
    once,
    op,
    shared,
    siblings,
)
from fxrewrite.pattern.terms import (
    ONCE,
    Capture,
    CaptureKind,
    Chain,
    Each,
    Either,
    Ignore,
    ListOf,
    LiteralValue,
    Maybe,
    Op,
    Siblings,
    Term,
    as_term,
    call,
)

_KINDS = {"literal": "lit", "optional": "opt", "param": "param", "any": "any"}
_PREFIXES = {short: kind for kind, short in _KINDS.items()}
_COMBINATORS: dict[str, Callable[..., Any]] = {
    "maybe": maybe,
    "either": either,
    "shared": shared,
    "loose": loose,
    "chain": chain,
    "each": each,
    "functional": functional,
    "siblings": siblings,
    "once": once,
}
_ATTRIBUTES = {"dtype": "prim::dtype", "device": "prim::device"}
_WORDS = frozenset({*_PREFIXES, *_COMBINATORS, *_ATTRIBUTES, "op", "float"})
"""Reserved words; an operator with such a name is written `op("aten::any", ...)`."""
_TORCH_VALUES = (torch.dtype, torch.memory_format, torch.layout)


def terms_text(terms: Sequence[Term]) -> str:
    """Returns the text form of what a pattern or an expression gives: a term, or several in parentheses."""
    text = ", ".join(map(term_text, terms))
    return f"({text})" if len(terms) > 1 else text


def term_text(term: Term) -> str:
    """Returns the text form of a term; parsing restores the term, unless it has literals that are Python objects."""
    if isinstance(term, Capture):
        return term.name if term.kind == "node" else f"{_KINDS[term.kind]}({term.name})"
    if isinstance(term, Ignore):
        return "..."
    if isinstance(term, LiteralValue):
        return literal_text(term.value)
    if isinstance(term, ListOf):
        return f"[{', '.join(map(term_text, term.items))}]"
    if isinstance(term, Each):
        on = repr(term.on[0] if len(term.on) == 1 else term.on).replace("'", '"')
        return f"*each({term_text(term.term)}, on={on})" if term.on else f"*{term_text(term.term)}"
    if isinstance(term, Maybe):
        base = "" if first_operand(term.step) == term.base else f", {term_text(term.base)}"
        return f"maybe({term_text(term.step)}{base})"
    if isinstance(term, Either):
        return f"either({', '.join(map(term_text, term.options))})"
    if isinstance(term, Chain):
        names = ", ".join(f'"{key.removeprefix("aten::")}"' for key in term.keys)
        return f"chain({term_text(term.base)}, {names}, least={term.least}, most={term.most})"
    if isinstance(term, Siblings):
        return f'siblings({term_text(term.each)}, on="{term.on}", least={term.least})'
    assert isinstance(term, Op)
    text = f"loose({_op_text(term)})" if term.loose else _op_text(term)
    return f"shared({text})" if term.shared else text


def _op_text(term: Op) -> str:
    if term.key == "operator.getitem" and len(term.args) == 2:
        (_, value), (_, index) = term.args
        return f"{term_text(value)}[{_index_text(index)}]"
    if term.key == ONCE:
        return f"once({term_text(term.args[0][1])})"
    if term.key in _ATTRIBUTES.values():
        return f"{term.key.removeprefix('prim::')}({term_text(term.args[0][1])})"
    namespace, _, name = term.key.rpartition("::")
    positional = _positional(term.key, tuple(name for name, _ in term.args))
    by_name = namespace == "aten" and name not in _WORDS
    parts = [] if by_name else [f'"{term.key}"']
    for index, (argument, value) in enumerate(term.args):
        parts.append(term_text(value) if index < positional else f"{argument}={term_text(value)}")
    return f"{name if by_name else 'op'}({', '.join(parts)})"


@functools.cache
def _positional(key: str, given: tuple[str, ...]) -> int:
    """Returns how many of the given arguments may be positional: the longest prefix of a schema that has them all."""
    packet = packet_of(key)
    best = 0
    for schema in schemas_of(packet) if packet is not None else ():
        if set(given) <= set(schema.names):
            free = [p.name for p in schema.parameters if not p.keyword_only]
            count = 0
            while count < len(given) and count < len(free) and given[count] == free[count]:
                count += 1
            best = max(best, count)
    return best


def _index_text(index: Term) -> str:
    """Writes a tuple of indices without parentheses, because a list of indices means something else."""
    if isinstance(index, LiteralValue) and isinstance(index.value, tuple):
        return ", ".join(map(literal_text, index.value)) + ("," if len(index.value) == 1 else "")
    if isinstance(index, ListOf):
        return ", ".join(map(term_text, index.items)) + ("," if len(index.items) == 1 else "")
    return term_text(index)


def literal_text(value: Any) -> str:
    """Returns a Python value as source, from which Python and the parsers of patterns and constraints make it again."""
    if isinstance(value, list):
        return f"[{', '.join(map(literal_text, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if isinstance(value, complex) and not repr(value)[:1].isdecimal():  # 1j is read as it is, and (1+2j) is a sum
        return f"complex({literal_text(value.real)}, {literal_text(value.imag)})"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, slice):
        return f"slice({literal_text(value.start)}, {literal_text(value.stop)}, {literal_text(value.step)})"
    if value is ...:
        return "Ellipsis"
    if isinstance(value, torch._ops.OpOverload):
        return f"torch.ops.{value}"
    return repr(value)


def parse_term(text: str, kinds: Mapping[str, CaptureKind] = MappingProxyType({})) -> Term:
    """Parses the text form of a term; only the vocabulary above is evaluated. A bare name captures a node, or its kind.

    Raises:
        RuleDefinitionError: the text is not an expression of the pattern language; the message names the column.
    """
    try:
        return as_term(_Parser(text, kinds).read(ast.parse(text, mode="eval").body))
    except SyntaxError as error:
        raise RuleDefinitionError(f"pattern {text!r}, column {error.offset}: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise RuleDefinitionError(f"pattern {text!r}: it is nested too deeply") from error


def column_of(text: str, node: ast.expr) -> int:
    """Returns the column (from 1, in characters) at which a node starts in its line of the text it was parsed from."""
    line = re.split(r"\r\n|\r|\n", text)[node.lineno - 1]
    return len(line.encode()[: node.col_offset].decode()) + 1  # ast counts bytes


class _Parser:
    def __init__(self, text: str, kinds: Mapping[str, CaptureKind]) -> None:
        self.text, self.kinds = text, kinds

    def error(self, node: ast.expr, what: str) -> RuleDefinitionError:
        return RuleDefinitionError(f"pattern {self.text!r}, column {column_of(self.text, node)}: {what}")

    def read(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return Capture(node.id, self.kinds.get(node.id, "node"))
        if isinstance(node, ast.List):
            return [part for item in node.elts for part in self.items(item)]
        if isinstance(node, ast.Tuple):
            return tuple(self.read(item) for item in node.elts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.read(node.operand)
            if isinstance(value, (int, float)):
                return -value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            value = getattr(torch, node.attr, None)
            if isinstance(value, _TORCH_VALUES):
                return value
            raise self.error(node, f"torch.{node.attr} is not a dtype, layout or memory format")
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.ops."):
            return self.overload(node)
        if isinstance(node, ast.Subscript):
            value = self.read(node.value)
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            index = tuple(... if isinstance(i, ast.Name) and i.id == "Ellipsis" else self.read(i) for i in items)
            if isinstance(value, tuple) and type(index[0]) is int and -len(value) <= index[0] < len(value):
                return value[index[0]]  # of functional(), what is left in one of several arguments
            return call(operator.getitem, (value, index if isinstance(node.slice, ast.Tuple) else index[0]), {})
        if isinstance(node, ast.Slice):
            return slice(*(None if part is None else self.read(part) for part in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.call(node, node.func.id)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device":
            return self.device(node)
        raise self.error(node, f"{ast.unparse(node)} is not part of the pattern language")

    def items(self, node: ast.expr) -> list[Any]:
        """Reads an item of a list; `*rest` is any number of them."""
        if not isinstance(node, ast.Starred):
            return [self.read(node)]
        value = self.read(node.value)
        return list(value.items) if isinstance(value, ListOf) else [Each(as_term(value))]

    def overload(self, node: ast.Attribute) -> torch._ops.OpOverload:
        """Reads `torch.ops.vllm.rms_norm.default`, the operator that a higher-order one is given."""
        namespace, _, name = ast.unparse(node).removeprefix("torch.ops.").partition(".")
        packet, _, overload = name.partition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
        if not isinstance(found, torch._ops.OpOverload):
            raise self.error(node, f"there is no overload {ast.unparse(node)}; import the library that defines it")
        return found

    def device(self, node: ast.Call) -> torch.device:
        try:
            return torch.device(*(self.read(argument) for argument in node.args))
        except (RuntimeError, TypeError) as error:
            raise self.error(node, f"{ast.unparse(node)} is not a device: {first_line(error)}") from error

    def call(self, node: ast.Call, name: str) -> Any:
        if name in _PREFIXES:
            if len(node.args) != 1 or not isinstance(node.args[0], ast.Name) or node.keywords:
                raise self.error(node, f"{name}() takes the name of one capture")
            return Capture(node.args[0].id, _PREFIXES[name])  # pyright: ignore[reportArgumentType]
        args = [self.read(argument) for argument in node.args]
        kwargs = {str(keyword.arg): self.read(keyword.value) for keyword in node.keywords}
        if name == "float" and len(args) == 1 and args[0] in ("inf", "-inf", "nan"):
            return float(args[0])
        if name == "complex" and len(args) == 2 and all(type(arg) in (int, float) for arg in args):
            return complex(*args)  # a number; the operator `complex` reads values
        try:
            if name == "slice" and args and all(arg is None or type(arg) is int for arg in args):
                return slice(*args)  # a Python slice as an index; the operator `slice` reads a value
            if name == "op":
                return _named_op(*args, **kwargs)
            if name in _COMBINATORS:
                return _COMBINATORS[name](*args, **kwargs)
            return op(_ATTRIBUTES.get(name, name), *args, **kwargs)
        except (RuleDefinitionError, TypeError) as error:
            raise self.error(node, str(error)) from error


def _named_op(key: str, *args: Any, **kwargs: Any) -> Op:
    """Like `op`, but the target may be the dotted name of a Python callable whose module is already imported."""
    if "::" in key or "." not in key:
        return op(key, *args, **kwargs)
    module, _, name = key.rpartition(".")
    target = getattr(sys.modules.get(module), name, None)
    if target is None:
        raise RuleDefinitionError(f"there is no function {key!r} in the modules imported so far")
    return op(target, *args, **kwargs)
