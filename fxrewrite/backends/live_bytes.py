"""Bytes of the storages that live while operators run without data, and what a step holds, counted so."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fxrewrite.graph.sizes import size_hint

_log = logging.getLogger(__name__)
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_EMPTY = frozenset(
    {
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.as_strided.default,
    }
)
"""What generated code calls between its kernels."""

_KERNELS_OF_TORCH = frozenset({"aten", "prim", "prims", "_c10d_functional", "inductor", "rngprims"})
"""Namespaces whose operators have kernels that allocate little beside their results."""
_WITHOUT_INSIDE = frozenset(
    {
        *("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"),
        *("run_and_save_rng_state", "run_with_rng_state"),  # torch's own operators that draw, to be computed again
    }
)
"""Higher-order operators that allocate nothing beside their results."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that one step holds on one device.

    Attributes:
        given: of the inputs: parameters, buffers, the batch. They live all the time.
        forward: the peak of the forward pass, with what is given.
        backward: the peak of the backward pass, with what is given and with gradients; 0 without one.
        saved: what the forward pass leaves for the backward pass and the caller.
        gradients: of the inputs that require them, which live when the step has ended.
        at: the operator at the peak.
        unknown: operators whose inside could not be run without data, and is not counted: custom ones that read data or
            have no body in Python, and higher-order ones.
        is_guess: whether it is guessed what inductor fuses.
    """

    given: int
    forward: int
    backward: int
    saved: int
    gradients: int
    at: str
    unknown: tuple[str, ...] = ()
    is_guess: bool = False

    def with_inputs(self, given: int) -> StepMemory:
        """This, which was counted above the inputs, with the bytes of these."""
        backward = given + self.backward if self.backward else 0
        return replace(self, given=given, forward=given + self.forward, backward=backward)

    @property
    def peak(self) -> int:
        """The most that is held at any time of the step."""
        return max(self.forward, self.backward)


def unknown_inside(target: Any) -> set[str]:
    """The name of an operator that may allocate more than its results, unless its body is run."""
    if isinstance(target, HigherOrderOperator):
        return {target.name()} - _WITHOUT_INSIDE
    is_foreign = isinstance(target, OpOverload) and target.namespace not in _KERNELS_OF_TORCH
    return {target._schema.name} if is_foreign else set()


def storage_key(tensor: torch.Tensor) -> int:
    """Returns what tensors have in common that share memory."""
    return tensor.untyped_storage()._cdata


def fake_like(given: Any) -> Any:
    """Returns a tensor of the mode that is active, or a number, with sizes as they were traced.

    An integer on the CPU is one that an operator may read, such as the seed of a draw: it is a number that the mode
    knows. Which number it is changes nothing that is allocated for a seed.
    """
    if isinstance(given, torch.Tensor):
        if given.dim() == 0 and given.device.type == "cpu" and given.dtype == torch.int64:
            return torch.tensor(0)
        shape, stride = (tuple(map(size_hint, sizes)) for sizes in (given.shape, given.stride()))
        return torch.empty_strided(shape, stride, dtype=given.dtype, device=given.device)
    return size_hint(given) if isinstance(given, torch.SymInt) else given


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are made and still live; of custom operators, the body runs.

    Attributes:
        held: bytes that live now.
        peak: the most that lived since the start.
        at: the operator or kernel at the peak, as far as is known.
    """

    def __init__(self, given: Iterable[Any] = ()) -> None:
        super().__init__()
        self._known: set[int] = set()
        self.held = self.peak = 0
        self.at = ""
        self._unknown: set[str] = set()
        self._now, self._bodies = "", _Bodies(self)
        self.know(given)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The operators whose inside could not be run."""
        return tuple(sorted(self._unknown))

    def know(self, given: Iterable[Any]) -> None:
        """Does not count these tensors."""
        self._known |= {storage_key(x) for x in given if isinstance(x, torch.Tensor)}

    def restart(self) -> None:
        """Looks for the peak from now on."""
        self.peak, self.at = self.held, ""

    def calls(self, name: str) -> None:
        """Says what runs now; "" is an allocation for what runs next."""
        self._now = name
        self.at = self.at or name

    supports_higher_order_operators = True

    def __enter__(self) -> Self:
        self._bodies.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._bodies.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._unknown |= unknown_inside(func)
        if isinstance(func, OpOverload) and func.namespace != "prim" and not self._bodies.is_inside:
            self.calls("" if func in _EMPTY else _name_of(func))
        # Without data, waiting for a collective makes a tensor; it is what the collective made.
        made = args[0] if func is _WAIT else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        return made

    def _add(self, tensor: torch.Tensor) -> None:
        storage, identity = tensor.untyped_storage(), storage_key(tensor)
        size = size_hint(storage.nbytes())
        if identity in self._known:
            return
        self._known.add(identity)
        self.held += size
        if self.held > self.peak:
            self.peak, self.at = self.held, self._now
        weakref.finalize(storage, self._drop, identity, size)

    def _drop(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.held -= size


class _Bodies(TorchFunctionMode):
    """Runs the bodies of custom operators, before autograd and transforms, which bodies may use, are switched off."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live
        self.is_inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (isinstance(func, OpOverload) and func._schema.name in OPDEFS):
            return func(*args, **kwargs)
        was_inside, self.is_inside = self.is_inside, True
        if not was_inside:
            self._live.calls(_name_of(func))
        before = self._live.peak, self._live.at
        try:
            with self:
                return OPDEFS[func._schema.name]._init_fn(*tree_map(_readable, args), **tree_map(_readable, kwargs))
        except Exception as error:  # noqa: BLE001  # any: bodies may read data, which is not there
            _log.debug("the inside of %s is not counted: %r", func, error)
        finally:
            self.is_inside = was_inside
        self._live.peak, self._live.at = before  # not that of a part of the body
        return func(*args, **kwargs)


def _name_of(func: OpOverload) -> str:
    return func._schema.name.rpartition(":")[2]


def _readable(given: Any) -> Any:
    is_number = isinstance(given, torch.Tensor) and given.dim() == 0 and given.device.type == "cpu"
    return fake_like(given) if is_number and given.dtype == torch.int64 else given
