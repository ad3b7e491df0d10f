"""What AutoSP cannot run exactly it refuses in one sentence: node, source line, reason, what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from autosp_rules import AutoSPConfig, AutoSPError, autosp, dry_run
from fxrewrite.testing import fake_mesh
from tests.autosp.models import batch, build

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


def refusal(model: nn.Module, num_ranks: int, *, strict: bool = False, ids: torch.Tensor = IDS) -> AutoSPError:
    with pytest.raises(AutoSPError) as caught:
        dry_run(model, {"ids": ids}, num_ranks=num_ranks, config=AutoSPConfig(strict=strict))
    assert isinstance(caught.value, ValueError)
    return caught.value


def test_sequence_that_does_not_divide() -> None:
    error = refusal(Tiny(), 4, ids=IDS[:, :14])
    assert re.fullmatch(
        r"autosp\.shard_input_ids: sequence length 14 does not divide over axis sp \(size 4\) at %l_ids_.*; "
        r"pad the batch to a multiple of 4 \(labels with -100\)",
        str(error),
    )
    assert error.data["length"] == 14
    assert error.data["size"] == 4


def test_heads_that_do_not_divide() -> None:
    error = refusal(Tiny(heads=6), 4)
    assert "6 heads do not divide over axis sp (size 4)" in str(error)
    assert "use sp in {1, 2, 3, 6}" in str(error)
    assert "test_refusals.py:" in error.source
    assert error.rule == "layout.attention"


def test_kv_heads_fewer_than_ranks_without_a_repeat() -> None:
    error = refusal(Tiny(heads=4, kv_heads=2), 4)
    assert "2 kv heads do not divide over axis sp (size 4)" in str(error)
    dry_run(Tiny(heads=4, kv_heads=2), {"ids": IDS}, num_ranks=2)


def test_operator_without_a_rule_is_refused_when_strict_and_else_gathered() -> None:
    model = Tiny(extra=lambda x: torch.fft.fft(x, dim=1).real)
    error = refusal(model, 2, strict=True)
    assert "fft" in str(error)
    assert "has no layout rule" in str(error)
    assert "test_refusals.py:" in error.source
    _, report = dry_run(model, {"ids": IDS}, num_ranks=2)
    assert any("gathered" in line and "fft" in line for line in report.lines)


def test_in_place_operation_on_a_sharded_value() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        return x.mul_(2.0)

    error = refusal(Tiny(extra=double), 2)
    assert "in-place operation on a sharded value" in str(error)
    assert "write it out of place" in str(error)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo makes one
def test_higher_order_operator_is_refused_by_name() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    error = refusal(Tiny(extra=Cube.apply), 2)
    assert "autograd_function_apply" in str(error)


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

    with fake_mesh((2,), ("sp",)) as mesh, pytest.raises(Exception, match="does not compile to one graph") as caught:
        torch.compile(Broken(), backend=autosp("eager", mesh=mesh))(IDS)
    assert "AutoSPError" in str(caught.value)


def test_process_group_not_initialized() -> None:
    with pytest.raises(Exception, match=r"the process group is not initialized; call torch.distributed"):
        torch.compile(Tiny(), backend=autosp("eager"))(IDS)


def test_mesh_without_the_axis() -> None:
    with fake_mesh((2,), ("dp",)) as mesh, pytest.raises(Exception, match="the mesh has no axis 'sp'"):
        torch.compile(Tiny(), backend=autosp("eager", mesh=mesh))(IDS)


def test_unknown_inner_backend() -> None:
    message = r"inner backend 'nothing' does not exist; torch knows"
    with fake_mesh((1,), ("sp",)) as mesh, pytest.raises(Exception, match=message):
        torch.compile(Tiny(), backend=autosp("nothing", mesh=mesh))(IDS)


def test_unknown_option() -> None:
    with pytest.raises(ValueError, match="speed"):
        autosp(speed="high")


def test_model_that_does_not_capture() -> None:
    class Prints(Tiny):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            print("not in a graph")  # noqa: T201  # what Dynamo cannot capture
            return super().forward(ids)

    with pytest.raises(ValueError, match="does not compile to one graph"):
        dry_run(Prints(), {"ids": IDS}, num_ranks=2)


def test_refused_kv_repeat_is_in_the_report_and_the_model_still_runs() -> None:
    _, report = dry_run(build("llama_gqa"), batch("llama_gqa", "plain"), num_ranks=4)
    assert [r for r in report.refusals if "2 kv heads do not divide over axis sp (size 4)" in r]


def test_an_id_for_the_whole_sequence_is_no_sequence() -> None:
    class Tagged(Tiny):
        def forward(self, ids: torch.Tensor, tag: torch.Tensor, language: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + self.embed(tag).mean() + self.embed(language).mean()

    inputs = {"ids": IDS, "tag": torch.tensor(3), "language": torch.tensor([1, 2])}
    _, report = dry_run(Tagged(), inputs, num_ranks=4)
    assert report.tokens_per_rank == 8


def test_in_place_operation_on_a_view_of_a_sharded_value() -> None:
    def clear_first(x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x[:, 0] = 0.0
        return x

    assert "in-place operation on a sharded value" in str(refusal(Tiny(extra=clear_first), 2))


def test_number_of_ranks() -> None:
    with pytest.raises(AutoSPError, match="0 ranks; pass num_ranks=1 or more"):
        dry_run(Tiny(), {"ids": IDS}, num_ranks=0)
