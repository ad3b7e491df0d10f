"""Patterns: frozen terms, three ways to write them, and constraints on what they capture."""

from fxrewrite.pattern import where as where
from fxrewrite.pattern.combinators import (
    Literal as Literal,
    Param as Param,
    any_ as any_,
    cap as cap,
    chain as chain,
    each as each,
    either as either,
    functional as functional,
    loose as loose,
    maybe as maybe,
    op as op,
    shared as shared,
    siblings as siblings,
)
from fxrewrite.pattern.pattern import Pattern as Pattern, parse as parse, trace as trace
from fxrewrite.pattern.terms import (
    Capture as Capture,
    Chain as Chain,
    Each as Each,
    Either as Either,
    Ignore as Ignore,
    ListOf as ListOf,
    LiteralValue as LiteralValue,
    Maybe as Maybe,
    Op as Op,
    Siblings as Siblings,
    Term as Term,
)
from fxrewrite.pattern.text import parse_term as parse_term, term_text as term_text
from fxrewrite.pattern.where import Constraint as Constraint
