"""A sample: everything that determines a graph in which a pattern occurs, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from fxrewrite.verify.calls import Form
from fxrewrite.verify.readings import Reading
from fxrewrite.verify.tensors import Contents, InputSpec

__all__ = ["TORCH_ERRORS", "Binding", "Sample"]

Binding: TypeAlias = Any
"""A InputSpec, a list of these, a Python value, or `...` for the operator's default."""
TORCH_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""Exceptions that operators raise if they are called wrongly."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Everything that determines a graph and its inputs.

    Attributes:
        reading: of the pattern.
        form: ATen overloads, or torch functions and methods.
        twice: whether equal pure terms are computed twice.
        exposed: whether values that may have other users are outputs too.
        bindings: values by capture; for what the pattern ignores, by place.
        size_calls: whether sizes of values are calls that read them; else numbers.
    """

    reading: Reading
    form: Form
    twice: bool
    exposed: bool
    bindings: Mapping[str, Binding]
    size_calls: bool = False

    def with_binding(self, name: str, value: Binding) -> Sample:
        """Returns the sample with one value replaced; `...` means the operator's default."""
        bindings = {**self.bindings, name: value}
        return replace(self, bindings=bindings)

    def in_dtype(self, dtype: torch.dtype) -> Sample:
        """Returns the sample drawn in one floating-point dtype, except tensors that a sampler gave."""

        def converted(spec: InputSpec) -> InputSpec:
            return replace(spec, dtype=dtype) if spec.dtype.is_floating_point and not spec.is_given else spec

        return self._with_specs(converted)

    def plain(self, contents: Contents) -> Sample:
        """Returns the sample with contiguous inputs and other entries, except tensors that a sampler gave."""

        def made_plain(spec: InputSpec) -> InputSpec:
            return spec if spec.is_given else replace(spec, layout="contiguous", contents=contents)

        return self._with_specs(made_plain)

    def with_bounds(self, names: Collection[str], bounds: tuple[int, int] | None) -> Sample:
        """Returns the sample with the integers of these inputs within bounds, see `InputSpec.bounds`."""
        chosen = {spec for name, spec in self.specs() if name in names}
        return self._with_specs(lambda spec: replace(spec, bounds=bounds) if spec in chosen else spec)

    def with_named(self, name: str, integer: int) -> Sample:
        """Returns the sample where some entries of an input are this integer, see `InputSpec.named`."""
        chosen = next(spec for other, spec in self.specs() if other == name)
        return self._with_specs(lambda spec: replace(spec, named=integer) if spec is chosen else spec)

    def with_contents(self, contents: Contents, points: tuple[float, ...]) -> Sample:
        """Returns the sample with other entries of its real inputs, except of tensors that a sampler gave."""

        def changed(spec: InputSpec) -> InputSpec:
            is_kept = spec.is_given or not spec.dtype.is_floating_point
            return spec if is_kept else replace(spec, contents=contents, points=points)

        return self._with_specs(changed)

    def _with_specs(self, change: Callable[[InputSpec], InputSpec]) -> Sample:
        def changed(binding: Binding) -> Binding:
            if isinstance(binding, list):
                return [changed(item) for item in binding]
            return change(binding) if isinstance(binding, InputSpec) else binding

        return replace(self, bindings={name: changed(binding) for name, binding in self.bindings.items()})

    def specs(self) -> Iterator[tuple[str, InputSpec]]:
        """Yields the names of the graph's inputs, in order, with their specs."""
        for name, binding in self.bindings.items():
            if isinstance(binding, InputSpec):
                yield name, binding
            elif isinstance(binding, list):
                yield from ((f"{name}_{i}", spec) for i, spec in enumerate(binding) if isinstance(spec, InputSpec))
