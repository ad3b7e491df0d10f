"""Finds patterns in graphs: one decision program for all rules, and explanations of failures by the same conditions."""

from fxrewrite.match.explain import Explanation as Explanation, explain as explain
from fxrewrite.match.match import Match as Match
from fxrewrite.match.program import Program as Program
