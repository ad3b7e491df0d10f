"""Rules over redistributions are tested on simulated ranks by default, on inputs placed as the pattern needs them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from fxrewrite import Pattern, Rule, cap, op, where
from fxrewrite.pattern.combinators import Literal
from fxrewrite.spmd import COLLECTIVE_RULES, Partial, Replicate, Shard, redistribute
from fxrewrite.spmd.lower.bundles import bundle
from fxrewrite.spmd.lower.collectives import moves, redistribution


def moved(x: Any, src: str, dst: str) -> Any:
    return op(redistribute, x, cap(src, Literal), cap(dst, Literal), cap("axis", Literal))


TWICE = moved(moved(cap("x"), "src", "mid"), "mid", "dst")
PRODUCT = moved(op("mm", cap("x"), cap("w")), "src", "dst")
RETURNS = where.predicate("src", "dst", text="returns")(lambda src, dst: src == dst)
ROWS = where.predicate("src", text="rows")(lambda src: src.dim == 0)
GATHERS, SUMS = moves(Shard, Replicate), moves(Partial, Replicate)


def relu_first(x: Any, src: Any, dst: Any, axis: Any) -> Any:
    return redistribute(x.relu(), src, dst, axis)


def sent_wide(x: Any, src: Any, dst: Any, axis: Any) -> Any:
    """The sample has no operator of ATen, which would say that methods are to be overloads."""
    return redistribute(x.to(torch.float64), src, dst, axis).to(x.dtype)


def whole_rows(x: Any, w: Any, src: Any, dst: Any, axis: Any) -> Any:
    return redistribute(x, src, dst, axis) @ w


def scaled_first(factor: float) -> Any:
    return lambda x, src, dst, axis: redistribute(x * factor, src, dst, axis)


@pytest.mark.parametrize(
    ("pattern", "conditions", "replacement"),
    [
        (TWICE, (RETURNS,), lambda x: x),
        (op("relu", redistribution), (GATHERS,), relu_first),
        (op("mul", redistribution, 2.0), (SUMS,), scaled_first(2.0)),
        (PRODUCT, (GATHERS, ROWS), whole_rows),
        (redistribution, (GATHERS,), sent_wide),
    ],
)
def test_true(pattern: Any, conditions: Any, replacement: Any) -> None:
    settings: Any = {"numerics": "reassociates", "terminates": replacement is not sent_wide}
    verdict = Rule("true", Pattern((pattern,), conditions), replacement, **settings).verify(samples=6)
    assert verdict.ok, str(verdict)
    assert verdict.samples == 6
    assert verdict.gradients
    assert not verdict.raised


@pytest.mark.parametrize(
    ("pattern", "conditions", "replacement", "found"),
    [
        (redistribution, (SUMS,), lambda x: x, "%finish starts from R, and its operand is P(sum)"),
        (redistribution, (moves(Replicate, Shard),), lambda x: x, "and its operand is R"),
        (TWICE, (), lambda x: x, "and its operand is"),
        (op("relu", redistribution), (SUMS,), relu_first, "not linear in pending sums"),
        (op("mul", redistribution, 2.0), (SUMS,), scaled_first(3.0), "value: output 0"),
        (PRODUCT, (GATHERS,), whole_rows, "starts from S(1), and its operand is R"),
    ],
)
def test_false(pattern: Any, conditions: Any, replacement: Any, found: str) -> None:
    verdict = Rule("lie", Pattern((pattern,), conditions), replacement).verify(samples=24)
    assert not verdict.ok
    assert found in str(verdict)


def test_the_program_of_a_counterexample_runs_on_ranks() -> None:
    lie = Rule("lie", Pattern((op("mul", redistribution, 2.0),), (SUMS,)), scaled_first(3.0))
    counterexample = lie.verify(samples=24).counterexample
    assert counterexample is not None
    check = "assert isinstance(expected, list) and not all(map(torch.equal, expected, found))"
    done = subprocess.run(
        [sys.executable, "-c", f"{counterexample.snippet}\n{check}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rule", ["collectives.own_summand", "collectives.all_reduce"])
def test_what_lowers_a_redistribution_is_told_where_to_be_tested(rule: str) -> None:
    (found,) = (each for each in COLLECTIVE_RULES.rules() if each.id == rule)
    verdict = found.verify(samples=1)
    assert not verdict.ok
    assert verdict.counterexample is None, "the rule is true"
    assert "it is for graphs whose shapes are local" in str(verdict)


def test_a_rule_on_a_placeholder_that_nobody_can_run_is_not_tested_on_one_device() -> None:
    rule = Rule("lie", Pattern((op(bundle, cap("values")),)), lambda values: values)
    assert "on one device bundle is only a placeholder" in str(rule.verify(samples=1))
