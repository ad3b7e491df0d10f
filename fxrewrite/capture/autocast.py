"""Makes autocast explicit: the casts that torch.autocast makes become nodes, and no autocast mode is left.

    autocast on: linear(x, w)    ->    linear(to(x, bfloat16), to(w, bfloat16))

Torch's own autocast kernels decide which operators cast, and to what; they call the operator again on the cast
operands. An operator without such a kernel may consist of operators that have one; then it is decomposed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxrewrite.capture.decomposed import run_decomposed
from fxrewrite.capture.running import Running
from fxrewrite.errors import refuse
from fxrewrite.graph.bodies import nodes_of
from fxrewrite.ops import tensors_in

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_KEYS = {
    "cpu": torch._C.DispatchKey.AutocastCPU,
    "cuda": torch._C.DispatchKey.AutocastCUDA,
    "xpu": torch._C.DispatchKey.AutocastXPU,
}


def casts(gm: fx.GraphModule) -> bool:
    """Whether autocast is on while the graph is compiled, or is switched on in it."""
    return bool(casting()) or any(node.target is ENTER for node in nodes_of(gm))


def casting() -> dict[str, torch.dtype]:
    """Returns the device types whose operators currently cast, with the dtypes that they cast to."""
    kinds = [kind for kind in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(kind)]
    if unknown := [kind for kind in kinds if kind not in _KEYS]:
        refuse(f"autocast on {unknown[0]} has no normal form", hint="cast the model, model.to(torch.bfloat16)")
    return {kind: torch.get_autocast_dtype(kind) for kind in kinds}


@contextlib.contextmanager
def without_autocast() -> Generator[None]:
    """Disables autocast for the duration of the block."""
    with contextlib.ExitStack() as stack:
        for kind in casting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def drop_regions(graph: fx.Graph) -> None:
    """Removes the switches of autocast from a graph whose casts are explicit."""
    for node in reversed(graph.nodes):
        if node.target in (ENTER, EXIT):
            graph.erase_node(node)


def shield(graph: fx.Graph) -> None:
    """Makes the graph run without autocast, even if its caller, as now, is under autocast."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for kind, dtype in casting().items():
        with graph.inserting_before(first):
            region = graph.call_function(ENTER, (kind, dtype, False, torch.is_autocast_cache_enabled()))
        with graph.inserting_before(graph.output_node()):
            graph.call_function(EXIT, (region,))


class AutocastRegions:
    """The autocast regions that are open while a graph is traced; a tracer only records that they exist."""

    def __init__(self) -> None:
        self._open: list[torch.autocast] = []

    def enter(self, *options: Any) -> torch.autocast:
        """Enters a region with the arguments of torch.autocast."""
        self._open.append(torch.autocast(*options))
        return self._open[-1].__enter__()

    def exit(self) -> None:
        """Leaves the innermost region."""
        self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        """Leaves all regions, also after an error."""
        while self._open:
            self.exit()


class Casting(Running):
    """Runs a graph of ATen operators as autocast does, so that a tracer records the casts."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._outside = casting()

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the operator's autocast kernel if it has one; decomposes it if an operator inside has one."""
        if isinstance(target, HigherOrderOperator):
            if casting() != self._outside:
                refuse(
                    f"the higher-order op {target.name()} in an autocast region has no normal form",
                    node=self.current,
                    hint="compile the model within torch.autocast, not with a region of it inside",
                )
            kinds = {tensor.device.type for tensor in tensors_in((args, kwargs))}.intersection(casting())
            kernel = next((target.py_kernels[key] for key in map(_KEYS.get, kinds) if key in target.py_kernels), None)
            if kernel is not None:
                return kernel(*args, **kwargs)
        if isinstance(target, OpOverload) and (enabled := casting()):
            kind = next((kind for kind in enabled if _has_kernel(target, kind, args, kwargs)), None)
            if kind is not None:
                with torch._C.DisableTorchFunction():  # a tracer's mode would call the operator, not its kernel
                    return target._op_dk(_KEYS[kind], *args, **kwargs)
            if target._can_decompose() and _casts_inside(target, args, kwargs):
                return self._in_parts(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def _in_parts(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the operators into which an operator decomposes one by one, because some of them cast."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def parts(*tensors: torch.Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            inner, options = pytree.tree_unflatten([given.get(at, leaf) for at, leaf in enumerate(leaves)], spec)
            return run_decomposed(target, inner, options)

        tensors = [leaves[at] for at in places]
        with disable_proxy_modes_tracing():
            alike = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            body = make_fx(parts, tracing_mode="symbolic", pre_dispatch=True)(*alike)
        return type(self)(body).run(*tensors)


def _has_kernel(target: OpOverload, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    known = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), _KEYS[kind])
    return known and any(tensor.device.type == kind for tensor in tensors_in((args, kwargs)))


def _casts_inside(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operator calls other operators or dtypes on these arguments than it does without autocast."""
    if target._schema.is_mutable:
        return False
    with disable_proxy_modes_tracing(), torch.no_grad():
        with _Calls() as cast:
            target(*args, **kwargs)
        with torch._C._DisableAutocast(), _Calls() as plain:
            target(*args, **kwargs)
    return cast.seen != plain.seen


class _Calls(TorchDispatchMode):
    """Records the operators that are called, with the dtypes of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[OpOverload, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # queries of a tensor's properties by the kernels
            self.seen.append((func, [tensor.dtype for tensor in tensors_in((args, kwargs))]))
        return func(*args, **(kwargs or {}))
