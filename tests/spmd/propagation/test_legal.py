"""What an author of a parallelism can get wrong is an error with a name and a place, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed import tensor

from fxrewrite import FxRewriteError, Match, Pattern, RefusedError, Rule, RuleDefinitionError, RuleSet, cap, op
from fxrewrite.backends import normalized
from fxrewrite.graph import graph_text, input_name
from fxrewrite.ops import key
from fxrewrite.spmd import (
    COLLECTIVE_RULES,
    REDUCTIONS,
    REQUIRED,
    Axis,
    LocalizeShapes,
    Partial,
    Place,
    Placement,
    PropagatePlacements,
    Replicate,
    Shard,
    SpmdContext,
    as_placement,
    axis_of,
    contexts,
    input_placements,
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

AXIS, R = Axis("tp", 2), Replicate()


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
ROWS: dict[Any, Placement] = {param("mlp.up.weight"): Shard(0), param("mlp.down.weight"): Shard(1)}
PROPAGATE, LOCALIZE = PropagatePlacements("propagate", LAYOUTS), LocalizeShapes("localize", LAYOUTS)
PROPAGATE_AGAIN = PropagatePlacements("propagate_again", LAYOUTS)


def program() -> tuple[fx.GraphModule, list[Any]]:
    gm, given = captured(Net().double(), {"x": X})
    return normalized(gm), given


def plan(place: Mapping[Any, Placement], *members: Any) -> RuleSet:
    return RuleSet("plan", Place("place", place), PROPAGATE, *(members or (LOCALIZE, COLLECTIVE_RULES)), atomic=True)


forget_sum = Rule("lies.forget_sum", Pattern((redistribution,), (moves(Partial, Replicate),)))


@forget_sum.replacement
def _(x: fx.Proxy) -> fx.Proxy:
    """x"""
    return x


sum_chunks = Rule("lies.sum_chunks", Pattern((op("aten::relu", cap("x")),)))


@sum_chunks.replacement
def _(match: Match, x: fx.Proxy) -> fx.Proxy:
    """cumsum over a sharded dimension"""
    return torch.ops.aten.cumsum(x, 1)


cut_odd = Rule("lies.cut_odd", Pattern((redistribution,), (moves(Partial, Replicate),)))


@cut_odd.replacement
def _(x: fx.Proxy, src: Placement, dst: Placement, axis: Axis) -> fx.Proxy:
    """by way of chunks that the ranks do not divide"""
    return redistribute(redistribute(x, src, Shard(0, outer=3), axis), Shard(0, outer=3), dst, axis)


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
        (
            plan(ROWS, cut_odd, LOCALIZE, COLLECTIVE_RULES),
            "lies.cut_odd: tp=2 ranks do not divide a value [4, 8] into S(0, outer=3) at %redistribute",
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
        (plan({param("mlp.up.weight"): 0}), "0 is not a placement"),  # pyright: ignore[reportArgumentType]
        (plan({param("mlp.up.weight"): Shard(0, outer=5)}), "tp=2 ranks do not divide S(0, outer=5)"),
        (
            plan({module_output("mlp.up"): Shard(1, outer=4, inner=2, uneven=True)}),
            "do not divide S(1, outer=4, inner=2",
        ),
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


class Even(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert x.shape[0] % 2 == 0
        return super().forward(x)


@pytest.mark.parametrize("model", [Net, Even])
def test_a_symbolic_dimension_of_an_input_is_not_sharded(model: type[Net]) -> None:
    """Also where a guard says that the ranks divide it."""
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    gm = normalized(captured(model().double(), {"x": x})[0])
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
        assert input_placements(again) == input_placements(gm) == [{"tp": Shard(0)}, {"tp": R}, {"tp": Shard(1)}]
        run = run_on_ranks(again, given, mesh, backward=0)
    check_gradients(gm, run)


def test_placements_of_torch_are_those_of_ours() -> None:
    texts = set[str]()
    for of in (Shard, tensor.Shard):
        gm, _ = program()
        plan({site: of(placement.dim) for site, placement in ROWS.items()}).apply(gm, context=SpmdContext(AXIS))
        texts.add(graph_text(gm))
    assert len(texts) == 1
    assert as_placement(tensor.Partial("max")) == Partial("max") != Partial() == as_placement(tensor.Partial())
    assert as_placement(tensor.Replicate()) == R
    with pytest.raises(FxRewriteError, match=r"Partial\('avg'\) is not supported; use one of"):
        as_placement(tensor.Partial("avg"))
    with pytest.raises(FxRewriteError, match=r"is not supported; Shard\(dim, outer=n\)"):
        as_placement(tensor.placement_types._StridedShard(0, split_factor=2))


class LogSumExp(nn.Module):
    """As vocabulary-parallel losses have it: the maximum is a constant."""

    def __init__(self, is_constant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.is_constant = nn.Linear(8, 12, bias=False), is_constant

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        largest = (logits.detach() if self.is_constant else logits).amax(-1, keepdim=True)
        return ((logits - largest).exp().sum(-1).log() + largest.squeeze(-1)).sum()


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("is_constant", [True, False])
def test_a_maximum_over_a_sharded_dimension(is_constant: bool, uneven: bool) -> None:
    model = LogSumExp(is_constant).double()
    gm, given = captured(model, {"x": X})
    gm = normalized(gm)
    place = {module_output("head"): Shard(1, uneven=True)} if uneven else {param("head.weight"): tensor.Shard(0)}
    with fake_mesh((2,), ("tp",)) as mesh:
        report = plan(place).on("tp").apply(gm, context=contexts(mesh))
        run = run_on_ranks(gm, given, mesh, backward=0)
    model(X).backward()
    torch.testing.assert_close(run.outputs[0][0], model(X).detach())
    torch.testing.assert_close(run.gradients()[0], model.head.weight.grad)
    reduced = [node.args[1] for node in gm.graph.nodes if "all_reduce" in key(node)]
    assert ("max" in reduced) == is_constant
    if uneven:  # else it runs on rows, which is cheaper than gathering
        assert ("since its max is differentiated; detach() it" in str(report)) != is_constant


def test_a_maximum_that_is_differentiated_is_not_sent() -> None:
    assert "a value that is differentiated is P(max)" in refused(plan({module_output("mlp.up"): Partial("max")}))


class Require:
    """The step that requires a placement of what `relu` produces."""

    name = "require"

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def run(self, edit: Any, context: SpmdContext, report: Any) -> int:
        edit.set_fact(next(node for node in edit.nodes() if "relu" in node.name), REQUIRED, self.placement)
        return 0

    def text(self) -> str:
        return "requires"


def test_a_required_placement_is_kept_to() -> None:
    gm, given = program()
    with fake_mesh((2,), ("tp",)) as mesh:
        members = (Place("place", ROWS), Require(Shard(0)), PROPAGATE, LOCALIZE, COLLECTIVE_RULES)
        RuleSet("plan", *members, atomic=True).on("tp").apply(gm, context=contexts(mesh))
        assert "all_to_all" in gm.code
        run = run_on_ranks(gm, given, mesh, backward=0)
    check_gradients(gm, run)


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (Shard(0, outer=3), "aten::relu is required to produce S(0, outer=3), and its chunks fall between indices"),
        (Shard(0, outer=4), "aten::relu is required to produce S(0, outer=4), and its chunks fall between indices"),
    ],
    ids=str,
)
def test_a_required_placement_is_refused(placement: Placement, says: str) -> None:
    assert says in refused(RuleSet("plan", Place("place", ROWS), Require(placement), PROPAGATE, LOCALIZE))


@pytest.mark.parametrize("through", [Partial(), Shard(1), Shard(1, inner=2), Shard(0, outer=2)], ids=str)
@pytest.mark.parametrize("then", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_whatever_is_asked_for_is_the_identity(through: Placement, then: Placement) -> None:
    """R -> through -> then -> R, on two ranks, forward and backward."""

    class Ask:
        name = "ask"

        def run(self, edit: Any, context: SpmdContext, report: Any) -> int:
            relu = next(node for node in edit.nodes() if "relu" in node.name)
            users, value = list(relu.users), relu
            for src, dst in ((Replicate(), through), (through, then), (then, Replicate())):
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
