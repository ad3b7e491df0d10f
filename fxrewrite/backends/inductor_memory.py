"""What a step of a program holds under inductor, by running what inductor generates without data and without kernels.

Inductor decides about fusion, the order of kernels and the reuse of buffers when it writes the code that calls them.
So its own compilation runs, up to that code. The code is then run on fake tensors: it allocates, frees, and calls
operators as it will, while the kernels that it generated, which are never compiled, do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from fxrewrite.backends.live_bytes import LiveBytes, StepMemory, fake_like, storage_key
from fxrewrite.backends.traces import on_fake_values
from fxrewrite.graph.copy import copy_module
from fxrewrite.ops import value


@dataclass(frozen=True, slots=True)
class _Generated:
    """A graph that inductor generated code for: what it is called with, the names of both ends, and the function."""

    inputs: list[Any]
    reads: list[str]
    returns: list[str | None]
    is_backward: bool
    call: Callable[[list[Any]], Any]


def inductor_step(gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None) -> StepMemory:
    """Returns what one step of the program holds under inductor, above its inputs.

    Args:
        gm: a graph of ATen operators with fake values; it is not changed.
        inputs: what it is called with, as fake values; those that require a gradient get one.
        options: of `torch.compile`, with which inductor will compile it.
    """
    live = LiveBytes()
    graphs = _generated(gm, inputs, options or {}, live)
    forward = next(graph for graph in graphs if not graph.is_backward)
    backward = next((graph for graph in graphs if graph.is_backward), None)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with torch.no_grad(), mode:
        given = [fake_like(x) for x in forward.inputs]
        live.know(given)
        with live:
            results = list(forward.call(list(given)))
            first, at, saved = live.peak, live.at, live.held
            if backward is None:
                return StepMemory(
                    given=0, forward=first, backward=0, saved=saved, gradients=0, at=at, unknown=live.unknown
                )
            held = dict(zip(forward.reads, given, strict=True))
            held |= {name: x for name, x in zip(forward.returns, results, strict=True) if name is not None}
            live.restart()
            args = [
                held[name] if name in held else fake_like(x)
                for name, x in zip(backward.reads, backward.inputs, strict=True)
            ]
            # What is saved for the backward pass alone dies there; results of the caller live on.
            of_caller = results[: len(results) - sum(name in forward.returns for name in backward.reads)]
            del held, results
            gradients = backward.call(args)
            last, last_at = live.peak, live.at
    held_at_end = {storage_key(t): t.untyped_storage().nbytes() for t in gradients if isinstance(t, torch.Tensor)}
    del of_caller
    return StepMemory(
        given=0,
        forward=first,
        backward=last,
        saved=saved,
        gradients=sum(held_at_end.values()),
        at=at if first > last else last_at,
        unknown=live.unknown,
    )


def _generated(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], live: LiveBytes
) -> list[_Generated]:
    """Returns the graphs that inductor generates code for: forward, and backward if there is one."""
    found: list[_Generated] = []

    def inner(graph: fx.GraphModule, examples: Sequence[Any], **how: Any) -> Any:
        read = graph.graph.find_nodes(op="placeholder")
        results: Any = graph.graph.output_node().args[0]
        reads, values = [node.name for node in read], [value(node) for node in read]
        returns = [node.name if isinstance(node, fx.Node) else None for node in results]
        is_backward = bool(how.get("is_backward"))
        with _disable_current_modes():  # what is fake knows its own mode
            lowered = _lowered(graph, examples, is_backward=is_backward, is_inference=bool(how.get("is_inference")))
        module = _module_without_kernels(*lowered, live)
        found.append(_Generated(values, reads, returns, is_backward, module["call"]))
        return make_boxed_func(_nothing)

    def trace(fn: Any, args: Sequence[Any]) -> Any:
        compile_fx.compile_fx(fn, args, inner_compile=inner, config_patches=dict(options))
        return gm

    with functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True):
        on_fake_values(trace, copy_module(gm), inputs)
    return found


def _lowered(
    gm: fx.GraphModule, examples: Sequence[Any], *, is_backward: bool, is_inference: bool
) -> tuple[str, dict[str, Any]]:
    """Returns the code that inductor generates for a graph, and the constants that the code reads.

    These are the steps of `compile_fx_inner` up to the code, without its cache and without the program that reproduces
    the compilation: that asks for process groups, which a plan without ranks does not have.
    """
    compile_fx.view_to_reshape(gm)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(gm, examples)
    compile_fx._recursive_record_original_output_strides(gm)
    shape_env = gm.shape_env or shape_env_from_inputs(examples)  # pyright: ignore[reportArgumentType]
    with DebugContext(), V.set_fake_mode(mode), compile_fx.maybe_disable_comprehensive_padding(examples):
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)
        lowering = GraphLowering(
            gm,
            example_inputs=examples,
            shape_env=shape_env,  # pyright: ignore[reportArgumentType]
            is_inference=is_inference,
            is_backward=is_backward,
        )
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*examples)
            code: Any = lowering.codegen()[0]
    return code.value, dict(lowering.constants)


_COMPILER = "from torch._inductor.async_compile import AsyncCompile\n"
"""The line of generated code that imports inductor's compiler of kernels."""


class _NoCompiler:
    """In place of inductor's compiler of kernels."""

    def wait(self, scope: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: _Kernel()


def _module_without_kernels(source: str, constants: Mapping[str, Any], live: LiveBytes) -> dict[str, Any]:
    """Returns what a generated module defines, with kernels that do nothing and allocations that are counted.

    Raises:
        NotImplementedError: the code gets its kernels in another way, so they would be compiled and run without data.
    """
    if _COMPILER not in source:
        raise NotImplementedError("inductor's code imports its compiler of kernels in another way")
    module: dict[str, Any] = {"__name__": "generated", "AsyncCompile": _NoCompiler, **constants}
    exec(compile(source.replace(_COMPILER, ""), "generated", "exec"), module)
    for name, found in list(module.items()):
        if name.startswith("empty_strided_"):
            module[name] = _empty_on(name.removeprefix("empty_strided_"))
        if isinstance(found, _Kernel):
            module[name] = _Kernel(name, live)
    module["reinterpret_tensor"] = _shown_as
    module["assert_size_stride"] = module["assert_alignment"] = _nothing
    return module


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Kernel:
    """A kernel that does nothing; on a GPU, calls are of its method `run`."""

    def __init__(self, name: str = "", live: LiveBytes | None = None) -> None:
        self._name, self._live = name, live

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._live is not None:
            self._live.calls(self._name)

    run = __call__


def _empty_on(device: str) -> Callable[..., torch.Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        where = "cpu" if device.startswith("cpu") else device
        return torch.empty_strided(size, stride, dtype=dtype, device=where)

    return empty


def _shown_as(x: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)
