"""What differs between the versions of torch that fxrewrite runs on, from 2.11 to the newest.

The only file of the packages that asks which torch this is; each entry says which version makes it unnecessary.
docs/compatibility.md has the versions that are tested.
"""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import custom_graph_pass
from torch.fx.experimental import _config, symbolic_shapes
from torch.nn.attention import SDPBackend, sdpa_kernel

TORCH_VERSION: str = torch.__version__
"""For keys of caches."""
_NUMBERS = tuple(int(number) for number in TORCH_VERSION.split(".")[:2])

CLAMP_PASSES_AT_BOUNDS: bool = _NUMBERS < (2, 14)
"""Whether `clamp` passes the gradient where its input equals a bound; with torch 2.14 as the oldest it never does."""

DISPATCHES_DTENSOR_SUBCLASSES: bool = _NUMBERS >= (2, 12)
"""Whether a subclass of DTensor gets its operators; torch 2.11 runs DTensor's. With 2.12 as the oldest all do."""

GROUPED_ATTENTION_NEEDS_HEADS: bool = _NUMBERS < (2, 12)
"""Whether attention with `enable_gqa` ends the process where keys have no head (it divides by their number in C++)."""


def hint_of_size(size: torch.SymInt, fallback: int) -> int:
    """The value of a symbolic size for the inputs of the trace, without a guard; `fallback` for what data decide."""
    # torch 2.12 renamed `size_hint` of torch 2.11; with 2.12 as the oldest, `optimization_hint` alone remains.
    hint = getattr(symbolic_shapes, "optimization_hint", None) or getattr(symbolic_shapes, "size_hint")  # noqa: B009
    return hint(size, fallback=fallback)


def hint_of_expression(expr: Any, shapes: Any, fallback: int) -> int:
    """The same for an expression over the symbols of a ShapeEnv."""
    if hasattr(shapes, "optimization_hint"):
        return shapes.optimization_hint(expr, fallback=fallback)
    # torch 2.12 has the method; its 2.11 counterpart, `ShapeEnv.size_hint`, takes no fallback.
    known = expr.xreplace(shapes.replacements).xreplace(shapes.backed_var_to_val)
    return int(known.xreplace({symbol: sympy.Integer(fallback) for symbol in known.free_symbols}))


def symbolic_kernels() -> AbstractContextManager[Any]:
    """Inside of the scope, operators run on fake values of symbolic sizes by Python's kernels, as they are traced.

    The others read sizes as numbers without a word where guards are suppressed: `matmul` up to torch 2.12, and
    `constant_pad_nd` up to 2.15 at least, whose result then has the traced length for every length.
    """
    return enable_python_dispatcher()


def reshapes_of_any_length() -> AbstractContextManager[Any]:
    """Inside of the scope, a reshape of fake values reads no symbolic size as the number that it is in the trace.

    Else a size that is 1 there is taken for one of its literal 1s, without a word where guards are suppressed.
    """
    return _config.patch(backed_size_oblivious=True)  # pyright: ignore[reportAttributeAccessIssue]


def attention_that_checks_lengths() -> AbstractContextManager[Any]:
    """Inside of the scope, attention over keys and values of two lengths raises RuntimeError."""
    # torch 2.14 runs three dimensions by its fused kernel for CPUs as well, which reads beyond the shorter operand and
    # can end the process; the first torch whose kernel compares the lengths makes this unnecessary. 2.15 does not.
    return sdpa_kernel(SDPBackend.MATH)


def order_of_writes() -> tuple[None, ...]:
    """The entries of flex attention's block mask that say in which order a backward pass writes; none is required."""
    # torch 2.13 added four; with 2.13 as the oldest, `(None,) * 4` remains.
    from torch.nn.attention.flex_attention import BlockMask  # here: it loads Dynamo

    return tuple(None for name in BlockMask.__annotations__ if name.startswith("dq_"))


class PickledByUuid:
    """A pass of inductor that cache keys know by its `uuid()`, in every slot."""

    # torch 2.12 reads `uuid()` in every slot; 2.11 pickles what is in `pre_grad_custom_pass`.
    def uuid(self) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.uuid():
            raise pickle.PicklingError("the pass has no uuid, so nothing is cached")
        return str, (self.uuid(),)


def passes_of_slot(passes: tuple[Any, ...]) -> Any:
    """The value of one of inductor's slots for custom passes under which it runs these, in order."""
    # torch 2.13 takes a tuple in every slot, which makes `_PassesInOrder` unnecessary.
    return passes if hasattr(custom_graph_pass, "get_custom_graph_passes") else _PassesInOrder(passes)


_Aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)  # torch 2.11 has no such passes
if TYPE_CHECKING:
    _Pass = custom_graph_pass.CustomGraphPass
else:
    _Pass = _Aware or custom_graph_pass.CustomGraphPass


class _PassesInOrder(PickledByUuid, _Pass):
    """Several passes of inductor as one, for a torch whose slots take one."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = tuple(one for some in passes for one in getattr(some, "passes", (some,)))

    def __call__(self, graph: fx.Graph, **is_inference: bool) -> None:
        for custom_pass in self.passes:
            is_aware = _Aware is not None and isinstance(custom_pass, _Aware)
            custom_pass(graph, **is_inference) if is_aware else custom_pass(graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # inductor copies its configuration; what is in it need not have a uuid

    def uuid(self) -> tuple[Any, ...] | None:
        """The passes' own in order; None, which keeps what is compiled out of the caches, where one has none."""
        uuids = tuple(custom_pass.uuid() if hasattr(custom_pass, "uuid") else None for custom_pass in self.passes)
        return uuids if all(uuids) else None
