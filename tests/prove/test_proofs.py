"""What is proved is true; what is false, or true of some sizes and numbers alone, is not proved without saying so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.ao.quantization.fx._decomposed  # defines torch.ops.quantized_decomposed
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch.utils._sympy.functions import FloorDiv

from fxrewrite import Literal, Match, Rule, op
from fxrewrite.pattern import trace
from fxrewrite.prove import Proof, prove
from fxrewrite.prove.indices import Indices, idiv, imod
from fxrewrite.prove.symbolic import Symbols, size_expression
from fxrewrite.prove.text import brief, form_of_case, form_of_condition, readable
from rules.fusions.rotary import INLINE_ROTARY
from tests.versions import TORCH

aten = torch.ops.aten


def proof_of(pattern: Callable[..., Any], replacement: Callable[..., Any], *where: str) -> Proof:
    """The proof of a rule, or that there is none."""
    return prove(Rule("a.rule", trace(pattern, where), replacement, numerics="reassociates"))


def _narrow(x: Any, start: Literal, length: Literal) -> Any:
    return x.narrow(0, start, length)


def _summed(x: Any, dim: Literal) -> Any:
    return x.sum(dim)


BITWISE: dict[str, tuple[Any, ...]] = {
    "two transposes": (lambda x: x.transpose(0, 1).transpose(0, 1), lambda x: aten.alias(x), "rank(x) >= 2"),
    "parts of a concatenation": (
        lambda x, y: torch.neg(torch.cat([x, y], -1)),
        lambda x, y: torch.cat([-x, -y], -1),
        "same_dtype(x, y)",
        "rank(x) >= 1",
        "shape(x) == shape(y)",
    ),
    "order of a cut and a function": (
        lambda x: torch.sin(x.unsqueeze(0)),
        lambda x: torch.sin(x).unsqueeze(0),
        "dtype(x) == float32",
    ),
    "a number that both dtypes have": (
        lambda x, c: torch.where(c, op("full", [], -math.inf, dtype=torch.bfloat16), x),
        lambda x, c: x.masked_fill(c, -math.inf),
        "dtype(x) == float32",
        "dtype(c) == bool",
        "shape(x) == shape(c)",
    ),
    "an operator of a library that acts entry by entry": (
        lambda x: op("quantized_decomposed::quantize_per_tensor", x, 0.1, 3, 0, 255, torch.uint8).t(),
        lambda x: torch.ops.quantized_decomposed.quantize_per_tensor(x.t(), 0.1, 3, 0, 255, torch.uint8),
        "dtype(x) == float32",
        "rank(x) == 2",
    ),
    "a cast in the graph of a trace": (
        lambda x: torch.neg(op("_to_copy", x, dtype=torch.bfloat16)),
        lambda x: -x.to(torch.bfloat16),
        "dtype(x) == float32",
    ),
    "a copy in the graph of a trace": (
        lambda x: op("_to_copy", x, dtype=torch.float32),
        lambda x: x.clone(),
        "dtype(x) == float32",
    ),
    "a number whose cast rounds nothing": (
        lambda x: op("_to_copy", op("full", [], 0.5, dtype=torch.float32), dtype=torch.float64) * x,
        lambda x: x.new_full([], 0.5) * x,
        "dtype(x) == float64",
    ),
    "operands of a product": (lambda x, y: torch.relu(x) * y, lambda x, y: y * torch.relu(x), "shape(x) == shape(y)"),
}
REAL: dict[str, tuple[Any, ...]] = {
    "a sum, of integers too": (
        lambda x: torch.sum(x.unsqueeze(0).squeeze(0)),
        lambda x: x.unsqueeze(0).select(0, 0).sum(),
        "rank(x) == 2",
    ),
    "a distributed product": (
        lambda x, y: x * 3.0 + y * 3.0,
        lambda x, y: (x + y) * 3.0,
        "shape(x) == shape(y)",
        "dtype(x) == float32",
        "dtype(y) == float32",
    ),
    "a transposed product": (
        lambda x, y: torch.mm(x, y).t(),
        lambda x, y: torch.mm(y.t(), x.t()),
    ),
    "a sum of a sum": (lambda x: x.sum(0).sum(0), lambda x: x.sum(1).sum(0), "rank(x) >= 2", "dtype(x) == float32"),
    "a mean by a sum": (
        lambda x: x.mean(-1),
        lambda x: x.sum(-1) / x.shape[-1],
        "rank(x) >= 1",
        "dtype(x) == float64",
    ),
    "a sum of a flat view": (
        lambda x: x.sum(),
        lambda x: x.reshape(-1).sum(),
        "rank(x) == 2",
        "dtype(x) == float32",
    ),
    "a factor out of a product of matrices": (
        lambda x, y: torch.mm(x * 0.3, y),
        lambda x, y: torch.mm(x, y) * 0.3,
        "dtype(x) == float32",
    ),
    "a shifted softmax": (
        lambda x: torch.softmax(x + 2.5, -1),
        lambda x: torch.softmax(x, -1),
        "dtype(x) == float32",
        "rank(x) >= 1",
    ),
    "a product by columns": (
        lambda x, w, v: torch.cat([F.linear(x, w), F.linear(x, v)], -1),
        lambda x, w, v: F.linear(x, torch.cat([w, v], 0)),
        "rank(w) == 2",
        "rank(v) == 2",
        "rank(x) == 2",
    ),
}
FALSE: dict[str, tuple[Any, ...]] = {
    "a number that a tensor rounds": (
        lambda x: x * op("full", [], 0.1, dtype=torch.bfloat16),
        lambda x: x * 0.1,
        "dtype(x) == float32",
        "rank(x) >= 1",
    ),
    "a number that overflows in a tensor": (
        lambda x: torch.relu(x) + op("full", [], 1e30, dtype=torch.float16),
        lambda x: torch.relu(x) + 1e30,
        "dtype(x) == float32",
        "rank(x) >= 1",
    ),
    "another factor": (lambda x: x * 3.0, lambda x: x * 3.0001),
    "another dimension": (lambda x: x.sum(0), lambda x: x.sum(1), "rank(x) == 2", "size(x, 0) == size(x, 1)"),
    "operands of a difference": (lambda x, y: x - y, lambda x, y: y - x, "shape(x) == shape(y)"),
    "a product not transposed": (
        lambda x, y: torch.mm(x, y).t(),
        lambda x, y: torch.mm(y.t(), x.t()) if x.shape[0] == 0 else torch.mm(x, y).clone(),
        "size(x, 0) == size(y, 1)",
    ),
    "parts in another order": (
        lambda x, y: torch.cat([x, y], 0),
        lambda x, y: torch.cat([y, x], 0),
        "rank(x) >= 1",
        "shape(x) == shape(y)",
    ),
    "a narrower intermediate": (
        lambda x: x * 2.0,
        lambda x: (x.to(torch.bfloat16) * 2.0).to(torch.float32),
        "dtype(x) == float32",
    ),
    "a narrower copy in the graph of a trace": (
        lambda x: op("_to_copy", x * 2.0, dtype=torch.float32),
        lambda x: aten._to_copy(aten._to_copy(x * 2.0, dtype=torch.bfloat16), dtype=torch.float32),
        "dtype(x) == float32",
    ),
    "a cast to another dtype in the graph of a trace": (
        lambda x: op("_to_copy", op("_to_copy", x, dtype=torch.bfloat16), dtype=torch.float32),
        lambda x: aten._to_copy(aten._to_copy(x, dtype=torch.float16), dtype=torch.float32),
        "dtype(x) == float32",
    ),
    "integers that overflow": (
        lambda x: torch.div(x * 2, 2, rounding_mode="floor"),
        lambda x: aten.alias(x),
        "dtype(x) == int32",
    ),
    "a view of another order": (
        lambda x: x.reshape(-1),
        lambda x: x.transpose(0, 1).reshape(-1),
        "rank(x) == 2",
    ),
    "every second entry": (
        lambda x: x[..., ::2],
        lambda x: x[..., : (x.shape[-1] + 1) // 2],
        "rank(x) == 1",
    ),
    "an absolute value": (lambda x: torch.sqrt(x * x), lambda x: aten.alias(x), "dtype(x) == float32"),
    "a mean of what is left": (lambda x: x.sum(-1), lambda x: x.mean(-1) * 4.0, "dtype(x) == float32", "rank(x) == 2"),
    "a variance of all": (
        lambda x: x.var(-1, unbiased=False),
        lambda x: x.var(-1, unbiased=True),
        "rank(x) == 2",
        "dtype(x) == float32",
    ),
    "numbers in a list, of an operator that is not known": (
        lambda x: x.amin([0]),
        lambda x: x.amin([1]),
        "rank(x) == 2",
        "size(x, 0) == size(x, 1)",
        "dtype(x) == float32",
    ),
    "the sides of a padding": (
        lambda x: F.pad(x, (1, 0), mode="replicate"),
        lambda x: F.pad(x, (0, 1), mode="replicate"),
        "rank(x) == 2",
        "dtype(x) == float32",
    ),
    "the same bits read as another dtype": (
        lambda x: torch.neg(x.view(torch.bfloat16)),
        lambda x: torch.neg(x).view(torch.bfloat16),
        "rank(x) == 1",
        "dtype(x) == float16",
    ),
    "integers that no sample tells apart": (
        _narrow,
        lambda x, start, length: x.narrow(0, length, start),
        "rank(x) == 1",
        "dtype(x) == float32",
    ),
    "an operator of a library that does not act entry by entry": (
        lambda x, s, z: op(
            "quantized_decomposed::quantize_per_channel", x, s, z, axis=0, quant_min=0, quant_max=255, dtype=torch.uint8
        ).t(),
        lambda x, s, z: torch.ops.quantized_decomposed.quantize_per_channel(x.t(), s, z, 0, 0, 255, torch.uint8),
        "dtype(x) == float32",
        "rank(x) == 2",
        "rank(s) == 1",
        "rank(z) == 1",
        "size(x, 0) == size(x, 1)",
        "size(x, 0) == size(s, 0)",
        "size(x, 0) == size(z, 0)",
    ),
    "another zero point": (
        lambda x: op("quantized_decomposed::quantize_per_tensor", x, 0.1, 3, 0, 255, torch.uint8).t(),
        lambda x: torch.ops.quantized_decomposed.quantize_per_tensor(x.t(), 0.1, 2, 0, 255, torch.uint8),
        "dtype(x) == float32",
        "rank(x) == 2",
    ),
    "no gradient": (lambda x: torch.relu(x), lambda x: torch.relu(x.detach())),
    "other random numbers": (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5)),
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


@pytest.mark.parametrize("name", BITWISE)
def test_the_same_operations_are_equal_in_bits(name: str) -> None:
    proof = proof_of(*BITWISE[name])
    assert proof.strength == "bitwise", str(proof)
    assert "proved for sizes of 2 or more, bitwise, for " in str(proof)


@pytest.mark.parametrize("name", REAL)
def test_equal_normal_forms_are_equal_over_the_reals(name: str) -> None:
    proof = proof_of(*REAL[name])
    assert proof.strength == "over the reals", str(proof)


@pytest.mark.parametrize("name", FALSE)
def test_what_is_false_is_not_proved(name: str) -> None:
    proof = proof_of(*FALSE[name])
    assert not proof.is_proved, str(proof)
    assert "not proved: " in str(proof)


def test_a_proof_says_for_which_numbers_and_values_it_holds() -> None:
    def product(x: torch.Tensor, a: Literal, b: Literal) -> torch.Tensor:
        return torch.mul(torch.mul(x, a), b)

    pattern = trace(product, ["dtype(x) == float32"])
    assert prove(Rule("a.rule", pattern, lambda x, a, b: x * (a * b))).strength == "over the reals"
    bounded = prove(Rule("a.rule", pattern, lambda x, a, b: x * (a * b) if a < 1000 else x))
    assert not bounded.is_proved or "a < 1000" in str(bounded), str(bounded)
    divided = proof_of(
        lambda x, y: x * y / y, lambda x, y: aten.alias(x), "dtype(x) == float32", "shape(x) == shape(y)"
    )
    assert "assuming y" in divided.summary, str(divided)
    assert "!= 0" in divided.summary, str(divided)
    assert "x(j0" not in divided.summary, str(divided)
    root = proof_of(lambda x: torch.rsqrt(x) * torch.rsqrt(x), lambda x: 1 / x, "dtype(x) == float32", "rank(x) <= 2")
    looked_at = "proved for sizes of 2 or more, over the reals, for float32 of rank "
    assert root.summary.startswith(looked_at), str(root)
    assert root.summary.endswith(", assuming x > 0"), str(root)
    summed = prove(Rule("a.rule", trace(_summed, ["rank(x) == 2"]), lambda x, dim: x.sum(dim), numerics="exact"))
    assert "of rank 2, with dim=" in summed.summary, str(summed)
    short = proof_of(
        lambda x: torch.relu(x), lambda x: torch.relu(x) if x.shape[0] < 100 else torch.neg(x), "rank(x) == 1"
    )
    assert not short.is_proved or "size(x, 0) < 100" in short.summary, str(short)
    cut = proof_of(lambda x: torch.relu(x), lambda x: torch.relu(x[:100]), "rank(x) == 1")  # an operator asks it
    assert not cut.is_proved or "size(x, 0) < 100" in cut.summary, str(cut)


def _over_root(x: Any, eps: Literal) -> Any:
    return x / torch.sqrt((x - x) + eps)


def test_cases_in_which_the_original_is_undefined_are_not_counted() -> None:
    """A layer norm of one entry was proved with eps=0, assuming 0 > 0."""
    pattern = trace(_over_root, ["dtype(x) == float32", "rank(x) == 1"])
    proof = prove(Rule("a.rule", pattern, lambda x, eps: x * torch.rsqrt((x - x) + eps), numerics="reassociates"))
    assert proof.strength == "over the reals", str(proof)
    assert proof.assumptions == ()
    (numbers,) = (text.removeprefix("eps=") for text in proof.literals)
    drawn = [float(number) for number in numbers.replace(" or ", ", ").split(", ")]
    assert drawn
    assert min(drawn) > 0, numbers
    assert not any("eps=0" in case or "eps=-" in case for case in proof.cases), str(proof)


def test_a_rule_that_computes_a_parameter_once_is_left_to_the_tests() -> None:
    pattern = trace(lambda x, w: F.linear(x, w).neg(), ["dtype(x) == float32", "dtype(w) == float32"])

    def negated(match: Match, x: Any, w: Any) -> Any:
        return F.linear(x, match.once(torch.neg, w))

    proof = prove(Rule("a.rule", pattern, negated, numerics="reassociates"))
    assert not proof.is_proved
    assert proof.why_not.startswith("no graph to prove it on: the rule computes a parameter once"), str(proof)
    assert "Rule.verify" in proof.why_not


def test_a_rule_on_what_is_never_defined_is_not_proved() -> None:
    never = proof_of(
        lambda x: x / torch.sqrt((x - x) - 2.0), lambda x: x * torch.rsqrt((x - x) - 2.0), "dtype(x) == float32"
    )
    assert never.why_not.startswith("no graph to prove it on: the original needs -2 >= 0, with x float32["), str(never)
    broken = proof_of(lambda x: x * 0.0, lambda x: 0.0 / torch.sqrt(x - x), "dtype(x) == float32")
    assert "the replacement needs 0 != 0" in broken.why_not, str(broken)


@pytest.mark.parametrize(
    ("before", "after", "assumed"),
    [
        pytest.param(
            lambda x: x / torch.sqrt(x * x + 1), lambda x: x * torch.rsqrt(x * x + 1), (), id="a positive sum"
        ),
        pytest.param(lambda x: 1 / torch.sqrt(x), lambda x: torch.rsqrt(x), (), id="what both sides need"),
        pytest.param(lambda x: torch.sqrt(x) / torch.sqrt(x), lambda x: x / x, ("x > 0",), id="the stronger one"),
        pytest.param(lambda x: (x * x * 3.0) / (x * x * 3.0), lambda x: torch.exp(x - x), ("x != 0",), id="of factors"),
    ],
)
def test_what_holds_always_or_on_both_sides_is_not_assumed(before: Any, after: Any, assumed: tuple[str, ...]) -> None:
    proof = proof_of(before, after, "dtype(x) == float32", "rank(x) == 1")
    assert proof.strength == "over the reals", str(proof)
    assert proof.assumptions == assumed


def test_what_differs_in_numbers_and_ranks_alone_is_told_once() -> None:
    x, y, k, s = sympy.Function("x"), sympy.Function("y"), *sympy.symbols("_k1 s1")
    j = sympy.symbols("j0 j1")
    names = {s: "size(x, 2)"}
    told = [readable(sympy.Rational(1e-6) + x(*j, k) / s, names), readable(x(k) / s - 2, {s: "size(x, 0)"})]
    assert told == ["1e-06 + x(j0, j1, _k1)/size(x, 2)", "-2 + x(_k1)/size(x, 0)"]
    assert brief([*told, "y > 0"], form_of_condition) == [f"{told[0]} (and 1 of the same form)", "y > 0"]
    of_entries = [f"{readable(entry)} > 0" for entry in (x(*j), y(*j), x(j[0]), x(0, 0))]
    assert brief(of_entries, form_of_condition) == ["x(j0, j1) > 0 (and 2 of the same form)", "y(j0, j1) > 0"]
    assert len(brief(["1.41 is sqrt(2)", "1.73 is sqrt(3)"], form_of_condition)) == 2
    cases = ["x float32[a, b], eps=0.5", "x float32[a, b], k=[1, 2], eps=2", "x float64[a, b], eps=0.5"]
    assert brief(cases, form_of_case) == ["x float32[a, b], eps=0.5 (and 1 of the same form)", cases[-1]]


def test_a_number_that_the_rule_reads_is_no_other_number() -> None:
    """A rule over filled tensors was proved without its condition that the number is one of their dtype."""

    def product(x: torch.Tensor, number: Literal) -> Any:
        return torch.mul(x, op("full", [], number, dtype=torch.bfloat16))

    pattern = trace(product, ["dtype(x) == float32", "rank(x) >= 1"])
    proof = prove(Rule("a.rule", pattern, lambda x, number: x * float(number), numerics="reassociates"))
    assert not proof.is_proved or "number=" in proof.summary, str(proof)


def test_conditions_that_always_hold_are_not_shown_and_others_are() -> None:
    a, b = sympy.symbols("a b", integer=True, positive=True)
    half, most = idiv(a, 2), sympy.Function("Max")(1, a - idiv(a, 2))
    always = [half <= a, half >= 1, a >= 2 * half, 2 * half + 1 >= a, b * (a - half) >= 2, sympy.Ne(a, most)]
    assert [c for c in always if not Indices().follows(c)] == []
    at_times = [half >= 2, a <= 2 * half, sympy.Ne(a - half, 1), idiv(a, 3) >= 1, 2 * half > a, sympy.Ne(a, 2 * most)]
    assert [c for c in at_times if Indices().follows(c)] == []
    indices = Indices()  # a quotient that holds a quotient, which was an error of sympy
    column = indices.fresh(b)
    assert indices.divided(half * b + column, b) == (half, column)


def test_quotients_that_have_no_rest_are_written_so() -> None:
    symbols = Symbols()
    with symbols.mode:
        s, t, u = (symbols.size(hint, f"size(x, {dim})") for dim, hint in enumerate((4, 6, 8)))
        a, b = map(size_expression, (s, t))
        assert symbols.simplified(idiv(a * a, a)) == a
        assert symbols.simplified(idiv(2 * a * b, 2 * b)) == a
        assert symbols.simplified(imod(a * b + b, b)) == 0
        assert symbols.simplified(idiv(a + 1, 2)) == idiv(a + 1, 2)
        assert symbols.simplified(idiv(a, a * b)) == idiv(a, a * b)
        assert u == 2 * (u // 2), "asked, so that it is even"
        assert symbols.simplified(2 * FloorDiv(size_expression(u), 2)) == symbols.simplified(size_expression(u))
        assert "size(x, 2)/2" in symbols.names.values()
        v, w = (symbols.size(6, f"size(y, {dim})") for dim in range(2))
        assert v == 2 * (w // 2), "asked, and torch does not replace a size by a quotient"
        c, d = map(size_expression, (v, w))
        assert symbols.simplified(c) == symbols.simplified(2 * FloorDiv(d, 2)) != c


def test_a_rotary_embedding_is_what_it_is_written_out_to() -> None:
    (inline,) = INLINE_ROTARY.rules()
    strengths = ("bitwise",) if TORCH < (2, 15) else ("bitwise", "over the reals")  # 2.15 makes a size 2 in between
    assert prove(inline).strength in strengths


def test_an_index_that_a_view_split_is_whole_again() -> None:
    a, b, c = sympy.symbols("a b c", integer=True, positive=True)
    indices = Indices()
    i = indices.fresh(a * b)
    assert indices.reshaped([idiv(i, b), imod(i, b)], [a, b], [a * b]) == [i]
    assert indices.reshaped([idiv(i, c), imod(i, b)], [a, b], [a * b]) == [b * idiv(i, c) + imod(i, b)]
