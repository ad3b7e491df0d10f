"""Three ways to write a pattern, one value; what cannot be a pattern says why."""

import operator
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, strategies as st
from torch import fx

from fxrewrite import Rule, RuleSet
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern import (
    Capture,
    Either,
    Literal,
    LiteralValue,
    Maybe,
    Op,
    Pattern,
    Term,
    any_,
    cap,
    either,
    functional,
    maybe,
    op,
    parse,
    parse_term,
    shared,
    term_text,
    trace,
    where,
)
from fxrewrite.pattern.terms import Ignore, ListOf, freeze

x, y = cap("x"), cap("y")
library = torch.library.Library("port_a_list", "DEF")
library.define("fill(Tensor(a!)[] outs, Tensor x) -> ()")


def gated(x):
    a, b = x.chunk(2)
    return F.silu(a) * b


def flat(x):
    a, b, c = x.shape
    return x.view(a * b, c)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.sigmoid(x),
        lambda x: torch.mul(x, x.sigmoid()),
        lambda x: torch.ops.aten.mul.Tensor(x, torch.ops.aten.sigmoid(x)),
        lambda x: op("mul", x, op("aten::sigmoid", x)),
        lambda x: op(operator.mul, x, op(F.sigmoid, input=x)),
    ],
    ids=count(),
)
def test_traced_functions_and_combinators_of_one_meaning_are_one_pattern(function) -> None:
    assert trace(function) == parse("mul(x, sigmoid(x))")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: F.softmax(x, -1), "softmax(x, -1)"),
        (lambda x: x.softmax(dim=-1), "softmax(x, -1)"),
        (lambda x: torch.softmax(x, -1, dtype=torch.float32), "softmax(x, -1, torch.float32)"),
        (lambda x: F.dropout(x, 0.1), "dropout(x, 0.1, True)"),
        (lambda x: x.view(-1, ..., 3), "view(x, [-1, ..., 3])"),
        (lambda x: x[:, 0, ...], "x[slice(None, None, None), 0, Ellipsis]"),
        (lambda x: x[[0, 1]], "x[[0, 1]]"),
        (lambda x: x[0, 1], "x[0, 1]"),
        (lambda x: torch.max(x, 1)[0], "max(x, 1)[0]"),
        (lambda x, y: torch.cat([x, y], 1), "cat([x, y], 1)"),
        (lambda x: 2**x, "pow(2, x)"),
        (lambda x: x.masked_fill(x, float("-inf")), 'masked_fill(x, x, float("-inf"))'),
        (lambda x, y: maybe(x + y) * 2, "mul(maybe(add(x, y)), 2)"),
        (lambda x, y: maybe(x + y, y) * 2, "mul(maybe(add(x, y), y), 2)"),
        (lambda x: either(x.view([2, 3]), x.reshape(2, 3)), "either(view(x, [2, 3]), reshape(x, [2, 3]))"),
        (lambda x: torch.relu(shared(torch.exp(x))), "relu(shared(exp(x)))"),
        (lambda x, y: (torch.sin(x + y), torch.cos(x + y)), "sin(add(x, y)), cos(add(x, y))"),
        (lambda x, y: torch.where(x == 0, x != y, x), "where(eq(x, 0), ne(x, y), x)"),
        (gated, "mul(silu(chunk(x, 2)[0]), chunk(x, 2)[1])"),
        (flat, "view(x, [mul(size(x, 0), size(x, 1)), size(x, 2)])"),
        (lambda x: F.normalize(x), 'op("torch.nn.functional.normalize", input=x)'),
    ],
    ids=count(),
)
def test_text_form_is_what_it_says_and_parses_back(function, text: str) -> None:
    pattern = trace(function)
    assert str(pattern) == text
    assert parse(text) == pattern


def test_annotations_say_what_is_captured() -> None:
    def pattern(x, scale: Literal, mask: Maybe, size: Any, w: torch.Tensor):
        return F.scaled_dot_product_attention(x, x, w, attn_mask=mask, scale=scale).view(size)

    kinds = {capture.name: capture.kind for capture in trace(pattern).captures}
    assert kinds == {"x": "node", "w": "node", "mask": "optional", "scale": "literal", "size": "any"}
    assert "opt(mask)" in str(trace(pattern))
    assert parse(str(trace(pattern))) == trace(pattern)


def test_constraints_print_and_are_values() -> None:
    pattern = trace(lambda q, k: torch.matmul(q, k), [where.rank("q", 4), where.dtype("k", torch.float32, torch.half)])
    assert str(pattern) == "matmul(q, k) where rank(q) == 4 and dtype(k) in {float32, float16}"
    assert pattern == trace(lambda q, k: q @ k, [where.rank("q", 4), where.dtype("k", torch.float32, torch.half)])
    assert hash(pattern) == hash(trace(lambda q, k: q @ k, pattern.where))


literals = st.one_of(
    st.integers(-5, 5), st.floats(allow_nan=True), st.booleans(), st.none(), st.text(max_size=3), st.just(torch.float32)
)


def operators(children: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    binary = st.builds(op, st.sampled_from(["mul", "add", "matmul"]), children, children)
    literal = st.builds(lambda a, n: op("softmax", a, n), children, st.integers(-3, 3))
    listed = st.builds(lambda a, b: op("cat", [a, b], 1), children, children)
    return st.one_of(
        binary,
        literal,
        listed,
        st.builds(maybe, binary, children),
        st.builds(either, children, binary),
        st.builds(shared, binary),
        st.builds(lambda a, v: op("full_like", a, v), children, st.floats()),
    )


captures = st.builds(Capture, st.sampled_from("abc"), st.just("node")) | st.builds(
    Capture, st.sampled_from("def"), st.sampled_from(["any", "optional", "literal"])
)


@given(st.recursive(captures | st.just(any_), operators, max_leaves=12))
def test_every_term_prints_and_parses_back(term: Term) -> None:
    assert parse_term(term_text(term)) == term


@given(literals, literals)
def test_frozen_literals_are_equal_when_type_and_value_are(a: Any, b: Any) -> None:
    assert (freeze(a) == freeze(b)) == (type(a) is type(b) and repr(a) == repr(b))
    assert (LiteralValue(a) == LiteralValue(b)) == (freeze(a) == freeze(b))


def test_results_have_the_names_that_torch_gives_them() -> None:
    assert trace(lambda x: torch.max(x, -1).values) == trace(lambda x: torch.max(x, -1)[0])
    assert trace(lambda x: x.sort().indices + 1) == trace(lambda x: x.sort()[1] + 1)
    assert trace(lambda x: torch.linalg.svd(x).Vh) == trace(lambda x: torch.linalg.svd(x)[2])


def writes_an_item(x: Any) -> Any:
    y = torch.empty_like(x)
    y[0] = x
    return y


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.add_(1), "aten::add_ in a pattern writes to memory"),
        (lambda x: F.relu(x, inplace=True), "aten::relu_ in a pattern writes to memory"),
        (lambda x: x, "must be an operator: it would match every node"),
        (
            lambda x: op("view", x, [op("mul", cap("n", Literal), cap("d", Literal)), -1]),
            r"mul\(lit\(n\), lit\(d\)\) is computed of captured numbers.* relate them in where",
        ),
        (lambda x: None, "a pattern gives a call, or a tuple of calls, not None; is its `return` missing?"),
        (lambda x: [torch.relu(x), torch.exp(x)], "a pattern gives a call, or a tuple of calls, not a list"),
        (lambda x: x.relu, r"a pattern gives a call, or a tuple of calls, not a function; are its \(\) missing\?"),
        (lambda x: {"y": torch.relu(x)}, "a pattern gives a call, or a tuple of calls, not a dict"),
        (lambda x: maybe(torch.relu(x)), "must be an operator: it would match every node"),
        (lambda x, y: torch.relu(x), r"take the parameters y out, which relu\(x\) does not have"),
        (lambda x: torch.relu(x) if x.shape[0] else x, "cannot branch on a value"),
        (
            lambda x: torch.relu(x) if x.shape[0] == 2 else x,
            r"cannot branch on sizes or dtypes; state them, as in where=",
        ),
        (lambda x: torch.relu(x) if torch.half != x.dtype else x, "cannot branch on sizes or dtypes"),
        (lambda x: torch.relu(x) if x == 2 else x, "cannot branch on a value"),
        (lambda x: [x for _ in range(x.shape[0])], "cannot loop over a size or a captured number"),
        (writes_an_item, r"cannot write to x\[i\]; match the functional operator, such as slice_scatter"),
        (lambda x: torch.relu(x) * len(x), "does not know how many entries or items"),
        (lambda x, y: x.view(y.shape, 2), r"size has all sizes of y among others; write them singly, y.shape\[0\]"),
        (lambda x: functional("port_a_list::fill", x, x), r"takes outs item by item, as in \[a, b\]"),
        (lambda x: functional("port_a_list::fill", [x], x, x=x), "outs, x, each once, not 2 by place and x by name"),
        (lambda x: functional("aten::relu", x), r"functional\("),
        (lambda x: functional("port_a_list::fill", [x, x]), r"functional\("),
        (lambda x: torch.relu(x.grad), "a pattern has no attribute 'grad'; it has shape, dtype and device"),
        (lambda x: torch.relu(x.real), r"a pattern has no attribute 'real'; write torch.real\(x\)"),
        (lambda x: x * x.ndim, r"no attribute 'ndim'; state it, as in where=\[\"rank\(x\) == 2\"\]"),
        (lambda x: x.relu() if x else x, "cannot branch on a value"),
        (lambda x: torch.ger(x), "missing 1 required"),
        (lambda x: torch.ops.aten.relu(x, 2), "aten::relu called with 2 positional arguments"),
        (lambda x: sum(x.split(2)), "cannot unpack a value of unknown length"),
        (lambda x: op("no_such_thing", x), "there is no operator 'no_such_thing'"),
        (lambda x, y: x[:, :y], "cannot capture a bound of a slice"),
        (lambda x: maybe(x), "maybe\\(\\) takes an operator"),
        (lambda: 3, "a pattern gives a call, or a tuple of calls, not 3"),
        (lambda x: x + torch.ones(2), r"cannot hold a tensor \(float32\[2\]\).* annotated Param if the model holds it"),
        (lambda x: F.linear(x, torch.nn.Parameter(torch.ones(2, 3))), r"cannot hold a tensor \(float32\[2, 3\]\)"),
    ],
    ids=count(),
)
def test_what_is_no_pattern_says_why(function, message: str) -> None:
    with pytest.raises(RuleDefinitionError, match=message):
        trace(function)


def test_functional_lists_match_item_by_item_in_both_forms() -> None:
    def pattern(a: Any, b: Any, x: Any) -> Any:
        first, second = functional("port_a_list::fill", [a, b], x)
        return torch.relu(first) + second

    kernel, higher = torch.ops.port_a_list.fill.default, torch.ops.higher_order
    bases = {"_outs_length": 2, "_outs_0_base_index": 0, "_outs_1_base_index": 1}
    found = Rule("lists.fill", trace(pattern), lambda x: x)
    assert parse(str(found.pattern)) == found.pattern
    for swapped in (False, True):
        graph = fx.Graph()
        a, b, x = map(graph.placeholder, "abx")
        one = graph.call_function(higher.auto_functionalized, (kernel,), {"outs": [a, b], "x": x})
        parts = graph.call_function(operator.getitem, (one, 1))
        of_one = [graph.call_function(operator.getitem, (parts, i)) for i in range(2)]
        two = graph.call_function(higher.auto_functionalized_v2, (kernel,), {"x": x, **bases, "_all_bases": [a, b]})
        of_two = [graph.call_function(operator.getitem, (two, i)) for i in (1, 2)]
        for p, q in (of_one, of_two):
            left = graph.call_function(torch.relu, (q if swapped else p,))
            graph.call_function(operator.add, (left, p if swapped else q))
        graph.output(None)
        assert found.explain(fx.GraphModule(torch.nn.Module(), graph)).num_matches == (0 if swapped else 2)


def test_annotations_that_mean_nothing_are_refused() -> None:
    def pattern(x: int):
        return torch.relu(x)

    with pytest.raises(
        RuleDefinitionError, match="parameter x: int must be plain, or annotated Literal, Maybe, Param or Any"
    ):
        trace(pattern)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mul(x, ", "column 4"),
        pytest.param("-" * 5000 + "1", "it is nested too deeply", id="nested"),
        ("mul(x, open(y))", "column 8: there is no operator 'open'"),
        ("mul(x, y.z)", "y.z is not part of the pattern language"),
        ("mul(x, torch.load)", "torch.load is not a dtype"),
        ("softmax(x)", "column 1: in a pattern: aten::softmax called with 1"),
        ('op("no.such", x)', "there is no function 'no.such'"),
        ("lit(3)", r"lit\(\) takes the name of one capture"),
    ],
    ids=count(),
)
def test_text_errors_name_the_column(text: str, message: str) -> None:
    with pytest.raises(RuleDefinitionError, match=message):
        parse(text)


def test_one_name_is_one_kind_of_capture() -> None:
    with pytest.raises(RuleDefinitionError, match="x is captured as node and as literal"):
        Pattern((op("mul", cap("x"), cap("x", Literal)),))
    with pytest.raises(RuleDefinitionError, match=r"constraint rank\(z\) == 2 reads \['z'\]"):
        trace(lambda x: torch.relu(x), [where.rank("z", 2)])


def test_terms_are_values() -> None:
    assert {op("mul", x, y), op(torch.mul, x, y), x * y} == {Op("aten::mul", (("self", x), ("other", y)))}
    assert isinstance(any_, Ignore)
    assert either(x, y) == Either((x, y))
    assert op("cat", [x, y]).args[0][1] == ListOf((x, y))
    with pytest.raises(AttributeError):
        x.name = "z"


@pytest.mark.parametrize("depth", [201, 5000])
def test_a_pattern_that_is_too_deep_to_walk_over_says_so(depth: int) -> None:
    def deep(x):
        for _ in range(depth):
            x = torch.sin(x)
        return x

    with pytest.raises(RuleDefinitionError, match="at most 200 operators one in the other; match a part of them"):
        trace(deep)


def test_a_pattern_as_deep_as_is_allowed_matches_and_explains() -> None:
    def deep(x):
        for _ in range(200):
            x = torch.sin(x)
        return x

    rule = Rule("a.deep", trace(deep), lambda x: torch.cos(x))
    gm = fx.symbolic_trace(deep)
    assert rule.explain(gm).num_matches == 1
    assert len(str(rule)) > 1000
    assert RuleSet("a", rule).apply(gm).rewrites == 1
