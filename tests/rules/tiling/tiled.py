"""A backend that computes in tiles, and keeps the graphs that it makes."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from fxrewrite import RuleSet, normalize
from fxrewrite.graph import size_hint


class Tiled:
    """Applies the rules to the one graph of a call, in which the first of them fires once, and runs it by AOTAutograd.

    Attributes:
        graphs: of the forward pass, and of the backward pass.
    """

    def __init__(self, rules: RuleSet, partition: Any = default_partition) -> None:
        self._rules, self._partition = rules, partition
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        gm, rule = normalize(gm), next(iter(self._rules.rules())).id
        assert self._rules.apply(gm)[rule].rewrites == 1, str(self._rules.once().explain(gm, rule))
        assert not self._rules.apply(gm).rewrites
        return aot_autograd(fw_compiler=self._keep, partition_fn=self._partition)(gm, inputs)

    def _keep(self, gm: fx.GraphModule, _: Any) -> Any:
        self.graphs.append(gm)
        return make_boxed_func(gm)

    def most_entries(self) -> int:
        """Of any value in the two graphs."""
        assert len(self.graphs) == 2
        values = [node.meta.get("val") for graph in self.graphs for node in graph.graph.nodes]
        return max(size_hint(value.numel()) for value in values if isinstance(value, torch.Tensor))
