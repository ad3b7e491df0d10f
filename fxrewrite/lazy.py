"""Packages that offer the names of their modules without importing them (PEP 562): importing torch takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["lazy_package"]


def lazy_package(package: str, homes: Mapping[str, str]) -> None:
    """Each name of `package` in `homes` is from now on imported from its module when it is first used.

    Where a module of the package has the same name (`fxrewrite.rule`), the name wins: `from fxrewrite import rule` is
    the decorator, whoever imported the module before.
    """

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

    sys.modules[package].__class__ = LazyPackage
