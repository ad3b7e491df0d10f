"""The scripts of docs/examples/trainers on real processes, against one device; `make trainers` has the packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "examples" / "trainers"
FLOAT64, FLOAT32 = 1e-12, 2e-4
"""Largest difference of a parameter, over how far that parameter moved."""
# A model of transformers computes its loss in float32, also of float64 parameters.
LOSS = 1e-6

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.xdist_group("gloo")]


def needs(*packages: str, how: str = "`make trainers` makes an environment that has them") -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; {how}")


def run(case: str, num_ranks: int, folder: Path, **settings: str) -> list[dict[str, Any]]:
    """What each rank has found."""
    folder = folder / f"{case}-{num_ranks}"
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **settings,
    }
    done = subprocess.run(
        [*launcher, str(Path(__file__).with_name("worker.py")), case, str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]
    for found in results:
        sharded = found.pop("sharded")
        assert all(sharded), "a model ran whole on every rank"
        assert bool(sharded) == (num_ranks > 1)
    return results


def difference(found: dict[str, Any], expected: dict[str, Any], name: str) -> float:
    """Largest difference of a parameter, over how far it moved on one device; 0 moved is an error."""
    assert found[name].keys() == expected[name].keys()
    moved = {key: (value - expected["before"][key]).abs().max() for key, value in expected[name].items()}
    assert min(moved.values()) > 0, "a parameter did not move"
    return max(((found[name][key] - value).abs().max() / moved[key]).item() for key, value in expected[name].items())


def assert_equal(
    found: list[dict[str, Any]],
    expected: dict[str, Any],
    *,
    weights: tuple[str, ...] = ("after",),
    bar: float = FLOAT64,
) -> None:
    """Weights within the bar, everything else that is no weights equal, on every rank."""
    for rank, results in enumerate(found):
        for name in weights:
            assert difference(results, expected, name) <= bar, (rank, name)
        for name in expected.keys() - {"before", *weights}:
            torch.testing.assert_close(
                results[name], expected[name], rtol=LOSS, atol=LOSS, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_transformers_trainer(tmp_path: Path) -> None:
    """A mesh of 2 x 2, its own sampler, a padding collator, accumulation, clipping, metrics, resuming, generation."""
    needs("accelerate")
    (expected,) = run("hf_trainer", 1, tmp_path)
    found = run("hf_trainer", 4, tmp_path)
    assert expected["predictions"].shape == (6, 16, 61)  # each sample once
    assert_equal(found, expected, weights=("after", "resumed", "saved"))


def test_accelerate(tmp_path: Path) -> None:
    """Loaders that are prepared, accumulation, clipping, a schedule; metrics see each sample once."""
    needs("accelerate")
    (expected,) = run("accelerate_loop", 1, tmp_path)
    assert expected["labels"].shape == (7, 16)
    assert_equal(run("accelerate_loop", 4, tmp_path), expected)


def test_accelerate_with_fsdp2(tmp_path: Path) -> None:
    needs("accelerate")
    (expected,) = run("accelerate_fsdp", 1, tmp_path)
    assert_equal(run("accelerate_fsdp", 4, tmp_path), expected)


def test_trl_sft(tmp_path: Path) -> None:
    """As it is: its loss is computed outside of the model, in chunks and in float32; packed and padding-free rows."""
    needs("trl", "datasets")
    (expected,) = run("sft", 1, tmp_path)
    assert_equal(run("sft", 4, tmp_path), expected, weights=("packing", "padding_free"), bar=1e-6)


@pytest.mark.parametrize(("case", "num_ranks"), [("lora", 2), ("lora_on_a_mesh", 4)])
def test_peft_lora(case: str, num_ranks: int, tmp_path: Path) -> None:
    """Dropout draws what one device draws; adapters are merged, saved and loaded. On 4 ranks: a mesh of 2 x 2."""
    needs("peft", "accelerate")
    (expected,) = run(case, 1, tmp_path)
    found = run(case, num_ranks, tmp_path)
    adapted = {key for key in expected["before"] if key.split(".")[-2] in ("q_proj", "v_proj", "down_proj")}
    for results in (expected, *found):
        results |= {name: {key: results[name][key] for key in adapted} for name in ("before", "merged")}
    assert_equal(found, expected, weights=("merged",))


STAGES = ("ZeRO 0", "ZeRO 1", "ZeRO 2")


def test_deepspeed_told_of_sequence_parallelism(tmp_path: Path) -> None:
    """2 x 2 ranks; with an mpu it divides gradients by the replicas alone, with a mesh it reduces over them alone."""
    needs("deepspeed")
    (expected,) = run("deepspeed_groups", 1, tmp_path)
    assert_equal(run("deepspeed_groups", 4, tmp_path), expected, weights=("mpu", "mesh"), bar=FLOAT32)


def test_deepspeed_engine(tmp_path: Path) -> None:
    """ZeRO 0 to 2, accumulation over two batches; bf16 as near to float32 as one device's."""
    needs("deepspeed")
    (expected,) = run("deepspeed_engine", 1, tmp_path)
    found = run("deepspeed_engine", 2, tmp_path)
    alone, exact = expected.pop("bf16"), expected["ZeRO 1"]
    rounding = distance(alone, exact)
    for results in found:
        assert 0 < distance(results.pop("bf16"), exact) <= 1.25 * rounding
        assert (results.pop("bf16 losses") - expected["bf16 losses"]).abs().max() < 5e-3
    del expected["bf16 losses"]
    assert_equal(found, expected, weights=STAGES, bar=FLOAT32)


def test_deepspeed_engine_on_a_mesh(tmp_path: Path) -> None:
    """2 x 2 ranks, ZeRO 0 to 2: the average over all four is the one that AutoSP needs."""
    needs("deepspeed")
    (expected,) = run("deepspeed_on_a_mesh", 1, tmp_path)
    assert_equal(run("deepspeed_on_a_mesh", 4, tmp_path), expected, weights=STAGES, bar=FLOAT32)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum((value - other[name]).square().sum().item() for name, value in one.items()) ** 0.5


def test_deepspeed_zero_3(tmp_path: Path) -> None:
    needs("deepspeed")
    (expected,) = run("deepspeed_zero_3", 1, tmp_path)
    assert_equal(run("deepspeed_zero_3", 2, tmp_path), expected, weights=("ZeRO 3",), bar=FLOAT32)


def test_the_configuration_of_deepspeed(tmp_path: Path) -> None:
    """`compile: {deepcompile: true, passes: ["autosp"]}` with `sequence_parallel_size`, as DeepSpeed documents it."""
    needs("deepspeed")
    (expected,) = run("deepspeed_autosp", 1, tmp_path)
    assert_equal(run("deepspeed_autosp", 2, tmp_path), expected, weights=STAGES, bar=FLOAT32)


def test_transformers_trainer_with_its_deepspeed_settings(tmp_path: Path) -> None:
    """`TrainingArguments(deepspeed={...})`: share_batches reaches the loader that accelerate prepares for DeepSpeed."""
    needs("accelerate", "deepspeed")
    (expected,) = run("hf_trainer_deepspeed", 1, tmp_path)
    assert_equal(run("hf_trainer_deepspeed", 2, tmp_path), expected, bar=FLOAT32)


def test_lightning_fabric(tmp_path: Path) -> None:
    needs("lightning_fabric")
    (expected,) = run("fabric_loop", 1, tmp_path)
    assert_equal(run("fabric_loop", 4, tmp_path), expected)


def test_distributed_checkpoints_over_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Saved on 2 ranks after two steps, resumed on 3 and on 4 for three more."""
    needs("accelerate")  # not really: a minute that `make test` need not take
    shared = {"SHARED": str(tmp_path)}
    (expected,) = run("fsdp_resume", 1, tmp_path)
    run("fsdp_save", 2, tmp_path, **shared)
    for num_ranks in (3, 4):
        found = run("fsdp_resume", num_ranks, tmp_path, **shared)
        assert_equal(found, expected, bar=FLOAT64 if num_ranks == 4 else 1e-6)  # 3 do not divide 16 tokens


@pytest.mark.parametrize("case", ["torchtitan_llama", "torchtitan_qwen"])
def test_torchtitan(case: str, tmp_path: Path) -> None:
    """Its Trainer on 2 x 2 ranks: FSDP2 by block, accumulation, clipping, uneven labels, a checkpoint of one device."""
    needs("torchtitan", how="docs/trainers.md says how")
    shared = {"SHARED_FOLDER": str(tmp_path), "SHARED": "2"}
    (expected,) = run(case, 1, tmp_path, **shared)
    assert_equal(run(case, 4, tmp_path, **shared), expected, bar=1e-10)  # it computes RoPE and the loss in float32


def test_the_guide_shows_lines_of_the_scripts() -> None:
    """Blocks that need other packages are not run by tests/test_docs.py."""
    text = "".join((ROOT / "docs" / name).read_text() for name in ("trainers.md", "from-deepspeed.md"))
    blocks = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    texts = [path.read_text() for path in SCRIPTS.glob("*.py")]
    assert len(blocks) > len(texts)
    for block in blocks:
        assert any(block in text for text in texts), block


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_has_at_most_forty_lines_of_code(path: Path) -> None:
    assert sum(bool(line.strip()) for line in path.read_text().splitlines()) <= 40
