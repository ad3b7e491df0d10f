"""Functions that `torch.fx.wrap` keeps as calls where a function of values is traced."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx._symbolic_trace import _wrapped_fns_to_patch


def wrapped_in(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Returns the globals by name that the code of a function reads, and that `torch.fx.wrap` was told of.

    Also those that were imported from where they are wrapped; not those that other functions read, which it calls.
    """
    if not isinstance(function, types.FunctionType):
        return {}
    known: list[Any] = [scope.get(name) for (_, name), scope in _wrapped_fns_to_patch.items()]
    scope = function.__globals__
    builtins = scope.get("__builtins__", {})
    builtins = builtins if isinstance(builtins, dict) else vars(builtins)
    found: dict[str, Callable[..., Any]] = {}
    for name in _names(function.__code__):
        if name in scope:
            if any(scope[name] is wrapped for wrapped in known):
                found[name] = scope[name]
        elif (id(scope), name) in _wrapped_fns_to_patch and name in builtins:
            found[name] = builtins[name]
    return found


def with_globals(function: Callable[..., Any], other: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the function with other values of some of its globals; nobody else sees them."""
    if not other:
        return function
    assert isinstance(function, types.FunctionType)
    scope = {**function.__globals__, **other}
    new = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
