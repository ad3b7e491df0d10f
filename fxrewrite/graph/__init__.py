"""Facts about FX graphs: canonical text, differences, where a node comes from, sizes, and transactions that edit."""

from fxrewrite.graph.bodies import bodies as bodies, nodes_of as nodes_of
from fxrewrite.graph.canonical_order import in_canonical_order as in_canonical_order
from fxrewrite.graph.closed import (
    ClosedValues as ClosedValues,
    LargeValueError as LargeValueError,
    OpenValueError as OpenValueError,
    expression as expression,
    symbols_of as symbols_of,
)
from fxrewrite.graph.copy import copy_module as copy_module
from fxrewrite.graph.diff import graph_diff as graph_diff
from fxrewrite.graph.differentiable import (
    is_recomputed as is_recomputed,
    may_go_backward as may_go_backward,
)
from fxrewrite.graph.edit import Edit as Edit
from fxrewrite.graph.facts import Fact as Fact
from fxrewrite.graph.inputs import input_name as input_name
from fxrewrite.graph.modules import matches_glob as matches_glob, module_names as module_names
from fxrewrite.graph.other_sizes import check_sizes as check_sizes
from fxrewrite.graph.sizes import (
    Size as Size,
    divide_exactly as divide_exactly,
    is_same_size as is_same_size,
    product as product,
    size_hint as size_hint,
)
from fxrewrite.graph.source import copied_meta as copied_meta, source_line as source_line
from fxrewrite.graph.text import graph_digest as graph_digest, graph_text as graph_text
from fxrewrite.graph.walk import operands_first as operands_first, reached as reached
