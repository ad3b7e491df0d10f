"""Finding patterns in graphs: one decision program for all rules, and an explanation that reads the same tests."""

from fxrewrite.match.explain import Explanation as Explanation, explain as explain
from fxrewrite.match.match import Match as Match
from fxrewrite.match.program import Program as Program
