"""What the compiled model returns: whole or in chunks, in evaluation too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosp_rules import AutoSPConfig, AutoSPReport
from autosp_rules.transform import transform
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh, run_on_ranks
from tests.autosp.models import batch, build


def run(inputs: dict[str, Any], **options: Any) -> tuple[list[Any], Any, AutoSPReport]:
    """Each rank's outputs, the single-device outputs, and the report, of a Llama in evaluation."""
    model = build("llama_gqa").eval()
    found: list[Any] = []

    def keep(gm: Any, example_inputs: list[Any]) -> Any:
        found.extend((gm, list(example_inputs)))
        return gm

    with torch.no_grad():
        expected = torch.compile(model, backend=keep, fullgraph=True)(**inputs)
        with fake_mesh((2,), ("sp",)) as mesh:
            program, report = transform(found[0], AutoSPConfig(**options), axis_of(mesh, "sp"))
            ranks = run_on_ranks(program, found[1], 2)
    return ranks.outputs, expected, report


def test_logits_are_whole_without_a_loss() -> None:
    outputs, expected, _ = run({"input_ids": batch("llama_gqa", "plain")["input_ids"]})
    for (logits,) in outputs:
        torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-12)


def test_logits_are_chunks_beside_a_loss_and_the_report_says_so() -> None:
    outputs, expected, report = run(batch("llama_gqa", "plain"))
    whole = torch.cat([logits for _, logits in outputs], dim=1)
    torch.testing.assert_close(whole, expected.logits, rtol=1e-12, atol=1e-12)
    assert any("returns as this rank's chunk S(1); outputs='gather' returns it whole" in line for line in report.lines)


@pytest.mark.parametrize(("outputs", "length"), [("gather", 16), ("shard", 8)])
def test_the_option_decides(outputs: str, length: int) -> None:
    found, expected, _ = run(batch("llama_gqa", "plain"), outputs=outputs)
    for loss, logits in found:
        assert logits.shape[1] == length
        torch.testing.assert_close(loss, expected.loss)


def test_nothing_goes_backward_in_evaluation() -> None:
    _, _, report = run(batch("llama_gqa", "plain"))
    assert {collective.direction for collective in report.collectives} == {"forward"}


def test_bytes_sent_are_those_of_the_formula() -> None:
    """Two layers of q and o with 4 heads, k and v with 2, of 8 float64 each, for 2 x 8 tokens a rank; half travels."""
    _, _, report = run(batch("llama_gqa", "plain"), attention="ulysses")
    (all_to_all,) = [c for c in report.collectives if c.kind == "all_to_all"]
    assert all_to_all.count == 4
    assert all_to_all.bytes_sent == 2 * (2 * 4 + 2 * 2) * (2 * 8) * 8 * 8 // 2
