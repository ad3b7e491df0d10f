"""An interpreter that knows which node it runs, for its calls and its error messages."""

from __future__ import annotations

from typing import Any

from torch import fx


class Running(fx.Interpreter):
    """Runs a graph; `current` is the node that runs."""

    current: fx.Node

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        return super().run_node(n)
