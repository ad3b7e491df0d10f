"""A sample: everything that determines a graph in which a pattern occurs, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from fxrewrite.verify.calls import Form
from fxrewrite.verify.readings import Reading
from fxrewrite.verify.tensors import InputSpec

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
        return replace(self, bindings={**self.bindings, name: value})

    def changed(self, chosen: Callable[[str, InputSpec], bool], **fields: Any) -> Sample:
        """Returns the sample with other fields of the inputs that are chosen, except of tensors that a sampler gave."""

        def made(name: str, binding: Binding) -> Binding:
            if isinstance(binding, list):
                return [made(f"{name}_{i}", item) for i, item in enumerate(binding)]
            is_changed = isinstance(binding, InputSpec) and not binding.is_given and chosen(name, binding)
            return replace(binding, **fields) if is_changed else binding

        return replace(self, bindings={name: made(name, binding) for name, binding in self.bindings.items()})

    def inputs(self) -> list[torch.Tensor]:
        """Makes the inputs of the graph, in fresh memory."""
        return [spec.tensor() for _, spec in self.specs()]

    def specs(self) -> Iterator[tuple[str, InputSpec]]:
        """Yields the names of the graph's inputs, in order, with their specs."""
        for name, binding in self.bindings.items():
            if isinstance(binding, InputSpec):
                yield name, binding
            elif isinstance(binding, list):
                yield from ((f"{name}_{i}", spec) for i, spec in enumerate(binding) if isinstance(spec, InputSpec))


def given_binding(value: Any, *, is_param: bool = False) -> Binding:
    """Returns what a sampler gave as a binding: tensors, those of lists too, as specs that must not be changed."""
    if isinstance(value, list):
        return [given_binding(item, is_param=is_param) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return InputSpec(tuple(value.shape), value.dtype, data=value, is_given=True, is_param=is_param)
