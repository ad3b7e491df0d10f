"""Real gloo processes: every model and every kind of batch at least once, over eager, aot_eager and inductor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("gloo_worker.py")


def launch(cells: list[dict[str, Any]], num_ranks: int, folder: Path) -> list[list[dict[str, Any]]]:
    """Each rank's result for each cell."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*command, str(WORKER), json.dumps(cells), str(folder)], capture_output=True, text=True, timeout=600, check=False
    )
    files = sorted(folder.glob("rank*.json"))
    assert len(files) == num_ranks, done.stderr[-4000:]
    return [json.loads(file.read_text()) for file in files]


def check(cells: list[dict[str, Any]], num_ranks: int, folder: Path) -> None:
    for rank, results in enumerate(launch(cells, num_ranks, folder)):
        for cell, result in zip(cells, results, strict=False):
            assert "error" not in result, f"rank {rank}, {cell}:\n{result['error']}"
            assert result["loss"] <= 1e-6, (cell, result)
            assert result["grad"] <= 1e-9, (cell, result)
            assert result["graphs"] == 1, f"{cell}: compiled {result['graphs']} times"
        assert len(results) == len(cells)


@pytest.mark.gloo
def test_two_ranks_eager_every_model_and_batch(tmp_path: Path) -> None:
    check(
        [
            {"model": "llama_gqa", "kind": "plain", "inner": "eager"},
            {"model": "llama_mha", "kind": "positions", "inner": "eager"},
            {"model": "qwen3", "kind": "ones_mask", "inner": "eager"},
            {"model": "mistral", "kind": "right_padding", "inner": "eager"},
            {"model": "gpt2", "kind": "uneven_labels", "inner": "eager"},
            {"model": "bert", "kind": "labels_on_one_rank", "inner": "eager"},
            {"model": "llama_gqa", "kind": "num_items", "inner": "eager", "dynamic": True, "lengths": [16, 24, 20]},
        ],
        2,
        tmp_path,
    )


@pytest.mark.gloo
def test_four_ranks_aot_eager_every_model_and_batch(tmp_path: Path) -> None:
    check(
        [
            {"model": "llama_gqa", "kind": "right_padding", "inner": "aot_eager", "checkpointing": True},
            {"model": "llama_mha", "kind": "num_items", "inner": "aot_eager"},
            {"model": "qwen3", "kind": "plain", "inner": "aot_eager", "dynamic": True, "lengths": [16, 32]},
            {"model": "mistral", "kind": "uneven_labels", "inner": "aot_eager"},
            {"model": "gpt2", "kind": "positions", "inner": "aot_eager"},
            {"model": "bert", "kind": "ones_mask", "inner": "aot_eager"},
        ],
        4,
        tmp_path,
    )


@pytest.mark.gloo
@pytest.mark.slow
def test_two_ranks_inductor_every_model(tmp_path: Path) -> None:
    check(
        [
            {"model": "llama_gqa", "kind": "right_padding", "inner": "inductor", "dynamic": True, "lengths": [16, 24]},
            {"model": "llama_mha", "kind": "uneven_labels", "inner": "inductor", "checkpointing": True},
            {"model": "qwen3", "kind": "labels_on_one_rank", "inner": "inductor"},
            {"model": "mistral", "kind": "plain", "inner": "inductor"},
            {"model": "gpt2", "kind": "ones_mask", "inner": "inductor"},
            {"model": "bert", "kind": "positions", "inner": "inductor"},
        ],
        2,
        tmp_path,
    )
