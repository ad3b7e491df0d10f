"""Parses the text form of constraints: `size(q, 1) == size(k, 1) * 4` is the constraint that prints this text.

A text is parsed as a Python expression, and only a list of forms is allowed; nothing is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern.terms import LiteralValue
from fxrewrite.pattern.text import column_of
from fxrewrite.pattern.where.base import Constraint
from fxrewrite.pattern.where.facts import ASKED, Device, Dtype, Is, ListRelation, Same, ShapeEq
from fxrewrite.pattern.where.numbers import (
    CONSTANTS,
    Arithmetic,
    Number,
    RankOf,
    Relation,
    SizeOf,
    TotalOf,
    ValueOf,
)

_ALLOWED = (
    "rank(x) == 4, size(x, 1) % 8 == 0, size(q, 1) == size(k, 1) * 4, eps > 0, mode in {'none', 'tanh'}, "
    "dtype(x) in {float32, bfloat16}, device(x) == cpu, shape(q) == shape(k), same_dtype(q, k), same_device(q, k), "
    "contiguous(x), is_param(w), no_other_users(x), len(xs) == 2, sum(sizes) == size(x, 0), sum(size(xs, 0)) == 8, "
    "is_inverse(p, q), are_sizes(sizes, xs, 0)"
)
_RELATIONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.In: "in",
    ast.NotIn: "not in",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_Made = TypeVar("_Made")
_OF_SEVERAL = {"same_dtype": "dtype", "same_device": "device"}


def parse(text: str) -> Constraint:
    """Parses the text form of a constraint: `parse(str(constraint)) == constraint` for all but predicates.

    Raises:
        RuleDefinitionError: the text is not a constraint; the message names the column and what is allowed.
    """
    return _Reader(text).constraint()


def parse_number(text: str) -> Number:
    """Parses a number, which is an expression such as `size(k, 1) * 4`.

    Raises:
        RuleDefinitionError: the text is not such an expression; the message names the column.
    """
    reader = _Reader(text)
    return reader.number(reader.body)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.indent = len(text) - len(text.lstrip())  # leading spaces would be a syntax error
        try:
            self.body = ast.parse(text[self.indent :], mode="eval").body
        except SyntaxError as error:
            at_end = error.offset == 0  # Python reports 0 if the text ends too early
            offset = len(text) - self.indent if at_end else (error.offset or 1) - 1
            raise self._error(offset, error.msg) from error
        except (ValueError, RecursionError, MemoryError) as error:  # a null byte; nesting beyond the parser's stack
            raise self._error(0, str(error) or "it is nested too deeply") from error

    def error(self, node: ast.expr, what: str) -> RuleDefinitionError:
        return self._error(column_of(self.text[self.indent :], node) - 1, what)

    def _error(self, offset: int, what: str) -> RuleDefinitionError:
        return RuleDefinitionError(f"constraint {self.text!r}, column {self.indent + offset + 1}: {what}")

    def constraint(self) -> Constraint:
        if isinstance(self.body, ast.Compare):
            return self.compare(self.body)
        if isinstance(self.body, ast.Call):
            return self.condition(self.body)
        what = "`and`: write several constraints" if isinstance(self.body, ast.BoolOp) else ast.unparse(self.body)
        raise self.error(self.body, f"{what} is not a constraint; allowed are {_ALLOWED}")

    def condition(self, node: ast.Call) -> Constraint:
        if self.called(node) == "are_sizes" and len(node.args) == 3 and not isinstance(node.args[2], ast.Name):
            dim = self.constant(node.args[2])
            lists = tuple(part.id for part in node.args[:2] if isinstance(part, ast.Name))
            if type(dim) is not int or len(lists) != 2:
                raise self.error(node, "are_sizes() takes a list of numbers, a list of tensors, and a dimension")
            return self.made(node, ListRelation, "are_sizes", lists, dim)
        name, names = self.called(node), self.names(node)
        if name in _OF_SEVERAL:
            return self.made(node, Same, _OF_SEVERAL[name], names)
        if name == "is_inverse":
            return self.made(node, ListRelation, name, names)
        if name == "are_sizes" and len(names) == 3:
            return self.made(node, ListRelation, name, names, names[2])
        if name not in ASKED:
            raise self.error(node, f"there is no condition {name}(); allowed are {_ALLOWED}")
        if len(names) != 1:
            raise self.error(node, f"{name}() takes one capture")
        return Is(name, names[0])

    def compare(self, node: ast.Compare) -> Constraint:
        if len(node.ops) != 1:
            raise self.error(node, "write `a < b < c` as two constraints")
        relation, right = _RELATIONS.get(type(node.ops[0])), node.comparators[0]
        if relation is None:
            raise self.error(node, f"`is` is not supported; relations are {', '.join(_RELATIONS.values())}")
        name = self.called(node.left) if isinstance(node.left, ast.Call) else ""
        if name in ("dtype", "device"):
            if relation not in ("==", "in"):
                raise self.error(node, f"{name}() takes == or in, not {relation}")
            items = self.items(right) if relation == "in" else [right]
            captured = self.one_name(node.left)
            if name == "dtype":
                return self.made(node, Dtype, captured, tuple(map(self.dtype, items)))
            return self.made(node, Device, captured, tuple(map(self.device, items)))
        if name == "shape":
            if relation != "==" or not isinstance(right, ast.Call) or self.called(right) != "shape":
                raise self.error(node, "shape() takes == and another shape(); a single size is size(x, dim)")
            return ShapeEq(self.one_name(node.left), self.one_name(right))
        left = self.number(node.left)
        if relation in ("in", "not in"):
            constants = tuple(LiteralValue(self.constant(item)) for item in self.items(right))
            return self.made(node, Relation, left, relation, constants)
        return self.made(node, Relation, left, relation, self.number(right))

    def made(self, node: ast.expr, kind: Callable[..., _Made], *parts: Any) -> _Made:
        """Returns the constraint or number of these parts; its own error, if any, gets the column."""
        try:
            return kind(*parts)
        except RuleDefinitionError as error:
            raise self.error(node, str(error)) from error

    def number(self, node: ast.expr) -> Number:
        if isinstance(node, ast.Name):
            return ValueOf(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.number(node.left), self.number(node.right)
            return self.made(node, Arithmetic, _ARITHMETIC[type(node.op)], left, right)
        if isinstance(node, ast.Call) and self.called(node) == "rank":
            return RankOf(self.one_name(node))
        if isinstance(node, ast.Call) and self.called(node) in ("len", "sum"):
            of = self.number(node.args[0]) if len(node.args) == 1 and not node.keywords else None
            if not isinstance(of, ValueOf) and (self.called(node) == "len" or not isinstance(of, SizeOf)):
                raise self.error(node, "len() takes a captured list, sum() a list of numbers or size(xs, dim)")
            return TotalOf(self.called(node), of)
        if isinstance(node, ast.Call) and self.called(node) == "size":
            dim = self.constant(node.args[1]) if len(node.args) == 2 else None
            if type(dim) is not int or not isinstance(node.args[0], ast.Name) or node.keywords:
                raise self.error(node, "size() takes a capture and a dimension, as in size(x, 1)")
            return SizeOf(node.args[0].id, dim)
        return LiteralValue(self.constant(node))

    def constant(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, CONSTANTS)):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.constant(node.operand)
            if type(value) in (int, float):
                return -value
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            value = getattr(torch, node.attr, None)
            if isinstance(value, CONSTANTS):
                return value
        if isinstance(node, ast.Call) and self.called(node) == "float" and len(node.args) == 1 and not node.keywords:
            value = self.constant(node.args[0])
            if value in ("inf", "-inf"):
                return float(value)
        raise self.error(node, f"{ast.unparse(node)} is not part of a constraint; allowed are {_ALLOWED}")

    def items(self, node: ast.expr) -> list[ast.expr]:
        if not isinstance(node, ast.Set):
            raise self.error(node, "`in` takes a set: {float32, bfloat16}")
        return node.elts

    def dtype(self, node: ast.expr) -> torch.dtype:
        found = getattr(torch, node.id, None) if isinstance(node, ast.Name) else None
        if not isinstance(found, torch.dtype):
            raise self.error(node, f"{ast.unparse(node)} is not a dtype; write float32, bfloat16, int64 ...")
        return found

    def device(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        raise self.error(node, f'{ast.unparse(node)} is not a device; write cpu, cuda, "cuda:0" ...')

    def called(self, node: ast.Call) -> str:
        if not isinstance(node.func, ast.Name):
            raise self.error(node, f"{ast.unparse(node.func)} cannot be called here; allowed are {_ALLOWED}")
        return node.func.id

    def names(self, node: ast.Call) -> tuple[str, ...]:
        if node.keywords or not all(isinstance(argument, ast.Name) for argument in node.args):
            raise self.error(node, f"{self.called(node)}() takes names of captures")
        return tuple(argument.id for argument in node.args if isinstance(argument, ast.Name))

    def one_name(self, node: ast.expr) -> str:
        assert isinstance(node, ast.Call)
        names = self.names(node)
        if len(names) != 1:
            raise self.error(node, f"{self.called(node)}() takes one capture")
        return names[0]
