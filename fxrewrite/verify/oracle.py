"""How exact the original graph is: it is run in float64, and once more at inputs that differ in the last place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.node import map_aggregate

from fxrewrite import ops
from fxrewrite.graph.copy import copy_module
from fxrewrite.verify.observe import values_of
from fxrewrite.verify.sample import TORCH_ERRORS
from fxrewrite.verify.tensors import with_entries

Evaluate: TypeAlias = Callable[[fx.GraphModule, list[torch.Tensor]], Sequence[Any] | None]
"""Runs a graph; returns its results or its gradients, or None if there are none."""
_WIDE = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
_CASTS = ("float", "half", "bfloat16")
"""Methods that cast to a coarser dtype than float64."""
_CAST_KEYS = ("aten::to", "aten::type_as")
_VANISHES = 1e-3
"""Factor by which a rounding error shrinks in float64, at least."""
_PERTURBATIONS = 3
"""Number of random changes of the inputs in their last place: one result may be exact by accident, four are not."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What the original graph means at one of its results, and how exactly it computes it.

    Attributes:
        exact: the result in float64; None if the graph does not run in float64.
        error: for each entry, the largest distance of the original from float64, and the largest change of either, when
            the inputs change in the last place; 0 where one of them is not finite.
    """

    exact: torch.Tensor | None
    error: torch.Tensor | float


class Oracle:
    """The references of a graph at these inputs; they are computed when the first is read.

    Args:
        gm: the original graph.
        inputs: makes its inputs.
        evaluate: what is compared of a run: its results or its gradients.
        largest: computes the largest finite magnitude in a run.
        after: the rewritten graph.
        is_random: whether the graph draws random numbers; in float64 it would draw others.
        decisive: graphs that decide together whether these inputs alone count: if none of them rounds a value here, a
            result at a jump or a kink is what it is; where one rounds, the side of the jump is an accident.

    Attributes:
        eps: of the coarsest floating-point or complex dtype in the graph.
        is_narrowed: whether the rewritten graph has a floating-point dtype that is coarser, or of less range, than each
            of the original.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Callable[[], list[torch.Tensor]],
        evaluate: Evaluate,
        largest: Callable[[], float],
        after: fx.GraphModule,
        *,
        is_random: bool,
        decisive: Sequence[fx.GraphModule] = (),
    ) -> None:
        self.decisive = decisive
        self._gm = gm
        self._inputs = inputs
        self._evaluate = evaluate
        self._largest = largest
        self._is_random = is_random
        self._dtypes = _real_dtypes(gm)
        self.eps = max((torch.finfo(dtype).eps for dtype in self._dtypes), default=0.0)
        self.is_narrowed = bool(self._dtypes) and not all(
            any(_is_as_fine(new, old) for old in self._dtypes) for new in _real_dtypes(after)
        )

    @cached_property
    def magnitude(self) -> float:
        """Largest finite magnitude among inputs, intermediate values and results."""
        return self._largest()

    @cached_property
    def rounds(self) -> bool:
        """Whether a value of the decisive graphs may be rounded at these inputs."""
        return any(map(self._rounds, self.decisive))

    def _rounds(self, gm: fx.GraphModule) -> bool:
        """Whether a value of a graph may be rounded at these inputs: it is another number in float64."""
        if self._is_random or torch.float64 in self._dtypes:
            return True
        try:
            values = values_of(gm, self._inputs())
            exact = values_of(in_float64(gm), [widened(value) for value in self._inputs()])
        except TORCH_ERRORS:
            return True
        pairs = zip(values, exact, strict=True)
        return not all(torch.equal(value.to(wide.dtype), wide) for value, wide in pairs)

    def reference(self, index: int, *, is_near: bool = True) -> Reference:
        """Returns the reference of the result with this index; of these inputs alone unless `is_near`."""
        (plain, exact), *others = self._runs
        pairs = [(plain, exact)]
        for near, near_exact in others if is_near else ():
            pairs += [(near, near_exact), (plain, near), (exact, near_exact)]
        error: torch.Tensor | float = 0.0
        for first, second in pairs:
            gap = _gap(first[index], second[index]) if first is not None and second is not None else None
            if gap is not None:
                error = torch.maximum(gap, torch.as_tensor(error, dtype=gap.dtype))
        found = exact[index] if exact is not None else None
        return Reference(found if isinstance(found, torch.Tensor) else None, error)

    def explains(self, after: fx.GraphModule, was: Any, is_now: Any, relative: float | None = None) -> bool:
        """Whether the difference of two results almost vanishes in float64, so that it is rounding.

        With `relative`, only a difference that is as small, relative to the magnitude, or to 1 if that is smaller.
        """
        _, exact = self._runs[0]
        if exact is None or not isinstance(is_now, Sequence) or not all(map(_are_finite_alike, was, is_now)):
            return False
        if relative is not None and _distance(was, is_now) > relative * max(1.0, self.magnitude):
            return False
        try:
            finer = self._evaluate(in_float64(after), [widened(value) for value in self._inputs()])
        except TORCH_ERRORS:
            return False
        return finer is not None and _distance(exact, finer) <= _VANISHES * _distance(was, is_now)

    @cached_property
    def _runs(self) -> list[tuple[Sequence[Any] | None, Sequence[Any] | None]]:
        """Results of the graph and of the graph in float64, at the inputs and then at each perturbation."""
        wide = None if self._is_random else in_float64(self._gm)
        found: list[tuple[Sequence[Any] | None, Sequence[Any] | None]] = []
        for seed in range(-1, _PERTURBATIONS):
            generator = torch.Generator().manual_seed(max(seed, 0))
            inputs = self._inputs() if seed < 0 else self._nearby(generator)
            in_wide = [widened(value) for value in inputs]  # before the run, which may write to its inputs
            plain = self._evaluate(self._gm, inputs)
            try:
                exact = self._evaluate(wide, in_wide) if wide is not None else None
            except TORCH_ERRORS:
                exact = None
            if not found and (exact is None or plain is None or len(plain) != len(exact)):
                wide = exact = None  # the graph does not run in float64
            found.append((plain, exact))
        return found

    def _nearby(self, generator: torch.Generator) -> list[torch.Tensor]:
        """Returns inputs that differ in the last place of the dtypes in which the graph reads them."""
        nodes = self._gm.graph.find_nodes(op="placeholder")
        return [_in_last_place(x, _eps_read(node), generator) for x, node in zip(self._inputs(), nodes, strict=True)]


def _eps_read(node: fx.Node, least: float = 0.0) -> float:
    """Returns the eps of a value's own dtype; of a coarser one, if all that reads the value is a cast to that."""
    value = ops.value(node)
    is_inexact = isinstance(value, torch.Tensor) and ops.is_inexact(value)
    eps = max(torch.finfo(value.dtype).eps, least) if is_inexact else least
    is_cast = bool(node.users) and all(ops.key(user) in _CAST_KEYS or ops.is_view(user) for user in node.users)
    return min(_eps_read(user, eps) for user in node.users) if is_cast else eps


def _real_dtypes(gm: fx.GraphModule) -> set[torch.dtype]:
    """Returns the floating-point dtypes of a graph's values; of complex ones, those of their parts."""
    dtypes = {value.dtype for node in gm.graph.nodes if isinstance(value := ops.value(node), torch.Tensor)}
    return {dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}


def _is_as_fine(new: torch.dtype, old: torch.dtype) -> bool:
    new_limits, old_limits = torch.finfo(new), torch.finfo(old)
    return new_limits.eps <= old_limits.eps and new_limits.max >= old_limits.max


def _are_finite_alike(first: Any, second: Any) -> bool:
    """Whether two results are not finite at the same places, or are no tensors."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return True
    return first.shape == second.shape and torch.equal(torch.isfinite(first), torch.isfinite(second))


def _distance(first: Sequence[Any], second: Sequence[Any]) -> float:
    """Returns the largest distance of two lists of results; 0 where it is not finite."""
    gaps = [_gap(one, other) for one, other in zip(first, second, strict=True)]
    return max((gap.max().item() for gap in gaps if gap is not None and gap.numel()), default=0.0)


def _gap(first: Any, second: Any) -> torch.Tensor | None:
    """Returns the distance of two results in float64, 0 where it is not finite; None if they cannot be compared."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or first.shape != second.shape:
        return None
    dtype = torch.complex128 if first.dtype.is_complex or second.dtype.is_complex else torch.float64
    return (first.detach().to(dtype) - second.detach().to(dtype)).abs().nan_to_num(nan=0.0, posinf=0.0)


def in_float64(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of the graph that computes in float64 wherever the graph names a coarser floating-point dtype."""
    wide = copy_module(gm)
    for node in wide.graph.nodes:
        node.args = map_aggregate(node.args, _wide)  # pyright: ignore[reportAttributeAccessIssue]
        node.kwargs = map_aggregate(node.kwargs, _wide)  # pyright: ignore[reportAttributeAccessIssue]
        if node.op == "call_method" and node.target in _CASTS:
            node.target = "double"
    wide.recompile()
    return wide


def _wide(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def widened(value: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in float64, or complex128, with the same strides; integers as they are."""
    return with_entries(value, lambda entries: entries.to(_WIDE.get(value.dtype, value.dtype)))


def _in_last_place(value: torch.Tensor, eps: float, generator: torch.Generator) -> torch.Tensor:
    """Changes each real or complex entry by about one unit in the last place of a dtype with this eps, up or down.

    A tensor of signs stays: losses ask whether a label is 1, and next to 1 it is no label. Entries of one place in
    memory become different ones: the mean of a number with itself is exact, and that of its neighbours is not.
    """
    if not ops.is_inexact(value) or bool((value.abs() == 1).all()):
        return value
    if any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True)):
        value = value.contiguous()

    def change(entries: torch.Tensor) -> torch.Tensor:
        if entries.is_complex():
            return torch.view_as_complex(change(torch.view_as_real(entries)))
        sign = torch.randint(0, 2, entries.shape, generator=generator).to(entries.dtype) * 2 - 1
        return entries * (1 + eps * sign)

    return with_entries(value, change)
