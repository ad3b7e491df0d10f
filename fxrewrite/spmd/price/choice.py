"""Of several ways to do something, the one with the least price that is possible, and the words that say so.

    chosen = choose("the head", {"rows": Price(...), "whole": "5 rows do not divide over tp=2"})
    chosen.way, str(chosen)

Whoever has ways to choose from prices each of them, or says why it is impossible; all choices are made here. A choice
follows from the prices alone, so ranks that price alike choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from fxrewrite.errors import FxRewriteError
from fxrewrite.report import Event
from fxrewrite.spmd.price.price import Price


class Chosen(Event, frozen=True):
    """Of several ways one is chosen: the possible one with the least price, of equals the first."""

    kind: Literal["chosen"] = "chosen"
    of: str = Field(description="what there are several ways for")
    way: str = Field(description="the chosen one")
    ways: dict[str, Price | str] = Field(description="the price of each, or why it is impossible")

    @property
    def prices(self) -> dict[str, Price]:
        """Of each way that is possible."""
        return {name: found for name, found in self.ways.items() if isinstance(found, Price)}

    @property
    def impossible(self) -> dict[str, str]:
        """Of each other way, why it is not."""
        return {name: found for name, found in self.ways.items() if isinstance(found, str)}

    @property
    def price(self) -> Price:
        """Of the chosen way."""
        return self.prices[self.way]

    @property
    def others(self) -> str:
        """What the other ways would cost, or why they are impossible."""
        said = {name: way if isinstance(way, str) else way.compared_with(self.price) for name, way in self.ways.items()}
        return "; ".join(f"{name}: {found}" for name, found in said.items() if name != self.way)

    def __str__(self) -> str:
        return f"chosen: {self.of}: {self.way}, which {self.price} ({self.others})"


def choose(of: str, ways: Mapping[str, Price | str]) -> Chosen:
    """The choice among ways, of which each has a price, or a reason for which it is impossible.

    Raises:
        FxRewriteError: no way is possible; says why, of each.
    """
    prices = {name: found for name, found in ways.items() if isinstance(found, Price)}
    if not prices:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in ways.items())
        raise FxRewriteError(f"{of}: no way is possible; state one that is:{reasons}")
    way = min(prices, key=lambda name: prices[name].total)
    return Chosen(of=of, way=way, ways=dict(ways))
