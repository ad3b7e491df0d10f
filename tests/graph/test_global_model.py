"""Modules have their own names where the model is a global, and where it looks its parts up by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxrewrite.graph import input_name, module_names
from fxrewrite.graph.inputs import is_buffer
from tests.autosp.one_device import captured


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * self.scale


MODEL = Scaled()


def test_names_of_a_global_model() -> None:
    gm, _ = captured(lambda x: MODEL(x), {"x": torch.ones(2, 2)})
    placeholders = gm.graph.find_nodes(op="placeholder")
    names = {input_name(node): is_buffer(node) for node in placeholders}
    assert names == {"x": False, "layers.0.weight": False, "layers.0.bias": False, "scale": True}
    of_calls = [list(module_names(node)) for node in gm.graph.nodes if node.op == "call_function"]
    assert of_calls[0] == ["", "layers.0"]
    assert of_calls[-1] == [""]


class Adapted(nn.Module):
    """Gives what it lacks as the module inside has it, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Scaled()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


def test_names_in_a_module_that_looks_its_parts_up() -> None:
    gm, _ = captured(Adapted(), {"x": torch.ones(2, 2)})
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    assert list(module_names(first)) == ["base", "base.layers.0"]
