"""The step that takes out what nothing reads any more."""

from __future__ import annotations

from typing import Any

from fxrewrite.graph.edit import Edit
from fxrewrite.ops import is_pure, is_random
from fxrewrite.report import Report


class DeadCode:
    """Erases calls without users and without effects, after them what they alone read; random ones stay.

    A rule erases what it matched. What its captures were computed from, such as a mask that nothing reads after the
    rule, is for this step.
    """

    def __init__(self, name: str = "dead_code") -> None:
        self.name = name

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        before = len(edit.erased)
        for node in reversed(edit.nodes()):
            if node.op == "call_function" and not node.users and is_pure(node) and not is_random(node):
                edit.erase(node)
        return len(edit.erased) - before

    def text(self) -> str:
        return "calls without users and effects go"
