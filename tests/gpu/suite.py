"""The tests that are marked `gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree as ET

from tests.gpu.figures import Figures, Setting

_ROOT = Path(__file__).parents[2]


def figures(setting: Setting) -> Figures:
    files = sorted(path for path in (_ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    return {"tests": lambda: _run(files)}


def _run(files: Sequence[Path]) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and what those that failed say."""
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-q", "-m", "gpu", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}"]
        command += ["-n", str(max(1, min(6, (os.cpu_count() or 1) // 2)))]
        done = subprocess.run([*command, *map(str, files)], check=False, cwd=_ROOT, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"pytest exited with status {done.returncode}\n{(done.stdout + done.stderr)[-1000:]}")
        cases = list(ET.parse(report).iter("testcase"))
    bad = {case.get("name"): part for case in cases for part in case if part.tag in ("failure", "error")}
    skipped = sum(part.tag == "skipped" for case in cases for part in case)
    return {
        "passed": len(cases) - len(bad) - skipped,
        "skipped": skipped,
        "failed": {name: (part.text or "")[-1500:] for name, part in bad.items()},
        "holds": bool(cases) and not bad,
    }
