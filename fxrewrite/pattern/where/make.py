"""The functions that make constraints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern.terms import LiteralValue
from fxrewrite.pattern.where.base import Constraint
from fxrewrite.pattern.where.facts import Device, Dtype, Is, Predicate, Same, ShapeEq
from fxrewrite.pattern.where.numbers import Arithmetic, RankOf, Relation, SizeOf, ValueOf
from fxrewrite.pattern.where.text import parse_number


def rank(name: str, num_dims: int) -> Constraint:
    """The captured tensor has this many dimensions."""
    return Relation(RankOf(name), "==", LiteralValue(num_dims))


def dtype(name: str, *dtypes: torch.dtype) -> Constraint:
    """The captured tensor has one of these dtypes."""
    return Dtype(name, dtypes)


def same_dtype(*names: str) -> Constraint:
    """All these captured tensors have the same dtype."""
    return Same("dtype", names)


def device(name: str, *devices: str) -> Constraint:
    """The captured tensor is on one of these devices; "cuda" means any of that type, "cuda:0" that one."""
    return Device(name, devices)


def same_device(*names: str) -> Constraint:
    """All these captured tensors are on the same device."""
    return Same("device", names)


def shape_eq(a: str, b: str) -> Constraint:
    """Two captured tensors have equal shapes; symbolic sizes must be equal for every length that the graph admits."""
    return ShapeEq(a, b)


def size(name: str, dim: int, relation: str, other: int | str) -> Constraint:
    """The size of a dimension is `==`, `!=`, `<`, `<=`, `>` or `>=` another number, for every admitted length.

    Args:
        name: a captured tensor.
        dim: one of its dimensions; negative ones count from the end.
        relation: the comparison.
        other: a number, or an expression of the text form: `size("q", 1, "==", "size(k, 1) * 4")`.

    Raises:
        RuleDefinitionError: there is no such relation, or the text is not an expression.
    """
    return Relation(SizeOf(name, dim), relation, parse_number(other) if isinstance(other, str) else LiteralValue(other))


def divisible(name: str, dim: int, by: int) -> Constraint:
    """The size of a dimension of a captured tensor is a multiple of `by`, for every length that the graph admits."""
    return Relation(Arithmetic("%", SizeOf(name, dim), LiteralValue(by)), "==", LiteralValue(0))


def value(name: str, relation: str, other: Any) -> Constraint:
    """A captured Python value, or the number that a captured node holds, compares with constants in this way.

    Args:
        name: a capture.
        relation: `==`, `!=`, `<`, `<=`, `>`, `>=`, or `in`, `not in` a list of constants.
        other: a number, string, bool or dtype, or a list of such.

    Raises:
        RuleDefinitionError: there is no such relation, or this constant cannot be compared in this way.
    """
    if relation in ("in", "not in"):
        if not isinstance(other, Sequence) or isinstance(other, str):
            raise RuleDefinitionError(f"{name} {relation} takes a list or tuple of constants, not {other!r}")
        return Relation(ValueOf(name), relation, tuple(map(LiteralValue, other)))
    return Relation(ValueOf(name), relation, LiteralValue(other))


def contiguous(name: str) -> Constraint:
    """The captured tensor is contiguous in memory, for every length that the graph admits."""
    return Is("contiguous", name)


def no_other_users(name: str) -> Constraint:
    """The captured node has exactly one user."""
    return Is("no_other_users", name)


def is_param(name: str) -> Constraint:
    """The captured node is a parameter, a buffer or another tensor of the module itself."""
    return Is("is_param", name)


def predicate(*names: str, text: str = "") -> Callable[[Callable[..., bool | str]], Constraint]:
    """Makes a condition of a Python function of these captures, which returns True, False, or why it does not hold.

    `where.predicate("scale", "q")(lambda scale, q: ...)`. The code of the function is part of the rule's digest.
    """

    def wrap(function: Callable[..., bool | str]) -> Constraint:
        return Predicate(function, names, text or getattr(function, "__name__", "predicate"))

    return wrap
