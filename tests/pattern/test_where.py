"""Every constraint accepts, and says what it found when it does not; none adds a guard."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.pattern import where


@pytest.fixture
def captures() -> dict:
    def f(q, k, h):
        return q + k.sum() + h.sum()

    gm = make_fx(f, tracing_mode="symbolic")(torch.rand(2, 6), torch.rand(2, 6), torch.rand(2, 3, 4).half())
    q, k, h = gm.graph.find_nodes(op="placeholder")
    weight = fx.Graph().get_attr("weight")
    return {"q": q, "k": k, "h": h, "w": weight, "n": 3, "gm": gm}


@pytest.mark.parametrize(
    ("constraint", "text", "why_not"),
    [
        (where.rank("q", 2), "rank(q) == 2", ""),
        (where.rank("q", 4), "rank(q) == 4", "q has rank 2"),
        (where.rank("n", 4), "rank(n) == 4", "n is 3, not a value of the graph"),
        (where.rank("w", 4), "rank(w) == 4", "%weight has no value in its metadata"),
        (where.dtype("h", torch.half), "dtype(h) in {float16}", ""),
        (where.dtype("q", torch.half), "dtype(q) in {float16}", "q has dtype float32"),
        (where.same_dtype("q", "k"), "same_dtype(q, k)", ""),
        (where.same_dtype("q", "h"), "same_dtype(q, h)", "dtypes are float32, float16"),
        (where.shape_eq("q", "q"), "shape(q) == shape(q)", ""),
        (where.shape_eq("q", "h"), "shape(q) == shape(h)", "shapes are"),
        (where.divisible("q", 0, 1), "size(q, 0) % 1 == 0", ""),
        (where.divisible("q", 0, 2), "size(q, 0) % 2 == 0", "the size is s"),
        (where.divisible("q", 5, 2), "size(q, 5) % 2 == 0", "q has rank 2"),
        (where.no_other_users("q"), "no_other_users(q)", ""),
        (where.is_param("w"), "is_param(w)", ""),
        (where.is_param("q"), "is_param(q)", "is no parameter"),
        (where.predicate("n", text="is_three")(lambda n: n == 3), "is_three(n)", ""),
        (where.predicate("n", text="is_four")(lambda n: n == 4), "is_four(n)", "it is false of n=3"),
        (where.predicate("n", text="is_four")(lambda n: f"{n} is odd"), "is_four(n)", "3 is odd"),
    ],
)
def test_constraints(captures: dict, constraint: where.Constraint, text: str, why_not: str) -> None:
    assert str(constraint) == text
    found = constraint.why_not(captures)
    assert (why_not in found) if why_not else found == ""
    assert captures["q"].meta["val"].fake_mode.shape_env.guards == []
