"""Worklist propagation of facts over a graph."""

from fxrewrite.flow.worklist import Worklist, solve

__all__ = ["Worklist", "solve"]
