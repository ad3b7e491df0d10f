"""Facts about FX graphs: canonical text, differences, where a node comes from, sizes, and transactions that edit."""

from fxrewrite.graph.bodies import bodies, nodes_of
from fxrewrite.graph.closed import ClosedValues, LargeValueError, OpenValueError, expression, symbols_of
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.diff import graph_diff
from fxrewrite.graph.digest import graph_digest
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.facts import Fact
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.sizes import Size, divide_exactly, is_same_size, product, size_hint
from fxrewrite.graph.source import copied_meta, source_line
from fxrewrite.graph.text import graph_text
from fxrewrite.graph.walk import operands_first, reached

__all__ = [
    "ClosedValues",
    "Edit",
    "Fact",
    "LargeValueError",
    "OpenValueError",
    "Size",
    "bodies",
    "copied_meta",
    "copy_module",
    "divide_exactly",
    "expression",
    "graph_diff",
    "graph_digest",
    "graph_text",
    "input_name",
    "is_same_size",
    "nodes_of",
    "operands_first",
    "product",
    "reached",
    "size_hint",
    "source_line",
    "symbols_of",
]
