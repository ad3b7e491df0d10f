"""Alternatives of a plan: what is chosen, that prices are what is sent, and what an author of wrong ones is told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx, nn
from torch._dynamo import lookup_backend
from torch.distributed.device_mesh import DeviceMesh

from autosp_rules.config import AutoSPConfig
from autosp_rules.parallelism import autosp_parallelism
from fxrewrite import FxRewriteError
from fxrewrite.spmd import (
    Alternatives,
    Chosen,
    Parallelism,
    Price,
    Shard,
    Stored,
    choose,
    choose_alternatives,
    collective_bytes,
    inputs,
    module_input,
    param,
    sends,
    shard_parameters,
    spmd,
)
from fxrewrite.testing import explain_placement, fake_mesh, simulate
from rules.parallel import DATA, ZERO2, ZERO3
from rules.parallel.heads import WHOLE_HEADS
from rules.parallel.vocabulary import VOCABULARY, VOCABULARY_LAYOUTS
from tests.rules.parallel.models import build
from tests.rules.parallel.on_ranks import loss_of
from tests.spmd.parallelism.test_accumulate import Sent


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks of equal shapes, a head and its loss."""

    def __init__(self, width: int = 8, vocabulary: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def given(rows: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.arange(rows, device=device) % 12
    return {"ids": ids, "labels": (ids * 5 + 1) % 12}


COLUMNS = {param("up.weight"): Shard(0), param("down.weight"): Shard(1)}
LAYERS = Alternatives("layers", {"columns": COLUMNS, "rows": {module_input("*"): Shard(0)}}, each="layers.*")
BY_CLASS = Parallelism(
    "by class",
    axis="tp",
    place={param("{embed,head}.weight"): Shard(0)},
    rules=[VOCABULARY],
    layouts=tuple(VOCABULARY_LAYOUTS),
)
HEAD = Alternatives("head", {"by class": BY_CLASS, "whole": {}})
TENSOR = Parallelism("tensor", axis="tp", alternatives=[LAYERS, HEAD])

OVER_TP = {
    "by class": BY_CLASS,
    "columns": {param("layers.*.up.weight"): Shard(0), param("layers.*.down.weight"): Shard(1)},
    "rows": {module_input("layers.0"): Shard(0)},
}
OVER_DP = {"whole": {}, "stored": ZERO3.place, "kept": ZERO2.place}
KINDS: dict[str, Any] = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce": "all_reduce",
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch._dynamo.reset()
    with fake_mesh((2,), ("tp",)) as made:
        yield made


def ways(plan: Any) -> list[str]:
    return [one.way for member in plan.members for one in member.chosen]


def counted(sent: Sent, num_ranks: int) -> float:
    """Bytes that a rank sends, of what it gave to the collectives that ran."""
    found = (item for of_axis in sent.bytes.values() for item in of_axis.items())
    return sum(collective_bytes(KINDS[kind], held, num_ranks) for kind, held in found)


@pytest.mark.parametrize("name", [*OVER_TP, *OVER_DP])
@pytest.mark.some(2)
def test_the_price_is_what_is_sent(mesh: DeviceMesh, name: str) -> None:
    """Of each way when it is forced, which is exact, too."""
    base, of = (Parallelism("tensor", axis="tp"), OVER_TP) if name in OVER_TP else (replace(DATA, axis="tp"), OVER_DP)
    other = next(one for one in of if one != name)
    plan = replace(base, alternatives=[Alternatives("all", {name: of[name], other: of[other]})])
    model, call = Model().double(), given(8)
    found: Any = choose_alternatives(plan, model, call, mesh)
    forced = base.with_way(of[name])
    sharded = shard_parameters(copy.deepcopy(model), forced, mesh)
    forward, backward = Sent(mesh), Sent(mesh)

    def inner(gm: fx.GraphModule, example: Any) -> Callable[..., Any]:
        run = lookup_backend("aot_eager")(gm, example)

        def call(*args: Any) -> Any:
            with forward:
                return run(*args)

        return call

    step = torch.compile(sharded, backend=spmd(forced, mesh=mesh, inner=inner), fullgraph=True)
    loss = step(**given(8 if base.data == "shared" else 4))
    with backward:
        loss.backward()
    price = found.chosen[0].prices[name]
    assert (counted(forward, 2), counted(backward, 2)) == (price.forward, price.backward)
    assert price.forward + price.backward > 0
    assert price.held == sum(p.to_local().nbytes for p in sharded.parameters())  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", [*OVER_TP, *OVER_DP])
@pytest.mark.some(0)
def test_every_way_is_exact(name: str) -> None:
    base, of = (Parallelism("tensor", axis="tp"), OVER_TP) if name in OVER_TP else (replace(DATA, axis="tp"), OVER_DP)
    found = simulate(Model().double(), given(8), base.with_way(of[name]), {"tp": 2})
    assert found.error < 1e-12, str(found)


@pytest.mark.slow
def test_strategies_of_attention() -> None:
    """As ways of one plan, beside ZeRO-3; one program serves the lengths whose ways have all been priced."""
    names: Any = ("ulysses", "ring", "gather_kv")
    attention = Alternatives("attention", {name: autosp_parallelism(AutoSPConfig(attention=name)) for name in names})
    plan = Parallelism("sequence", axis="sp", alternatives=[attention])
    ids = torch.arange(64).reshape(4, 16) * 7 % 61
    for heads, way, sizes in ((1, "gather_kv", {"sp": 4}), (4, "ulysses", {"sp": 4}), (2, "gather_kv", {"sp": 2})):
        model, whole = build("Llama", num_key_value_heads=heads), replace(ZERO3, axis="dp") | plan
        found = simulate(model, {"input_ids": ids, "labels": ids}, whole, {"dp": 2, **sizes})
        assert [event.way for event in found.report.events_of(Chosen)] == [way]
        assert found.loss_error < 1e-6, "transformers computes losses in float32"
        assert found.grad_error < 1e-12, str(found)
    torch._dynamo.reset()
    with fake_mesh((2,), ("sp",)) as mesh:
        backend = spmd(plan, mesh=mesh, inner="eager")
        step = torch.compile(loss_of(build("Llama")), backend=backend, dynamic=True)
        for length in (16, 12, 8):
            step(input_ids=ids[:, :length].clone(), labels=ids[:, :length].clone()).backward()
    assert len(backend.reports) == 1


def test_what_is_chosen_follows_from_sizes() -> None:
    """Few rows: activations are sent; many: gradients of weights. Layers of equal shapes are one choice."""
    few: Any = choose_alternatives(TENSOR, Model(), given(4), {"tp": 2})
    many: Any = choose_alternatives(TENSOR, Model(), given(4096), {"tp": 2})
    assert (ways(few), ways(many)) == (["columns", "whole"], ["rows", "whole"])
    assert [one.of for one in few.chosen] == ["layers of layers.0 and 1 like it", "head"]
    wide: Any = choose_alternatives(TENSOR, Model(512, 65536).to("meta"), given(64, "meta"), {"tp": 2})
    assert ways(wide) == ["columns", "by class"], "a large head is a lot to compute on every rank"
    prices = wide.chosen[1].prices
    assert prices["whole"].forward < prices["by class"].forward
    assert prices["whole"].flops > 1.9 * prices["by class"].flops
    page = str(many)
    assert "chosen: layers of layers.0 and 1 like it: rows, which sends" in page
    assert "alternatives layers of each layers.*, by price: columns: param('up.weight') S(0)" in str(TENSOR)
    assert choose_alternatives(many, Model(), given(4), {"tp": 2}) is many, "what was chosen stays"


def test_the_chosen_way_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed with another axis; and of many combinations, one choice after the other finds the same."""
    model, plan, sizes = Model().double(), DATA | TENSOR, {"dp": 2, "tp": 2}
    found = simulate(model, given(8), plan, sizes)
    assert found.error < 1e-12, str(found)
    events = [event for event in found.report.events if isinstance(event, Chosen)]
    assert [event.way for event in events] == ["columns", "by class"], "half a head has half a gradient to average"
    assert found.sent == {"dp": {}, "tp": {"all_reduce": 6}}
    monkeypatch.setattr("fxrewrite.spmd.parallelism.alternatives._MOST", 1)
    why = explain_placement(model, given(8), plan, sizes, "layers.0.down")
    assert why.startswith("\n".join(map(str, events)))
    assert "stated by param('layers.0.up.weight')" in why


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(2, -1, 6, 2).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)).square().mean()


BY_HEADS = Parallelism(
    "heads", axis="tp", place={param("q.*"): Shard(0), param("o.weight"): Shard(1)}, placed=[WHOLE_HEADS]
)


def test_what_is_impossible_is_left_out() -> None:
    """With its reason; and where nothing else is left, one error has the reason of each."""
    by_rows = {inputs("x"): Shard(1), module_input("o"): Shard(1)}
    plan = Parallelism(
        "attention", axis="tp", alternatives=[Alternatives("heads", {"by head": BY_HEADS, "by row": by_rows})]
    )
    x = torch.randn(2, 4, 12, dtype=torch.float64)
    of_four: Any = choose_alternatives(plan, Attention().double(), {"x": x}, {"tp": 4})
    assert ways(of_four) == ["by row"]
    reason = "views 12 features as 6 heads, and 4 ranks of axis tp do not divide 6 heads"
    assert reason in of_four.chosen[0].impossible["by head"]
    assert reason in str(of_four)
    found = simulate(Attention().double(), {"x": x}, plan, {"tp": 2})
    assert found.error < 1e-12
    with pytest.raises(
        FxRewriteError, match=r"(?s)heads: no way is possible.*by head: .*features.*by row: .* do not divide"
    ):
        choose_alternatives(plan, Attention().double(), {"x": x[:, :3]}, {"tp": 4})


def test_parameters_that_may_be_held() -> None:
    """What a rank holds at rest is a limit: the cheapest way within it is chosen."""
    plan = replace(DATA, alternatives=[Alternatives("at rest", OVER_DP)])
    (one,) = plan.alternatives
    model, call = Model(), given(8)
    found: Any = choose_alternatives(plan, model, call, {"dp": 2})
    prices = found.chosen[0].prices
    assert ways(found) == ["whole"]
    assert prices["kept"].total < prices["stored"].total
    limited = replace(plan, alternatives=[replace(one, most_held=prices["whole"].held - 1)])
    found = choose_alternatives(limited, model, call, {"dp": 2})
    assert ways(found) == ["kept"]
    two = Alternatives("at rest", {"whole": {}, "kept": ZERO2.place}, most_held=prices["kept"].held)
    first = {param("layers.0.up.weight"): Stored(Shard(0), or_whole=True, kept=True)}
    loose = Alternatives("more", {"nothing": {}, "first": first}, most_held=prices["whole"].held)
    found = choose_alternatives(replace(plan, alternatives=[two, loose]), model, call, {"dp": 2})
    assert ways(found) == ["kept", "nothing"], "the least limit of several"
    assert "bytes of parameters, and" in found.chosen[0].impossible["whole"]
    with pytest.raises(
        FxRewriteError, match=r"(?s)at rest: no way is possible.*whole: a rank would hold.*stored: .*kept: "
    ):
        choose_alternatives(replace(plan, alternatives=[replace(one, most_held=1)]), model, call, {"dp": 2})


def test_each_program_chooses(mesh: DeviceMesh) -> None:
    """Where no parameter is concerned, `spmd` chooses for each graph, by the sizes that it is compiled for."""
    cut = {"rows": {module_input("layers.0"): Shard(0)}, "features": {module_input("layers.0"): Shard(1)}}
    plan = Parallelism("tensor", axis="tp", alternatives=[Alternatives("layers", cut)], expect=[sends(all_reduce=1)])
    backend = spmd(plan, mesh=mesh, inner="eager")
    step = torch.compile(Model(), backend=backend)
    for rows in (64, 4096):
        step(**given(rows))
    chosen = [event.way for report in backend.reports for event in report.events if isinstance(event, Chosen)]
    assert chosen == ["rows"] * 2
    for of_ranks in (lambda: spmd(TENSOR, mesh=mesh), lambda: shard_parameters(Model(), TENSOR, mesh)):
        with pytest.raises(FxRewriteError, match=r"'layers' differ in how ranks hold .* choose_alternatives\(plan"):
            of_ranks()
    with pytest.raises(FxRewriteError, match="tensor: layers, tensor: head: which of the alternatives"):
        TENSOR.plan()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Alternatives("a", {"one": {}}), "has 1 of the two or more ways"),
        (lambda: Alternatives("a", {"one": {}, "two": {}}), "one and two state the same"),
        (lambda: Alternatives("a", {"one": BY_CLASS, "two": {}}, each="layers.*"), "each module has placements alone"),
        (lambda: Alternatives("a", {"one": {inputs("x"): Shard(0)}, "two": {}}, each="layers.*"), r"inputs\('x'\)"),
        (lambda: Alternatives("a", {"one": 1, "two": {}}), "one is placements by site, or a Parallelism"),  # type: ignore[arg-type]
        (lambda: Alternatives("a", {"one": TENSOR, "two": {}}), "a way has no alternatives of its own"),
        (lambda: replace(TENSOR, alternatives=[HEAD, HEAD]), "two alternatives are called 'head'"),
        (lambda: replace(TENSOR, place=BY_CLASS.place), "is stated in place and in alternatives 'head'; state it in"),
        (lambda: replace(TENSOR, alternatives=[HEAD, replace(HEAD, name="b")]), "in alternatives 'head' and in"),
        (lambda: replace(TENSOR, axis="sp"), "by class is over axis 'tp' with data='shared', and tensor over 'sp'"),
        (lambda: replace(DATA, alternatives=[LAYERS]), "ranks of axis dp have values of their own"),
        (lambda: replace(TENSOR, alternatives=["rows"]), "alternatives is a list of Alternatives, and has 'rows'"),
        (lambda: choose("a", {"one": "no", "two": "neither"}), "(?s)a: no way is possible.*one: no.*two: neither"),
    ],
)
def test_what_is_stated_wrong_is_said(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(FxRewriteError, match=said):
        make()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"alternatives": [replace(LAYERS, each="layer.*")]}, "'layers': no module of the graph is 'layer.*'"),
        (
            {"alternatives": [Alternatives("a", {"b": {param("h"): Shard(0)}, "c": {}})]},
            r"param\('h'\) matches nothing",
        ),
        ({"alternatives": [Alternatives("a", {"b": {param("head.weight"): Shard(7)}, "c": {}})]}, "2 dimensions"),
        ({"place": {param("head.*"): Shard(1)}}, "head.weight is stated as"),
    ],
)
@pytest.mark.some(1)
def test_what_does_not_fit_the_model_is_a_mistake(change: Any, said: str) -> None:
    """And not one way that is impossible, since it would be so for any sizes."""
    with pytest.raises(FxRewriteError, match=said):
        choose_alternatives(replace(TENSOR, **change), Model(), given(8), {"tp": 2})


def test_of_equals_the_first() -> None:
    same = Price(1.0, 2.0, 4000.0)
    assert same.total == 5.0
    found = choose("a", {"no": "it is not possible", "one": same, "two": same, "more": Price(9.0, flops=8000.0)})
    assert found.way == "one"
    assert str(found) == (
        "chosen: a: one, which sends 1 bytes forward and 2 bytes backward (no: it is not possible; "
        "two: sends 1 bytes forward and 2 bytes backward, the busiest rank computes as much; "
        "more: sends 9 bytes forward and 0 bytes backward, the busiest rank computes 2.00 x as much)"
    )
