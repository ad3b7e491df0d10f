"""Patterns: frozen terms, three ways to write them, and constraints on what they capture."""

from fxrewrite.pattern import where
from fxrewrite.pattern.combinators import Literal, Param, any_, cap, chain, either, loose, maybe, op, shared, siblings
from fxrewrite.pattern.pattern import Pattern, parse, trace
from fxrewrite.pattern.terms import Capture, Chain, Either, Ignore, ListOf, LiteralValue, Maybe, Op, Siblings, Term
from fxrewrite.pattern.text import parse_term, term_text
from fxrewrite.pattern.where import Constraint

__all__ = [
    "Capture",
    "Chain",
    "Constraint",
    "Either",
    "Ignore",
    "ListOf",
    "Literal",
    "LiteralValue",
    "Maybe",
    "Op",
    "Param",
    "Pattern",
    "Siblings",
    "Term",
    "any_",
    "cap",
    "chain",
    "either",
    "loose",
    "maybe",
    "op",
    "parse",
    "parse_term",
    "shared",
    "siblings",
    "term_text",
    "trace",
    "where",
]
