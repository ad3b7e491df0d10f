"""Compares two runs: shape, dtype, strides, values, errors, writes to inputs, random numbers; each with its tolerance.

    numerics         values                                                gradients
    exact            equal bits; all NaN are equal, 0.0 and -0.0 are not   as for "reassociates"
    reassociates     error <= 16 error of the original                     four times that, and 8 eps * magnitude
                            + 2 largest error of the original
                            + 8 eps * largest result
    approximate      that + relative * largest result + eps, by dtype:     the same
                     float64 1e-4, float32 1e-3, float16 and bfloat16 5e-2

What is exact is the original graph in float64, and its error is measured there (`fxrewrite.verify.oracle`): entry by
entry, at these inputs and at inputs that differ from them in the last place. `error` of the rewritten graph is the
distance from that, or from the original, so a rule may be better than its pattern. `eps` is that of the coarser of both
results, `magnitude` the largest finite value in the run of the original: terms of that size may cancel in a gradient.
Results in float64 may differ by 1e-10 * magnitude in addition, their gradients by 4e-10 * magnitude ** 2 if that is
above 1, and those of a graph that does not run in float64 by 16 eps * magnitude. NaN and infinities must be those of
the original or of float64, unless the original has lost a finite result itself, as by an overflow. Integers and bools
may differ where those of the original change with the last place of its inputs; for "exact", never. A gradient that is
further off is a remark if the difference almost vanishes in float64: operators amplify rounding unseen.

docs/writing-rules.md ("Is it true?") says what is asked at jumps and kinks, of coarser dtypes, and of strides and
memory, and why. Under "reassociates", a coarser dtype than each of the original may have twice the original's largest
error at these inputs, and 8 eps * magnitude with the eps of float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from fxrewrite import ops
from fxrewrite.errors import first_line, named_line
from fxrewrite.verify.observe import Observation
from fxrewrite.verify.oracle import Oracle

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
_OWN = 16.0
"""Factor by which the rewritten graph may be further from float64 than the original is, at inputs as close as these."""
_TYPICAL = 2.0
"""The same for the largest error of all entries: that of an entry may be small by accident."""
_ULPS = 8.0
"""Allowed error of a result, in units of its last place, where the original is exact."""
_LOST = 0.5
"""Error relative to the largest exact result from which on the original says nothing about NaN and infinities."""
_NARROWED = 2.0
"""Factor of the largest error of the original, where the rewritten graph has a coarser dtype."""
_COARSE_ULPS, _GRADIENT = 16.0, 4.0
"""Allowed error in units in the last place of the magnitude, without float64; the factor for gradients."""
_FLOAT64 = 1e-10
"""Bound for float64, relative to the magnitude: no finer dtype could tell large rounding errors from others."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which the rewritten graph computes another function.

    Attributes:
        kind: "value", "shape", "dtype", "strides", "gradient", "raises" (one raises, the other does not), "mutation"
            (an input is written to), "random" (other random numbers are drawn), "outputs" (their number differs),
            "invalid" (the graph is malformed, or the rewrite raised), "endless" (the rule fires again and again),
            "memory" (a result shares the memory of an input or of another result in only one of the graphs).
        text: what was expected and found.
    """

    kind: Kind
    text: str

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


def relative_bound(dtypes: Iterable[torch.dtype]) -> float:
    """Returns the relative error that an approximation of values of these dtypes may have."""
    reals = (dtype.to_real() for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return max((_APPROXIMATE.get(dtype, 5e-2) for dtype in reals), default=0.0)


def compare(
    before: Observation,
    after: Observation,
    promise: RulePromise,
    inputs: Sequence[torch.Tensor],
    oracle: Oracle,
    views: frozenset[tuple[int, int]] = frozenset(),
) -> list[Difference]:
    """Returns all differences; values are not compared if the rule may draw other numbers and one of the runs drew.

    Args:
        before, after: the runs of the original and of the rewritten graph.
        promise: of the rule.
        inputs: of both; their dtypes say how exact an approximation must be.
        oracle: what the original means.
        views: which of the pairs `before.shared` are so by what the operators of the original promise.
    """
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
    found += _of_memory(before, after, views)
    for index, (was, is_now) in enumerate(zip(before.results, after.results, strict=True)):
        found += _compare_one(index, was, is_now, promise, inputs, oracle, comparable)
    return found


def _of_memory(before: Observation, after: Observation, views: frozenset[tuple[int, int]]) -> list[Difference]:
    new, lost = after.shared - before.shared, (before.shared & views) - after.shared
    lost = {pair for pair in lost if min(pair) < 0 or _have_common_entries(*(before.results[place] for place in pair))}
    found: list[Difference] = []
    for index, owner in sorted(new | lost):
        whose = "an input" if owner < 0 else f"output {owner}"
        how = "newly shares" if (index, owner) in new else "no longer shares"
        found.append(Difference("memory", f"output {index} {how} the memory of {whose}"))
    return found


def _have_common_entries(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one memory overlap, as a value and its row do, and two rows do not."""
    if a.element_size() != b.element_size():
        return True
    start, end = min(a.storage_offset(), b.storage_offset()), a.untyped_storage().nbytes() // a.element_size()
    places = torch.zeros(end - start, dtype=torch.bool)
    places.as_strided(a.shape, a.stride(), a.storage_offset() - start).fill_(True)
    return bool(places.as_strided(b.shape, b.stride(), b.storage_offset() - start).any())


def _ending(run: Observation) -> str:
    if run.error is None:
        return "does not raise"
    return f"raises {named_line(run.error)}"


def _compare_one(
    index: int,
    was: Any,
    is_now: Any,
    promise: RulePromise,
    inputs: Sequence[torch.Tensor],
    oracle: Oracle,
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
        if promise.numerics == "exact" and was.dtype == is_now.dtype:
            wrong, allowed = _different_bits(was, is_now), None
        else:
            dtypes = [value.dtype for value in inputs]
            wrong, allowed = _beyond(was, is_now, oracle, index, promise, dtypes)
        found += _difference(f"output {index}", "value", was, is_now, wrong, allowed)
    return found


def _strides(tensor: torch.Tensor) -> list[int]:
    """Returns the strides that matter: of dimensions with several entries, if the tensor has entries."""
    if not tensor.numel():
        return []
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _beyond(
    was: torch.Tensor,
    is_now: torch.Tensor,
    oracle: Oracle,
    index: int,
    promise: RulePromise,
    dtypes: Sequence[torch.dtype],
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns which entries are wrong, and the error that is allowed of each; None if nothing is wrong.

    What would be right at inputs that differ in the last place is right here, unless these inputs alone are decisive.
    """
    wrong, allowed = _beyond_here(was, is_now, oracle, index, promise, dtypes, factor, is_near=True)
    if oracle.decisive and not wrong.any():
        here, allowed_here = _beyond_here(was, is_now, oracle, index, promise, dtypes, factor, is_near=False)
        if here.any() and not oracle.rounds:
            return here, allowed_here
    return wrong, allowed


def _beyond_here(
    was: torch.Tensor,
    is_now: torch.Tensor,
    oracle: Oracle,
    index: int,
    promise: RulePromise,
    dtypes: Sequence[torch.dtype],
    factor: float,
    *,
    is_near: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the same; unless `is_near`, what is right at inputs next to these is no excuse."""
    a, b = _precise(was), _precise(is_now)
    eps = max(_eps(was.dtype), _eps(is_now.dtype))
    is_narrowed = oracle.is_narrowed and promise.numerics == "reassociates" and eps > 0 and factor == 1.0
    wrong = ~_near(a, b, _ULPS * (0.0 if is_narrowed else eps) * a.abs())
    if not wrong.any():
        return wrong, None
    reference = oracle.reference(index, is_near=is_near and not is_narrowed)
    exact = a if reference.exact is None else reference.exact.to(a.dtype)
    largest = max(_size(exact).max().item(), _size(a).max().item())
    allowed = _OWN * reference.error + _TYPICAL * torch.as_tensor(reference.error).max()
    magnitude = max(largest, oracle.magnitude)
    allowed = allowed + _ULPS * (max(map(_smallest, (was.dtype, is_now.dtype))) + _eps(torch.float64) * magnitude)
    allowed = allowed + _ULPS * eps * (magnitude if factor > 1 else largest)
    if promise.tolerance is not None:
        is_quantized = was.dtype in (torch.int8, torch.uint8)  # small entries are as coarse as large ones
        allowed = allowed + promise.tolerance * (torch.iinfo(was.dtype).max if is_quantized else magnitude)
    elif promise.numerics == "approximate" and eps:
        allowed = allowed + relative_bound((was.dtype, *dtypes)) * largest + eps
    if eps and reference.exact is None:
        allowed = allowed + max(_FLOAT64, _COARSE_ULPS * max(eps, oracle.eps)) * magnitude
    elif was.dtype in (torch.float64, torch.complex128):
        products = max(1.0, magnitude) if factor > 1 else 1.0  # the terms of a gradient are products of values
        allowed = allowed + _FLOAT64 * magnitude * products
    if is_narrowed and reference.exact is not None:
        noise = _ULPS * (_eps(torch.float32) * magnitude + _smallest(is_now.dtype))
        allowed = torch.minimum(allowed, _NARROWED * torch.as_tensor(reference.error).max() + noise)
    allowed = torch.as_tensor(factor * allowed).expand(a.shape)
    rounded = _precise(exact.to(is_now.dtype)) if reference.exact is not None else a
    is_lost = torch.isfinite(exact) & (~torch.isfinite(a) | (reference.error > _LOST * _size(exact).max()))
    wrong &= ~(is_lost & ~(torch.isfinite(a) & torch.isfinite(b)))
    return wrong & ~_near(a, b, allowed) & ~(_near(rounded, b, allowed) & ~torch.isnan(rounded)), allowed


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _size(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the magnitude of each entry; 0 where it is not finite."""
    return tensor.abs().nan_to_num(nan=0.0, posinf=0.0)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _smallest(dtype: torch.dtype) -> float:
    """Returns the smallest normal number: what is smaller may be flushed to zero."""
    return torch.finfo(dtype).tiny if dtype.is_floating_point or dtype.is_complex else 0.0


def _near(a: torch.Tensor, b: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return ((a - b).abs() <= allowed) & torch.isfinite(a) | (a == b) | (torch.isnan(a) & torch.isnan(b))


def _difference(
    what: str, kind: Kind, was: torch.Tensor, is_now: torch.Tensor, wrong: torch.Tensor, allowed: torch.Tensor | None
) -> list[Difference]:
    """Returns at most one difference, which shows the entry that is furthest beyond what is allowed."""
    if not wrong.any():
        return []
    excess = (_precise(was) - _precise(is_now)).abs().nan_to_num(nan=torch.inf)
    excess = torch.where(wrong, excess if allowed is None else excess / allowed, -1.0)
    place = [int(i) for i in torch.unravel_index(excess.argmax(), excess.shape)]
    entry = f"{was[tuple(place)].item()!r} became {is_now[tuple(place)].item()!r}"
    limit = "" if allowed is None else f" (allowed: {allowed[tuple(place)].item():.2g})"
    text = f"{what}{place}: {entry}{limit}; {int(wrong.sum())} of {wrong.numel()} entries differ"
    return [Difference(kind, text)]


def _different_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_complex() and b.is_complex():
        return _different_bits(*(torch.view_as_real(value.resolve_conj()) for value in (a, b))).any(-1)
    if not a.is_floating_point():
        return a != b
    return (ops.bits_of(a.contiguous()) != ops.bits_of(b.contiguous())) & ~(torch.isnan(a) & torch.isnan(b))


def compare_gradients(
    before: Sequence[torch.Tensor | None] | Exception | None,
    after: Sequence[torch.Tensor | None] | Exception | None,
    names: Sequence[str],
    promise: RulePromise,
    oracle: Oracle,
) -> list[Difference]:
    """Returns differences between gradients; none if the original has no gradients."""
    if before is None or isinstance(before, Exception):
        return []
    if isinstance(after, Exception):
        text = first_line(after)
        return [Difference("gradient", f"the rewritten graph raises {type(after).__name__} in its backward: {text}")]
    found: list[Difference] = []
    dtypes = [grad.dtype for grad in before if grad is not None]
    for index, was in enumerate(before):
        if was is None:
            continue
        is_now = torch.zeros_like(was) if after is None else after[index]
        assert is_now is not None
        wrong, allowed = _beyond(was, is_now, oracle, index, promise, dtypes, _GRADIENT)
        found += _difference(f"gradient of {names[index]}", "gradient", was, is_now, wrong, allowed)
    return found
