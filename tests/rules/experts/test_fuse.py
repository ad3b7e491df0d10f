"""A sort of slots and its inverse become one node: the same function, which ranks run on their own slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.integrations import moe

from fxrewrite import Report, RuleSet
from fxrewrite.ops import key
from fxrewrite.spmd import (
    COLLECTIVE_RULES,
    LayoutRules,
    LocalizeShapes,
    PropagatePlacements,
    Replicate,
    Shard,
    SpmdContext,
    axis_of,
    redistribute as redistribute_,
)
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.experts.fuse import FuseSlots
from rules.experts.slots import SLOT_LAYOUTS, WRITE_OUT_SLOTS
from rules.layouts import LAYOUTS
from tests.rewriting import check_stages, count

assert moe  # it registers the grouped product of float64
grouped_product = torch.ops.transformers.grouped_mm_fallback

TOKENS, PER_TOKEN, WIDTH, INNER, EXPERTS = 8, 2, 4, 6, 3
SLOTS = TOKENS * PER_TOKEN
ALL_LAYOUTS = LayoutRules((*LAYOUTS, *SLOT_LAYOUTS))
FUSE = RuleSet("fuse", NORMAL_FORMS, FuseSlots(LAYOUTS))
ON_RANKS = RuleSet(
    "on_ranks",
    FUSE,
    PropagatePlacements("layouts", ALL_LAYOUTS),
    LocalizeShapes("shapes", ALL_LAYOUTS),
    COLLECTIVE_RULES,
    WRITE_OUT_SLOTS,
)

Rows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def inverse_of(order: torch.Tensor, start: int = 0) -> torch.Tensor:
    return torch.index_put(torch.empty_like(order), [order], torch.arange(start, start + order.shape[0]))


def ends_of(ids: torch.Tensor, *, high: int = EXPERTS - 1) -> torch.Tensor:
    counts = torch.histc(ids.double(), bins=EXPERTS, min=0, max=high)
    return torch.cumsum(counts, 0, dtype=torch.int32)


def keep(rows: torch.Tensor, order: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return rows


def experts(rows_of: Rows = keep, *, of_sorted: bool = True, inverse: Rows | None = None) -> Callable[..., Any]:
    """Two products a row, with a bias looked up by its expert; `rows_of` does something to the rows in between."""

    def run(
        x: torch.Tensor,
        ids: torch.Tensor,
        gates: torch.Tensor,
        up: torch.Tensor,
        bias: torch.Tensor,
        down: torch.Tensor,
    ) -> torch.Tensor:
        flat = ids.reshape(-1)
        sorted_ids, order = torch.sort(flat)
        ends = ends_of(sorted_ids if of_sorted else flat)
        rows = grouped_product(x[order // PER_TOKEN], up, ends) + bias[sorted_ids]
        a, b = rows.view(SLOTS, 2, INNER // 2).unbind(1)
        rows = torch.cat([torch.nn.functional.silu(a) * b] * 2, -1)
        rows = rows_of(rows, order, sorted_ids)
        rows = grouped_product(rows, down, ends) * gates.reshape(-1)[order].unsqueeze(-1)
        back = inverse_of(order) if inverse is None else inverse(rows, order, sorted_ids)
        return rows[back].view(TOKENS, PER_TOKEN, WIDTH).sum(1)

    return run


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:PER_TOKEN] for _ in range(TOKENS)])
    up, bias, down = floats(EXPERTS, WIDTH, INNER), floats(EXPERTS, INNER), floats(EXPERTS, INNER, WIDTH)
    return [floats(TOKENS, WIDTH), ids, floats(TOKENS, PER_TOKEN), up, bias, down]


def graph_of(function: Callable[..., Any]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs())


def results(gm: fx.GraphModule) -> list[torch.Tensor]:
    """The value, and the gradient of every input."""
    args = inputs()
    value = fx.Interpreter(gm).run(*args)
    value.square().sum().backward()
    return [value.detach(), *(a.grad for a in args if a.grad is not None)]


def fused(function: Callable[..., Any]) -> tuple[fx.GraphModule, Report]:
    gm = graph_of(function)
    return gm, FUSE.apply(gm)


SLOTWISE = "rules.experts.slots.slotwise"


def test_before_and_after(fx_snapshot: Any) -> None:
    check_stages(graph_of(experts()), fx_snapshot, after=FUSE, written_out=WRITE_OUT_SLOTS)


@pytest.mark.parametrize(
    "function",
    [
        experts(),
        experts(of_sorted=False),
        experts(inverse=lambda rows, order, ids: torch.argsort(order)),
        experts(lambda rows, order, ids: rows.softmax(-1).to(torch.float32).double()),
    ],
    ids=["index_put", "counted unsorted", "argsort", "more on rows"],
)
def test_it_is_the_same_function_fused_and_written_out(function: Callable[..., Any]) -> None:
    expected = results(graph_of(function))
    gm, _ = fused(function)
    assert count(gm, SLOTWISE) == 1
    assert count(gm, "aten::sort") == 0
    assert all(torch.equal(a, b) for a, b in zip(results(gm), expected, strict=True))
    WRITE_OUT_SLOTS.apply(gm)
    assert count(gm, SLOTWISE) == 0
    assert count(gm, "aten::sort") == 1
    assert all(torch.equal(a, b) for a, b in zip(results(gm), expected, strict=True))


def test_a_second_run_changes_nothing() -> None:
    gm, report = fused(experts())
    assert report.rule("fuse_slots") is not None
    text = str(gm.graph)
    FUSE.apply(gm)
    assert str(gm.graph) == text


def test_other_users_of_the_rows_keep_them() -> None:
    def run(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen: list[torch.Tensor] = []
        out = experts(lambda rows, order, ids: seen.append(rows) or rows)(*args)
        return out, seen[0].cumsum(0)

    gm, expected = graph_of(run), run(*inputs())
    FUSE.apply(gm)
    assert count(gm, SLOTWISE) == 1
    assert count(gm, "aten::sort") == 1
    assert all(torch.equal(a, b) for a, b in zip(fx.Interpreter(gm).run(*inputs()), expected, strict=True))


def _no_grad(rows: torch.Tensor, order: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = rows.abs().amax(-1, keepdim=True)
    return rows / scale


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "over rows": (experts(lambda rows, order, ids: rows.cumsum(0)), "aten::cumsum runs over the sorted pairs"),
    "shifted": (experts(lambda rows, order, ids: rows.roll(1, 0)), "runs over the sorted pairs"),
    "pairs": (experts(lambda rows, order, ids: (rows @ rows.T) @ rows), "runs over the sorted pairs"),
    "normalized": (experts(lambda rows, order, ids: rows / rows.sum(0)), "runs over the sorted pairs"),
    "by position": (
        experts(lambda rows, order, ids: rows + torch.arange(SLOTS).unsqueeze(-1)),
        "is read in the order of the pairs",
    ),
    "by order": (experts(lambda rows, order, ids: rows * order.unsqueeze(-1)), "aten::unsqueeze reads the order"),
    "sorted twice": (experts(lambda rows, order, ids: rows[order]), "the sorted rows are indexed again"),
    "half of the tokens": (
        experts(lambda rows, order, ids: rows + torch.zeros(SLOTS // 4 + 1, 1).double()[order // 4]),
        "the order is divided by 4 and by 2",
    ),
    "random": (experts(lambda rows, order, ids: torch.dropout(rows, 0.5, True)), "draws random numbers"),
    "autograd mode": (experts(_no_grad), "changes a mode of torch"),
    "other positions": (
        experts(inverse=lambda rows, order, ids: inverse_of(order, 1)),
        "the inverse does not start from the positions 0, 1, 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_slot_by_slot_is_left_as_it_is(name: str) -> None:
    function, reason = REFUSED[name]
    before, (gm, report) = graph_of(function), fused(function)
    assert count(gm, SLOTWISE) == 0
    NORMAL_FORMS.apply(before)
    assert str(gm.graph) == str(before.graph)
    assert reason in str(report.refusals[0])


def other_groups(x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, up: torch.Tensor, *_: Any) -> torch.Tensor:
    _, order = torch.sort(ids.reshape(-1))
    return grouped_product(x[order // PER_TOKEN], up, ends_of(ids.reshape(-1).flip(0)))[inverse_of(order)]


def wider_groups(x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, up: torch.Tensor, *_: Any) -> torch.Tensor:
    sorted_ids, order = torch.sort(ids.reshape(-1))
    return grouped_product(x[order // PER_TOKEN], up, ends_of(sorted_ids, high=2 * EXPERTS))[inverse_of(order)]


def descending(x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, up: torch.Tensor, *_: Any) -> torch.Tensor:
    sorted_ids, order = torch.sort(ids.reshape(-1), descending=True)
    return grouped_product(x[order // PER_TOKEN], up, ends_of(sorted_ids))[inverse_of(order)]


def no_sort(x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, up: torch.Tensor, *_: Any) -> torch.Tensor:
    order = ids.reshape(-1)
    return x[order // PER_TOKEN][inverse_of(order)]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (other_groups, "the counted values are not the experts of the pairs"),
        (wider_groups, "experts 0 to 6 are counted in 3 groups"),
        (descending, ""),
        (no_sort, ""),
    ],
)
def test_groups_are_those_of_the_sort(function: Callable[..., Any], reason: str) -> None:
    gm, report = fused(function)
    assert count(gm, SLOTWISE) == 0
    assert [reason in str(refusal) for refusal in report.refusals] == [True] * bool(reason)


def test_experts_are_not_counted_in_a_byte() -> None:
    gm = graph_of(experts())
    (cast,) = (node for node in gm.graph.nodes if key(node) == "aten::to")
    cast.args = (cast.args[0], torch.int8)  # which a CPU's histogram does not take
    cast.meta["val"] = cast.meta["val"].to(torch.int8)
    (refusal,) = FUSE.apply(gm).refusals
    assert "experts are counted in a dtype that cannot represent the counts" in str(refusal)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("sharded", [0, 1, 2], ids=["x", "ids", "gates"])
def test_ranks_sort_their_own_slots(sharded: int, num_ranks: int) -> None:
    gm = graph_of(lambda *args: experts()(*args).square().sum())
    expected = inputs()
    experts()(*expected).square().sum().backward()
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        axis = axis_of(mesh, "sp")
        operand = gm.graph.find_nodes(op="placeholder")[sharded]
        with gm.graph.inserting_before(gm.graph.find_nodes(op="placeholder")[-1].next):
            moved = gm.graph.call_function(redistribute_, (operand, Replicate(), Shard(0), axis))
        moved.meta["val"] = operand.meta["val"]
        operand.replace_all_uses_with(moved, lambda user: user is not moved)
        report = ON_RANKS.apply(gm, context=SpmdContext(axis, gradients="mean"))
        run = run_on_ranks(gm, inputs(), num_ranks, backward=0)
    assert not [line for line in report.lines if "gathered" in line]
    (sort,) = (node for node in gm.graph.nodes if key(node) == "aten::sort")
    assert sort.meta["val"][0].shape == (SLOTS // num_ranks,)
    for want, grad in zip(expected, run.gradients(), strict=True):
        if want.grad is not None:
            assert grad is not None
            torch.testing.assert_close(grad, want.grad, rtol=1e-12, atol=1e-12)
