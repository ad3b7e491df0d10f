"""One spelling for the operators around attention: matrix products before it is fused, keys and scales afterwards.

    einsum("bqhd,bkhd->bhqk", q, k)          ->  matmul(permute(q, [0, 2, 1, 3]), permute(k, [0, 2, 3, 1]))
    transpose(transpose(k, -2, -1), -2, -1)  ->  k                                       before sdpa
    sdpa(q * s, k, v, mask, scale=c)         ->  sdpa(q, k, v, mask, scale=c * s)        and the same of k

Matches every einsum of two operands that is one matrix product: each index is in both operands and the result (batch),
in both operands only (exactly one), or in one operand and the result (one of each). Leaves alone, in these words,
"bqhd,bkd->bhqk is not a product of matrices: its rows are h, q". Inner transposes are transpose, permute and mT; they
stay for other users. A division by s gives the scale c / s; a scale that is a tensor is not folded.
Numerics: transposes exact, einsum and scales reassociate.
Source: PyTorch, aten/src/ATen/native/Linear.cpp (einsum), torch/nn/functional.py (scaled_dot_product_attention).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import (
    Literal,
    Match,
    Maybe,
    Pattern,
    Rule,
    RuleSet,
    cap,
    chain,
    either,
    maybe,
    op,
    refuse,
    shared,
    where,
)
from fxrewrite.ops import bind, fake_value, key, value
from fxrewrite.spmd import is_same_size
from rules.attention.operator import ATTEND, check_scale_of_causal
from rules.attention.parts import (
    DIVISOR,
    KT,
    MASK,
    SAFE_SOFTMAX,
    SCALE,
    Q,
    divides,
    fused,
    is_number,
    no_narrower,
    scaled,
    softmax,
)

if TYPE_CHECKING:
    from fxrewrite.verify import Draw


def _indices(equation: str) -> tuple[str, str, str]:
    operands, _, result = equation.replace(" ", "").partition("->")
    a, _, b = operands.partition(",")
    return a, b, result


@where.predicate("equation", text="is_product")
def _is_product(equation: str) -> bool | str:
    a, b, result = _indices(equation)
    letters = f"{a}{b}{result}"
    if not letters.isalpha() or any(len(set(part)) < len(part) for part in (a, b, result)):
        return f"{equation} is not two operands of distinct indices and a result"
    if (set(a) ^ set(b)) - set(result):
        return f"{equation} sums over an index of one operand"
    rows, columns, summed = set(result) - set(b), set(result) - set(a), (set(a) & set(b)) - set(result)
    for name, found in (("rows", rows), ("columns", columns), ("summed indices", summed)):
        if len(found) != 1:
            return f"{equation} is not a product of matrices: its {name} are {', '.join(sorted(found)) or 'none'}"
    return True


@where.predicate("equation", "x", "y", text="repeats_nothing")
def _repeats_nothing(equation: str, x: fx.Node, y: fx.Node) -> bool | str:
    """A product of matrices does not repeat an operand along the index that it sums over, as einsum does."""
    a, b, result = _indices(equation)
    (summed,) = (set(a) & set(b)) - set(result)
    sizes = fake_value(x).shape[a.index(summed)], fake_value(y).shape[b.index(summed)]
    return is_same_size(*sizes) or f"index {summed} has sizes {sizes[0]} and {sizes[1]}"


_OF_EINSUM = (_is_product, where.same_dtype("x", "y"), _repeats_nothing)
einsum_to_matmul = Rule(
    "attention.einsum_to_matmul",
    Pattern((op("einsum", cap("equation", Literal), [cap("x"), cap("y")]),), _OF_EINSUM),
    numerics="reassociates",
    optional=True,
)


@einsum_to_matmul.replacement
def _(equation: str, x: fx.Proxy, y: fx.Proxy) -> Any:
    """matmul(permute(x), permute(y)), permuted"""
    a, b, result = _indices(equation)
    (row,), (column,), (summed,) = set(result) - set(b), set(result) - set(a), (set(a) & set(b)) - set(result)
    batch = "".join(index for index in result if index in a and index in b)
    product = torch.matmul(_permuted(x, a, f"{batch}{row}{summed}"), _permuted(y, b, f"{batch}{summed}{column}"))
    return _permuted(product, f"{batch}{row}{column}", result)


@einsum_to_matmul.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples products with up to two batch indices, in every order of indices."""
    batch = "bh"[: draw.integer(0, 2)]
    a, b, result = ("".join(draw.rng.sample(f"{batch}{more}", len(batch) + 2)) for more in ("rs", "cs", "rc"))
    sizes = {index: draw.size() for index in "bhrcs"}
    x, y = (draw.tensor(*(sizes[index] for index in operand)) for operand in (a, b))
    return {"equation": f"{a},{b}->{result}", "x": x, "y": y}


def _permuted(x: Any, have: str, want: str) -> Any:
    return x if have == want else torch.permute(x, [have.index(index) for index in want])


_x = cap("x")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CASTS: Any = chain(_x, "to", least=1, most=3)
_DTYPE: Any = cap("dtype", Literal)


def _casts(softmax: fx.Node) -> list[fx.Node]:
    """Returns the casts of what the softmax reads, the last one first."""
    found, node = list[fx.Node](), bind(softmax)["self"]
    while key(node) == "aten::to":
        found.append(node)
        node = node.all_input_nodes[0]
    return found


@where.predicate("root", text="keeps_all_numbers")
def _keeps_all_numbers(root: fx.Node) -> bool | str:
    """Only the last cast, be it the softmax's own, may round."""
    casts = _casts(root)
    before = value(casts[-1].all_input_nodes[0]).dtype
    for node in casts if bind(root)["dtype"] is not None else casts[1:]:
        if torch.promote_types(before, dtype := value(node).dtype) != dtype:
            return f"the cast to {dtype} rounds {before}"
    return True


softmax_casts = Rule(
    "attention.softmax_casts",
    Pattern(
        (either(op("softmax", _CASTS, -1, _DTYPE), op(SAFE_SOFTMAX, _CASTS, -1, _DTYPE)),),
        (where.dtype("x", *_FLOATS), _keeps_all_numbers),
    ),
    optional=True,
)


@softmax_casts.replacement
def _(match: Match, x: Any, dtype: torch.dtype | None) -> Any:
    """softmax(x, -1, dtype of the last cast)"""
    dtype = dtype or value(_casts(match.root)[0]).dtype
    return softmax(match, x, dtype, is_safe=key(match.root) == SAFE_SOFTMAX)


_scores: Any = maybe(scaled(torch.matmul(Q, KT)) + MASK)
round_scores_once = Rule(
    "attention.round_scores_once",
    Pattern(
        (op("softmax", op("to", _scores, cap("wide", Literal)), -1, _DTYPE),),
        (
            where.dtype("q", torch.float16, torch.bfloat16, torch.float32, torch.float64),
            *no_narrower("q", "wide", "dtype"),
        ),
    ),
    numerics="reassociates",
    optional=True,
)


fused(round_scores_once)


@round_scores_once.replacement
def _(match: Match, wide: torch.dtype, dtype: torch.dtype | None) -> Any:
    """softmax(scores, -1, dtype), without a cast to the dtype that the mask made wider"""
    scores = bind(bind(match.root)["self"])["self"]
    return torch.softmax(match.proxy(scores), -1, wide if dtype is None else dtype)


zeros_of_empty_rows = Rule(
    "attention.zeros_of_empty_rows",
    Pattern(
        (either(*(op("nan_to_num", op("softmax", _x, -1, cap("dtype", Literal)), *nan) for nan in ((), (0.0,)))),),
        (where.dtype("x", *_FLOATS),),
    ),
    domain="finite",
    optional=True,
)


@zeros_of_empty_rows.replacement
def _(match: Match, x: Any, dtype: torch.dtype | None) -> Any:
    """_safe_softmax(x, -1, dtype), whose rows of -inf are zeros"""
    if dtype is not None and torch.promote_types(value(match["x"]).dtype, dtype) != dtype:
        refuse("a large score would overflow, and its row be zeros", dtype=dtype)
    if value(match["x"]).dtype == torch.float16 and dtype == torch.float32:
        x, dtype = x.to(dtype), None  # _safe_softmax from float16 to float32 has no backward in torch
    return softmax(match, x, dtype, is_safe=True)


_transposed: Any = either(
    op("transpose", _x, cap("dim0", Literal), cap("dim1", Literal)),
    op("permute", _x, cap("dims", Literal)),
    op("mT", _x),
)


@where.predicate("root", text="is_key")
def _is_key(root: fx.Node) -> bool | str:
    others = {key(reader) for reader in _readers(root)} - {"aten::scaled_dot_product_attention", key(ATTEND)}
    return not others or f"{', '.join(sorted(others))} uses it"


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the users of the node, looking through what is between a key and the operator."""
    for user in node.users:
        if key(user) in ("aten::expand", "aten::unsqueeze", "aten::reshape", "aten::mul", "aten::div"):
            yield from _readers(user)
        else:
            yield user


untranspose_key = Rule(
    "attention.untranspose_key",
    Pattern(
        (either(*(op("transpose", shared(inner), -2, -1) for inner in _transposed.options)),),
        (_is_key,),
    ),
    optional=True,
)


@untranspose_key.replacement
def _(match: Match, x: Any, dim0: int | None, dim1: int | None, dims: list[int] | None) -> Any:
    """the operand of the transpose, or of one permutation"""
    order = list(range(x.ndim))
    last = [*order[:-2], order[-1], order[-2]]
    if dims is not None:
        inner = [dim % x.ndim for dim in dims]
    elif dim0 is not None and dim1 is not None:
        inner = list(order)
        inner[dim0], inner[dim1] = inner[dim1], inner[dim0]
    else:
        inner = last
    both = [inner[dim] for dim in last]
    return x if both == order else torch.permute(x, both)


_rest: dict[str, Any] = {
    "attn_mask": cap("mask", Maybe),
    "dropout_p": cap("dropout_p", Literal),
    "is_causal": cap("is_causal", Literal),
    "scale": cap("old_scale", Literal),
    "enable_gqa": cap("enable_gqa", Literal),
}
_factor: Any = either(_x * SCALE, _x / DIVISOR)
_SCALES = (is_number("scale"), divides("divisor"), where.same_dtype("x", "other"))


def _fold(name: str, q: Any, k: Any, *, after: tuple[str, ...] = ()) -> Rule:
    pattern = Pattern((op("scaled_dot_product_attention", q, k, cap("v"), **_rest),), _SCALES)
    fold = Rule(f"attention.{name}", pattern, numerics="reassociates", domain="moderate", optional=True, after=after)

    @fold.replacement
    def _(match: Match, x: Any, other: Any, v: Any, mask: Any) -> Any:
        """sdpa(q, k, v, mask, scale=old_scale * scale)"""
        q, k = (x, other) if name == "fold_query_scale" else (other, x)
        old: float | None = match["old_scale"]
        depth = value(match["x"]).shape[-1]
        if old is None and isinstance(depth, int) and depth == 0:
            refuse("a head of size 0 has no scale")
        scale = 1 / math.sqrt(depth) if old is None else old
        scale = scale / match["divisor"] if match["scale"] is None else scale * match["scale"]
        if match["is_causal"]:
            check_scale_of_causal(scale)
        options = {name: match[name] for name in ("dropout_p", "is_causal", "enable_gqa") if match[name]}
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, **options)

    @fold.sampler
    def _(draw: Draw) -> dict[str, Any]:
        """Leaves all to be guessed, but for integers that the scale makes float32."""
        if not draw.wide or draw.flag():
            return {}
        length, num_keys, depth, width = draw.shape(4)
        rows, others = (length, num_keys) if name == "fold_query_scale" else (num_keys, length)
        whole = draw.indices(2, rows, depth, below=3)
        others, v = (draw.tensor(2, *sizes, dtype=torch.float32) for sizes in ((others, depth), (num_keys, width)))
        return {"x": whole, "other": others, "v": v, "mask": None, "scale": 0.5, "divisor": 2.0, "enable_gqa": False}

    return fold


fold_query_scale = _fold("fold_query_scale", _factor, cap("other"))
fold_key_scale = _fold("fold_key_scale", cap("other"), _factor, after=("attention.fold_query_scale",))
scale_before_transpose = Rule(
    "attention.scale_before_transpose",
    Pattern((either(*(op("transpose", scaled, -2, -1) for scaled in _factor.options)),), (_is_key,)),
    optional=True,
)


@scale_before_transpose.replacement
def _(match: Match, x: Any) -> Any:
    """transpose(x) * scale, which the operator takes over"""
    x = torch.transpose(x, -2, -1)
    return x * match["scale"] if match["divisor"] is None else x / match["divisor"]


EINSUM = RuleSet("attention.einsum", einsum_to_matmul)
SOFTMAX = RuleSet(
    "attention.softmax",
    RuleSet("attention.casts_of_softmax", softmax_casts, zeros_of_empty_rows),
    round_scores_once,
)
"""Casts of scores become the softmax's own."""
KEYS = RuleSet("attention.keys", untranspose_key)
_KEY_SCALES = RuleSet("attention.key_scales", scale_before_transpose)
CLEANUP = RuleSet("attention.cleanup", _KEY_SCALES, KEYS, fold_query_scale, fold_key_scale)
"""Runs after the fusions."""
