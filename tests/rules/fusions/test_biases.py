"""A bias that is added after the sum over the ranks, for linear and addmm; without the rule by one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxrewrite import RuleSet
from fxrewrite.backends import normalized
from fxrewrite.graph import input_name
from fxrewrite.ops import key
from fxrewrite.spmd import (
    COLLECTIVE_RULES,
    LocalizeShapes,
    Place,
    PropagatePlacements,
    Shard,
    contexts,
    param,
)
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.fusions.biases import BIASES
from rules.layouts import LAYOUTS
from tests.autosp.one_device import captured


class Rows(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim = dim
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.linear(x, self.weight, self.bias) if self.dim else torch.addmm(self.bias, x, self.weight)
        return made.square().sum()


@pytest.mark.parametrize("with_rule", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_one_sum_and_nothing_gathered(dim: int, with_rule: bool) -> None:
    model, x = Rows(dim).double(), torch.randn(4, 6, dtype=torch.float64)
    model(x).backward()
    gm, given = captured(model, {"x": x})
    program = normalized(gm)
    names = [input_name(node) for node in program.graph.find_nodes(op="placeholder")]
    rules = RuleSet(
        "rows",
        Place("place", {param("weight"): Shard(dim)}),
        *((BIASES,) if with_rule else ()),
        PropagatePlacements("propagate", LAYOUTS),
        LocalizeShapes("localize", LAYOUTS),
        COLLECTIVE_RULES,
    )
    with fake_mesh((2,), ("tp",)) as mesh:
        rules.on("tp").apply(program, context=contexts(mesh))
        run = run_on_ranks(program, given, mesh, backward=0)
    for name, value in model.named_parameters():
        torch.testing.assert_close(run.gradients()[names.index(name)], value.grad)
    sent = [key(node).partition("::")[2] for node in program.graph.nodes if "c10d" in key(node)]
    assert "all_reduce" in sent
    assert "all_gather_into_tensor" not in sent
