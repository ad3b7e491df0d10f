"""What the toolkit reads from Dynamo: its backends, why it broke a graph, which inputs are the model's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import lookup_backend
from torch._dynamo.exc import InvalidBackend

from fxrewrite.errors import FxRewriteError

__all__ = ["capture", "find_backend", "graph_break_reason", "is_model_state"]


def find_backend(inner: str | Callable[..., Any]) -> Callable[..., Any]:
    """The compiler function of a torch.compile backend name, or the callable itself.

    Raises FxRewriteError with the names that exist.
    """
    if callable(inner):
        return inner
    try:
        return lookup_backend(inner)
    except InvalidBackend as error:
        names = ", ".join(torch._dynamo.list_backends(exclude_tags=()))
        raise FxRewriteError(f"inner backend {inner!r} does not exist; torch knows {names}") from error


def capture(model: Callable[..., Any], inputs: Mapping[str, Any]) -> fx.GraphModule:
    """The graph that torch.compile would give a backend for `model(**inputs)`; nothing of it is run.

    Raises FxRewriteError where the model does not compile to one graph, with Dynamo's reason.
    """
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        raise _Captured

    try:
        torch.compile(model, backend=keep, fullgraph=True)(**inputs)
    except Exception as error:
        if not graphs:
            raise FxRewriteError(f"the model does not compile to one graph: {_first_line(error)}") from error
    return graphs[0]


class _Captured(Exception):  # noqa: N818  # no error: how a backend can end a compilation
    """Ends a compilation whose graph was captured."""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def graph_break_reason(gm: fx.GraphModule) -> str:
    """Why Dynamo ended this graph before the function did, with the user's line; empty for a whole graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    text = str(reason.reason).strip().splitlines()[0]
    frames = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reason.user_stack]
    return f"{text} ({frames[-1]})" if frames else text


def is_model_state(placeholder: fx.Node) -> bool:
    """Whether a graph input is a parameter or buffer of the model, not an argument of its call."""
    if isinstance(placeholder.meta.get("example_value", placeholder.meta.get("val")), torch.nn.Parameter):
        return True
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        source = getattr(placeholder.meta.get("example_value"), "_dynamo_source", None)
    return source is not None and source.guard_source.is_unspecialized_nn_module()
