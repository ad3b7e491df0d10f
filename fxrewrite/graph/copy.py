"""Copies a graph module, so that the copy can be rewritten and the original stays."""

from __future__ import annotations

import copy
from collections.abc import Collection

from torch import fx

from fxrewrite.graph.bodies import body_of


def copy_module(gm: fx.GraphModule, erased: Collection[fx.Node] = ()) -> fx.GraphModule:
    """Returns a module with a copy of the graph, of graph modules that it calls, and of subgraphs of operators.

    Nodes keep their names; those that are `erased`, which nothing reads, are left out. Metadata is copied one level
    deep; parameters, buffers and fake values are shared. A subgraph under two names is one copy under both. Hooks of
    modules that the graph calls run on the copies.
    """
    return _copied(gm, erased, {})


def _copied(
    gm: fx.GraphModule, erased: Collection[fx.Node], known: dict[fx.GraphModule, fx.GraphModule]
) -> fx.GraphModule:
    graph = copy.deepcopy(gm.graph)
    for old, node in list(zip(gm.graph.nodes, graph.nodes, strict=True)):
        node.name = old.name  # FX renames a copy that is named like a builtin; torch.export has inputs named `input`
        if old in erased:
            graph.erase_node(node)
    new = fx.GraphModule(gm, graph, type(gm).__name__)
    new.meta = dict(gm.meta)
    new.training = gm.training  # of it alone: modules that it calls are shared
    for node in gm.graph.nodes:
        body = body_of(gm, node)
        if body is not None:
            if body not in known:
                known[body] = _copied(body, erased, known)
                vars(known[body]).update({name: copy.copy(v) for name, v in vars(body).items() if "hook" in name})
            parent, _, name = str(node.target).rpartition(".")
            setattr(new.get_submodule(parent), name, known[body])
    return new
