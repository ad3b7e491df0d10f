"""One operator run whole and on slices of its operands: which slices give slices of the results, and which summands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from fxrewrite import ops
from fxrewrite.errors import named_line
from fxrewrite.spmd.discovery.samples import SampleError, TensorSpec
from fxrewrite.torch_versions import attention_that_checks_lengths

Place: TypeAlias = tuple[int, int]
"""(operand, dimension), with tensor operands counted in the order of the schema; or (result, dimension)."""
Chunk: TypeAlias = tuple[int, int]
"""Start and stop."""
Tensors: TypeAlias = "list[torch.Tensor]"
_TOLERANCE = 1e-10
_MAX_RUNS = 4000
"""More ways to slice operands together are not tried: the sample has too many equal sizes."""


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """One index of the operator, and what slicing it gave.

    Attributes:
        kind: "mapped" and "summed" may be sharded, "whole" may not.
        operands: its places in operands.
        results: its places in results.
        size: in the sample.
        added: operands that a sum over its slices adds once, as a bias.
        local: arguments that state its size, which a shard has its own of.
        why: what was seen.
    """

    kind: Literal["mapped", "summed", "whole"]
    operands: frozenset[Place]
    results: frozenset[Place]
    size: int
    added: frozenset[int] = frozenset()
    local: tuple[str, ...] = ()
    why: str = ""


class NotIndependentError(Exception):
    """A way of slicing that is not independent, and why."""


class SliceTrial:
    """An operator with one sample of arguments, run whole once and then on slices."""

    def __init__(self, target: torch._ops.OpOverload, sample: Mapping[str, Any]) -> None:
        self.target = target
        self.sample = {a.name: sample[a.name] for a in target._schema.arguments if a.name in sample}
        flat, self.spec = pytree.tree_flatten_with_path(drawn(self.sample))
        self.arguments = [(_argument_name(path), leaf) for path, leaf in flat]
        self.leaves = [leaf for _, leaf in self.arguments]
        tensors = [(name, leaf) for name, leaf in self.arguments if isinstance(leaf, torch.Tensor)]
        self.names = tuple(name for name, _ in tensors)
        self.operands: Tensors = [leaf for _, leaf in tensors]
        if not tensors:
            raise SampleError(f"{ops.key(target)} is given no tensor; only tensors can be sharded")
        results = self.run(self.operands, {})
        generator = torch.Generator().manual_seed(1)
        self.weights = [
            torch.randn(r.shape, dtype=r.dtype, generator=generator) if ops.is_inexact(r) else None for r in results
        ]
        self.no_gradient = ""
        self.results = [result.detach() for result in results]
        self.grads: list[torch.Tensor | None] = [None for _ in self.operands]
        try:
            _, self.grads = self._with_grads(self.operands, {})
        except (RuntimeError, NotImplementedError) as error:
            self.no_gradient = named_line(error)
        again = self.run(self.operands, {})
        if not all(map(is_close, self.results, again)):
            raise SampleError(f"{ops.key(target)} gives other results when it is run again; slices cannot be compared")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(operand.shape) for operand in self.operands]

    def is_unread(self, operand: int) -> bool:
        """Whether other numbers in an operand change nothing."""
        leaves = pytree.tree_leaves(drawn(self.sample, 1))
        other = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)][operand]
        for numbers in (other, torch.zeros_like(other)):
            operands = [numbers if k == operand else x for k, x in enumerate(self.operands)]
            try:
                results = self.run(operands, {})
            except Exception:  # noqa: BLE001  # whatever it is, it was read
                return False
            if not all(map(is_close, results, self.results)):
                return False
        return True

    def slice(self, places: Mapping[int, int], size: int) -> FoundIndex:
        """What slicing some operands, each along one dimension of `size`, gives.

        Raises:
            NotIndependentError: neither slices nor summands of the results.
        """
        half = ((0, size // 2), (size // 2, size))
        uneven = ((0, 1), (1, (size + 1) // 2), ((size + 1) // 2, size)) if size > 2 else half
        stated = any(type(leaf) is int and leaf == size for leaf in self.leaves)
        for local in (False, True):
            try:
                first, second = (self._sliced(_Cut(places, size, chunks, local)) for chunks in (half, uneven))
            except NotIndependentError:
                if local or not stated:
                    raise
                continue
            if first != second:
                raise NotIndependentError("chunks of other sizes give something else")
            return first
        raise AssertionError

    def _sliced(self, cut: _Cut) -> FoundIndex:
        """What the chunks of one cut give."""
        try:
            parts = [self.run(*cut.given(self.operands, chunk)) for chunk in cut.chunks]
        except Exception as error:
            raise NotIndependentError(f"does not run on a slice: {named_line(error)}") from error
        if any(len(results) != len(self.results) for results in parts):
            raise NotIndependentError("a slice gives another number of results")
        dims = [_cut_dim(whole, [results[place] for results in parts], cut) for place, whole in enumerate(self.results)]
        kept = [place for place, dim in enumerate(dims) if dim is None]
        if kept and len(kept) < len(dims):
            raise NotIndependentError("it is in some results and not in others")
        added = self._check_sum(cut, parts) if kept else self._check_joined(parts, dims)
        self._check_grads(cut, dims, added)
        local = [name.partition("[")[0] for name, leaf in self.arguments if type(leaf) is int and leaf == cut.size]
        why = ["slices of it give summands" if kept else "slices of it give the same slices of the result"]
        why += [f"{self.names[k]} is added once" for k in sorted(added)]
        why += [f"{', '.join(local)} states its size and must become local"] if cut.local else []
        return FoundIndex(
            "summed" if kept else "mapped",
            frozenset(cut.places.items()),
            frozenset((place, dim) for place, dim in enumerate(dims) if dim is not None),
            cut.size,
            added,
            tuple(dict.fromkeys(local)) if cut.local else (),
            "; ".join(why),
        )

    def _check_joined(self, parts: Sequence[Tensors], dims: Sequence[int | None]) -> frozenset[int]:
        for place, (whole, dim) in enumerate(zip(self.results, dims, strict=True)):
            joined = torch.cat([results[place] for results in parts], dim or 0)
            if not is_close(joined, whole):
                raise NotIndependentError(f"slices give other values{_by(joined, whole)}")
        return frozenset()

    def _check_sum(self, cut: _Cut, parts: Sequence[Tensors]) -> frozenset[int]:
        """The operands that the sum adds once: none, or one that is a bias."""
        if self._is_sum(parts):
            return frozenset()
        for k, operand in enumerate(self.operands):
            if k not in cut.places and ops.is_inexact(operand):
                without = [torch.zeros_like(x) if place == k else x for place, x in enumerate(self.operands)]
                if self._is_sum([parts[0], *(self.run(*cut.given(without, chunk)) for chunk in cut.chunks[1:])]):
                    return frozenset({k})
        total = torch.stack([results[0] for results in parts]).sum(0)
        raise NotIndependentError(f"slices do not add up{_by(total, self.results[0])}")

    def _is_sum(self, parts: Sequence[Tensors]) -> bool:
        totals = [torch.stack([results[place] for results in parts]).sum(0) for place in range(len(self.results))]
        return all(bool(r.any()) and is_close(total, r) for total, r in zip(totals, self.results, strict=True))

    def _check_grads(self, cut: _Cut, dims: Sequence[int | None], added: frozenset[int]) -> None:
        """Gradients of what is sliced are slices; of what is not, they add up."""
        if self.no_gradient:
            return
        found = [self._with_grads(*cut.given(self.operands, chunk), dims, chunk)[1] for chunk in cut.chunks]
        for k, whole in enumerate(self.grads):
            if whole is not None and k not in added:
                present = [grads[k] for grads in found]
                if any(grad is None for grad in present):
                    raise NotIndependentError(f"a slice gives {self.names[k]} no gradient")
                parts = [grad for grad in present if grad is not None]
                joined = torch.cat(parts, cut.places[k]) if k in cut.places else torch.stack(parts).sum(0)
                if not is_close(joined, whole):
                    raise NotIndependentError(f"slices give other gradients of {self.names[k]}{_by(joined, whole)}")

    def run(self, operands: Sequence[torch.Tensor], sizes: Mapping[int, int]) -> Tensors:
        """The tensor results, with integer arguments of some values replaced."""
        given = iter(operands)
        leaves = [
            next(given) if isinstance(leaf, torch.Tensor) else sizes.get(leaf, leaf) if type(leaf) is int else leaf
            for leaf in self.leaves
        ]
        with attention_that_checks_lengths():
            results = pytree.tree_leaves(self.target(**pytree.tree_unflatten(leaves, self.spec)))
        if not results or not all(isinstance(result, torch.Tensor) for result in results):
            raise SampleError(f"{ops.key(self.target)} gives more than tensors; only tensors can be sharded")
        return results

    def _with_grads(
        self,
        operands: Sequence[torch.Tensor],
        sizes: Mapping[int, int],
        dims: Sequence[int | None] = (),
        chunk: Chunk = (0, 0),
    ) -> tuple[Tensors, list[torch.Tensor | None]]:
        """The results, and the gradients of their weighted sum; weights are sliced where results are."""
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in operands]
        results = self.run(leaves, sizes)
        terms: Tensors = []
        for place, (result, weight) in enumerate(zip(results, self.weights, strict=True)):
            if weight is not None and result.requires_grad:
                dim = dims[place] if dims else None
                terms.append((result * (weight if dim is None else _chunk(weight, dim, chunk))).sum())
        wanted = [x for x in leaves if x.requires_grad]
        grads: Iterator[torch.Tensor | None] = iter(())
        if terms and wanted:
            total = torch.stack([term.real if term.is_complex() else term for term in terms]).sum()
            grads = iter(torch.autograd.grad(total, wanted, allow_unused=True))
        return [r.detach() for r in results], [next(grads, None) if x.requires_grad else None for x in leaves]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Some operands, each cut along one dimension of one size into chunks.

    Attributes:
        places: dimension by operand.
        local: whether integer arguments that equal the size become that of the chunk.
    """

    places: Mapping[int, int]
    size: int
    chunks: tuple[Chunk, ...]
    local: bool

    def given(self, operands: Sequence[torch.Tensor], chunk: Chunk) -> tuple[Tensors, dict[int, int]]:
        """What a chunk is run on: operands, and integers that replace others."""
        sliced = [_chunk(x, self.places[k], chunk) if k in self.places else x for k, x in enumerate(operands)]
        return sliced, {self.size: chunk[1] - chunk[0]} if self.local else {}


def _chunk(tensor: torch.Tensor, dim: int, chunk: Chunk) -> torch.Tensor:
    start, stop = chunk
    return tensor.narrow(dim, start, stop - start)


def _cut_dim(whole: torch.Tensor, parts: Sequence[torch.Tensor], cut: _Cut) -> int | None:
    """The dimension of a result that is cut as the operands are; None where it keeps its shape."""
    dims: set[int] = set()
    for part, (start, stop) in zip(parts, cut.chunks, strict=True):
        if part.ndim != whole.ndim:
            raise NotIndependentError("the result gets another rank")
        other = {dim for dim in range(whole.ndim) if part.shape[dim] != whole.shape[dim]}
        if any((part.shape[dim], whole.shape[dim]) != (stop - start, cut.size) for dim in other):
            raise NotIndependentError(f"a slice gives the shape {tuple(part.shape)}, the whole {tuple(whole.shape)}")
        dims |= other
    if len(dims) > 1:
        raise NotIndependentError(f"it cuts {len(dims)} dimensions of the result")
    return next(iter(dims), None)


def find_indices(trial: SliceTrial) -> list[FoundIndex]:
    """The independent indices, then those that must be whole; each dimension of an operand is in one."""
    claimed: set[Place] = set()
    found: list[FoundIndex] = []
    why: dict[Place, str] = {}
    runs = 0
    for size in sorted({size for shape in trial.shapes for size in shape if size > 1}):
        for places in _together(trial.shapes, size):
            if not claimed.isdisjoint(places.items()):
                continue
            runs += 1
            if runs > _MAX_RUNS:
                raise SampleError("the sample has too many dimensions of one size; give others with --args")
            try:
                index = trial.slice(places, size)
            except NotIndependentError as error:
                if len(places) == 1:
                    why.setdefault(next(iter(places.items())), str(error))
                continue
            if index.kind == "summed" and all(map(trial.is_unread, places)):
                why |= dict.fromkeys(places.items(), "no value of it is read")
                continue
            found.append(index)
            claimed |= index.operands
    return [*sorted(found, key=lambda index: min(index.operands)), *_whole(trial, found, claimed, why)]


def _together(shapes: Sequence[tuple[int, ...]], size: int) -> list[dict[int, int]]:
    """The ways to slice operands along one dimension of this size each, fewest operands first."""
    choices = [[None, *(dim for dim, n in enumerate(shape) if n == size)] for shape in shapes]
    ways = [{k: dim for k, dim in enumerate(way) if dim is not None} for way in itertools.product(*choices)]
    return sorted(filter(None, ways), key=len)


def _whole(
    trial: SliceTrial, found: Sequence[FoundIndex], claimed: set[Place], why: Mapping[Place, str]
) -> list[FoundIndex]:
    """What is left: dimensions of one size are one index, if each tensor has one of them; of size 1, each its own."""
    left = [
        (operand, dim, size)
        for operand, shape in enumerate(trial.shapes)
        for dim, size in enumerate(shape)
        if (operand, dim) not in claimed
    ]
    taken = {place for index in found for place in index.results}
    results = [
        (place, dim, size)
        for place, result in enumerate(trial.results)
        for dim, size in enumerate(result.shape)
        if (place, dim) not in taken
    ]
    indices: list[FoundIndex] = []
    for size in dict.fromkeys(size for _, _, size in left):
        operands = [(operand, dim) for operand, dim, n in left if n == size]
        of_results = [(place, dim) for place, dim, n in results if n == size]
        is_one = size > 1 and all(
            len({tensor for tensor, _ in places}) == len(places) for places in (operands, of_results)
        )
        for places in [operands] if is_one else [[place] for place in operands]:
            reason = next((why[place] for place in places if place in why), "of size 1 in the sample")
            kept = frozenset(of_results) if is_one else frozenset[Place]()
            indices.append(FoundIndex("whole", frozenset(places), kept, size, why=reason))
    return indices


def drawn(sample: Any, seed: int = 0) -> Any:
    """The sample with its tensors drawn."""
    generator = torch.Generator().manual_seed(seed)
    return pytree.tree_map(lambda leaf: leaf.draw(generator) if isinstance(leaf, TensorSpec) else leaf, sample)


def _argument_name(path: Sequence[Any]) -> str:
    name, *rest = path
    return f"{name.key}{''.join(map(str, rest))}"


def is_close(found: torch.Tensor, whole: torch.Tensor) -> bool:
    if found.shape != whole.shape or found.dtype != whole.dtype:
        return False
    if not ops.is_inexact(found):
        return torch.equal(found, whole)
    return torch.allclose(found, whole, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def _by(found: torch.Tensor, whole: torch.Tensor) -> str:
    """How far apart they are."""
    if found.shape != whole.shape or not ops.is_inexact(found):
        return ""
    return f", off by {(found - whole).abs().max().item():.2g}"
