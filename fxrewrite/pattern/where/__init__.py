"""Constraints on captures: functions make them, or their text form is parsed; each says why it does not hold."""

from fxrewrite.pattern.where.base import Constraint as Constraint
from fxrewrite.pattern.where.make import (
    contiguous as contiguous,
    device as device,
    divisible as divisible,
    dtype as dtype,
    is_param as is_param,
    no_other_users as no_other_users,
    predicate as predicate,
    rank as rank,
    same_device as same_device,
    same_dtype as same_dtype,
    shape_eq as shape_eq,
    size as size,
    value as value,
)
from fxrewrite.pattern.where.text import parse as parse
