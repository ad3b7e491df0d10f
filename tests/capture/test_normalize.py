"""Dynamo's graph and its normal form compute the same, bit for bit, and the normal form has lost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fxrewrite import RefusedError
from fxrewrite.capture import normalize
from fxrewrite.graph import nodes_of, source_line
from tests.dynamo import caught


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.proj = nn.Linear(8, 8)
        self.checkpointed = checkpointed
        self.register_buffer("scale", torch.tensor(0.5))

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.proj(x)) * self.scale

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        with torch.no_grad():
            positions = torch.arange(ids.shape[1], device=ids.device).float() / ids.shape[1]
        x = x + positions[None, :, None]
        x = checkpoint(self.layer, x, use_reentrant=False) if self.checkpointed else self.layer(x)
        return F.cross_entropy(self.proj(x).view(-1, 8), targets.reshape(-1))


IDS = torch.arange(12).reshape(2, 6) % 11


def compile_and_keep(
    model: Callable[..., Any], *inputs: torch.Tensor, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule, list[Any]]:
    """Dynamo's graph, its normal form (made inside of the backend, as in use), and the inputs of both."""
    graphs, given = caught(model, *inputs, inside=lambda gm: (gm, normalize(gm)), **options)
    return *graphs, given


def loss_and_grads(gm: fx.GraphModule, inputs: list[Any]) -> list[torch.Tensor]:
    params = [v for v in inputs if isinstance(v, nn.Parameter)]
    (loss, *_) = gm(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, params)]


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mark": True}], ids=["static", "dynamic", "marked"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["keep", "checkpoint"])
def test_loss_and_gradients_are_bitwise_equal(options: dict[str, bool], checkpointed: bool) -> None:
    ids, targets = IDS.clone(), IDS % 8
    if options.get("mark"):
        torch._dynamo.mark_dynamic(ids, 1)
        torch._dynamo.mark_dynamic(targets, 1)
    gm, normal, inputs = compile_and_keep(
        Block(checkpointed=checkpointed), ids, targets, **({"dynamic": True} if options.get("dynamic") else {})
    )
    for a, b in zip(loss_and_grads(gm, inputs), loss_and_grads(normal, inputs), strict=True):
        assert torch.equal(a, b)


def test_one_spelling_is_left() -> None:
    _, normal, _ = compile_and_keep(Block(), IDS, IDS % 8)
    kinds = {node.op for node in normal.graph.nodes}
    assert kinds <= {"placeholder", "call_function", "output"}
    names = {str(node.target) for node in normal.graph.nodes if node.op == "call_function"}
    assert {
        "aten.linear.default",
        "aten.gelu.default",
        "aten.cross_entropy_loss.default",
        "aten.embedding.default",
    } <= names


def test_calling_convention_is_kept() -> None:
    gm, normal, _ = compile_and_keep(Block(), IDS, IDS % 8)
    before, after = gm.graph.find_nodes(op="placeholder"), normal.graph.find_nodes(op="placeholder")
    assert [node.name for node in before] == [node.name for node in after]
    assert all(set(a.meta) <= set(b.meta) for a, b in zip(before, after, strict=True))
    assert normal.meta == {**gm.meta, "fxrewrite_normal": True}


def test_source_lines_and_modules_are_kept() -> None:
    _, normal, _ = compile_and_keep(Block(), IDS, IDS % 8)
    (gelu,) = normal.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
    assert source_line(gelu).startswith("test_normalize.py:")
    (embedding,) = normal.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert any("embed" in path for path, _ in embedding.meta["nn_module_stack"].values())


def test_checkpoint_is_inlined_and_tagged() -> None:
    _, normal, _ = compile_and_keep(Block(checkpointed=True), IDS, IDS % 8)
    tagged = [node for node in normal.graph.nodes if "recompute" in node.meta]
    assert {node.meta["recompute"] for node in tagged} == {CheckpointPolicy.PREFER_RECOMPUTE}
    assert len({node.meta["ac_graph_id"] for node in tagged}) == 1
    assert any(node.target is torch.ops.aten.gelu.default for node in tagged)
    assert not any(node.target is torch.ops.aten.embedding.default for node in tagged)


def test_the_graph_that_was_given_stays_as_it_is() -> None:
    """Also the bodies of its checkpoints, in every call of which the normal nodes have tags of their own."""

    def state(gm: fx.GraphModule) -> list[Any]:
        return [(node, node.op, node.target, node.args, node.kwargs, set(node.meta)) for node in nodes_of(gm)]

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        before = state(gm)
        tagged = [{n.meta["ac_graph_id"] for n in normalize(gm).graph.nodes if "ac_graph_id" in n.meta} for _ in (1, 2)]
        assert [len(regions) for regions in tagged] == [1, 1]
        assert tagged[0] != tagged[1]
        assert state(gm) == before
        return gm

    torch.compile(Block(checkpointed=True), backend=backend, fullgraph=True)(IDS, IDS % 8)


def test_autograd_modes_are_kept() -> None:
    _, normal, _ = compile_and_keep(Block(), IDS, IDS % 8)
    modes = [node.args[0] for node in normal.graph.nodes if node.target is torch._C._set_grad_enabled]
    assert modes == [False, True]


def test_under_no_grad_and_eval() -> None:
    model = Block().eval()
    with torch.no_grad():
        gm, normal, inputs = compile_and_keep(model, IDS, IDS % 8)
        assert torch.equal(gm(*inputs)[0], normal(*inputs)[0])


def test_data_of_parameters_and_of_values_is_read_when_the_program_runs() -> None:
    """Torch's tracer sees no operator there: it made a constant without data, of which equal calls know no node."""
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    def f(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = torch.mm(x, x)
        h = h + (torch.mm(h, weight.data) - h).data
        h.data.mul_(2.0)
        return torch.mm(h, weight).sum()

    gm, normal, inputs = compile_and_keep(f, torch.ones(2, 2), weight)
    assert not normal.graph.find_nodes(op="get_attr")
    for a, b in zip(loss_and_grads(gm, inputs), loss_and_grads(normal, inputs), strict=True):
        assert torch.equal(a, b)


def test_sizes_are_functions_of_the_inputs() -> None:
    class Reshapes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cat([x, x], 1) * 2.0
            return y.reshape(y.shape[0] * y.shape[1], -1) / y.shape[1]

    _, normal, inputs = compile_and_keep(Reshapes(), torch.ones(3, 5, 2), dynamic=True)
    placeholders = set(normal.graph.find_nodes(op="placeholder"))
    for node in normal.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt):
            assert all(n in placeholders or isinstance(n.meta["val"], torch.SymInt) for n in node.all_input_nodes)
    assert normal(*inputs)[0].shape == (30, 2)


def test_selective_checkpoint_is_refused() -> None:
    from functools import partial

    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def save_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    class Selective(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            context = partial(create_selective_checkpoint_contexts, save_all)
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=context)

    with pytest.raises(Exception, match="a selective checkpoint chooses by a Python function") as caught:
        compile_and_keep(Selective(4, 4), torch.ones(2, 4))
    assert "test_normalize.py" in str(caught.value) or "RefusedError" in str(caught.value)


def test_graph_without_fake_values_is_refused() -> None:
    with pytest.raises(RefusedError, match="has no fake value"):
        normalize(fx.symbolic_trace(nn.Linear(2, 2)))


class Wrapped(nn.Module):
    """A layer run in the ways that give Dynamo's graph bodies."""

    def __init__(self, run: Callable[[nn.Module, Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.run = nn.Linear(8, 8), nn.Linear(8, 8), run

    def layer(self, x: torch.Tensor, *, scale: torch.Tensor | None = None, shift: float = 0.0) -> torch.Tensor:
        h = F.gelu(self.first(x)) + shift
        return h if scale is None else h * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, self.layer, x).square().mean()


def nested_checkpoints(model: Any, layer: Any, x: torch.Tensor) -> Any:
    def outer(y: torch.Tensor) -> torch.Tensor:
        return model.second(checkpoint(layer, y, use_reentrant=False)) + y

    return checkpoint(outer, x, use_reentrant=False)


def checkpoint_with_keywords(model: Any, layer: Any, x: torch.Tensor) -> Any:
    return checkpoint(layer, x, scale=model.second(x), shift=0.5, use_reentrant=False)


def checkpoint_with_a_part_without_gradients(model: Any, layer: Any, x: torch.Tensor) -> Any:
    def outer(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            frozen = layer(y)
        return model.second(frozen) * layer(y)

    return checkpoint(outer, x, use_reentrant=False)


def frozen_first_layer(model: Any, layer: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        h = layer(x)
        with torch.enable_grad():
            h = model.second(h)
        frozen = model.second(h)
    return h + frozen + torch.zeros_like(x).copy_(h.detach())


def several_results(model: Any, layer: Any, x: torch.Tensor) -> Any:
    a, b = checkpoint(lambda y: (layer(y), model.second(y)), x, use_reentrant=False)
    return a * b


def higher_order_wrap(model: Any, layer: Any, x: torch.Tensor) -> Any:
    return torch.ops.higher_order.wrap(lambda y: layer(model.second(y)), x)


def without_gradients_by_operator(model: Any, layer: Any, x: torch.Tensor) -> Any:
    frozen = torch.ops.higher_order.wrap_with_set_grad_enabled(False, lambda y: F.gelu(y) * 2, model.second(x))
    return frozen * model.second(x) + layer(x)


@torch.compiler.nested_compile_region
def region(layer: Any, x: Any) -> Any:
    return layer(x) + x


def nested_compile_region(model: Any, layer: Any, x: torch.Tensor) -> Any:
    twice: Any = region
    return twice(layer, twice(layer, model.second(x)))


@pytest.mark.parametrize(
    "run",
    [
        nested_checkpoints,
        checkpoint_with_keywords,
        checkpoint_with_a_part_without_gradients,
        frozen_first_layer,
        several_results,
        higher_order_wrap,
        without_gradients_by_operator,
        nested_compile_region,
    ],
    ids=lambda run: run.__name__,
)
def test_bodies_are_inlined_and_compute_the_same(run: Any) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    model = Wrapped(run)
    _, normal, inputs = compile_and_keep(model, x)
    assert not any(isinstance(node.target, HigherOrderOperator) for node in normal.graph.nodes)
    params = [v for v in inputs if isinstance(v, nn.Parameter)]
    (loss, *_), want = normal(*inputs), model(x)
    grads, want_grads = (torch.autograd.grad(v, params, allow_unused=True) for v in (loss, want))
    assert torch.equal(loss, want)
    assert [g is None for g in grads] == [g is None for g in want_grads]
    for grad, want_grad in zip(grads, want_grads, strict=True):
        assert grad is want_grad or torch.equal(grad, want_grad)


def test_each_checkpoint_has_its_own_region() -> None:
    _, normal, _ = compile_and_keep(Wrapped(nested_checkpoints), torch.ones(3, 8))
    linears = normal.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert len({node.meta["ac_graph_id"] for node in linears}) == 2


def test_flex_attention_stays_one_call() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    class Flex(nn.Module):
        def forward(self, q: torch.Tensor, slopes: torch.Tensor, scale: torch.Tensor) -> Any:
            def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
                return s + slopes[h] * (i - j)

            return scale * checkpoint(lambda q: flex_attention(q * 2, q, q, score), q, use_reentrant=False)

    q, slopes = torch.rand(1, 2, 16, 8), torch.rand(2)
    _, normal, inputs = compile_and_keep(Flex(), q, slopes, torch.ones((), requires_grad=True))
    (call,) = normal.graph.find_nodes(op="call_function", target=torch.ops.higher_order.flex_attention)
    score = normal.get_submodule(str(call.args[3]))
    assert all(isinstance(node.target, torch._ops.OpOverload) for node in score.graph.nodes if "call" in node.op)
    assert "recompute" in call.meta
    bias = slopes[:, None, None] * (torch.arange(16)[:, None] - torch.arange(16))
    torch.testing.assert_close(normal(*inputs)[0], F.scaled_dot_product_attention(q * 2, q, q, bias[None]))
