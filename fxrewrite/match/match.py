"""A match: where a pattern was found, and what it captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxrewrite.errors import RefusedError, RuleDefinitionError, did_you_mean

__all__ = ["Match"]


def _not_replacing(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "match.call and match.once create nodes of a replacement; outside a replacement they have no place in a graph"
    )


@dataclass(slots=True, eq=False)
class Match:
    """One place where a pattern holds. The engine sets `context`, `call`, `proxy` and `edit`; nobody else may write.

    Attributes:
        outputs: the nodes that the replacement replaces, in the order of the pattern's outputs.
        nodes: all matched nodes: the outputs, then inner nodes, users before what they use.
        missing: places of the pattern's outputs that nothing in the graph reads, so that they have no node.
        kept: inner nodes that stay because they have users outside the match.
        captures: name -> node or Python value; None for a name of an alternative that was not taken.
        refused: the refusal that a constraint raised; such a match is counted, and not rewritten.
        context: the argument of `plan.apply(gm, context=...)`.
        call: in a replacement, `match.call(target, *args, **kwargs)` makes a node that calls any callable,
            and returns its proxy; a module becomes an attribute of the graph's module.
        proxy: in a replacement, returns the proxy of any node of the graph.
        read: in a replacement, returns the proxy of a tensor that the graph's module has, by its path.
        once: in a replacement, `match.once(function, *args, name="", **kwargs)` computes tensors now, of tensors that
            the graph's module holds; they become buffers, of which proxies are returned.
        edit: in a replacement, the transaction that it belongs to.
    """

    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    kept: frozenset[fx.Node]
    captures: Mapping[str, Any]
    refused: RefusedError | None = None
    missing: tuple[int, ...] = ()
    context: Any = None
    call: Callable[..., Any] = field(default=_not_replacing, repr=False)
    proxy: Callable[[fx.Node], Any] = field(default=_not_replacing, repr=False)
    read: Callable[[str], Any] = field(default=_not_replacing, repr=False)
    once: Callable[..., Any] = field(default=_not_replacing, repr=False)
    edit: Any = field(default=None, repr=False)

    def module(self, node: fx.Node) -> torch.nn.Module:
        """Returns the submodule that a matched node calls."""
        owner = node.graph.owning_module
        assert owner is not None
        return owner.get_submodule(str(node.target))

    @property
    def root(self) -> fx.Node:
        """The first output."""
        return self.outputs[0]

    def __getitem__(self, name: str) -> Any:
        """Returns what was captured under the name: an `fx.Node` or a Python value.

        Raises:
            RuleDefinitionError: the pattern has no capture of that name.
        """
        if name not in self.captures:
            near = did_you_mean(name, self.captures) or f"; it captures {', '.join(self.captures)}"
            raise RuleDefinitionError(f"match[{name!r}]: the pattern captures nothing of that name{near}")
        return self.captures[name]
