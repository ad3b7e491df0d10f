"""A sample: everything that determines one graph in which a pattern stands, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from fxrewrite.verify.calls import Form
from fxrewrite.verify.readings import Reading
from fxrewrite.verify.tensors import Contents, TensorSpec

__all__ = ["TORCH_ERRORS", "Binding", "Sample"]

Binding: TypeAlias = Any
"""A TensorSpec, a list of them, a Python value, or `...` for what is left to the operator's default."""
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
"""What an operator raises when it is called wrongly."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Everything that determines a graph and its inputs.

    Attributes:
        reading: of the pattern.
        form: ATen overloads, or torch functions and methods.
        twice: whether equal pure terms are computed twice.
        exposed: whether values that may have other users are outputs too.
        bindings: by capture, and by place for what the pattern ignores.
    """

    reading: Reading
    form: Form
    twice: bool
    exposed: bool
    bindings: Mapping[str, Binding]

    def with_binding(self, name: str, value: Binding) -> Sample:
        """The same sample with one value replaced; one that is `...` is left to the operator's default."""
        bindings = {**self.bindings, name: value}
        return replace(self, bindings=bindings)

    def in_finer_dtype(self, finer: Mapping[torch.dtype, torch.dtype]) -> Sample:
        """The same entries in other dtypes; a dtype that is captured, and that an input has, changes with it."""
        had = {spec.dtype for _, spec in self.specs()}

        def converted(spec: TensorSpec) -> TensorSpec:
            if spec.dtype not in finer:
                return spec
            entries = spec.tensor().to(finer[spec.dtype])
            return replace(spec, dtype=entries.dtype, data=entries)

        sample = self._with_specs(converted)
        dtypes = {name: value for name, value in sample.bindings.items() if isinstance(value, torch.dtype)}
        other = {name: finer[dtype] for name, dtype in dtypes.items() if dtype in had and dtype in finer}
        return replace(sample, bindings={**sample.bindings, **other})

    def in_dtype(self, dtype: torch.dtype) -> Sample:
        """The same, drawn in one floating-point dtype, but for what a sampler gave."""

        def converted(spec: TensorSpec) -> TensorSpec:
            return replace(spec, dtype=dtype) if spec.dtype.is_floating_point and not spec.is_given else spec

        return self._with_specs(converted)

    def plain(self, contents: Contents) -> Sample:
        """The same with contiguous inputs and other entries, but for those that a sampler gave."""

        def made_plain(spec: TensorSpec) -> TensorSpec:
            return spec if spec.is_given else replace(spec, layout="contiguous", contents=contents)

        return self._with_specs(made_plain)

    def _with_specs(self, change: Callable[[TensorSpec], TensorSpec]) -> Sample:
        def changed(binding: Binding) -> Binding:
            if isinstance(binding, list):
                return [changed(item) for item in binding]
            return change(binding) if isinstance(binding, TensorSpec) else binding

        return replace(self, bindings={name: changed(binding) for name, binding in self.bindings.items()})

    def specs(self) -> Iterator[tuple[str, TensorSpec]]:
        """The names of the graph's inputs, in order, and how to make them."""
        for name, binding in self.bindings.items():
            if isinstance(binding, TensorSpec):
                yield name, binding
            elif isinstance(binding, list):
                yield from ((f"{name}_{i}", spec) for i, spec in enumerate(binding) if isinstance(spec, TensorSpec))
