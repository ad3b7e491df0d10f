"""Worklist propagation of facts over a graph."""

from fxrewrite.flow.worklist import Worklist as Worklist, solve as solve
