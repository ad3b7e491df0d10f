"""Parallelisms as data: what they lower to, what is sent, and what an author or a user is told who gets one wrong."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate, Shard as TorchShard
from transformers import LlamaConfig, LlamaForCausalLM

from autosp_rules import AutoSPError, autosp
from autosp_rules.parallelism import AUTOSP
from fxrewrite import FxRewriteError
from fxrewrite.backends import normalized
from fxrewrite.ops import key
from fxrewrite.spmd import (
    Alternatives,
    DeferredGather,
    LayoutRule,
    LayoutRules,
    OutputSharded,
    Parallelism,
    Partial,
    ProgramIsLast,
    Replicate,
    Shard,
    Stored,
    ZerosHeld,
    Zigzag,
    choose_alternatives,
    chunked,
    contexts,
    input_placements,
    inputs,
    module_input,
    module_output,
    outputs,
    param,
    sends,
    shard_parameters,
    spmd,
)
from fxrewrite.spmd.group import COLLECTIVES
from fxrewrite.spmd.parallelism.arguments import joined, joining
from fxrewrite.testing import explain_placement, fake_mesh, run_on_ranks, simulate
from rules.parallel import DATA, MEGATRON, ZERO2, ZERO3
from tests.autosp.one_device import captured
from tests.autosp.test_gloo import launch
from tests.versions import TORCH

X = torch.arange(24.0).reshape(4, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


PLACE = {param("*.up.weight"): Shard(0), param("*.down.weight"): Shard(1)}
TENSOR = Parallelism("tensor", axis="tp", place=PLACE, expect=[sends(within="layers.*", all_reduce=1)])


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh((2, 2), ("dp", "tp")) as made:
        yield made


def compiled(plan: Any, mesh: DeviceMesh, *, inner: Any = "eager", model: nn.Module | None = None, **how: Any) -> Any:
    model = shard_parameters(model or Model(), plan, mesh)
    return torch.compile(model, backend=spmd(plan, mesh=mesh, inner=inner), fullgraph=True, **how)


class Autocast(Model):
    """Its weights are cast where they are read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


GATHERS, SCATTERS = "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.mark.slow
def test_what_is_sent(mesh: DeviceMesh) -> None:
    """Shards are gathered a layer at a time forward, and again backward; so are gradients reduced and scattered."""
    sent: dict[str, Counter[str]] = {}
    dtypes: dict[str, set[torch.dtype]] = {}

    def count(of: str) -> Callable[[fx.GraphModule, Any], Any]:
        def compile_one(gm: fx.GraphModule, inputs: Any) -> Any:
            nodes = [node for node in gm.graph.nodes if "c10d" in key(node) and "wait" not in key(node)]
            sent[of] = Counter(key(node).partition("::")[2] for node in nodes)
            dtypes.update((name, set()) for name in sent[of])
            for node in nodes:
                dtypes[key(node).partition("::")[2]].add(node.meta["val"].dtype)
            return make_boxed_func(gm)

        return compile_one

    inner = aot_autograd(
        fw_compiler=count("forward"),
        bw_compiler=count("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    for plan, model, expected in (
        (ZERO3, Model, ({GATHERS: 2}, {GATHERS: 1, SCATTERS: 2})),  # the last layer is kept
        (ZERO2, Model, ({GATHERS: 2}, {SCATTERS: 2})),
        (DATA, Model, ({}, {"all_reduce": 2})),
        (TENSOR, Model, ({"all_reduce": 2}, {"all_reduce": 1})),  # of the first layer's input none
        # the shards of a layer are reduced
        (DATA | replace(ZERO3, axis="tp"), Model, ({GATHERS: 2}, {GATHERS: 1, SCATTERS: 2, "all_reduce": 2})),
        # of a layer one over each axis; six rows are divided over tp alone, and the backward pass gathers no others
        (ZERO3 | replace(ZERO3, axis="tp"), Model, ({GATHERS: 4}, {GATHERS: 1, SCATTERS: 4, "all_reduce": 2})),
        (ZERO3, Autocast, ({GATHERS: 2}, {GATHERS: 1, SCATTERS: 2})),
    ):
        torch._dynamo.reset()
        compiled(plan, mesh, inner=inner, model=model())(X).backward()
        assert (sent["forward"], sent["backward"]) == expected
    assert dtypes[GATHERS] == {torch.bfloat16}
    assert dtypes[SCATTERS] == {torch.float32}


def test_parameters_in_shards(mesh: DeviceMesh) -> None:
    """Names and ties stay; what two axes cut is 1/4; a rank's part is the innermost axis's chunk first."""
    whole = Model()
    whole.layers[1].up.weight = whole.layers[0].up.weight
    model = shard_parameters(copy.deepcopy(whole), ZERO3 | TENSOR, mesh)
    assert list(model.state_dict()) == list(whole.state_dict())
    assert model.layers[1].up._parameters["weight"] is model.layers[0].up._parameters["weight"]
    held = dict(model.named_parameters())
    assert tuple(held["layers.0.up.weight"].to_local().shape) == (2, 6)
    assert tuple(held["layers.0.down.weight"].to_local().shape) == (3, 4)
    assert tuple(held["layers.0.down.bias"].to_local().shape) == (3,)
    assert type(model.layers[0]).__name__ == "Block"
    assert repr(model) == repr(whole)
    nn.init.zeros_(model.layers[0].up.weight)
    assert not model.state_dict()["layers.0.up.weight"].to_local().any()


def test_weights_are_loaded_into_shards(mesh: DeviceMesh) -> None:
    """A rank takes its part of whole tensors, for the model, a part of it, and one that was pickled or copied."""
    plan = ZERO3 | TENSOR
    torch.manual_seed(1)
    saved = Model().state_dict()
    loaded = Model()
    loaded.load_state_dict(saved)
    expected = dict(shard_parameters(loaded, plan, mesh).named_parameters())
    model = shard_parameters(Model(), plan, mesh)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model):
        other.load_state_dict(saved, assign=other is model)
        for name, parameter in other.named_parameters():
            assert parameter.placements == expected[name].placements
            assert torch.equal(parameter.to_local(), expected[name].to_local())
    model.layers[0].load_state_dict({"up.weight": torch.ones(8, 6)}, strict=False)
    assert model.layers[0].up.weight.to_local().eq(1).all()
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.up\.weight"):
        model.load_state_dict({**saved, "layers.0.up.weight": torch.ones(3, 3)})


def test_a_compiled_model_is_not_pickled_and_says_what_is(mesh: DeviceMesh) -> None:
    model = shard_parameters(Model(), ZERO3, mesh)
    compiled = torch.compile(model, backend=spmd(ZERO3, mesh=mesh, inner="eager"))
    compiled(X).backward()
    with pytest.raises(FxRewriteError, match=r"the model as it was before torch\.compile \(compiled\._orig_mod\)"):
        pickle.dumps(compiled)
    assert repr(pickle.loads(pickle.dumps(compiled._orig_mod))) == repr(model)


def test_uneven_shards() -> None:
    """Rows that the ranks do not divide are held as DTensor and FSDP2 hold them, and padded in the program alone."""
    with fake_mesh((4,), ("dp",), rank=3) as four:
        model = shard_parameters(Model(), ZERO3, four)
        assert tuple(model.layers[0].down.weight.to_local().shape) == (0, 8)  # of 6 rows: 2, 2, 2 and none
        step = torch.compile(model, backend=spmd(ZERO3, mesh=four, inner="aot_eager"), fullgraph=True)
        step(X).backward()
        for parameter in model.parameters():
            assert parameter.grad.placements == parameter.placements
            assert parameter.grad.to_local().shape == parameter.to_local().shape
    with fake_mesh((3, 2), ("dp", "tp")) as six:  # of 4 rows that a rank of tp has; torch has no name for such shards
        held = shard_parameters(Model(), ZERO3 | TENSOR, six).layers[0].up.weight
        assert tuple(held.to_local().shape) == (4, 6)
        strict = replace(ZERO3, place={param("*.up.weight"): Stored(Shard(0))})
        with pytest.raises(
            FxRewriteError, match=r"zero3: layers.0.up.weight \[4, 6\]: dp=3 ranks do not divide S\(0\)"
        ):
            shard_parameters(Model(), strict | TENSOR, six)
    rows = torch.arange(60.0).double().sin().reshape(10, 6)  # 8 rows of a weight over five ranks: 2, 2, 2, 2 and none
    ragged = ZERO3 | replace(ZERO3, axis="tp")
    found = simulate(Model().double(), {"x": rows}, ragged, {"dp": 2, "tp": 5})
    assert found.error < 1e-14, str(found)
    with fake_mesh((2, 5), ("dp", "tp")) as ten:
        assert tuple(shard_parameters(Model(), ragged, ten).layers[0].up.weight.to_local().shape) == (2, 6)
        with pytest.raises(
            FxRewriteError, match=r"up.weight: ranks of an inner axis hold uneven shards of dimension 0"
        ):
            shard_parameters(Model(), strict | replace(ZERO3, axis="tp"), ten)


def test_the_last_program_that_dynamo_makes_says_so(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    backend = spmd(TENSOR, mesh=mesh, inner="aot_eager")
    step = torch.compile(shard_parameters(Model(), TENSOR, mesh), backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in (2, 3):
            step(X[:rows])
    first, last = (report.events_of(ProgramIsLast) for report in backend.reports)
    assert not first
    assert f"spmd: {last[0]}" in caplog.messages
    assert "program 2 of 2 that torch.compile makes of the function: calls that need another one run unc" in str(
        last[0]
    )
    assert "or end with an error of torch's where parameters are in shards; mark the sizes" in str(last[0])


class Uneven(nn.Module):
    """A loss that is no mean over rows, of statistics of the batch and of what a buffer counts; NaN in some parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.linear(x))
        self.seen.add_(hidden.detach().sum(0) + len(x))
        return F.cross_entropy(hidden * self.seen, at, reduction="sum") + F.cross_entropy(hidden, at)


@pytest.mark.parametrize("ranks", [2, 4])
def test_own_data_is_compared_with_the_mean_of_the_losses_of_its_parts(ranks: int) -> None:
    at = torch.tensor([0, 1, 2, -100, -100, -100, 1, 2])  # of four ranks, one has no label
    x = torch.arange(48.0).double().sin().reshape(8, 6)
    for plan in (DATA, ZERO3):
        found = simulate(Uneven().double(), {"x": x, "at": at}, plan, {"dp": ranks})
        assert found.error < 1e-12, str(found)
        assert ("are NaN on one device" in str(found)) == (ranks == 4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.slow
def test_lengths(mesh: DeviceMesh, dynamic: bool) -> None:
    """Batches of other sizes run, in one program where they are dynamic."""
    step = compiled(ZERO3 | TENSOR, mesh, dynamic=dynamic)
    for size in (4, 6, 5):
        step(torch.ones(size, 6)).backward()


def refused(mesh: DeviceMesh, plan: Any, text: str, *, shard: Any = None) -> None:
    """Sharding a model as `shard` says, or the plan, or not at all, and training it by the plan is an error."""

    def train() -> None:
        model = Model() if shard is False else shard_parameters(Model(), shard or plan, mesh)
        torch.compile(model, backend=spmd(plan, mesh=mesh, inner="eager"), fullgraph=True)(X).backward()

    with pytest.raises(Exception, match=text):  # torch wraps what a backend raises
        train()


def test_what_is_stated_wrong_is_said(mesh: DeviceMesh) -> None:
    refused(mesh, replace(TENSOR, place={param("*.upp.weight"): Shard(0)}), r"'\*.upp.weight'\) matches no parameter")
    refused(mesh, replace(TENSOR, place={param("*.up.weight"): Shard(2)}), r"tensor: layers.0.up.weight: S\(2\)")
    refused(mesh, replace(TENSOR, place={param("*.up.weight"): Shard(0, uneven=True)}), "cannot be held as")
    refused(mesh, replace(TENSOR, place={param("*.up.weight"): Shard(True)}), r"Shard\(True\): a dimension is an int")
    refused(mesh, replace(TENSOR, axis="pp"), "over axis 'pp', and the mesh has")
    refused(
        mesh,
        replace(TENSOR, expect=[sends(all_reduce=3, hint="cut more")]),
        "(?s)has 2 all_reduce over tp, and 3 are expected.*; cut more",
    )
    refused(
        mesh,
        replace(TENSOR, expect=[sends(within="blocks.*")]),
        r"no module of the graph matches 'blocks.\*'; .* layers.0",
    )
    by_rows = {param("*.{up,down}.weight"): Shard(0)}
    some = replace(TENSOR, place=by_rows, expect=[sends(within="*.1", all_reduce=1)])
    refused(mesh, some, r"layers.1 has 2 all_gather over tp, and 0 are expected")
    refused(mesh, replace(TENSOR, place={inputs("x"): Stored(Shard(0))}), "only parameters are")
    refused(mesh, replace(TENSOR, place={**PLACE, outputs(0): Partial()}), r"an output cannot leave as P\(sum\)")
    refused(mesh, TENSOR | ZERO3, r"the inner one cuts first; write zero3 \| tensor")
    for place in (PLACE, {inputs("x"): Shard(0)}, {module_output("*.up"): Shard(0)}):
        with pytest.raises(FxRewriteError, match="have values of their own"):
            replace(DATA, place=place)
    with pytest.raises(FxRewriteError, match="data='mine' is not one of"):
        replace(DATA, data="mine")  # pyright: ignore[reportArgumentType]
    with pytest.raises(FxRewriteError, match=r"'up.weight' names no site; write param\('up.weight'\)"):
        replace(TENSOR, place={"up.weight": Shard(0)})  # pyright: ignore[reportArgumentType]
    with pytest.raises(FxRewriteError, match="tensor and zero3 are both over axis 'tp'"):
        _ = TENSOR | replace(ZERO3, axis="tp")
    twice = replace(TENSOR, place={**PLACE, param("layers.0.up.weight"): Shard(1)})
    said = r"layers.0.up.weight is stated as S\(0\) by param\('\*.up.weight'\), and as S\(1\) by"
    refused(mesh, twice, said)
    one_module = {module_output("layers.0.up"): Shard(1), module_output("*.up"): Replicate()}
    refused(mesh, replace(TENSOR, place=one_module), r"'\*.up'\): R both match layers.0.up; let one glob match it")
    with pytest.raises(FxRewriteError, match=r"outputs\(-1\): a position is an int, counted from the front"):
        outputs(-1)
    with pytest.raises(FxRewriteError, match="expect is a list of Sends or Fires, and has"):
        replace(TENSOR, expect=sends(all_reduce=1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(FxRewriteError, match="tensor: method is a RuleSet, and not "):
        replace(TENSOR, method=[])  # pyright: ignore[reportArgumentType]
    with pytest.raises(FxRewriteError, match="lowered is a list of Rule or RuleSet or Step, and has 'mine'"):
        replace(TENSOR, lowered=["mine"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(FxRewriteError, match="rules is a list of Rule or RuleSet or Step, and has 'mine'"):
        replace(TENSOR, rules=["mine"])  # pyright: ignore[reportArgumentType]


def test_a_plan_is_what_was_stated_when_it_was_made() -> None:
    place, expect = dict(PLACE), [sends(within="layers.*", all_reduce=1)]
    plan = Parallelism("tensor", axis="tp", place=place, expect=expect)
    before = str(plan)
    place.clear()
    expect.append(sends(all_reduce=9))
    assert str(replace(plan)) == before
    assert plan.place == PLACE


def test_a_model_that_is_held_otherwise_is_refused(mesh: DeviceMesh) -> None:
    refused(mesh, TENSOR, r"layers.0.up.weight is stated in shards \(tp: S\(0\)\), and the model holds it", shard=False)
    refused(mesh, ZERO3 | TENSOR, "and the plan says", shard=TENSOR)
    model = shard_parameters(Model(), TENSOR, mesh)
    with pytest.raises(FxRewriteError, match="a DTensor already"):
        shard_parameters(model, TENSOR, mesh)
    with pytest.raises(FxRewriteError, match="Model has its parameters in shards: train and evaluate it through"):
        model(X)
    compiled: Any = torch.compile(model, backend=spmd(TENSOR, mesh=mesh, inner="eager"))
    said = r"in shards: torch.compile runs it uncompiled: .* compiled 0 times already \(torch._dynamo.config"
    with torch._dynamo.config.patch(recompile_limit=0), pytest.raises(FxRewriteError, match=said):
        compiled(X)


class Weighted(nn.Module):
    """Reads where in the whole input a row is."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.lin(x) * torch.arange(x.shape[0]).unsqueeze(1)
        return (h if y is None else h - y).square().mean()


ROWS = torch.arange(48.0).double().sin().reshape(8, 6)
CHUNKS, BLOCKS = ({inputs("{x,y}"): placement} for placement in (Shard(0), Zigzag(0)))


READ_IN_COLUMNS = {module_input("lin"): Shard(1)}


@pytest.mark.parametrize(
    "place",
    [CHUNKS, BLOCKS, {inputs("x"): Zigzag(0), inputs("y"): Shard(0)}, {**BLOCKS, **READ_IN_COLUMNS}],
)
@pytest.mark.slow
def test_inputs_in_chunks(place: Any) -> None:
    """The program is that of the whole input; what ranks compile reads chunks of any length."""
    plan = Parallelism("chunks", axis="tp", place=place)
    with fake_mesh((2,), ("tp",)) as mesh:
        step = compiled(plan, mesh, model=Weighted().double(), dynamic=True)
        for size in (2, 4):
            step(ROWS[:size], y=ROWS[:size].clone()).backward()
    found = simulate(Weighted().double(), {"x": ROWS, "y": ROWS + 1}, plan, {"tp": 2})
    assert found.error < 1e-14, str(found)


@pytest.mark.parametrize("make", [nn.Linear, Weighted], ids=["own", "none"])
def test_a_model_with_inputs_in_chunks_is_copied_and_pickled(make: Any) -> None:
    """Whether the module that gets the chunks has parameters of its own or not."""
    model = make(6, 6) if make is nn.Linear else make()
    plan = Parallelism("chunks", axis="tp", place={inputs("{x,input}"): Shard(0)})
    with fake_mesh((2,), ("tp",)) as mesh:
        model = shard_parameters(model, plan, mesh)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model))):
            assert (repr(other), type(other)) == (repr(model), type(model))
            torch._dynamo.reset()
            backend = spmd(plan, mesh=mesh, inner="eager")
            found = torch.compile(other, backend=backend, fullgraph=True)(torch.ones(2, 6))
            assert found.shape == ((4, 6) if make is nn.Linear else ())


def test_what_a_module_reads_is_stated_over_two_axes() -> None:
    """What the inner axis sends of an input stands before what the outer axis states of it."""
    inner, outer = (
        Parallelism(axis, axis=axis, place={inputs("x"): Shard(dim), module_input("lin"): Replicate()})
        for axis, dim in (("tp", 1), ("dp", 0))
    )
    found = simulate(Weighted().double(), {"x": ROWS}, outer | inner, {"dp": 2, "tp": 2})
    assert found.sent == {"dp": {"all_gather": 1}, "tp": {"all_gather": 1}}
    assert found.grad_error < 1e-14, str(found)
    by_rows = outer | replace(inner, place={**inner.place, inputs("x"): Shard(0)})
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        compiled(by_rows, mesh, model=Weighted().double())(ROWS[:2]).backward()
    assert simulate(Weighted().double(), {"x": ROWS}, by_rows, {"dp": 2, "tp": 2}).grad_error < 1e-14


def test_a_gather_that_nobody_reads_is_not_sent() -> None:
    """The bias is held by rows, so the product is computed by rows, of the rows of the weight that a rank holds."""
    place = {param("lin.weight"): Stored(Shard(0)), param("lin.bias"): Shard(0)}
    found = simulate(Weighted().double(), {"x": ROWS}, Parallelism("rows", axis="tp", place=place), {"tp": 2})
    assert found.sent == {"tp": {"all_reduce": 1}}
    assert found.grad_error < 1e-14, str(found)


class Contracting(nn.Module):
    """Operators that contract features, and add a bias once."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.down, self.up = (
            nn.Conv2d(2, 12, 3),
            nn.Conv2d(12, 4, 3, padding=1),
            nn.ConvTranspose2d(12, 3, 2),
        )
        self.rows, self.columns = nn.Linear(12, 5), nn.Parameter(torch.rand(3, 12, 5))
        self.bias = nn.Parameter(torch.rand(3, 1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.wide(x))
        loss = self.down(x).square().mean() + self.up(x).sin().mean()
        x = x.mean((2, 3))
        batch = torch.baddbmm(self.bias, x.expand(3, -1, -1), self.columns, beta=0.5, alpha=2)
        return (
            loss + torch.addmm(self.bias[0], x, self.columns[0]).sin().mean() + batch.mean() + self.rows(x).cos().mean()
        )


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_what_is_added_once_is_added_on_one_rank(sizes: dict[str, int]) -> None:
    """Nothing is gathered where a contracted dimension is in shards, and the gradient of a bias needs no collective."""
    place = {
        param("wide.{weight,bias}"): Shard(0),
        param("{down,rows}.weight"): Shard(1),
        param("up.weight"): Shard(0),
        param("columns"): Shard(1),
    }
    channels = Parallelism("channels", axis="tp", place=place)
    images = {"x": torch.arange(288.0, dtype=torch.float64).sin().reshape(4, 2, 6, 6)}
    found = simulate(Contracting().double(), images, DATA | channels if "dp" in sizes else channels, sizes)
    assert found.error < 1e-14, str(found)
    assert found.sent["tp"] == {"all_reduce": 5}
    assert not [c for c in found.report.collectives if c.axis == "tp" and c.direction == "backward"]


class Normed(nn.Module):
    """A batch norm of channels, whose running statistics every rank holds whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.down = nn.Conv2d(2, 12, 3), nn.BatchNorm2d(12), nn.Conv2d(12, 4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(torch.relu(self.norm(self.wide(x)))).square().mean(), self.norm.running_mean.clone()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_batch_norm_of_channels_in_shards(ranks: int) -> None:
    """A rank reads its part of the statistics, which the whole of them is written over afterwards."""
    place = {param("{wide,norm}.{weight,bias}"): Shard(0), param("down.weight"): Shard(1)}
    images = {"x": torch.arange(288.0, dtype=torch.float64).sin().reshape(4, 2, 6, 6)}
    plan = Parallelism("channels", axis="tp", place=place)
    found = simulate(Normed().double(), images, plan, {"tp": ranks})
    assert found.error < 1e-14, str(found)
    assert found.sent == {"tp": {"all_gather": 2, "all_reduce": 1}}


class Permuted(nn.Module):
    """Its weight is read in an order that is a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(36.0).sin().reshape(6, 6))
        self.order = nn.Parameter(torch.arange(6).flip(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[self.order]).square().mean()


def test_the_gradient_of_a_weight_that_is_gathered_by_chunks_of_an_index() -> None:
    """The rows of a rank's indices are other rows than those of another: their gradients are not averaged."""
    plan = Parallelism("rows", axis="tp", place={param("order"): Shard(0), inputs("x"): Shard(0)})
    found = simulate(Permuted().double(), {"x": ROWS}, plan, {"tp": 2})
    assert found.sent["tp"]["all_gather"] == 1
    assert found.grad_error < 1e-14, str(found)


def test_inputs_in_chunks_that_are_stated_wrong(mesh: DeviceMesh) -> None:
    def train(place: Any, *, of: Any = lambda model: model, shard: Any = None, rows: int = 8) -> None:
        plan, model = Parallelism("chunks", axis="tp", place=place), Weighted().double()
        if shard != {}:
            model = shard_parameters(model, replace(plan, place=shard or place), mesh)
        torch.compile(of(model), backend=spmd(plan, mesh=mesh, inner="eager"), fullgraph=True)(ROWS[:rows])

    def call(place: Any, text: str, **how: Any) -> None:
        with pytest.raises(Exception, match=text):  # torch wraps what a backend raises
            train(place, **how)

    call({inputs("z"): Shard(0)}, r"inputs\('z'\) matches nothing; the graph has 'x'")
    call({inputs("x"): Shard(2)}, r"inputs\('x'\): x: S\(2\) of a value with 2 dimensions")
    call(BLOCKS, "has 4 blocks, which do not divide it", rows=3)
    call(CHUNKS, "x is stated in shards .*; call shard_parameters", shard={})
    call(CHUNKS, "was prepared for inputs in chunks", shard={inputs("*"): Shard(0)})
    call(CHUNKS, "the compiled function computes it", of=lambda model: lambda x: model(x + 1))
    call({param("lin.weight"): Zigzag(0)}, r"only inputs can be held as Z\(0\)")


class Keeping(nn.Module):
    """Its weight is read from a list, and not as the module's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.kept = [self.lin.weight]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(), self.kept[0].sum()


def test_a_parameter_that_is_read_past_its_module_is_refused(mesh: DeviceMesh) -> None:
    model = shard_parameters(Keeping(), ZERO3, mesh)
    model.kept = [model.lin._parameters["weight"]]
    backend = spmd(ZERO3, mesh=mesh, inner="eager")
    for step in (model, lambda x: model(x)[0] + sum(p.sum() for p in model.parameters())):
        with pytest.raises(Exception, match=r"is read as a DTensor.*read it as an attribute of its module"):
            torch.compile(step, backend=backend, fullgraph=True)(X)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_another_backend_is_refused(inner: str, mesh: DeviceMesh) -> None:
    """It would compute with memory that nobody has written to, and give no gradients."""
    step = torch.compile(shard_parameters(Model(), ZERO3, mesh), backend=inner)
    with pytest.raises(Exception, match=r"that spmd has not lowered; compile the model with backend=spmd"):
        step(X).backward()
    if inner != "eager":
        torch._dynamo.reset()
        with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="that spmd has not lowered"):
            step(X)


def test_a_model_in_a_wrapper_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(FxRewriteError, match=r"the model is what torch\.compile returned; shard the parameters of"):
        shard_parameters(torch.compile(Model(), backend="eager"), ZERO3, mesh)
    model = shard_parameters(Model(), DATA, mesh)
    for wrapped in (model, torch.compile(model, backend=spmd(DATA, mesh=mesh, inner="eager"))):
        with pytest.raises(FxRewriteError, match=r"in shards, and spmd reduces their gradients.*DATA \| plan"):
            nn.parallel.DistributedDataParallel(wrapped)


def test_parametrizations_are_made_before(mesh: DeviceMesh) -> None:
    model = shard_parameters(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), ZERO3, mesh)
    torch.compile(model, backend=spmd(ZERO3, mesh=mesh, inner="eager"), fullgraph=True)(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(
        FxRewriteError, match=r"weight of ParametrizedLinear is in shards, and something has put another value in"
    ):
        nn.utils.parametrizations.weight_norm(shard_parameters(nn.Linear(6, 6), ZERO3, mesh))


@pytest.mark.parametrize("plan", [DATA, ZERO3], ids=["replicas", "zero3"])
def test_parameters_as_they_were_before_are_refused(plan: Parallelism, mesh: DeviceMesh) -> None:
    """Otherwise a module that keeps a reference, or an optimizer made before, would train what nobody reads."""
    model = Keeping()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(Exception, match=r"lin\.weight is read as it was before shard_parameters"):
        compiled(plan, mesh, model=model)(X)
    with pytest.raises(FxRewriteError, match=r"the optimizer has lin\.weight as it was before shard_parameters"):
        optimizer.step()
    torch.optim.SGD(model.parameters()).step()


def test_a_way_between_graphs_that_does_not_exist_is_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FxRewriteError, match=r"outputs='shard' is not one of \('auto', 'gather'\)"):
        spmd(ZERO3, mesh=mesh, outputs="shard")  # pyright: ignore[reportArgumentType]
    with pytest.raises(FxRewriteError, match=r"breaks='refuse' is not one of \('gather', 'dtensor'\)"):
        spmd(ZERO3, mesh=mesh, breaks="refuse")  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("fxrewrite.spmd.runtime.chunked_tensor.DISPATCHES_DTENSOR_SUBCLASSES", False)
    with pytest.raises(FxRewriteError, match=r"between graphs need torch 2\.12 or newer, and this is 2"):
        spmd(ZERO3, mesh=mesh, breaks="dtensor")
    with pytest.raises(AutoSPError, match=r"between graphs need torch 2\.12 or newer"):
        autosp(inner="eager", breaks="dtensor")


@pytest.mark.skipif(TORCH < (2, 12), reason="DTensors between graphs need torch 2.12")
def test_rows_of_a_table_in_chunks_are_whole_between_graphs() -> None:
    """Eager code looks ids up in rows over the ranks, and Dynamo compiles what reads the result: no guard fails."""
    with fake_mesh((2,), ("tp",)) as mesh:
        table = chunked(DTensor.from_local(torch.ones(4, 3), mesh, [TorchShard(0)], run_check=False))
        found = nn.functional.embedding(torch.tensor([1, 5]), table)
        assert list(found.placements) == [TorchReplicate()]
        assert torch.compile(lambda x: x.shape[0] * 2, backend="eager")(found) == 4


def test_a_page_shows_the_method() -> None:
    page = str(ZERO3 | AUTOSP | MEGATRON)
    where = [page.index(f"over {axis}:") for axis in ("tp", "sp", "dp")]
    assert where == sorted(where), "the innermost axis is lowered first"
    assert "param('*'): S(0), gathered before use (whole where it does not fit)" in page


class Scored(nn.Module):
    """Returns hidden values beside its loss, which is the largest of each row, and a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.relu(self.up(x))
        y = self.down(hidden)
        return y.square().mean(), hidden, y.argmax(-1), self.down.weight.t()


def test_what_returns_beside_a_loss_is_gathered_when_it_is_used(mesh: DeviceMesh) -> None:
    """Over every axis whose ranks hold it in chunks; views of inputs, which AOTAutograd makes anew, are whole."""
    rows = Parallelism("rows", axis="dp", place={inputs("x"): Shard(0)})
    place: dict[Any, Any] = {param("up.{weight,bias}"): Shard(0), param("down.weight"): Shard(1)}
    plan = rows | Parallelism("features", axis="tp", place=place)
    sent = dict[str, Counter[str]]()
    for returned in ("auto", "gather"):
        torch._dynamo.reset()
        programs: list[fx.GraphModule] = []
        backend = spmd(plan, mesh=mesh, inner=lambda gm, _, to=programs: to.append(gm) or gm, outputs=returned)  # pyright: ignore[reportArgumentType]
        _, hidden, largest, weight = torch.compile(shard_parameters(Scored(), plan, mesh), backend=backend)(X[:2])
        assert (hidden.shape, largest.shape, largest.dtype) == ((4, 8), (4,), torch.int64)
        assert (weight.shape, type(weight)) == ((8, 6), torch.Tensor)
        assert all(isinstance(value, DeferredGather) == (returned == "auto") for value in (hidden, largest))
        sent[returned] = Counter(key(node).partition("::")[2] for node in programs[0].graph.nodes if _sends(node))
        said = [str(event) for event in backend.reports[0].events_of(OutputSharded)]
        held = [str(event) for event in backend.reports[0].events_of(ZerosHeld)]
        if returned == "auto":
            (zeros,) = held  # of [4, 8] in float32, a quarter; the integers of `largest` have no gradient
            assert "32 bytes on each rank" in zeros
            assert "gathered over tp=2, dp=2 at the first use" in repr(hidden)
            assert len(said) == 3
            assert any("(4, 8) S(1) over tp is gathered when it is first used" in line for line in said), said
        else:
            assert not said + held
    assert sent == {
        "auto": {"all_reduce": 2, "all_gather_into_tensor": 1},
        "gather": {"all_reduce": 2, "all_gather_into_tensor": 4},
    }


class BrokenScored(Scored):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.sin()
        torch._dynamo.graph_break()
        return Scored.forward(self, x)


def test_a_model_that_breaks_says_nothing_of_the_next(mesh: DeviceMesh) -> None:
    """One backend serves both: what is a part of one model does not make the whole of another a part."""
    torch._dynamo.reset()
    plan = Parallelism(
        "features", axis="tp", place={param("up.{weight,bias}"): Shard(0), param("down.weight"): Shard(1)}
    )
    backend = spmd(plan, mesh=mesh, inner="eager")
    for model, is_deferred in ((Scored(), True), (BrokenScored(), False), (Scored(), True)):
        _, hidden, *_ = torch.compile(shard_parameters(model, plan, mesh), backend=backend)(X)
        assert isinstance(hidden, DeferredGather) == is_deferred


def _sends(node: fx.Node) -> bool:
    return "c10d" in key(node) and "wait" not in key(node)


OF_THE_VOCABULARY = (
    *("ZeRO-3, Megatron", "ZeRO-3, Megatron, layer by layer", "logits in chunks of two axes", "a ring, Megatron"),
)


@pytest.mark.some(0)
@pytest.mark.gloo
def test_on_real_processes(tmp_path: Path) -> None:
    """Steps of training equal those of one device; so do evaluation, and a checkpoint resumed on another mesh."""
    for text in launch("spmd.parallelism.parallel_worker", "", 4, tmp_path):
        cells = json.loads(text)
        weights, values, uncut, sizes = cells.pop("ranks that differ")["said"]
        assert "differ in parameter down_proj.bias of call 1" in weights, "the first by name"
        assert "first difference: line" in weights
        assert "differ in input x of call" in values
        assert re.search(
            r"every rank passes the same x \[4, \d\], which the plan says are its chunk of the batch", uncut
        )
        assert "hold chunks of different sizes; first difference: line 1: 'x [" in sizes
        alone = cells.pop("one that cannot compile")
        assert "MemoryError: no room for kernels" in alone["said"][0], alone
        assert alone["seconds"] < 30, "no rank waits for another one"
        for other in cells.pop("other parameters")["said"]:
            assert re.search(r"first difference: line \d+: .*layers.1.up.weight", other)
            assert "every rank must use the same parameters at the same call" in other
        assert len(cells) == (21 if TORCH >= (2, 12) else 20)
        assert not cells["ZeRO-3, Megatron, in three graphs"].pop("borders")
        borders = cells.get("ZeRO-3, Megatron, in three graphs, DTensors", {}).pop("borders", [])
        assert len(borders) in ((7,) if TORCH >= (2, 12) else (0,)), "values out of a graph and into others"
        assert all(re.search(r"\[2, [68]\] tp: S\(1\) stays in chunks, as a DTensor$", line) for line in borders), (
            borders
        )
        for name, found in cells.items():
            # inductor rounds norms differently, and a loss over shards of the vocabulary is summed in float32
            exact = 1e-6 if "inductor" in name or name in OF_THE_VOCABULARY else 1e-12
            assert found["parameters"] <= exact, (name, found)
            assert found.get("evaluated", 0.0) <= exact, (name, found)
        assert cells["replicas, ZeRO-3"]["held"] == 1 / 2
        assert any("regions" in line for line in cells["replicas, ZeRO-3"]["regions"]), cells["replicas, ZeRO-3"]
        assert cells["ZeRO-3, inductor"]["held"] <= 1.02 / 4, "four ranks do not divide the vocabulary"


@pytest.mark.some(0)
@pytest.mark.gloo
def test_on_eight_processes(tmp_path: Path) -> None:
    """On 2 x 2 x 2, each holds an eighth of parameters, gradients and optimizer states, to 2 %."""
    for text in launch("spmd.parallelism.parallel_worker", "", 8, tmp_path):
        cells = json.loads(text)
        found = cells["ZeRO-3, AutoSP, Megatron"]
        assert found["parameters"] <= 1e-6, "a loss over shards of the vocabulary is summed in float32"
        assert 1 / 8 <= found["held"] <= 1.02 / 8
        assert cells["resumed"]["parameters"] == 0


@pytest.mark.parametrize(
    ("plan", "sizes", "sent"),
    [
        (ZERO3 | TENSOR, {"dp": 2, "tp": 2}, {"dp": {"all_gather": 2}, "tp": {"all_reduce": 2}}),
        (
            replace(DATA, axis="rep") | replace(ZERO3, axis="shard"),
            {"rep": 2, "shard": 2},
            {"rep": {}, "shard": {"all_gather": 2}},
        ),
        (DATA | TENSOR, {"dp": 4, "tp": 4}, {"dp": {}, "tp": {"all_reduce": 2}}),
        (ZERO2, {"dp": 4}, {"dp": {"all_gather": 2}}),
        (replace(ZERO3, axis="shard") | TENSOR | replace(DATA, axis="again"), {"shard": 2, "tp": 2, "again": 2}, None),
        (ZERO3 | TENSOR, {"dp": 2, "tp": 1}, {"dp": {"all_gather": 2}, "tp": {}}),
    ],
)
@pytest.mark.slow
def test_simulated_ranks_equal_one_device(plan: Any, sizes: dict[str, int], sent: Any) -> None:
    """Also where each rank has rows of its own, where replicas are the innermost axis, and in uneven shards."""
    found = simulate(Model().double(), {"x": torch.arange(96.0).double().sin().reshape(16, 6)}, plan, sizes)
    assert found.loss_error < 1e-14, str(found)
    assert max(found.grad_errors.values()) < 1e-14, str(found)
    assert len(found.grad_errors) == 6
    assert sent is None or found.sent == sent


class Positions(Model):
    """What is read first is read while gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows = self.positions(torch.arange(3)).sum(0) * self.layers[0].up.weight.sum()
        return super().forward(x + rows)


class Taught(Model):
    """It reads what other layers make of its input while gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            learned = self.teacher[1](self.teacher[0](x))
        return super().forward(x + learned)


@pytest.mark.parametrize("plan", [ZERO3, ZERO3 | TENSOR])
@pytest.mark.slow
def test_parameters_that_are_read_without_gradients(plan: Any) -> None:
    sizes = {member.axis: 2 for member in plan.members}
    found = simulate(Positions().double(), {"x": ROWS}, plan, sizes)
    assert found.grad_error < 1e-14, str(found)
    found = simulate(Taught().double(), {"x": ROWS}, plan, sizes)
    assert found.grad_error < 1e-14, str(found)
    steps = {torch._C._set_grad_enabled: "switch", COLLECTIVES["all_gather"]: "gather"}
    order = [steps[node.target] for node in found.program.graph.nodes if node.target in steps]
    # the teacher's two layers are gathered where they run; one of the model is, a layer ahead, before the switch
    assert order == ["gather", "switch", "gather", "gather", "switch", "gather"]


def rows_of_a_mask(gm: fx.GraphModule, inputs: Any) -> Any:
    """What AOTAutograd raises of `x[mask] = y`, the gradient of which has as many rows as the mask has."""
    raise DynamicOutputShapeException(torch.ops.aten.nonzero.default)


def test_what_the_inner_backend_cannot_compile_is_said(mesh: DeviceMesh) -> None:
    with pytest.raises(BackendCompilerFailed, match=r"rows_of_a_mask cannot compile aten.nonzero.*masked_scatter"):
        compiled(ZERO3, mesh, inner=rows_of_a_mask)(X)


def test_transforms_of_functions_are_refused_by_name(mesh: DeviceMesh) -> None:
    model = shard_parameters(Model(), ZERO3, mesh)
    step = torch.compile(torch.func.grad(lambda x: model(x)), backend=spmd(ZERO3, mesh=mesh, inner="eager"))
    with pytest.raises(BackendCompilerFailed, match=r"a transform of torch.func .* inside of the compiled function"):
        step(X)


@pytest.mark.slow
def test_models_of_one_program_with_the_same_names() -> None:
    """A model that is called twice and its reference: each parameter is placed, and each call sends its own sums."""
    policy, reference = Model().double(), Model().double()

    def margin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (policy(x) - reference(x).detach()) * policy(y) + reference(y)

    given = {"x": ROWS, "y": ROWS.cos()}
    expected = margin(**given)
    expected.backward()
    gm, values = captured(margin, given)
    program = normalized(gm)
    with fake_mesh((2,), ("tp",)) as mesh:
        TENSOR.plan().apply(program, context=contexts(mesh))
        run = run_on_ranks(program, values, mesh, backward=0)
    for (found,) in run.outputs:
        torch.testing.assert_close(found, expected.detach())
    held = [placed["tp"] for placed in input_placements(program)]
    assert [held.count(placement) for placement in (Shard(0), Shard(1))] == [4, 4]
    grads = [value for value in run.gradients() if value is not None]
    wanted = [value.grad for value in values if value.grad is not None]
    for found, value in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, value)


def test_two_models_in_shards(mesh: DeviceMesh) -> None:
    policy, reference = (shard_parameters(Model(), ZERO3 | TENSOR, mesh) for _ in range(2))
    backend = spmd(ZERO3 | TENSOR, mesh=mesh, inner="eager")
    torch.compile(lambda x: policy(x) - reference(x), backend=backend, fullgraph=True)(X).backward()
    for model in (policy, reference):
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


class Repeated(Model):
    """A layer that is called three times with what it returned, or three layers."""

    def __init__(self, *, is_shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()] * 3 if is_shared else [Block(), Block(), Block()])


@pytest.mark.slow
def test_a_module_that_is_called_several_times() -> None:
    """What is stated of a module holds for each call, as for modules of their own."""
    shared, apart = (Repeated(is_shared=how).double() for how in (True, False))
    found = simulate(shared, {"x": ROWS}, TENSOR, {"tp": 2})
    assert found.grad_error < 1e-14, str(found)
    assert found.sent == {"tp": {"all_reduce": 3}}
    rows = {module_input("layers.*"): Shard(0), module_output("layers.*"): Replicate()}
    sent: list[Any] = []
    for model in (shared, apart):
        found = simulate(model, {"x": ROWS}, Parallelism("rows", axis="tp", place=rows), {"tp": 2})
        assert found.grad_error < 1e-14, str(found)
        sent.append(found.sent)
    assert sent[0] == sent[1]
    with pytest.raises(ValueError, match=r"layers.0 has 1 all_reduce over tp, and 0 are expected"):
        simulate(shared, {"x": ROWS}, replace(TENSOR, expect=[sends(within="layers.*")]), {"tp": 2})


@pytest.mark.slow
def test_any_number_of_simulations() -> None:
    model = Model()
    for _ in range(torch._dynamo.config.recompile_limit + 1):
        assert simulate(model, {"x": X}, DATA, {"dp": 2}).loss_error < 1e-6


def test_a_placement_is_explained() -> None:
    """From a value back to what was stated, with what is sent for its readers, over each axis."""
    expect = [sends(within="layers.*", all_reduce=1)]
    by_rows = replace(TENSOR, place={param("*.{up,down}.weight"): Shard(0)}, expect=expect)
    text = explain_placement(Model(), {"x": X}, by_rows, {"tp": 2}, "layers.0.up")
    assert re.sub(r"test_parallelism.py:\d+", "here", text).splitlines()[:3] == [
        "layers.0.up [4, 8] is S(1) over tp=2",
        "    %linear: S(1), sharded on o  aten::linear here",
        "    layers.0.up.weight: S(0), stated by param('*.{up,down}.weight')",
    ]
    assert "then refused: layers.0 has 1 all_gather over tp, and 0 are expected" in text
    text = explain_placement(Model(), {"x": X}, ZERO3 | TENSOR, {"dp": 2, "tp": 2}, "layers.1.down{,.weight}")
    lines = text.splitlines()
    assert any(line.startswith("    -> R for %") and line.endswith("each rank sends 48 bytes") for line in lines)
    where = lines.index("layers.1.down [2, 6] is P(sum) over tp=2")  # with its bias, which one rank adds
    assert lines[where + 1].startswith("    %linear_3: P(sum), a summand on each rank: sharded on i")
    assert "    layers.1.down.weight: S(0), stated by param('*')" in lines
    with pytest.raises(FxRewriteError, match=r"names no value of the graph; did you mean layers\.0\.up"):
        explain_placement(Model(), {"x": X}, TENSOR, {"tp": 2}, "layers.0.upp")


def test_a_sum_is_sent_by_the_module_that_computes_it() -> None:
    """And not by the one that reads it, which stands outside of it."""
    plan = replace(TENSOR, expect=[sends(within="layers.*.down", all_reduce=1)])
    assert simulate(Model(), {"x": X}, plan, {"tp": 2}).sent == {"tp": {"all_reduce": 2}}


def test_casts_before_gathers() -> None:
    """Two parallelisms under autocast: weights that are cast are sharded as others, and their gradients averaged."""
    torch.manual_seed(0)
    model = Autocast()
    found = simulate(model, {"x": torch.randn(8, 6)}, replace(ZERO3, axis="shard") | TENSOR, {"shard": 4, "tp": 2})
    assert found.sent["shard"] == {"all_gather": 2}
    assert found.error < 1e-2, str(found)  # of bfloat16


def test_a_simulation_that_cannot_be_run() -> None:
    with pytest.raises(FxRewriteError, match=r"tp=2 ranks do not divide S\(0\)"):
        simulate(Weighted(), {"x": X[:3]}, Parallelism("chunks", axis="tp", place={inputs("x"): Shard(0)}), {"tp": 2})
    elsewhere = Parallelism("elsewhere", axis="tp", place={param("model.*.weight", optional=True): Shard(0)})
    with pytest.raises(FxRewriteError, match="nothing of the graph matches what is stated, param"):
        simulate(Model(), {"x": X}, elsewhere, {"tp": 2})
    with pytest.raises(FxRewriteError, match="over axis 'tp', and the mesh has"):
        simulate(Model(), {"x": X}, TENSOR, {"dp": 2})
    with pytest.raises(FxRewriteError, match="3 ranks of axis dp do not divide dimension 0"):
        simulate(Model(), {"x": X}, DATA, {"dp": 3})


class OfAny(nn.Module):
    """Does not name its arguments."""

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return args[0].square().sum() / args[1] + kwargs["y"].sum()


class Divided(nn.Linear):
    """Divides by a number, such as the count of labels that a trainer passes."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().sum() / n


def test_a_number_is_whole_where_ranks_have_rows_of_the_batch() -> None:
    number = torch.tensor(8.0, dtype=torch.float64)
    found = simulate(Divided(6, 6).double(), {"x": X.double(), "n": number}, DATA, {"dp": 2})
    assert found.error < 1e-12, str(found)


def test_arguments_that_the_model_does_not_name_have_the_names_that_dynamo_gives_them() -> None:
    graphs: list[torch.fx.GraphModule] = []
    model = OfAny()
    model.__class__ = type("Joined", (OfAny,), joining(OfAny, (("dp", "args_0", 0, 2),)))
    compiled = torch.compile(model, backend=lambda gm, _: graphs.append(gm) or gm.forward)
    with pytest.raises(FxRewriteError, match="args_0 is passed in chunks to a program that spmd has not lowered"):
        compiled(X, torch.ones(()), y=X)
    names = [node.args[1] for node in graphs[0].graph.find_nodes(op="call_function", target=joined)]
    assert names == ["args_0", "args_1", "y"]


class Odd(nn.Module):
    """Names with capitals, draws, a buffer that is written to, tensors in dictionaries."""

    def __init__(self, *, is_sum: bool = False, p: float = 0.5) -> None:
        super().__init__()
        self.Up, self.LayerNorm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.Down = nn.Linear(8, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.p, self.is_sum = p, is_sum

    def forward(self, given: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = given["x"]
        self.seen.mul_(0.9).add_(x.mean(0))
        h = nn.functional.dropout(self.Up(x - self.seen), self.p, self.training)
        y = self.Down(self.LayerNorm(h))
        loss = y.square().sum() if self.is_sum else y.square().mean()
        return {"rows": y, "loss": loss}


def test_a_simulation_compares_everything() -> None:
    """Names with capitals, tensors in dictionaries, draws as on one device, state that a forward changes."""
    place = {param("Up.{weight,bias}"): Shard(0), param("Down.weight"): Shard(1)}
    given = {"given": {"x": torch.arange(24.0).double().sin().reshape(4, 6)}}
    found = simulate(Odd().double(), given, Parallelism("odd", axis="tp", place=place), {"tp": 2})
    assert len(found.grad_errors) == 6, found.grad_errors
    assert found.error < 1e-14, str(found)
    summed = simulate(Odd(is_sum=True, p=0.0).double(), given, DATA, {"dp": 2})
    assert summed.error < 1e-14
    assert summed.batch_error > 0.1, "the mean of sums over parts of a batch is not the sum over the batch"
    assert "the loss of the whole batch is another than the mean over its parts, by 1e+00" in str(summed)
    with pytest.raises(FxRewriteError, match="returns no loss"):
        simulate(nn.Linear(6, 6), {"input": X}, DATA, {"dp": 2})
    with fake_mesh((2,), ("dp",)) as mesh:
        model = shard_parameters(Model(), ZERO3, mesh)
    with pytest.raises(FxRewriteError, match="in shards already"):
        simulate(model, {"x": X}, ZERO3, {"dp": 2})


class Shared(nn.Module):
    """A layer that is a part by itself and in a list, which Dynamo names by the list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([self.layer, nn.Linear(8, 8), self.layer])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_a_module_in_two_places_has_one_name() -> None:
    """That of `named_parameters`: what `shard_parameters` takes, `simulate` and `choose_alternatives` take."""
    ways = {"rows": {param("layer.weight"): Shard(0)}, "columns": {param("layer.weight"): Shard(1)}}
    plan = Parallelism("shared", axis="tp", alternatives=[Alternatives("layer", ways)])
    model, x = Shared().double(), torch.rand(4, 8, dtype=torch.float64)
    found = simulate(model, {"x": x}, plan, {"tp": 2})
    assert found.error < 1e-12
    chosen = choose_alternatives(plan, model, {"x": x}, {"tp": 2})
    with fake_mesh((2,), ("tp",)) as mesh:
        assert isinstance(shard_parameters(model, chosen, mesh).layer.weight, DTensor)


def test_layout_rules_are_taken_together_or_one_by_one() -> None:
    rule = LayoutRule("own.renorm", ("aten::renorm",), "a... -> a...")
    assert Parallelism("mine", axis="tp", layouts=LayoutRules([rule])) == Parallelism(
        "mine", axis="tp", layouts=(rule,)
    )


def test_draws_on_a_chunk_are_refused() -> None:
    """Where a draw cannot be made for the whole value."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).transpose(1, 3).unbind(2)
            return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5).square().mean()

    place = {param("qkv.weight"): Shard(0, outer=3), param("qkv.bias"): Shard(0, outer=3)}
    with pytest.raises(FxRewriteError, match="draws random numbers for its chunk, which are not those of one device"):
        simulate(Attends(), {"x": torch.ones(2, 5, 8)}, Parallelism("heads", axis="tp", place=place), {"tp": 2})


class Reading(nn.Module):
    """Attention of other tokens, whose packed weight torch splits into that of the queries and twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.attend = nn.Parameter(torch.rand(3, 12)), nn.MultiheadAttention(12, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.expand(x.shape[0], -1, -1)
        return self.attend(queries, x, x, need_weights=False)[0].square().mean()


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_several_runs_are_in_shards_by_run(ranks: int) -> None:
    place = {param("attend.in_proj_{weight,bias}"): Shard(0, outer=3), param("attend.out_proj.weight"): Shard(1)}
    x = torch.arange(240.0, dtype=torch.float64).sin().reshape(4, 5, 12)
    plan = Parallelism("heads", axis="tp", place=place)
    found = simulate(Reading().double(), {"x": x}, plan, {"tp": ranks})
    assert found.error < 1e-13, str(found)
    assert found.sent == {"tp": {"all_reduce": 1}}


class Sampler(nn.Module):
    """Draws a class for each of three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        classes = self.head(x).log_softmax(-1)
        best = (classes * 2).flatten(1).topk(4, -1).values.mean()
        return best, torch.multinomial(classes[:, 0].exp(), 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_draw_is_not_moved_to_chunks_that_nobody_stated(ranks: int) -> None:
    """By price the rows are the better chunks, where the ranks divide them, and a draw of these would be refused."""
    plan = Parallelism("classes", axis="tp", place={param("head.{weight,bias}"): Shard(0)})
    x = torch.arange(96.0, dtype=torch.float64).sin().reshape(3, 4, 8)
    found = simulate(Sampler().double(), {"x": x}, plan, {"tp": ranks})
    assert found.error < 1e-13, str(found)


@pytest.mark.slow
def test_three_parallelisms_on_a_llama() -> None:
    """ZeRO-3, AutoSP and Megatron on eight simulated ranks; the loss is summed in float32."""
    widths = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, tie_word_embeddings=True, **widths)
    ids = torch.arange(48).reshape(4, 12) % 61
    mesh = {"dp": 2, "sp": 2, "tp": 2}
    found = simulate(
        LlamaForCausalLM(config).double(), {"input_ids": ids, "labels": ids}, ZERO3 | AUTOSP | MEGATRON, mesh
    )
    assert len(found.grad_errors) == 20, "every parameter, of tied ones the first"
    assert found.error < 1e-6, str(found)


@pytest.mark.slow
def test_a_sequence_is_exchanged_through_a_gather_of_another_axis() -> None:
    """A convolution and a scan of the sequence after a projection whose features are gathered over the tensor axis."""

    class Convolves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.head = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 16)
            self.conv = nn.Conv1d(16, 16, 3, groups=16, padding=2)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.up(self.embed(input_ids)).transpose(1, 2)
            x = torch.tanh(x + self.conv(x)[..., : labels.shape[1]]).cumsum(2).transpose(1, 2)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    place = {param("up.{weight,bias}"): Shard(0), module_output("up"): Replicate()}
    ids = torch.arange(32).reshape(2, 16) * 7 % 16
    plan = AUTOSP | Parallelism("gathered", axis="tp", place=place)
    found = simulate(Convolves().double(), {"input_ids": ids, "labels": ids}, plan, {"sp": 2, "tp": 2})
    assert found.error < 1e-14, str(found)
    assert found.sent["sp"]["all_to_all"] == 2


def test_a_parameter_with_a_hook_is_refused() -> None:
    """What replaces it would not have the hook, and nobody would be told."""
    for register in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        model = nn.Linear(4, 4)
        register(model.bias, lambda _: None)
        with fake_mesh((2,), ("dp",)) as mesh, pytest.raises(FxRewriteError, match="bias has a hook on its gradient"):
            shard_parameters(model, ZERO3, mesh)


@pytest.mark.parametrize(
    ("module", "error"),
    [
        (nn.LSTM(4, 4), "0 is an nn.LSTM, which does not read its parameters by their names; write the loop"),
        (nn.Embedding(8, 4, sparse=True), "0 has sparse gradients, .* set sparse=False"),
        (nn.EmbeddingBag(8, 4, sparse=True), "0 has sparse gradients, .* set sparse=False"),
    ],
    ids=["LSTM", "Embedding", "EmbeddingBag"],
)
def test_modules_whose_parameters_cannot_be_dtensors_are_refused(module: nn.Module, error: str) -> None:
    with fake_mesh((2,), ("dp",)) as mesh, pytest.raises(FxRewriteError, match=error):
        shard_parameters(nn.Sequential(module), ZERO3, mesh)
