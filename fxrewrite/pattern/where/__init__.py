"""Constraints on captures: functions make them, or their text form is parsed; each says why it does not hold."""

from fxrewrite.pattern.where.base import Constraint
from fxrewrite.pattern.where.make import (
    contiguous,
    device,
    divisible,
    dtype,
    is_param,
    no_other_users,
    predicate,
    rank,
    same_device,
    same_dtype,
    shape_eq,
    size,
    value,
)
from fxrewrite.pattern.where.text import parse

__all__ = [
    "Constraint",
    "contiguous",
    "device",
    "divisible",
    "dtype",
    "is_param",
    "no_other_users",
    "parse",
    "predicate",
    "rank",
    "same_device",
    "same_dtype",
    "shape_eq",
    "size",
    "value",
]
