"""Copies a graph module, so that the copy can be rewritten and the original stays."""

from __future__ import annotations

import copy
from collections.abc import Collection

from torch import fx

from fxrewrite.graph.bodies import bodies

__all__ = ["copy_module"]


def copy_module(gm: fx.GraphModule, erased: Collection[fx.Node] = ()) -> fx.GraphModule:
    """Returns a module with a copy of the graph and of all subgraphs of higher-order operators.

    Nodes keep their names; those that are `erased`, which nothing reads, are left out. Metadata is copied one level
    deep; parameters, buffers and fake values are shared.
    """
    graph = copy.deepcopy(gm.graph)
    for old, node in list(zip(gm.graph.nodes, graph.nodes, strict=True)):
        node.name = old.name  # FX renames a copy that is named like a builtin; torch.export has inputs named `input`
        if old in erased:
            graph.erase_node(node)
    new = fx.GraphModule(gm, graph, type(gm).__name__)
    new.meta = dict(gm.meta)
    new.train(gm.training)
    for path, body in bodies(gm):
        parent, _, name = path.rpartition(".")
        setattr(new.get_submodule(parent), name, copy_module(body, erased))
    return new
