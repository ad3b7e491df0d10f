"""One model for each mechanism that the zoo needs, the table, and the zoo's own honesty; `make zoo` runs them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxrewrite.testing import RankRun, run_on_ranks
from tests.autosp.one_device import captured
from tests.zoo.diffusion import sent_by_hand
from tests.zoo.measure import Cell, NotApplicable, OneDevice, compare, measure, on_one_device
from tests.zoo.mesh import compare_on_mesh
from tests.zoo.models import names
from tests.zoo.table import diffusion_markdown, markdown, mesh_markdown, read

MODELS = {
    "BloomForCausalLM": "eager",  # a custom backward, alibi
    "DeepseekV3ForCausalLM": "sdpa",  # low-rank attention, in-place routing, experts
    "Gemma2ForCausalLM": "eager",  # soft-capped scores
    "GptOssForCausalLM": "eager",  # attention sinks, experts
    "Mamba2ForCausalLM": "eager",  # convolution and chunked scan
    "Qwen3NextForCausalLM": "sdpa",  # gated delta net
    "RwkvForCausalLM": "eager",  # a recurrence, time step by time step
}


@pytest.mark.filterwarnings("ignore")  # models warn of what they like
@pytest.mark.parametrize(("name", "attention"), MODELS.items())
@pytest.mark.some(2)
def test_a_model_equals_one_device(name: str, attention: str) -> None:
    (cell,) = measure(name, attention, ranks=(2,))
    assert cell.status == "exact", str(cell)
    assert cell.sharded


def test_every_architecture_has_its_name_once() -> None:
    found = names()
    assert len(found) == len(set(found)) > 150
    assert "LlamaForCausalLM" in found


def _one_device(wrong: float = 1.0) -> OneDevice:
    """mean(embedding(ids)^2) on one device, its gradient off by a factor."""
    weight = torch.nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
    ids = torch.arange(16).reshape(2, 8) % 8

    def model(ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, weight).square().mean()

    gm, inputs = captured(model, {"ids": ids})
    loss = model(ids)
    loss.backward()
    assert weight.grad is not None
    return OneDevice(gm, inputs, loss.detach(), {id(weight): weight.grad * wrong}, {id(weight): "weight"})


def test_a_gradient_that_differs_is_wrong() -> None:
    assert compare(_one_device(), 2)["status"] == "exact"
    found = compare(_one_device(wrong=1 + 1e-8), 2)
    assert (found["status"], found["worst"]) == ("wrong", "weight")


def test_a_gradient_of_one_rank_that_differs_is_wrong_on_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    one_device = replace(_one_device(), model=torch.nn.Module())
    found = compare_on_mesh("", one_device, {"sp": 2})
    assert (found["status"], found["num_ranks"], found["held"]) == ("exact", 2, {"sp": 0.0})

    def one_rank_off(*args: Any, **kwargs: Any) -> RankRun:
        run = run_on_ranks(*args, **kwargs)
        run.grads[1] = [None if grad is None else grad * (1 + 1e-8) for grad in run.grads[1]]
        return run

    monkeypatch.setattr("tests.zoo.mesh.run_on_ranks", one_rank_off)
    found = compare_on_mesh("", one_device, {"sp": 2})
    assert (found["status"], found["worst"]) == ("wrong", "weight")


def test_what_does_not_build_is_not_applicable() -> None:
    with pytest.raises(NotApplicable, match=r"does not build: ValueError: transformers .* has no NoneForCausalLM"):
        on_one_device("NoneForCausalLM", "sdpa")


def test_the_table_of_a_mesh_says_what_was_not_run() -> None:
    held, sent = {"dp": 0.99, "sp": 0.0}, {"dp": 12, "sp": 3}
    cells = [
        Cell(model="A", attention="sdpa", num_ranks=4, status="exact", over="dp=2,sp=2", held=held, sent=sent),
        Cell(model="B", attention="sdpa", num_ranks=0, status="refused", why="no"),
    ]
    text = mesh_markdown(cells, ["C"])
    assert "| dp=2,sp=2 | exact | 1 |" in text
    assert "| A | sdpa | exact 0e+00 0e+00 | 99% / - | 12 / 3 / - |  |" in text
    assert "| B | sdpa | refused: no | | | |" in text
    assert "Not run: C." in text


def test_the_table_counts_models_by_their_best_attention(tmp_path: Path) -> None:
    line = "gathered: %sort_1 model.py:7: aten::sort: its index r1 must be whole (4,096 bytes whole on each rank)"
    cells = [
        Cell(model="A", attention="sdpa", num_ranks=2, status="exact", lines=[line, line], grad_error=3e-16),
        Cell(model="A", attention="sdpa", num_ranks=4, status="exact", grad_error=3e-16),
        Cell(model="A", attention="eager", num_ranks=2, status="refused", why="no"),
        Cell(model="B", attention="sdpa", num_ranks=2, status="exact"),
        Cell(model="B", attention="sdpa", num_ranks=4, status="wrong", grad_error=0.1),
    ]
    path = tmp_path / "zoo.jsonl"
    path.write_text("".join(cell.model_dump_json() + "\n" for cell in reversed(cells)))
    text = markdown(read(path))
    assert "| exact at every P | 1 |" in text
    assert "| wrong or failed | 1 |" in text
    assert "| A | sdpa | exact 0e+00 3e-16 | 2 sort 8,192 |" in text
    assert "| B | sdpa | exact 0e+00 0e+00 / wrong 0e+00 1e-01 |  |" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "MochiTransformer3DModel"])
def test_a_diffusion_transformer_equals_one_device(name: str) -> None:
    pytest.importorskip("diffusers")
    (cell,) = measure(name, "sdpa", ranks=(2,))
    assert cell.status == "exact", str(cell)
    assert cell.whole < 0.05


def test_the_table_of_diffusion_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.zoo.table.importlib.metadata.version", "{} 1.0".format)
    sent: dict[str, Any] = {"whole": 0.016, "forward_bytes": 1100, "bytes_by_hand": 1000}
    cells = [
        Cell(model="A", attention="sdpa", num_ranks=4, status="exact", **sent),
        Cell(model="A", attention="sdpa", num_ranks=2, status="exact"),
        Cell(model="B", attention="sdpa", num_ranks=2, status="refused", why="no"),
    ]
    text = diffusion_markdown(cells)
    assert "| exact at every P | 1 |" in text
    assert "| A | exact 0e+00 0e+00 | 1.6% | 1,100, 1,000 |  |" in text
    assert "| B | refused: no | | | |" in text


def test_ulysses_by_hand_sends_each_attention_of_a_sequence_four_times() -> None:
    def model(x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(attend(x, x, x), text, text).mean()

    gm, _ = captured(model, {"x": torch.zeros(2, 4, 16, 8), "text": torch.zeros(2, 4, 6, 8)})
    assert sent_by_hand(gm, 4) == 4 * (2 * 4 * 16 * 8 * 4) // 4 * 3 // 4
