"""A plan that begins in the middle: the facts that earlier steps would have found."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from fxrewrite import Edit, Property, Report
from fxrewrite.graph import Fact


class Known:
    """The step that writes down one fact of some nodes, and says that it gives these properties."""

    def __init__(self, fact: Fact[Any], values: Mapping[fx.Node, Any], *gives: Property) -> None:
        self.gives = gives
        self.name, self.fact, self.values = f"known_{fact.name}", fact, values

    def run(self, edit: Edit, context: object, report: Report) -> int:
        for node, value in self.values.items():
            edit.set_fact(node, self.fact, value)
        return 0

    def text(self) -> str:
        return f"{self.fact.name} of {len(self.values)} nodes"
