"""Lists of any length: `[first, *rest]` and `each(...)` in patterns, conditions, replacements, verification."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from fxrewrite import Literal, Pattern, Rule, RuleDefinitionError, each, either, maybe, op, shared, siblings, where
from fxrewrite.match import Match, Program, explain
from fxrewrite.pattern import cap, parse, trace
from fxrewrite.prove import prove
from fxrewrite.rule_file import dump_rules, parse_rules
from fxrewrite.verify import Draw
from tests.rewriting import apply, made, traced

X = torch.randn(2, 3)
relu, cat = torch.relu, torch.cat


def captured(pattern: Pattern, function: Any) -> list[dict[str, Any]]:
    """What each match captures, with names for nodes."""
    graph = fx.symbolic_trace(function).graph
    program = Program([("it", pattern)])
    found = [m for node, key in program.roots(graph.nodes) for _, m in program.find(node, key)]
    assert bool(explain(pattern, graph.nodes).num_matches) == bool(found)
    return [{name: _names(value) for name, value in match.captures.items() if name != "root"} for match in found]


def _names(value: Any) -> Any:
    return [_names(item) for item in value] if isinstance(value, list) else getattr(value, "name", value)


def views(x: Any, sizes: Literal) -> Any:
    return x.view(2, *sizes)


@pytest.mark.parametrize(
    ("pattern", "function", "expected"),
    [
        (lambda x, rest: cat([x, *rest]), lambda a, b, c: cat((a, b, c)), [{"x": "a", "rest": ["b", "c"]}]),
        (lambda x, rest: cat([*rest, x]), lambda a: cat([a]), [{"x": "a", "rest": []}]),
        (lambda x, rest: cat([x, *rest]), lambda a: cat(a), []),
        (lambda x, y, rest: cat([x, *rest, y]), lambda a: cat([a]), []),
        (
            lambda x, before, after: cat([*before, relu(x), *after]),
            lambda a, b: cat([relu(a), b, relu(b)]),
            [
                {"before": [], "x": "a", "after": ["b", "relu_1"]},
                {"before": ["relu", "b"], "x": "b", "after": []},
            ],
        ),
        (lambda: cat(each(lambda t: relu(t))), lambda a, b: cat([relu(a), relu(b)]), [{"t": ["a", "b"]}]),
        (lambda: cat(each(lambda t: relu(t))), lambda a, b: cat([relu(a), b]), []),
        (lambda t: cat(each(relu(t))), lambda a, b: cat([relu(a), relu(b)]), [{"t": ["a", "b"]}]),
        (lambda t: cat(each(relu(t))), lambda a: (cat([relu(a), y := relu(a)]), y), []),
        (lambda t: cat(each(shared(relu(t)))), lambda a: (cat([y := relu(a)]), y), [{"t": ["a"]}]),
        # the value that all items share is found in whichever operand the first item has it
        (lambda s: cat(each(lambda t: t + s)), lambda a, b, c: cat([b + a, b + c]), [{"t": ["a", "c"], "s": "b"}]),
        (lambda s: cat(each(lambda t: t + s)), lambda a, b, c: cat([a + b, c + a, b + c]), []),
        # of several readings, each item takes the first whose operators nobody else reads
        (
            lambda t: cat(each(maybe(relu(t), t))),
            lambda a, b: (cat([relu(a), y := relu(b), b]), y),
            [{"t": ["a", "relu_1", "b"]}],
        ),
        (
            lambda xs: (cat([*xs]), torch.stack([*xs])),
            lambda a, b: (cat([a, b]), torch.stack([a, b])),
            [{"xs": ["a", "b"]}],
        ),
        (lambda xs: (cat([*xs]), torch.stack([*xs])), lambda a, b: (cat([a, b]), torch.stack([b, a])), []),
        (lambda xs: cat([*xs]) * torch.stack([*xs]), lambda a: cat([a]) * torch.stack([a]), [{"xs": ["a"]}]),
        (views, lambda x: x.view(2, 3, 4), [{"x": "x", "sizes": [3, 4]}]),
        (views, lambda x: x.view(3, 2), []),
    ],
    ids=itertools.count(),
)
def test_what_lists_capture(pattern: Any, function: Any, expected: list[Any]) -> None:
    it = trace(pattern)
    assert captured(it, function) == expected
    assert parse(f"({', '.join(str(Pattern((o,))) for o in it.outputs)},)") == it


def test_a_draw_is_one_item() -> None:
    draws = Pattern((op("cat", each(op("dropout", cap("t"), 0.5, True))),))
    assert captured(draws, lambda a: cat([torch.dropout(a, 0.5, True), torch.dropout(a, 0.5, True)]))
    assert not captured(draws, lambda a: cat([y := torch.dropout(a, 0.5, True), y]))


def test_a_long_list_takes_linear_time() -> None:
    def model(x: Any) -> Any:
        return cat([*(x for _ in range(3000)), relu(x), *(relu(x) for _ in range(1))])

    graph = fx.symbolic_trace(model).graph
    read = 0

    @where.predicate("x")
    def counted(x: Any) -> bool:
        nonlocal read
        read += 1
        return True

    program = Program([("it", trace(lambda a, x, b: cat([*a, relu(x), *b]), [counted]))])
    matches = [m for node, key in program.roots(graph.nodes) for _, m in itertools.islice(program.find(node, key), 1)]
    assert [len(matches[0].captures[name]) for name in "ab"] == [3000, 1]
    assert read == 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: relu(*x), "any number of items of a list"),
        (lambda x: cat([*x, x]), "x is a list, an entry for each item, and also one value"),
        (lambda x: cat(each(lambda t: cat(each(lambda u: t + u)))), "has a list of any length in each item"),
        (lambda x: cat([a for a, b in x]), "a pattern cannot unpack a value of unknown length"),
        (lambda x: either(relu(x), *[x]), "must be an operator"),
    ],
    ids=itertools.count(),
)
def test_mistakes(make: Any, said: str) -> None:
    with pytest.raises(RuleDefinitionError, match=re.escape(said)):
        trace(make)
    with pytest.raises(RuleDefinitionError, match="siblings"):
        Pattern((siblings(op("cat", [cap("x"), *cap("rest")]), on="x"),))


def test_an_explanation_names_the_item() -> None:
    pattern = trace(lambda: cat(each(lambda t: relu(t))))
    (miss,) = explain(pattern, fx.symbolic_trace(lambda a, b: cat([relu(a), b.tanh()])).graph.nodes).misses
    assert "expected operator aten::relu at item (item 1 of root.tensors), found aten::tanh (%tanh)" in str(miss)


def test_conditions_hold_for_every_item_and_predicates_get_the_list() -> None:
    gm = traced(lambda a, b: cat([relu(a), relu(b)]), X, X + 1)

    def rules(*conditions: Any) -> Any:
        return made(lambda: cat(each(lambda t: relu(t))), lambda t: relu(cat(t)), where=conditions)

    assert "of item 0: t has rank 2" in str(rules("rank(t) == 3").explain(gm))
    two = where.predicate("t")(lambda t: len(t) == 2)
    assert apply(gm, rules("rank(t) == 2", "same_dtype(t, root)", two)).rewrites == 1
    assert torch.equal(gm(X, -X), relu(cat([X, -X])))


def test_replacements_take_lists_as_lists() -> None:
    def replacement(match: Match, before: list[Any], x: Any, after: list[Any]) -> Any:
        assert type(before) is type(after) is list
        return cat([*before, x, *after]) if len(before + after) else x

    it = made(lambda before, x, after: cat([*before, torch.neg(torch.neg(x)), *after]), replacement)
    gm = traced(lambda a, b: cat([a, b.neg().neg(), cat([a.neg().neg()])]), X, X + 1)
    assert apply(gm, it).rewrites == 2
    assert [node.op for node in gm.graph.nodes].count("call_function") == 1
    assert torch.equal(gm(X, X + 1), cat([X, X + 1, X]))


def test_rules_with_lists_are_verified_proved_and_written() -> None:
    rules = parse_rules(
        """
[[rule]]
id = "relu.out"
pattern = "cat([*each(mul(t, s), on='s')])"
replace = "mul(cat([*t]), s)"
where = ["rank(s) == 0"]
[[rule]]
id = "relu.twice"
pattern = "cat([*a, relu(x), *b])"
replace = "cat([*a, x, *relu(b)])"
""",
        "lists.toml",
    )
    assert parse_rules(dump_rules(rules), "lists.toml").once().digest() == rules.once().digest()
    true, false = rules.rules()
    verdict = true.verify(samples=6)
    assert verdict.ok, verdict
    assert not false.verify(samples=16).ok
    assert "1 or 3 items of t" in prove(true).summary
    with pytest.raises(RuleDefinitionError, match="captures that are lists are none"):
        parse_rules('[[rule]]\nid = "a.b"\npattern = "relu(x)"\nreplace = "cat([*x])"\n', "lists.toml")


def cut_again(dim: int, sizes: list[int]) -> Any:
    return lambda a, b: torch.split(cat([a, b], dim), sizes, dim)[1] + 1


def permuted_twice(first: list[int], second: list[int]) -> Any:
    return lambda x: x.permute(first).permute(second)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_a_rule_that_is_false_of_lists_of_one_length_is_caught(length: int) -> None:
    def joined(t: list[Any], dim: int) -> Any:
        return torch.relu(cat(t[::-1] if len(t) == length else t, dim))

    def pattern(dim: Literal) -> Any:
        return cat(each(lambda t: torch.relu(t)), dim)

    assert not made(pattern, joined, where=["same_dtype(t, root)"]).verify(samples=96, terminates=False).ok


def test_relations_of_lists() -> None:
    rules = parse_rules(
        """
[[rule]]
id = "lists.undo_cat"
pattern = "op('split_with_sizes', cat([*xs], lit(dim)), lit(sizes), lit(dim))"
replace = "[*xs]"
where = ["are_sizes(sizes, xs, dim)", "len(xs) > 1", "sum(sizes) == sum(size(xs, 1))"]
[[rule]]
id = "lists.undo_permute"
pattern = "permute(permute(x, lit(p)), lit(q))"
replace = "x"
where = ["is_inverse(p, q)"]
""",
        "lists.toml",
    )
    assert parse_rules(dump_rules(rules), "lists.toml").once().digest() == rules.once().digest()
    cut, permuted = rules.rules()
    simple = replace(cut.pattern, where=cut.pattern.where[:1])
    assert Rule("lists.cut", simple, cut.body, numerics="reassociates").verify(samples=8).ok
    for dim, sizes, count in ((1, [3, 3], 1), (1, [4, 2], 0), (0, [2, 2], 0)):
        gm = traced(cut_again(dim, sizes), X, X + 1)
        assert apply(gm, cut).rewrites == count
        assert torch.equal(gm(X, X + 1), torch.split(cat([X, X + 1], dim), sizes, dim)[1] + 1)
    for first, second, count in (([1, 2, 0], [2, 0, 1], 1), ([1, 2, 0], [-1, 0, -2], 1), ([1, 2, 0], [1, 2, 0], 0)):
        gm = traced(permuted_twice(first, second), torch.rand(2, 3, 4))
        assert apply(gm, permuted).rewrites == count
    for wrong in ("len(size(x, 0)) == 1", "sum(x, y) == 1", "is_inverse(p)", "are_sizes(a, b)", "are_sizes(a, b, 1.0)"):
        with pytest.raises(RuleDefinitionError, match="constraint"):
            where.parse(wrong)


def test_a_sampler_decides_how_long_lists_are() -> None:
    it = made(lambda first, rest: cat([first, *rest]), lambda first, rest: cat([first, *rest[:4], *rest[:3:-1]]))

    @it.sampler
    def _(draw: Draw) -> dict[str, Any]:
        return {"rest": [draw.tensor(2) for _ in range(draw.integer(4, 6))], "first": draw.tensor(2)}

    assert not it.verify(samples=16, terminates=False).ok  # from the sixth on, others change places
