"""A sampler draws what cannot be guessed, and the rest is guessed; what it gives is never changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import Literal, Maybe, cap, functional, op, where
from fxrewrite.verify import Draw, Verdict
from tests.verify.rules import execute, rule_of, verify

aten = torch.ops.aten
LOSS: Any = aten.cross_entropy_loss(cap("logits"), cap("target"), cap("weight", Maybe), 2, -100, 0.0)
SUM_OF_LOGS = rule_of(
    LOSS,
    lambda logits, target, weight: F.nll_loss(F.log_softmax(logits, -1), target, weight, reduction="sum"),
    numerics="reassociates",
)


def classes(draw: Draw) -> dict[str, Any]:
    num_tokens, num_classes = draw.size(), draw.size()
    return {
        "logits": draw.tensor(num_tokens, num_classes),
        "target": draw.indices(num_tokens, below=num_classes),
        "weight": draw.choice(None, draw.tensor(num_classes)),
    }


def test_a_loss_needs_targets_that_are_classes() -> None:
    verdict = verify(SUM_OF_LOGS, sampler=classes)
    assert verdict.ok, str(verdict)
    assert verdict.raised == 0
    assert verdict.gradients > 20


def test_what_the_sampler_leaves_out_is_guessed() -> None:
    rule = rule_of(op("index_select", cap("x"), cap("dim", Literal), cap("index")), lambda x, dim, index: x * 0)
    seen: list[tuple[int, ...]] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.append(tuple(inputs[0].shape))
        return []

    verdict = verify(rule, sampler=lambda draw: {"index": torch.tensor([0])}, run=keep, samples=16)
    assert verdict.ok, str(verdict)
    assert len(set(seen)) > 4


def test_a_sampler_may_give_lists_literals_and_parameters() -> None:
    rule = rule_of(
        op("cat", cap("tensors", "any"), cap("dim", Literal)),
        lambda match, tensors, dim: torch.flip(torch.cat([torch.flip(x, [dim]) for x in tensors[::-1]], dim), [dim]),
        where.value("dim", "in", [0]),
    )

    def two(draw: Draw) -> dict[str, Any]:
        return {"tensors": [draw.tensor(draw.size(), 2), draw.tensor(draw.size(), 2)], "dim": 0}

    assert verify(rule, sampler=two, terminates=False).ok


def test_the_smallest_sizes_are_drawn_again() -> None:
    wrong = rule_of(LOSS, lambda logits, target, weight: F.nll_loss(logits, target, weight, reduction="sum"))
    verdict: Verdict = verify(wrong, sampler=classes)
    assert verdict.counterexample is not None
    ran = execute(verdict.counterexample.snippet)
    logits, target = ran["inputs"]()[:2]
    assert max(logits.shape) <= 2
    assert target.max() < logits.shape[1]
    assert str(ran["expected"]) != str(ran["found"])


def test_the_same_seed_draws_the_same() -> None:
    def drawn(seed: str) -> list[Any]:
        draw = Draw(seed, torch.float32)
        return [draw.size(), draw.shape(3), draw.integer(0, 99), draw.flag(), draw.choice(*"abc")]

    assert drawn("1") == drawn("1")
    assert len({str(drawn(str(seed))) for seed in range(9)}) == 9
    a, b = (Draw("7", torch.float32) for _ in range(2))
    assert torch.equal(a.tensor(3, 2).nan_to_num(), b.tensor(3, 2).nan_to_num())
    assert torch.equal(a.indices(9, below=4), b.indices(9, below=4))
    assert torch.equal(a.mask(9), b.mask(9))


def test_what_a_draw_makes_is_within_its_limits() -> None:
    for seed in range(50):
        draw = Draw(str(seed), torch.float64, most=2, domain="finite")
        assert max(draw.shape(4)) <= 2
        tensor = draw.tensor(2, 3)
        assert (tensor.dtype, tensor.shape) == (torch.float64, (2, 3))
        assert tensor.isfinite().all()
        assert draw.indices(5, below=3).max() < 3
        assert draw.mask(3).dtype == torch.bool


@torch.library.custom_op("tests_samplers::write_times", mutates_args=["out"])
def write_times(out: torch.Tensor, x: torch.Tensor, by: float) -> None:
    out.copy_(x * by)


def test_what_an_operator_writes_is_compared_where_the_graph_is_functional() -> None:
    written = op("neg", functional("tests_samplers::write_times", cap("out"), cap("x"), 0.5))

    def verdict_on(factor: float) -> Verdict:
        made = rule_of(written, lambda match, out, x: match.call(aten.copy.default, out, x * factor))
        return verify(made, samples=8, grad=False)

    verdict = verdict_on(-0.5)
    assert verdict.ok, str(verdict)
    assert len(verdict.variants) == 2  # both ways in which torch makes a graph functional
    verdict = verdict_on(3.0)
    assert not verdict.ok
    assert verdict.counterexample is not None
    ran = execute(verdict.counterexample.snippet)
    assert str(ran["expected"]) != str(ran["found"])


def test_wide_samples_show_what_a_sampler_hides() -> None:
    rule = rule_of(
        op("div", op("matmul", cap("x"), cap("y")), cap("divisor", Literal)),
        lambda x, y, divisor: torch.matmul(x * (1.0 / divisor), y),
        where.rank("x", 2),
        where.rank("y", 2),
        *(where.dtype(name, torch.float32, torch.float64, torch.bfloat16) for name in "xy"),
        numerics="reassociates",
        domain="moderate",
    )

    def divisors(draw: Draw) -> dict[str, Any]:
        rows, inner, columns = draw.shape(3)
        return {
            "x": draw.tensor(rows, inner),
            "y": draw.tensor(inner, columns),
            "divisor": draw.choice(8.0, -2.0),
        }

    options: dict[str, Any] = {"sampler": divisors, "domain": "moderate", "grad": False}
    assert verify(rule, **options).ok
    wide = verify(rule, wide=True, **options)
    assert "ZeroDivisionError" in str(wide), str(wide)


def test_wide_samples_are_at_times_of_integers_alone() -> None:
    """No tensor of integers has a product with one of other numbers: all of them are needed."""
    scores = op("softmax", op("matmul", cap("x"), cap("y")), -1, torch.float32)
    rule = rule_of(
        op("matmul", op("to", scores, cap("narrow", Literal)), cap("z")),
        lambda x, y, z, narrow: torch.matmul(torch.softmax(torch.matmul(x, y), -1), z),
        where.predicate("narrow", text="is_real")(
            lambda narrow: narrow == torch.float32 or not narrow.is_floating_point
        ),
        numerics="reassociates",
        domain="moderate",
    )

    def operands(draw: Draw) -> dict[str, Any]:
        size = draw.size()
        x, y, z = (draw.tensor(size, size) for _ in range(3))
        return {"x": x, "y": y, "z": z, "narrow": draw.dtype}

    options: dict[str, Any] = {"sampler": operands, "domain": "moderate", "dtypes": ["float32"]}
    narrow = verify(rule, **options)
    assert narrow.ok, str(narrow)
    wide = verify(rule, wide=True, **options)
    assert not wide.ok
    assert "int" in str(wide.counterexample), str(wide)


def test_wide_samples_leave_integers_with_a_meaning_alone() -> None:
    rule = rule_of(LOSS, SUM_OF_LOGS.body, where.rank("logits", 2), numerics="reassociates")
    verdict = verify(rule, sampler=classes, wide=True)
    assert verdict.ok, str(verdict)


def test_labels_of_1_are_not_measured_next_to_1() -> None:
    pattern = op("cosine_embedding_loss", cap("x"), cap("y"), cap("label"), 0.25, 1)
    narrow = rule_of(
        pattern,
        lambda x, y, label: aten.cosine_embedding_loss(x, y, label, 0.25, 1).to(torch.bfloat16).to(x.dtype),
        numerics="reassociates",
    )

    def pairs(draw: Draw) -> dict[str, Any]:
        rows, width = draw.shape(2)
        label = draw.choice(1.0, -1.0) * torch.ones(rows)
        return {"x": draw.tensor(rows, width), "y": draw.tensor(rows, width), "label": label}

    verdict = verify(narrow, sampler=pairs, dtypes=["float32"], terminates=False)
    assert verdict.counterexample is not None, str(verdict)
    assert verdict.counterexample.difference.kind == "value"


def test_attention_with_other_numbers_of_keys_and_values_is_never_run() -> None:
    """Its kernels for CPUs do not check it, and read memory that is not theirs."""
    rule = rule_of(
        op("scaled_dot_product_attention", cap("q"), cap("k"), cap("v")),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5),
        numerics="reassociates",
    )

    def sampler(draw: Draw) -> dict[str, Any]:
        return {"q": draw.tensor(1, 1, 2, 2), "k": draw.tensor(1, 1, 1, 2), "v": draw.tensor(1, 1, 3, 2)}

    verdict = verify(rule, sampler=sampler, samples=2)
    assert not verdict.samples
    assert "attention needs as many values as keys, not 3 for 1" in str(verdict)
