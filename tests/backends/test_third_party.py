"""A rule plan and AutoSP inside torch.compile backends that others wrote; `make third-party` installs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("third_party.py")
MODULES = {"openvino": "openvino", "iree": "iree.turbine", "tvm": "tvm"}


def is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return find_spec(package) is not None and find_spec(module) is not None


def needs(name: str, *marks: Any) -> Any:
    reason = f"{name} is not installed: make third-party"
    return pytest.param(name, marks=[pytest.mark.skipif(not is_installed(MODULES[name]), reason=reason), *marks])


def run(command: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    return done.stderr[-4000:]


@pytest.mark.parametrize("name", [needs("openvino"), needs("iree", pytest.mark.slow), needs("tvm")])
def test_a_rule_plan_changes_nothing_but_rounding(name: str, tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    said = run([sys.executable, str(WORKER), "plan", name, str(target)])
    assert target.exists(), said
    results = json.loads(target.read_text())
    for way in ("inference",) if name == "tvm" else ("inference", "training"):
        assert "error" not in results[way], results[way]["trace"]
        assert results[way]["without"] <= 1e-6, results
        assert results[way]["with"] <= 1e-6, results
        assert all(results[way]["ran"]), f"a part fell back to torch: {results}"
        assert bool(results[way]["ran"]) == (name == "openvino")  # else nothing was looked at


@pytest.mark.skipif(not is_installed(MODULES["tvm"]), reason="tvm is not installed: make third-party")
def test_tvm_has_no_gradients(tmp_path: Path) -> None:
    """Not a wish: when this fails, docs/backends.md may say that TVM trains."""
    target = tmp_path / "results.json"
    run([sys.executable, str(WORKER), "plan", "tvm", str(target)])
    assert "does not require grad" in json.loads(target.read_text())["training"]["error"]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", [needs("openvino"), needs("iree")])
def test_autosp_on_two_ranks_is_exact(name: str, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    said = run([*launcher, str(WORKER), "autosp", name, str(tmp_path)])
    files = sorted(tmp_path.glob("rank*.json"))
    assert len(files) == 2, said
    for file in files:
        results = json.loads(file.read_text())
        for way in ("inference", "training"):
            assert "error" not in results[way], results[way]["trace"]
            assert all(results[way]["ran"]), f"a part fell back to torch: {results}"
            assert bool(results[way]["ran"]) == (name == "openvino")
            assert results[way]["loss"] <= 1e-6, results
            assert results[way]["logits"] <= 1e-6, results
        assert results["training"]["grad"] <= 2e-6, results  # all float32
