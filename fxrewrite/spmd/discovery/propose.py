"""From what slicing an operator gave to index notation: names, repeated dimensions, operands that may be absent."""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Iterator, Sequence, Set as AbstractSet
from typing import Any

from torch.utils import _pytree as pytree

from fxrewrite.spmd.discovery.samples import TensorSpec
from fxrewrite.spmd.discovery.slices import FoundIndex, Place, SliceTrial, find_indices, is_close

_RUN = "n"
"""The name of an index that stands for any number of dimensions."""


class Proposal:
    """From indices to notation: names, repeated dimensions, operands that may be absent.

    Every dimension of every tensor, operands first, gets the number of its index; what is in none of them gets a number
    of its own.
    """

    def __init__(self, trial: SliceTrial, indices: Sequence[FoundIndex]) -> None:
        self.trial = trial
        self.indices = indices
        self.num_operands = len(trial.operands)
        of_operands = {place: number for number, index in enumerate(indices) for place in index.operands}
        self.broadcast = dict(self._broadcasts())
        of_operands |= self.broadcast
        of_results = {place: number for number, index in enumerate(indices) for place in index.results}
        fresh = itertools.count(len(indices))
        self.dims = [
            *([of_operands[k, dim] for dim in range(x.ndim)] for k, x in enumerate(trial.operands)),
            *([of_results.get((k, dim), next(fresh)) for dim in range(x.ndim)] for k, x in enumerate(trial.results)),
        ]

    def write(self) -> tuple[str, list[str]]:
        """The notation of every rank that is found to be alike, and what it cannot say."""
        run = next((length for length in range(self._longest_run(), 0, -1) if self._repeats(length)), 0)
        optional = {k for k in range(self.num_operands) if self._may_be_absent(k)}
        return self.text(run, optional), list(self._notes())

    def text(self, run: int = 0, optional: AbstractSet[int] = frozenset(), repeated_as: str = f"{_RUN}...") -> str:
        """The notation; the first `run` dimensions of the first result are written as any number of dimensions."""
        repeated = self.dims[self.num_operands][:run]
        letters = iter(letter for letter in string.ascii_letters if letter != _RUN)
        names: dict[int, str] = {}
        words: list[list[str]] = []
        for tensor, numbers in enumerate(self.dims):
            start = _find(repeated, numbers)
            words.append([])
            for dim, number in enumerate(numbers):
                if start is not None and start <= dim < start + run:
                    words[-1] += [repeated_as] if dim == start else []
                    continue
                if number not in names:
                    names[number] = next(letters)
                must = tensor < self.num_operands and self.indices[number].kind == "whole"
                words[-1].append("!" * must + names[number])
        added = {operand for index in self.indices for operand in index.added}
        operands: list[str] = []
        for operand in self._slots():
            if operand is None:
                operands.append(f"!{next(letters)}...?")
            else:
                text = " ".join(filter(None, words[operand]))
                operands.append("+" * (operand in added) + text + "?" * (operand in optional))
        results = [" ".join(filter(None, of_result)) for of_result in words[self.num_operands :]]
        return f"{', '.join(operands)} -> {', '.join(results)}".strip()

    def _slots(self) -> Iterator[int | None]:
        """For each tensor argument of the schema, its operand; None where it is absent."""
        given = iter(range(self.num_operands))
        for argument in self.trial.target._schema.arguments:
            if "Tensor" in str(argument.type):
                value = self.trial.sample.get(argument.name)
                for item in value if isinstance(value, list) else [value]:
                    yield next(given) if isinstance(item, TensorSpec) else None

    def _broadcasts(self) -> Iterator[tuple[Place, int]]:
        """Dimensions of size 1 that stand for an index: made as long as the index, the result stays what it is."""
        for place in sorted(p for index in self.indices for p in index.operands if index.size == 1):
            operand, dim = place
            for number, index in enumerate(self.indices):
                if index.kind == "mapped" and all(k != operand for k, _ in index.operands):
                    operands = list(self.trial.operands)
                    operands[operand] = operands[operand].repeat_interleave(index.size, dim)
                    try:
                        results = self.trial.run(operands, {})
                    except Exception:  # noqa: BLE001  # whatever it is, it does not take the longer one
                        continue
                    if all(map(is_close, results, self.trial.results)):
                        yield place, number

    def _longest_run(self) -> int:
        """How many first dimensions of the first result, all independent, stand together wherever one of them does."""
        numbers = self.dims[self.num_operands]
        for length in range(len(numbers), 0, -1):
            run = numbers[:length]
            independent = all(n < len(self.indices) and self._is_free(self.indices[n]) for n in run)
            if independent and all(_find(run, dims) is not None or not set(run) & set(dims) for dims in self.dims):
                return length
        return 0

    def _is_free(self, index: FoundIndex) -> bool:
        return index.kind == "mapped" and not index.local

    def _repeats(self, run: int) -> bool:
        """Whether the same is found with one dimension more in the place of these, and with fewer."""
        known = {size for x in (*self.trial.operands, *self.trial.results) for size in x.shape}
        extra = next(size for size in itertools.count(2) if size not in known)
        sizes = [self.indices[number].size for number in self.dims[self.num_operands][:run]]
        if self._with_run(run, [extra, *sizes]) != self.text(run):
            return False
        fewer = [self._with_run(run, sizes[start:]) for start in range(1, run + 1)]
        none = self.text(run, repeated_as="")
        return all(text in (None, none if start == run else self.text(run)) for start, text in enumerate(fewer, 1))

    def _with_run(self, run: int, sizes: Sequence[int]) -> str | None:
        """The notation found with these sizes in the place of the run; None where the operator does not take them."""
        repeated = self.dims[self.num_operands][:run]
        shapes = iter(zip(self.dims, self.trial.shapes, strict=False))

        def resized(spec: Any) -> Any:
            if not isinstance(spec, TensorSpec):
                return spec
            numbers, shape = next(shapes)
            start = _find(repeated, numbers)
            if start is None:
                return spec
            return dataclasses.replace(spec, shape=(*shape[:start], *sizes, *shape[start + run :]))

        sample = pytree.tree_map(resized, self.trial.sample)
        try:
            trial = SliceTrial(self.trial.target, sample)
            return Proposal(trial, find_indices(trial)).text(len(sizes))
        except Exception:  # noqa: BLE001  # whatever it is, the operator does not take these shapes
            return None

    def _may_be_absent(self, operand: int) -> bool:
        """Whether an optional operand changes nothing for the others when it is left out."""
        name = self.trial.names[operand]
        types = {a.name: str(a.type) for a in self.trial.target._schema.arguments}
        if types.get(name) != "Optional[Tensor]":
            return False
        try:
            trial = SliceTrial(self.trial.target, {n: v for n, v in self.trial.sample.items() if n != name})
        except Exception:  # noqa: BLE001  # whatever it is, the operator needs it
            return False
        found = {(i.kind, i.operands, i.results) for i in find_indices(trial) if i.kind != "whole"}
        return found == {
            (i.kind, frozenset((k - (k > operand), dim) for k, dim in i.operands if k != operand), i.results)
            for i in self.indices
            if i.kind != "whole" and any(k != operand for k, _ in i.operands)
        }

    def _notes(self) -> Iterator[str]:
        if self.trial.no_gradient:
            yield f"gradients were not compared: {self.trial.no_gradient}"
        for place in self.broadcast:
            yield f"{place_text(self.trial.names, place)} has size 1 and broadcasts"
        for name, value in self.trial.sample.items():
            if isinstance(value, list) and any(isinstance(item, TensorSpec) for item in value):
                yield f"{name} is a list, and this is a rule for {len(value)} of them; any number needs a function"
        for argument in self.trial.target._schema.arguments:
            if str(argument.type) == "Optional[Tensor]" and argument.name not in self.trial.names:
                yield f"{argument.name} was not given, so nothing is known of it: it must be whole"
        for name in dict.fromkeys(name for index in self.indices for name in index.local):
            yield f"{name} states a size that becomes local: say so with shape_arg or run_args"
        for operand, name in enumerate(self.trial.names):
            if self.trial.is_unread(operand):
                yield f"no value of {name} is read; a function can say so, and keep its placement"


def _find(run: Sequence[int], numbers: Sequence[int]) -> int | None:
    """Where the run stands."""
    starts = range(len(numbers) - len(run) + 1) if run else ()
    return next((start for start in starts if list(numbers[start : start + len(run)]) == list(run)), None)


def place_text(names: Sequence[str], place: Place) -> str:
    return f"{names[place[0]]} dim {place[1]}"
