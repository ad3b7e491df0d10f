"""The layout rule of one call of an operator, and which dimensions of its operands the rule lets be sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.proxy import GraphAppendingTracer
from torch.utils import _pytree as pytree

from fxrewrite.ops import possible_keys
from fxrewrite.spmd.layouts.notation import IndexMap
from fxrewrite.spmd.layouts.rule import LayoutRule, LayoutRules
from fxrewrite.spmd.placement import Shard


def index_map_of(
    rules: LayoutRules, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[LayoutRule, IndexMap] | None:
    """The rule of a call and its indices; None where no rule speaks of it. Nothing is run but on fake tensors."""
    if not any(rules.get(key) for key in possible_keys(target)):
        return None
    _, rule, indices = rules.of(OperatorCall(target, args, kwargs or {}).traced())
    return None if rule is None or indices is None else (rule, indices)


def free_dims(
    rules: LayoutRules, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> set[tuple[int, int]] | None:
    """The (operand, dimension) pairs that the operator's rule lets be sharded; None where no rule speaks of the call.

    Nothing is run but on fake tensors. Operands are counted in schema order.
    """
    known = index_map_of(rules, target, args, kwargs)
    if known is None:
        return None
    _, indices = known
    parts = {
        (operand, dim): indices.locate(terms, Shard(dim))
        for operand, terms in enumerate(indices.operands)
        for dim in range(len(terms))
    }
    return {place for place, part in parts.items() if part is not None and part.index not in indices.whole}


class OperatorCall:
    """One call of an operator, whose tensors are the leaves of its arguments."""

    def __init__(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.target = target
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def on(self, tensors: Iterable[Any]) -> Any:
        """The operator on other tensors, real, fake or proxies."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.target(*args, **kwargs)

    def traced(self) -> fx.Node:
        """The call in a graph of its own, on fake tensors."""
        graph = fx.Graph()
        result = self.on(placeholders(graph, self.tensors))
        graph.output(result.node)
        FakeTensorProp(fx.GraphModule({}, graph)).propagate(*(tensor.detach() for tensor in self.tensors))
        return result.node


def placeholders(graph: fx.Graph, values: Sequence[object]) -> list[fx.Proxy]:
    """New inputs of the graph, one for each value."""
    tracer = GraphAppendingTracer(graph)
    return [fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(values))]
