"""What is known of nodes: who makes it, who takes it over, how long it lasts."""

import contextlib

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autosp_rules import AutoSPConfig
from fxrewrite import Edit, InvariantError
from fxrewrite.graph import Fact
from tests.autosp.one_device import assert_equal_to_one_device

aten = torch.ops.aten
SET, DERIVED = Fact[int]("set"), Fact[int]("derived")


def traced() -> fx.GraphModule:
    return make_fx(lambda x: x.sin().cos(), tracing_mode="fake")(torch.ones(2))


def test_a_new_node_knows_what_is_derived() -> None:
    gm = traced()
    _, sin, *_ = gm.graph.nodes
    with Edit(gm) as edit:
        for fact in (SET, DERIVED):
            edit.set_fact(sin, fact, 1)
        edit.derive(DERIVED, lambda node: len(node.args))
        made = edit.call(aten.add.Tensor, (sin, 1), after=sin, like=sin)
        assert (SET.of(made), DERIVED.of(made)) == (None, 2)
    assert DERIVED.of(made) == 2, "what was found stays readable"
    with Edit(gm) as edit:
        assert DERIVED.of(made) is None, "the next transaction starts without facts"
        edit.derive(DERIVED, lambda node: 1)
        edit.forget()
        assert DERIVED.of(edit.call(aten.neg.default, (made,), after=made)) is None


def test_undoing_takes_facts_back() -> None:
    gm = traced()
    _, sin, cos, _ = gm.graph.nodes
    with Edit(gm) as edit:
        edit.set_fact(sin, SET, 1)
        made = sin
        with contextlib.suppress(InvariantError), edit.savepoint():
            edit.set_fact(sin, SET, 2)
            edit.set_fact(cos, SET, 3)
            made = edit.call(aten.neg.default, (cos,), after=cos)
            edit.set_fact(made, SET, 4)
            raise InvariantError("it comes from nowhere")
        assert [SET.of(node) for node in (sin, cos, made)] == [1, None, None]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(inputs_embeds))).square().mean()


def test_a_start_that_is_replaced_is_still_one() -> None:
    """The MLP that is computed in tiles is the first to read the sequence."""
    model, inputs = FeedForward().double(), {"inputs_embeds": torch.randn(2, 16, 8, dtype=torch.float64)}
    report = assert_equal_to_one_device(model, inputs, ranks=(2,), config=AutoSPConfig(mlp_tile=64))
    assert report.tokens_per_rank == 16
