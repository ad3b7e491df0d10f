"""Legal Python values of an argument, drawn for literals that a pattern captures or ignores."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType
from typing import Any

import torch

from fxrewrite.ops import DIM_ARGUMENTS, has_trait
from fxrewrite.ops.schemas import NO_DEFAULT, Parameter
from fxrewrite.pattern.terms import LiteralValue
from fxrewrite.pattern.where.facts import Predicate
from fxrewrite.verify.draw import Draw

_FLOATS = (0.0, 0.5, 1.0, -2.0, 1e-6, 8.0)
_INTEGERS = (0, 1, 2, 3, -1, -2)
_NUMBERS = ("float", "number", "int", "")
"""Kinds of arguments that are a number; of a Python callable the kind is not known."""
_WINDOW = {"kernel_size": (1, 1, 2, 3), "stride": (1, 1, 2, 3), "dilation": (1, 1, 2), "padding": (0, 0, 1, 2)}
"""Numbers of windows that move over a tensor, of which each dimension has one."""
_WORDS = {"approximate": ("none", "tanh"), "rounding_mode": ("floor", "trunc"), "mode": ("constant", "reflect")}
_LAST = 2**63 - 1


class NoValueError(ValueError):
    """No legal values of this kind of argument are known."""


def legal_value(parameter: Parameter, key: str, context: Sequence[torch.Tensor], draw: Draw) -> Any:
    """Draws a value that the operator may accept as this argument, given the tensors that it is called with.

    Raises:
        NoValueError: arguments of this kind cannot be guessed.
    """
    if parameter.optional and draw.flag(0.25):
        return None
    if parameter.default is not NO_DEFAULT and draw.flag(0.2):
        return parameter.default
    kind, name = parameter.kind, parameter.name
    named = [n for n in draw.named if kind != "int" or type(n) is int] if kind in _NUMBERS else []
    if named and name not in DIM_ARGUMENTS and draw.flag(0.25):
        return draw.choice(*named)
    first = context[0] if context else torch.empty(())
    if kind == "bool":
        return draw.flag()
    if kind == "float":
        return draw.choice(*_floats(draw))
    if kind == "number" or kind == "Tensor":  # the second operand may be a number
        return draw.choice(*_floats(draw), *_INTEGERS)
    if kind == "ScalarType":
        own = len(draw.dtypes) if draw.wide else 1  # of integers, results may need to be cast back to them
        return draw.choice(*draw.dtypes, *[draw.dtype] * own)
    if kind == "str" and name in _WORDS:
        return draw.choice(*_WORDS[name])
    if kind == "MemoryFormat":
        return draw.choice(torch.contiguous_format, torch.preserve_format)
    if name in _WINDOW and kind in ("int", "List[int]", "List[SymInt]") and draw.flag(0.9):
        several = [draw.choice(*_WINDOW[name]) for _ in range(parameter.repeats)]
        return several[0] if kind == "int" else several
    if kind == "int":
        return _integer(name, key, first, draw)
    if kind in ("List[int]", "List[SymInt]"):
        return _integers(name, key, first, draw)
    if kind == "List[float]":
        return [draw.choice(*_floats(draw)) for _ in range(draw.integer(1, 3))]
    if not kind:  # an argument of a Python callable
        return draw.choice(*_floats(draw), *_INTEGERS, True, False, *map(int, first.shape))
    raise NoValueError(f"{key} takes {name} of type {kind}, which is not guessed; write a sampler")


def _floats(draw: Draw) -> tuple[float, ...]:
    """Returns numbers of which half are decimals, with reciprocals that are rounded, and two are 0."""
    return *_FLOATS, 0.0, *(draw.integer(1, 99) / by for by in (10, 10, 10, 100, 100, 100))


def _integer(name: str, key: str, tensor: torch.Tensor, draw: Draw) -> int:
    rank = tensor.ndim + has_trait(key, "new_dim")
    if name in DIM_ARGUMENTS:
        return draw.integer(-max(rank, 1), max(rank, 1) - 1)
    if name == "normalized_shape" and tensor.ndim:
        return tensor.shape[-1]
    if name == "groups" and draw.flag():
        return 1
    sizes = [draw.choice(*tensor.shape)] if tensor.ndim else []
    sizes += [size // 2 for size in sizes]
    bounds = [_LAST, *sizes] if name == "end" else sizes
    return draw.choice(*_INTEGERS, *bounds)


def _integers(name: str, key: str, tensor: torch.Tensor, draw: Draw) -> list[int]:
    shape, rank = list(tensor.shape), tensor.ndim
    if key == "aten::permute" or (name == "dims" and key not in ("aten::flip", "aten::roll", "aten::sum")):
        order = draw.rng.sample(range(rank), rank)
        return [dim - rank for dim in order] if draw.flag(0.2) else order
    if name in DIM_ARGUMENTS:
        chosen = draw.rng.sample(range(rank), draw.integer(min(rank, 1), rank))
        return [dim - rank if draw.flag(0.4) else dim for dim in chosen]
    if name == "normalized_shape":
        return shape[draw.integer(0, max(rank - 1, 0)) :]
    if name in ("split_sizes", "split_size"):
        return _parts(draw.choice(*shape) if shape else 1, draw)
    if key == "aten::expand":
        wide = [draw.size() if size == 1 else draw.choice(size, -1) for size in shape]
        return [*draw.shape(draw.choice(0, 0, 1)), *wide]
    if name in ("size", "shape", "sizes"):
        return _reshaped(shape, draw)
    return [draw.integer(0, 3) for _ in range(rank if rank and draw.flag() else draw.integer(1, 3))]


def _parts(size: int, draw: Draw) -> list[int]:
    cut = draw.integer(0, size)
    return [cut, size - cut] if draw.flag(0.8) else [size]


def _reshaped(shape: list[int], draw: Draw) -> list[int]:
    """Returns a shape with as many entries: dimensions merged, split, swapped, or one replaced by -1."""
    new = list(shape)
    for _ in range(draw.integer(0, 2)):
        way = draw.integer(0, 3)
        if way == 0 and len(new) > 1:
            at = draw.integer(0, len(new) - 2)
            new[at : at + 2] = [new[at] * new[at + 1]]
        elif way == 1 and new:
            at = draw.integer(0, len(new) - 1)
            factor = draw.choice(*(n for n in range(1, new[at] + 1) if new[at] % n == 0)) if new[at] else 1
            new[at : at + 1] = [factor, new[at] // factor]
        elif way == 2:
            new.insert(draw.integer(0, len(new)), 1)
        else:
            draw.rng.shuffle(new)
    if new and draw.flag(0.3) and math.prod(new):
        new[draw.integer(0, len(new) - 1)] = -1
    return new


def numbers_in(constraint: Any) -> Iterator[Any]:
    """Yields the constants that a constraint compares with: those of its text, or those in a predicate's code."""
    if isinstance(constraint, Predicate):
        yield from numbers_of(constraint.function)
    elif isinstance(constraint, LiteralValue):
        yield constraint.value
    elif isinstance(constraint, tuple):
        for part in constraint:
            yield from numbers_in(part)
    elif is_dataclass(constraint):
        for part in fields(constraint):
            yield from numbers_in(getattr(constraint, part.name))


def numbers_of(function: Any, *, depth: int = 2) -> Iterator[Any]:
    """Yields the numbers in a function's code, those that it reads by name, and those of the functions that it calls.

    Args:
        function: anything; of what is not a Python function, there are none.
        depth: how many calls are followed, within the function's module.
    """
    codes = [function.__code__] if isinstance(function, FunctionType) else []
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    read = inspect.getclosurevars(function) if codes else None
    named = (*read.nonlocals.values(), *read.globals.values()) if read is not None else ()
    for found in (*(constant for code in codes for constant in code.co_consts), *named):
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            yield found
        elif depth and isinstance(found, FunctionType) and found.__module__ == function.__module__:
            yield from numbers_of(found, depth=depth - 1)
