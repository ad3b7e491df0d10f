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
from fxrewrite.spmd.price import Price

__all__ = ["Chosen", "choose"]


class Chosen(Event, frozen=True):
    """Of several ways one is chosen: the possible one with the least price, of equals the first."""

    kind: Literal["chosen"] = "chosen"
    of: str = Field(description="what there are several ways for")
    way: str = Field(description="the chosen one")
    prices: dict[str, Price] = Field(description="of each way that is possible")
    impossible: dict[str, str] = Field(description="of each other way, why it is not")

    @property
    def price(self) -> Price:
        """Of the chosen way."""
        return self.prices[self.way]

    @property
    def others(self) -> str:
        """What the other ways would cost, or why they are impossible."""
        found = {name: price.beside(self.price) for name, price in self.prices.items()} | self.impossible
        return "; ".join(f"{name}: {said}" for name, said in found.items() if name != self.way)

    def __str__(self) -> str:
        return f"chosen: {self.of}: {self.way}, which {self.price} ({self.others})"


def choose(of: str, ways: Mapping[str, Price | str]) -> Chosen:
    """The choice among ways, of which each has a price, or a reason for which it is impossible.

    Raises:
        FxRewriteError: no way is possible; says why, of each.
    """
    prices = {name: found for name, found in ways.items() if isinstance(found, Price)}
    impossible = {name: found for name, found in ways.items() if isinstance(found, str)}
    if not prices:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in impossible.items())
        raise FxRewriteError(f"{of}: no way is possible; state one that is:{reasons}")
    way = min(prices, key=lambda name: prices[name].total)
    return Chosen(of=of, way=way, prices=prices, impossible=impossible)
