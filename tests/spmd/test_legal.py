"""What an author of a parallelism can get wrong is an error with a name and a place, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxrewrite import FxRewriteError, Match, Pattern, RefusedError, Rule, RuleDefinitionError, RuleSet, cap, op
from fxrewrite.backends import normalized
from fxrewrite.graph import graph_text, input_name
from fxrewrite.spmd import (
    COLLECTIVE_RULES,
    REDUCTIONS,
    Axis,
    Layout,
    LocalizeShapes,
    Partial,
    Place,
    PropagateLayouts,
    Replicated,
    Shard,
    SpmdContext,
    axis_of,
    contexts,
    inputs,
    module_input,
    module_output,
    moves,
    outputs,
    param,
    redistribute,
    redistribution,
)
from fxrewrite.testing import RankRun, fake_mesh, run_on_ranks
from rules.layouts import LAYOUTS
from tests.autosp.one_device import captured

AXIS = Axis("tp", 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mlp(x), x * 2


X = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS: dict[Any, Layout] = {param("mlp.up.weight"): Shard(0), param("mlp.down.weight"): Shard(1)}
PROPAGATE, LOCALIZE = PropagateLayouts("propagate", LAYOUTS), LocalizeShapes("localize", LAYOUTS)
PROPAGATE_AGAIN = PropagateLayouts("propagate_again", LAYOUTS)


def program() -> tuple[fx.GraphModule, list[Any]]:
    gm, given = captured(Net().double(), {"x": X})
    return normalized(gm), given


def plan(place: Mapping[Any, Layout], *members: Any) -> RuleSet:
    return RuleSet("plan", Place("place", place), PROPAGATE, *(members or (LOCALIZE, COLLECTIVE_RULES)), atomic=True)


forget_sum = Rule("lies.forget_sum", Pattern((redistribution,), (moves(Partial, Replicated),)))


@forget_sum.replacement
def _(x: fx.Proxy) -> fx.Proxy:
    """x"""
    return x


sum_chunks = Rule("lies.sum_chunks", Pattern((op("aten::relu", cap("x")),)))


@sum_chunks.replacement
def _(match: Match, x: fx.Proxy) -> fx.Proxy:
    """cumsum over a sharded dimension"""
    return torch.ops.aten.cumsum(x, 1)


def check_gradients(gm: fx.GraphModule, run: RankRun) -> None:
    """The gradients are those of one device."""
    names = map(input_name, gm.graph.find_nodes(op="placeholder"))
    found = dict(zip(names, run.gradients(), strict=True))
    model = Net().double()
    model(X)[0].backward()
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.grad)


def refused(rules: RuleSet, context: Any = None) -> str:
    """Why the set refuses; the graph is as it was."""
    gm, _ = program()
    before = graph_text(gm)
    with pytest.raises(FxRewriteError) as error:
        rules.apply(gm, context=context or SpmdContext(AXIS))
    assert graph_text(gm) == before
    return str(error.value)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            plan(ROWS, forget_sum, LOCALIZE, COLLECTIVE_RULES),
            "aten::square reads %linear_1 P(sum), and is not linear in pending sums",
        ),
        (plan(ROWS, sum_chunks, LOCALIZE, COLLECTIVE_RULES), "lies.sum_chunks: aten::cumsum reads"),
        (plan(ROWS, LOCALIZE), "redistribute from P(sum) to R is left in a graph whose shapes are local"),
        (
            plan({param("mlp.up.wieght"): Shard(0)}),
            "param('mlp.up.wieght') matches nothing; the graph has 'mlp.up.weight'",
        ),
        (plan({param("mlp.up.weight"): Shard(2)}), "S(2) of a value with 2 dimensions"),
        (plan({param("mlp.up.weight"): Shard(-1)}), "a dimension is counted from the front"),
        (plan({param("mlp.up.weight"): Partial()}), "an input cannot be held as P(sum)"),
        (plan({param("mlp.up.weight"): 0}), "0 is no placement"),  # pyright: ignore[reportArgumentType]
        (plan({param("mlp.up.weight"): Shard(0, outer=5)}), "tp=2 ranks do not divide S(0, outer=5)"),
        (plan({inputs("y"): Shard(0)}), "inputs('y') matches nothing; the graph has 'x'"),
        (plan({outputs(2): Shard(0)}), "outputs('2'): the graph returns no tensor there; it has 2 outputs"),
        (plan({module_output("attention"): Shard(0)}), "matches nothing; the graph has 'mlp'"),
        (plan({module_input("mlp.down"): Shard(3)}), "S(3) of a value with 2 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_is_refused(rules: RuleSet, says: str) -> None:
    assert says in refused(rules)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            (LOCALIZE, COLLECTIVE_RULES),
            "localize needs placements, and no stage before it gives that; add one",
        ),
        (
            (PROPAGATE, COLLECTIVE_RULES, LOCALIZE),
            "collectives needs local shapes, which localize gives after it",
        ),
        ((PROPAGATE, PROPAGATE_AGAIN, LOCALIZE), "propagate_again gives placements, which propagate gives already"),
        ((PROPAGATE, Place("place", ROWS), LOCALIZE), "place precedes placements, which propagate gives before it"),
        ((PROPAGATE, LOCALIZE, REDUCTIONS), "mean_over_shards precedes local shapes, which localize gives before it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_order_that_cannot_work_is_an_error_where_the_set_is_made(members: tuple[Any, ...], says: str) -> None:
    with pytest.raises(RuleDefinitionError) as error:
        RuleSet("plan", *members)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("context", "says"),
    [
        (AXIS, "not Axis"),
        ({"tp": SpmdContext(AXIS)}, "needs to know the mesh axis"),
    ],
)
def test_a_context_that_is_none(context: Any, says: str) -> None:
    assert says in refused(plan(ROWS), context)


def test_a_symbolic_dimension_of_an_input_is_not_sharded() -> None:
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    gm = normalized(captured(Net().double(), {"x": x})[0])
    with pytest.raises(FxRewriteError, match=r"inputs\('x'\): x: dimension 0 is symbolic"):
        plan({inputs("x"): Shard(0)}).apply(gm, context=SpmdContext(AXIS))


def test_axes_of_a_plan() -> None:
    gm, _ = program()
    with pytest.raises(FxRewriteError, match=r"runs on axis 'tp'.* not axes dp"):
        plan(ROWS).on("tp").apply(gm, context={"dp": SpmdContext(AXIS)})
    with pytest.raises(RuleDefinitionError, match="is on axis 'tp' already, not on 'dp'"):
        plan(ROWS).on("tp").on("dp")


def test_a_context_serves_any_number_of_graphs() -> None:
    context = SpmdContext(AXIS)
    texts = set[str]()
    for _ in range(2):
        gm, _ = program()
        plan(ROWS).apply(gm, context=context)
        with pytest.raises(RefusedError):
            plan(ROWS, LOCALIZE).apply(program()[0], context=context)
        texts.add(graph_text(gm))
    assert len(texts) == 1


def test_an_axis_is_lowered_once() -> None:
    gm, given = program()
    with fake_mesh((2,), ("tp",)) as mesh:
        rules = plan(ROWS)
        rules.on("tp").apply(gm, context=contexts(mesh))
        with pytest.raises(RefusedError, match="lowered over axis tp already"):
            plan({inputs("x"): Shard(0)}).apply(gm, context=SpmdContext(axis_of(mesh, "tp")))
        again = normalized(gm)
        assert graph_text(again) == graph_text(gm), "a normal graph stays as it is"
        names = [input_name(node) for node in gm.graph.find_nodes(op="placeholder")]
        held = {"mlp.up.weight": Shard(0), "mlp.down.weight": Shard(1)}
        placements = {names.index(name): {"tp": layout} for name, layout in held.items()}
        run = run_on_ranks(again, given, mesh, placements=placements, backward=0)
    check_gradients(gm, run)


def test_a_rule_over_redistributions_is_not_verified_on_one_device() -> None:
    verdict = forget_sum.verify(samples=4)
    assert not verdict.ok
    assert "on one device redistribute is not what it stands for" in str(verdict)


@pytest.mark.parametrize("through", [Partial(), Shard(1), Shard(1, inner=2), Shard(0, outer=2)], ids=str)
@pytest.mark.parametrize("then", [Replicated(), Shard(0), Shard(1)], ids=str)
def test_whatever_is_asked_for_is_the_identity(through: Layout, then: Layout) -> None:
    """R -> through -> then -> R, on two ranks, forward and backward."""

    class Ask:
        name = "ask"

        def run(self, edit: Any, context: SpmdContext, report: Any) -> int:
            relu = next(node for node in edit.nodes() if "relu" in node.name)
            users, value = list(relu.users), relu
            for src, dst in ((Replicated(), through), (through, then), (then, Replicated())):
                moved = edit.call(redistribute, (value, src, dst, context.axis), after=value, val=relu.meta["val"])
                value = moved
            edit.replace_uses(relu, value, users)
            return 1

        def text(self) -> str:
            return "asks"

    gm, given = program()
    with fake_mesh((2,), ("tp",)) as mesh:
        RuleSet("asked", Ask(), PROPAGATE, LOCALIZE, COLLECTIVE_RULES).apply(gm, SpmdContext(axis_of(mesh, "tp")))
        run = run_on_ranks(gm, given, mesh, backward=0)
    check_gradients(gm, run)
