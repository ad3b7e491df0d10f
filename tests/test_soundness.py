"""True rules where memory, randomness or strides make them wrong: each rewrite is refused, or done right."""

import math
import operator
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fxrewrite import FxRewriteError, Literal, RuleDefinitionError, RuleSet, rule
from fxrewrite.pattern import trace
from rules.attention.composite import ATTENTION
from rules.canonical.normal_forms import NORMAL_FORMS
from rules.fusions.activations import ACTIVATIONS
from rules.fusions.norms import NORMS
from tests.rewriting import made, silu

X = torch.linspace(-2, 2, 16).reshape(4, 4)


def check(model, it, how="make_fx"):
    """Whatever the rule does, the module computes the same afterwards, results and inputs."""
    gm = fx.symbolic_trace(model) if how == "fx" else make_fx(model, tracing_mode="fake", pre_dispatch=True)(X)
    expected = model(X.clone())
    RuleSet("s", it).apply(gm)
    gm.graph.lint()
    found = gm(X.clone())
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, found)), strict=True):
        assert torch.allclose(a, b)


# The result of an in-place operator is not known to be its operand (ops.is_view: alias_info.is_write is left out),
#    so a write through it is not seen. Dynamo's `h += r` is `iadd`, and everything after reads `iadd`.
@pytest.mark.parametrize("write", [lambda y: y.add_(1), lambda y: F.relu(y, inplace=True)], ids=["add_", "relu"])
@pytest.mark.parametrize("capture", ["fx", "make_fx"])
def test_write_through_the_result_of_a_write_in_between(write, capture):
    def model(x):
        y = x.clone()
        z = write(y)
        s = torch.sigmoid(y)
        z.mul_(2)
        return y * s

    check(model, silu(), capture)


def test_write_through_the_result_of_a_write_later():
    def model(x):
        y = torch.sin(x)
        z = y.add_(1)
        c = y.clone()
        z.mul_(2)
        return y, c

    check(model, made(lambda x: x.clone(), lambda x: x), "fx")


# `may be a view of` on both sides is taken for `shares the same`: contiguous() of a transpose is a copy.
def test_a_copy_replaced_by_a_view():
    def model(x):
        y = torch.sin(x)
        z = y.transpose(0, 1).contiguous()
        y.add_(1)
        return z, y

    check(model, made(lambda x: x.transpose(0, 1).contiguous(), lambda x: x.transpose(0, 1)))


# Two outputs become one value, one of them is written to later (each output is compared alone).
def test_two_outputs_get_one_memory():
    def model(x):
        a, b = torch.relu(x), torch.clamp(x, min=0)
        a.add_(1)
        return a, b

    def one(x):
        y = torch.relu(x)
        return y, y

    check(model, made(lambda x: (torch.relu(x), torch.clamp(x, min=0)), one))


# A replacement with other strides, and what comes after it: refused where that depends on them.
def _turned(x):
    return torch.matmul(x, x + 1).transpose(0, 1)


def _written(of):
    def model(x):
        t = _turned(x)
        of(t).add_(1)
        return t * 1

    return model


def _checkpointed(function):
    return lambda x: checkpoint(function, _turned(x), use_reentrant=False)


@torch.library.custom_op("test_soundness::in_order", mutates_args=())
def in_order(x: torch.Tensor) -> torch.Tensor:
    """The entries as they are in memory."""
    return x.as_strided((x.numel(),), (1,)).clone()


@in_order.register_fake
def _(x):
    return x.new_empty(x.numel())


DEPEND_ON_STRIDES = {
    "view": lambda x: _turned(x).t().view(16),
    "as_strided": lambda x: _turned(x).as_strided((4,), (1,)),
    "as_strided of a part": lambda x: [part.as_strided((2,), (1,)) for part in _turned(x).unbind(0)],
    "a write to reshape": _written(lambda t: t.reshape(-1)),
    "a write to flatten": _written(torch.flatten),
    "a write to contiguous": _written(lambda t: t.contiguous()),
    "normal_ of zeros_like": lambda x: torch.zeros_like(_turned(x)).normal_(),
    "exponential_": lambda x: _turned(x).exponential_(),
    "dropout in place": lambda x: F.dropout(_turned(x), 0.5, training=True, inplace=True),
    "transpose_": lambda x: _turned(x).transpose_(0, 1).view(-1),
    "a view of a chunk": lambda x: _turned(x).chunk(2, 1)[0].t().view(-1),
    "a view of what sort returns": lambda x: _turned(x).sort(0)[0].t().view(-1),
    "a view in a checkpoint": _checkpointed(lambda t: t.t().view(-1) * 2),
    "a write to what a checkpoint returns": _written(
        lambda t: checkpoint(lambda v: v.contiguous(), t, use_reentrant=False)
    ),
    "an operator of somebody else": lambda x: in_order(_turned(x)),
    "an operator of somebody else, by its name": lambda x: torch.ops.test_soundness.in_order(_turned(x)),
    "dropout in a checkpoint": _checkpointed(lambda t: F.dropout(t, 0.5)),
    "a view after a checkpoint": lambda x: _checkpointed(lambda t: t.neg())(x).t().view(-1),
    "the result of a checkpoint": lambda x: checkpoint(lambda x: _turned(x), x, use_reentrant=False).t().view(-1),
    "a view in a condition": lambda x: torch.cond(
        x.sum() > 0, lambda t: t.t().view(-1) * 2, torch.ravel, (_turned(x),)
    ),
    "a result of a condition": lambda x: torch.cond(x.sum() > 0, torch.neg, torch.exp, (_turned(x),)).t().view(-1),
}
DO_NOT = {
    "reshape": lambda x: _turned(x).reshape(-1),
    "a write to the value itself": lambda x: _turned(x).add_(1),
    "a copy into another": lambda x: x.clone().copy_(_turned(x)).view(-1),
    "contiguous": lambda x: F.linear(_turned(x), x).view(-1),
    "topk": lambda x: _turned(x).topk(2, 0)[1].view(-1),
    "a checkpoint": lambda x: _checkpointed(lambda t: t.reshape(-1) * 2)(x).view(-1),
    "the result of a checkpoint, summed": lambda x: checkpoint(_turned, x, use_reentrant=False).sum(0).view(-1),
    "a sum after a checkpoint": lambda x: _checkpointed(lambda t: t.neg())(x).sum(0).view(-1),
}


@pytest.mark.parametrize("name", [*DEPEND_ON_STRIDES, *DO_NOT])
@pytest.mark.parametrize("how", ["make_fx", "dynamo"])
def test_strides_and_a_later_reader(name, how):
    swap = made(
        lambda a, b: torch.matmul(a, b).transpose(0, 1), lambda a, b: torch.matmul(b.T, a.T), numerics="reassociates"
    )
    model = (DEPEND_ON_STRIDES | DO_NOT)[name]
    torch.manual_seed(0)
    expected = model(X.clone())
    if how == "make_fx":
        run = make_fx(model, tracing_mode="fake", pre_dispatch=True)(X)
        rewrites = RuleSet("s", swap).apply(run).rewrites
    else:
        backend = RuleSet("s", swap).backend("eager")
        run = torch.compile(model, backend=backend)
        run(X.clone())
        rewrites = sum(report.rewrites for report in backend.reports)
    torch.manual_seed(0)
    assert rewrites == (name in DO_NOT)
    torch.testing.assert_close(run(X.clone()), expected)


def test_a_part_of_other_memory_in_front_of_as_strided():
    """Strides are equal, and what as_strided takes is elsewhere."""
    part = made(
        lambda x: torch.sin(x), lambda x: torch.cat([x, torch.cos(x - math.pi / 2)])[4:], numerics="approximate"
    )
    check(lambda x: torch.sin(x).as_strided((4,), (1,), 0), part)
    check(lambda x: torch.sin(x).view(-1).as_strided((4,), (1,), 8), part)
    gm = make_fx(lambda x: torch.sin(x).view(-1) * 2, tracing_mode="fake", pre_dispatch=True)(X)
    assert RuleSet("s", part).apply(gm).rewrites == 1


class SavesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].t().view(-1)[0]


class SavesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("function", "rewrites"), [(SavesItsInput, 0), (SavesNothing, 1)])
def test_strides_of_what_a_function_saves(function, rewrites):
    swap = made(lambda a, b: torch.matmul(a, b).transpose(0, 1), lambda a, b: torch.matmul(b.T, a.T))
    backend = RuleSet("s", swap).backend("eager")
    grads = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend=backend)):
        x = X.clone().requires_grad_()
        wrap(lambda x: function.apply(_turned(x)))(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    assert sum(report.rewrites for report in backend.reports) == rewrites


def test_values_in_an_autocast_region_are_those_of_autocast():
    """A product is rounded there, and a sum is not."""

    def function(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (x * w).sum(-1), F.linear(x, w).relu()

    dot = made(lambda x, w: (x * w).sum(-1), lambda x, w: torch.matmul(x[:, None, :], w[:, :, None])[:, 0, 0])
    relu = made(lambda x, w: F.linear(x, w).relu(), lambda x, w: F.linear(x, w).clamp_min(0))
    for it, rewrites in ((dot, 0), (relu, 1)):
        backend = RuleSet("s", it).backend("eager")
        torch._dynamo.reset()
        found, expected = torch.compile(function, backend=backend)(X, X + 1), function(X, X + 1)
        torch.testing.assert_close(found, expected)
        assert sum(report.rewrites for report in backend.reports) == rewrites


def test_values_of_several_graphs_are_undone_in_order():
    """A node whose strides a rule changes in its graph, and then another rule from a subgraph."""
    swap = made(lambda a, b: torch.matmul(a, b).transpose(0, 1), lambda a, b: torch.matmul(b.T, a.T))

    def model(x):
        return torch._foreach_add([_turned(x), checkpoint(_turned, x, use_reentrant=False)], 1.0)

    gm = make_fx(model, tracing_mode="fake", pre_dispatch=True)(X)
    before = [node.meta.get("val") for node in gm.graph.nodes]
    never = rule("t.never")(lambda x: torch.erfinv(x))
    never.replacement(lambda x: x)
    plan = RuleSet("s", swap) >> RuleSet("t", never)
    with pytest.raises(FxRewriteError, match="expected at least 1"):
        plan.expect("t.never").apply(gm)
    assert all(a is b for a, b in zip(before, (node.meta.get("val") for node in gm.graph.nodes), strict=True))


@pytest.mark.parametrize("graph", ["torch", "aten"])
def test_a_rule_for_inference_in_training(graph):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    it = made(lambda x: torch.tanh(x), lambda x: torch.sin(x.detach()), gradients=False)
    for rewrites in (0, 1):
        backend = RuleSet("s", it).backend("eager", graph=graph)
        torch._dynamo.reset()
        with torch.set_grad_enabled(rewrites == 0):
            torch.compile(model, backend=backend)(X)
        assert sum(report.rewrites for report in backend.reports) == rewrites


def test_a_rule_for_inference_in_an_exported_program():
    """Whose values never say that they require gradients, whether it will be trained or not."""
    it = made(lambda x: torch.tanh(x), lambda x: torch.sin(x.detach()), gradients=False)
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), (X,)).module()
    assert RuleSet("s", it).apply(program).rewrites == 1


def test_a_rule_for_inference_in_a_module_of_a_module_that_trains():
    inner = fx.symbolic_trace(lambda x: torch.tanh(x)).eval()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), inner).train()
    it = made(lambda x: torch.tanh(x), lambda x: torch.sin(x.detach()), gradients=False)
    graph = fx.Graph()
    graph.output(graph.call_module("1", (graph.call_module("0", (graph.placeholder("x"),)),)))
    inner.eval()
    gm = fx.GraphModule(model, graph)
    (refusal,) = RuleSet("s", it).apply(gm).refusals
    assert "the module is in training mode and self.0.weight requires gradients" in refusal.reason
    gm.eval()
    assert RuleSet("s", it).apply(gm).rewrites == 1


def test_values_after_a_replacement_have_its_strides():
    """The second rule sees what the first one left: a reshape that was a view is none any more."""
    swap = made(lambda a, b: torch.matmul(a, b).transpose(0, 1), lambda a, b: torch.matmul(b.T, a.T))

    @rule("t.view")
    def reshaped(x, shape: Literal):
        return torch.reshape(x, shape)

    reshaped.replacement(lambda x, shape: x.view(shape))
    for model in (
        lambda x: torch.reshape(_turned(x).exp().transpose(0, 1), [16]),
        lambda x: checkpoint(lambda x: _turned(x).exp(), x, use_reentrant=False).transpose(0, 1).reshape([16]),
        lambda x: checkpoint(lambda x: x.transpose(0, 1).reshape([16]), _turned(x), use_reentrant=False),
    ):
        gm = make_fx(model, tracing_mode="fake", pre_dispatch=True)(X)
        plan = RuleSet("a", swap) >> RuleSet("b", reshaped)
        report = plan.apply(gm)
        assert report["test.it"].rewrites == 1
        assert len(report.refusals) == 1
        torch.testing.assert_close(gm(X), model(X))


# Autograd raises in the backward pass if what an operator saved was written to.
SAVES = {
    "a result": (lambda x: torch.sinh(x) / torch.cosh(x), torch.tanh, lambda y, x: y.mul_(2), "saves its result"),
    "a view of a result": (
        lambda x: torch.sinh(x) / torch.cosh(x),
        torch.tanh,
        lambda y, x: y.view(-1).mul_(2),
        "saves its result",
    ),
    "an operand": (lambda x: x - 1, lambda x: x * x / x - 1, lambda y, x: (y.exp(), x.add_(1))[0], r"saves %\w+ for"),
    "nothing new": (lambda x: x * torch.sigmoid(x), F.silu, lambda y, x: y.mul_(2), None),
    "no write": (lambda x: torch.sinh(x) / torch.cosh(x), torch.tanh, lambda y, x: y.mul(2).add_(1), None),
}


@pytest.mark.parametrize("name", SAVES)
def test_what_autograd_saves_is_not_written_later(name):
    pattern, new, then, message = SAVES[name]
    it = made(pattern, lambda x: new(x), numerics="approximate", domain="moderate", terminates=False)
    backend = RuleSet("s", it).once().backend("eager")

    def model(x):
        h = x * 3
        return then(pattern(h), h)

    grads = []
    for run in (model, torch.compile(model, backend=backend)):
        x = X.clone().requires_grad_()
        run(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
    (report,) = backend.reports
    assert report.rewrites == (message is None)
    assert all(re.search(message, refusal.reason) for refusal in report.refusals)


# shapes="preserves" does not look into tuples.
def test_a_tuple_of_other_shapes():
    check(lambda x: torch.split(x, 2), made(lambda x: torch.split(x, 2), lambda x: torch.split(x, 3)))


# A replacement that writes to what it captured, where others read it.
def test_a_replacement_that_writes_to_a_capture_with_other_users():
    def model(x):
        y = torch.sin(x)
        return torch.relu(y), y * 2

    check(model, made(lambda x: torch.relu(x), lambda x: torch.relu_(x)))


# A pattern function without a Python signature is a bare ValueError, not a RuleDefinitionError.
def test_a_builtin_as_pattern_function():
    with pytest.raises(RuleDefinitionError, match="write a Python function that calls it"):
        trace(torch.relu)


# transpose(x, -1, -2) and transpose(x, -2, -1) are one operation; matched as two.
def test_the_two_dims_of_a_transpose_trade_places():
    it = made(lambda x: torch.relu(x.transpose(-2, -1)), lambda x: torch.relu(x).transpose(-2, -1))
    assert it.explain(fx.symbolic_trace(lambda x: torch.relu(x.transpose(-1, -2)))).num_matches == 1


# A guard that refuses (or raises) escapes without rule, node and source, also from a set that is not atomic.
def test_a_predicate_that_refuses_is_a_refusal_of_its_rule():
    from fxrewrite import refuse, where

    guard = where.predicate("x", text="guard")(lambda x: refuse("not this one"))
    it = rule("bug.it", where=[guard])(lambda x: torch.relu(x))
    it.replacement(lambda x: x.clamp(min=0))
    gm = make_fx(lambda x: torch.relu(x), tracing_mode="fake")(X)
    report = RuleSet("s", it).apply(gm)
    assert [str(r) for r in report.refusals] == ["bug.it: not this one at %relu"]


NEG = rule("bug.neg")(lambda x: torch.neg(torch.neg(x)))
NEG.replacement(lambda x: x)
DROP_NEG = RuleSet("neg", NEG)


def under_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = torch.mm(x, x)
    return h.to(torch.float32) + 1, torch.mm(h, h)


def test_autocast_is_kept_around_a_graph_that_is_not_normalized():
    found = torch.compile(under_autocast, backend=DROP_NEG.backend("eager"))(X)
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    "write",
    [
        lambda h: F.celu(h, inplace=True),
        lambda h: F.rrelu(h, inplace=True),
        lambda h: F.threshold(h, 0.5, 9.0, True),
        lambda h: h.sum_to_size(4, 4).add_(4),
        lambda h: torch.einsum("ij->ij", h).add_(4),
        lambda h: F.batch_norm(torch.ones(3, 4), h[0], h[1].exp(), training=True),
        lambda h: F.embedding(torch.tensor([1]), h, max_norm=0.1),
    ],
    ids=["celu", "rrelu", "threshold", "sum_to_size", "einsum", "batch_norm", "embedding"],
)
def test_writes_that_an_argument_switches_on(write):
    def model(x):
        h = x + 0.0
        y = torch.neg(torch.neg(h))
        write(h)
        return y + 0

    check(model, NEG, "fx")


def test_a_tensor_is_no_number_and_no_tuple():
    for replacement in (lambda x: torch.max(x, 0), lambda match, x: match.call(torch.ops.aten.sym_size.int, x, 0)):
        gm = make_fx(lambda x: torch.relu(x) + 1, tracing_mode="fake")(X)
        report = RuleSet("s", made(lambda x: torch.relu(x), replacement)).apply(gm)
        assert (report.rewrites, report.refusals[0].kind) == (0, "value")


def test_the_output_that_a_rule_made_is_the_one_that_is_copied():
    def model(x):
        a = torch.exp(x)
        return a, torch.neg(torch.neg(a))

    x = torch.zeros(2, requires_grad=True)
    a, b = torch.compile(model, backend=DROP_NEG.once().backend("aot_eager"))(x)
    with torch.no_grad():
        b.add_(1)
    a.sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_fields_of_named_tuples_in_replacements():
    gm = make_fx(lambda x: torch.relu(x), tracing_mode="fake")(X)
    it = made(lambda x: torch.relu(x), lambda x: torch.sort(x, dim=0).values.clamp(min=0), numerics="approximate")
    assert RuleSet("s", it).apply(gm).rewrites == 1
    wrong = RuleSet("s", made(lambda x: torch.relu(x), lambda x: x.foo))
    gm = make_fx(torch.relu, tracing_mode="fake")(X)
    (refusal,) = wrong.apply(gm).refusals
    assert "a tensor has no attribute 'foo'" in refusal.reason


class Halves(torch.nn.Module):
    """A buffer that a no_grad region updates, as moving averages do; torch.export puts the region into a body."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.arange(4.0) - 1.5)

    def forward(self, x):
        gate = torch.sigmoid(self.ema)
        with torch.no_grad():
            self.ema.mul_(0.5)
        return x + self.ema * gate


def test_writes_in_the_body_of_a_higher_order_operator():
    program = torch.export.export(Halves(), (torch.ones(4),))
    expected = program.module()(torch.ones(4))
    found = RuleSet("s", silu()).once().apply_export(torch.export.export(Halves(), (torch.ones(4),))).module()
    assert torch.allclose(found(torch.ones(4)), expected)


def test_writes_in_a_checkpointed_body():
    def model(b, x):
        b = b * 1
        gate = torch.sigmoid(b)

        def body(t):
            t.add_(1)
            return t.sum()

        return (b * gate) * checkpoint(body, b, use_reentrant=False) + x

    b, x = torch.randn(3), torch.randn(3)
    found = torch.compile(model, backend=RuleSet("s", silu()).once().backend("eager"))(b, x)
    assert torch.allclose(found, model(b, x))


@pytest.mark.parametrize("name", ["ipow", "imod", "ifloordiv", "iadd", "itruediv"])
def test_operators_that_write(name):
    def model(x):
        h = x + 3.0
        y = torch.neg(torch.neg(h))
        getattr(operator, name)(h, 2.0)
        return y + 0

    check(model, NEG, "fx")


def test_a_bias_that_is_not_read_may_hold_anything():
    def attention(q, k, v):
        bias = torch.full((3, 5, 6), float("nan"))  # stands for torch.empty
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0, alpha=0.5)
        return torch.bmm(scores.softmax(-1), v)

    inputs = torch.randn(3, 5, 4), torch.randn(3, 6, 4), torch.randn(3, 6, 4)
    backend = ATTENTION.once().backend("eager")
    torch.testing.assert_close(torch.compile(attention, backend=backend)(*inputs), attention(*inputs))
    assert backend.reports[0].rewrites


def test_general_rules_read_dynamo_graphs_as_they_are():
    def model(x, w):
        h = x.to(torch.float32).expand(2, 4, 8)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        return 0.5 * h * (1 + torch.erf(h / math.sqrt(2.0)))

    x, w = torch.randn(2, 4, 8), torch.rand(8)
    plan = NORMAL_FORMS.fixpoint() >> NORMS.once() >> ACTIVATIONS.once()
    backend = plan.backend("eager")
    torch.testing.assert_close(torch.compile(model, backend=backend)(x, w), model(x, w))
    assert backend.reports[0].rewrites >= 4


def test_a_cast_to_another_memory_format_is_no_no_op():
    def model(x):
        return x.to(memory_format=torch.channels_last).as_strided((4,), (1,))

    gm = make_fx(model, tracing_mode="fake", pre_dispatch=True)(torch.randn(1, 2, 3, 4))
    assert NORMAL_FORMS.apply(gm)["normal_forms.drop_to"].rewrites == 0


def test_a_constraint_reads_none_that_anything_matched():
    """Of a capture of anything None is a value: a clamp without a lower bound is none at 0."""

    @rule("t.split_clamp", where=["lo == 0", "hi > 0"])
    def clamped(x, lo: Any, hi: Literal):
        return torch.clamp(x, lo, hi)

    clamped.replacement(lambda x, hi: torch.clamp_max(torch.clamp_min(x, 0), hi))
    check(lambda x: torch.clamp(x, max=1), clamped)
    gm = make_fx(lambda x: torch.clamp(x, 0, 1), tracing_mode="fake")(X)
    assert RuleSet("s", clamped).apply(gm).rewrites == 1
    verdict = clamped.verify(samples=16)
    assert verdict.ok, verdict


def test_a_method_whose_schema_has_another_argument_first_is_read_as_it_is_called() -> None:
    select = made(lambda c, x, y: torch.where(c, x, y), lambda c, x, y: (c & x) | (~c & y))
    gm = fx.symbolic_trace(lambda a, b, c: a.where(b, c))
    bits = torch.arange(8)
    inputs = bits % 2 > 0, bits // 2 % 2 > 0, bits // 4 > 0
    expected = gm(*inputs)
    assert RuleSet("s", select).apply(gm).rewrites == 1
    assert torch.equal(gm(*inputs), expected)
