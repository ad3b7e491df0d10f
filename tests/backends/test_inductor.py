"""The pass and its scope, without compiling: what is installed where, what refuses, what is decomposed."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch._inductor import compile_fx, config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomGraphPassType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxrewrite.backends import GraphPass, installed
from fxrewrite.backends.decompose import decompose, inductor_table
from fxrewrite.backends.inductor import SLOTS
from fxrewrite.errors import FxRewriteError, InvariantError, MatchExpectationError
from fxrewrite.pattern import Literal
from fxrewrite.plan import RuleSet
from fxrewrite.rule import rule
from tests.backends.plans import plan
from tests.versions import TORCH, passes_in

aten = torch.ops.aten


def nothing(gm: fx.GraphModule, context: object) -> None:
    """Rewrites nothing."""


@pytest.mark.parametrize("slot", SLOTS)
def test_inductor_has_the_slot_and_takes_a_pass_or_several(slot: Any) -> None:
    """Fails when torch renames a slot or changes what it holds."""
    name = SLOTS[slot]
    assert getattr(config, name) is None
    if TORCH >= (2, 12) or slot != "pre_grad":  # torch 2.11: any callable there, the same to us
        assert config.get_type(name) == CustomGraphPassType
    assert name in config._save_config_ignore  # it is in no cache key as a value, only by its uuid
    with installed(slot, nothing, "a") as ours:
        assert getattr(config, name) is ours
        assert isinstance(ours, CustomGraphPass)
    assert getattr(config, name) is None


def test_scopes_nest_and_end_with_what_was_there_also_on_an_error() -> None:
    def theirs(graph: fx.Graph) -> None:
        """Somebody else's pass."""

    with config.patch(joint_custom_pre_pass=theirs), pytest.raises(RuntimeError, match="inside"):  # noqa: PT012
        with installed("joint", nothing, "a") as a:
            assert passes_in(config.joint_custom_pre_pass) == (theirs, a)
            with installed("joint", nothing, "b") as b, installed("post_grad_pre", nothing, "c") as c:
                assert passes_in(config.joint_custom_pre_pass) == (theirs, a, b)
                assert config.post_grad_custom_pre_pass is c
            assert passes_in(config.joint_custom_pre_pass) == (theirs, a)
            assert config.post_grad_custom_pre_pass is None
            raise RuntimeError("inside")
        assert config.joint_custom_pre_pass is theirs
    assert config.joint_custom_pre_pass is None
    with config.patch(joint_custom_pre_pass=[theirs]), installed("joint", nothing, "a") as a:
        assert passes_in(config.joint_custom_pre_pass) == (theirs, a)


def test_a_scope_belongs_to_its_thread() -> None:
    """Fails when inductor's configuration is no longer one per thread, as our documentation says."""
    seen: list[Any] = []
    with installed("joint", nothing, "a"):
        thread = threading.Thread(target=lambda: seen.append(config.joint_custom_pre_pass))
        thread.start()
        thread.join()
    assert (seen == [None]) == (TORCH >= (2, 12))  # torch 2.11 has one configuration for all threads


def test_the_digest_is_the_uuid_and_none_stays_none() -> None:
    assert GraphPass("joint", nothing, "a").uuid() == "a"
    assert GraphPass("joint", nothing, None).uuid() is None
    assert GraphPass("joint", nothing, "").uuid() is None


def test_the_uuid_covers_the_context() -> None:
    uuids = [GraphPass("joint", nothing, "a", context).uuid() for context in (None, 2, 3, 3, object())]
    assert uuids[0] == "a"
    assert uuids[2] == uuids[3]
    assert len(set(uuids)) == 4
    assert uuids[4] is None  # it can only be told by its address, so nothing is cached
    assert GraphPass("joint", nothing, None, 2).uuid() is None


def test_inductor_copies_its_configuration_but_not_the_pass() -> None:
    with installed("joint", nothing, "a") as ours:
        assert config.get_config_copy()["joint_custom_pre_pass"] is ours
    assert copy.deepcopy(ours) is ours


def test_an_unknown_slot_is_refused() -> None:
    with (
        pytest.raises(FxRewriteError, match="inductor has no slot 'pregrad'; it has pre_grad, joint, joint_post, post"),
        installed("pregrad", nothing, "a"),  # pyright: ignore[reportArgumentType]
    ):
        pass


def test_compiling_graphs_in_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when torch renames the mode in which it drops passes."""
    monkeypatch.setattr(compile_fx, "fx_compile_mode", compile_fx.FxCompileMode.SUBPROCESS)
    with (
        pytest.raises(
            FxRewriteError, match="post_grad_pre: inductor compiles graphs in another process and would drop"
        ),
        installed("post_grad_pre", nothing, "a"),
    ):
        pass
    with installed("joint", nothing, "a") as ours:
        assert config.joint_custom_pre_pass is ours


def test_a_graph_without_a_module_is_refused() -> None:
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    with pytest.raises(InvariantError, match="inductor passed a graph without a module of its own"):
        GraphPass("joint", nothing, "a")(graph)


def symbolic(function: Any, *shapes: tuple[int, ...]) -> fx.GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return make_fx(function, tracing_mode="real")(*(mode.from_tensor(torch.empty(shape)) for shape in shapes))


def names(gm: fx.GraphModule) -> list[str]:
    return [n.target._schema.name.removeprefix("aten::") for n in gm.graph.nodes if n.op == "call_function"]


def rewritten(pattern: Any, replacement: Any, gm: fx.GraphModule, slot: Any = "post_grad_pre") -> fx.GraphModule:
    it = rule("test.rule", numerics="reassociates")(pattern)
    it.replacement(replacement)
    ours = GraphPass(slot, RuleSet("s", it).once().apply, "a")
    ours(gm.graph)
    gm.graph.lint()
    assert [report.rewrites for report in ours.reports] == [1]
    return gm


def test_behind_autograd_a_rule_may_say_what_inductor_decomposes() -> None:
    """silu has a decomposition in inductor's table, linear is composite by definition."""
    gm = rewritten(lambda x: torch.tanh(x), lambda x: F.silu(x), symbolic(torch.tanh, (3, 4)))
    assert "silu" not in names(gm)
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    torch.testing.assert_close(gm(x), F.silu(x))
    gm = symbolic(lambda x, w, b: x.mm(w.t()).add(b), (3, 4), (5, 4), (5,))
    gm = rewritten(lambda x, w, b: x.mm(w.t()).add(b), lambda x, w, b: F.linear(x, w, b), gm)
    assert "linear" not in names(gm)
    torch.testing.assert_close(gm(x, w, b), F.linear(x, w, b))
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    assert {node.meta["fxrewrite"] for node in gm.graph.nodes if node.op == "call_function"} == {("test.rule",)}


def captured_eps(x, w, b, eps: Literal):
    return torch.sin(F.layer_norm(x, ..., w, b, eps))


def captured_eps_of_rms_norm(x, w, eps: Literal):
    return torch.sin(F.rms_norm(x, ..., w, eps))


def captured_dtype(x, dt: Literal):
    return torch.exp(x.to(dt))


BEHIND: dict[str, tuple[Any, Any, list[tuple[int, ...]]]] = {
    "softmax": (lambda x: torch.softmax(x, -1) * 2, lambda x: torch.softmax(x, -1), [(2, 3, 4)]),
    "silu": (lambda x: F.silu(x) + 1, lambda x: F.silu(x), [(3, 4)]),
    "linear": (lambda x, w, b: torch.relu(F.linear(x, w, b)), lambda x, w, b: x @ w.t(), [(2, 3, 4), (5, 4), (5,)]),
    "layer_norm": (captured_eps, lambda x, w, b, eps: x * eps, [(3, 4), (4,), (4,)]),
    "rms_norm": (captured_eps_of_rms_norm, lambda x, w, eps: x * eps, [(3, 4), (4,)]),
    "to": (captured_dtype, lambda x, dt: x.to(dt), [(3, 4)]),
    "attention": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5),
        [(2, 3, 5, 4)] * 3,
    ),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.some(2)
def test_a_rule_holds_behind_decompositions(name: str) -> None:
    """vllm 27072 and register_replacement: a pattern of what inductor decomposes is what inductor makes of it."""
    pattern, replacement, shapes = BEHIND[name]
    literals = {"layer_norm": (1e-5,), "rms_norm": (1e-6,), "to": (torch.float16,)}.get(name, ())
    inputs = [torch.rand(shape) for shape in shapes]

    def model(*inputs: torch.Tensor) -> Any:
        if name == "layer_norm":
            return torch.sin(F.layer_norm(inputs[0], (4,), inputs[1], inputs[2], 1e-5))
        if (
            name == "rms_norm"
        ):  # as AOTAutograd leaves it: what C++ makes of it writes to the mean, until it is functional
            return torch.sin(inputs[0] * torch.rsqrt(inputs[0].pow(2).mean([1], True) + 1e-6) * inputs[1])
        return pattern(*inputs, *literals)

    gm = make_fx(torch.func.functionalize(model), decomposition_table=dict(inductor_table()), tracing_mode="fake")(
        *inputs
    )
    it = rule("test.rule", shapes="changes")(pattern)
    it.replacement(replacement)
    plan = RuleSet("s", it).once()
    assert plan.applied(gm)[1].rewrites == 0
    dtypes, ranks = {torch.float32}, {len(shape) for shape in shapes}
    behind = plan.decomposed(inductor_table(), dtypes=dtypes, ranks=ranks)
    new, report = behind.applied(gm)
    assert report.rewrites == 1
    torch.testing.assert_close(new(*inputs), replacement(*inputs, *literals))
    # The form is of one rank: dimension 1 of another rank is not the last one.
    other = [torch.rand(2, *shape) if i == 0 else torch.rand(shape) for i, shape in enumerate(shapes)]
    if name in ("softmax", "silu"):
        gm = make_fx(model, decomposition_table=dict(inductor_table()), tracing_mode="fake")(*other)
        assert behind.applied(gm)[1].rewrites == 0


def test_a_rule_without_a_form_behind_decompositions_says_so() -> None:
    it = rule("test.rule")(lambda x: F.dropout(x, 0.5))
    it.replacement(lambda x: x)
    with pytest.warns(
        UserWarning, match=r"test.rule matches nothing after decompositions: aten::dropout does not occur"
    ):
        RuleSet("s", it).once().decomposed(inductor_table(), ranks=(2,))


def test_what_is_decomposed_keeps_what_a_rewrite_keeps() -> None:
    """The tags of a joint graph too: a node of the backward stays one."""
    kept = {"stack_trace": "here", "custom": {"a": 1}, "autograd_backward": True, "seq_nr": 7, "recompute": 2}
    gm = symbolic(lambda x: aten.silu(x), (3, 4))
    (silu,) = (node for node in gm.graph.nodes if node.target is aten.silu.default)
    silu.meta |= kept
    assert decompose(gm, [silu]) == 1
    for node in (node for node in gm.graph.nodes if node.op == "call_function"):
        assert {name: node.meta.get(name) for name in kept} == kept


def test_before_autograd_nothing_is_decomposed() -> None:
    gm = rewritten(lambda x: torch.tanh(x), lambda x: F.silu(x), symbolic(torch.tanh, (3, 4)), "pre_grad")
    assert names(gm) == ["silu"]


def test_operators_with_several_outputs_are_decomposed() -> None:
    gm = symbolic(lambda x, w: aten.native_group_norm(x, w, None, 2, 4, 3, 2, 1e-5)[::2], (2, 4, 3), (4,))
    nodes = [node for node in gm.graph.nodes if node.target is aten.native_group_norm.default]
    assert decompose(gm, nodes) == len(nodes) == 1
    gm.graph.lint()
    assert "native_group_norm" not in str(gm.graph)
    x, w = torch.randn(2, 4, 3), torch.randn(4)
    torch.testing.assert_close(gm(x, w), aten.native_group_norm(x, w, None, 2, 4, 3, 2, 1e-5)[::2])


def test_decomposing_adds_no_guard_and_keeps_symbols() -> None:
    gm = make_fx(lambda x: aten.silu(x), tracing_mode="symbolic")(torch.empty(3, 4))
    given = next(iter(gm.graph.nodes)).meta["val"]
    env = given.fake_mode.shape_env
    guards = len(env.guards)
    assert decompose(gm, list(gm.graph.nodes)) == 1
    assert len(env.guards) == guards
    result = gm.graph.output_node().all_input_nodes[0].meta["val"]
    assert result.fake_mode is given.fake_mode
    assert [str(n) for n in result.shape] == [str(n) for n in given.shape]
    torch.testing.assert_close(gm(torch.ones(5, 2)), F.silu(torch.ones(5, 2)))


def test_a_plan_that_finds_nothing_leaves_the_graph_alone() -> None:
    gm = symbolic(lambda x: torch.tanh(x) + 1, (3, 4))
    code = gm.code
    GraphPass("joint", plan().apply, "a")(gm.graph)
    assert gm.code == code


def test_a_slot_says_that_each_graph_has_to_meet_an_expectation() -> None:
    gm = symbolic(lambda x: torch.tanh(x) + 1, (3, 4))
    expecting = plan().expect("act.silu")
    with pytest.raises(MatchExpectationError, match="in a slot of inductor the forward pass, the backward"):
        expecting.graph_pass("pre_grad")(gm.graph)
    with pytest.raises(MatchExpectationError) as error:
        expecting.apply(gm)
    assert "inductor" not in str(error.value)
