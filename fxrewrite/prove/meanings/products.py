"""Products: sums over an index of products of entries, and attention, over the reals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from sympy import Integer

from fxrewrite import ops
from fxrewrite.prove.call import Meaning, SymbolicCall
from fxrewrite.prove.indices import Expr
from fxrewrite.prove.reals import apply, expanded, where
from fxrewrite.prove.value import SymbolicTensor


def _product(call: SymbolicCall) -> Any:
    """Returns a product of matrices or vectors, with what is added to it."""
    left, right = (call.args[name] for name in ops.factors(call.key) or ("", ""))
    bias, beta, alpha = None, 1, 1
    if call.name in ("addmm", "baddbmm"):
        bias, beta, alpha = call.args["self"], call.args["beta"], call.args["alpha"]
    elif call.name == "linear":
        bias = call.args["bias"]
    if left.dtype != call.dtype or right.dtype != call.dtype:
        return NotImplemented

    def of_linear(index: Sequence[Expr], k: Expr) -> tuple[Expr, Expr]:
        row = index[: len(left.shape) - 1]
        return left.at([*row, k]), right.at([index[-1], k] if len(right.shape) > 1 else [k])

    def of_matrices(index: Sequence[Expr], k: Expr) -> tuple[Expr, Expr]:
        has_rows, has_columns = len(left.shape) > 1, len(right.shape) > 1
        batch = index[: len(index) - has_rows - has_columns]
        full = call.shape[: len(batch)]
        row = [index[len(batch)]] if has_rows else []
        a = left.at([*call.broadcast(batch, left.shape[:-2], full), *row, k])
        b = right.at([*call.broadcast(batch, right.shape[:-2], full), k, index[-1]] if has_columns else [k])
        return a, b

    factors = of_linear if call.name == "linear" else of_matrices

    def at(index: Sequence[Expr]) -> Expr:
        k = call.indices.fresh(left.shape[-1])
        a, b = factors(index, k)
        found = call.total(a * b, [k]) * call.arithmetic.number(alpha)
        return found if bias is None else found + call.arithmetic.number(beta) * call.read(bias, index)

    return call.value(at)


def _einsum(call: SymbolicCall) -> Any:
    text, tensors = call.args["equation"].replace(" ", ""), call.args["tensors"]
    terms, arrow, result = text.partition("->")
    operands = terms.split(",")
    if not arrow or "." in text or any(x.dtype != call.dtype for x in tensors):
        return NotImplemented
    if any(len(set(part)) != len(part) for part in operands):
        return NotImplemented
    sizes = {
        letter: size
        for part, x in zip(operands, tensors, strict=True)
        for letter, size in zip(part, x.shape, strict=True)
        if size != 1
    }

    def at(index: Sequence[Expr]) -> Expr:
        known = dict(zip(result, index, strict=True))
        summed = {letter: call.indices.fresh(size) for letter, size in sizes.items() if letter not in known}
        known |= summed
        entry: Expr = Integer(1)
        for part, x in zip(operands, tensors, strict=True):
            entry *= x.at([Integer(0) if size == 1 else known[c] for c, size in zip(part, x.shape, strict=True)])
        return call.total(entry, summed.values())

    return call.value(at)


def _attention(call: SymbolicCall) -> Any:
    """Returns softmax(q k^T * scale + mask) v; a mask of bools, or a causal one, gives weight zero."""
    q, k, v, mask = (call.args[name] for name in ("query", "key", "value", "attn_mask"))
    if call.args["dropout_p"] != 0:
        return NotImplemented
    if any(x.dtype != call.dtype for x in (q, k, v)):
        return NotImplemented
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        return NotImplemented
    given, is_grouped = call.args["scale"], call.args["enable_gqa"]
    scale = sympy.Pow(q.shape[-1], sympy.Rational(-1, 2)) if given is None else call.arithmetic.number(given)
    heads = q.shape[:-2] if is_grouped else call.shape[:-2]

    def grouped(x: SymbolicTensor) -> Expr:
        """How many heads of q read one head of `x`."""
        return call.indices.divided(q.shape[-3], x.shape[-3])[0]

    def head(batch: Sequence[Expr], x: SymbolicTensor, group: Expr) -> list[Expr]:
        """The head of k or of v that a head of q reads."""
        if not is_grouped:
            return call.broadcast(batch, x.shape[:-2], heads)
        rest = call.broadcast(batch[:-1], x.shape[:-3], heads[:-1])
        return [*rest, call.indices.divided(batch[-1], group)[0]]

    of_k, of_v = (grouped(k), grouped(v)) if is_grouped else (Integer(1), Integer(1))

    def at(index: Sequence[Expr]) -> Expr:
        batch, row, column = index[:-2], index[-2], index[-1]

        def weight(j: Expr) -> Expr:
            d = call.indices.fresh(q.shape[-1])
            query = q.at([*call.broadcast(batch, q.shape[:-2], heads), row, d])
            score = expanded(call.total(query * k.at([*head(batch, k, of_k), j, d]), [d]) * scale)
            if mask is not None:
                shown = mask.at(call.broadcast([*batch, row, j], mask.shape, [*heads, q.shape[-2], k.shape[-2]]))
                if mask.dtype == torch.bool:
                    return where(shown, sympy.exp(score), Integer(0))
                score = expanded(score + shown)
            if call.args["is_causal"]:
                return where(apply("is_below", j, row + 1), sympy.exp(score), Integer(0))
            return sympy.exp(score)

        j, other = (call.indices.fresh(k.shape[-2]) for _ in range(2))
        whole = call.total(weight(other), [other])
        weighted = call.total(weight(j) * v.at([*head(batch, v, of_v), j, column]), [j])
        return call.arithmetic.divide(weighted, whole)

    return call.value(at)


PRODUCTS: Mapping[str, Meaning] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "mv", "dot"), _product),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
}
"""Products of real numbers."""
