"""Every program of docs/examples runs, as a reader would run it."""

import itertools
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
ON_RANKS = EXAMPLES / "parallelisms.py"
PLANS = [
    ["hsdp", "context", "experts"],
    ["replicas", "zero2", "zero3", "tensor", "sequence_tensor"],
    ["tensor_sequence", "transformers", "sequence", "sequence_zero3", "experts_alone"],
]


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("path", sorted({*EXAMPLES.glob("*.py")} - {ON_RANKS}), ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path) -> None:
    assert run(str(path), cwd=tmp_path)


@pytest.mark.gloo
@pytest.mark.parametrize("names", PLANS, ids=" ".join)
@pytest.mark.some(1)
def test_each_parallelism_trains(names: list[str], tmp_path: Path) -> None:
    said = run("-m", "torch.distributed.run", "--nproc-per-node", "4", str(ON_RANKS), *names, cwd=tmp_path)
    assert [line.split()[0] for line in said.splitlines()] == names


def test_no_parallelism_of_the_example_is_left_out() -> None:
    assert sorted(itertools.chain(*PLANS)) == sorted(runpy.run_path(str(ON_RANKS))["PLANS"])
