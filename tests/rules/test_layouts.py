"""Every layout rule against its operator: run whole, run on shards, values and gradients compared.

A case also says which dimensions its rule must leave free, so that no rule can fall back to gathering unseen.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxrewrite import Plan, RefusedError, RuleDefinitionError, RuleSet
from fxrewrite.ops import key
from fxrewrite.spmd import (
    COLLECTIVE_RULES,
    REDUCTIONS,
    Call,
    DecomposeUnknown,
    LayoutRule,
    LayoutRules,
    LocalizeShapes,
    Placement,
    PropagatePlacements,
    Replicate,
    Shard,
    axis_of,
    free_dims,
)
from fxrewrite.spmd.discovery.free_dims import index_map_of
from fxrewrite.testing import PlacementTrial, fake_mesh, try_placements
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.layouts import LAYOUTS
from tests.rules.layouts import attention, composite, convolutions, pointwise, products, reductions, shapes
from tests.rules.layouts.case import Case, Cases, f, i
from tests.versions import NO_DERIVATIVE

pytestmark = [  # what torch 2.15 says of its own operators, once in a process
    pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted... input value tensor is non-contiguous:UserWarning"),
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning"),
]
aten = torch.ops.aten
PLAN = RuleSet(
    "check",
    NORMAL_FORMS,
    DecomposeUnknown("decompose", LAYOUTS),
    PropagatePlacements("layouts", LAYOUTS),
    REDUCTIONS,
    LocalizeShapes("shapes", LAYOUTS),
    COLLECTIVE_RULES,
).once()
CASES: Cases = {
    **pointwise.CASES,
    **reductions.CASES,
    **products.CASES,
    **shapes.CASES,
    **attention.CASES,
    **convolutions.CASES,
    **composite.CASES,
}
SIZES = (4, 6, 10)
"""For two ranks: all different, and no chunk of length one."""
TOLERANCE = 1e-12
PARTS = {op for rule in LAYOUTS for op in rule.parts}


def _args(name: str, case: Case, sizes: Iterable[int]) -> tuple[Any, ...]:
    args = case.args(*sizes)
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args) if name in NO_DERIVATIVE else args


def _target(name: str, case: Case, args: tuple[Any, ...]) -> Any:
    """The overload that a traced call of these arguments resolves to."""
    packet = getattr(aten, name)
    for overload in (getattr(packet, o) for o in packet.overloads()):
        try:
            overload(*args, **case.kwargs)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            continue
        return overload
    raise AssertionError(f"no overload of {name} takes {args}")


def _tensors(case: Case, args: tuple[Any, ...]) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves((args, case.kwargs)) if isinstance(v, torch.Tensor)]


def _dividing(tensors: list[torch.Tensor], num_ranks: int) -> set[tuple[int, int]]:
    return {
        (operand, dim)
        for operand, tensor in enumerate(tensors)
        for dim, size in enumerate(tensor.shape)
        if size and size % num_ranks == 0
    }


@pytest.mark.parametrize("name", {**CASES, **pointwise.DRAWN})
def test_what_may_be_sharded_is_what_the_case_says(name: str) -> None:
    torch.manual_seed(0)
    for case in {**CASES, **pointwise.DRAWN}[name]:
        args = case.args(*SIZES)
        free = free_dims(LAYOUTS, _target(name, case, args), args, case.kwargs)
        if free is None:
            assert LAYOUTS.get(key(getattr(aten, name))) is None, f"{name} {case.whole}: its rule does not speak"
            continue
        tried = _dividing(_tensors(case, args), 2)
        assert case.whole_dims <= tried
        assert free & tried == tried - case.whole_dims, name


@pytest.mark.parametrize("name", CASES)
def test_operator_on_shards_equals_operator_whole(name: str) -> None:
    """Of operators that share a case, the first is tried on every dimension that is free, the others on one of them."""
    torch.manual_seed(0)
    for case in CASES[name]:
        args = _args(name, case, SIZES)
        target, tensors = _target(name, case, args), _tensors(case, args)
        with fake_mesh((2,), ("sp",)) as mesh:
            free = sorted(_dividing(tensors, 2) - case.whole_dims)
            is_first = next(other for other in CASES if case in CASES[other]) == name
            for operand, dim in free if is_first else random.Random(name).sample(free, min(len(free), 1)):
                placements = [Shard(dim) if place == operand else Replicate() for place in range(len(tensors))]
                trial = try_placements(target, args, case.kwargs, placements, axis=axis_of(mesh, "sp"), plan=PLAN)
                assert trial.error <= TOLERANCE, (name, case.whole, trial)
                assert not trial.gathered, (name, case.whole, trial)


@pytest.mark.parametrize("name", [name for name in CASES if f"aten::{name}" in PARTS])
def test_an_operator_in_parts_equals_the_operator_whole(name: str) -> None:
    """On each dimension that it needs whole, 3 and 4 ranks, which do not divide all sizes; nothing is gathered."""
    torch.manual_seed(0)
    for case in CASES[name]:
        args = _args(name, case, SIZES)
        target, tensors = _target(name, case, args), _tensors(case, args)
        for num_ranks in (2, 3, 4):
            with fake_mesh((num_ranks,), ("sp",)) as mesh:
                axis = axis_of(mesh, "sp")
                for dim in (dim for operand, dim in case.whole_dims if operand == 0):
                    placed = Shard(dim, uneven=tensors[0].shape[dim] % num_ranks != 0)
                    placements: list[Placement] = [placed, *[Replicate()] * (len(tensors) - 1)]
                    trial = try_placements(target, args, case.kwargs, placements, axis=axis, plan=PLAN)
                    assert trial.error <= TOLERANCE, (name, case.whole, num_ranks, trial)
                    assert not trial.gathered, (name, case.whole, num_ranks, trial)


@pytest.mark.parametrize("rule", list(LAYOUTS), ids=lambda rule: rule.id)
def test_rule_holds_for_other_sizes_ranks_and_layouts(rule: LayoutRule) -> None:
    """Sizes coincide, chunks are of length one, several operands lie sharded, on runs of a dimension too."""
    draw = random.Random(rule.id)
    torch.manual_seed(0)
    cases = [(name, case) for name in CASES if key(getattr(aten, name)) in rule.ops for case in CASES[name]]
    for name, case in draw.sample(cases, min(len(cases), 4)):
        num_ranks = draw.choice([2, 3, 4, 8])
        args = _args(name, case, [draw.choice([num_ranks, num_ranks, 2 * num_ranks, 6]) for _ in range(3)])
        target = _target(name, case, args)
        with fake_mesh((num_ranks,), ("sp",)) as mesh:
            axis = axis_of(mesh, "sp")
            placements = [_drawn_placement(tensor, num_ranks, draw) for tensor in _tensors(case, args)]
            trial = try_placements(target, args, case.kwargs, placements, axis=axis, plan=PLAN)
            assert trial.error <= TOLERANCE, (name, num_ranks, [tuple(t.shape) for t in _tensors(case, args)], trial)


@pytest.mark.parametrize("rule", [rule for rule in LAYOUTS if rule.neutral], ids=lambda rule: rule.id)
def test_padding_counts_nothing_in_a_sum(rule: LayoutRule) -> None:
    """4 ranks divide neither 6 nor 10; nothing is gathered for that."""
    torch.manual_seed(0)
    cases = [(name, case) for name in CASES if key(getattr(aten, name)) in rule.ops for case in CASES[name]]
    drawn = random.Random(rule.id).sample(cases, min(len(cases), 5))
    for name, case in drawn:
        for trial in _padded_trials(name, case, PLAN):
            assert trial.error <= TOLERANCE, (name, case.whole, trial)
            assert not trial.gathered, (name, case.whole, trial)


def test_padding_that_counts_is_found() -> None:
    """A target of zeros is a class."""
    (rule,) = (rule for rule in LAYOUTS if rule.id == "layout.cross_entropy")
    wrong = LayoutRules([*(other for other in LAYOUTS if other is not rule), replace(rule, neutral="zeros")])
    plan = RuleSet("wrong", PropagatePlacements("l", wrong), LocalizeShapes("s", wrong), COLLECTIVE_RULES).once()
    case = Case(lambda m, n, k: (f(k, n), i(n, k), None, 2))
    found = list(_padded_trials("cross_entropy_loss", case, plan))
    assert max(trial.error for trial in found) > 0.1


def _padded_trials(name: str, case: Case, plan: Plan) -> list[PlacementTrial]:
    """The operator with each dimension padded that its rule lets be sharded and 4 ranks do not divide."""
    args = _args(name, case, SIZES)
    target, tensors = _target(name, case, args), _tensors(case, args)
    found = index_map_of(LAYOUTS, target, args, case.kwargs)
    assert found is not None
    _, indices = found
    trials: list[PlacementTrial] = []
    with fake_mesh((4,), ("sp",)) as mesh:
        axis = axis_of(mesh, "sp")
        for operand, dim in sorted(free_dims(LAYOUTS, target, args, case.kwargs) or ()):
            placement = Shard(dim, uneven=True)
            is_located = indices.locate(indices.operands[operand], placement) is not None
            if is_located and tensors[operand].shape[dim] % 4 and tensors[operand].shape[dim] > 1:
                placements = [placement if place == operand else Replicate() for place in range(len(tensors))]
                trials.append(try_placements(target, args, case.kwargs, placements, axis=axis, plan=plan))
    return trials


def _drawn_placement(tensor: torch.Tensor, num_ranks: int, draw: random.Random) -> Placement:
    placements: list[Placement] = [Replicate()]
    for dim, size in enumerate(tensor.shape):
        outers = [outer for outer in (1, 2, 3) if size and size % outer == 0]
        placements += [Shard(dim, outer) for outer in outers if size // outer % num_ranks == 0]
        placements += [Shard(dim, outer, uneven=True) for outer in outers if size // outer > 1]
    return draw.choice(placements)


OF_ATEN = [rule for rule in LAYOUTS if rule.ops[0].startswith("aten::")]
"""The others are collectives of other axes, which tests/spmd/test_mesh.py runs."""


@pytest.mark.parametrize("rule", OF_ATEN, ids=lambda rule: rule.id)
def test_rule_reads_symbolic_sizes_and_adds_no_guard(rule: LayoutRule) -> None:
    torch.manual_seed(0)
    cases = {**CASES, **pointwise.DRAWN}
    name = next(name for name in cases if key(getattr(aten, name)) in rule.ops)
    args = cases[name][0].args(*SIZES)
    target = _target(name, cases[name][0], args)
    leaves, spec = pytree.tree_flatten((args, cases[name][0].kwargs))

    def call(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(v, torch.Tensor) else v for v in leaves], spec)
        return target(*args, **kwargs)

    tensors = [v.detach() for v in leaves if isinstance(v, torch.Tensor)]
    gm = make_fx(call, tracing_mode="symbolic", pre_dispatch=True)(*tensors)
    (node,) = (node for node in gm.graph.nodes if node.target is target)
    assert any(isinstance(size, torch.SymInt) for x in node.all_input_nodes for size in x.meta["val"].shape)
    guards = list(gm.shape_env.guards)
    assert rule.map(Call.of(node)) is not None
    assert gm.shape_env.guards == guards


def test_every_operator_with_a_rule_has_a_case() -> None:
    ruled = {op for rule in OF_ATEN for op in rule.ops}
    tried = {key(getattr(aten, name)) for name in (*CASES, *pointwise.DRAWN)}
    assert ruled <= tried, f"no case: {sorted(ruled - tried)}"


def test_a_mean_that_is_not_written_as_a_sum_is_refused() -> None:
    plan = RuleSet(
        "without",
        NORMAL_FORMS,
        PropagatePlacements("layouts", LAYOUTS),
        LocalizeShapes("shapes", LAYOUTS),
        COLLECTIVE_RULES,
        atomic=True,
    ).once()

    args = (torch.randn(4, 6, dtype=torch.float64), [1])
    with fake_mesh((2,), ("sp",)) as mesh:
        given = {"axis": axis_of(mesh, "sp"), "plan": plan}
        assert try_placements(aten.mean.dim, args, {}, (Shard(0),), **given).error <= TOLERANCE
        with pytest.raises(RefusedError, match=r"over a sharded dimension .*; run reductions.mean_over_shards between"):
            try_placements(aten.mean.dim, args, {}, (Shard(1),), **given)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.split.Tensor, (4, 1)),
        (aten.split_with_sizes.default, ([4, 4, 4], 1)),
        (aten.chunk.default, (3, 1)),
        (aten.split.sizes, ([4, 4, 4], -1)),
    ],
    ids=str,
)
def test_equal_parts_of_a_dimension_may_each_be_sharded(target: Any, args: tuple[Any, ...]) -> None:
    """As the rows of a fused q, k and v, of which each rank has its heads."""
    x = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    with fake_mesh((2,), ("tp",)) as mesh:
        axis = axis_of(mesh, "tp")
        trial = try_placements(target, (x, *args), {}, (Shard(1, outer=3),), axis=axis, plan=PLAN)
    assert trial.error <= TOLERANCE
    assert not trial.gathered


def _scatter_add(x: Any, index: Any, values: Any) -> Any:
    return aten.scatter_add.default(x, 0, aten.expand.default(aten.unsqueeze.default(index, 1), [-1, 4]), values)


@pytest.mark.parametrize(
    "add",
    [
        lambda x, index, values: aten.index_put.default(x, [index], values, True),
        lambda x, index, values: aten.index_add.default(x, 0, index, values),
        _scatter_add,
    ],
    ids=["index_put", "index_add", "scatter_add"],
)
def test_what_is_added_to_zeros_may_be_sharded(add: Any) -> None:
    """Each rank adds what it has, and the results are summands; added to anything else, it is gathered."""
    args = f(6, 4), i(6, 10), f(10, 4)
    with fake_mesh((2,), ("sp",)) as mesh:
        given = {"axis": axis_of(mesh, "sp"), "plan": PLAN}
        placements = (Replicate(), Shard(0), Shard(0))
        zeros = try_placements(lambda x, *rest: add(aten.zeros_like.default(x), *rest), args, {}, placements, **given)
        other = try_placements(add, args, {}, placements, **given)
    assert (zeros.gathered, other.gathered) == (False, True)
    assert max(zeros.error, other.error) <= TOLERANCE


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["sum", "mean", "max"])
def test_columns_of_a_table_of_bags_may_be_sharded(mode: int) -> None:
    def bags(*args: Any) -> Any:
        return aten.embedding_bag.padding_idx(*args, False, mode, False, None, False, None)[0]

    args = f(7, 4), i(7, 9), torch.tensor([0, 2, 2, 5])
    with fake_mesh((2,), ("sp",)) as mesh:
        placements = (Shard(1), Replicate(), Replicate())
        trial = try_placements(bags, args, {}, placements, axis=axis_of(mesh, "sp"), plan=PLAN)
    assert not trial.gathered
    assert trial.error <= TOLERANCE


def test_a_number_that_is_unfolded_has_no_dimension_to_shard() -> None:
    assert free_dims(LAYOUTS, aten.unfold.default, (f(), 0, 1, 1)) is None


def test_rows_beside_a_packed_weight_are_independent() -> None:
    """Of an operator that another library defines, for which the rule waits."""
    library = torch.library.Library("bitsandbytes", "FRAGMENT")
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        tensors = ", ".join(f"Tensor? {name}=None" for name in ("bias", "absmax_8bit", "absmax_code", "absmax_offset"))
        packed = "Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type"
        library.define(f"gemm_4bit(Tensor A, {packed}, {tensors}) -> Tensor")
        library.impl(
            "gemm_4bit", lambda a, b, shape, scale, *_: a @ (b * scale).view(shape).t(), "CompositeExplicitAutograd"
        )
    args = f(3, 8, 4).detach(), f(24, 1).detach(), [6, 4], f(24, 1).detach(), 1, "nf4"
    operator = torch.ops.bitsandbytes.gemm_4bit.default
    assert free_dims(LAYOUTS, operator, args) == {(0, 0), (0, 1)}
    with fake_mesh((2,), ("sp",)) as mesh:
        placements = (Shard(1), Replicate(), Replicate())
        trial = try_placements(operator, args, {}, placements, axis=axis_of(mesh, "sp"), plan=PLAN)
    assert not trial.gathered
    assert trial.error <= TOLERANCE


def test_a_rule_waits_for_the_library_that_it_names_alone() -> None:
    rule = LayoutRule("layout.absent", ("no_such_library::relu",), "a... -> a...", library="no_such_library")
    assert rule.library
    with pytest.raises(RuleDefinitionError, match="so import its library first"):
        replace(rule, library="")
    with pytest.raises(RuleDefinitionError, match="there is no operator 'aten::rely'; did you mean"):
        replace(rule, ops=("aten::rely",))
