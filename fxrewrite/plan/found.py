"""Matches as data: found now, looked at, filtered or stored as JSON, and committed later."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field
from torch import fx

from fxrewrite.match.match import Match
from fxrewrite.rule import Rule


class FoundMatch(BaseModel):
    """One place where a rule matches, by the names of its nodes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str = Field(description="id of the rule")
    body: str = Field(default="", description="path of the graph module within the graph; empty for the graph itself")
    outputs: list[str] = Field(description="names of the nodes that would be replaced")
    nodes: list[str] = Field(description="names of all matched nodes, outputs first")
    captures: dict[str, str] = Field(description="what was captured, as text")
    source: str = Field(default="", description='source line of the first output, "model.py:41"')

    def __str__(self) -> str:
        captured = ", ".join(f"{name}={value}" for name, value in self.captures.items())
        where = f" ({self.source})" if self.source else ""
        return f"{self.rule} at {', '.join(f'%{name}' for name in self.outputs)}{where}: {captured}"


class Found(BaseModel):
    """What `plan.find` saw, for `plan.commit`; leave out of `matches` what is not to be rewritten."""

    model_config = ConfigDict(extra="forbid")

    graph: str = Field(description="digest of the graph in which the matches were found, and of its names")
    matches: list[FoundMatch] = Field(default_factory=list[FoundMatch], description="in the order of the plan")

    def __str__(self) -> str:
        return "\n".join([f"{len(self.matches)} matches", *map(str, self.matches)])

    def __iter__(self) -> Iterator[FoundMatch]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.matches)

    def __len__(self) -> int:
        return len(self.matches)


def describe(rule: Rule, match: Match, body: str, source: str) -> FoundMatch:
    """A match as data."""
    return FoundMatch(
        rule=rule.id,
        body=body,
        outputs=[node.name for node in match.outputs],
        nodes=[node.name for node in match.nodes],
        captures={name: _text(value) for name, value in match.captures.items() if name != "root"},
        source=source,
    )


def _text(value: object) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)
