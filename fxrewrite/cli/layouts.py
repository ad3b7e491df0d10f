"""`fxrewrite spmd`: find out the layout rule of an operator, and print the rules that there are."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from fxrewrite.cli.commands import Answer, Say, UsageError
from fxrewrite.registry import RegistryError, find_object
from fxrewrite.spmd import (
    LayoutRules,
    compare,
    discover as discover_rule,
    joined_layouts,
    layout_table,
    parse_call,
    with_table,
)
from fxrewrite.spmd.layouts.registered import LAYOUT_GROUP


def discover(arguments: Namespace, say: Say) -> Answer:
    """Run an operator on slices and propose its rule; status 1 if a rule that is there lets too much be sharded."""
    target, rules = _operator(arguments.operator), _layouts(arguments.layouts)
    args, kwargs = parse_call(arguments.args) if arguments.args is not None else (None, None)
    found = discover_rule(target, args, kwargs)
    say(str(found))
    known = compare(found, rules)
    say("  its operator has no registered rule" if known is None else f"  {known}")
    data = {
        "operator": arguments.operator,
        "notation": found.notation,
        "indices": [
            {"kind": i.kind, "operands": sorted(i.operands), "results": sorted(i.results), "why": i.why}
            for i in found.indices
        ],
        "notes": list(found.notes),
        "registered": None
        if known is None
        else {"rule": known.rule, "wrong": known.wrong, "stricter": known.stricter, "unknown": known.unknown},
    }
    return Answer(data, 1 if known is not None and known.wrong else 0)


def table(arguments: Namespace, say: Say) -> Answer:
    """The rules as a Markdown table; with a document, the table in it is replaced."""
    rules = _layouts(arguments.layouts)
    if arguments.update:
        path: Path = arguments.update
        path.write_text(with_table(path.read_text(encoding="utf-8"), rules), encoding="utf-8")
        say(f"wrote {path}")
    else:
        say(layout_table(rules))
    return Answer([{"id": rule.id, "says": rule.says(), "operators": sorted(rule.ops)} for rule in rules])


def _operator(name: str) -> Any:
    """`linear`, `aten::linear.default`, `torch.ops.mine.op`, or package.module:OBJECT, which imports it."""
    is_object = ":" in name.replace("::", "")
    found = find_object(name) if is_object else _registered_operator(name)
    found = getattr(found, "_opoverload", found)  # what torch.library.custom_op makes
    if not isinstance(found, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        raise UsageError(
            f"{name} is not an operator of torch; write linear, aten::linear, aten::sum.dim_IntList, mine::op, or "
            "package.module:OBJECT for one that an import defines"
        )
    return found


def _registered_operator(name: str) -> Any:
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    if not hasattr(torch.ops, parts[0]) or len(parts) == 1:
        parts = ["aten", *parts]
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    return found


def _layouts(path: str | None) -> LayoutRules:
    """The rules that a path names, or else those of all installed packages.

    Raises:
        RegistryError: something else is there, or importing it raised.
    """
    if path is None:
        rules = joined_layouts(())
        if not rules:
            raise RegistryError(f"no installed package ships layout rules ({LAYOUT_GROUP}); name them with --layouts")
        return rules
    found = find_object(path)
    if not isinstance(found, LayoutRules):
        raise RegistryError(f"{path} is of type {type(found).__name__}; expected LayoutRules")
    return found
