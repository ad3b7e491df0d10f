"""What the compiled model returns: whole or in chunks, in evaluation too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosp_rules import AutoSPConfig, AutoSPReport, dry_run
from tests.autosp.models import batch, build
from tests.autosp.one_device import captured, on_ranks


def run(inputs: dict[str, Any], **options: Any) -> tuple[list[Any], Any, AutoSPReport]:
    """Each rank's outputs, the single-device outputs, and the report, of a Llama in evaluation."""
    model = build("llama_gqa").eval()
    with torch.no_grad():
        _, report, ranks = on_ranks(*captured(model, inputs), 2, AutoSPConfig(**options))
        return ranks.outputs, model(**inputs), report


def test_logits_are_whole_without_a_loss() -> None:
    outputs, expected, _ = run({"input_ids": batch("llama_gqa", "plain")["input_ids"]})
    for (logits,) in outputs:
        torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-12)


def test_programs_compute_chunks_of_logits_beside_a_loss_and_the_report_says_so() -> None:
    outputs, expected, report = run(batch("llama_gqa", "plain"))
    whole = torch.cat([logits for _, logits in outputs], dim=1)
    torch.testing.assert_close(whole, expected.logits, rtol=1e-12, atol=1e-12)
    [line] = [line for line in report.lines if line.startswith("output ")]
    assert line.endswith(f"S(1) over sp is gathered when it is first used, {2 * 16 * 61 * 8:,} bytes on each rank")
    _, _, report = run(batch("llama_gqa", "plain"), outputs="shard")
    assert any(
        "returns as this rank's chunk S(1) over sp; outputs='gather' returns it whole" in line for line in report.lines
    )


@pytest.mark.parametrize(("outputs", "length"), [("gather", 16), ("shard", 8)])
def test_the_option_decides(outputs: str, length: int) -> None:
    found, expected, _ = run(batch("llama_gqa", "plain"), outputs=outputs)
    for loss, logits in found:
        assert logits.shape[1] == length
        torch.testing.assert_close(loss, expected.loss)


class Scaled(nn.Module):
    """Hidden states beside a number that is made of weights alone, as CLIP's logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(61, 4), nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(ids), self.scale.exp()


def test_a_number_that_weights_alone_make_is_no_loss() -> None:
    program, _ = dry_run(Scaled(), {"ids": torch.zeros(2, 16, dtype=torch.int64)}, num_ranks=2)
    (hidden, _), *_ = program.graph.output_node().args
    assert tuple(hidden.meta["val"].shape) == (2, 16, 4)


def test_nothing_goes_backward_in_evaluation() -> None:
    _, _, report = run(batch("llama_gqa", "plain"))
    assert {collective.direction for collective in report.collectives} == {"forward"}


def test_bytes_sent_are_those_of_the_formula() -> None:
    """Two layers of q and o with 4 heads, k and v with 2, of 8 float64 each, for 2 x 8 tokens a rank; half travels."""
    _, _, report = run(batch("llama_gqa", "plain"), attention="ulysses")
    (all_to_all,) = [c for c in report.collectives if c.kind == "all_to_all"]
    assert all_to_all.count == 4
    assert all_to_all.bytes_sent == 2 * (2 * 4 + 2 * 2) * (2 * 8) * 8 * 8 // 2


WIDTH = 24
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "the last token": lambda x: x[:, -1],
    "the largest": lambda x: x.amax(1),
    "computed of the last token": lambda x: x[:, -1].tanh() * 2,
    "every second": lambda x: x[:, ::2],
    "twice": lambda x: torch.cat([x, x], 1),
    "by an operator without a rule": lambda x: torch.linalg.qr(x).Q.relu(),
}
CHUNKS: dict[str, Callable[[Tensor], Tensor]] = {
    "hidden states": lambda x: x * 2,
    "in front of the last token": lambda x: x * x[:, -1:],
    "behind the last token": lambda x: x[:, -1:] * x,
    "scores": lambda x: x @ x.transpose(1, 2),
    "after a scan over the sequence": lambda x: x.cumsum(1).relu(),
}


class Returns(nn.Module):
    """A loss of hidden states [2, S, 24], and what `read` makes of them."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.read = nn.Embedding(7, WIDTH, dtype=torch.float64), read

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        return x.square().mean(), self.read(x)


@pytest.mark.parametrize("length", [20, WIDTH])
@pytest.mark.parametrize("name", [*WHOLE, *CHUNKS])
def test_what_returns_as_a_chunk_is_no_question_of_sizes(name: str, length: int) -> None:
    """A length that is also the number of features changes nothing: dataflow says what the sequence is."""
    outputs, expected = read_on_two_ranks((WHOLE | CHUNKS)[name], length)
    parts = list(expected.chunk(2, dim=1)) if name in CHUNKS else [expected, expected]
    for output, part in zip(outputs, parts, strict=True):
        torch.testing.assert_close(output, part, rtol=1e-12, atol=1e-12)


def test_of_a_flattened_batch_a_rank_has_its_chunk_of_every_row() -> None:
    outputs, expected = read_on_two_ranks(lambda x: x.flatten(0, 1), 20)
    whole = torch.cat([output.view(2, 10, WIDTH) for output in outputs], dim=1).flatten(0, 1)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def read_on_two_ranks(read: Callable[[Tensor], Tensor], length: int) -> tuple[list[Tensor], Tensor]:
    """What each rank returns of `Returns(read)`, and what one device does."""
    model, ids = Returns(read), torch.randint(7, (2, length))
    found = on_ranks(*captured(model, {"ids": ids}), 2).run.outputs
    return [output for _, output in found], model(ids)[1].detach()
