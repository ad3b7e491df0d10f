"""Matrix products, which are what a model's time is made of: which operators they are, and how many operations they do.

ATen's are known from `fxrewrite.ops.factors`; another library's operator that multiplies is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from fxrewrite.graph.sizes import Size, product, size_hint
from fxrewrite.ops import factors, key
from fxrewrite.spmd.layouts.rule import Call, tensor_of

__all__ = ["attention_operations", "declare_product", "is_product", "operations", "share_of"]

Count = Callable[[Size], int]
Operations = Callable[[Call, Count], float]


def _contraction(call: Call, count: Count) -> float:
    """Each element of the result is a sum over the last dimension of the first factor, by default the first operand."""
    names = factors(call.key)
    first = tensor_of(call.args[names[0]] if names else call.operands[0])
    return 2.0 * count(product(call.result_shapes()[0])) * count(first.shape[-1])


def attention_operations(call: Call, count: Count) -> float:
    """Each of the queries, the first operand, meets each of the keys, the second; and each weight a value."""
    return 4.0 * count(product(call.shape())) * count(call.shape(1)[-2])


_DECLARED: dict[str, Operations] = {"aten::scaled_dot_product_attention": attention_operations}


def declare_product(operator_key: str, operations: Operations = _contraction) -> None:
    """State that an operator that is not ATen's multiplies matrices.

    Args:
        operator_key: its key, as `fxrewrite.ops.key` gives it.
        operations: how many operations a call does, with sizes as a function counts them; by default twice the
            result's elements times the last dimension of the first operand.
    """
    _DECLARED[operator_key] = operations


def is_product(node: fx.Node) -> bool:
    """Whether the node multiplies matrices."""
    return factors(node) is not None or key(node) in _DECLARED


def operations(node: fx.Node, count: Count = size_hint) -> float:
    """Multiplications and additions of a matrix product, on whole values; 0 for any other node.

    `count` says how many entries a size counts for: by default as many as the inputs at hand have.
    """
    return _DECLARED.get(key(node), _contraction)(Call.of(node), count) if is_product(node) else 0.0


def share_of(some: Iterable[fx.Node], of: Iterable[fx.Node]) -> float:
    """The share of the operations of matrix products, between 0 and 1; 0 where there are none."""
    total = sum(map(operations, of))
    return sum(map(operations, some)) / total if total else 0.0
