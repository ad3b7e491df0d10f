"""Adapters of outside compilers, one per file."""

from typing import TYPE_CHECKING

from fxrewrite.lazy import lazy_package

if TYPE_CHECKING:
    from fxrewrite.backends.data_parallel import GradientReduction, gradient_reductions, keep_graph_whole_under_ddp
    from fxrewrite.backends.dynamo import (
        RewritingBackend,
        capture,
        find_backend,
        graph_break_hint,
        graph_break_reason,
        inner_compiler,
        normalized,
        refuse_precompile,
        rewriting_backend,
        untraced_callers,
    )
    from fxrewrite.backends.export import apply_to_export
    from fxrewrite.backends.inductor import OVERLAP, GraphPass, Slot, installed
    from fxrewrite.backends.parts import in_parts, is_custom, under_autograd

__all__ = [
    "OVERLAP",
    "GradientReduction",
    "GraphPass",
    "RewritingBackend",
    "Slot",
    "apply_to_export",
    "capture",
    "find_backend",
    "gradient_reductions",
    "graph_break_hint",
    "graph_break_reason",
    "in_parts",
    "inner_compiler",
    "installed",
    "is_custom",
    "keep_graph_whole_under_ddp",
    "normalized",
    "refuse_precompile",
    "rewriting_backend",
    "under_autograd",
    "untraced_callers",
]

lazy_package(
    __name__,
    {
        "GradientReduction": "fxrewrite.backends.data_parallel",
        "gradient_reductions": "fxrewrite.backends.data_parallel",
        "keep_graph_whole_under_ddp": "fxrewrite.backends.data_parallel",
        "RewritingBackend": "fxrewrite.backends.dynamo",
        "capture": "fxrewrite.backends.dynamo",
        "find_backend": "fxrewrite.backends.dynamo",
        "graph_break_hint": "fxrewrite.backends.dynamo",
        "graph_break_reason": "fxrewrite.backends.dynamo",
        "inner_compiler": "fxrewrite.backends.dynamo",
        "untraced_callers": "fxrewrite.backends.dynamo",
        "normalized": "fxrewrite.backends.dynamo",
        "refuse_precompile": "fxrewrite.backends.dynamo",
        "rewriting_backend": "fxrewrite.backends.dynamo",
        "apply_to_export": "fxrewrite.backends.export",
        "OVERLAP": "fxrewrite.backends.inductor",
        "GraphPass": "fxrewrite.backends.inductor",
        "Slot": "fxrewrite.backends.inductor",
        "installed": "fxrewrite.backends.inductor",
        "in_parts": "fxrewrite.backends.parts",
        "is_custom": "fxrewrite.backends.parts",
        "under_autograd": "fxrewrite.backends.parts",
    },
)
