"""Outside compilers, one per file."""

from fxrewrite.backends.dynamo import capture, find_backend, graph_break_reason, is_model_state

__all__ = ["capture", "find_backend", "graph_break_reason", "is_model_state"]
