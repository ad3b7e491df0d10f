"""Rules that are true pass, with every alternative met, and the verdict says on what they were tested."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import (
    Literal,
    Param,
    Pattern,
    Rule,
    RuleSet,
    cap,
    chain,
    either,
    loose,
    maybe,
    op,
    shared,
    siblings,
    where,
)
from fxrewrite.errors import RuleDefinitionError, VerificationError
from fxrewrite.ops import declare_pure
from fxrewrite.pattern import trace
from fxrewrite.torch_versions import CLAMP_PASSES_AT_BOUNDS
from fxrewrite.verify.build import Builder
from tests.verify.rules import rule_of, verify

aten = torch.ops.aten
X: Any = cap("x")
Y: Any = cap("y")
DIM: Any = cap("dim", Literal)
_WIDE = torch.float64

TRUE: dict[str, Rule] = {
    "silu": rule_of(X * torch.sigmoid(X), lambda x: F.silu(x), numerics="reassociates"),
    "relu twice": rule_of(torch.relu(torch.relu(X)), lambda x: torch.relu(x)),
    "maybe": rule_of(torch.neg(maybe(X + cap("bias"))), lambda x, bias: (x if bias is None else x + bias) * -1),
    "either": rule_of(
        either(torch.pow(X, 2), torch.square(X), X * X),
        lambda x: torch.addcmul(torch.zeros_like(x), x, x),
        numerics="reassociates",
    ),
    "a captured dimension": rule_of(torch.flip(torch.flip(X, [DIM]), [DIM]), lambda x: x),
    "a reduction": rule_of(
        torch.sum(X, DIM, keepdim=True) / cap("n", Literal),
        lambda match, x, dim, n: torch.sum(x / n, dim, keepdim=True),
        where.predicate("n", text="is_a_power_of_two")(lambda n: n in (1, 2, 4, 8)),
        numerics="reassociates",
    ),
    "the same gradient at a bound": rule_of(
        torch.clamp(X, max=1),
        lambda x: torch.where(x <= 1 if CLAMP_PASSES_AT_BOUNDS else x < 1, x, 1.0),
        numerics="reassociates",
        domain="finite",
    ),
    "a bound that is rounded": rule_of(
        torch.clamp(X * 0.3, max=0.9),
        lambda x: torch.clamp(x, max=3.0) * 0.3,
        where.dtype("x", torch.float32, torch.bfloat16),
        numerics="reassociates",
        domain="moderate",
    ),
    "a rounding of what is rounded": rule_of(
        torch.round(X / 0.1), lambda x: torch.round(x * 10.0), numerics="reassociates", domain="finite"
    ),
    "a norm that is folded": rule_of(
        aten.batch_norm(aten.conv2d(X, Y, cap("b")), cap("g"), cap("s"), cap("m"), cap("v"), False, 0.1, 1e-5, True),
        lambda x, y, b, g, s, m, v: F.conv2d(
            x, y * (g * (v + 1e-5).rsqrt())[:, None, None, None], (b - m) * g * (v + 1e-5).rsqrt() + s
        ),
        where.rank("x", 4),
        numerics="approximate",
        domain="moderate",
    ),
    "any of the largest": rule_of(
        op("topk", X, 1)[0],
        lambda x: torch.sort(x, -1, descending=True)[0][..., :1],
        where.size("x", -1, ">", 0),
        numerics="reassociates",
        domain="finite",
    ),
    "a finer cast": rule_of(
        op("to", op("to", X, torch.bfloat16), torch.float32),
        lambda x: x.to(torch.float16).to(torch.float32),
        where.dtype("x", torch.float32),
        numerics="reassociates",
        domain="moderate",
    ),
    "an operand that the original rounds first": rule_of(
        torch.matmul(X, op("to", Y, torch.bfloat16)),
        lambda x, y: torch.matmul(y.to(torch.bfloat16).transpose(0, 1), x.transpose(0, 1)).transpose(0, 1),
        where.dtype("x", torch.bfloat16),
        where.dtype("y", torch.float32),
        where.rank("x", 2),
        where.rank("y", 2),
        numerics="reassociates",
        domain="finite",
    ),
    "linear": rule_of(
        op("linear", X, cap("w", Param), cap("b", Param)),
        lambda x, w, b: torch.matmul(x, torch.transpose(w, 0, 1)) + b,
        where.rank("w", 2),
        numerics="reassociates",
    ),
    "a view and back": rule_of(
        op("reshape", op("reshape", X, ...), cap("shape", "any")), lambda x, shape: torch.reshape(x, shape)
    ),
    "constraints": rule_of(
        torch.cat([X, Y], 1),
        lambda x, y: torch.cat([x.transpose(0, 1), y.transpose(0, 1)], 0).transpose(0, 1),
        where.rank("x", 2),
        where.shape_eq("x", "y"),
        where.divisible("x", 1, 4),
        where.dtype("x", torch.float32),
        where.same_dtype("x", "y"),
    ),
    "two outputs": rule_of((torch.sin(X), torch.cos(X)), lambda x: (torch.sin(x), torch.cos(x))),
    "siblings": rule_of(siblings(op("add", X, cap("y")), on="x"), lambda x, y: tuple(torch.add(x, each) for each in y)),
    "a chain": rule_of(
        torch.relu(chain(X, "neg", "abs", least=1, most=2)), lambda match: torch.relu(match.proxy(match.root.args[0]))
    ),
    "shared": rule_of(torch.exp(shared(torch.neg(X))), lambda x: torch.exp(torch.neg(x))),
    "loose": rule_of(
        torch.neg(loose(op("clamp", X))), lambda match: torch.neg(match.proxy(match.root.all_input_nodes[0]))
    ),
    "dropout that does not draw": rule_of(torch.dropout(X, cap("p", Literal), False), lambda x: x),
    "better than its pattern": rule_of(torch.log(1 + X), lambda x: torch.log1p(x), numerics="reassociates"),
    "indices in range": rule_of(
        op("embedding", cap("w"), Y),
        lambda match, w, y: match.call(aten.index.Tensor, w, [torch.clamp(y, 0, match["w"].meta["val"].shape[0] - 1)]),
        where.size("w", 0, ">", 0),
    ),
    "indices that may not be negative": rule_of(
        op("index_select", X, 0, Y),
        lambda match, x, y: match.call(aten.index.Tensor, x, [y]),
        where.rank("x", 2),
        where.rank("y", 1),
    ),
    "float32 inside of float64": rule_of(
        op("to", op("to", X, torch.float32) * torch.rsqrt(torch.mean(op("to", X, torch.float32) ** 2) + 1e-6), _WIDE),
        lambda x: (x.float() / torch.sqrt(torch.mean(torch.square(x.float())) + 1e-6)).double(),
        where.dtype("x", torch.float64),
        where.size("x", -1, ">", 0),
        numerics="reassociates",
        domain="finite",
    ),
    "a cast and back": rule_of(
        op("to", op("to", X, torch.float32), torch.bfloat16), lambda x: x, where.dtype("x", torch.bfloat16)
    ),
    "attention that saturates": rule_of(
        torch.matmul(torch.softmax(torch.matmul(X, Y), -1), cap("v")),
        lambda x, y, v: F.scaled_dot_product_attention(x, y.transpose(-1, -2), v, scale=1.0),
        *(where.rank(name, 2) for name in "xyv"),
        where.same_dtype("x", "y", "v"),
        where.size("y", 0, ">", 0),
        where.size("v", 0, ">", 0),
        numerics="approximate",
        domain="finite",
    ),
}
ENDLESS = {"two outputs", "siblings", "a chain", "shared", "loose"}
"""They rewrite to what they match: one application is what is tested."""


@pytest.mark.parametrize("name", sorted(TRUE.keys() - ENDLESS))
def test_a_true_rule_passes(name: str) -> None:
    verdict = verify(TRUE[name], samples=32, domain=TRUE[name].domain)
    assert verdict.ok, str(verdict)
    assert not verdict.raised
    assert verdict.samples >= 32
    assert not verdict.uncovered
    assert verdict.gradients > 10
    verdict.raise_if_false()


def test_bits_of_complex_numbers_that_are_not_numbers() -> None:
    it = rule_of(torch.conj(torch.conj(X)), lambda x: torch.ops.aten.alias(x), where.dtype("x", torch.complex64))
    assert verify(it, samples=32).ok
    of_zeros = rule_of(
        torch.conj_physical(X), lambda x: torch.complex(x.real, 0.0 - x.imag), where.dtype("x", torch.complex64)
    )
    assert "-0j" in str(verify(of_zeros, samples=32))


@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_a_rule_that_keeps_firing_is_endless(name: str) -> None:
    verdict = verify(TRUE[name], samples=8)
    assert verdict.counterexample is not None
    assert verdict.counterexample.difference.kind == "endless"
    assert verify(TRUE[name], samples=16, terminates=False).ok


def test_a_rule_whose_second_application_is_refused_ends() -> None:
    """A plan refuses to join the linear that the rule made with itself."""

    def joined(x: Any, q: Any, k: Any) -> tuple[Any, ...]:
        parts = torch.split(F.linear(x, torch.cat([q, k])), [q.shape[0], k.shape[0]], -1)
        return parts[0], parts[1]

    q, k = cap("q"), cap("k")
    are_matrices = (where.rank("q", 2), where.rank("k", 2), where.same_dtype("q", "k"))
    pattern = Pattern((op("linear", X, q), op("linear", X, k)), are_matrices)
    verdict = Rule("test.joined", pattern, joined, numerics="approximate", domain="moderate").verify(samples=16)
    assert verdict.ok, str(verdict)


def test_a_rule_that_says_it_is_endless_passes_and_has_no_fixpoint() -> None:
    split = Rule(
        "sums.split", Pattern((op("sum", X),)), lambda x: torch.sum(torch.reshape(x, [-1])),
        numerics="reassociates", terminates=False,
    )  # fmt: skip
    assert split.verify(samples=8).ok
    assert "endless" in str(Rule("sums.split", split.pattern, split.body, numerics="reassociates").verify(samples=8))
    with pytest.raises(RuleDefinitionError, match=r"set s has no fixpoint: sums.split fires on its own results"):
        RuleSet("s", split).fixpoint()


def test_gradients_that_a_rule_does_not_keep_are_not_compared_and_not_given_up() -> None:
    detach = Rule("signs.detach", Pattern((op("neg", X),)), lambda x: torch.mul(x.detach(), -1), gradients=False)
    verdict = detach.verify(samples=8)
    assert verdict.ok, str(verdict)
    assert verdict.gradients == 0
    for requires in (False, True):
        gm = fx.symbolic_trace(lambda x: torch.neg(x))
        x, neg, _ = gm.graph.nodes
        for node in (x, neg):
            node.meta["val"] = torch.empty(3, requires_grad=requires)
        report = RuleSet("s", detach).apply(gm)
        assert report.rewrites == (not requires)
        assert [r.reason for r in report.refusals] == [
            "gradients are needed here, and the rule keeps none (gradients=False)"
        ] * requires


def test_the_verdict_says_what_was_tested_and_never_that_it_is_proved() -> None:
    verdict = verify(TRUE["maybe"])
    assert verdict.variants == (
        "maybe(add(x, bias)): taken",
        "maybe(add(x, bias)): left out",
        "add(x, bias): as written",
        "add(x, bias): operands swapped",
    )
    text = str(verdict)
    assert text.startswith("test.rule: tested on 64 samples, no difference\n  gradients compared on ")
    assert "4 of 4 alternatives of the pattern were met" in text
    assert "prove" not in text


@declare_pure
def scaled(x: torch.Tensor, *, by: float) -> torch.Tensor:
    return x * by


def test_an_argument_that_has_to_be_named_is_named_in_samples() -> None:
    verdict = verify(rule_of(op(scaled, X, by=2.0), lambda x: x * 2.0), samples=8)
    assert verdict.ok, str(verdict)


def of_ones(draw: Any) -> dict[str, Any]:
    return {"x": torch.ones(2, dtype=draw.dtype)}


def infinite(draw: Any) -> dict[str, Any]:
    return {"x": torch.full((2,), -torch.inf, dtype=draw.dtype)}


ANOTHER_DROPOUT = rule_of(torch.dropout(X, 0.5, True), lambda x: torch.dropout(x, 0.5, True) * 1, rng="changes")
ANOTHER_ARGMAX = rule_of(torch.argmax(X), lambda x: torch.argmax(x) * 1)


@pytest.mark.parametrize(
    ("rule", "sampler", "why_not"),
    [
        (TRUE["relu twice"], infinite, "some inputs are not finite"),
        (ANOTHER_DROPOUT, of_ones, "the rule may draw other numbers"),
        (ANOTHER_ARGMAX, of_ones, ""),
        (TRUE["relu twice"], of_ones, ""),
    ],
    ids=["an infinite input", "random numbers", "an original that is not differentiable", "they were compared"],
)
def test_the_verdict_says_why_gradients_were_not_compared(rule: Rule, sampler: Any, why_not: str) -> None:
    verdict = verify(rule, sampler=sampler, samples=8, terminates=False)
    assert verdict.ok, str(verdict)
    assert verdict.ungraded == why_not
    said = f", but gradients were not compared: {why_not}" if why_not else ""
    assert str(verdict).startswith(f"test.rule: tested on 8 samples, no difference{said}\n")


def test_an_operator_without_a_derivative_of_complex_numbers_is_a_remark_unless_the_rule_is_for_them() -> None:
    verdict = verify(TRUE["silu"])
    assert verdict.ok, str(verdict)
    assert "the rewritten graph raises in its backward: RuntimeError: silu does not support" in verdict.remarks[-1]
    of_complex = rule_of(X * torch.sigmoid(X), TRUE["silu"].body, where.dtype("x", torch.complex64))
    verdict = verify(of_complex, numerics="approximate", domain="moderate")
    assert "gradient: the rewritten graph raises RuntimeError in its backward: silu does not" in str(verdict)


def test_an_operand_without_a_derivative_is_named_and_the_gradients_of_others_are_compared() -> None:
    normed = F.batch_norm(X, cap("mean"), cap("var"), None, None, False, 0.1, 1e-5)
    conditions = [where.rank("x", 2), where.same_dtype("x", "mean", "var"), where.size("x", 0, ">", 0)]
    for name in ("mean", "var"):
        conditions += [where.rank(name, 1), where.parse(f"size({name}, 0) == size(x, 1)")]
    rule = rule_of(normed, lambda x, mean, var: (x - mean) * torch.rsqrt(var + 1e-5), *conditions)
    verdict = verify(rule, numerics="approximate", domain="moderate", samples=16)
    assert verdict.ok, str(verdict)
    assert verdict.gradients > 8
    assert "no gradient of mean, var: torch has no derivative of the original there" in verdict.remarks


def drawn(**options: Any) -> list[torch.Tensor]:
    """The inputs on which a true rule is run."""
    seen: list[torch.Tensor] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.extend(inputs)
        return list(gm(*inputs))

    verify(TRUE["relu twice"], run=keep, **options)
    return seen


def test_half_of_the_samples_hold_fewer_sizes_than_dimensions_and_some_are_strided() -> None:
    seen = drawn(samples=64, grad=False)
    assert {tensor.ndim for tensor in seen} >= {0, 1, 2, 3}
    assert {size for tensor in seen for size in tensor.shape} >= {1, 2, 3, 5}
    assert {tensor.dtype for tensor in seen} == {torch.float32, torch.float64, torch.bfloat16}
    assert any(not tensor.is_contiguous() for tensor in seen)
    assert any(0 in tensor.stride() for tensor in seen)
    assert any(tensor.isnan().any() for tensor in seen)
    assert any(tensor.isinf().any() for tensor in seen)
    assert any((tensor == 0).all() for tensor in seen)
    assert any(max(tensor.shape, default=0) >= 40 for tensor in seen), "a long dimension"
    assert any(not tensor.numel() for tensor in seen), "an empty tensor"
    greatest = [tensor[tensor.isfinite()].abs().max().item() for tensor in seen if tensor.isfinite().any()]
    assert {100, 10_000, 900_000} <= {bound for bound in (100, 10_000, 900_000) if any(m > bound for m in greatest)}
    assert any(0 < m < 10 for m in greatest), "most are moderate"


def test_the_gradient_of_a_norm_of_one_entry_is_zero_but_for_rounding() -> None:
    normed = F.layer_norm(X, [X.shape[-1]])
    rule = rule_of(
        normed * cap("w") + cap("b"),
        lambda x, w, b: F.layer_norm(x, [x.shape[-1]], w, b),
        where.dtype("x", torch.float32),
        where.same_dtype("x", "w", "b"),
        *(where.parse(f"rank({name}) == 1") for name in "xwb"),
        *(where.parse(f"size({name}, 0) == size(x, 0)") for name in "wb"),
        where.size("x", 0, ">", 0),
        numerics="approximate",
    )
    verdict = verify(rule, domain="moderate")
    assert verdict.ok, str(verdict)
    assert any("gradient: gradient of " in remark for remark in verdict.remarks)


def test_moderate_values_are_finite_and_small() -> None:
    seen = drawn(samples=64, grad=False, domain="moderate", constants=[0.5, 5.0, 100.0])
    assert any((tensor == 5).any() for tensor in seen), "numbers that the code names"
    assert all(tensor.abs().max() < 10 for tensor in seen if tensor.numel())


PROGRAM = """
import torch
from tests.verify.test_true_rules import TRUE
from tests.verify.rules import verify
def keep(gm, inputs):
    print([(tuple(x.shape), x.stride(), str(x.dtype), x.double().sum().item()) for x in inputs], gm.code)
    return list(gm(*inputs))
print(verify(TRUE["maybe"], samples=12, run=keep, grad=False))
"""


def test_the_same_seed_gives_the_same_samples_in_every_process() -> None:
    def output(hash_seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    first, second = output("1"), output("2")
    assert first.count("def forward") == 2 * (12 + 1)  # before and after; one is of complex numbers
    assert first == second


def test_another_seed_gives_other_samples() -> None:
    first, second = ([x.shape for x in drawn(samples=16, seed=seed)] for seed in (0, 1))
    assert first != second


def test_a_rule_of_five_nodes_takes_seconds() -> None:
    verify(TRUE["silu"], samples=4)  # what torch loads when it is first used
    start = time.process_time()
    rule = rule_of(X * 0.5 * (1 + torch.erf(X * 0.7071067811865476)), lambda x: F.gelu(x), numerics="reassociates")
    assert verify(rule, domain="finite").ok
    assert time.process_time() - start < 15  # about one


def test_no_sample_is_an_error_that_says_how_near_it_came() -> None:
    never = where.predicate("x", text="never")(lambda x: "it is never so")
    verdict = verify(rule_of(torch.relu(torch.relu(X)), lambda x: torch.relu(x), never), samples=2)
    assert not verdict.ok
    assert verdict.samples == 0
    assert "no sample matches: write a sampler; nearest miss: relu(x): NoSampleError: never(x) does not hold" in str(
        verdict
    )
    with pytest.raises(VerificationError, match="no sample matches"):
        verdict.raise_if_false()


@pytest.mark.parametrize(
    ("term", "why"),
    [
        (op(torch.nn.Linear, X), "Linear is a module, of which no samples are made; test the rule on the functions"),
        (op("cat", op("split", X, 2)), r"a graph of ATen overloads has a list as tensors of aten::cat; to match the"),
    ],
)
def test_a_pattern_of_which_no_graph_can_be_made_is_given_up_at_once(term: Any, why: str) -> None:
    verdict = verify(rule_of(term, lambda x: torch.relu(x)), samples=4)
    assert "no sample can be made: " in verdict.error
    assert why in verdict.error
    assert "0 of 4 samples were found among 4 graphs" in verdict.remarks


def test_a_pattern_that_no_graph_matches_is_given_up() -> None:
    never = where.predicate("x", text="never")(lambda x: "it is never so")
    verdict = verify(rule_of(torch.relu(X), lambda x: torch.relu(x), never), samples=64)
    assert "0 of 64 samples were found among 400 graphs" in verdict.remarks


@pytest.mark.parametrize(
    "term",
    [
        op("layer_norm", X, [cap("d", Literal)], cap("w"), cap("b")),
        op("conv2d", X, cap("w"), cap("b"), *(cap(name, Literal) for name in ("s", "p", "d", "g"))),
        op("avg_pool2d", X, *(cap(name, Literal) for name in ("k", "s", "p"))),
    ],
    ids=["layer_norm", "conv2d", "avg_pool2d"],
)
def test_arguments_that_depend_on_each_other_are_guessed(term: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0
    attempt = Builder._attempt

    def counted(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        return attempt(*args)

    monkeypatch.setattr(Builder, "_attempt", counted)
    same = rule_of(term, lambda match: match.call(match.root.target, *match.root.args, **match.root.kwargs))
    verdict = verify(same, terminates=False)
    assert verdict.ok, verdict
    assert tries < 25 * verdict.samples  # else 200 and more


def test_items_of_variadic_arguments_are_given_by_position() -> None:
    def total(*values: Any, scale: float = 1.0) -> Any:
        return sum(values) * scale

    sys.modules[__name__].total = total  # pyright: ignore[reportAttributeAccessIssue]
    total.__qualname__ = "total"
    assert verify(rule_of(op(total, X, cap("y")), lambda x, y: x + y), samples=4).ok


def test_what_the_verdict_says_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    verdict = verify(rule_of(torch.relu(X), lambda x: torch.relu(x).view(-3)), samples=2)
    assert "the replacement raised RuntimeError" in str(verdict.counterexample)
    assert not caplog.records


def test_a_verdict_says_why_most_matches_are_refused() -> None:
    def body(x: Any, dim: int) -> Any:
        return torch.unsqueeze(x.relu(), dim if dim >= 0 else dim + x.ndim)  # it forgets to add 1

    pattern = Pattern((op("unsqueeze", op("relu", X), cap("dim", Literal)),))
    verdict = Rule("views.unsqueeze", pattern, body, shapes="preserves", terminates=False).verify(samples=8)
    assert verdict.ok
    assert "refused most often: views.unsqueeze: the replacement gives float" in str(verdict)


def test_an_alternative_that_is_never_met_is_an_error_unless_there_is_a_sampler() -> None:
    no_bias = where.predicate("bias", text="no_bias")(lambda bias: False)
    rule = rule_of(
        torch.relu(torch.relu(maybe(X + cap("bias")))), lambda match: torch.relu(match.proxy(match["x"])), no_bias
    )
    verdict = verify(rule, samples=8)
    assert verdict.uncovered == (
        "maybe(add(x, bias)): taken",
        "add(x, bias): as written",
        "add(x, bias): operands swapped",
    )
    assert "3 alternatives were never met" in verdict.error
    assert verify(rule, samples=8, sampler=lambda draw: {"x": draw.tensor(draw.size())}).ok


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="'int64' is not a floating-point or complex dtype"):
        verify(TRUE["silu"], dtypes=["int64"])
    assert verify(TRUE["silu"], dtypes=[torch.float64], samples=2).ok
    for wrong, message in (
        ({"samples": 0}, "samples=0 is not a number of samples, 1 or more"),
        ({"samples": "3"}, "samples='3' is not a number of samples"),
        ({"dtypes": "float32"}, "dtypes='float32' is not a list of a dtype or more; write"),
        ({"dtypes": []}, r"dtypes=\[\] is not a list of a dtype or more"),
        ({"domain": "alll"}, "domain='alll' is not one of 'all', 'finite', 'moderate'"),
        ({"run": 3}, "run=3 is not a function of a graph module and its inputs"),
        ({"tolerance": "x"}, "tolerance='x' is not a relative error, 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            verify(TRUE["silu"], **wrong)
    with pytest.raises(ValueError, match=r"the sampler gives \['z'\], the pattern captures \['x'\]"):
        verify(TRUE["silu"], sampler=lambda draw: {"z": 1})


def test_results_of_eight_bits_may_be_some_steps_off_where_a_tolerance_says_so() -> None:
    def twice(x):
        return torch.clamp(torch.round(torch.round(x * 4) / 2 * 3), -128, 127).to(torch.int8)

    once = Rule(
        "a.once",
        trace(twice, ["dtype(x) in {float32}"]),
        lambda x: torch.clamp(torch.round(x * 6), -128, 127).to(torch.int8),
        numerics="approximate",
        domain="moderate",
        gradients=False,
    )
    assert not once.verify(samples=32).ok
    assert not once.verify(samples=32, tolerance=0.001).ok
    assert once.verify(samples=32, tolerance=0.02).ok
