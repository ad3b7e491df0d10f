"""A false rule is told the constraints with which it is true, each of them needed."""

import ast
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from fxrewrite import Literal, Rule
from fxrewrite.pattern import trace
from fxrewrite.verify import Verdict

SAMPLES = 32


def rule(pattern: Callable, replacement: Callable, where: tuple[str, ...] = (), **promises: str) -> Rule:
    return Rule("a.rule", trace(pattern, where), replacement, **promises)


def proposed(verdict: Verdict) -> tuple[tuple[str, ...], dict[str, str]]:
    """The constraints and the promises that a verdict proposes."""
    assert not verdict.ok
    line = str(verdict).split("It is true, on 32 samples, with\n")[1].partition("\n")[0]
    where = re.search(r"where=(\[.*?\])(;|,|$)", line)
    promises = dict(re.findall(r'(numerics|domain)="(\w+)"', line))
    return tuple(ast.literal_eval(where[1])) if where else (), promises


def rms(x, w, eps: Literal):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


RULES = {
    "addmm": (lambda x, w, b: x @ w + b, lambda x, w, b: torch.addmm(b, x, w), (), {"numerics": "approximate"}),
    "one stated": (
        lambda x, w, b: x @ w + b,
        lambda x, w, b: torch.addmm(b, x, w),
        ("rank(x) == 2",),
        {"numerics": "approximate"},
    ),
    "vecdot": (
        lambda x, y: torch.sum(x * y, -1),
        lambda x, y: torch.linalg.vecdot(x, y),
        (),
        {"numerics": "approximate"},
    ),
    "rms": (rms, lambda x, w, eps: F.rms_norm(x, (x.shape[-1],), w, eps), (), {"numerics": "approximate"}),
    "numerics": (lambda x: x * 3 / 3.5, lambda x: x * (3 / 3.5), ("dtype(x) in {float32}",), {}),
    "domain": (lambda x: x - x, lambda x: torch.zeros_like(x), ("dtype(x) in {float32}",), {}),
    "a number": (lambda x, n: x.clamp(min=n).relu(), lambda x, n: x.clamp(min=n), (), {}),
}
RULES["a number"][0].__annotations__["n"] = Literal


@pytest.mark.parametrize("name", RULES)
def test_with_what_is_proposed_it_is_true_and_without_any_of_it_false(name: str) -> None:
    pattern, replacement, stated, promises = RULES[name]
    verdict = rule(pattern, replacement, stated, **promises).verify(samples=SAMPLES)
    where, weaker = proposed(verdict)
    assert where[: len(stated)] == stated or not where
    where = where or stated
    assert len(where) > len(stated) or weaker
    assert rule(pattern, replacement, where, **promises | weaker).verify(samples=SAMPLES).ok
    for one in where[len(stated) :]:
        others = tuple(other for other in where if other != one)
        assert not rule(pattern, replacement, others, **promises | weaker).verify(samples=SAMPLES).ok, one


def test_nothing_is_proposed_for_what_is_wrong_everywhere() -> None:
    wrong = rule(lambda x: torch.relu(x) - x, lambda x: torch.relu(-x) * 1.001)
    assert "No constraints on ranks, dtypes, sizes and numbers were found that make it true" in str(wrong.verify())


def test_equal_rules_get_equal_proposals() -> None:
    pattern, replacement, _, promises = RULES["vecdot"]
    texts = {str(rule(pattern, replacement, **promises).verify(samples=SAMPLES)) for _ in range(2)}
    assert len(texts) == 1
