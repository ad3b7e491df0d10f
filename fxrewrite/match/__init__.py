"""Finds patterns in graphs: one decision program for all rules, and explanations of failures by the same conditions."""

from fxrewrite.match.explain import Explanation, explain
from fxrewrite.match.match import Match
from fxrewrite.match.program import Program

__all__ = ["Explanation", "Match", "Program", "explain"]
