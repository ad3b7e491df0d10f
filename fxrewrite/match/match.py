"""A match: where a pattern was found and what it captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxrewrite.errors import RefusedError, RuleDefinitionError, did_you_mean

__all__ = ["Match"]


def _not_replacing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("match.call creates nodes for a replacement; outside of one there is nowhere to put them")


@dataclass(slots=True, eq=False)
class Match:
    """One place where a pattern holds; the engine fills in `context` and `call`, for everybody else it is read-only.

    Attributes:
        outputs: the nodes that the replacement replaces, in the order of the pattern's outputs.
        nodes: all matched nodes: the outputs, then inner nodes, users before what they use.
        kept: inner nodes that stay because they have users outside the match.
        captures: name -> node or Python value; None for a name of an alternative that was not taken.
        refused: what a constraint refused; the match is counted, and not rewritten.
        context: what was given to `plan.apply(gm, context=...)`.
        call: in a replacement, `match.call(target, *args, **kwargs)` makes a node that calls any callable,
            and gives its proxy.
        proxy: in a replacement, the proxy of any node of the graph.
        edit: in a replacement, the transaction that it is part of.
    """

    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    kept: frozenset[fx.Node]
    captures: Mapping[str, Any]
    refused: RefusedError | None = None
    context: Any = None
    call: Callable[..., Any] = field(default=_not_replacing, repr=False)
    proxy: Callable[[fx.Node], Any] = field(default=_not_replacing, repr=False)
    edit: Any = field(default=None, repr=False)

    @property
    def root(self) -> fx.Node:
        """The first output."""
        return self.outputs[0]

    def __getitem__(self, name: str) -> Any:
        """What was captured under the name: an `fx.Node` or a Python value.

        Raises:
            RuleDefinitionError: the pattern captures nothing of that name.
        """
        if name not in self.captures:
            near = did_you_mean(name, self.captures) or f"; it captures {', '.join(self.captures)}"
            raise RuleDefinitionError(f"match[{name!r}]: the pattern captures nothing of that name{near}")
        return self.captures[name]
