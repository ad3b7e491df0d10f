"""Sample arguments of an operator: written as text, as in `f(4, 6, 8), dim=-1`, or guessed from its schema."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fxrewrite.errors import FxRewriteError


class SampleError(FxRewriteError):
    """Sample arguments cannot be read, or an operator cannot be called with any."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be drawn.

    Attributes:
        kind: "f" float64 numbers of a normal distribution, "c" complex ones, "i" integers from 0 on, "b" booleans.
        shape: sizes.
        below: what integers stay below.
    """

    kind: Literal["f", "c", "i", "b"]
    shape: tuple[int, ...]
    below: int = 2

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Numbers that the generator's state decides; what can be differentiated requires a gradient."""
        if self.kind == "i":
            return torch.randint(self.below, self.shape, generator=generator)
        if self.kind == "b":
            return torch.randint(2, self.shape, generator=generator).bool()
        dtype = torch.complex128 if self.kind == "c" else torch.float64
        return torch.randn(self.shape, dtype=dtype, generator=generator).requires_grad_()

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        return f"i({sizes}, below={self.below})" if self.kind == "i" else f"{self.kind}({sizes})"


def parse_call(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `text` writes as a call would; tensors are `TensorSpec`s. Nothing of it is run.

        f(4, 6, 8), f(12, 8)               two float64 tensors
        i(4, 6, below=10), [3], dim=-1     integers below 10, a list, a keyword
        c(2, 3), b(2, 3), torch.float32    complex numbers, booleans, a dtype

    Raises:
        SampleError: the text is something else; says which part.
    """
    try:
        call = ast.parse(f"call({text})", mode="eval").body
    except SyntaxError as error:
        raise SampleError(f"arguments {text!r}: {error.msg}; write them as in f(4, 6, 8), f(12, 8), dim=-1") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SampleError(f"arguments {text!r} are not one list of arguments, as in f(4, 6, 8), dim=-1")
    args = tuple(_argument(node, text) for node in call.args)
    return args, {keyword.arg: _argument(keyword.value, text) for keyword in call.keywords if keyword.arg}


def _argument(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call):
        return _tensor(node, text)
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [_argument(item, text) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        found = getattr(torch, node.attr, None)
        if isinstance(found, torch.dtype):
            return found
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise SampleError(
            f"arguments {text!r}: {ast.unparse(node)} is not a tensor such as f(4, 6), number, list, text or dtype"
        ) from error


def _tensor(node: ast.Call, text: str) -> TensorSpec:
    kind = node.func.id if isinstance(node.func, ast.Name) else ""
    sizes = [_size(size) for size in node.args]
    below = [_size(keyword.value) for keyword in node.keywords if keyword.arg == "below"]
    if kind not in ("f", "c", "i", "b") or None in sizes or len(below) != len(node.keywords) or None in below:
        raise SampleError(
            f"arguments {text!r}: {ast.unparse(node)} is not a tensor; write f(4, 6), c(4, 6), b(4, 6) or "
            "i(4, 6, below=10)"
        )
    return TensorSpec(kind, tuple(size for size in sizes if size is not None), *(b for b in below if b))


def _size(node: ast.expr) -> int | None:
    is_size = isinstance(node, ast.Constant) and type(node.value) is int and node.value > 0
    return node.value if is_size else None  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]


_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((5, 7, 11),) * 5,
    ((5, 7, 11), (13, 11), (13,)),
    ((5, 7, 11), (11, 13)),
    ((5, 7, 11), (5, 11, 13)),
    ((7, 11), (7, 11), (11,)),
    ((13, 11), (5, 7)),
    ((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13)),
    ((5, 7, 17), (13, 7, 3), (13,)),
    ((5, 7, 11), (11,), (11,), (11,)),
    ((5, 7, 11), (3,)),
    ((7,), (7,), (7,)),
)
"""Shapes of tensor arguments, in order: alike, a linear map, products, attention, convolutions, norms, an index."""
_NUMBERS: tuple[Mapping[str, Any], ...] = tuple(
    {"float": 0.5, "number": 2, "bool": False, "int": 1, "List[int]": sizes} for sizes in ([11], [1])
)
"""What required arguments that are no tensors may be, by type: a list of integers is a shape, or one of dimensions."""
_INDICES = ("index", "indices", "target")
_CONDITIONS = ("condition", "mask")
_LEAST = 3
"""Integers drawn stay below it: an index into the smallest dimension of `_SHAPES` is one."""


def guesses(target: torch._ops.OpOverload) -> Iterator[dict[str, Any]]:
    """Arguments by name with which the operator may run: all that its schema requires, and its tensors.

    Optional tensors (a bias) are there first, and left out later.
    """
    arguments: list[Any] = target._schema.arguments
    tensors = [a for a in arguments if "Tensor" in str(a.type)]
    required = [a for a in tensors if _is_required(a)]
    others = [a for a in arguments if a not in tensors and _is_required(a)]
    for given in [tensors] if tensors == required else [tensors, required]:
        for shapes, numbers in itertools.product(_SHAPES, _NUMBERS):
            if len(given) <= len(shapes) and all(str(a.type) in numbers for a in others):
                named = {a.name: _spec(a, shape) for a, shape in zip(given, shapes, strict=False)}
                yield named | {a.name: numbers[str(a.type)] for a in others}


def _is_required(argument: Any) -> bool:
    return not argument.has_default_value() and "Optional" not in str(argument.type)


def _spec(argument: Any, shape: tuple[int, ...]) -> Any:
    kind = "i" if argument.name in _INDICES else "b" if argument.name in _CONDITIONS else "f"
    spec = TensorSpec(kind, shape, _LEAST)
    return [spec, spec] if "List" in str(argument.type) else spec
