"""The facade is complete and free of torch, and the wheel holds what a user outside the checkout needs."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RULE_SETS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["fxrewrite.rules"]


def test_make_runs_tests_that_exist() -> None:
    named = set(re.findall(r"tests/[\w/]+(?:\.py)?", (ROOT / "Makefile").read_text()))
    assert not [path for path in named if not (ROOT / path).exists()]


def run_python(program: str, *, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["fxrewrite", "fxrewrite.errors", "fxrewrite.testing.pytest_plugin"])
def test_importing_does_not_import_torch(module: str, tmp_path: Path) -> None:
    assert run_python(f"import sys, {module}; print('torch' in sys.modules)", cwd=tmp_path) == "False"


@pytest.mark.parametrize("package", ["fxrewrite", "fxrewrite.backends", "fxrewrite.testing", "autosp_rules"])
def test_a_lazy_package_has_what_type_checkers_see(package: str) -> None:
    module = importlib.import_module(package)
    (block,) = (node for node in ast.parse(Path(str(module.__file__)).read_text()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert imports == block.body
    names = {alias.name: node.module for node in imports for alias in node.names}
    assert module.__all__ == sorted(names)
    assert set(names) <= set(dir(module))
    for name, home in names.items():
        assert getattr(module, name) is getattr(importlib.import_module(str(home)), name)


def test_a_name_wins_over_a_module_of_that_name(tmp_path: Path) -> None:
    program = (
        "import fxrewrite.testing.fake_mesh\n"
        "from fxrewrite.testing import fake_mesh\n"
        "from fxrewrite.testing.fake_mesh import fake_mesh as original\n"
        "print(fake_mesh is original)"
    )
    assert run_python(program, cwd=tmp_path) == "True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fxrewrite' has no attribute 'rewriter'"):
        getattr(importlib.import_module("fxrewrite"), "rewriter")  # noqa: B009  # a plain access would be a type error


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    done = subprocess.run([*pip, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_and_the_type_marker(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for package in ("fxrewrite", "rules", "autosp_rules") for path in (ROOT / package).rglob("*.*")]
    assert packed == {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    assert "fxrewrite/py.typed" in packed


def test_the_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True)
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from importlib.metadata import distribution\n"
        "entries = distribution('fxrewrite').entry_points\n"
        "loaded = [entry.load() for entry in entries]\n"
        f"assert all(sys.modules[entry.module].__file__.startswith({str(site)!r}) for entry in entries)\n"
        "print(sorted(entry.group + ':' + entry.name for entry in entries))"
    )
    assert run_python(program, cwd=tmp_path) == str(
        [
            "console_scripts:autosp",
            "console_scripts:fxrewrite",
            "fxrewrite.layouts:aten",
            "fxrewrite.layouts:vocabulary",
            *(f"fxrewrite.rules:{name}" for name in sorted(RULE_SETS)),
            "pytest11:fxrewrite",
            "torch_dynamo_backends:autosp",
        ]
    )
