"""Compares two runs: shape, dtype, strides, values, errors, writes to inputs, random numbers; each with its tolerance.

    numerics         values                                                gradients
    exact            equal bits; all NaN are equal, 0.0 and -0.0 are not   as for "reassociates"
    reassociates     |difference| <= 16 eps * magnitude                    |difference| <= 64 eps * magnitude
    approximate      |difference| <= relative * magnitude, by dtype:       four times that
                     float64 1e-4, float32 1e-3, float16 and bfloat16 5e-2

`eps` is that of the coarsest floating-point dtype among inputs and results; for float64 the bounds of "reassociates"
are 1e-10 and 4e-10. `magnitude` is the largest finite value in the run of the original, among inputs, intermediate
values and results. An error beyond the bound of "reassociates" still counts as rounding, and becomes a remark, if it
almost vanishes when the same entries are computed in a finer dtype. NaN and infinities must be at the same places for
all numerics. Strides are compared where size and memory make them meaningful; a difference is a remark unless strides
are promised: the strides of `x * y` follow the first operand, so a rule whose operands may be swapped cannot keep them.
It is a remark that a result shares the memory of an input, as in `clone(x) -> x`: the engine refuses the match if
something writes to that memory, and copies the result where it leaves a graph with fake values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from fxrewrite.verify.observe import Observation

__all__ = ["Difference", "Kind", "RulePromise", "compare", "compare_gradients"]

Kind: TypeAlias = Literal[
    "value",
    "shape",
    "dtype",
    "strides",
    "memory",
    "gradient",
    "raises",
    "mutation",
    "random",
    "outputs",
    "invalid",
    "endless",
]
_APPROXIMATE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
_REASSOCIATES_ULPS, _GRADIENT = 16.0, 4.0
_FLOAT64 = 1e-10
"""Bound for float64, relative to the magnitude: no finer dtype could tell large rounding errors from others."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which the rewritten graph computes another function.

    Attributes:
        kind: "value", "shape", "dtype", "strides", "gradient", "raises" (one raises, the other does not), "mutation"
            (an input is written to), "random" (other random numbers are drawn), "outputs" (their number differs),
            "invalid" (the graph is malformed, or the rewrite raised), "endless" (the rule fires again and again),
            "memory" (a result shares the memory of an input).
        text: what was expected and found.
        error: for values and gradients, the largest absolute error; infinite if one of the two is not finite.
    """

    kind: Kind
    text: str
    error: float = math.inf

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class RulePromise:
    """What a rule promises, and whether it keeps strides; `tolerance` replaces the bound of the table."""

    numerics: str = "exact"
    rng: str = "preserves"
    shapes: str = "preserves"
    strides: bool = False
    tolerance: float | None = None

    def bound(self, dtypes: Sequence[torch.dtype], numerics: str) -> float:
        """Returns the largest allowed error, relative to the magnitude."""
        if self.tolerance is not None:
            return self.tolerance
        floating = [dtype for dtype in dtypes if dtype.is_floating_point] or [torch.float32]
        if numerics == "approximate":
            return max(_APPROXIMATE.get(dtype, 5e-2) for dtype in floating)
        return max(_FLOAT64, *(_REASSOCIATES_ULPS * torch.finfo(dtype).eps for dtype in floating))


def compare(
    before: Observation, after: Observation, promise: RulePromise, inputs: Sequence[torch.Tensor], magnitude: float
) -> list[Difference]:
    """Returns all differences; values are not compared if the rule may draw other numbers and one of the runs drew."""
    # If the original raises, the rewritten graph must raise too, but need not raise the same error.
    if before.error is not None or after.error is not None:
        if before.error is not None and after.error is not None:
            return []
        return [Difference("raises", f"the original {_ending(before)}, the rewritten graph {_ending(after)}")]
    found: list[Difference] = []
    if after.written != before.written:
        found.append(Difference("mutation", f"the rewritten graph writes to inputs {list(after.written)}"))
    if promise.rng == "preserves" and not torch.equal(before.draws, after.draws):
        ways = {True: "draws random numbers", False: "draws none"}
        text = f"the original {ways[before.has_drawn]}, the rewritten graph {ways[after.has_drawn]}"
        same = before.has_drawn == after.has_drawn
        found.append(Difference("random", "the two draw different random numbers" if same else text))
    if len(before.results) != len(after.results):
        return [*found, Difference("outputs", f"{len(before.results)} outputs became {len(after.results)}")]
    comparable = promise.rng == "preserves" or not (before.has_drawn or after.has_drawn)
    newly = sorted(after.borrowed - before.borrowed)
    found += [Difference("memory", f"output {index} shares the memory of an input", 0.0) for index in newly]
    for index, (was, is_now) in enumerate(zip(before.results, after.results, strict=True)):
        found += _compare_one(index, was, is_now, promise, inputs, magnitude, comparable)
    return found


def _ending(run: Observation) -> str:
    if run.error is None:
        return "does not raise"
    return f"raises {type(run.error).__name__}: {(str(run.error).strip().splitlines() or [''])[0]}"


def _compare_one(
    index: int,
    was: Any,
    is_now: Any,
    promise: RulePromise,
    inputs: Sequence[torch.Tensor],
    magnitude: float,
    comparable: bool,
) -> list[Difference]:
    if not isinstance(was, torch.Tensor) or not isinstance(is_now, torch.Tensor):
        equal = type(was) is type(is_now) and (was == is_now or was != was)
        return [] if equal or not comparable else [Difference("value", f"output {index}: {was!r} became {is_now!r}")]
    found: list[Difference] = []
    if was.shape != is_now.shape:
        if promise.shapes == "changes":
            return []
        return [Difference("shape", f"output {index}: {list(was.shape)} became {list(is_now.shape)}")]
    if was.dtype != is_now.dtype and promise.shapes != "changes":
        found.append(Difference("dtype", f"output {index}: {was.dtype} became {is_now.dtype}"))
    if was.layout is torch.strided and is_now.layout is torch.strided and _strides(was) != _strides(is_now):
        found.append(Difference("strides", f"output {index}: {was.stride()} became {is_now.stride()}"))
    if comparable:
        dtypes = [was.dtype, is_now.dtype, *(value.dtype for value in inputs)]
        bound = None if promise.numerics == "exact" else promise.bound(dtypes, promise.numerics)
        found += _compare_values(f"output {index}", "value", was, is_now, bound, magnitude)
    return found


def _strides(tensor: torch.Tensor) -> list[int]:
    """Returns the strides that matter: of dimensions with several entries, if the tensor has entries."""
    if not tensor.numel():
        return []
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _compare_values(
    what: str, kind: Kind, was: torch.Tensor, is_now: torch.Tensor, bound: float | None, magnitude: float
) -> list[Difference]:
    """Returns at most one difference; with `bound` None, bits must be equal."""
    was, is_now = was.detach(), is_now.detach()
    exact_dtype = torch.complex128 if was.dtype.is_complex or is_now.dtype.is_complex else torch.float64
    a, b = was.to(exact_dtype), is_now.to(exact_dtype)
    error = (a - b).abs()
    if bound is None and was.dtype == is_now.dtype:
        wrong = _different_bits(was, is_now)
    else:
        finite = a[torch.isfinite(a)]
        magnitude = max(magnitude, finite.abs().max().item() if finite.numel() else 0.0)
        near = error <= (bound or 0.0) * magnitude
        wrong = ~(near | (a == b) | (torch.isnan(a) & torch.isnan(b)))
    if not wrong.any():
        return []
    place = [int(i) for i in wrong.nonzero()[0]]
    allowed = "" if bound is None else f" (allowed: {bound:.1e} * {magnitude:.3g})"
    entry = f"{was[tuple(place)].item()!r} became {is_now[tuple(place)].item()!r}"
    text = f"{what}{place}: {entry}{allowed}; {int(wrong.sum())} of {wrong.numel()} entries differ"
    return [Difference(kind, text, error[wrong].nan_to_num(nan=math.inf, posinf=math.inf).max().item())]


def _different_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.is_floating_point():
        return a != b
    bits = _BITS[a.element_size()]
    return (a.contiguous().view(bits) != b.contiguous().view(bits)) & ~(torch.isnan(a) & torch.isnan(b))


def compare_gradients(
    before: Sequence[torch.Tensor | None] | Exception | None,
    after: Sequence[torch.Tensor | None] | Exception | None,
    names: Sequence[str],
    promise: RulePromise,
    magnitude: float,
) -> list[Difference]:
    """Returns differences between gradients; none if the original has no gradients."""
    if before is None or isinstance(before, Exception):
        return []
    if isinstance(after, Exception):
        text = (str(after).strip().splitlines() or [""])[0]
        return [Difference("gradient", f"the rewritten graph raises {type(after).__name__} in its backward: {text}")]
    found: list[Difference] = []
    numerics = "approximate" if promise.numerics == "approximate" else "reassociates"
    for index, was in enumerate(before):
        if was is None:
            continue
        is_now = torch.zeros_like(was) if after is None else after[index]
        assert is_now is not None
        dtypes = [grad.dtype for grad in before if grad is not None]
        bound = _GRADIENT * promise.bound(dtypes, numerics)
        found += _compare_values(f"gradient of {names[index]}", "gradient", was, is_now, bound, magnitude)
    return found
