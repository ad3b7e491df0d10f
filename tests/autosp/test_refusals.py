"""What AutoSP cannot run exactly it refuses in one sentence: node, source line, reason, what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autosp_rules import AutoSPConfig, AutoSPError, autosp, dry_run
from fxrewrite import FxRewriteError
from fxrewrite.spmd import Axis
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.autosp.one_device import assert_equal_to_one_device, captured, on_ranks

IDS = torch.arange(32).reshape(2, 16) % 8


class Tiny(nn.Module):
    """Embedding, one attention with `heads` and `kv_heads`, and a loss; `extra` is put in front of the attention."""

    def __init__(self, heads: int = 4, kv_heads: int | None = None, extra: Any = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.extra = heads, kv_heads or heads, extra
        self.embed = nn.Embedding(8, heads * 4)
        self.kv = nn.Linear(heads * 4, self.kv_heads * 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.extra is not None:
            x = self.extra(x)
        q = x.unflatten(-1, (self.heads, 4)).transpose(1, 2)
        kv = self.kv(x).unflatten(-1, (self.kv_heads, 4)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return out.square().mean()


def refusal(model: nn.Module, num_ranks: int, *, strict: bool = False) -> AutoSPError:
    with pytest.raises(AutoSPError) as caught:
        dry_run(model, {"ids": IDS}, num_ranks=num_ranks, config=AutoSPConfig(strict=strict))
    assert isinstance(caught.value, ValueError)
    return caught.value


def test_operator_without_a_rule_is_refused_when_strict_and_else_gathered() -> None:
    model = Tiny(extra=lambda x: torch.linalg.qr(x).R)
    error = refusal(model, 2, strict=True)
    assert "linalg_qr" in str(error)
    assert "has no layout rule" in str(error)
    assert "test_refusals.py:" in error.source
    _, report = dry_run(model, {"ids": IDS}, num_ranks=2)
    assert any("gathered" in line and "linalg_qr" in line for line in report.lines)


def _doubled_unseen(x: torch.Tensor) -> torch.Tensor:
    x = x * 1.0
    with torch.no_grad():
        x.mul_(2.0)  # autograd does not see it, so no operator out of place is the same
    return x


def _cleared_through_a_view(x: torch.Tensor) -> torch.Tensor:
    x = x * 1.0
    x.detach()[:, 0] = 0.0
    return x


def _branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


def _hooked(x: torch.Tensor, hook: Any) -> torch.Tensor:
    x.register_hook(hook)
    return x


IN_PLACE = ["in-place operation on a sharded value", "write it out of place"]
BY_STRIDES = ["it reads memory by strides", "test_refusals.py:"]
HOOK = ["register_hook", "register it on a parameter, or on what the compiled function returns"]
REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "a write that autograd does not see": (_doubled_unseen, IN_PLACE),
    "a write to a view": (_cleared_through_a_view, IN_PLACE[:1]),
    "strides": (lambda x: x.mT.as_strided(x.shape, (256, 16, 1)), BY_STRIDES),
    "strides of what is gathered": (lambda x: torch.linalg.qr(x).R.mT.as_strided(x.shape, (256, 16, 1)), BY_STRIDES),
    "branches": (_branches, ["the higher-order op cond is not supported"]),
    # Dynamo traces a hook that computes, and refuses one that writes to Python's state
    "a hook that computes": (lambda x: _hooked(x, lambda grad: grad * 2), HOOK),
    "a hook that writes": (lambda x: _hooked(x, [].append), HOOK),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_may_not_do_inside_is_refused(name: str) -> None:
    inside, texts = REFUSED[name]
    said = str(refusal(Tiny(extra=inside), 2))
    assert [text for text in texts if text not in said] == []


def test_model_without_token_ids() -> None:
    class Projection(nn.Linear):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids.double()).mean()

    assert "no sequence found" in str(refusal(Projection(16, 4).double(), 2))


def test_graph_break() -> None:
    class Broken(Tiny):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            torch._dynamo.graph_break()
            return x.square().mean()

    for options in ({"breaks": "refuse"}, {"strict": True}):
        torch._dynamo.reset()
        with (
            fake_mesh((2,), ("sp",)) as mesh,
            pytest.raises(Exception, match="does not compile to one graph") as caught,
        ):
            torch.compile(Broken(), backend=autosp("eager", mesh=mesh, **options))(IDS)
        assert "AutoSPError" in str(caught.value)
        assert "breaks='gather'" in str(caught.value)


def test_process_group_not_initialized() -> None:
    with pytest.raises(Exception, match=r"the process group is not initialized; call torch.distributed"):
        torch.compile(Tiny(), backend=autosp("eager"))(IDS)


def test_mesh_without_the_axis() -> None:
    with fake_mesh((2,), ("dp",)) as mesh, pytest.raises(Exception, match="the mesh has no axis 'sp'"):
        torch.compile(Tiny(), backend=autosp("eager", mesh=mesh))(IDS)


def test_an_id_for_the_whole_sequence_is_no_sequence() -> None:
    class Tagged(Tiny):
        def forward(self, ids: torch.Tensor, tag: torch.Tensor, language: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + self.embed(tag).mean() + self.embed(language).mean()

    inputs = {"ids": IDS, "tag": torch.tensor(3), "language": torch.tensor([1, 2])}
    _, report = dry_run(Tagged(), inputs, num_ranks=4)
    assert report.tokens_per_rank == 8


@pytest.mark.parametrize("num_ranks", [0, -1, 2.0, "2", True, None])
def test_number_of_ranks(num_ranks: Any) -> None:
    message = re.escape(f"{num_ranks!r} is not a number of ranks; pass an int, 1 or more")
    with pytest.raises(AutoSPError, match=message):
        dry_run(Tiny(), {"ids": IDS}, num_ranks=num_ranks)
    with pytest.raises(FxRewriteError, match=message):
        Axis("sp", num_ranks)
    with pytest.raises(FxRewriteError, match=message):
        run_on_ranks(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(2)], num_ranks)


def test_what_is_no_model_no_configuration_and_no_sequence() -> None:
    for model, config, message in (
        ("llama", None, "the model is a str; pass a module or a function"),
        (Tiny(), {"strict": True}, r"config is a dict; pass an AutoSPConfig"),
    ):
        with pytest.raises(AutoSPError, match=message):
            dry_run(model, {"ids": IDS}, num_ranks=2, config=config)  # pyright: ignore[reportArgumentType]
    with pytest.raises(AutoSPError, match="no sequence found"):
        dry_run(Tiny(), {"ids": IDS[:, :0]}, num_ranks=2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tokens": IDS}, "Tagged.forward takes no argument tokens and is called without ids; its arguments are ids, "),
        ({}, "Tagged.forward is called without ids; its arguments are ids, tag (optional)"),
        ({"ids": IDS, "mask": IDS}, "Tagged.forward takes no argument mask; its arguments are"),
        (IDS, "the inputs are a Tensor; pass a mapping: {name: value}"),
    ],
    ids=["another", "none", "one more", "no mapping"],
)
def test_names_of_arguments(inputs: Any, message: str) -> None:
    class Tagged(Tiny):
        def forward(self, ids: torch.Tensor, tag: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(ids)

    with pytest.raises(AutoSPError, match=re.escape(message)):
        dry_run(Tagged(), inputs, num_ranks=2)


def test_names_that_a_hook_or_keywords_take() -> None:
    class Keywords(Tiny):
        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs["tokens"])

    hooked = Tiny()
    hooked.register_forward_pre_hook(lambda _, args, kwargs: (args, {"ids": kwargs["tokens"]}), with_kwargs=True)
    for model in (Keywords(), hooked):
        assert dry_run(model, {"tokens": IDS}, num_ranks=2)[1].slices


class Normed(Tiny):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm, self.up = norm(16, affine=True, track_running_stats=True), nn.Linear(16, 16)
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)).square().mean()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_of_all_tokens_are_sums_over_ranks(norm: Any) -> None:
    report = assert_equal_to_one_device(Normed(norm), {"ids": IDS[:, :13]}, ranks=(2, 3))
    assert not [line for line in report.lines if line.startswith(("gathered", "whole"))]


def test_a_chunk_of_a_buffer_is_not_written_to_with_it() -> None:
    """The statistics, as long as the sequence, are taken to be cut, and a chunk of the old ones shares their memory."""
    assert_equal_to_one_device(Normed(nn.BatchNorm1d), {"ids": IDS})


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("dynamic", [False, True])
def test_buffers_are_written_to_late(length: int, dynamic: bool) -> None:
    class Counts(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mean", torch.zeros(16))
            self.double()

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.embed(ids)
            loss = x.square().mean()
            self.calls.add_(1)
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
            return loss, self.calls + 0, self.mean + 0

    ids = IDS[:, :length].clone()
    if dynamic:
        torch._dynamo.mark_dynamic(ids, 1)
    model = Counts()
    gm, inputs = captured(model, {"ids": ids})
    expected = copy.deepcopy(model)(ids)
    for outputs in on_ranks(gm, inputs, 2).run.outputs:
        torch.testing.assert_close(outputs, expected)


def _training(backend: Any, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch._dynamo.reset()
    return torch.compile(step, backend=backend)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's guards
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own call
def test_an_optimizer_that_is_compiled_with_its_model_runs_whole(foreach: bool) -> None:
    """Dynamo breaks the graph at `backward`, and captures the parameters that the optimizer writes to as attributes."""
    with fake_mesh((2,), ("sp",)) as mesh:
        backend = autosp("aot_eager", mesh=mesh, compare_ranks=False)
        step = _training(backend, foreach=foreach)
        step(IDS)
        step(IDS)
    first, *others = backend.reports
    assert first.tokens_per_rank == 16
    assert len(others) >= 1
    assert all("no sequence found" in str(report) for report in others)


# Dynamo imports a module of torch for it that warns, unless another test has: torch.utils.mkldnn
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_an_optimizer_alone_has_no_sequence() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with fake_mesh((2,), ("sp",)) as mesh, pytest.raises(Exception, match="the step of an optimizer, which writes to"):
        torch.compile(optimizer.step, backend=autosp("eager", mesh=mesh))()


def test_weights_that_are_arguments_are_parameters() -> None:
    """Other tensors of a call may be hidden states, so that nothing tells which one has the sequence."""
    model = Tiny()

    def function(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (IDS,))

    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with fake_mesh((2,), ("sp",)) as mesh:
        backend = autosp("eager", mesh=mesh)
        with pytest.raises(Exception, match=r"as of torch\.func\.functional_call, as nn\.Parameters"):
            torch.compile(function, backend=backend)({name: w.requires_grad_() for name, w in weights.items()})
        torch._dynamo.reset()
        torch.compile(function, backend=backend)({name: nn.Parameter(w) for name, w in weights.items()})
    assert backend.reports[-1].tokens_per_rank == 16
