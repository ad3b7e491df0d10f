"""Inductor's pattern matcher: passes are registered by the adapter, as they would be there, or are rules."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import Literal, Pattern, Rule, RuleSet, cap, op, ops, where
from fxrewrite.adapters.pattern_matcher import (
    MULTIPLE,
    Arg,
    CallFunction,
    Ignored,
    KeywordArg,
    ListOf,
    PatternMatcherPass,
    fwd_only,
    joint_fwd_bwd,
    register_graph_pattern,
    register_replacement,
    stable_topological_sort,
)
from fxrewrite.backends import capture, inductor_table
from fxrewrite.errors import Reason
from fxrewrite.pattern import parse, shared
from rules.fusions.activations import ACTIVATIONS
from rules.fusions.norms import NORMS
from tests.peers.cases import Suite
from tests.rewriting import apply, made, targets, traced

INDUCTOR = Suite("test_pattern_matcher")
aten, prims = torch.ops.aten, torch.ops.prims
TABLE = dict(inductor_table())
R = torch.rand


def after_autograd(function: Callable[..., Any], *inputs: Any, mode: Any = "fake") -> fx.GraphModule:
    return make_fx(function, decomposition_table=TABLE, tracing_mode=mode)(*inputs)


def replaced(search: Any, replacement: Any, examples: Sequence[Any], **options: Any) -> PatternMatcherPass:
    one = PatternMatcherPass("peers")
    assert register_replacement(search, replacement, examples, options.pop("trace", fwd_only), one, **options)
    return one


def applied(one: PatternMatcherPass, gm: fx.GraphModule, expected: int) -> None:
    assert one.apply(gm) == expected, str(one.report)
    gm.graph.lint()


def runs(
    rule: Rule, model: Callable[..., Any], inputs: Sequence[Any], expected: int, *, values: bool = True
) -> fx.GraphModule:
    """The rewritten graph, after so many rewrites; its results are those of the model."""
    gm = traced(model, *inputs)
    wanted = gm(*inputs)
    report = apply(gm, rule)
    assert report.rewrites == expected, str(report)
    if values:
        torch.testing.assert_close(gm(*inputs), wanted)
    return gm


@INDUCTOR.case("better", "two relations of sizes, as text")
def test_mm_plus_mm() -> None:
    one = made(
        lambda a, b, c, d: torch.mm(a, b) + torch.mm(c, d),
        lambda a, b, c, d: torch.mm(torch.cat([a, c], 1), torch.cat([b, d])),
        where=["size(a, 0) == size(c, 0)", "size(b, 1) == size(d, 1)"],
        numerics="reassociates",
    )
    shapes = (((16, 16),) * 4, 1), (((1, 4), (4, 2), (1, 5), (5, 2)), 1), (((1, 4), (4, 2), (1, 2), (2, 1)), 0)
    for sizes, expected in (*shapes, (((1, 2), (2, 1), (1, 4), (4, 2)), 0)):
        runs(one, lambda a, b, c, d: torch.mm(a, b) + torch.mm(c, d), [R(size) for size in sizes], expected)


WIDE = torch.ops.higher_order.out_dtype
A8 = torch.arange(-64, 64, dtype=torch.int8).reshape(16, 8)
B8 = A8.reshape(8, 16)


def wide(a: Any, b: Any, c: Any) -> Any:
    return WIDE(aten.mm.default, torch.int32, a, b) * c


def fused_int(model: Callable[..., Any], scales: Sequence[torch.Tensor]) -> None:
    one = made(wide, lambda a, b, c: aten._int_mm(a, b) * c)
    for scale in scales:
        gm = traced(model, A8, B8, scale)
        assert apply(gm, one).rewrites == 1
        assert "aten._int_mm.default" in targets(gm)
        assert gm(A8, B8, scale).dtype == model(A8, B8, scale).dtype


SCALES = [R(16, 1).half(), R(1, 16).bfloat16(), R(1, 16)]
INDUCTOR.add("test_fused_int_mm_mul", lambda: fused_int(lambda a, b, c: wide(a, b, c).bfloat16(), SCALES))
INDUCTOR.add(
    "test_fused_int_mm_mul_epilogue", lambda: fused_int(lambda a, b, c: (wide(a, b, c).bfloat16() * 0.5).relu(), SCALES)
)
INDUCTOR.add("test_fused_int_mm_mul_gating", lambda: fused_int(wide, [R(16)]))


def cast_product(a: Any, b: Any, dtype: Literal) -> Any:
    return torch.mm(a, b.to(dtype))


def mixed(
    cases: Sequence[tuple[Any, ...]], model: Callable[..., Any] = lambda a, b: torch.mm(a, b.to(a.dtype))
) -> None:
    one = made(cast_product, lambda a, b, dtype: F.linear(a, b.to(dtype).t()))
    for inputs in cases:
        runs(one, model, inputs, 1)


I8 = torch.randint(-9, 9, (8, 8), dtype=torch.int8)
MIXED = [(R(4, 8), I8), (R(4, 8).bfloat16(), I8), (R(4, 8).half(), I8.to(torch.uint8)), (R(4, 8), R(8, 8).bfloat16())]
INDUCTOR.add("test_mixed_mm", lambda: mixed(MIXED))
INDUCTOR.add(
    "test_mixed_mm_exhaustive_dtypes",
    lambda: mixed(
        [
            (R(4, 8).to(left), I8.to(right))
            for left in (torch.half, torch.float, torch.bfloat16)
            for right in (torch.int8, torch.uint8)
        ]
    ),
)
INDUCTOR.add("test_mixed_mm_bad_cases", lambda: mixed([(R(8, 8).bfloat16(), I8[:4].t()[:, ::2])]))
INDUCTOR.add(
    "test_mixed_mm_epi_works",
    lambda: mixed([(R(8, 8), I8, R(8), R(8))], lambda a, b, c, d: torch.mm(a, b.to(a.dtype)) * c + d),
)
INDUCTOR.add("test_mixed_mm_gating", None, "n/a", "tests which kernel is generated")
INDUCTOR.add("test_mixed_mm_cpu", None, "n/a", "tests which kernel is generated")


@INDUCTOR.case()
def test_duplicate_search() -> None:
    one = replaced(lambda x: x + 1, lambda x: x - 1, [torch.empty(4, 5)])
    register_replacement(lambda x: x + 2, lambda x: x - 2, [torch.empty(4, 5)], fwd_only, one)
    assert not register_replacement(lambda x: x + 2, lambda x: x, [R(2)], fwd_only, one, skip_duplicates=True)
    gm = after_autograd(lambda x: (x + 1).relu() + 2, R(3, 5))
    applied(one, gm, 2)
    x = R(3, 5)
    assert torch.equal(gm(x), (x - 1).relu() - 2)


def reuse(part: Any, whole: Any, size: tuple[int, int], expected: int) -> None:
    one = made(
        lambda x: (part(x, [0], True), whole(x)),
        lambda x: ((some := part(x, [0], True)), part(some)),
        where=["size(x, 0) >= 64"],
        terminates=False,
    )
    runs(one, lambda x: (part(x, [0], True), whole(x)), [R(size)], expected)


for _fns in ((torch.amax, torch.amax), (torch.amin, torch.min), (torch.amax, torch.max)):
    INDUCTOR.add(
        "test_successful_partial_reuse",
        lambda fns=_fns: reuse(*fns, (64, 8), 1),
        part=", ".join(f.__name__ for f in _fns),
    )
INDUCTOR.add("test_unsuccessful_partial_reuse", lambda: reuse(torch.amax, torch.amax, (4, 8), 0), part="static")


@INDUCTOR.case(part="dynamic")
def test_unsuccessful_partial_reuse() -> None:
    one = made(
        lambda x: (torch.amax(x, [0], True), torch.amax(x)),
        lambda x: ((some := torch.amax(x, [0], True)), torch.amax(some)),
        where=["size(x, 0) >= 64"],
    )
    gm = traced(lambda x: (torch.amax(x, [0], True), torch.amax(x)), R(2048, 64), mode="symbolic")
    assert apply(gm, one).rewrites == 0


ADD_PRODUCT = made(
    lambda a, b, c: torch.mm(b, c) + a,
    lambda a, b, c: torch.addmm(a, b, c),
    where=["rank(a) <= 2", "same_dtype(a, b, c)", "size(root, 0) == size(b, 0)"],
    numerics="reassociates",
)


def both_orders(a: Any, b: Any, c: Any) -> Any:
    return torch.add(a, torch.mm(b, c)), torch.mm(b, c) + a


@INDUCTOR.case("better", "both orders of the operands by one rule")
def test_addmm() -> None:
    for shape, left, expected in (((8, 8), 8, 2), ((8,), 8, 2), ((8, 8), 1, 0), ((1, 8, 8), 8, 0)):
        runs(ADD_PRODUCT, both_orders, [R(shape), R(left, 8), R(8, 8)], expected)
    runs(ADD_PRODUCT, lambda b, c: both_orders(4, b, c), [R(8, 8), R(8, 8)], 0)


@INDUCTOR.case()
def test_addmm_symbolic_scalar() -> None:
    gm = traced(lambda b, c: both_orders(b.size(0), b, c), R(8, 8), R(8, 8), mode="symbolic")
    assert apply(gm, ADD_PRODUCT).rewrites == 0


@INDUCTOR.case()
def test_addmm_broadcasting_bias() -> None:
    gm = after_autograd(lambda x, w, b: F.linear(x, w, b), R(1, 3, 4), w := R(4, 4), b := R(1, 4))
    RuleSet("test", ADD_PRODUCT).apply(gm)
    x = R(1, 3, 4)
    torch.testing.assert_close(gm(x, w, b), F.linear(x, w, b))


@INDUCTOR.case("better", "also where the rule says nothing of dtypes: the operator takes one")
def test_addmm_dtype_mismatch() -> None:
    one = made(lambda a, b, c: torch.mm(b, c) + a, lambda a, b, c: torch.addmm(a, b, c))
    gm = traced(lambda a, b, c: torch.mm(b, c) + a, R(4, 4), R(4, 4).half(), R(4, 4).half())
    (refusal,) = apply(gm, one).refusals
    assert refusal.kind is Reason.VALUE


@INDUCTOR.case()
def test_bmm_to_mm() -> None:
    one = made(lambda a, b: torch.bmm(a, b), lambda a, b: torch.mm(a[0], b[0])[None], where=["size(a, 0) == 1"])
    for batch, expected in ((1, 1), (3, 0)):
        runs(one, torch.bmm, [R(batch, 4, 2), R(batch, 2, 3)], expected)


INDUCTOR.add("test_cat_mm", None, "n/a", "tests which kernel is generated")
INDUCTOR.add("test_cat_addmm", None, "n/a", "tests which kernel is generated")


def cat_slice_cat(size: int, end: int, expected: int) -> None:
    whole = shared(op("cat", [cap("a"), cap("b")], 1))
    pattern = Pattern((op("cat", [whole, op("slice", whole, 1, 0, cap("end", "literal"))], 1),))

    @where.predicate("a", "end", text="ends_in_first")
    def ends_in_first(a: fx.Node, end: int) -> bool:
        return 0 <= end <= a.meta["val"].shape[1]

    one = Rule(
        "test.it",
        Pattern(pattern.outputs, (ends_in_first,)),
        lambda a, b, end: torch.cat([a, b, a[:, :end]], 1),
    )
    runs(
        one,
        lambda a, b: aten.cat([c := aten.cat([a, b], 1), aten.slice(c, 1, 0, end)], 1),
        [R(2, size), R(2, 16)],
        expected,
    )


for _part, _size, _end, _count in (
    ("within the first", 32, 19, 1),
    ("beyond the first", 8, 19, 0),
    ("negative end", 8, -1, 0),
):
    INDUCTOR.add(
        "test_cat_slice_cat_cuda",
        lambda size=_size, end=_end, count=_count: cat_slice_cat(size, end, count),
        part=_part,
    )

VIEWS = Rule(
    "test.views", Pattern((op("view", op("view", cap("x"), ...), ...),), ("shape(x) == shape(root)",)), lambda x: x
)
PERMUTES = Rule(
    "test.permutes",
    Pattern((op("permute", op("permute", cap("x"), cap("one", "literal")), cap("other", "literal")),)),
    lambda match, x, one, other: (
        x if [one[dim] for dim in other] == sorted(other) else x.permute([one[d] for d in other])
    ),
)


@INDUCTOR.case()
def test_pointless_view_pair() -> None:
    runs(VIEWS, lambda x: x.view(3, 5, 7).view(15, 7) + 1, [R(15, 7)], 1)
    runs(VIEWS, lambda x: ((y := x.view(3, 5, 7)).exp(), y.view(15, 7) + 1), [R(15, 7)], 0)
    runs(VIEWS, lambda x: x.view(3, 5, 7).view(-1, 7) + 1, [R(15, 7)], 1)


@INDUCTOR.case()
def test_pointless_view_pair_dynamic_shapes() -> None:
    gm = traced(lambda x: x.view(-1).view(x.shape) + 1, R(15, 7), mode="symbolic")
    assert apply(gm, VIEWS).rewrites == 1


def permute_pair(*order: int) -> None:
    x = R(3, 5, 7)[..., : len(order)] if len(order) == 3 else R(5, 7)
    runs(PERMUTES, lambda x: x.permute(order).permute(order) + 1, [x], 1)
    runs(PERMUTES, lambda x: ((y := x.permute(order)).exp(), y.permute(order) + 1), [x], 0)


INDUCTOR.add("test_pointless_permute_pair", lambda: permute_pair(1, 0))
INDUCTOR.add("test_pointless_permute_pair_3d", lambda: permute_pair(1, 0, 2))


@INDUCTOR.case("better", "`verify` shows that the cast back to float16 is not exact")
def test_pointless_convert() -> None:
    @where.predicate("between", text="is_float")
    def is_float(between: torch.dtype) -> bool:
        return between.is_floating_point

    convert = prims.convert_element_type.default
    pattern = Pattern(
        (op(convert, op(convert, cap("x"), cap("between", "literal")), cap("dtype", "literal")),), (is_float,)
    )
    one = Rule("test.it", pattern, lambda x, dtype: convert(x, dtype))
    for between, expected in ((torch.float16, 1), (torch.int32, 0)):
        gm = fx.symbolic_trace(lambda x: convert(convert(x, between), torch.float32))  # noqa: B023
        assert apply(gm, one).rewrites == expected
    plain = made(lambda x: x.half().float(), lambda x: x.float())
    assert not plain.verify(samples=8, dtypes=["float32"]).ok


CUMSUMS: list[Callable[[], Any]] = [
    lambda: torch.cumsum(torch.full([1, 128], 1, dtype=torch.float32).to(torch.int64), 1) * 2,
    lambda: torch.cumsum(torch.full([55, 10], 1, dtype=torch.float32).to(torch.int64), 1),
    lambda: torch.cumsum(torch.full([5, 4, 3], 2, dtype=torch.int64), 0),
    lambda: torch.cumsum(torch.full([100], 0.5, dtype=torch.float32), 0),
    lambda: torch.cumsum(torch.full([2, 4], 1).to(torch.bool), 1),
    lambda: torch.cumsum(torch.full([10, 10], True, dtype=torch.int32), 1),
]


@INDUCTOR.case()
def test_pointless_cumsum() -> None:
    one = PatternMatcherPass("cumsum")
    rest = {name: Ignored() for name in ("dtype", "layout", "device", "pin_memory")}
    full = CallFunction(aten.full, KeywordArg("shape"), KeywordArg("fill"), **rest)
    for filled in (full, CallFunction(prims.convert_element_type, full, Ignored())):

        @register_graph_pattern(CallFunction(aten.cumsum, filled, KeywordArg("dim")), pass_dict=one)
        def counted(match: Any, shape: Any, fill: Any, dim: Any) -> None:
            dtype = match.output_node().meta["val"].dtype

            def line() -> torch.Tensor:
                sizes = [1] * len(shape)
                sizes[dim] = shape[dim]
                return (torch.arange(1, shape[dim] + 1, dtype=dtype) * fill).to(dtype).view(sizes).expand(shape)

            match.replace_by_example(line, [])

    for model in CUMSUMS:
        gm = after_autograd(model)
        applied(one, gm, 1)
        torch.testing.assert_close(gm(), model())


def merge_splits() -> PatternMatcherPass:
    one = PatternMatcherPass("splits")
    part = CallFunction(
        operator.getitem,
        CallFunction(aten.split_with_sizes, KeywordArg("x"), KeywordArg("sizes"), KeywordArg("by"), _users=MULTIPLE),
        Arg(),
    )

    def is_whole(match: Any) -> bool:
        (indices,) = match.args
        return [i for (i,) in indices] == list(range(len(match.kwargs["sizes"]))) and match.kwargs[
            "by"
        ] == match.kwargs["dim"]

    @register_graph_pattern(CallFunction(aten.cat, ListOf(part), KeywordArg("dim")), is_whole, pass_dict=one)
    def merged(match: Any, indices: Any, *, x: fx.Node, **_: Any) -> None:
        match.output_node().replace_all_uses_with(x)
        match.erase_nodes()

    return one


SPLITS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "all parts": (lambda a: torch.cat(aten.split_with_sizes(a, [8, 24], 1), 1) ** 2, 1),
    "not all parts": (lambda a: torch.cat((s := aten.split_with_sizes(a, [8, 8, 16], 1))[:2], 1).sum() + s[2], 0),
    "another dimension": (lambda a: torch.cat(aten.split_with_sizes(a, [8, 8, 8, 8], 1), 0) ** 2, 0),
    "another order": (lambda a: torch.cat([(s := aten.split_with_sizes(a, [8, 8, 16], 1))[1], s[0], s[2]], 1), 0),
}


def check_split(model: Callable[[Any], Any], expected: int) -> None:
    gm = after_autograd(model, R(2, 32))
    applied(merge_splits(), gm, expected)
    x = R(2, 32)
    assert torch.equal(gm(x), model(x))


for _part, (_model, _count) in SPLITS.items():
    INDUCTOR.add("test_splitwithsizes_cat", lambda model=_model, count=_count: check_split(model, count), part=_part)


def merge_cats() -> PatternMatcherPass:
    one = PatternMatcherPass("cats")
    cat = CallFunction(aten.cat, KeywordArg("xs"), KeywordArg("dim"))

    def is_whole(match: Any) -> bool:
        widths = [x.meta["val"].shape[match.kwargs["dim"]] for x in match.kwargs["xs"]]
        return match.kwargs["dim"] == match.kwargs["by"] and widths == list(match.kwargs["sizes"])

    @register_graph_pattern(
        CallFunction(aten.split_with_sizes, cat, KeywordArg("sizes"), KeywordArg("by")), is_whole, pass_dict=one
    )
    def merged(match: Any, *, xs: Any, **_: Any) -> None:
        for part in list(match.output_node().users):
            part.replace_all_uses_with(xs[part.args[1]])
            match.graph.erase_node(part)
        match.erase_nodes()

    return one


def parts(sizes: list[int], dim: int = 1, *, whole: bool = False) -> Callable[..., Any]:
    def model(a: Any, b: Any, c: Any) -> Any:
        cat = torch.cat([a, b, c], 1)
        return [s**2 for s in aten.split_with_sizes(cat, sizes, dim)] + ([cat**3] if whole else [])

    return model


CATS: dict[str, tuple[Callable[..., Any], int]] = {
    "all parts": (parts([2, 3, 5]), 1),
    "the whole is used": (parts([2, 3, 5], whole=True), 0),
    "another dimension": (parts([2, 3, 5], 0), 0),
    "another number": (parts([5, 5]), 0),
    "other sizes": (parts([2, 5, 3]), 0),
}


def check_cat(model: Callable[..., Any], expected: int) -> None:
    inputs = [R(10, 2), R(10, 3), R(10, 5)]
    gm = after_autograd(model, *inputs)
    applied(merge_cats(), gm, expected)
    torch.testing.assert_close(gm(*inputs), model(*inputs))


for _part, (_other, _count) in CATS.items():
    INDUCTOR.add("test_cat_splitwithsizes", lambda model=_other, count=_count: check_cat(model, count), part=_part)


@INDUCTOR.case()
def test_symint_pattern_matching() -> None:
    one = replaced(
        lambda x, y: x + y, lambda x, y: (x - (-y.size(0))) - (y * -1) - y.size(0), [torch.empty(8, 1), torch.empty(10)]
    )
    gm = after_autograd(lambda x, y: x + y, R(8, 1), R(10), mode="symbolic")
    applied(one, gm, 1)
    assert "aten.sym_size.int" in targets(gm)
    for x, y in ((R(8, 1), R(10)), (R(3, 1), R(7))):
        torch.testing.assert_close(gm(x, y), x + y)


class Mutating(torch.nn.Module):
    """One of the cases between a sine and the sum that reads it."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = torch.sin(x)
        if self.between == "copy_":
            x.copy_(y)
        elif self.between == "out":
            torch.add(y, 1, out=x)
        elif self.between == "no_grad":
            with torch.no_grad():
                return torch.add(x, a)
        elif self.between == "autocast":
            with torch.autocast("cpu"):
                return torch.add(x, a)
        return torch.add(x, a)


@INDUCTOR.case("better", "the report says which node writes")
def test_match_with_mutation() -> None:
    for between, expected in (("", 1), ("copy_", 0), ("no_grad", 0), ("autocast", 0), ("out", 0)):
        calls: list[Any] = []
        one = PatternMatcherPass("test")
        pattern = CallFunction(torch.add, KeywordArg("x"), CallFunction(torch.sin, KeywordArg("x")))
        register_graph_pattern(pattern, pass_dict=one)(lambda match, x, calls=calls: calls.append(x))
        gm = capture(Mutating(between), {"x": R(5, 5), "y": R(5, 5)})
        assert one.apply(gm) == len(calls) == expected, between
        assert one.report is not None
        assert [refusal.kind for refusal in one.report.refusals] == [Reason.EFFECT] * (1 - expected)


@INDUCTOR.case()
def test_remove_pointless_clones() -> None:
    runs(made(lambda a: torch.relu(a).clone(), lambda a: torch.relu(a)), lambda a: torch.relu(a).clone(), [R(8, 8)], 1)


@INDUCTOR.case()
def test_unfuse_bias_addmm() -> None:
    @where.predicate("root", text="is_read_by_pointwise")
    def is_read_by_pointwise(root: fx.Node) -> bool:
        users = list(root.users)
        while users and ops.key(users[0]) == "aten::unsqueeze":
            users = list(users[0].users)
        return bool(users) and all(ops.key(user) == "aten::relu" for user in users)

    one = made(
        lambda a, b, c: torch.addmm(a, b, c), lambda a, b, c: torch.mm(b, c) + a, where=[is_read_by_pointwise],
        numerics="reassociates",
    )  # fmt: skip
    inputs = [R(4), R(2, 3), R(3, 4)]
    runs(one, torch.addmm, inputs, 0)
    runs(one, lambda a, b, c: F.relu(torch.addmm(a, b, c)), inputs, 1)
    runs(one, lambda a, b, c: F.relu(torch.addmm(a, b, c).unsqueeze(0)), inputs, 1)


@INDUCTOR.case("better", "multipliers that a pattern does not mention are at their defaults")
def test_addmm_alpha_beta_with_pointwise() -> None:
    one = made(lambda a, b, c: torch.relu(torch.addmm(a, b, c)), lambda a, b, c: torch.relu(torch.mm(b, c) + a))
    inputs = [R(2), R(2, 3), R(3, 2)]
    runs(one, lambda a, b, c: torch.relu(torch.addmm(a, b, c)), inputs, 1)
    runs(one, lambda a, b, c: torch.relu(torch.addmm(a, b, c, alpha=0.8, beta=0.2)), inputs, 0)


@INDUCTOR.case("better", "patterns are read and written as text")
def test_serialized_patterns_up_to_date() -> None:
    for one in (*ACTIVATIONS.rules(), *NORMS.rules()):
        assert parse(str(Pattern(one.pattern.outputs))).outputs == one.pattern.outputs


@INDUCTOR.case()
def test_original_aten_preserved_split_addmm() -> None:
    gm = traced(torch.addmm, R(4, 4), R(4, 4), R(4, 4))
    (old,) = gm.graph.find_nodes(op="call_function", target=aten.addmm.default)
    source = [object()]
    old.meta.update(original_aten=aten.linear.default, from_node=source)
    assert apply(gm, made(lambda a, b, c: torch.addmm(a, b, c), lambda a, b, c: b @ c + a)).rewrites == 1
    new = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [(node.meta["original_aten"], node.meta["from_node"]) for node in new] == [(aten.linear.default, source)] * 2


def called(options: dict[str, Any], a: Any, b: Any, c: Any) -> Any:
    return aten.addmm(a, b, c, **options)


def equivalent(**captured: Any) -> None:
    one = PatternMatcherPass("addmm")

    @register_graph_pattern(CallFunction(aten.addmm, Arg(), Arg(), Arg(), **captured), pass_dict=one)
    def unfused(match: Any, a: Any, b: Any, c: Any, beta: float = 1, alpha: float = 1) -> None:
        match.replace_by_example(lambda a, b, c: (b @ c) * alpha + a * beta, [a, b, c])

    inputs = [R(4), R(2, 3), R(3, 4)]
    for options in ({}, {"beta": 1.0}, {"beta": 1.0, "alpha": 1.0}):
        gm = after_autograd(functools.partial(called, options), *inputs)
        applied(one, gm, 1)
        assert "aten.addmm.default" not in targets(gm)
        torch.testing.assert_close(gm(*inputs), torch.addmm(*inputs))


BETA, ALPHA = KeywordArg("beta"), KeywordArg("alpha")
INDUCTOR.add("test_match_equivalent_function_invocations1", lambda: equivalent(beta=BETA, alpha=ALPHA))
INDUCTOR.add("test_match_equivalent_function_invocations2", lambda: equivalent())
INDUCTOR.add("test_match_equivalent_function_invocations3", lambda: equivalent(beta=BETA))


@INDUCTOR.case("better", "`verify` finds that it is false for NaN and infinities")
def test_replace_mul_zero() -> None:
    zero = made(lambda x: x * 0, lambda x: torch.zeros_like(x))
    runs(zero, lambda x, y: x + y * 0, [R(8), R(8)], 1)
    assert not zero.verify(samples=16).ok


@INDUCTOR.case("better", "`verify` tests what is said of the input: here that x is x * y * y, which is false")
def test_input_output_same() -> None:
    x, y = torch.full((3, 3), 2.0), torch.full((3, 3), 3.0)
    one = replaced(lambda x, y: (x + y, x, y), lambda x, y: ((m := x * y), m * y, y), [x, y])
    gm = traced(lambda x, y: ((x + y) - y) * x, x, y)
    applied(one, gm, 1)
    torch.testing.assert_close(gm(x, y), (x * y - y) * (x * y * y))
    false = made(lambda x, y: (x + y, x), lambda x, y: (x + y, x * y * y))
    assert not false.verify(samples=4).ok
    assert made(lambda x, y: (x + y, x), lambda x, y: (y + x, x.clone()), terminates=False).verify(samples=4).ok


@INDUCTOR.case()
def test_stable_topological_sort() -> None:
    for first, moved in (("xy", False), ("yx", False), ("xy", True)):
        graph = fx.Graph()
        made_here = {name: graph.placeholder(name) for name in first}
        call = graph.call_function(torch.add, (made_here["y"], made_here["x"]))
        if moved:
            call.append(made_here["x"])
        stable_topological_sort(graph)
        order = [node.name for node in graph.nodes]
        assert order == [*("yx" if moved else first), "add"]


@INDUCTOR.case()
def test_scaled_softmax() -> None:
    @where.predicate("x", "s", text="is_constant_along_0")
    def is_constant_along_0(x: fx.Node, s: Any) -> bool:
        if not isinstance(s, fx.Node):
            return True
        shape = s.meta["val"].shape
        return len(shape) < len(x.meta["val"].shape) or shape[0] == 1

    rules = [
        Rule(
            f"test.{name}",
            Pattern((op("softmax", op(name, cap("x"), cap("s", "any")), 0),), (is_constant_along_0,)),
            body,
            terminates=False,
        )
        for name, body in (
            ("mul", lambda x, s: torch.softmax((x - x.amax(0, keepdim=True)) * s, 0)),
            ("div", lambda x, s: torch.softmax((x - x.amax(0, keepdim=True)) / s, 0)),
        )
    ]
    a = R(10, 10)
    for scale, expected in ((3.0, 1), (R(10) * 3, 1), (R(1, 10) * 3, 1), (R(10, 10), 0)):
        inputs = [a, scale] if isinstance(scale, torch.Tensor) else [a]
        for scaled in (operator.mul, lambda a, s: s * a, operator.truediv):

            def model(a: Any, *scales: Any, scaled: Any = scaled, number: Any = scale) -> Any:
                return F.softmax(scaled(a, scales[0] if scales else number), 0)

            gm = traced(model, *inputs)
            wanted = gm(*inputs)
            assert apply(gm, *rules).rewrites == expected
            torch.testing.assert_close(gm(*inputs), wanted)


@INDUCTOR.case()
def test_mutation_op_matching() -> None:
    t = R(1)
    functional, c10d = torch.ops.fsdp, torch.ops._c10d_functional
    cases: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], bool]] = [
        ("call_function", torch._C._set_grad_enabled, (False,), {}, True),
        ("call_method", "copy_", (t, t), {}, True),
        ("call_method", "relu_", (t,), {}, True),
        ("call_function", torch.manual_seed, (0,), {}, True),
        ("call_function", aten.set_.source_Tensor, (t, t), {}, True),
        ("call_function", torch.amp.autocast_mode._enter_autocast, ("cpu", None, True, None), {}, True),
        ("call_function", torch.amp.autocast_mode._exit_autocast, (None,), {}, True),
        ("call_function", c10d.all_gather_into_tensor_out, (t, 2, "0"), {"out": t}, True),
        ("call_function", torch.ops.inductor.resize_storage_bytes_, (t, 0), {}, True),
        ("call_function", torch.ops.inductor.resize_storage_bytes_.default, (t, 0), {}, True),
        ("call_function", functional.split_with_sizes_copy, (t, [1]), {"dim": 0, "out": [t]}, True),
        ("call_function", functional.copy_, (t, t), {}, True),
        ("call_function", aten.__rshift__.Scalar, (t, 2), {}, False),
        ("call_function", c10d.all_gather_into_tensor, (t, 2, "0"), {}, False),
    ]
    for kind, target, args, kwargs, expected in cases:
        graph = fx.Graph()
        names = {id(t): graph.placeholder("t")}
        given = torch.utils._pytree.tree_map(lambda v, names=names: names.get(id(v), v), (args, kwargs))
        node = graph.create_node(kind, target, *given)
        assert ops.mutates(node) == expected, target


LIBRARY = torch.library.Library("peers_inductor", "FRAGMENT")
LIBRARY.define("norm(Tensor(a!) out, Tensor x, Tensor w, float eps) -> ()")
LIBRARY.define("quant(Tensor(a!) out, Tensor x, Tensor(b!) scale) -> ()")
LIBRARY.define("norm_quant(Tensor(a!) out, Tensor x, Tensor w, float eps, Tensor(b!) scale) -> ()")
for _name in ("norm", "quant", "norm_quant"):
    LIBRARY.impl(_name, lambda *args: None, "CompositeExplicitAutograd")


@INDUCTOR.case()
def test_multioutput_register_replacement() -> None:
    hop, own = torch.ops.higher_order.auto_functionalized, torch.ops.peers_inductor

    def search(out: Any, normed: Any, x: Any, w: Any, scale: Any) -> Any:
        norm = hop(own.norm.default, out=normed, x=x, w=w, eps=1e-6)
        both = hop(own.quant.default, out=out, x=norm[1], scale=scale)
        return both[1], both[2]

    def replacement(out: Any, normed: Any, x: Any, w: Any, scale: Any) -> Any:
        both = hop(own.norm_quant.default, out=out, x=x, w=w, eps=1e-6, scale=scale)
        return both[1], both[2]

    inputs = [torch.empty(5, 4, dtype=torch.int8), *(R(5, 4).bfloat16() for _ in range(2)), R(5, 1).bfloat16(), R(1, 1)]
    one = replaced(search, replacement, inputs)
    gm = after_autograd(lambda *args: [part + 1 for part in search(*args)], *inputs)
    gm.graph.eliminate_dead_code()
    applied(one, gm, 1)
    assert [node.args[0] for node in gm.graph.nodes if node.target is hop] == [own.norm_quant.default]


@INDUCTOR.case()
def test_fwd_only_generate_original_aten_meta() -> None:
    with torch.fx.traceback.preserve_node_meta():
        gm = fwd_only(lambda x: aten.sigmoid(x), [R(3, 5)])
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.sigmoid.default)
    assert "original_aten" in node.meta


INDUCTOR.add("test_remove_noop_pass_with_remove_passes", None, "n/a", "tests a switch of inductor's configuration")


@INDUCTOR.case()
def test_bound_method_pattern_matcher() -> None:
    class Powers:
        def __init__(self, power: float) -> None:
            self.power = power

        def pattern(self, x: Any, y: Any) -> Any:
            return x.pow(self.power) + y.pow(self.power)

        def replacement(self, x: Any, y: Any) -> Any:
            return (x + y).pow(self.power)

    def model(power: float, other: float) -> Callable[..., Any]:
        return lambda x, y: (x.pow(power) + y.pow(power)).sin() + (x.pow(other) + y.pow(other))

    one = replaced(Powers(4).pattern, Powers(4).replacement, [torch.empty(5, 5), torch.empty(5, 5)])
    gm = after_autograd(model(4, 3), R(2, 2), R(2, 2))
    applied(one, gm, 1)


@INDUCTOR.case()
def test_empty_like_pattern_matching() -> None:
    def search(x: Any) -> Any:
        return x + torch.empty(x.shape, device=x.device, dtype=x.dtype) * 2

    one = replaced(search, lambda x: x * 3, [R(4, 4)])
    gm = after_autograd(lambda x: x + torch.empty_like(x) * 2, x := R(4, 4))
    applied(one, gm, 1)
    assert torch.equal(gm(x), x * 3)


@INDUCTOR.case("better", "each match and each miss, by one call")
def test_pattern_match_debug_output() -> None:
    one = replaced(lambda x, y: x + y, lambda x, y: x * y, [R(4, 4), R(4, 4)])
    seen: list[str] = []
    two = replaced(
        lambda x, y: x + y, lambda x, y: x * y, [R(2), R(2)], extra_check=lambda match: seen.append(str(match))
    )
    gm = after_autograd(lambda a, b: a + b, R(4, 4), R(4, 4))
    assert two.apply(gm) == 0
    assert seen[0] == "Match(..., [], {'x': a_1, 'y': b_1})"
    assert two.report is not None
    assert "extra_check is false at %add" in str(two.report)
    assert one.explain(gm)[0].num_matches == 1


@INDUCTOR.case("better", "`explain` says where, without a log")
def test_failed_match_constant_args_format_string() -> None:
    one = replaced(lambda x: x + 1, lambda x: x * 2, [R(4, 4)])
    gm = after_autograd(lambda x: x + 2, R(4, 4))
    applied(one, gm, 0)
    assert "expected the literal 1 at root.other, found 2" in str(one.explain(gm)[0])


@INDUCTOR.case()
def test_gumbel_max_trick() -> None:
    one = replaced(
        lambda logits, noise: torch.argmax(torch.softmax(logits, -1) / noise, -1, True),
        lambda logits, noise: torch.argmax(logits - noise.log(), -1, True),
        [R(4, 4), R(4, 4)],
    )
    gm = after_autograd(lambda x, q: torch.argmax(torch.softmax(x / 0.8, -1) / q, -1, True).int(), R(3, 9), R(3, 9))
    applied(one, gm, 1)
    x, q = R(50, 9), R(50, 9) + 0.1
    assert torch.equal(gm(x, q), torch.argmax(torch.softmax(x / 0.8, -1) / q, -1, True).int())


def counting(target: Any, number: int, calls: list[int]) -> PatternMatcherPass:
    one = PatternMatcherPass(f"count{number}")
    register_graph_pattern(CallFunction(target, Arg(), number), pass_dict=one)(lambda match, x: calls.append(number))
    return one


def batched(model: Callable[..., Any], expected: list[int], *passes: tuple[Any, int]) -> None:
    calls: list[int] = []
    together = RuleSet("none")
    for target, number in passes:
        together = together | counting(target, number, calls).rules
    assert together.apply(after_autograd(model, R(10))).rewrites == len(expected)
    assert sorted(calls) == expected


ONE, TWO = (aten.add.Tensor, 1), (aten.mul.Tensor, 2)
INDUCTOR.add("test_batched_pattern_matcher_pass", lambda: batched(lambda x: (x + 1) * 2, [1, 2], ONE, TWO))
INDUCTOR.add("test_batched_pattern_matcher_pass_empty_passes", lambda: batched(lambda x: x + 1, []))
INDUCTOR.add(
    "test_batched_pattern_matcher_pass_multiple_matches", lambda: batched(lambda x: x + 1 + 1 + 1, [1, 1, 1], ONE)
)


@INDUCTOR.case(
    "better",
    "sizes that the pattern fixes are compared by value, at every match",
    name="register_replacement",
    part="joint",
)
def joint() -> None:
    """No test of the matcher's own: how fuse_attention registers its training patterns."""

    def search(x: Any) -> Any:
        return torch.sigmoid(x) * x

    x = R(3, 4, requires_grad=True)
    one = replaced(search, lambda x: F.silu(x), [R(2, 5, requires_grad=True)], trace=joint_fwd_bwd)
    gm = joint_fwd_bwd(lambda x: search(x) * 2, [x])
    wanted = gm(x, x.detach())
    applied(one, gm, 1)
    for result, expected in zip(gm(x, x.detach()), wanted, strict=True):
        torch.testing.assert_close(result, expected)
