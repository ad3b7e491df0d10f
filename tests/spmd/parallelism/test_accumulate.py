"""Gradients that are reduced once for several micro-batches: what is sent, which program runs, and what is refused.

`test_parallelism.test_on_real_processes` compares their values with those of one device.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo import lookup_backend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from autosp_rules import AutoSPConfig
from autosp_rules.parallelism import autosp_parallelism
from fxrewrite import FxRewriteError
from fxrewrite.ops import key
from fxrewrite.spmd import Shard, Stored, no_sync, param, reduce_gradients, shard_parameters, spmd
from fxrewrite.spmd.parallelism.accumulate import Accumulation, Unreduced, _summand as summand, is_unreduced
from fxrewrite.testing import fake_mesh
from rules.parallel import DATA, ZERO2, ZERO3
from tests.spmd.parallelism.test_parallelism import TENSOR, Autocast, Model
from tests.versions import FAKE_SCATTERS

pytestmark = pytest.mark.slow

X = torch.arange(24.0).reshape(4, 6)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch._dynamo.reset()
    with fake_mesh((2, 2), ("dp", "tp")) as made:
        yield made


class Sent(TorchDispatchMode):
    """Collectives that run inside, and the bytes of what a rank gives to them, by axis."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._axes = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()}
        self.kinds: dict[str, Counter[str]] = {name: Counter() for name in self._axes.values()}
        self.bytes: dict[str, Counter[str]] = {name: Counter() for name in self._axes.values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = key(func).partition("::")
        if namespace == "_c10d_functional" and name != "wait_tensor":
            axis = self._axes[args[-1]]
            self.kinds[axis][name] += 1
            self.bytes[axis][name] += args[0].nbytes
        return func(*args, **(kwargs or {}))


def compiled(plan: Any, mesh: DeviceMesh, model: nn.Module | None = None) -> tuple[nn.Module, Any, Any]:
    model = shard_parameters(model or Model(), plan, mesh)
    backend = spmd(plan, mesh=mesh, inner="aot_eager")
    return model, backend, torch.compile(model, backend=backend, fullgraph=True)


def backward(loss: torch.Tensor, mesh: DeviceMesh) -> Sent:
    with Sent(mesh) as sent:
        loss.backward()
    return sent


class Checkpointed(Model):
    """Its layers are computed again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x.square().mean()


def llama() -> nn.Module:
    widths = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, use_cache=False, tie_word_embeddings=True, **widths))


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        (ZERO2, Autocast),
        (ZERO3 | TENSOR, Model),
        (DATA | TENSOR, Checkpointed),
        (DATA | replace(ZERO3, axis="tp"), Model),
        (ZERO3 | autosp_parallelism(AutoSPConfig(axis="tp")), llama),
    ],
)
@pytest.mark.some(2)
def test_gradients_are_sent_with_the_last_micro_batch(
    mesh: DeviceMesh, plan: Any, model: Callable[[], nn.Module]
) -> None:
    """As many bytes as one backward pass sends that reduces, in no more collectives; two programs are compiled."""
    made, backend, compiled_model = compiled(plan, mesh, model())
    own = ["dp", "tp"] if model is llama else [member.axis for member in plan.members if member.data == "own"]

    def step(x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(16).reshape(2, 8)
        return compiled_model(input_ids=ids, labels=ids).loss if model is llama else compiled_model(x)

    each_time = backward(step(X), mesh)
    made.zero_grad()
    for _ in range(3):
        for i in range(3):
            with no_sync(made) if i < 2 else nullcontext():
                sent = backward(step(X), mesh)
            for axis in own:
                of_activations = {"reduce_scatter_tensor"} if (model, axis) == (llama, "tp") else set[str]()
                reduced = {"all_reduce", "reduce_scatter_tensor"} - of_activations
                assert bool(reduced & sent.kinds[axis].keys()) == (i == 2), (axis, sent.kinds)
            assert sent.kinds["tp"] == each_time.kinds["tp"] or "tp" in own, "what activations need stays"
            assert any(map(is_unreduced, made.parameters())) == (i < 2)
        assert sent.bytes == each_time.bytes
        assert all(sent.kinds[axis] <= each_time.kinds[axis] for axis in own)
        made.zero_grad()
    assert len(backend.reports) == 2


def test_a_step_with_gradients_that_are_not_reduced_is_refused(mesh: DeviceMesh) -> None:
    model, _, step = compiled(ZERO3 | TENSOR, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with no_sync(model):
        step(X).backward()
    with pytest.raises(
        FxRewriteError, match=r"gradients of 6 parameters are not reduced .* or call fxrewrite\.spmd\.reduce_gradients"
    ):
        optimizer.step()
    assert backward_nothing(model, mesh)["dp"] == {"reduce_scatter_tensor": 2}
    optimizer.step()
    assert backward_nothing(model, mesh)["dp"] == {}
    with no_sync(model):
        step(X).backward()
    optimizer.zero_grad()  # drops them
    optimizer.step()
    with pytest.raises(FxRewriteError, match="Model has no parameters that shard_parameters holds"), no_sync(Model()):
        pass


def backward_nothing(model: nn.Module, mesh: DeviceMesh) -> dict[str, Counter[str]]:
    with Sent(mesh) as sent:
        reduce_gradients(model)
    return sent.kinds


def test_the_forward_pass_decides(mesh: DeviceMesh) -> None:
    """As with DDP; a backward pass that reduces also reduces what was left before."""
    model, backend, step = compiled(ZERO3, mesh)
    before = step(X)
    with no_sync(model):
        inside = step(X)
    assert "reduce_scatter_tensor" not in backward(inside, mesh).kinds["dp"]
    assert all(map(is_unreduced, model.parameters()))
    with no_sync(model):
        assert backward(before, mesh).kinds["dp"]["reduce_scatter_tensor"] == 4  # one for each layer, and what was left
    assert not any(map(is_unreduced, model.parameters()))
    with no_sync(model), no_sync(model):
        inside = step(X)
    with torch.no_grad():
        step(X)  # to evaluate
    both = inside + step(X)
    assert backward(both, mesh).kinds["dp"]["reduce_scatter_tensor"] == 2
    assert not any(map(is_unreduced, model.parameters()))
    assert backward(step(X), mesh).kinds["dp"]["reduce_scatter_tensor"] == 2
    assert len(backend.reports) == 3, "one to evaluate"


def test_a_copy_accumulates_by_itself(mesh: DeviceMesh) -> None:
    """What `no_sync` of a copy, and of one that was pickled, covers is the copy; also as a method, for trainers."""
    model, _, step = compiled(DATA, mesh)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with other.no_sync():
            step(X).backward()
            assert not any(map(is_unreduced, model.parameters()))
            torch.compile(other, backend=spmd(DATA, mesh=mesh, inner="eager"))(X).backward()
            assert all(map(is_unreduced, other.parameters()))
    with step.no_sync():
        model.zero_grad()
        step(X).backward()
    assert all(map(is_unreduced, model.parameters()))
    pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("rows", [2, 7, 9])
def test_what_ranks_add_to_a_sum_that_is_reduced_is_it(rows: int) -> None:
    """Of a gradient in shards that three ranks do not divide, and of one that every rank holds whole."""
    one = nn.Linear(2, rows)
    plan = replace(ZERO3, place={param("weight"): Stored(Shard(0))})
    found = {name: torch.zeros_like(value) for name, value in one.named_parameters()}
    for rank in range(3):
        with fake_mesh((3,), ("dp",), rank=rank) as mesh, torch.no_grad():
            for name, held in shard_parameters(copy.deepcopy(one), plan, mesh).named_parameters():
                left = Unreduced(0, held.shape, (TorchPartial(),)).gradient(torch.zeros(held.shape), held)
                found[name] += summand(held, left).to_local()
    torch.testing.assert_close(found, dict(one.named_parameters()), rtol=0, atol=0)


class OneGradient(Model):
    """Parameters that have one gradient, and one of which all entries have one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(6, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ (self.a + self.b)) + self.c.sum()


@pytest.mark.parametrize(
    "plan",
    [
        TENSOR,
        pytest.param(
            ZERO3 | TENSOR, marks=pytest.mark.skipif(not FAKE_SCATTERS, reason="torch's fake group scatters nothing")
        ),
    ],
)
def test_gradients_share_no_memory(mesh: DeviceMesh, plan: Any) -> None:
    """The second micro-batch and clipping change each of them once."""
    model, _, step = compiled(plan, mesh, OneGradient())
    grads: list[list[torch.Tensor]] = []
    for _ in range(2):
        step(X).backward()
        grads.append([p.grad.to_local().clone() for p in model.parameters()])
    torch.testing.assert_close(grads[1], [2 * grad for grad in grads[0]])
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    torch.testing.assert_close([p.grad.to_local() for p in model.parameters()], grads[0])


def test_bytes_of_a_step() -> None:
    """The table of docs/parallel.md, for four micro-batches."""
    torch._dynamo.reset()
    num, found = 4, dict[str, list[float]]()
    size = sum(p.nbytes for p in Model().parameters())
    last = sum(p.nbytes for p in Model().layers[1].parameters()) / size
    with fake_mesh((2,), ("dp",)) as mesh:
        for plan in (DATA, ZERO2, ZERO3):
            torch._dynamo.reset()
            sent = Sent(mesh)

            def counted(gm: fx.GraphModule, example: Any, sent: Sent = sent) -> Callable[..., Any]:
                run = lookup_backend("aot_eager")(gm, example)

                def call(*args: Any) -> Any:
                    with sent:
                        return run(*args)

                return call

            model = shard_parameters(Model(), plan, mesh)
            step = torch.compile(model, backend=spmd(plan, mesh=mesh, inner=counted), fullgraph=True)
            for once in (False, True):
                sent.bytes["dp"].clear()
                for i in range(num):
                    with no_sync(model) if once and i < num - 1 else nullcontext():
                        loss = step(X)
                        with sent:
                            loss.backward()
                of = {"all_reduce": 2.0, "reduce_scatter_tensor": 1.0, "all_gather_into_tensor": 2.0}  # of shards
                sums = sum(of[kind] * given / size for kind, given in sent.bytes["dp"].items())
                found.setdefault(plan.name, []).append(sums)
    again = num * (1 - last)
    assert found == {
        "data": [2 * num, 2],
        "zero2": [2 * num, num + 1],
        "zero3": pytest.approx([2 * num + again, num + again + 1]),
    }


class Broken(Model):
    """Two graphs, and code between them that is not compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks activations between graphs for one
def test_a_model_that_breaks_and_two_models(mesh: DeviceMesh) -> None:
    """Each graph keeps its gradients; what another model does inside of `no_sync` is reduced."""
    model, other = shard_parameters(Broken(), ZERO3, mesh), shard_parameters(Model(), ZERO3, mesh)
    backend = spmd(ZERO3, mesh=mesh, inner="eager")
    step = torch.compile(lambda x: model(x) + other(x), backend=backend)
    with no_sync(model):
        step(X).backward()
    assert all(map(is_unreduced, model.parameters()))
    assert not any(map(is_unreduced, other.parameters()))
    step(X).backward()
    for parameter in (*model.parameters(), *other.parameters()):
        assert parameter.grad.placements == parameter.placements


@pytest.mark.parametrize("is_left", [False, True], ids=["at the end", "before a gradient that is reduced"])
def test_models_of_one_program_are_reduced_in_its_order(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    """All ranks reduce them in one order, whatever it is: collectives of two models would otherwise meet."""
    models = [shard_parameters(Model(), ZERO3, mesh) for _ in range(8)]
    backend = spmd(ZERO3, mesh=mesh, inner="eager")
    step = torch.compile(lambda x: sum(model(x) for model in models), backend=backend, fullgraph=True)
    with ExitStack() as opened:
        for model in models:
            opened.enter_context(no_sync(model))
        step(X).backward()
    order = [model.layers[0].up._accumulation for model in models]
    for accumulation in order if is_left else ():
        accumulation.keeps = False  # so that the program reduces by itself, after those that are left
    reduced, reduce = list[Accumulation](), Accumulation.reduce

    def note(accumulation: Accumulation) -> None:
        reduced.append(accumulation)
        reduce(accumulation)

    monkeypatch.setattr(Accumulation, "reduce", note)
    step(X).backward()
    assert reduced == order
