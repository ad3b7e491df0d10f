"""Removes torch.vmap: what a Dynamo graph computes on batched values becomes operators on whole tensors.

Dynamo writes a vmap as switches around ordinary calls (`_vmap_increment_nesting`, `_add_batch_dim`, ...). functorch
itself traces the calls between an outermost pair of switches, and applies the batching rule of each operator. The
result is differentiable, so autograd still works on it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._functorch import predispatch
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from fxrewrite.errors import refuse
from fxrewrite.graph.source import CHECKPOINT_TAGS
from fxrewrite.ops import VMAP_CLOSES, VMAP_OPENS, sets_mode

_DETACHES = {"detach", torch.detach, torch.ops.aten.detach.default}
"""What Dynamo calls for a value without its gradient."""


def without_vmap(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns `gm` with each outermost vmap as one call, which a tracer sees as operators on whole tensors.

    Returns `gm` itself if it has no vmap. Raises RefusedError for a vmap whose function switches an autograd mode.
    """
    if not gm.graph.find_nodes(op="call_function", target=VMAP_OPENS):
        return gm
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inside, depth = list[fx.Node](), 0
    for node in gm.graph.nodes:
        depth += (node.target is VMAP_OPENS) - (node.target is VMAP_CLOSES)
        if depth or node.target is VMAP_CLOSES:
            inside.append(node)
            if not depth:
                _call_region(graph, gm, inside, copies)
                inside = []
        elif node.target is not predispatch.lazy_load_decompositions:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    made = fx.GraphModule(gm, graph)
    made.meta = gm.meta
    return made


def _call_region(graph: fx.Graph, gm: fx.GraphModule, nodes: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Appends one call of the nodes, as a graph of their own, to `graph`."""
    for node in nodes:
        if sets_mode(node) or isinstance(node.target, HigherOrderOperator):
            refuse(
                "a vmap whose function is not a plain composition of operators", node=node, hint="write it with loops"
            )
    within = set(nodes)
    inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in within))
    results = [node for node in nodes if any(user not in within for user in node.users)]
    body, own = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        own[node] = body.placeholder(node.name)
    for node in nodes:
        own[node] = body.node_copy(node, own.__getitem__)
    body.output(tuple(own[node] for node in results))
    call = graph.call_function(_Region(fx.GraphModule(gm, body)), tuple(copies[node] for node in inputs))
    call.meta = dict(nodes[0].meta)
    for at, node in enumerate(results):
        copies[node] = graph.call_function(operator.getitem, (call, at))
        copies[node].meta = dict(node.meta)


class _Region:
    """The calls of one vmap; calling it runs them without vmap."""

    __name__ = "vmap"

    def __init__(self, body: fx.GraphModule) -> None:
        self._body = body

    def __call__(self, *inputs: Any) -> Any:
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
            alike = [v.detach().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in inputs]
            whole = make_fx(fx.Interpreter(self._body).run, tracing_mode="symbolic")(*alike)
        if any(node.target in _DETACHES for node in self._body.graph.nodes):
            for node in whole.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
                node.target = torch.ops.aten.detach.default  # from torch 2.15 on, a tracer below autograd writes alias
        of_call = fx_traceback.get_current_meta()
        for node in whole.graph.nodes:
            node.meta.update({name: of_call[name] for name in CHECKPOINT_TAGS if name in of_call})
        return fx.Interpreter(whole).run(*inputs)
