"""Products, which are what a model's time is made of: which operators they are, and how many operations they do.

Products of matrices are known from `fxrewrite.ops.factors`, convolutions are declared here, and other operators that
multiply by who defines them, or has the rules for them, as attention's.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from torch import fx

from fxrewrite.graph.sizes import Size, product, size_hint
from fxrewrite.ops import bind, factors, key, operators
from fxrewrite.spmd.layouts.rule import Call, tensor_of

Count = Callable[[Size], int]
Operations = Callable[[Call, Count], float]


@dataclass(frozen=True, slots=True)
class _Product:
    operations: Operations
    backward: float | tuple[str, str]
    is_convolution: bool = False


def _contraction(call: Call, count: Count) -> float:
    """Each element of the result is a sum over the last dimension of the first factor, by default the first operand."""
    names = factors(call.key)
    first = tensor_of(call.args[names[0]] if names else call.operands[0])
    return 2.0 * count(product(call.result_shapes()[0])) * count(first.shape[-1])


def _convolution(call: Call, count: Count) -> float:
    """Each element of the result, or of the input of a transposed one, meets a filter without its first dimension."""
    is_transposed = "transpose" in call.key or call.args.get("transposed", False)
    positions = tensor_of(call.args["input"]).shape if is_transposed else call.result_shapes()[0]
    return 2.0 * count(product(positions)) * count(product(tensor_of(call.args["weight"]).shape[1:]))


ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass in units of its forward pass, which has 2 products: the backward pass has 5."""
_MATRICES = {name: _Product(_contraction, factors(name) or 2.0) for name in operators("product")}
_CONVOLUTION = _Product(_convolution, ("input", "weight"), is_convolution=True)
_CONVOLUTIONS = {f"aten::{name}{n}d": _CONVOLUTION for name in ("conv", "conv_transpose") for n in (1, 2, 3)}
_PRODUCTS = {**_MATRICES, **_CONVOLUTIONS, "aten::convolution": _CONVOLUTION}


def declare_product(
    operator_key: str, operations: Operations = _contraction, backward: float | tuple[str, str] = 2.0
) -> None:
    """State that an operator that is not ATen's multiplies matrices.

    Args:
        operator_key: its key, as `fxrewrite.ops.key` gives it.
        operations: how many operations a call does, with sizes as a function counts them; by default twice the
            result's elements times the last dimension of the first operand.
        backward: operations of the backward pass in units of the forward pass; or the two arguments that it
            multiplies, of which each that has a gradient takes as many as the forward pass.
    """
    _PRODUCTS[operator_key] = _Product(operations, backward)


def declare_convolution(operator_key: str) -> None:
    """State that an operator is a convolution: of `input` by `weight`, whatever its other arguments are."""
    _PRODUCTS[operator_key] = _CONVOLUTION


def is_product(node: fx.Node) -> bool:
    """Whether the node multiplies matrices; a convolution does not, whatever its kernels do."""
    found = _PRODUCTS.get(key(node))
    return found is not None and not found.is_convolution


def operations(node: fx.Node, count: Count = size_hint) -> float:
    """Multiplications and additions of a product or a convolution, on whole values; 0 for any other node.

    `count` says how many entries a size counts for: by default as many as the inputs at hand have.
    """
    declared = _PRODUCTS.get(key(node))
    return 0.0 if declared is None else declared.operations(Call.of(node), count)


def backward_operations(node: fx.Node, differentiated: Container[fx.Node]) -> float:
    """Those of the backward pass, where gradients flow to the values that are `differentiated`."""
    declared = _PRODUCTS.get(key(node))
    times = 0.0 if declared is None else declared.backward
    if isinstance(times, tuple):
        times = sum(bind(node)[name] in differentiated for name in times)
    return times * operations(node)
