"""Conditions on what a pattern captured: made by functions, or read from their text form; each says why it fails."""

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
