"""What is installed, what is this toolkit, and what is the user's."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fxrewrite.sources import installed, source_digest


@pytest.mark.parametrize(
    ("module", "known"),
    [
        ("torch.nn", f"torch {version('torch')}"),
        ("functools", "functools"),
        ("builtins", "builtins"),
        ("fxrewrite.match", "fxrewrite"),
        ("rules.attention", "rules"),
        (__name__, None),
        ("__main__", None),
        ("no_such_package.part", None),
    ],
)
def test_who_a_module_belongs_to(module: str, known: str | None) -> None:
    assert installed(module) == known


def test_a_source_counts_with_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that is not imported yet, is in a package, or imports back; nothing of it is run."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "__init__.py").write_text("raise AssertionError\n")
    (tmp_path / "near" / "far.py").write_text("from . import other\nimport torch\n")
    (tmp_path / "near" / "other.py").write_text("import start, nowhere\n")
    (tmp_path / "start.py").write_text("def f():\n    from near.far import g\n    return g\n")

    def digest() -> str | None:
        source_digest.cache_clear()
        return source_digest("start")

    first = digest()
    assert first == digest() is not None
    for changed in ("near/__init__.py", "near/other.py", "start.py"):
        with (tmp_path / changed).open("a") as file:
            file.write("# changed\n")
        assert first != (first := digest())
    assert source_digest("nowhere") is None
    assert not {"near", "start"} & sys.modules.keys()


def test_packages_of_another_environment_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of PYTHONPATH or a .pth file: to read all that they import takes minutes."""
    (folder := tmp_path / "site-packages").mkdir()
    (folder / "elsewhere.py").write_text("import torch\n")
    monkeypatch.syspath_prepend(folder)
    known = installed("elsewhere")
    assert known is not None
    assert known.startswith("elsewhere ")
