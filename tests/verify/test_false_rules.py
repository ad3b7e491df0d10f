"""Rules that are false are caught, each by the kind of difference that it makes, and shown as a small program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import Literal, Pattern, Rule, any_, cap, either, loose, maybe, op, refuse, rule, where
from fxrewrite.errors import VerificationError
from fxrewrite.ops import declare_pure
from fxrewrite.torch_versions import CLAMP_PASSES_AT_BOUNDS
from fxrewrite.verify import verify_rewrite
from tests.verify.rules import execute, rule_of, same, verify

aten = torch.ops.aten
X: Any = cap("x")
Y: Any = cap("y")
DIM: Any = cap("dim", Literal)


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def graph_rewrite(change: Callable[[fx.Graph], int]) -> Callable[[fx.GraphModule], int]:
    """A rewrite that no rule of ours could make."""

    def rewrite(gm: fx.GraphModule) -> int:
        count = change(gm.graph)
        gm.recompile()
        return count

    return rewrite


FALSE: dict[str, tuple[str, Rule]] = {
    # the permutation is ignored, as in pytorch issue 195320
    "an ignored permutation": (
        "value",
        rule_of(
            op("permute", op("permute", X, any_), any_), lambda x: x, where.rank("x", 3), where.size("x", 0, "==", 2),
            where.size("x", 1, "==", 2), where.size("x", 2, "==", 2)
        ),
    ),
    "an ignored permutation, seen in the shape": (
        "shape",
        rule_of(
            op("permute", op("permute", X, any_), any_),
            lambda x: x,
            where.rank("x", 2),
            where.size("x", 0, "==", 2),
            where.size("x", 1, "==", 3),
        ),
    ),
    "an ignored argument of a loose operator": (
        "value",
        rule_of(loose(op("gelu", X)), lambda x: aten.gelu(x), numerics="reassociates"),
    ),
    "a wrong dimension": (
        "value",
        rule_of(torch.cumsum(torch.neg(X), DIM), lambda x, dim: torch.neg(torch.cumsum(x, 0)), numerics="reassociates"),
    ),
    "a gradient that is cut off": (
        "gradient",
        rule_of(X * torch.sigmoid(X), lambda x: x * torch.sigmoid(x.detach()), numerics="reassociates"),
    ),
    "a promotion": ("dtype", rule_of(X + Y, lambda x, y: torch.add(x, y.type_as(x)) * 1)),
    "true without broadcasting": (
        "value",
        rule_of(
            torch.sum(X * Y), lambda x, y: torch.sum(x) * torch.sum(y) / torch.numel(x), where.rank("x", 1),
            where.rank("y", 1), where.size("x", 0, "==", 2), numerics="reassociates"
        ),
    ),
    "true but for size one": (
        "shape",
        rule_of(
            op("squeeze", op("unsqueeze", X, 0)), lambda x: aten.alias(x), where.rank("x", 2), numerics="reassociates"
        ),
    ),
    "true but for NaN and infinities": ("value", rule_of(X - X, lambda x: torch.zeros_like(x))),
    "true but for the sign of zero": ("value", rule_of(X + 0.0, lambda x: x * 1.0)),
    "an alternative that is wrong": (
        "value",
        rule_of(
            torch.exp(maybe(X + Y)), lambda x, y: torch.exp(x) if y is None else torch.exp(x) + torch.exp(y),
            numerics="reassociates",
        ),
    ),
    "a wrong option": (
        "value",
        rule_of(either(torch.sin(X), torch.cos(X)), lambda x: torch.sin(x) * 1, numerics="reassociates"),
    ),
    "an operand that may not trade places": (
        "value", rule_of(op("sub", X, Y), lambda x, y: torch.neg(x - y) * 1, numerics="reassociates")
    ),
    "a constant that is only near": (
        "value",
        rule_of(X * cap("c", Literal), lambda x, c: torch.mul(x, c + 1e-4) / 1, numerics="reassociates"),
    ),
    "fewer outputs of a split": (
        "value",
        rule_of(
            op("chunk", X, 2, 0)[1], lambda x: torch.chunk(x, 2, 0)[0], where.rank("x", 1),
            where.divisible("x", 0, 2)
        ),
    ),
    "a dropout that is removed": ("random", rule_of(torch.dropout(X, 0.5, True), lambda x: x * 1)),
    "a draw that is new": ("random", rule_of(torch.neg(X), lambda x: torch.dropout(x, 0.5, True) * -1)),
}  # fmt: skip


@pytest.mark.parametrize("name", FALSE)
def test_a_false_rule_is_caught_and_shown_by_a_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, rule = FALSE[name]
    options: dict[str, Any] = {"terminates": False, "rng": "preserves", "shapes": "preserves"}
    verdict = verify(rule, **options)
    assert verdict.counterexample is not None, str(verdict)
    assert verdict.counterexample.difference.kind == kind, str(verdict)
    assert not verdict.ok
    assert str(verdict).startswith(f"test.rule: false: {kind}: ")
    with pytest.raises(VerificationError, match=r"^test\.rule: false"):
        verdict.raise_if_false()
    ran = execute(verdict.counterexample.snippet)
    assert kind == "random" or not same(ran["expected"], ran["found"])
    printed = capsys.readouterr().out
    assert printed.startswith("original: ")
    assert "rewritten: " in printed


def _tanh_of_small(x: Any) -> Any:
    return torch.where(torch.abs(x) > 100, torch.zeros_like(x), torch.tanh(x))


def _relu_of_short(match: Any, x: Any) -> Any:
    return torch.relu(x) * (0 if max(match["x"].meta["val"].shape, default=0) >= 40 else 1)


_EXP: Any = torch.exp(X)
AT_EXTREMES: dict[str, Rule] = {
    "exp overflows in a softmax": rule_of(
        torch.softmax(X, -1), lambda x: torch.exp(x) / torch.sum(torch.exp(x), -1, keepdim=True), domain="finite"
    ),
    "exp overflows below a log": rule_of(torch.log(_EXP), lambda x: x),
    "exp overflows in a softplus": rule_of(torch.log(1 + _EXP), lambda x: torch.nn.functional.softplus(x)),
    "a variance cancels": rule_of(
        op("var", X, correction=0), lambda x: torch.mean(x * x) - torch.mean(x) ** 2, domain="finite"
    ),
    "a kernel wrong beyond 100": rule_of(torch.tanh(X), _tanh_of_small, domain="finite"),
    "a kernel wrong from 40 elements on": rule_of(torch.relu(X), _relu_of_short, domain="finite"),
    "an empty mean is NaN": rule_of(
        torch.nan_to_num(torch.mean(X)), lambda x: torch.mean(torch.nan_to_num(x)), domain="finite", numerics="exact"
    ),
}


@pytest.mark.parametrize("name", AT_EXTREMES)
def test_a_rule_that_is_false_of_large_long_or_empty_tensors_is_caught(name: str) -> None:
    rule = AT_EXTREMES[name]
    promises: dict[str, Any] = {"domain": rule.domain, "terminates": False, "rng": "preserves", "shapes": "preserves"}
    numerics = "exact" if "empty" in name else "approximate"
    verdict = verify(rule, samples=48, **{**promises, "numerics": numerics})
    assert verdict.counterexample is not None, str(verdict)
    assert verdict.counterexample.difference.kind in ("value", "gradient")
    ran = execute(verdict.counterexample.snippet)
    assert not same(ran["expected"], ran["found"])


def _relu_from_start(match: Any, x: Any) -> Any:
    value = match["x"].meta["val"]
    return torch.relu(torch.as_strided(x, value.shape, value.stride(), 0))


def _twice_from(size: int) -> Callable[..., Any]:
    return lambda match, x: torch.sum(x, 0) * (2 if match["x"].meta["val"].shape[0] >= size else 1)


def not_clamped(x: torch.Tensor) -> torch.Tensor:
    """The values of `clamp(x, 0, 6)`, with other gradients at 0 and 6."""
    return (
        torch.nn.functional.relu6(x)
        if CLAMP_PASSES_AT_BOUNDS
        else torch.where((x < 0) | (x > 6), x.detach().clamp(0, 6), x)
    )


INT: Any = cap("i")
IN_A_DETAIL: dict[str, tuple[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "a small difference cancels": (torch.expm1(X), lambda x: torch.exp(x) - 1, (), {}),
    "a small summand is lost": (torch.log1p(X), lambda x: torch.log(1 + x), (), {}),
    "a square overflows": (torch.hypot(X, Y), lambda x, y: torch.sqrt(x * x + y * y), (), {}),
    "a square cancels": (torch.square(X - Y), lambda x, y: x * x - 2 * x * y + y * y, (), {}),
    "one value is wrong": (
        torch.sin(X), lambda x: torch.where(x == 7.5, 0.0, torch.sin(x)), (where.dtype("x", torch.float32),), {}
    ),
    "a tie after rounding": (
        torch.argmax(torch.softmax(X, -1), -1), lambda x: torch.argmax(x, -1), (where.size("x", -1, ">", 0),),
        {"numerics": "exact"},
    ),
    "a gradient at zero": (torch.sqrt(X * X), lambda x: torch.abs(x), (), {}),
    "long rows": (torch.sum(X, 0), _twice_from(500), (where.size("x", 0, ">", 0),), {}),
    "a size that the code names": (torch.sum(X, 0), _twice_from(777), (where.size("x", 0, ">", 0),), {}),
    "an offset is ignored": (torch.relu(X), _relu_from_start, (), {"gradients": False}),
    "an integer that is no float": (
        op("to", op("to", INT, torch.float32), torch.int64), lambda i: torch.clone(i),
        (where.dtype("i", torch.int64),), {"shapes": "changes", "numerics": "exact"},
    ),
    "a row off by one": (
        op("embedding", cap("w"), INT),
        lambda match, w, i: torch.nn.functional.embedding(torch.clamp(i, max=match["w"].meta["val"].shape[0] - 2), w),
        (where.size("w", 0, ">", 1),), {"numerics": "exact"},
    ),
    "a threshold that the code names, among moderate values": (
        torch.log1p(torch.exp(X)), lambda x: torch.nn.functional.softplus(x, 1.0, 5.0), (),
        {"numerics": "approximate", "domain": "moderate"},
    ),
    "a half is rounded up, not to even": (
        op("to", torch.floor(X + 0.5), torch.int32), lambda x: torch.round(x).to(torch.int32), (),
        {"numerics": "exact", "domain": "moderate"},
    ),
    "a half is rounded up, and neither graph rounds anything else": (
        torch.floor(X + 0.5), lambda x: torch.round(x), (), {},
    ),
    "a comparison at the number that it names": (X > 3, lambda x: x >= 3, (), {}),
    "a reciprocal before a rounding": (
        torch.clamp(torch.round(X / 0.1), -128, 127), lambda x: torch.clamp(torch.round(x * 10.0), -128, 127), (),
        {"numerics": "exact"},
    ),
    "a reciprocal of a literal before a rounding": (
        torch.round(X / cap("s", Literal)), lambda x, s: torch.round(x * (1 / s)), (where.value("s", ">", 0),),
        {"numerics": "exact"},
    ),
    "a cast that rounds up first": (
        op("to", op("to", X, torch.float32), torch.int32), lambda x: x.to(torch.int32),
        (where.dtype("x", torch.float64),), {"numerics": "exact", "domain": "moderate"},
    ),
    "the difference from one cancels": (torch.sigmoid(-X), lambda x: 1.0 - torch.sigmoid(x), (), {}),
    "most of a long row is true": (
        torch.sum(X, -1), lambda x: torch.sum(x.to(torch.int8), -1, dtype=torch.int8).to(torch.int64),
        (where.dtype("x", torch.bool),), {"numerics": "exact"},
    ),
    "a quotient of integers below zero": (
        torch.div(INT, cap("j"), rounding_mode="floor"), lambda i, j: torch.div(i, j, rounding_mode="trunc"),
        (where.dtype("i", torch.int64), where.dtype("j", torch.int64)), {"gradients": False, "numerics": "exact"},
    ),
    "an integer that the code names": (
        torch.abs(INT), lambda i: torch.where(i == -77, -77, torch.abs(i)),
        (where.dtype("i", torch.int64),), {"gradients": False, "numerics": "exact"},
    ),
    "a target that is ignored": (
        torch.nn.functional.cross_entropy(X, INT),
        lambda x, i: torch.nn.functional.cross_entropy(x, i, reduction="sum") / i.numel(),
        (where.rank("x", 2), where.dtype("i", torch.int64)), {"domain": "moderate", "numerics": "approximate"},
    ),
    "a matrix of more than one row": (
        torch.linalg.inv(X), lambda x: torch.linalg.inv(x.transpose(-1, -2)), (),
        {"gradients": False, "domain": "moderate"},
    ),
    "the largest is far behind": (
        torch.amax(X, -1), lambda x: torch.amax(x[:, :100], -1), (where.rank("x", 2), where.size("x", 1, ">", 0)), {},
    ),
    "a gradient at a bound": (
        torch.clamp(X, max=1), lambda x: torch.where(x < 1 if CLAMP_PASSES_AT_BOUNDS else x <= 1, x, 1.0), (),
        {"domain": "moderate"},
    ),
    "a gradient of equal operands": (torch.maximum(X, Y), lambda x, y: torch.where(x >= y, x, y), (), {}),
    "a gradient at a named number": (torch.clamp(X, 0.0, 6.0), not_clamped, (), {}),
    "a gradient beside an operand that has none": (
        torch.special.gammainc(Y, X) * X, lambda x, y: torch.special.gammainc(y, x) * x.detach(), (),
        {"domain": "moderate", "numerics": "approximate"},
    ),
    "a gradient of complex numbers": (
        torch.view_as_real(X * Y), lambda x, y: torch.view_as_real(x * y.detach()).clone(),
        (where.dtype("x", torch.complex64), where.dtype("y", torch.complex64)), {"domain": "moderate"},
    ),
    "a gradient of complex numbers in further samples": (
        torch.abs(X), lambda match, x: torch.abs(x.detach() if match["x"].meta["val"].is_complex() else x),
        (), {"domain": "moderate", "numerics": "approximate"},
    ),
    "a cast to another half precision": (
        op("to", op("to", X, torch.float16), torch.float32), lambda x: x.to(torch.bfloat16).to(torch.float32),
        (where.dtype("x", torch.float32),), {"domain": "moderate"},
    ),
    "a cast by way of another half precision": (
        op("to", X, torch.float16), lambda x: x.to(torch.bfloat16).to(torch.float16),
        (where.dtype("x", torch.float32),), {"domain": "moderate"},
    ),
    "an operand that is rounded first": (
        op("to", torch.softmax(X, -1), torch.bfloat16), lambda x: torch.softmax(x.to(torch.bfloat16), -1),
        (where.dtype("x", torch.float32), where.size("x", -1, ">", 0)), {},
    ),
    "half precision inside": (
        torch.sum(X, -1), lambda x: torch.sum(x.to(torch.bfloat16), -1).to(torch.float32),
        (where.dtype("x", torch.float32),), {},
    ),
}  # fmt: skip
"""Each is true but for one detail, which normal values and small contiguous tensors do not show."""


def in_a_detail(name: str) -> Rule:
    pattern, replacement, conditions, promises = IN_A_DETAIL[name]
    options: dict[str, Any] = {"numerics": "reassociates", "domain": "finite", "terminates": False, **promises}
    return Rule("test.detail", Pattern((pattern,), conditions), replacement, **options)


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_all_dtypes_that_a_constraint_names_are_drawn(other: torch.dtype) -> None:
    """The square overflows in float16 alone."""
    rule = Rule(
        "test.mean",
        Pattern((torch.mean(torch.pow(op("to", X, torch.float32), 2), -1),), (where.dtype("x", torch.float16, other),)),
        lambda x: torch.mean(torch.pow(x, 2), -1).to(torch.float32),
        numerics="approximate",
    )
    counterexample = rule.verify().counterexample
    assert counterexample is not None
    assert "inf" in counterexample.difference.text


@pytest.mark.parametrize("name", IN_A_DETAIL)
def test_a_rule_that_is_false_in_a_detail_is_caught(name: str) -> None:
    verdict = in_a_detail(name).verify()
    assert verdict.counterexample is not None, str(verdict)
    assert verdict.counterexample.difference.kind in ("value", "gradient"), str(verdict)


def test_a_counterexample_to_a_rule_of_moderate_values_is_moderate() -> None:
    verdict = in_a_detail("a threshold that the code names, among moderate values").verify()
    assert verdict.counterexample is not None
    (x,) = execute(verdict.counterexample.snippet)["inputs"]()
    assert x.numel() == 1
    assert 5 <= x.item() < 8


def test_what_only_overflows_is_true_of_moderate_values() -> None:
    rule = AT_EXTREMES["exp overflows in a softmax"]
    assert verify(rule, domain="moderate", numerics="approximate", samples=24, rng="preserves", shapes="preserves").ok


@declare_pure
def same_memory(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_result_newly_in_the_memory_of_another_is_caught_where_a_plan_cannot_see_it(outputs: int) -> None:
    """Where it sees it, it copies what leaves the graph, and refuses where something writes to that memory."""
    verdict = Rule("test.clone", Pattern((op("clone", X),)), lambda x: x).verify(samples=8)
    assert verdict.ok, str(verdict)
    hidden = rule_of(
        (torch.sin(X), torch.cos(X))[:outputs],
        lambda match, x: (x, x)[:outputs] if outputs == 2 else match.call(same_memory, x),
    )
    verdict = verify(hidden, numerics="approximate", tolerance=1e9, grad=False)
    assert verdict.counterexample is not None, str(verdict)


NEG = torch.neg(X)


@pytest.mark.parametrize(
    "rule",
    [
        rule_of(op("t", X), lambda x: torch.clone(x.t()), where.rank("x", 2)),
        rule_of((NEG, op("t", NEG)), lambda x: (torch.neg(x), torch.neg(x.t())), where.rank("x", 2)),
    ],
    ids=["of an input", "of a result"],
)
def test_a_view_that_becomes_a_copy_is_caught(rule: Rule) -> None:
    counterexample = verify(rule).counterexample
    assert counterexample is not None
    assert counterexample.difference.kind == "memory"
    assert "no longer shares the memory of" in str(counterexample)


def test_a_result_that_strides_make_a_view_may_become_a_copy() -> None:
    """Whether `_unsafe_view` gives a view is not promised, although it does."""
    rule = rule_of(aten._unsafe_view(NEG, [-1]), lambda x: torch.neg(x).flatten())
    assert verify(rule, samples=8).ok


def test_a_counterexample_is_small() -> None:
    verdict = verify(FALSE["true but for NaN and infinities"][1])
    assert verdict.counterexample is not None
    *comments, last = verdict.counterexample.snippet.splitlines()
    assert comments[-1] == 'print("original: ", expected := original(*inputs()))'
    assert last == 'print("rewritten:", found := rewritten(*inputs()))'
    assert str(verdict).splitlines()[2:4] == comments[:2]
    assert comments[2:-1] == [
        "import torch",
        'def inputs(): return [torch.tensor(float("nan"), dtype=torch.float64)]',
        "def original(x): return (x - x,)",
        "def rewritten(x): return (torch.zeros_like(x),)",
    ]
    assert "To reproduce: run this program, or verify(samples=2, seed=0)." in str(verdict).splitlines()


def test_one_entry_is_left_wherever_it_was() -> None:
    rule = rule_of(torch.relu(X), lambda x: torch.where(x == 7.5, 0.0, torch.relu(x)), where.rank("x", 2))
    verdict = rule.verify(samples=200, terminates=False)
    assert verdict.counterexample is not None
    assert "[[7.5" in verdict.counterexample.snippet
    (x,) = execute(verdict.counterexample.snippet)["inputs"]()
    assert x.shape == (1, 1)


def test_the_snippet_is_the_program_that_one_would_write() -> None:
    rule = rule_of(torch.cumsum(torch.neg(X), DIM), lambda x, dim: torch.neg(torch.cumsum(x, 0)), rng="preserves")
    counterexample = verify(rule, terminates=False, numerics="reassociates", dtypes=["float32"]).counterexample
    assert counterexample is not None
    snippet = counterexample.snippet
    assert snippet.startswith("# test.rule is false\n# value: output 0[")
    x = execute(snippet)["inputs"]()[0]
    assert x.ndim == 2
    assert x.numel() <= 2
    assert set(x.flatten().tolist()) <= {0.0, 1.0}


def test_a_sampler_is_asked_for_plain_tensors_and_the_smallest_are_shown() -> None:
    rule = rule_of(torch.neg(X), lambda x: torch.where(x == 3, 0.0, -x), where.rank("x", 2))

    def sampler(draw: Any) -> dict[str, torch.Tensor]:
        return {"x": draw.tensor(draw.size(), draw.size())}

    verdict = verify(rule, sampler=sampler, terminates=False, samples=200)
    counterexample = verdict.counterexample
    assert counterexample is not None
    assert verdict.samples == verify(rule, sampler=sampler, terminates=False, samples=200, shrink=False).samples
    assert "as_strided" not in counterexample.snippet
    (x,) = execute(counterexample.snippet)["inputs"]()
    assert x.tolist() == [[3.0]]


def test_an_error_that_is_swallowed() -> None:
    """The original raises on an index that is out of range; the rewritten graph clamps it."""
    rule = rule_of(
        op("index_select", X, 0, cap("index")),
        lambda match, x, index: torch.index_select(x, 0, torch.clamp(index, 0, match["x"].meta["val"].shape[0] - 1)),
        where.rank("x", 1),
        where.dtype("index", torch.int64),
    )

    def sampler(draw: Any) -> dict[str, torch.Tensor]:
        size = draw.size()
        return {"x": draw.tensor(size), "index": draw.indices(draw.size(), below=size + 1)}

    verdict = verify(rule, sampler=sampler, terminates=False)
    assert verdict.counterexample is not None
    assert verdict.counterexample.difference.kind == "raises"
    ran = execute(verdict.counterexample.snippet)
    assert isinstance(ran["expected"], (IndexError, RuntimeError))
    assert isinstance(ran["found"], tuple)
    assert len(ran["inputs"]()[0]) == 1, "a sampler is asked again for smaller sizes"


def test_errors_before_and_after_are_equal() -> None:
    rule = rule_of(
        torch.index_select(torch.neg(X), 0, cap("index")), lambda x, index: torch.index_select(x, 0, index) * -1
    )

    def sampler(draw: Any) -> dict[str, torch.Tensor]:
        return {"x": draw.tensor(3), "index": draw.indices(2, below=4)}

    verdict = verify(rule, sampler=sampler)
    assert verdict.ok, str(verdict)
    assert 0 < verdict.raised < verdict.samples
    always = verify(rule, sampler=lambda draw: {"x": draw.tensor(1), "index": torch.tensor([5])}, samples=4)
    assert always.error == "the original raises on every sample: write a sampler"


def test_a_rule_that_is_false_of_complex_numbers_is_caught_unless_it_excludes_them() -> None:
    pattern = op("mul", op("conj", X), 2)
    false = verify(rule_of(pattern, lambda x: x * 2), samples=8)
    assert "(2-2j) became (2+2j)" in str(false)
    assert 'where=["dtype(x) in {float16, bfloat16, float32, float64}"]' in str(false)
    assert verify(rule_of(pattern, lambda x: x * 2, where.dtype("x", torch.float32)), samples=8).ok
    true = verify(rule_of(pattern, lambda x: torch.conj(x * 2)), samples=8)
    assert true.ok
    assert true.remarks == ("tested on 1 samples of complex numbers too",)


def test_strides_are_a_remark_unless_they_are_asked_for() -> None:
    rule = rule_of(torch.neg(X), lambda x: torch.clone(x * -1, memory_format=torch.contiguous_format))
    verdict = verify(rule)
    assert verdict.ok
    assert verdict.remarks[0].startswith("allowed, on ")
    assert "strides: output 0: " in verdict.remarks[0]
    strict = verify(rule, strides=True).counterexample
    assert strict is not None
    assert strict.difference.kind == "strides"
    ran = execute(strict.snippet)
    assert ran["expected"][0].stride() != ran["found"][0].stride()


@pytest.mark.parametrize(
    ("rule", "printed"),
    [
        (FALSE["a gradient that is cut off"][1], "random_gradients(rewritten, inputs())"),
        (in_a_detail("a gradient beside an operand that has none"), "random_gradients(rewritten, inputs(), of=[1])"),
    ],
    ids=["of all operands", "beside an operand that has none"],
)
def test_a_gradient_that_is_wrong_is_printed(rule: Rule, printed: str) -> None:
    counterexample = rule.verify().counterexample
    assert counterexample is not None
    assert printed in counterexample.snippet
    ran = execute(counterexample.snippet)
    assert ran["expected"][0].item() != ran["found"][0].item()


def test_a_replacement_that_raises_is_a_difference() -> None:
    rule = rule_of(torch.neg(X), lambda match, x: torch.neg(x) if match["x"].meta["val"].shape[1] >= 0 else x)
    verdict = verify(rule, terminates=False)
    assert verdict.counterexample is not None
    assert verdict.counterexample.difference.kind == "invalid"
    assert "the replacement raised IndexError" in verdict.counterexample.difference.text
    assert "found" not in execute(verdict.counterexample.snippet)


def test_a_constraint_that_raises_is_a_difference() -> None:
    broken = where.predicate("root", text="broken")(lambda root: root.nothing)
    verdict = verify(rule_of(torch.neg(X), lambda x: x * -1, broken))
    assert verdict.counterexample is not None
    assert "constraint broken(root) raised AttributeError" in verdict.counterexample.difference.text


@declare_pure
def accurate(x: torch.Tensor) -> torch.Tensor:
    return torch.sum(x.double(), -1).to(x.dtype)


def test_rounding_is_told_from_error_in_a_finer_dtype() -> None:
    """A sum that cancels is beyond any bound in float32, and right in float64."""
    rule = rule_of(
        torch.sum(X, -1), lambda match, x: match.call(accurate, x), where.rank("x", 1), numerics="reassociates"
    )

    def cancelling(draw: Any) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([1.0, 1e8, 1.0, -1e8], dtype=draw.dtype)}

    assert verify(rule, sampler=cancelling, dtypes=["float32"], samples=4, grad=False, tolerance=1e-12).ok
    wrong = rule_of(torch.sum(X, -1), lambda x: torch.sum(x, -1) * 1.001 + 0, where.rank("x", 1))
    verdict = verify(wrong, numerics="reassociates", terminates=False)
    assert verdict.counterexample is not None
    assert verdict.counterexample.difference.kind == "value"
    assert verify(wrong, numerics="approximate", tolerance=1e-2, terminates=False).ok


def test_a_rewrite_that_leaves_a_malformed_graph() -> None:
    def change(graph: fx.Graph) -> int:
        first, second = calls(graph)
        first.args, second.args = (second,), (first,)
        return 1

    pattern = rule_of(aten.neg.default(aten.abs.default(X)), lambda x: x).pattern
    verdict = verify_rewrite("test.cycle", pattern, lambda gm: change(gm.graph), samples=4)
    assert verdict.counterexample is not None
    assert verdict.counterexample.difference.text.startswith("the graph is malformed: ")


def test_an_input_that_is_written_to() -> None:
    def write(graph: fx.Graph) -> int:
        calls(graph)[0].target = aten.relu_.default
        return 1

    pattern = rule_of(torch.relu(X), lambda x: x).pattern
    verdict = verify_rewrite("test.write", pattern, graph_rewrite(write), samples=8, terminates=False)
    assert verdict.counterexample is not None
    assert verdict.counterexample.difference.kind == "mutation"


def test_outputs_that_get_lost() -> None:
    def drop(graph: fx.Graph) -> int:
        output = graph.output_node()
        output.args = (output.args[0][:1],)  # pyright: ignore[reportIndexIssue, reportArgumentType, reportOptionalSubscript]
        return 1

    pattern = rule_of((torch.sin(X), torch.cos(X)), lambda x: (x, x)).pattern
    verdict = verify_rewrite("test.drop", pattern, graph_rewrite(drop), samples=4)
    assert verdict.counterexample is not None
    assert verdict.counterexample.difference.kind == "outputs"


def test_a_rule_that_may_draw_other_numbers_is_compared_in_shape() -> None:
    rule = rule_of(
        torch.dropout(torch.dropout(X, 0.5, True), 0.5, True), lambda x: torch.dropout(x, 0.75, True), rng="changes"
    )
    verdict = verify(rule)
    assert verdict.ok
    assert verdict.drawn > verdict.samples // 2  # nothing is drawn where a tensor is empty
    assert "the rule may draw other numbers" in str(verdict)


def test_a_rule_that_refuses_every_match_says_why_and_stops_early() -> None:
    def never(x: Any) -> Any:
        refuse("not this one")

    verdict = verify(rule_of(torch.sigmoid(X), never), samples=4)
    assert verdict.error.startswith("no sample is rewritten, 32 matches are refused: ")
    assert "not this one" in verdict.error


def ignores_another(x, t):
    return F.cross_entropy(x, t, ignore_index=-1)


def forgets_the_logarithm(x, t):
    return F.cross_entropy(x, t) if t.dtype.is_floating_point else F.nll_loss(x.softmax(1), t)


def is_special_at_a_number(x, slope):
    return torch.relu(x) if slope == 0.2 else F.leaky_relu(x, slope)


def forgets_later_items(first, rest, dim):
    return torch.cat([*(torch.relu(x) for x in (first, *rest)[:4]), *rest[3:]], dim)


def loss(x, t):
    return F.cross_entropy(x, t)


def leaky(x, slope: Literal):
    return F.leaky_relu(x, slope)


def of_a_list(first, rest, dim: Literal):
    return torch.relu(torch.cat([first, *rest], dim))


@pytest.mark.parametrize(
    ("pattern", "replacement", "options"),
    [
        (loss, ignores_another, {}),
        (loss, forgets_the_logarithm, {}),
        (leaky, is_special_at_a_number, {}),
        (of_a_list, forgets_later_items, {"where": ["same_dtype(first, rest)", "dtype(first) in {float32, float64}"]}),
    ],
)
def test_classes_named_literals_and_long_lists_are_drawn(pattern: Any, replacement: Any, options: Any) -> None:
    it = rule("test.it", numerics="approximate", terminates=False, **options)(pattern)
    it.replacement(replacement)
    assert it.verify(samples=64).counterexample is not None
