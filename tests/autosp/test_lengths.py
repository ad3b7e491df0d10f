"""Any length on any number of ranks: loss and gradients equal one device's, whatever padding computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from autosp_rules import AutoSPConfig, dry_run
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.autosp.models import batch, build
from tests.autosp.one_device import assert_equal_to_one_device, captured, check_one_program, on_ranks
from tests.zoo.measure import OneDevice, compare
from tests.zoo.models import build as build_of_zoo


@pytest.mark.parametrize(
    ("name", "kind", "length", "num_ranks", "dynamic", "checkpointing"),
    [
        ("llama_gqa", "right_padding", 13, 4, False, True),
        ("llama_gqa", "uneven_labels", 17, 3, True, False),  # heads do not divide: keys are gathered
        ("gpt2", "plain", 5, 4, False, False),  # the last rank has no token of its own
        ("bert", "right_padding", 13, 8, True, True),
        ("mistral", "uneven_labels", 3, 8, False, False),  # most ranks have none
        ("qwen3", "labels_on_one_rank", 15, 5, False, False),  # divides, by no power of two
        ("llama_mha", "plain", 18, 6, False, False),
    ],
)
@pytest.mark.some(2)
def test_models(name: str, kind: str, length: int, num_ranks: int, dynamic: bool, checkpointing: bool) -> None:
    model, inputs = build(name, checkpointing=checkpointing, layers=1), batch(name, kind, length=length)
    if dynamic:
        for value in inputs.values():
            torch._dynamo.mark_dynamic(value, 1)
    check_in_float64(model, inputs, num_ranks)


def check_in_float64(model: nn.Module, inputs: dict[str, Any], num_ranks: int) -> None:
    """In float64 throughout: models that compute in float32 somewhere are off by 1e-7 where P is no power of two."""
    found = compare(OneDevice.of(model, inputs).in_float64(), num_ranks)
    assert found["status"] == "exact", found
    assert found["sharded"]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(("name", "num_ranks"), [("MixtralForCausalLM", 4), ("MambaForCausalLM", 3)])
def test_experts_and_scans(name: str, num_ranks: int) -> None:
    check_in_float64(build_of_zoo(name, "eager"), batch("", "uneven_labels", length=13), num_ranks)


IDS = torch.randint(1, 30, (2, 13), generator=torch.Generator().manual_seed(0))


class Reads(nn.Module):
    """Embeds ids, and makes a loss of the hidden states."""

    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(30, 8).double(), nn.Linear(8, 8).double()
        self.loss = loss

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.up(self.embed(ids))
        return self.loss(x), x


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.exp().sum(),
    "mean": lambda x: (x + 3).mean(),
    "sums multiplied": lambda x: (x.sum(1) * x.square().mean(1)).sum(),
    "contraction": lambda x: torch.einsum("bsd,bse->bde", x, x.exp()).square().sum(),
    "flattened batch": lambda x: (x.flatten(0, 1).T @ x.flatten(0, 1).cos()).square().sum(),
    "flattened features": lambda x: (x.flatten(1) * x.flatten(1).exp()).sum(),
    "norm of all": lambda x: x.flatten().norm(),
    "log of what could be zero": lambda x: (x.square().sum(-1) / x.square().sum(-1).sqrt()).log().sum(),
    "largest": lambda x: x.amax(1).sum() + x.amin(1).sum(),
    "softmax over tokens": lambda x: (x.softmax(1) * x).sum(),
    "scan": lambda x: x.cumsum(1).square().mean(),
    "no rule for padding": lambda x: nn.functional.mse_loss(x, x.detach() + 1, reduction="sum"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_padding_counts_nowhere(name: str) -> None:
    report = assert_equal_to_one_device(Reads(LOSSES[name]), {"ids": IDS}, ranks=(4,))
    assert [line for line in report.lines if "in 4 chunks of 4, of which the last 3 entries are padding" in line]
    said = [line for line in report.lines if "does not say what padding counts nothing" in line]
    assert bool(said) == (name == "no rule for padding")


def test_a_length_that_divides_gives_the_program_that_it_gave_before() -> None:
    program, report = dry_run(Reads(LOSSES["mean"]), {"ids": IDS[:, :12]}, num_ranks=4)
    names = {str(node.target) for node in program.graph.nodes}
    assert not names & {"aten.masked_fill.Scalar", "aten.index_select.default", "aten.arange.default"}
    assert not [line for line in report.lines if "padd" in line]


@pytest.mark.parametrize("outputs", ["shard", "gather"])
def test_outputs_return_as_padded_chunks_or_cut_to_the_length(outputs: Any) -> None:
    model = Reads(LOSSES["sum"])
    whole = model(IDS)[1]
    _, report, run = on_ranks(*captured(model, {"ids": IDS}), 4, AutoSPConfig(outputs=outputs))
    found = [result[1] for result in run.outputs]
    lines = [line for line in report.lines if line.startswith("output")]
    if outputs == "gather":
        assert not lines
        assert all(torch.equal(result, whole) for result in found)
    else:
        assert "the last 3 of 16 entries, at the end of the last ranks, are padding" in lines[0]
        assert torch.equal(torch.cat(found, 1)[:, :13], whole)
        assert torch.equal(found[3], whole[:, -1:].expand(-1, 4, -1))


def test_two_programs_serve_all_lengths() -> None:
    """One for lengths that divide and one for any, beside the first, which torch compiles for its length alone."""
    compiled: list[fx.GraphModule] = []

    torch._dynamo.reset()
    model = Reads(LOSSES["contraction"]).requires_grad_(False)
    with fake_mesh((4,), ("sp",)) as mesh:

        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled.append(transform(gm, AutoSPConfig(outputs="gather"), axis_of(mesh, "sp"))[0])
            return lambda *args: run_on_ranks(compiled[-1], args, 4).outputs[3]

        run = torch.compile(model, backend=backend)
        for length in (16, 20, 17, 19, 23, 24, 5, 28):
            ids = torch.arange(2 * length).reshape(2, length) % 30
            torch.testing.assert_close(run(ids)[0], model(ids)[0])
    assert len(compiled) == 3


class Shifted(nn.Module):
    """The next token's loss as training loops write it, by cutting the logits."""

    def __init__(self, *, rows: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.rows = nn.Embedding(50, 8), nn.Linear(8, 50), rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(ids))
        if self.rows:
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").pow(2).sum()


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize(("num_rows", "num_ranks"), [(1, 3), (2, 2), (3, 3)])
@pytest.mark.some(2)
def test_a_shifted_loss_in_one_program_for_many_lengths(rows: bool, num_rows: int, num_ranks: int) -> None:
    """Nothing in a program may be of the length that it was traced with."""
    lengths = (7, 11, 13, 5)  # none of them a multiple of the ranks
    draws = ((length, torch.Generator().manual_seed(length)) for length in lengths)
    batches = (torch.randint(50, (num_rows, length), generator=draw) for length, draw in draws)
    check_one_program(Shifted(rows=rows).double(), batches, num_ranks)


def test_a_whole_batch_of_ids_and_chunks_of_one_token() -> None:
    for shape, num_ranks in (((3, 7), 7), ((3, 7), 6), ((1, 2), 3)):
        ids = IDS.flatten()[: shape[0] * shape[1]].reshape(shape)
        assert_equal_to_one_device(Reads(LOSSES["sums multiplied"]), {"ids": ids}, ranks=(num_ranks,))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_one_token_is_computed_by_every_rank(num_ranks: int) -> None:
    model, ids = Reads(LOSSES["sum"]), IDS[:1, :1]
    model(ids)[0].backward()
    gm, inputs = captured(model, {"ids": ids})
    _, report, run = on_ranks(gm, inputs, num_ranks, backward=0)
    assert "whole: the call is of one token, which every rank computes" in report.lines
    assert report.tokens_per_rank == 1
    assert all(torch.equal(loss, model(ids)[0]) for loss, _ in run.outputs)
    for value, grad in zip(inputs, run.gradients(), strict=True):
        if value.grad is not None:
            torch.testing.assert_close(grad, value.grad, rtol=1e-12, atol=0)
