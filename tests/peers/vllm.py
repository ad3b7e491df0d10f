"""vLLM's passes, on operators of the schemas of its own: its kernels need a GPU and are not installed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import Pattern, Rule, RuleSet, cap, functional, op, refuse, siblings
from fxrewrite.adapters.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from fxrewrite.errors import RefusedError
from fxrewrite.pattern import shared
from tests.peers.cases import Suite
from tests.peers.inductor import after_autograd
from tests.rewriting import made, targets

NORM, ACTIVATION = Suite("test_fusion"), Suite("test_silu_mul_quant_fusion")
SPLIT, OVERLAPPED = Suite("test_sequence_parallelism"), Suite("test_async_tp")
SUITES = (NORM, ACTIVATION, SPLIT, OVERLAPPED)

LIBRARY = torch.library.Library("peers_vllm", "FRAGMENT")
FP8 = torch.float8_e4m3fn
OPS = torch.ops.peers_vllm
HOP, HOP2 = torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2
R = torch.rand


def operator(schema: str, function: Callable[..., Any]) -> None:
    """An operator, which on fake tensors does what it does on real ones."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")


def normed(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(FP8)


def added(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    residual.add_(x)
    x.copy_(normed(residual, w, eps))


operator("norm(Tensor x, Tensor w, float eps) -> Tensor", normed)
operator(
    "rms_norm(Tensor(a!) out, Tensor x, Tensor w, float eps) -> ()", lambda o, x, w, e: void(o.copy_(normed(x, w, e)))
)
operator("add_norm(Tensor(a!) x, Tensor(b!) residual, Tensor w, float eps) -> ()", added)
operator("quant(Tensor(a!) out, Tensor x, Tensor scale) -> ()", lambda o, x, s: void(o.copy_(quantized(x, s))))
operator(
    "norm_quant(Tensor(a!) out, Tensor x, Tensor w, Tensor scale, float eps) -> ()",
    lambda o, x, w, s, e: void(o.copy_(quantized(normed(x, w, e), s))),
)
operator(
    "add_norm_quant(Tensor(a!) out, Tensor x, Tensor(b!) residual, Tensor w, Tensor scale, float eps) -> ()",
    lambda o, x, r, w, s, e: void(r.add_(x), o.copy_(quantized(normed(r, w, e), s))),
)
operator("silu_mul(Tensor(a!) out, Tensor x) -> ()", lambda o, x: void(o.copy_(gated(x))))
operator(
    "silu_mul_quant(Tensor(a!) out, Tensor x, Tensor scale) -> ()",
    lambda o, x, s: void(o.copy_(quantized(gated(x), s))),
)
operator("all_reduce(Tensor x, str group) -> Tensor", lambda x, group: x.clone())
operator("reduce_scatter(Tensor x, int dim, int size, str group) -> Tensor", lambda x, *_: x.clone())
operator("all_gather(Tensor x, int dim, int size, str group) -> Tensor", lambda x, *_: x.clone())
operator("mm_scatter(Tensor a, Tensor b, str group) -> Tensor", lambda a, b, group: a @ b)
operator("gather_mm(Tensor a, Tensor[] bs, str group) -> Tensor[]", lambda a, bs, group: [a @ b for b in bs])
operator("scaled_mm(Tensor a, Tensor b, Tensor s, Tensor t) -> Tensor", lambda a, b, s, t: (a * s) @ (b * t))
operator(
    "out_scaled_mm(Tensor(a!) out, Tensor a, Tensor b, Tensor s, Tensor t) -> ()",
    lambda o, a, b, s, t: void(o.copy_((a * s) @ (b * t))),
)
operator(
    "scaled_mm_scatter(Tensor a, Tensor b, Tensor s, Tensor t, str group) -> Tensor",
    lambda a, b, s, t, g: (a * s) @ (b * t),
)
operator(
    "gather_scaled_mm(Tensor a, Tensor b, Tensor s, Tensor t, str group) -> Tensor",
    lambda a, b, s, t, g: (a * s) @ (b * t),
)


def void(*_: Any) -> None:
    """What an operator that writes returns."""


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def as_fp8(x: Any) -> Any:
    return torch.empty_like(x, dtype=FP8)


def check(
    rules: RuleSet, model: Callable[..., Any], inputs: list[torch.Tensor], expected: int, holds: str
) -> fx.GraphModule:
    """After so many rewrites the graph calls `holds` so often, and computes what it did, also for another batch."""
    for mode in ("fake", "symbolic"):
        gm = after_autograd(model, *inputs, mode=mode)
        gm.graph.eliminate_dead_code()
        wanted = gm(*inputs)
        report = rules.apply(gm)
        gm.graph.lint()
        assert report.rewrites == expected, str(report)
        assert sum(holds in f"{node.target}{node.args}" for node in gm.graph.nodes) >= 1
        torch.testing.assert_close(_plain(gm(*inputs)), _plain(wanted))
    return gm


def _plain(values: Any) -> Any:
    return [v.float() for v in values] if isinstance(values, (tuple, list)) else values.float()


def fused_norms() -> RuleSet:
    """Both epsilons, both forms of functional operators, with a residual and without, one rule each."""
    x, w, scale, r, eps = cap("x"), cap("w"), cap("scale"), cap("r"), cap("eps", "literal")
    plain = op(OPS.norm, x, w, eps)
    wrote = functional(OPS.rms_norm, ..., x, w, eps)
    hidden, residual = functional(OPS.add_norm, x, r, w, eps)

    def fuse(match: Any, x: Any, w: Any, scale: Any, eps: float) -> Any:
        return match.call(
            HOP, OPS.norm_quant.default, out=match.call(torch.empty_like, x, dtype=FP8), x=x, w=w, scale=scale, eps=eps
        )[1]

    def fuse_added(match: Any, x: Any, r: Any, w: Any, scale: Any, eps: float) -> Any:
        out = match.call(torch.empty_like, x, dtype=FP8)
        both = match.call(HOP, OPS.add_norm_quant.default, out=out, x=x, residual=r, w=w, scale=scale, eps=eps)
        return both[1], both[2]

    return RuleSet(
        "norms",
        Rule("norms.plain", Pattern((functional(OPS.quant, ..., plain, scale),)), fuse),
        Rule("norms.wrote", Pattern((functional(OPS.quant, ..., wrote, scale),)), fuse),
        Rule("norms.added", Pattern((functional(OPS.quant, ..., hidden, scale), residual)), fuse_added),
    )


def norm_model(eps: float, *, second: bool, custom: bool) -> Callable[..., Any]:
    def quant(x: Any, scale: Any) -> Any:
        if second:
            return HOP2(OPS.quant.default, x=x, scale=scale, _out_base_index=0, _all_bases=[as_fp8(x)])[1]
        return HOP(OPS.quant.default, out=as_fp8(x), x=x, scale=scale)[1]

    def model(x: Any, w: Any, scale: Any) -> Any:
        x = torch.relu(x)
        y = HOP(OPS.rms_norm.default, out=torch.empty_like(x), x=x, w=w, eps=eps)[1] if custom else OPS.norm(x, w, eps)
        z = quant(y, scale).float()
        if second:
            both = HOP2(OPS.add_norm.default, w=w, eps=eps, _x_base_index=0, _residual_base_index=1, _all_bases=[z, x])
        else:
            both = HOP(OPS.add_norm.default, x=z, residual=x, w=w, eps=eps)
        return quant(both[1], scale), both[2]

    return model


for _eps in (1e-5, 1e-6):
    for _second in (False, True):
        for _custom in (False, True):
            NORM.add(
                "test_fusion_rmsnorm_quant",
                lambda eps=_eps, second=_second, custom=_custom: void(
                    check(
                        fused_norms(),
                        norm_model(eps, second=second, custom=custom),
                        [R(6, 8), R(8), R(1) + 1],
                        2,
                        "norm_quant",
                    )
                ),
                "better",
                "one rule for every epsilon, batch and form; vLLM registers each",
                f"eps {_eps:g}, auto_functionalized{'_v2' * _second}, {'custom' if _custom else 'functional'} norm",
            )


@NORM.case(part="by register_replacement, as vLLM writes it", name="test_fusion_rmsnorm_quant")
def registered() -> None:
    def search(result: Any, x: Any, w: Any, scale: Any) -> Any:
        return HOP(OPS.quant.default, out=result, x=OPS.norm(x, w, 1e-6), scale=scale)[1]

    def replacement(result: Any, x: Any, w: Any, scale: Any) -> Any:
        return HOP(OPS.norm_quant.default, out=result, x=x, w=w, scale=scale, eps=1e-6)[1]

    one = PatternMatcherPass("rms_quant")
    examples = [torch.empty(5, 4, dtype=FP8), R(5, 4), R(4), R(1)]
    assert register_replacement(search, replacement, examples, fwd_only, one)
    for eps, expected in ((1e-6, 1), (1e-5, 0)):

        def model(x: Any, w: Any, s: Any) -> Any:
            return HOP(OPS.quant.default, out=as_fp8(x), x=OPS.norm(x, w, eps), scale=s)[1]  # noqa: B023

        gm = after_autograd(model, R(6, 8), R(8), R(1))
        gm.graph.eliminate_dead_code()
        assert one.apply(gm) == expected, str(one.report)


NORM.add("test_aiter_fusion_rmsnorm_quant", None, "n/a", "the same patterns of other kernels")

FUSED_GATE = [
    made(
        lambda x, scale: functional(OPS.quant, ..., functional(OPS.silu_mul, ..., x), scale),
        lambda match, x, scale: match.call(
            HOP, OPS.silu_mul_quant.default,
            out=match.call(torch.empty_like, x[..., : x.shape[-1] // 2], dtype=FP8), x=x, scale=scale,
        )[1],
    )
]  # fmt: skip


@ACTIVATION.case(part="static fp8, custom operators")
def test_fusion_silu_and_mul_quant() -> None:
    def model(x: Any, scale: Any) -> Any:
        y = HOP(OPS.silu_mul.default, out=torch.empty_like(x[:, : x.shape[1] // 2]), x=x)[1]
        return HOP(OPS.quant.default, out=as_fp8(y), x=y, scale=scale)[1]

    check(RuleSet("gates", *FUSED_GATE), model, [R(6, 8), R(1) + 1], 1, "silu_mul_quant")


@ACTIVATION.case(part="static fp8, written out", name="test_fusion_silu_and_mul_quant")
def written_out() -> None:
    def search(result: Any, x: Any, scale: Any) -> Any:
        return HOP(OPS.quant.default, out=result, x=gated(x), scale=scale)[1]

    one = PatternMatcherPass("silu_quant")
    examples = [torch.empty(5, 4, dtype=FP8), R(5, 8), R(1)]
    replacement: Any = lambda result, x, scale: HOP(OPS.silu_mul_quant.default, out=result, x=x, scale=scale)[1]  # noqa: E731
    assert register_replacement(search, replacement, examples, fwd_only, one)
    for mode in ("fake", "symbolic"):
        gm = after_autograd(lambda x, s: search(as_fp8(x[:, : x.shape[1] // 2]), x, s), R(6, 12), R(1) + 1, mode=mode)
        gm.graph.eliminate_dead_code()
        assert one.apply(gm) == 1, str(one.report)


ACTIVATION.add("test_fusion_silu_and_mul_quant", None, "n/a", "the same patterns of other kernels", "nvfp4 and groups")


def sharded_norms(atomic: bool) -> RuleSet:
    """all-reduce and norm become reduce-scatter, norm on a chunk, all-gather; the residual stays a chunk."""
    group = "tp"

    def scatter(x: Any) -> Any:
        return OPS.reduce_scatter(x, 0, 1, group)

    def gather(x: Any) -> Any:
        return OPS.all_gather(x, 0, 1, group)

    first = made(
        lambda x, w: ((r := OPS.all_reduce(x, group)), OPS.norm(r, w, 1e-6)),
        lambda x, w: ((part := scatter(x)), gather(OPS.norm(part, w, 1e-6))),
    )
    middle = made(
        lambda x, r, w: functional(OPS.add_norm, OPS.all_reduce(x, group), r, w, 1e-6),
        lambda match, x, r, w: (
            gather((both := match.call(HOP, OPS.add_norm.default, x=scatter(x), residual=r, w=w, eps=1e-6))[1]),
            both[2],
        ),
    )
    last = made(
        lambda x, r, w: functional(OPS.add_norm, OPS.all_reduce(x, group), r, w, 1e-6)[0],
        lambda match, x, r, w: gather(
            match.call(HOP, OPS.add_norm.default, x=scatter(x), residual=r, w=w, eps=1e-6)[1]
        ),
    )
    rules = [
        Rule(f"sharded.{name}", it.pattern, it.body)
        for name, it in (("first", first), ("middle", middle), ("last", last))
    ]
    return RuleSet("sharded", *rules, atomic=atomic)


def layers(x: Any, w: Any, *weights: Any) -> Any:
    x = residual = OPS.all_reduce(torch.relu(x), "tp")
    y = OPS.norm(x, w, 1e-6)
    for weight in weights:
        both = HOP(OPS.add_norm.default, x=OPS.all_reduce(y @ weight, "tp"), residual=residual, w=w, eps=1e-6)
        y, residual = both[1], both[2]
    return y


INPUTS = [R(8, 4), R(4), *(R(4, 4) for _ in range(3))]


@SPLIT.case("better", "atomic: all norms of a model or none, in any order, without a graph in between that is wrong")
def test_sequence_parallelism_pass() -> None:
    for mode in ("fake", "symbolic"):
        gm = after_autograd(layers, *INPUTS, mode=mode)
        gm.graph.eliminate_dead_code()
        report = sharded_norms(atomic=True).once(order="bottom_up").apply(gm)
        assert report.rewrites == 4, str(report)
        called = targets(gm)
        assert [
            sum(name in target for target in called) for name in ("all_reduce", "reduce_scatter", "all_gather")
        ] == [0, 4, 4]
        torch.testing.assert_close(gm(*INPUTS), layers(*INPUTS))


@SPLIT.case(part="with quantization", name="test_sequence_parallelism_pass")
def with_quantization() -> None:
    def model(x: Any, w: Any, scale: Any) -> Any:
        y = OPS.norm(OPS.all_reduce(torch.relu(x), "tp"), w, 1e-6)
        return HOP(OPS.quant.default, out=as_fp8(y), x=y, scale=scale)[1]

    early = made(
        lambda x, w, scale: functional(OPS.quant, ..., OPS.norm(OPS.all_reduce(x, "tp"), w, 1e-6), scale),
        lambda match, x, w, scale: OPS.all_gather(
            match.call(
                HOP, OPS.norm_quant.default,
                out=match.call(torch.empty_like, (part := OPS.reduce_scatter(x, 0, 1, "tp")), dtype=FP8),
                x=part, w=w, scale=scale, eps=1e-6,
            )[1], 0, 1, "tp",
        ),
    )  # fmt: skip
    check(RuleSet("early", early), model, [R(8, 4), R(4), R(1) + 1], 1, "norm_quant")


def whole_graphs(name: str, suite: Suite) -> None:
    from fxrewrite.adapters.vllm import vllm_pass

    def check() -> None:
        import sys
        from types import ModuleType
        from unittest import mock

        stub: Any = ModuleType("vllm.compilation.passes.inductor_pass")
        stub.InductorPass = object
        names = {"vllm": stub, "vllm.compilation": stub, "vllm.compilation.passes": stub, stub.__name__: stub}
        with mock.patch.dict(sys.modules, names):
            one = vllm_pass(sharded_norms(atomic=True), is_applicable=lambda sizes: sizes.end - sizes.start >= 8)
        assert [one.is_applicable_for_range(SimpleNamespace(start=0, end=end)) for end in (4, 9)] == [False, True]

    suite.add(name, check, "same", "`is_applicable=` decides")


whole_graphs("test_sequence_parallelism_pass_requires_full_graph_compilation", SPLIT)


@SPLIT.case("better", "one norm that cannot be rewritten undoes all; vLLM's pass left a mixture", name="atomic sets")
def undone() -> None:
    gm = after_autograd(layers, *INPUTS)
    gm.graph.eliminate_dead_code()
    before = gm.code
    refusing = made(lambda x: OPS.reduce_scatter(torch.relu(x), 0, 1, "tp"), lambda x: refuse("not here"))
    with pytest.raises(RefusedError, match="not here"):
        RuleSet("all", sharded_norms(atomic=False), refusing, atomic=True).once(order="bottom_up").apply(gm)
    assert gm.code == before


def overlapped(
    pattern: Any, replacement: Any, model: Callable[..., Any], inputs: list[torch.Tensor], holds: str
) -> None:
    check(RuleSet("overlapped", made(pattern, replacement)), model, inputs, 1, holds)


NAME = "test_async_tp_pass_replace"
A, B, S, T = R(8, 4), R(4, 4), R(8, 1), R(1, 4)
OVERLAPPED.add(
    NAME,
    lambda: overlapped(
        lambda a, b: OPS.reduce_scatter(torch.mm(a, b), 0, 1, "tp"),
        lambda a, b: OPS.mm_scatter(a, b, "tp"),
        lambda a, b: OPS.reduce_scatter(torch.mm(a, b.permute(1, 0)), 0, 1, "tp"),
        [A, B],
        "mm_scatter",
    ),
    part="mm, reduce-scatter",
)


@OVERLAPPED.case(
    "better", "all products of one gathered value become one operator, three of q, k and v too", "all-gather, mm", NAME
)
def gathered() -> None:
    each = op("mm", shared(op(OPS.all_gather, cap("a"), 0, 1, "tp")), cap("b"))
    pattern = Pattern((siblings(each, on="a", least=1),))

    def together(a: Any, b: Any) -> Any:
        products = OPS.gather_mm(a, b, "tp")
        return [products[i] for i in range(len(b))] if len(b) > 1 else products[0]

    one = Rule("test.gather", pattern, together)

    def model(a: Any, *weights: Any) -> Any:
        whole = OPS.all_gather(a, 0, 1, "tp")
        return [torch.mm(whole, w) for w in weights]

    for count in (1, 3):
        check(RuleSet("gathered", one), model, [A, *(R(4, 4) for _ in range(count))], 1, "gather_mm")


OVERLAPPED.add(
    NAME,
    lambda: overlapped(
        lambda a, b, s, t: OPS.reduce_scatter(OPS.scaled_mm(a, b, s, t), 0, 1, "tp"),
        lambda a, b, s, t: OPS.scaled_mm_scatter(a, b, s, t, "tp"),
        lambda a, b, s, t: OPS.reduce_scatter(OPS.scaled_mm(a, b, s, t), 0, 1, "tp"),
        [A, B, S, T],
        "scaled_mm_scatter",
    ),
    part="scaled_mm, reduce-scatter",
)
OVERLAPPED.add(
    NAME,
    lambda: overlapped(
        lambda a, b, s, t: OPS.scaled_mm(OPS.all_gather(a, 0, 1, "tp"), b, s, t),
        lambda a, b, s, t: OPS.gather_scaled_mm(a, b, s, t, "tp"),
        lambda a, b, s, t: OPS.scaled_mm(OPS.all_gather(a, 0, 1, "tp"), b, s, t),
        [A, B, S, T],
        "gather_scaled_mm",
    ),
    part="all-gather, scaled_mm",
)


def cutlass(a: Any, b: Any, s: Any, t: Any) -> Any:
    return HOP(OPS.out_scaled_mm.default, out=torch.empty_like(a), a=a, b=b, s=s, t=t)[1]


OVERLAPPED.add(
    NAME,
    lambda: overlapped(
        lambda a, b, s, t: OPS.reduce_scatter(functional(OPS.out_scaled_mm, ..., a, b, s, t), 0, 1, "tp"),
        lambda a, b, s, t: OPS.scaled_mm_scatter(a, b, s, t, "tp"),
        lambda a, b, s, t: OPS.reduce_scatter(cutlass(a, b, s, t), 0, 1, "tp"),
        [A, B, S, T],
        "scaled_mm_scatter",
    ),
    part="cutlass_scaled_mm, reduce-scatter",
)
OVERLAPPED.add(
    NAME,
    lambda: overlapped(
        lambda a, b, s, t: functional(OPS.out_scaled_mm, ..., OPS.all_gather(a, 0, 1, "tp"), b, s, t),
        lambda a, b, s, t: OPS.gather_scaled_mm(a, b, s, t, "tp"),
        lambda a, b, s, t: cutlass(OPS.all_gather(a, 0, 1, "tp"), b, s, t),
        [A, B, S, T],
        "gather_scaled_mm",
    ),
    part="all-gather, cutlass_scaled_mm",
)
whole_graphs("test_async_tp_pass_requires_full_graph_compilation", OVERLAPPED)
