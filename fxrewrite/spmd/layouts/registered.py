"""Layout rules that installed packages ship under the entry point group `fxrewrite.layouts`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib.metadata import entry_points

from fxrewrite.registry import Registry, RegistryWarning
from fxrewrite.spmd.layouts.rule import LayoutRule, LayoutRules

__all__ = ["LAYOUT_GROUP", "joined_layouts", "registered_layouts"]

LAYOUT_GROUP = "fxrewrite.layouts"
"""The entry point group under which packages ship layout rules."""


def registered_layouts() -> Registry[LayoutRules]:
    """The layout rules of all installed packages, by the name of their entry point."""
    return Registry(entry_points(group=LAYOUT_GROUP), LayoutRules, "layout rule set")


def joined_layouts(rules: Iterable[LayoutRule]) -> LayoutRules:
    """These layout rules, and those that installed packages ship for other operators.

    An entry point that cannot be loaded, or that has another rule for an operator which has one already, is left out
    as a whole, with a `RegistryWarning`: no package changes how the operators of others are sharded.
    """
    joined = LayoutRules(rules)
    for name, shipped in registered_layouts().working():
        new = [rule for rule in shipped if rule not in joined.rules]
        taken = {op: joined.get(op) for rule in new for op in rule.ops}
        clashes = [f"{op} ({rule.id})" for op, rule in taken.items() if rule is not None]
        if clashes:
            text = f"left out: the layout rules {name!r} are for operators that have one already: {', '.join(clashes)}"
            warnings.warn(text, RegistryWarning, stacklevel=2)
        else:
            joined = LayoutRules((*joined, *new))
    return joined
