"""A plan as a torch.compile backend: on both graphs, through every inner backend, with gradients, sizes and breaks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fxrewrite.backends import RewritingBackend, capture, find_backend, graph_break_hint
from fxrewrite.errors import FxRewriteError, refuse
from fxrewrite.graph import graph_text
from fxrewrite.plan import RuleSet
from fxrewrite.report import Report
from fxrewrite.rule import rule
from tests.backends.plans import SILU, plan, scale
from tests.versions import TORCH


class Kept:
    """An inner backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.inputs: list[list[Any]] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.inputs.append(list(example_inputs))
        self.options.append(options)
        return gm.forward

    def text(self) -> str:
        return "\n".join(graph_text(gm) for gm in self.graphs)


def targets(gm: fx.GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes if n.op.startswith("call")]


def gated(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x) + 0


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(torch.sigmoid(y) * y)


@pytest.mark.parametrize("graph", ["torch", "aten"])
def test_the_inner_backend_gets_the_rewritten_graph_and_dynamos_inputs(graph: Any) -> None:
    inner = Kept()
    backend = RewritingBackend(plan(SILU).apply, inner, graph=graph)
    x = torch.randn(2, 3)
    torch.testing.assert_close(torch.compile(Gated(), backend=backend)(x).shape, (2, 3))
    names = targets(inner.graphs[0])
    assert ("silu.default" if graph == "aten" else "silu") in names
    assert not any("sigmoid" in name for name in names)
    assert len(inner.inputs[0]) == len(inner.graphs[0].graph.find_nodes(op="placeholder"))
    assert [report.rewrites for report in backend.reports] == [1]


@pytest.mark.parametrize("graph", ["torch", "aten"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["saved", "recomputed"])
def test_gradients_are_those_of_the_model(graph: Any, inner: str, *, is_recomputed: bool) -> None:
    """A checkpoint around the compiled call counts what is saved: compiling, in the first call, must save nothing."""
    model = Gated().double()
    x, y = (torch.arange(6.0, dtype=torch.float64).reshape(2, 3).requires_grad_() for _ in range(2))
    model(y).sum().backward()
    expected = [y.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    backend = RewritingBackend(plan().apply, inner, graph=graph)
    compiled = torch.compile(model, backend=backend)
    (checkpoint(compiled, x, use_reentrant=False) if is_recomputed else compiled(x)).sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in model.parameters())], expected)
    assert backend.reports[0].rewrites == 1


@pytest.mark.parametrize("graph", ["torch", "aten"])
def test_sizes_stay_dynamic_and_no_guard_is_added(graph: Any) -> None:
    backend = RewritingBackend(plan(SILU).apply, "aot_eager", graph=graph)
    compiled = torch.compile(lambda x: x * torch.sigmoid(x) + x.shape[0], backend=backend)
    for length in (4, 7, 9):
        x = torch.randn(length, 3)
        torch._dynamo.mark_dynamic(x, 0)  # an error if the plan specializes the size
        torch.testing.assert_close(compiled(x), torch.nn.functional.silu(x) + length)
    assert [report.rewrites for report in backend.reports] == [1]


def test_every_graph_of_a_broken_function_is_rewritten() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * torch.sigmoid(x)
        torch._dynamo.graph_break()
        return y * torch.sigmoid(y)

    seen: list[Report] = []
    backend = RewritingBackend(plan(SILU).apply, "eager", on_report=seen.append)
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(broken, backend=backend)(x), broken(x))
    assert [report.rewrites for report in seen] == [1, 1]
    assert backend.reports == seen


def test_mode_and_options_of_torch_compile_reach_the_inner_backend() -> None:
    inner = Kept()
    backend = RewritingBackend(plan().apply, inner)
    torch.compile(gated, backend=backend, options={"level": 3})(torch.randn(3))
    torch._dynamo.reset()
    torch.compile(gated, backend=backend, mode="fast")(torch.randn(3))
    torch._dynamo.reset()
    torch.compile(gated, backend=backend)(torch.randn(3))
    assert inner.options == [{"options": {"level": 3}}, {"mode": "fast"}, {}]


def test_inductor_checks_the_options_that_it_gets_through_us() -> None:
    backend = RewritingBackend(plan().apply, "inductor")
    with pytest.raises(BackendCompilerFailed, match="Unexpected optimization option no_such_option"):
        torch.compile(gated, backend=backend, options={"no_such_option": True})(torch.randn(3))


@pytest.mark.parametrize("graph", ["torch", "aten"])
def test_the_sentence_of_a_rule_comes_out_of_the_first_call(graph: Any) -> None:
    never = rule("act.never")(lambda x: x * torch.sigmoid(x))
    never.replacement(lambda x: refuse("6 heads do not divide over 4 ranks", hint="use 2 ranks"))
    backend = RewritingBackend(RuleSet("s", never, atomic=True).apply, "eager", graph=graph)
    with pytest.raises(BackendCompilerFailed) as failed:
        torch.compile(gated, backend=backend)(torch.randn(3))
    assert "act.never: 6 heads do not divide over 4 ranks at %mul" in str(failed.value)
    assert "test_dynamo.py:" in str(failed.value)
    assert "use 2 ranks" in str(failed.value)
    assert backend.reports == []


def test_an_expectation_that_does_not_hold_comes_out_of_the_first_call() -> None:
    backend = RewritingBackend(plan(SILU).expect("act.silu").apply, "eager")
    with pytest.raises(BackendCompilerFailed, match=r"act\.silu: expected at least 1 rewrites, made 0"):
        torch.compile(torch.relu, backend=backend)(torch.randn(3))


def test_the_context_is_handed_to_the_replacement() -> None:
    it = rule("tanh.scale", numerics="approximate")(lambda x: torch.tanh(x))
    it.replacement(lambda match, x: x * match.context)
    backend = RewritingBackend(plan(it).apply, "eager", context=3.0)
    assert torch.compile(torch.tanh, backend=backend)(torch.ones(1)).item() == 3.0


def test_two_backends_on_one_function_do_not_share_what_was_compiled() -> None:
    two, three = (RewritingBackend(plan(scale(factor)).apply, "eager") for factor in (2.0, 3.0))
    x = torch.ones(1)
    assert [torch.compile(torch.tanh, backend=b)(x).item() for b in (two, three, two)] == [2.0, 3.0, 2.0]
    assert len(two.reports) == len(three.reports) == 1


def test_unknown_graphs_and_backends_are_refused_at_once() -> None:
    with pytest.raises(
        FxRewriteError, match='graph=\'fx\' is not a graph that a backend rewrites; pass "torch" or "aten"'
    ):
        RewritingBackend(plan().apply, "eager", graph="fx")  # pyright: ignore[reportArgumentType]
    said = r"inner backend 'inductr' does not exist; did you mean inductor\?; torch knows .*aot_eager"
    with pytest.raises(FxRewriteError, match=said):
        RewritingBackend(plan().apply, "inductr")


def test_a_backend_of_a_package_that_is_missing_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(name: str) -> Any:
        raise InvalidBackend(name)

    monkeypatch.setattr("fxrewrite.backends.dynamo.lookup_backend", lookup)
    with pytest.raises(FxRewriteError, match=r"'openvino' does not exist; .*; pip install openvino, which brings it"):
        find_backend("openvino")


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def in_a_region(x: torch.Tensor) -> torch.Tensor:
    return region(x) + region(x + 1)


def in_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(gated, x, use_reentrant=False) * 2


def in_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 0, lambda y: y * torch.sigmoid(y), (x,))


@pytest.mark.parametrize("function", [in_a_region, in_a_checkpoint, in_a_branch])
def test_bodies_of_higher_order_operators_are_rewritten_and_stay_differentiable(function: Callable[..., Any]) -> None:
    inner = Kept()

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        inner(gm, example_inputs)
        return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs)

    for start in (1.0, -9.0):
        x, y = (torch.linspace(start, start + 2, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
        got, expected = torch.compile(function, backend=RewritingBackend(plan().apply, compiler))(x), function(y)
        torch.testing.assert_close(got, expected)
        got.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    bodies = [m for gm in inner.graphs for m in gm.modules() if isinstance(m, fx.GraphModule) and m is not gm]
    assert bodies
    assert not any("sigmoid" in name for body in bodies for name in targets(body))


@pytest.mark.parametrize("graph", ["torch", "aten"])
def test_what_the_caller_may_write_to_is_no_input(graph: Any) -> None:
    """x + 0 is a new tensor; without it x itself would be returned, and returned twice."""
    x = torch.ones(3)
    inner = Kept()
    backend = RewritingBackend(plan().apply, inner, graph=graph)
    out, view, other = torch.compile(lambda x: (x + 0, (x + 0).view(3, 1), x.view(1, 3)), backend=backend)(x)
    out.zero_()
    view.zero_()
    assert x.tolist() == [1, 1, 1]
    other.zero_()
    assert x.tolist() == [0, 0, 0]
    assert [name for name in targets(inner.graphs[0]) if "add" in name] == []


def test_a_plan_that_changes_inputs_or_outputs_is_refused() -> None:
    def drop_output(gm: fx.GraphModule, context: object) -> None:
        end = gm.graph.output_node()
        end.args = (end.args[0][:1],)

    def add_input(gm: fx.GraphModule, context: object) -> None:
        with gm.graph.inserting_before():
            gm.graph.placeholder("more")

    for apply, text in (
        (drop_output, "the plan changed the number of the graph's outputs, which its caller counts: 2 before, 1 after"),
        (add_input, "the plan changed the graph's inputs, which its caller passes: %l_x_ before, %more, %l_x_ after"),
    ):
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed) as failed:
            torch.compile(lambda x: (x + 1, x + 2), backend=RewritingBackend(apply, "eager"))(torch.ones(1))
        assert text in str(failed.value)


def with_grad(x: torch.Tensor) -> torch.Tensor:
    return gated(x) + torch.func.grad(lambda t: (t * t * t).sum())(x)


def with_vmap(x: torch.Tensor) -> torch.Tensor:
    return gated(x) + torch.vmap(lambda row: row * row.sum())(x)


def with_hook(x: torch.Tensor) -> torch.Tensor:
    y = gated(x)
    y.register_hook(lambda grad: grad * 2)
    return y * x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch 2.11, of hooks
@pytest.mark.parametrize("function", [with_grad, with_vmap, with_hook], ids=lambda f: f.__name__)
def test_transforms_and_hooks_stay_and_what_is_around_them_is_rewritten(function: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    backend = RewritingBackend(plan(SILU).apply, "eager")
    x, y = (torch.tensor([[0.5, -1.0], [2.0, 3.0]], requires_grad=True) for _ in range(2))
    found, expected = torch.compile(function, backend=backend)(x), function(y)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert sum(report.rewrites for report in backend.reports) == 1


def test_a_transform_that_has_no_normal_form_is_refused_with_the_graph_that_takes_it() -> None:
    torch._dynamo.reset()
    with pytest.raises(
        BackendCompilerFailed, match=r'a transform of torch.func .*; or pass graph="torch", where rules'
    ):
        torch.compile(with_grad, backend=RewritingBackend(plan(SILU).apply, "eager", graph="aten"))(torch.rand(2, 2))


def test_constants_found_by_tracing_are_no_part_of_aotautograds_guards() -> None:
    backend = RewritingBackend(plan(SILU).apply, "aot_eager", graph="aten")
    compiled = torch.compile(lambda x: x * torch.sigmoid(x) * torch.tensor([1.0, 2.0]), backend=backend)
    x = torch.randn(2)
    torch.testing.assert_close(compiled(x), torch.nn.functional.silu(x) * torch.tensor([1.0, 2.0]))


def test_the_normal_form_keeps_what_aotautograd_reads_of_a_dynamo_graph() -> None:
    """Fails when torch renames what it forwards, by private names, from Dynamo to AOTAutograd."""
    from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo

    found: dict[str, Any] = {}

    for graph in ("torch", "aten"):

        def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], graph: str = graph) -> Callable[..., Any]:
            found[graph] = _try_get_metadata_from_dynamo(gm, [], len(example_inputs), [])
            assert gm.shape_env is None
            return gm.forward

        torch._dynamo.reset()
        torch.compile(Gated(), backend=RewritingBackend(plan().apply, inner, graph=graph))(torch.randn(2, 3))  # pyright: ignore[reportArgumentType]
    sources, static = found["torch"]
    assert len(sources) == 5
    assert len(static) == 4  # the parameters, which CUDA graphs need not copy
    assert found["aten"] == found["torch"]


def test_precompiled_packages_are_refused_because_they_do_not_know_the_backend() -> None:
    """Fails when torch._dynamo.config.caching_precompile is gone."""
    backend = RewritingBackend(plan().apply, "eager")
    with (
        torch._dynamo.config.patch(caching_precompile=True),
        pytest.raises(BackendCompilerFailed, match="caching_precompile keeps compiled code under nothing but"),
    ):
        torch.compile(gated, backend=backend)(torch.randn(3))


def test_recompilations_append_reports() -> None:
    counters.clear()
    backend = RewritingBackend(plan(SILU).apply, "eager")
    compiled = torch.compile(gated, backend=backend, dynamic=False)
    compiled(torch.randn(2))
    compiled(torch.randn(3))
    assert [report.rewrites for report in backend.reports] == [1, 1]


LOGGER = logging.getLogger(__name__)


class Logs(torch.nn.Module):
    """Warns in its forward, as models do about a setting."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LOGGER.warning("a setting is missing")
        return x.relu()


class Branches(torch.nn.Module):
    """Branches on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.sum() > 0 else x


def test_a_logger_breaks_the_graph_and_the_hint_mends_it() -> None:
    with pytest.raises(FxRewriteError, match=r"does not compile to one graph: .*ignore_logging_functions.add"):
        capture(Logs(), {"x": torch.ones(2)})
    with torch._dynamo.config.patch(ignore_logging_functions={logging.Logger.warning}):
        assert targets(capture(Logs(), {"x": torch.ones(2)}))


def test_advice_on_recorded_outputs_is_given_where_they_break_the_graph_alone() -> None:
    """Every model of transformers passes through this file, whatever breaks its graph."""
    passed_through = 'File "transformers/utils/output_capturing.py", line 361, in wrapper'
    assert "call the model once" not in graph_break_hint(f"Unsupported method call at layer.py:90\n{passed_through}")
    assert "call the model once" in graph_break_hint("Unsupported context manager at output_capturing.py:360")


def test_a_recurrent_module_breaks_the_graph_and_the_hint_mends_it() -> None:
    model, x = torch.nn.GRU(3, 3), {"input": torch.ones(4, 3)}
    with pytest.raises(FxRewriteError, match=r"does not compile to one graph: .*allow_rnn = True"):
        capture(model, x)
    torch.compile(model, backend="eager")(**x)  # breaks the graph, and Dynamo remembers that it found none
    # torch 2.15 does not remember it; 2.11 does, and says nothing
    remembered = {(2, 11): "there is no graph", (2, 15): "allow_rnn = True"}.get(TORCH, r"torch\._dynamo\.reset\(\)")
    with pytest.raises(FxRewriteError, match=remembered):
        capture(model, x)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        assert capture(model, x).graph.find_nodes(op="call_function", target=torch.gru)


def test_a_branch_on_a_value_has_a_hint() -> None:
    with pytest.raises(FxRewriteError, match=r"does not compile to one graph: .*torch\.where"):
        capture(Branches(), {"x": torch.ones(2)})


def test_an_operator_that_breaks_the_graph_is_named_with_its_line() -> None:
    message = r"to one graph: Data dependent operator aten\.equal\.default at test_dynamo\.py:\d+; "
    with pytest.raises(FxRewriteError, match=message):
        capture(lambda x: torch.corrcoef(x), {"x": torch.ones(2, 3)})


def test_a_capture_does_not_count_what_was_compiled_before() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1, automatic_dynamic_shapes=False):
        torch.compile(model, backend="eager")(torch.ones(2))
        for size in (3, 4, 5):
            (placeholder,) = capture(model, {"x": torch.ones(size)}).graph.find_nodes(op="placeholder")
            assert placeholder.meta["example_value"].shape == (size,)


def test_a_model_without_an_operator_has_no_graph() -> None:
    with pytest.raises(FxRewriteError, match="calls no operator on tensors"):
        capture(lambda x: len(x.shape), {"x": torch.ones(2)})
