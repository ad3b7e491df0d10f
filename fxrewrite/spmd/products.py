"""Matrix products, which are what a model's time is made of: which operators they are, and how many operations they do.

Another library's operator that multiplies matrices is declared by `declare_product`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from fxrewrite.graph.sizes import product, size_hint
from fxrewrite.ops import key
from fxrewrite.spmd.rule import Call

__all__ = ["attention_operations", "declare_product", "is_product", "operations", "share_of"]

Operations = Callable[[Call], float]


def _contraction(call: Call) -> float:
    """Each element of the result is a sum over the last dimension of the first operand."""
    return 2.0 * size_hint(product(call.result_shapes()[0])) * size_hint(call.shape()[-1])


def attention_operations(call: Call) -> float:
    """Each of the queries, the first operand, meets each of the keys, the second; and each weight a value."""
    return 4.0 * size_hint(product(call.shape())) * size_hint(call.shape(1)[-2])


_PRODUCTS: dict[str, Operations] = {
    **dict.fromkeys(("aten::linear", "aten::matmul", "aten::mm", "aten::bmm"), _contraction),
    "aten::addmm": lambda call: _contraction(call) / size_hint(call.shape()[-1]) * size_hint(call.shape(1)[-1]),
    "aten::scaled_dot_product_attention": attention_operations,
}


def declare_product(operator_key: str, operations: Operations = _contraction) -> None:
    """State that an operator that is not ATen's multiplies matrices.

    Args:
        operator_key: its key, as `fxrewrite.ops.key` gives it.
        operations: how many operations a call does; by default twice the result's elements times the last dimension of
            the first operand.
    """
    _PRODUCTS[operator_key] = operations


def is_product(node: fx.Node) -> bool:
    """Whether the node multiplies matrices."""
    return node.op == "call_function" and key(node) in _PRODUCTS


def operations(node: fx.Node) -> float:
    """Operations of a matrix product, multiplications and additions, of whole values at the sizes at hand; else 0."""
    return _PRODUCTS[key(node)](Call.of(node)) if is_product(node) else 0.0


def share_of(some: Iterable[fx.Node], of: Iterable[fx.Node]) -> float:
    """The share of the operations of matrix products, between 0 and 1; 0 where there are none."""
    total = sum(map(operations, of))
    return sum(map(operations, some)) / total if total else 0.0
