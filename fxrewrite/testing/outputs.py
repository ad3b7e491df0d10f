"""What simulated ranks return beside the loss, compared with what one device returns, output by output.

One device runs the same captured graph as it was before it was lowered: its outputs have the order of the program's.
What the model itself returns gives them names, `['logits']` or `[1]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from fxrewrite.graph.sizes import size_hint
from fxrewrite.ops import is_inexact
from fxrewrite.spmd.parallelism.captured import CapturedCall
from fxrewrite.spmd.placement import Replicate, as_placement
from fxrewrite.spmd.propagation.input_placements import Placements
from fxrewrite.testing.ranks import Cut, RankRun


def relative_error(found: torch.Tensor | None, expected: torch.Tensor, scale: float) -> float:
    """The largest difference, over `scale`; infinite where nothing was found, or something that alone is not a number,
    or of another shape or dtype."""
    if found is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return math.inf
    found, expected = _as_numbers(found), _as_numbers(expected)
    are_equal = (found == expected) | (found.isnan() & expected.isnan())
    # the scale is 0 where all is 0 on one device
    error = largest((found - expected).masked_fill(are_equal, 0).abs()) / (scale or 1.0)
    return math.inf if math.isnan(error) else error


def _as_numbers(value: torch.Tensor) -> torch.Tensor:
    return value if is_inexact(value) else value.double()


def largest(values: torch.Tensor) -> float:
    """The largest number; 0 where there are no entries, as a parameter may have none."""
    return values.max().item() if values.numel() else 0.0


def run_whole(program: fx.GraphModule, call: CapturedCall, num_parts: int, seed: int) -> list[list[Any]]:
    """What a graph that is not lowered returns of each part of the data, all leaves of it, each time from this seed."""
    found: list[list[Any]] = []
    for i in range(num_parts):
        # copies, since the graph may write to buffers
        given = [
            (value.chunk(num_parts)[i] if is_cut and num_parts > 1 else value).detach().clone()
            if isinstance(value, torch.Tensor)
            else size_hint(value)
            for value, is_cut in zip(call.given, call.is_cut, strict=True)
        ]
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append(tree_leaves(fx.Interpreter(program).run(*given)))
    return found


class Outputs:
    """Outputs of a lowered program, and what each rank should have of them.

    Args:
        mesh: of the ranks.
        own: axes whose ranks have data of their own.
        placements: how ranks hold each output.
    """

    def __init__(self, mesh: DeviceMesh, own: Sequence[str], placements: Sequence[Placements]) -> None:
        names = mesh.mesh_dim_names or ()
        self._mesh, self._placements = mesh, placements
        self._own = [(names.index(axis), mesh.size(names.index(axis))) for axis in own]

    def errors(self, run: RankRun, expected: Sequence[Sequence[Any]], position: int) -> float:
        """The largest error of an output on any rank.

        Args:
            run: of the ranks.
            expected: what one device returns of each part of the data.
            position: of the output.
        """
        found = [tree_leaves(outputs)[position] for outputs in run.outputs]
        return max(self._error(value, rank, expected, position) for rank, value in enumerate(found))

    def _error(self, found: torch.Tensor, rank: int, expected: Sequence[Sequence[Any]], position: int) -> float:
        (at,) = (self._mesh.mesh == rank).nonzero().tolist()
        part = 0
        for dim, size in self._own:
            part = part * size + at[dim]
        whole: torch.Tensor = expected[part][position]
        scale = largest(_as_numbers(whole)[whole.isfinite()].abs())
        placements = {axis: as_placement(placed) for axis, placed in self._placements[position].items()}
        if all(placed == Replicate() for placed in placements.values()):
            return relative_error(found, whole, scale)
        chunk, wanted = Cut(self._mesh, whole, placements).real(whole, rank, found)
        return relative_error(chunk, wanted, scale)


def output_names(returned: Any, outputs: Sequence[Any]) -> list[str]:
    """Where in what the model returns the outputs of its graph are; "output 2 of the graph" where none is equal."""
    leaves = [(path, leaf) for path, leaf in _with_paths(returned) if isinstance(leaf, torch.Tensor)]
    names: list[str] = []
    for position, output in enumerate(outputs):
        at = next((i for i, (_, leaf) in enumerate(leaves) if _is_equal(leaf, output)), None)
        names.append(f"output {position} of the graph" if at is None else leaves.pop(at)[0])
    return names


def _with_paths(returned: Any) -> list[tuple[str, Any]]:
    try:
        return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(returned)[0]]
    except ValueError:  # a class that is registered without the names of its fields
        return [(f"[{i}]", leaf) for i, leaf in enumerate(tree_leaves(returned))]


def _is_equal(leaf: torch.Tensor, output: Any) -> bool:
    if not isinstance(output, torch.Tensor) or (leaf.shape, leaf.dtype) != (output.shape, output.dtype):
        return False
    return bool(torch.allclose(leaf.detach(), output, equal_nan=True))
