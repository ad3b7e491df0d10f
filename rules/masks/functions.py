"""A mask as a function of one entry: a subgraph for higher-order operators, which indexes the mask's leaves.

    bitwise_and(le(x0, x1), x2)   ->   def mask_mod(b, h, q_idx, kv_idx, x0, x1, x2):
                                           return (x0[kv_idx] <= x1[q_idx]) & x2[b, kv_idx]

Shapes: leaves of the mask are [B or 1, H or 1, L or 1, S or 1], or the last of these dimensions. The subgraph reads
them without dimensions of size 1; its index arguments and its result are 0-dim.
Numerics: exact; an entry is computed by the operators that compute the whole mask.

>>> from rules.masks.expressions import parse_mask
>>> body = mask_body(parse_mask("le(x0, x1)"), [("kv_idx",), ("q_idx",)], torch.device("cpu"))
>>> b, h, row, column = torch.tensor([0, 0, 1, 2])
>>> body(b, h, row, column, torch.arange(6), torch.arange(6))
tensor(False)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite.spmd import is_same_size
from rules.masks.expressions import POINTWISE, MaskExpression, Term, evaluate

aten = torch.ops.aten

INDICES = ("b", "h", "q_idx", "kv_idx")
"""Arguments that identify an entry of the mask, in the order of the mask's dimensions."""
Indices = tuple[str, ...]
"""Index variables of a leaf, in the order of its dimensions, without those of size 1."""


def indices_of(leaf: torch.Tensor) -> Indices:
    """Returns the index variables of the leaf's dimensions, except those of size 1."""
    names = INDICES[len(INDICES) - leaf.dim() :]
    return tuple(name for name, size in zip(names, leaf.shape, strict=True) if not is_same_size(size, 1))


def mask_body(mask: MaskExpression, indices: Sequence[Indices], device: torch.device) -> fx.GraphModule:
    """Makes the subgraph (b, h, q_idx, kv_idx, *leaves) -> the entry of the mask."""
    graph = fx.Graph()
    graph.output(_written(graph, mask.term, indices, device))
    return fx.GraphModule({}, graph)


def score_body(
    mask: MaskExpression | None, indices: Sequence[Indices], softcap: float, device: torch.device
) -> fx.GraphModule:
    """Makes the subgraph (score, b, h, q_idx, kv_idx, *leaves) -> score, bent to stay below the softcap unless that is
    0, plus the entry of the mask if there is one."""
    graph = fx.Graph()
    score = graph.placeholder("score")
    if softcap:
        bent = graph.call_function(aten.tanh.default, (graph.call_function(aten.div.Tensor, (score, softcap)),))
        score = graph.call_function(aten.mul.Tensor, (bent, softcap))
    added = _written(graph, None if mask is None else mask.term, indices, device)
    graph.output(score if mask is None else graph.call_function(aten.add.Tensor, (score, added)))
    return fx.GraphModule({}, graph)


def _written(graph: fx.Graph, term: Term, indices: Sequence[Indices], device: torch.device) -> Any:
    """Adds the placeholders of indices and leaves to a subgraph, then a term, which it returns."""
    given = {name: graph.placeholder(name) for name in INDICES}
    leaves = [graph.placeholder(f"x{i}") for i in range(len(indices))]
    entries = [
        graph.call_function(aten.index.Tensor, (leaf, [given[name] for name in names])) if names else leaf
        for leaf, names in zip(leaves, indices, strict=True)
    ]

    def call(name: str, *args: Any) -> fx.Node:
        if name == "to":
            return graph.call_function(aten.to.dtype, args)
        if name == "full":
            number, dtype = args
            return graph.call_function(aten.full.default, ([], number), {"dtype": dtype, "device": device})
        return graph.call_function(POINTWISE[name], args)

    return evaluate(term, entries, call, {})
