"""The frameworks, imported when they are used; a missing one is one sentence."""

from __future__ import annotations

import importlib
from types import ModuleType

from autosp_rules.errors import AutoSPError


def load(name: str) -> ModuleType:
    """The module `name`, or AutoSPError that says how its package is installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        raise AutoSPError.of(
            f"the package {package} is not installed", hint="pip install 'fxrewrite[trainers]', or the package alone"
        ) from error
