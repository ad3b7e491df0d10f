"""GRAPH on the command line: a graph module, a model to capture, or an exported program."""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import fx

from fxrewrite.backends import capture, exported_graph
from fxrewrite.capture import normalize
from fxrewrite.errors import FxRewriteError, named_line
from fxrewrite.registry import find_object, raised_text

Level = Literal["aten", "torch"]
_WANTED = "a GraphModule, an ExportedProgram, a pair (module, inputs), or a function without arguments that returns one"


class GraphError(FxRewriteError):
    """GRAPH leads to no graph; says what was found."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A graph, and the exported program that it belongs to, if it does."""

    gm: fx.GraphModule
    program: torch.export.ExportedProgram | None = None


def load_graph(path: str, level: Level | None = None) -> Subject:
    """The graph that `path` names: `package.module:obj`, `file.py:obj`, or a `.pt2` file of `torch.export.save`.

    A module with inputs is captured by Dynamo; at level "aten" (when None) it is then normalized to pre-dispatch ATen,
    at level "torch" it stays as Dynamo traced it. Other graphs are taken as they are.

    Raises:
        GraphError: there is no graph, the model cannot be captured, or a level is given for what is not captured.
    """
    found = _exported(path) if path.endswith(".pt2") else find_object(path)
    if callable(found) and not isinstance(found, (torch.nn.Module, torch.export.ExportedProgram)):  # both are callable
        found = _called(path, cast("Callable[[], Any]", found))
    if isinstance(found, (tuple, list)) and len(cast("tuple[Any, ...]", found)) == 2 and callable(found[0]):
        return Subject(_captured(path, *cast("tuple[Any, Any]", found), level or "aten"))
    if not isinstance(found, (fx.GraphModule, torch.export.ExportedProgram)):
        hint = "; add its inputs: (module, inputs)" if isinstance(found, torch.nn.Module) else ""
        raise GraphError(f"{path} is of type {type(found).__name__}; expected {_WANTED}{hint}")
    if level is not None:
        raise GraphError(f"{path} is a graph already, at its own level; --level is for a module with inputs")
    return Subject(found) if isinstance(found, fx.GraphModule) else Subject(exported_graph(found), found)


def _exported(path: str) -> torch.export.ExportedProgram:
    if not Path(path).is_file():
        raise GraphError(f"there is no file {path}")
    if not zipfile.is_zipfile(path):  # of which torch 2.15 also writes a log
        raise GraphError(f"{path} is not an exported program: it is not an archive")
    try:
        return torch.export.load(path)
    except Exception as error:
        why = named_line(error).partition(" Please check the warnings")[0]
        raise GraphError(f"{path} is not an exported program: {why}") from error


def _called(path: str, function: Callable[[], Any]) -> Any:
    needed = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise GraphError(f"{path} needs arguments ({', '.join(needed)}); expected {_WANTED}")
    try:
        return function()
    except Exception as error:
        raise GraphError(f"{path}() failed: {raised_text(error)}") from error


def _captured(path: str, model: Callable[..., Any], inputs: Any, level: Level) -> fx.GraphModule:
    try:
        gm = capture(model, _by_name(path, model, inputs))
        return gm if level == "torch" else normalize(gm)
    except GraphError:
        raise
    except FxRewriteError as error:
        raise GraphError(f"{path}: {error}") from error


def _by_name(path: str, model: Callable[..., Any], inputs: Any) -> Mapping[str, Any]:
    """Inputs by parameter name, as `capture` takes them."""
    if isinstance(inputs, Mapping):
        return cast("Mapping[str, Any]", inputs)
    positional: tuple[Any, ...] = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    signature = inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    try:
        bound = signature.bind(*positional).arguments
    except TypeError as error:
        raise GraphError(f"{path}: the inputs do not fit forward{signature}: {error}") from error
    unnamed = [name for name in bound if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL]
    if unnamed:
        raise GraphError(f"{path}: forward takes *{unnamed[0]}; give the inputs as a dict by name")
    return bound
