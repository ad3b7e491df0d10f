"""One call of an operator on values: what it is given, and how a result is made of entries of the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from sympy import Integer, Symbol
from torch import fx

from fxrewrite.prove.arithmetic import SymbolicArithmetic, cast
from fxrewrite.prove.indices import Expr, Indices, is_same
from fxrewrite.prove.reals import total
from fxrewrite.prove.value import At, SymbolicTensor, UnknownError, tensors_in


@dataclass(frozen=True, slots=True)
class SymbolicCall:
    """A call.

    Attributes:
        arithmetic: how numbers are read.
        key: of the operator.
        args: arguments by name; tensors are values.
        result: the fake tensors, or the list of them, that the call gives.
        node: the node of the graph.
    """

    arithmetic: SymbolicArithmetic
    key: str
    args: Mapping[str, Any]
    result: Any
    node: fx.Node

    # What is read of the call

    @property
    def name(self) -> str:
        """The key without its namespace."""
        return self.key.rpartition("::")[2]

    @property
    def indices(self) -> Indices:
        """Of all values."""
        return self.arithmetic.indices

    @property
    def shape(self) -> tuple[Expr, ...]:
        """The sizes of the result."""
        return self.arithmetic.shape(self.result)

    @property
    def dtype(self) -> torch.dtype:
        """That of the result."""
        return self.result.dtype

    @property
    def operands(self) -> list[SymbolicTensor]:
        """All tensors among the arguments."""
        return [value for argument in self.args.values() for value in tensors_in(argument)]

    @property
    def first(self) -> SymbolicTensor:
        """The first tensor among the arguments."""
        return self.operands[0]

    def dim(self, name: str = "dim") -> int:
        """The dimension of the first operand that an argument names, counted from 0."""
        return self.args[name] % max(len(self.first.shape), 1)

    def text(self) -> str:
        """The call, by what it is called with."""
        return f"{self.key}({', '.join(f'{name}={self.text_of(value)}' for name, value in self.args.items())})"

    def text_of(self, argument: Any) -> str:
        """An argument, with tensors by name."""
        if isinstance(argument, SymbolicTensor):
            return argument.name
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(map(self.text_of, argument))}]"
        if isinstance(argument, (torch.SymInt, torch.SymFloat)):
            return str(self.arithmetic.number(argument))
        return repr(argument)

    # Results

    def value(self, at: At, shape: Sequence[Expr] | None = None) -> SymbolicTensor:
        """Returns a result with these entries."""
        return SymbolicTensor(tuple(shape or self.shape), self.dtype, at, self.text())

    def entrywise(self, function: Callable[..., Expr], *names: str) -> SymbolicTensor:
        """Returns a function of the entries of operands and of numbers."""
        return self.value(lambda i: function(*(self.operand(self.args[name], i) for name in names)))

    def reduced(self, function: Callable[[Expr, list[Symbol]], Expr]) -> SymbolicTensor:
        """Returns a function of all entries along the dimensions that the argument `dim` names."""
        x, keepdim = self.first, self.args.get("keepdim", False)
        rank = len(x.shape)
        over = {dim % max(rank, 1) for dim in self._reduced_dims()} if rank else set[int]()

        def at(index: Sequence[Expr]) -> Expr:
            bound = {dim: self.indices.fresh(x.shape[dim]) for dim in sorted(over)}
            given = iter(index)
            inner: list[Expr] = []
            for dim in range(rank):
                if dim in bound:
                    inner.append(bound[dim])
                    if keepdim:
                        next(given)
                else:
                    inner.append(next(given))
            return function(cast(x.at(inner), x.dtype, self.dtype), list(bound.values()))

        return self.value(at)

    def num_reduced(self) -> Expr:
        """How many entries a reduction reads for one of its own."""
        shape = self.first.shape
        return sympy.prod([shape[dim] for dim in self._reduced_dims()]) if shape else Integer(1)

    def _reduced_dims(self) -> Sequence[int]:
        dims = self.args.get("dim")
        if dims is None or dims == []:
            return range(len(self.first.shape))
        return dims if isinstance(dims, (list, tuple)) else [dims]

    # Entries

    def read(self, operand: Any, index: Sequence[Expr], dtype: torch.dtype | None = None) -> Expr:
        """The entry of an operand that is broadcast to the result, or a number; cast to `dtype` if that differs."""
        if not isinstance(operand, SymbolicTensor):
            return self.arithmetic.number(operand)
        full = self.shape if len(index) == len(self.shape) else operand.shape
        at = self.broadcast(index, operand.shape, full)
        return cast(operand.at(at), operand.dtype, dtype or operand.dtype)

    def operand(self, operand: Any, index: Sequence[Expr]) -> Expr:
        """The entry of an operand of arithmetic in the dtype of the result, or a number."""
        if isinstance(operand, SymbolicTensor):
            return self.read(operand, index, self.dtype)
        return self.arithmetic.operand(operand, self.dtype)

    def broadcast(self, index: Sequence[Expr], shape: Sequence[Expr], full: Sequence[Expr]) -> list[Expr]:
        """Returns where the entry at an index of shape `full` is in a tensor of `shape` that is broadcast to it."""
        own, wanted = index[len(index) - len(shape) :], full[len(full) - len(shape) :]
        for size, whole in zip(shape, wanted, strict=True):
            if size != 1 and not is_same(size, whole):
                raise UnknownError(f"{self.key}: it is not known whether size {size} is broadcast to {whole}")
        return [Integer(0) if size == 1 else i for i, size in zip(own, shape, strict=True)]

    def total(self, entry: Expr, over: Iterable[Symbol]) -> Expr:
        """Returns the sum of an entry over indices."""
        return total(entry, over, self.indices)


Meaning: TypeAlias = Callable[[SymbolicCall], Any]
"""Returns what a call gives, or NotImplemented for arguments with which the operator means something else."""
