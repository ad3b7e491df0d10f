"""What to look for in a graph: frozen terms, three ways to write them, constraints on what they capture."""

from fxrewrite.pattern import where
from fxrewrite.pattern.combinators import Literal, any_, cap, either, loose, maybe, op, shared
from fxrewrite.pattern.pattern import Pattern, parse, trace
from fxrewrite.pattern.terms import Capture, Either, Ignore, ListOf, LiteralValue, Maybe, Op, Term
from fxrewrite.pattern.text import parse_term, term_text
from fxrewrite.pattern.where import Constraint

__all__ = [
    "Capture",
    "Constraint",
    "Either",
    "Ignore",
    "ListOf",
    "Literal",
    "LiteralValue",
    "Maybe",
    "Op",
    "Pattern",
    "Term",
    "any_",
    "cap",
    "either",
    "loose",
    "maybe",
    "op",
    "parse",
    "parse_term",
    "shared",
    "term_text",
    "trace",
    "where",
]
