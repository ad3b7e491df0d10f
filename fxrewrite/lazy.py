"""Packages that offer the names of their modules without importing them (PEP 562): importing torch takes seconds."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_package(package: str) -> None:
    """Each name that the package imports under `if TYPE_CHECKING:` is from now on imported when it is first used.

    So type checkers and Python read one list, which is that of the package's source. Where a module of the package has
    the same name (`fxrewrite.rule`), the name wins: `from fxrewrite import rule` is the decorator, whoever imported the
    module before.
    """
    homes = _homes(package)

    class LazyPackage(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name not in homes:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            value = getattr(import_module(homes[name]), name)
            self.__dict__[name] = value
            return value

        def __setattr__(self, name: str, value: Any) -> None:
            if not (name in homes and isinstance(value, ModuleType)):  # Python binds a submodule once it is imported
                super().__setattr__(name, value)

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *homes})

    module = sys.modules[package]
    module.__class__ = LazyPackage
    module.__dict__["__all__"] = sorted(homes)


def _homes(package: str) -> dict[str, str]:
    """The module of each name that the package's source imports for type checkers alone."""
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}
