"""Traces functions as inductor traces patterns: forward alone, or joined with the gradients, by its decompositions."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fxrewrite.torch_versions import symbolic_kernels

GetTable = Callable[..., Mapping[Any, Callable[..., Any]]]


def fwd_only(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    run_functional_passes: bool = True,
    get_decomp_fn: GetTable = select_decomp_table,
) -> fx.GraphModule:
    """Returns the inference graph of `fn(*args)` in operators that inductor keeps.

    Args:
        fn: a function of tensors and numbers.
        args: its arguments.
        run_functional_passes: whether operators that do nothing, and calls that nothing reads, are removed.
        get_decomp_fn: returns the table of decompositions.
    """
    with torch.no_grad():
        gm = make_fx(fn, dict(get_decomp_fn()))(*args)
    if run_functional_passes:
        _clean(gm)
    gm.recompile()
    return gm


def joint_fwd_bwd(
    fn: Callable[..., Any], args: Sequence[Any], *, get_decomp_fn: GetTable = select_decomp_table
) -> fx.GraphModule:
    """Returns the training graph of `fn(*args)`: forward, and the gradients of the arguments that require them.

    Its inputs are `args`, and then the gradients of the results; its outputs the results, and then the gradients.
    """
    from torch._functorch.aot_autograd import aot_function, default_partition, make_boxed_func

    found: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        graph = fx.Graph()
        output = graph.graph_copy(joint.graph, {})
        graph.output([item for item in tree_leaves(output) if item is not None])
        found.append(fx.GraphModule(joint, graph))
        return default_partition(joint, inputs, **options)

    def boxed(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return make_boxed_func(gm)

    with torch.enable_grad():
        aot_function(
            fn,
            boxed,
            partition_fn=partition,
            decompositions=dict(get_decomp_fn()),
            keep_inference_input_mutations=True,
            enable_log=False,
        )(*args)
    (gm,) = found
    _clean(gm)
    gm.recompile()
    return gm


def _clean(gm: fx.GraphModule) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what inductor imports
        from torch._inductor.fx_passes.post_grad import remove_noop_ops  # lazy: loads all of inductor

    remove_noop_ops(gm.graph)
    gm.graph.eliminate_dead_code()


def of_shape(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Returns a fake tensor of this shape, in all else like another one."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)


def on_fake_values(
    trace: Callable[..., fx.GraphModule], fn: Callable[..., Any], args: Sequence[Any], **options: Any
) -> fx.GraphModule:
    """Returns `trace(fn, args, **options)` on fake tensors, in the mode of symbolic `args`, without guards."""
    tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
    modes = {value.fake_mode for value in tensors if isinstance(value, FakeTensor)}
    symbolic = [mode for mode in modes if mode.shape_env is not None]
    mode = symbolic[0] if symbolic else FakeTensorMode()

    def fake(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor) and value.fake_mode is mode:
            return value.detach().requires_grad_(value.requires_grad)
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )

    with mode, _quiet(mode):
        return trace(fn, tree_map_only(torch.Tensor, fake, list(args)), **options)


@contextlib.contextmanager
def _quiet(mode: FakeTensorMode) -> Generator[None]:
    """Tracing inside of a compilation adds no guard, and does not touch the compilation's own context."""
    guards = mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext()
    with guards, tracing(None), symbolic_kernels():
        yield
