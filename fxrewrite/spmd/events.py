"""What the report of a program over a mesh says: what runs whole, is drawn, summed, gathered at a break, or repeats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from fxrewrite.backends import Regions
from fxrewrite.report import Event, bytes_text


class AtBorder(Event, frozen=True):
    """A value crosses the border of a program in chunks, or is gathered there."""

    kind: Literal["border"] = "border"
    value: str = Field(description="input or output, with its name")
    shape: tuple[int, ...] = Field(description="of the whole value, at the sizes at hand")
    placement: str = Field(description="how ranks hold it")
    why: str = Field(default="", description="why it is gathered; empty where it stays in chunks")

    def __str__(self) -> str:
        what = f"border: {self.value} {list(self.shape)} {self.placement}"
        return f"{what} is gathered: {self.why}" if self.why else f"{what} stays in chunks, as a DTensor"


class OutputSharded(Event, frozen=True):
    """An output returns as this rank's chunk."""

    kind: Literal["output"] = "output"
    node: str
    shape: tuple[int, ...] = Field(description="of the whole output, at the sizes at hand")
    placement: str
    axis: str
    is_deferred: bool = Field(description="whether it is gathered when it is first used")
    num_bytes: int = Field(description="of the whole output")
    num_held: int = Field(description="entries along its dimension that all ranks hold together")
    num_padding: int = Field(description="of these, how many at the end of the last ranks are padding")

    def __str__(self) -> str:
        if self.is_deferred:
            when = f"is gathered when it is first used, {bytes_text(self.num_bytes)} on each rank"
            return f"output %{self.node} {self.shape} {self.placement} over {self.axis} {when}"
        last = f"the last {self.num_padding} of {self.num_held} entries, at the end of the last ranks, are padding"
        padding = f", and {last}" if self.num_padding else ""
        what = f"output %{self.node} {self.shape} returns as this rank's chunk {self.placement} over {self.axis}"
        return f"{what}{padding}; outputs='gather' returns it whole"


class ZerosHeld(Event, frozen=True):
    """Gradients of outputs beside a loss that a step holds as zeros where nobody uses these outputs."""

    kind: Literal["zeros held"] = "zeros held"
    nodes: tuple[str, ...] = Field(min_length=1)
    num_bytes: int = Field(description="of all of them, on each rank")

    def __str__(self) -> str:
        first, *others = self.nodes
        more = f" and {len(others)} more" if others else ""
        return (
            f"outputs %{first}{more}: a step that does not use them holds zeros in the place of their gradients, "
            f"{bytes_text(self.num_bytes)} on each rank; return them detached, or not at all"
        )


class _AtNode(Event, frozen=True):
    """What happens at one node, which has a name and the line of the model that it comes from."""

    node: str
    source: str

    @property
    def where(self) -> str:
        """The node and the line."""
        return f"%{self.node} {self.source}".rstrip()


class Gathered(_AtNode, frozen=True):
    """Operands of an operator are gathered, since it cannot run on shards of them."""

    kind: Literal["gathered"] = "gathered"
    why: str
    num_bytes: int = Field(description="of the gathered operands, as every rank then holds them")
    is_more: bool = Field(description="whether there are others, whose size the data decides")

    def __str__(self) -> str:
        rest = ", and what depends on data" if self.is_more else ""
        return f"gathered: {self.where}: {self.why} ({bytes_text(self.num_bytes)}{rest} whole on each rank)"


class Drawn(_AtNode, frozen=True):
    """An operator draws random numbers."""

    kind: Literal["random"] = "random"
    is_sharded: bool = Field(description="whether each rank draws numbers of its own")

    def __str__(self) -> str:
        sharded, whole = "each rank draws the numbers of its chunk", "every rank must draw alike: seed them so"
        return f"random: {self.where}: {sharded if self.is_sharded else whole}"


class NotInPart(Event, frozen=True):
    """Something that is stated was not looked at, because the graph is a part of a model that breaks."""

    kind: Literal["not in part"] = "not in part"
    stated: str

    def __str__(self) -> str:
        return f"not in this part of the model, which breaks into several graphs: {self.stated}"


class ProductsWhole(Event, frozen=True):
    """Some matrix products, which are what a model's time is made of, run whole on every rank."""

    kind: Literal["products whole"] = "products whole"
    axis: str
    num_whole: int = Field(gt=0)
    num_products: int
    share: float = Field(ge=0, le=1, description="of the operations of all matrix products, those of the whole ones")
    first: str = Field(description="the first one's node")
    source: str

    def __str__(self) -> str:
        first = f"%{self.first} {self.source}".rstrip()
        return (
            f"whole: {self.num_whole} of {self.num_products} matrix products run whole on every rank of {self.axis}, "
            f"{self.share:.1%} of their operations; the first is {first}"
        )


class Summed(_AtNode, frozen=True):
    """The gradients that a custom backward reads are summed over the ranks before it runs."""

    kind: Literal["summed"] = "summed"

    def __str__(self) -> str:
        return f"summed: {self.where}: {_NOT_LINEAR}, so they are summed over the ranks before it"


class ProgramIsLast(Event, frozen=True):
    """Dynamo makes no other program of the function: calls that need one run uncompiled, and not in parallel."""

    kind: Literal["last program"] = "last program"
    limit: int = Field(description="torch._dynamo.config.recompile_limit")

    def __str__(self) -> str:
        return (
            f"this is program {self.limit} of {self.limit} that torch.compile makes of the function: calls that need "
            "another one run uncompiled, whole on every rank, or end with an error of torch's where parameters are in "
            "shards; mark the sizes that change (torch._dynamo.mark_dynamic), or set "
            "torch._dynamo.config.recompile_limit higher"
        )


class ReadOwn(_AtNode, frozen=True):
    """A custom backward reads the gradients of the rank's own part of the batch."""

    kind: Literal["reads own gradients"] = "reads own gradients"

    def __str__(self) -> str:
        return (
            f"reads own gradients: {self.where}: {_NOT_LINEAR}, and sees those of this rank's part of the batch "
            "alone; it is one device's if no row of a batch reads another"
        )


_NOT_LINEAR = "its own backward is not linear in the gradients"


class RegionsCompiled(Event, frozen=True):
    """The program was compiled region by region."""

    kind: Literal["regions"] = "regions"
    found: Regions

    def __str__(self) -> str:
        return f"regions: {self.found}"


def grouped(events: Iterable[Event]) -> list[str]:
    """The sentences of the events, in order; what is said alike of several nodes, as of equal layers, is one."""
    alike: dict[tuple[type[Event], str], list[Event]] = {}
    for event in events:
        said = str(event).replace(event.where, "", 1) if isinstance(event, _AtNode) else str(event)
        alike.setdefault((type(event), said), []).append(event)
    return [_of_several(*same) for same in alike.values()]


def _of_several(first: Event, *others: Event) -> str:
    if not others or not isinstance(first, _AtNode):
        return str(first)
    return str(first).replace(first.where, f"{1 + len(others)} x, the first is {first.where}", 1)
