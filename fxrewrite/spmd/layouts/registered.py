"""Layout rules that installed packages ship under the entry point group `fxrewrite.layouts`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib.metadata import entry_points

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.registry import Registry, RegistryWarning
from fxrewrite.spmd.layouts.rule import LayoutRule, LayoutRules

LAYOUT_GROUP = "fxrewrite.layouts"
"""The entry point group under which packages ship layout rules."""


def registered_layouts() -> Registry[LayoutRules]:
    """The layout rules of all installed packages, by the name of their entry point."""
    return Registry(entry_points(group=LAYOUT_GROUP), LayoutRules, "layout rule set")


def joined_layouts(rules: Iterable[LayoutRule], own: Iterable[LayoutRule] = ()) -> LayoutRules:
    """These layout rules, and those that installed packages ship for other operators.

    An entry point that cannot be loaded, or that has another rule for an operator which has one already, is left out
    as a whole, with a `RegistryWarning`: no package changes how the operators of others are sharded.

    Args:
        rules: come first.
        own: of whoever asks.

    Raises:
        RuleDefinitionError: one of `own` is for an operator that has another rule, which would be left out with all
            others of its entry point.
    """
    own = tuple(own)
    joined = LayoutRules((*rules, *own))
    for name, shipped in registered_layouts().working():
        new = [rule for rule in shipped if rule not in joined.rules]
        taken = {op: (rule, before) for rule in new for op in rule.ops if (before := joined.get(op)) is not None}
        for op, (rule, before) in taken.items():
            if before in own:
                raise RuleDefinitionError(
                    f"layout rule {before.id}: {op} has one already, {rule.id} of {name!r}; leave out yours, or make "
                    "an operator of your own that calls this one"
                )
        if taken:
            clashes = ", ".join(f"{op} ({before.id})" for op, (_, before) in taken.items())
            text = f"left out: the layout rules {name!r} are for operators that have one already: {clashes}"
            warnings.warn(text, RegistryWarning, stacklevel=2)
        else:
            joined = LayoutRules((*joined, *new))
    return joined
