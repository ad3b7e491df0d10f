"""What a run of a graph shows: results, errors, gradients, writes to its inputs, random numbers drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxrewrite import ops
from fxrewrite.verify.draw import Sampler
from fxrewrite.verify.sample import TORCH_ERRORS

__all__ = [
    "Observation",
    "Runner",
    "TestBed",
    "cotangents",
    "gradients",
    "largest_value",
    "observe",
    "run_here",
    "values_of",
]

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
    written = tuple(i for i, (now, was) in enumerate(zip(inputs, copies, strict=True)) if not _same_bits(now, was))
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


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if a.numel() else True


def cotangents(results: Sequence[Any]) -> list[torch.Tensor | None]:
    """Returns a random gradient for every floating-point result, equal for equal shapes."""
    generator = torch.Generator().manual_seed(_SEED)
    found: list[torch.Tensor | None] = []
    for result in results:
        differentiable = isinstance(result, torch.Tensor) and result.is_floating_point()
        entries = torch.randn(result.shape, generator=generator, dtype=torch.float64) if differentiable else None
        found.append(entries.to(result.dtype) if entries is not None else None)
    return found


def gradients(
    gm: fx.GraphModule, inputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], run: Runner
) -> list[torch.Tensor | None] | Exception | None:
    """Returns the gradient of every input, None for those not floating-point, or the error that the run raises.

    A gradient that autograd does not compute counts as zeros. None as a whole: no result is differentiable.
    """
    leaves = [value.requires_grad_() if value.is_floating_point() else value for value in inputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(_SEED)
        try:
            results = run(gm, leaves)
            pairs = [(r, g) for r, g in zip(results, given, strict=False) if g is not None and r.requires_grad]
            if not pairs or not wanted:
                return None
            found = iter(
                torch.autograd.grad(
                    [r for r, _ in pairs],
                    wanted,
                    [g.to(r.dtype).expand(r.shape) for r, g in pairs],
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        except TORCH_ERRORS as raised:
            return raised
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def random_gradients(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    run: Callable[[Any, Sequence[torch.Tensor]], Any] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradient of each floating-point input, of the sum of all results times random numbers.

    Counterexamples call it; equal arguments give equal gradients. `run`, if given, calls the function on the inputs.
    """
    torch.manual_seed(_SEED)
    given = [x.requires_grad_(x.is_floating_point()) for x in inputs]
    found = function(*given) if run is None else run(function, given)
    results = [torch.zeros((), requires_grad=True), *(result for result in found if result.requires_grad)]
    weights, leaves = [torch.randn(r.shape).to(r.dtype) for r in results], [x for x in given if x.requires_grad]
    return torch.autograd.grad(results, leaves, weights, allow_unused=True, materialize_grads=True)


class _Values(fx.Interpreter):
    """Runs a graph and shows the tensors among its values, in the order of the graph."""

    def __init__(self, gm: fx.GraphModule, see: Callable[[torch.Tensor], None]) -> None:
        super().__init__(gm)
        self._see = see

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._see(value.detach())
        return result


def _run_seen(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], see: Callable[[torch.Tensor], None]) -> None:
    """Runs a graph without gradients, and shows all of its tensors."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(_SEED)
        _Values(gm, see).run(*inputs)


def largest_value(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> float:
    """Returns the largest finite magnitude of inputs, intermediate values and results; rounding scales with it."""
    largest = 0.0

    def see(value: torch.Tensor) -> None:
        nonlocal largest
        if ops.is_inexact(value) and value.numel():
            finite = value[torch.isfinite(value)]
            largest = max(largest, finite.abs().max().item() if finite.numel() else 0.0)

    _run_seen(gm, inputs, see)
    return largest


def values_of(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns all tensors of a run: inputs, intermediate values and results."""
    found: list[torch.Tensor] = []
    _run_seen(gm, inputs, lambda value: found.append(value.clone()))
    return found
