"""What a run of a graph shows: results, errors, gradients, writes to its inputs, random numbers drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxrewrite import ops
from fxrewrite.verify.draw import Sampler
from fxrewrite.verify.sample import TORCH_ERRORS

Runner: TypeAlias = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Sequence[Any]]
"""Runs a graph on inputs, and returns its outputs as a flat list; on simulated ranks, those of all ranks."""
_SEED = 0


class TestBed(Protocol):
    """Where rules on a virtual operator are tested, because one device does not show its meaning; made of a pattern.

    Attributes:
        sizes: which dimensions should often have.
        program: "module:name" of a function that runs the program of a counterexample, given it and its inputs.
    """

    __test__ = False  # the name is not one of pytest's tests
    sizes: Sequence[int]
    program: str

    def sampler(self, other: Sampler | None) -> Sampler:
        """Draws what the operator's arguments may be; `other` is the rule's own sampler."""
        ...

    def prepare(self, gm: fx.GraphModule) -> None:
        """Completes a sample before the rule is applied to it; raises `NoSampleError` where that is not possible."""
        ...

    def why_not(self, gm: fx.GraphModule) -> str:
        """Why a sample that was rewritten cannot be run here; else ""."""
        ...

    def run(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Runs a sample that was prepared, before or after the rewrite, as a `Runner` does."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One run.

    Attributes:
        results: outputs, detached; empty if it raised.
        error: the exception that it raised.
        written: positions of inputs that it wrote to.
        draws: the state of the random number generator afterwards.
        has_drawn: whether that state changed.
        shared: pairs of a result and what it shares memory with: an earlier result, or -1, an input; positions.
    """

    results: tuple[Any, ...]
    error: Exception | None
    written: tuple[int, ...]
    draws: torch.Tensor
    has_drawn: bool
    shared: frozenset[tuple[int, int]] = frozenset()


def run_here(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Returns the outputs of a graph, run on this device."""
    results = gm.forward(*inputs)  # not gm(...), which prints the trace of an error
    return pytree.tree_leaves(results, is_leaf=lambda value: value is None)


def observe(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], run: Runner) -> Observation:
    """Runs a graph once, without gradients; it may write to `inputs`."""
    copies = [value.clone() for value in inputs]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(_SEED)
        before = torch.get_rng_state()
        results: tuple[Any, ...] = ()
        error: Exception | None = None
        try:
            results = tuple(run(gm, inputs))
        except TORCH_ERRORS as raised:
            error = raised
        after = torch.get_rng_state()
    pairs = enumerate(zip(inputs, copies, strict=True))
    written = tuple(i for i, (now, was) in pairs if not torch.allclose(now, was, rtol=0, atol=0, equal_nan=True))
    return Observation(results, error, written, after, not torch.equal(before, after), _shared(inputs, results))


def _shared(inputs: Sequence[torch.Tensor], results: Sequence[Any]) -> frozenset[tuple[int, int]]:
    owners = [(-1, _memory(value)) for value in inputs]
    found: set[tuple[int, int]] = set()
    for place, value in enumerate(results):
        address = _memory(value)
        if address:
            found.update((place, owner) for owner, known in owners if known == address)
        owners.append((place, address))
    return frozenset(found)


def _memory(value: Any) -> int:
    """Returns the address of a plain tensor's memory; 0 for other values, and for a tensor without entries."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_plain and value.numel() else 0


def cotangents(results: Sequence[Any]) -> list[torch.Tensor | None]:
    """Returns a random gradient for every floating-point or complex result, equal for equal shapes."""
    generator = torch.Generator().manual_seed(_SEED)
    found: list[torch.Tensor | None] = []
    for result in results:
        is_differentiable = isinstance(result, torch.Tensor) and ops.is_inexact(result)
        wide = torch.complex128 if is_differentiable and result.is_complex() else torch.float64
        made = torch.randn(result.shape, generator=generator, dtype=wide) if is_differentiable else None
        found.append(None if made is None else made.to(result.dtype))
    return found


def gradients(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor | None],
    run: Runner,
    leaves: Collection[int] | None = None,
) -> list[torch.Tensor | None] | Exception | None:
    """Returns the gradient of every input, or the error that the run raises.

    A gradient that autograd does not compute counts as zeros. None as a whole: no result is differentiable.

    Args:
        gm: the graph.
        inputs: of it; they are changed to require gradients.
        given: the gradients of its results.
        run: runs it.
        leaves: positions of the inputs with a gradient, None for others; by default, all that are inexact.
    """
    chosen = _inexact(inputs) if leaves is None else leaves
    wanted = [inputs[place].requires_grad_() for place in chosen]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(_SEED)
        try:
            found = _differentiated(run(gm, inputs), given, wanted)
        except TORCH_ERRORS as raised:
            return raised
    if found is None:
        return None
    by_place = dict(zip(chosen, found, strict=True))
    return [by_place.get(place) for place in range(len(inputs))]


def _differentiated(
    results: Sequence[Any], given: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...] | None:
    """Returns the gradients of leaves, given those of the results; None if nothing is differentiable."""
    pairs = [(r, g) for r, g in zip(results, given, strict=False) if g is not None and r.requires_grad]
    if not pairs or not leaves:
        return None
    of_results = [g.to(r.dtype).expand(r.shape) for r, g in pairs]
    return torch.autograd.grad([r for r, _ in pairs], leaves, of_results, allow_unused=True, materialize_grads=True)


def _inexact(inputs: Sequence[torch.Tensor]) -> list[int]:
    return [place for place, value in enumerate(inputs) if ops.is_inexact(value)]


def with_derivative(
    gm: fx.GraphModule,
    inputs: Callable[[], Sequence[torch.Tensor]],
    given: Sequence[torch.Tensor | None],
    run: Runner,
) -> tuple[tuple[int, ...], list[torch.Tensor | None] | Exception | None]:
    """Returns the positions of the inputs of which a graph computes gradients, and these as `gradients` does.

    Of some operands torch has no derivative, as of the statistics of a batch norm: it raises if one is required.
    """
    leaves = tuple(_inexact(inputs()))
    grads = gradients(gm, inputs(), given, run, leaves)
    if not isinstance(grads, Exception):
        return leaves, grads
    leaves = ()
    for place in _inexact(inputs()):
        found = gradients(gm, inputs(), given, run, (*leaves, place))
        if not isinstance(found, Exception):
            leaves, grads = (*leaves, place), found
    return leaves, grads


def random_gradients(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    run: Callable[[Any, Sequence[torch.Tensor]], Any] | None = None,
    *,
    of: Collection[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradient of each floating-point or complex input, of the sum of all results times random numbers.

    Counterexamples call it; equal arguments give equal gradients. `run`, if given, calls the function on the inputs.
    `of`, if given, are the positions of the inputs with a gradient, where torch has no derivative of others.
    """
    torch.manual_seed(_SEED)
    leaves = [inputs[place].requires_grad_() for place in (_inexact(inputs) if of is None else of)]
    results = function(*inputs) if run is None else run(function, inputs)
    found = _differentiated(results, cotangents(results), leaves)
    return tuple(map(torch.zeros_like, leaves)) if found is None else found


class _Values(fx.Interpreter):
    """Runs a graph and keeps the tensors among its values as they were then, in the order of the graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.tensors: list[torch.Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.tensors += [value.clone() for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        return result


def values_of(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns all tensors of a run without gradients: inputs, intermediate values and results."""
    run = _Values(gm)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(_SEED)
        run.run(*inputs)
    return run.tensors


def largest_finite(values: Iterable[Any]) -> float:
    """Returns the largest finite magnitude in real and complex tensors; 0 if there is none."""
    inexact = (value for value in values if isinstance(value, torch.Tensor) and ops.is_inexact(value))
    finite = (value[torch.isfinite(value)].abs() for value in inexact)
    return max((value.max().item() for value in finite if value.numel()), default=0.0)
