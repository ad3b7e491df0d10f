"""In which graphs of a model a rule matches, and the nearest miss in the others."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fxrewrite import Rule, RuleSet
from fxrewrite.pattern import trace
from fxrewrite.testing import seen
from fxrewrite.testing.seen import GRAPHS


def rule(name: str, function, *where: str) -> Rule:
    return Rule(name, trace(function, where), lambda match: match.root)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return torch.softmax(F.silu(self.up(x)), -1)


RULES = RuleSet(
    "looked_for",
    rule("a.silu", lambda x: F.silu(x)),
    rule("a.linear", lambda x, w, b: F.linear(x, w, b)),
    rule("a.rank", lambda x: torch.softmax(x, -1), "rank(x) == 2"),
    rule("a.addmm", lambda x, w, b: torch.addmm(b, x, w)),
)


def test_each_graph_says_what_matches_in_it() -> None:
    found = seen(RULES, Model(), {"x": torch.rand(3, 4)})
    counts = {kind: list(found.matches(kind).values()) for kind in GRAPHS}
    assert counts == {
        "symbolic_trace": [1, 0, 0, 0],
        "dynamo": [1, 1, 1, 0],
        "aten": [1, 1, 1, 0],
        "export": [1, 1, 1, 0],
        "decomposed": [1, 1, 1, 1],
    }
    text = str(found)
    assert "a.linear: 0; no aten::linear; it calls modules, as torch.nn.modules.linear.Linear" in text
    assert "a.rank: 0; at %softmax" in text
    assert "a.addmm: 0; no aten::addmm" in text


def test_a_graph_that_the_model_has_not_is_said_with_its_reason() -> None:
    def branches(x):
        return F.silu(x) if x.sum() > 0 else x

    found = seen(RULES, branches, {"x": torch.rand(3, 4)})
    assert found.without.keys() == GRAPHS.keys()
    assert "does not compile to one graph" in found.without["dynamo"]
    assert found.without["aten"] == "there is no dynamo graph"
