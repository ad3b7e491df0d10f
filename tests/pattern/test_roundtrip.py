"""Every kind of term and literal prints, and parses back to the same value."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings, strategies as st

from fxrewrite import RuleDefinitionError
from fxrewrite.pattern import (
    Capture,
    LiteralValue,
    Op,
    Pattern,
    Term,
    any_,
    cap,
    chain,
    each,
    either,
    loose,
    maybe,
    op,
    parse,
    parse_term,
    shared,
    siblings,
    term_text,
)
from fxrewrite.pattern.terms import subterms

budget = settings(derandomize=True, deadline=None, max_examples=300)

names = st.sampled_from("abcdxyz")
nodes = st.builds(Capture, names.map(lambda name: f"n_{name}"), st.just("node"))
captures = nodes | st.one_of(
    *(
        st.builds(Capture, names.map(lambda name, kind=kind: f"{kind}_{name}"), st.just(kind))
        for kind in ("optional", "param", "literal", "any")
    )
)
floats = st.floats() | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-300])
scalars = st.one_of(
    st.integers(),
    floats,
    st.builds(complex, floats, floats),
    st.booleans(),
    st.none(),
    st.text(max_size=6),
    st.sampled_from(["", "'", '"', "\\", "\n"]),
)
torch_values = st.sampled_from(
    [
        torch.float32,
        torch.int64,
        torch.channels_last,
        torch.strided,
        torch.bool,
        torch.device("cpu"),
        torch.device("cuda", 1),
    ]
)
flat = scalars | torch_values
literals = flat | st.lists(flat, max_size=3) | st.lists(flat, max_size=3).map(tuple)
bounds = st.none() | st.integers(-9, 9)
slices = st.builds(slice, bounds, bounds, bounds)
index_items = st.integers(-9, 9) | slices | st.none() | st.just(...)
indices = (
    index_items | st.lists(index_items, min_size=1, max_size=3).map(tuple) | st.lists(st.integers(-3, 3), min_size=1)
)


def operators(children: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    binary = st.builds(op, st.sampled_from(["mul", "add", "matmul", torch.maximum, operator.sub]), children, children)
    some = st.one_of(
        binary,
        st.builds(lambda x, dim: op("softmax", x, dim), children, st.integers(-3, 3)),
        st.builds(lambda x, dim, dtype: op("softmax", x, dim, dtype=dtype), children, children, st.just(torch.half)),
        st.builds(lambda items, dim: op("cat", items, dim), st.lists(children, min_size=1, max_size=3), st.integers()),
        st.builds(lambda x, size: op("view", x, [*size, -1]), children, st.lists(children | st.integers(), max_size=2)),
        st.builds(lambda x, y, a: op("add", x, y, alpha=a), children, children, children | st.integers(2, 5)),
        st.builds(lambda x, w, b: op("linear", x, w, b), children, children, children),
        st.builds(lambda x, high: op("clamp", x, max=high), children, floats | children),
        st.builds(lambda x, start: op("slice", x, 1, start), children, st.integers() | children),
        st.builds(lambda x, p: op(F.normalize, x, p=p), children, floats | children),
        st.builds(lambda x, value: op("full_like", x, value), children, floats),
        st.builds(lambda x, fmt: op("contiguous", x, memory_format=fmt), children, st.just(torch.channels_last)),
    )
    return st.one_of(
        some,
        st.builds(maybe, binary, children),
        st.builds(lambda options: either(*options), st.lists(some, min_size=2, max_size=3)),
        st.builds(shared, some),
        st.builds(loose, some),
        st.builds(lambda term: shared(loose(term)), some),
        st.builds(operator.getitem, some, indices),
        st.builds(lambda x, index: shared(x[index]), some, st.integers(-9, 9) | slices),
        st.builds(lambda x, index: loose(x[index]), some, st.integers(-9, 9) | slices),
        st.builds(
            lambda base, keys, least, more: chain(base, *keys, least=least, most=least + more),
            children,
            st.lists(st.sampled_from(["view", "transpose", torch.clone, operator.neg, F.normalize]), min_size=1),
            st.integers(0, 3),
            st.integers(1, 3),
        ),
    )


terms = st.recursive(captures | st.just(any_), operators, max_leaves=10)


@given(terms)
@budget
def test_terms(term: Term) -> None:
    assert parse_term(term_text(term)) == term
    assert term_text(parse_term(term_text(term))) == term_text(term)
    assert hash(parse_term(term_text(term))) == hash(term)


@given(terms, st.lists(terms, max_size=2), st.integers(0, 2))
@settings(budget, max_examples=100)
def test_lists_of_any_length(item: Term, others: list[Term], shared_by_all: int) -> None:
    names = dict.fromkeys(part.name for part in subterms(item) if isinstance(part, Capture))
    term = op("cat", [*others, *each(item, on=tuple(names)[:shared_by_all]), *others])
    assert parse_term(term_text(term)) == term


@given(literals)
@budget
def test_literals(value: Any) -> None:
    term = Op("aten::full_like", (("self", cap("x")), ("fill_value", LiteralValue(value))))
    assert parse_term(term_text(term)) == term


@pytest.mark.slow
@given(st.lists(st.builds(op, st.sampled_from(["mul", "add", "sub"]), terms, terms), min_size=1, max_size=3))
@budget
def test_patterns_of_several_outputs(outputs: list[Op]) -> None:
    try:
        pattern = Pattern(tuple(outputs))
    except RuleDefinitionError as error:
        assert "is computed of captured numbers" in str(error)  # noqa: PT017  # the only reason not to make it
        return
    assert parse(str(pattern)) == pattern


@given(st.builds(op, st.just("linear"), nodes, captures, captures), st.integers(2, 5))
@budget
def test_siblings(each: Op, least: int) -> None:
    on = next(term.name for _, term in each.args if isinstance(term, Capture) and term.kind == "node")
    pattern = Pattern((siblings(each, on=on, least=least),))
    assert parse(str(pattern)) == pattern


@pytest.mark.parametrize(
    "wrong",
    [
        "__import__('os')",
        "x.__class__",
        "[i for i in x]",
        "lambda: 1",
        "mul(*x)",
        "f'{x}'",
        "to(x, torch.device('cda'))",
    ],
)
def test_nothing_but_the_language_is_read(wrong: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        parse(wrong)
