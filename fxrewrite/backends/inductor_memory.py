"""What a step of a program holds under inductor, by running what inductor generates without data and without kernels.

Inductor decides about fusion, the order of kernels and the reuse of buffers when it writes the code that calls them.
So its own compilation runs, up to that code. The code is then run on fake tensors: it allocates, frees, and calls
operators as it will, while the kernels that it generated, which are never compiled, do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._dynamo.repro import after_aot
from torch._functorch import config as functorch_config
from torch._inductor import async_compile, codecache, config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxrewrite.backends.live_bytes import LiveBytes, alike
from fxrewrite.backends.traces import on_fake_values
from fxrewrite.graph.copy import copy_module
from fxrewrite.ops import value

__all__ = ["InductorStep", "inductor_step"]


@dataclass(frozen=True, slots=True)
class InductorStep:
    """Bytes above those of the inputs: the peaks of both passes, at which operators, and what is left after each."""

    forward: int
    forward_at: str
    saved: int
    backward: int
    backward_at: str
    gradients: int
    has_backward: bool
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Generated:
    """A graph that inductor generated code for: what it is called with, the names of both ends, and the function."""

    inputs: list[Any]
    reads: list[str]
    returns: list[str | None]
    is_backward: bool
    call: Callable[[list[Any]], Any]


def inductor_step(gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None = None) -> InductorStep:
    """Returns what one step of the program holds under inductor.

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
        given = [alike(x) for x in forward.inputs]
        live.know(given)
        with live:
            results = list(forward.call(list(given)))
            first, at, saved = live.peak, live.at, live.held
            if backward is None:
                return InductorStep(first, at, saved, 0, "", 0, False, live.unknown)
            held = dict(zip(forward.reads, given, strict=True))
            held |= {name: x for name, x in zip(forward.returns, results, strict=True) if name is not None}
            live.restart()
            args = [
                held[name] if name in held else alike(x)
                for name, x in zip(backward.reads, backward.inputs, strict=True)
            ]
            # What is saved for the backward pass alone dies there; results of the caller live on.
            of_caller = results[: len(results) - sum(name in forward.returns for name in backward.reads)]
            del held, results
            gradients = backward.call(args)
            last, last_at = live.peak, live.at
    held_at_end = {
        id(t.untyped_storage()): t.untyped_storage().nbytes() for t in gradients if isinstance(t, torch.Tensor)
    }
    del of_caller
    return InductorStep(first, at, saved, last, last_at, sum(held_at_end.values()), True, live.unknown)


def _generated(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], live: LiveBytes
) -> list[_Generated]:
    """Returns the graphs that inductor generates code for: forward, and backward if there is one."""
    found: list[_Generated] = []
    loaded: list[Callable[[list[Any]], Any]] = []

    def load(key: str, path: str, linemap: Any = None, attrs: Mapping[str, Any] | None = None) -> Any:
        module = _module_without_kernels(Path(path).read_text(), attrs or {}, live)
        loaded.append(module["call"])
        return SimpleNamespace(call=module["call"], key=key, __file__=path, runner=None)

    def inner(graph: fx.GraphModule, examples: Sequence[Any], **how: Any) -> Any:
        read = graph.graph.find_nodes(op="placeholder")
        results: Any = graph.graph.output_node().args[0]
        reads, values = [node.name for node in read], [value(node) for node in read]
        returns = [node.name if isinstance(node, fx.Node) else None for node in results]
        compiled = compile_fx_inner(graph, examples, **how)
        found.append(_Generated(values, reads, returns, bool(how.get("is_backward")), loaded[-1]))
        return compiled

    def trace(fn: Any, args: Sequence[Any]) -> Any:
        compile_fx(fn, args, inner_compile=inner, config_patches=dict(options))
        return gm

    uncached = config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1)
    with (
        uncached,
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        _loads(load),
    ):
        on_fake_values(trace, copy_module(gm), inputs)
    return found


@contextlib.contextmanager
def _loads(load: Callable[..., Any]) -> Generator[None]:
    """In the scope, code that inductor generates is loaded by this function.

    No program that reproduces the compilation is written either, as that asks for process groups, which a plan without
    ranks does not have.
    """
    no_repro = mock.patch.object(after_aot, "save_graph_repro", _nothing)
    with mock.patch.object(codecache.PyCodeCache, "load_by_key_path", load), no_repro:
        yield


def _module_without_kernels(source: str, attributes: Mapping[str, Any], live: LiveBytes) -> dict[str, Any]:
    """Returns what a generated module defines, with kernels that do nothing and allocations that are counted."""
    module: dict[str, Any] = {"__name__": "generated"}

    class Kernels:
        """In place of inductor's compiler of kernels."""

        def wait(self, scope: Any) -> None: ...

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *_args, **_kwargs: _Kernel()

    with mock.patch.object(async_compile, "AsyncCompile", Kernels):
        exec(compile(source, "generated", "exec"), module)
    module.update(attributes)
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
