"""Adapters for inner backends that cannot compile every graph: only without gradients, or only some operators.

- `plan.backend(under_autograd("openvino"))` trains with a compiler of inference graphs;
- `plan.backend(under_autograd(in_parts("iree_turbine")))` trains with one that does not know collectives either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx.passes.split_module import split_module

from fxrewrite import ops
from fxrewrite.backends.dynamo import backend_name, find_backend, inner_compiler
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.sizes import inline_value

Compiler = Callable[..., Any]


def under_autograd(inner: str | Compiler) -> Compiler:
    """Returns a backend that trains: AOTAutograd traces the forward and backward graphs, and `inner` compiles each.

    Args:
        inner: name or function of a backend that compiles graphs of aten operators; it needs no gradients.

    Raises:
        FxRewriteError: no such backend.
    """
    find_backend(inner)

    def compile_both(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        compile_inner = inner_compiler(inner, **options)

        def compile_one(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return make_boxed_func(compile_inner(graph, list(inputs)))

        return aot_autograd(fw_compiler=compile_one)(gm, list(example_inputs))

    compile_both.__qualname__ = f"under_autograd({backend_name(inner)})"  # ranks compare the name
    return compile_both


def in_parts(inner: str | Compiler, leave: Callable[[fx.Node], bool] | None = None) -> Compiler:
    """Returns a backend that runs the nodes to leave as they are, and compiles the parts between them with `inner`.

    The order of the graph is kept, so ranks that compile equal graphs run their collectives in the same order. A part
    is compiled in its first call, with the tensors of the call, and again for other shapes, dtypes, strides or values
    of its integer inputs.

    Args:
        inner: name or function of a backend.
        leave: the nodes that `inner` does not compile; None is `is_custom`. Arithmetic on sizes is always left, and so
            is `operator.getitem` on a result of a node that is left.

    Raises:
        FxRewriteError: no such backend.
    """
    find_backend(inner)

    def compile_parts(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        program, compiled = _split(gm, leave or is_custom)
        for name in compiled:
            part = program.get_submodule(name)
            assert isinstance(part, fx.GraphModule)
            setattr(program, name, _Part(part, inner_compiler(inner, **options)))
        return program

    compile_parts.__qualname__ = f"in_parts({backend_name(inner)})"
    return compile_parts


def is_custom(node: fx.Node) -> bool:
    """Whether a node calls an operator outside aten and prims: a collective, a custom or a higher-order operator.

    Python functions of torch and of `operator`, and methods of tensors, are not custom.
    """
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, OpOverload):
        return target.namespace not in ("aten", "prims")
    if isinstance(target, HigherOrderOperator | OpOverloadPacket):
        return isinstance(target, HigherOrderOperator) or not str(target).startswith(("aten.", "prims."))
    return getattr(target, "__module__", "").partition(".")[0] not in _KNOWN_MODULES


_KNOWN_MODULES = ("torch", "_operator", "operator", "math", "builtins", "")


def _split(gm: fx.GraphModule, leave: Callable[[fx.Node], bool]) -> tuple[fx.GraphModule, list[str]]:
    """Splits the graph into submodules; returns it with the names of the parts that contain no node to leave."""
    left: set[fx.Node] = set()
    number: dict[fx.Node, int] = {}
    kinds: list[bool] = []
    for node in gm.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        # A getitem stays with its source, so that no part receives a tuple.
        takes_apart = node.all_input_nodes[:1] if _is_getitem(node) else []
        is_left = leave(node) or ops.is_scalar(node) or any(source in left for source in takes_apart)
        if is_left:
            left.add(node)
        if not kinds or kinds[-1] != is_left:
            kinds.append(is_left)
        number[node] = len(kinds) - 1
    program = split_module(gm, gm, lambda node: number[node], keep_original_order=True)
    names = [f"submod_{i}" for i, is_left in enumerate(kinds) if not is_left]
    return program, [name for name in names if hasattr(program, name)]


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


class _Part(nn.Module):
    """A part of a graph, compiled in its first call with inputs of these shapes."""

    def __init__(self, gm: fx.GraphModule, compile_part: Compiler) -> None:
        super().__init__()
        (output,) = gm.graph.find_nodes(op="output")
        self._is_single = isinstance(output.args[0], fx.Node)
        if self._is_single:  # backends expect a graph that returns a tuple, as Dynamo's do
            output.args = ((output.args[0],),)
            gm.recompile()
        self._strides = [_strides(node) for node in output.all_input_nodes]
        self._gm = gm
        self._compile = compile_part
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def forward(self, *values: Any) -> Any:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        key = (torch.is_grad_enabled(), *map(_looks, values))
        if key not in self._compiled:
            self._compiled[key] = _compiled_alone(self._compile, _with_numbers(self._gm, values), tensors)
        results = [
            _with_strides(result, strides)
            for result, strides in zip(self._compiled[key](*tensors), self._strides, strict=True)
        ]
        return results[0] if self._is_single else tuple(results)


def _compiled_alone(compile_part: Compiler, part: fx.GraphModule, tensors: list[torch.Tensor]) -> Callable[..., Any]:
    """Compiles the part in a thread of its own.

    The first call comes from inside an autograd function or from the autograd engine, where dispatch is restricted, and
    AOTAutograd, on which many backends rely, cannot trace. All that is thread-local state.
    """
    is_grad_enabled = torch.is_grad_enabled()

    def compile_now() -> Callable[..., Any]:
        with torch.set_grad_enabled(is_grad_enabled):
            return compile_part(part, tensors)

    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(compile_now).result()


def _with_numbers(gm: fx.GraphModule, values: Sequence[Any]) -> fx.GraphModule:
    """Returns a copy in which inputs that are not tensors are constants, because few backends accept such inputs."""
    new = copy_module(gm)
    for placeholder, value in zip(new.graph.find_nodes(op="placeholder"), values, strict=True):
        if not isinstance(value, torch.Tensor):
            inline_value(placeholder, value)
            new.graph.erase_node(placeholder)
    new.recompile()
    return new


def _strides(node: fx.Node) -> tuple[int, ...] | None:
    """Returns the strides with which the rest of the graph was traced, if they are known."""
    value = ops.value(node)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    strides: tuple[Any, ...] = value.stride()
    return None if any(isinstance(stride, torch.SymInt) for stride in strides) else strides


def _with_strides(result: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """Returns the result with these strides: many backends return contiguous tensors, which `aten.view` may refuse."""
    if strides is None or result.stride() == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def _looks(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad
    return value
