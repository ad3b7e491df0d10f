"""A match: where a pattern was found, and what it captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxrewrite.errors import RefusedError, RuleDefinitionError, did_you_mean


@dataclass(slots=True, eq=False)
class Match:
    """One place where a pattern holds. The engine sets `context`, `edit` and `replacer`; nobody else may write.

    Attributes:
        outputs: the nodes that the replacement replaces, in the order of the pattern's outputs.
        nodes: all matched nodes: the outputs, then inner nodes, users before what they use.
        missing: places of the pattern's outputs that nothing in the graph reads, so that they have no node.
        kept: inner nodes that stay because they have users outside the match.
        unread: results of inner nodes that the graph takes and does not read; they leave with the match.
        captures: name -> node or Python value; None for a name of an alternative that was not taken.
        refused: the refusal that a constraint raised; such a match is counted, and not rewritten.
        context: the argument of `plan.apply(gm, context=...)`.
        edit: in a replacement, the transaction that it belongs to.
        replacer: while a replacement runs, what creates its nodes; `call`, `proxy`, `read` and `once` need it.
    """

    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    kept: frozenset[fx.Node]
    captures: Mapping[str, Any]
    refused: RefusedError | None = None
    missing: tuple[int, ...] = ()
    unread: tuple[fx.Node, ...] = ()
    context: Any = None
    edit: Any = field(default=None, repr=False)
    replacer: Any = field(default=None, repr=False)

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """In a replacement, makes a node that calls `target`, and returns its proxy.

        A module becomes an attribute of the graph's module.
        """
        return self._running().call(target, args, kwargs)

    def proxy(self, node: fx.Node) -> Any:
        """In a replacement, returns the proxy of any node of the graph."""
        return self._running().proxy(node)

    def read(self, path: str) -> Any:
        """In a replacement, returns the proxy of a tensor that the graph's module has, by its path."""
        return self._running().proxy(self.edit.read(path))

    def once(self, function: Callable[..., Any], /, *args: Any, name: str | Sequence[str] = "", **kwargs: Any) -> Any:
        """In a replacement, computes tensors now, of tensors that the graph's module holds.

        They become buffers, of which proxies are returned.
        """
        return self._running().once(self, function, args, kwargs, name=name)

    def _running(self) -> Any:
        if self.replacer is None:
            raise RuntimeError(
                "match.call and match.once create nodes of a replacement; outside a replacement they have no place in "
                "a graph"
            )
        return self.replacer

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
