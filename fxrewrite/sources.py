"""Where code comes from: installed packages, known by name and version, and the user's modules, known by their source.

The packages of this toolkit count as installed, and are known by their source: a checkout has no version of its own.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).parents[1]
TOOLKIT = ("fxrewrite", "rules", "autosp_rules")
"""The packages of this toolkit."""
_KNOWN_BY_VERSION = ("torch",)
"""Packages that are installed even where they are a checkout: the version names the commit, and reading them takes
minutes."""


@functools.cache
def installed(module: str) -> str | None:
    """Returns name and version of the installed package that a module belongs to; None for a module of the user's.

    Where a package has another name than its distribution, a hash of the module stands for the version.
    """
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return package
    place = None if package == "__main__" else _place(package)
    if place is None:
        return None
    if package in TOOLKIT and place.parent == _ROOT:
        return package
    if package not in _KNOWN_BY_VERSION and not _is_in_library(place):
        return None
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        file = _file(module)
        return f"{package} {hashlib.sha256(file.read_bytes()).hexdigest()}" if file is not None else package


@functools.cache
def toolkit_digest() -> str:
    """Returns a hash of the source of this toolkit."""
    folders = [folder for name in TOOLKIT if (folder := _ROOT / name).is_dir()]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    found = hashlib.sha256()
    for file in files:
        found.update(file.relative_to(_ROOT).as_posix().encode())
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


@functools.cache
def source_digest(module: str) -> str | None:
    """Returns a hash of a module of the user's, with all modules of the user's that it imports; None without source."""
    seen, left, parts = {module}, [module], list[str]()
    while left:
        name = left.pop()
        file = _file(name)
        if file is None:
            if name == module:
                return None
            continue  # what an `import` names that is no module
        source = file.read_bytes()
        parts.append(f"{name} {hashlib.sha256(source).hexdigest()}")
        for imported in _imports(source, name, is_package=file.name == "__init__.py"):
            if imported not in seen and installed(imported) is None:
                seen.add(imported)
                left.append(imported)
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _imports(source: bytes, module: str, *, is_package: bool) -> Iterator[str]:
    """The modules that a source may import, at its top or in functions: of `from a import b`, `a` and `a.b`."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


def _file(module: str) -> Path | None:
    """The source file of a module, which is not imported for that."""
    found = getattr(sys.modules.get(module), "__file__", None)
    if found is not None:
        paths = [Path(found)]
    else:
        package, *inner = module.split(".")
        place = _place(package)
        if place is None:
            return None
        path = place.joinpath(*inner)
        paths = [path, path / "__init__.py", path.with_name(f"{path.name}.py")]
    return next((path for path in paths if path.suffix == ".py" and path.is_file()), None)


def _place(package: str) -> Path | None:
    """The file or folder of a package."""
    found = getattr(sys.modules.get(package), "__file__", None)
    if found is not None:
        path = Path(found).resolve()
        return path.parent if path.name.startswith("__init__.") else path
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = folders[0] if folders else spec.origin if spec is not None and spec.has_location else None
    return Path(found).resolve() if found else None


def _is_in_library(place: Path) -> bool:
    """Whether a package is in a folder of installed ones, of this environment or of another on the path."""
    is_of_another = not {"site-packages", "dist-packages"}.isdisjoint(place.parts)
    return is_of_another or any(place.is_relative_to(folder) for folder in _library_folders())


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    names = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib") if kind in paths}
    user = site.getusersitepackages()
    return tuple(Path(name).resolve() for name in {*names, *site.getsitepackages(), user})
