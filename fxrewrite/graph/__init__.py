"""Facts about FX graphs: one spelling, canonical text, what changed, where a node comes from, how large a value is."""

from fxrewrite.graph.diff import graph_diff
from fxrewrite.graph.digest import graph_digest
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.normalize import normalize
from fxrewrite.graph.sizes import divide_exactly, is_same_size, product, size_hint
from fxrewrite.graph.source import source_line
from fxrewrite.graph.text import graph_text

__all__ = [
    "Edit",
    "divide_exactly",
    "graph_diff",
    "graph_digest",
    "graph_text",
    "is_same_size",
    "normalize",
    "product",
    "size_hint",
    "source_line",
]
