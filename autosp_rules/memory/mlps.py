"""Chooses which MLPs are computed a tile of rows at a time, by `rules.tiling.mlp`.

    None       no MLP
    n bytes    MLPs whose inner linears compute more than n bytes; checkpointing is decided after that
    "auto"     MLPs for which it is free and worthwhile, in tiles of 128 MiB: the backward pass recomputes the
               intermediate values anyway (`checkpoint`), and reads more of them than of the rest of the layer

The intermediate values that count are those that the backward pass reads.
Numerics: reassociates, as the rule. Source: Bekman et al., Arctic Long Sequence Training, arXiv 2506.13996 (TiledMLP).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field
from torch import fx

from autosp_rules.lengths import planned_size
from autosp_rules.memory.costs import (
    bases_of,
    bytes_of,
    computed_again,
    flops_of,
    kept_bytes,
    planned_for,
    read_in_backward,
)
from fxrewrite import Edit, Event, Report, RuleSet, where
from fxrewrite.graph import Fact, is_recomputed, source_line
from fxrewrite.ops import bind, key
from fxrewrite.report import bytes_text
from rules.tiling.mlp import Mlp, mlp_of, tiled_mlp_rules
from rules.tiling.tiles import TILE_BYTES, is_more_than_a_tile

MlpTileOption: TypeAlias = Literal["auto"] | Annotated[int, Field(gt=0, strict=True)] | None

_CHOSEN = Fact[bool]("in tiles")


@where.predicate("root", text="is_chosen")
def _is_chosen(root: fx.Node) -> bool | str:
    return _CHOSEN.of(root) or "it costs more than it saves"


def tile_mlps(option: Literal["auto"] | int) -> RuleSet:
    """Returns the rules that tile the MLPs of `AutoSPConfig.mlp_tile`; "auto" reads the tags of `TagCheckpoints`."""
    choice = ChooseMlps(option)
    return RuleSet("tile_mlps", choice, tiled_mlp_rules(choice.tile_bytes, _is_chosen))


class MlpsTiled(Event, frozen=True):
    """MLPs of one size are computed a tile of rows at a time."""

    kind: Literal["MLPs in tiles"] = "MLPs in tiles"
    option: Literal["auto"] | int
    planned: str = Field(description="for which length that was decided, where the length is a symbol")
    num_mlps: int
    tile_rows: int
    num_rows: int
    inside_bytes: int = Field(description="what the backward pass would read of the inside of one without tiles")

    def __str__(self) -> str:
        held = self.inside_bytes * self.tile_rows // self.num_rows
        return (
            f"mlp_tile={self.option!r}{self.planned}: {self.num_mlps} x an MLP in tiles of {self.tile_rows:,} rows: "
            f"{bytes_text(held)} are held inside, not {bytes_text(self.inside_bytes)} of all {self.num_rows:,} rows"
        )


class MlpsWhole(Event, frozen=True):
    """MLPs are not computed in tiles, or none is."""

    kind: Literal["MLPs whole"] = "MLPs whole"
    option: Literal["auto"] | int
    planned: str = Field(default="", description="for which length that was decided, where the length is a symbol")
    num_mlps: int = Field(description="0 where no MLP is computed in tiles at all")
    why: str

    def __str__(self) -> str:
        what = f"{self.num_mlps} x an MLP whole" if self.num_mlps else "no MLP is computed in tiles"
        return f"mlp_tile={self.option!r}{self.planned}: {what}: {self.why}"


class ChooseMlps:
    """A step that marks the last linears of MLPs to tile, and reports how many bytes these then hold."""

    name = "choose_mlps"

    def __init__(self, option: Literal["auto"] | int) -> None:
        self.option: Literal["auto"] | int = option
        self.tile_bytes = TILE_BYTES if isinstance(option, str) else option

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Marks the MLPs, and adds lines to the report. Changes no node."""
        nodes = edit.nodes()
        found = {node: mlp_of(node) for node in nodes if flops_of(node)}
        large = {node: mlp for node, mlp in found.items() if isinstance(mlp, Mlp) and self._is_large(mlp)}
        if not large:
            if self.option != "auto":
                report.events.append(MlpsWhole(option=self.option, num_mlps=0, why=_why_none(found)))
            return 0
        held, found_alike, planned = _Held(nodes), Counter[MlpsTiled | MlpsWhole](), planned_for(large)
        for node, mlp in large.items():
            why_whole = held.why_whole(node, mlp) if self.option == "auto" else ""
            edit.set_fact(node, _CHOSEN, not why_whole)
            if why_whole:
                found_alike[MlpsWhole(option=self.option, planned=planned, num_mlps=1, why=why_whole)] += 1
            else:
                found_alike[self._tiled(mlp, held.inside(mlp), planned)] += 1
        report.events += [event.model_copy(update={"num_mlps": count}) for event, count in found_alike.items()]
        return 0

    def text(self) -> str:
        return f"which MLPs are computed in tiles: {self.option}"

    def _is_large(self, mlp: Mlp) -> bool:
        return is_more_than_a_tile(mlp.num_rows, mlp.rows_of_tile(self.tile_bytes))

    def _tiled(self, mlp: Mlp, inside: int, planned: str) -> MlpsTiled:
        num_rows = planned_size(mlp.num_rows)
        rows = min(num_rows, mlp.rows_of_tile(self.tile_bytes))
        return MlpsTiled(
            option=self.option, planned=planned, num_mlps=1, tile_rows=rows, num_rows=num_rows, inside_bytes=inside
        )


class _Held:
    """Bytes that backward passes read: of the inside of an MLP, and of the rest of its layer."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._bases = bases_of(nodes)
        reads = read_in_backward(nodes)
        self._again = computed_again(reads, self._is_kept)
        self._read = {self._bases[node] for node in reads}
        self._of_layers = Counter[Any]()
        for node in self._read:
            self._of_layers[node.meta.get("ac_graph_id")] += kept_bytes(node)

    def inside(self, mlp: Mlp) -> int:
        return sum(kept_bytes(node) for node in mlp.inside if node in self._read)

    def why_whole(self, last: fx.Node, mlp: Mlp) -> str:
        """Says why tiles would cost FLOPs or save nothing; empty if they are worthwhile."""
        inner = [node for node in mlp.inside if flops_of(node)]
        if not self._again.issuperset(inner):
            return "the backward pass does not compute its inside again, and tiles would"
        if last in self._again:
            return "the backward pass computes its result again too, and tiles the inside once more"
        inside = self.inside(mlp)
        rest = self._of_layers[inner[0].meta.get("ac_graph_id")] - inside
        if inside <= rest:
            return f"{bytes_text(inside)} are held inside, and {bytes_text(rest)} of the rest of its layer"
        return ""

    def _is_kept(self, node: fx.Node) -> bool:
        """Whether the backward pass finds the value: it is untagged, or a later recomputed layer reads it."""
        made = self._bases[node]
        layer = made.meta.get("ac_graph_id", 0)
        later = (is_recomputed(user) and user.meta.get("ac_graph_id", 0) > layer for user in made.users)
        return not is_recomputed(made) or any(later)


def _why_none(found: Mapping[fx.Node, Mlp | str]) -> str:
    """Says why the linear with the largest input, which is the last of an MLP, is not the end of a tiled one."""
    linears = {node: bind(node) for node in found if key(node) in ("aten::linear", "aten::addmm")}
    read = {node: bytes_of(given["input" if "input" in given else "mat1"]) for node, given in linears.items()}
    last = max(read, key=lambda node: read[node], default=None)
    if last is None:
        return "there is no linear"
    why = found[last]
    return f"the largest, at %{last.name} {source_line(last)}: " + (
        why if isinstance(why, str) else "it fits into a tile"
    )
