"""From Dynamo's graph (torch IR, any spelling) to the normal form: pre-dispatch ATen, still above autograd.

Kept: the calling convention (placeholders with names and metadata, outputs), symbolic shapes, source lines
(`stack_trace`, `nn_module_stack`, `from_node`) and gradient checkpointing: its subgraphs are inlined, and their nodes
get the tags that AOTAutograd itself would give them. Removed: subgraphs of other wrappers, vmap, implicit casts of
autocast, writes to intermediate values. This is the only file that runs torch's tracer over a whole graph.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.capture.autocast import ENTER, EXIT, AutocastRegions, Casting, casts, drop_regions, shield
from fxrewrite.capture.custom_backward import APPLY, NormalBodies
from fxrewrite.capture.equal_calls import EqualCalls, Once
from fxrewrite.capture.functionalize import Functional, functional_writes
from fxrewrite.capture.opaque_backward import is_opaque, opaque_call
from fxrewrite.capture.vmap import without_vmap
from fxrewrite.errors import FxRewriteError, named_line, refuse
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.differentiable import may_go_backward
from fxrewrite.graph.garbage import few_collections
from fxrewrite.graph.sizes import hoist_sizes
from fxrewrite.graph.source import CHECKPOINT_TAGS, source_line
from fxrewrite.ops import is_parameter, is_per_rank, without_saved_tensors_hooks

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_CHECKPOINT_OPTIONS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
_NORMAL = "fxrewrite_normal"
"""Metadata key of a module that is in normal form; rules keep it so, because they write ATen."""
_checkpoint_ids = itertools.count(1)

_FLEX = torch.ops.higher_order.flex_attention
"""Stays one call, as no operators of ATen are its fused kernel; its score and mask functions become ATen."""
_INVOKE = torch.ops.higher_order.invoke_subgraph
_WRAPPERS: dict[Any, Callable[..., AbstractContextManager[Any]]] = {
    torch.ops.higher_order.wrap: nullcontext,
    torch.ops.higher_order.wrap_with_set_grad_enabled: torch.set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast: torch.autocast,
    _INVOKE: nullcontext,
}
"""Higher-order ops that run their subgraph in a mode, each with the function that makes this mode of its arguments."""
_TRANSFORMS = {"_grad_increment_nesting", "_jvp_increment_nesting", "_enter_dual_level"}
"""Functions with which Dynamo begins a transform of torch.func; vmap is handled apart."""
_DATA = "_get_data_attr"
"""Function with which Dynamo reads `x.data`: a tracer sees no operator in it, and would make its result a constant."""
_NO_HIGHER_ORDER_OP = {
    "register_hook": "it calls a hook on a gradient inside of the compiled function: register it on a parameter, or on "
    "what the compiled function returns",
}
_ANY_HIGHER_ORDER_OP = "rewrite the model without it, or put torch.compiler.disable on the function that calls it"


def normalize(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns `gm`'s computation as pre-dispatch ATen with the same inputs and outputs; `gm` is not changed.

    Placeholders must have fake values in `meta["example_value"]` or `meta["val"]`, as Dynamo's do; symbolic sizes stay
    symbols of the same ShapeEnv. A graph that is compiled under torch.autocast is normalized under it, too. A graph
    that this function made, rewritten or not, is only copied: tracing a lowered graph again would turn this rank's
    number into a constant.

    Raises:
        RefusedError: the graph has a higher-order op that is neither a plain activation checkpoint nor a custom
            autograd function nor flex attention, or it is lowered over a mesh axis and was traced by others since.
    """
    if gm.meta.get(_NORMAL):
        return copy_module(gm)
    with few_collections():
        normal = _normalized(gm)
    if not may_go_backward(gm.graph):
        _drop_tags(normal)
    normal.meta[_NORMAL] = True
    return normal


def _normalized(gm: fx.GraphModule, *, is_body: bool = False) -> fx.GraphModule:
    placeholders = gm.graph.find_nodes(op="placeholder")
    bodies = NormalBodies.of(gm, functools.partial(_normalized, is_body=True))

    def inliner() -> _Inliner:
        made = _Inliner(gm)
        made.bodies = bodies
        return made

    normal = _traced_once(inliner, placeholders)
    # Casts become visible only when the ATen graph runs under autocast, so it is traced a second time.
    if casts(normal):
        normal = _traced_once(functools.partial(_CastingInliner, normal), placeholders)
        drop_regions(normal.graph)
        if not is_body:  # the graph that calls the subgraph is shielded
            shield(normal.graph)
    # Only the ATen graph shows which values share memory, so writes are found after tracing and made functional by
    # tracing again.
    if writes := functional_writes(normal.graph):
        normal = _traced(_FunctionalInliner(normal, writes), placeholders)
    normal.meta = dict(gm.meta)
    hoist_sizes(normal.graph)
    normal.graph.eliminate_dead_code()
    normal.recompile()
    return normal


def _drop_tags(normal: fx.GraphModule) -> None:
    """Nothing is kept where nothing goes backward, and AOTAutograd stops at tags of attention there, which may draw."""
    for module in normal.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            for tag in CHECKPOINT_TAGS:
                node.meta.pop(tag, None)


def _traced_once(program: Callable[[], _Inliner], placeholders: Sequence[fx.Node]) -> fx.GraphModule:
    """Traces the program, with calls that are equal traced once where that is known to make no difference."""
    made = program()
    made.calls = EqualCalls()
    traced = _traced(made, placeholders)
    return _traced(program(), placeholders) if made.calls.is_written(traced.graph) else traced


def _traced(program: _Inliner, placeholders: Sequence[fx.Node]) -> fx.GraphModule:
    """Traces the program on the placeholders' fake values; the graph's placeholders keep their names and metadata.

    The caller's hooks for saved tensors, as of a checkpoint around the compiled call, see nothing of it.
    """
    inputs = [_fake_value(node) for node in placeholders]
    try:
        with fx_traceback.preserve_node_meta(), without_saved_tensors_hooks():
            traced = make_fx(program.run, tracing_mode="symbolic", pre_dispatch=True)(*inputs)
    except FxRewriteError:
        raise
    except Exception as error:
        raise FxRewriteError(
            f"%{program.current.name} ({source_line(program.current)}) cannot be traced to ATen: "
            f"{named_line(error)}; compile the model without it"
        ) from error
    finally:
        program.regions.close()
    for node, original in zip(traced.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        # The tracer's own fake value: under torch.compile its mode differs from that of Dynamo's example value.
        node.meta = {**original.meta, "val": node.meta.get("val"), "is_parameter": is_parameter(original)}
        node._rename(original.name)
        node.target = node.name
    return traced


def _fake_value(node: fx.Node) -> Any:
    key = "example_value" if "example_value" in node.meta else "val"
    if key not in node.meta:
        refuse("the input has no fake value", node=node, hint="pass a graph as Dynamo or torch.export made it")
    return node.meta[key]


class _Inliner(Once):
    """Runs a Dynamo graph with subgraphs of wrappers inlined; those of plain activation checkpoints are also tagged.

    Attributes:
        tags: metadata for all nodes that the graph becomes.
    """

    bodies = NormalBodies()
    tags: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, gm: fx.GraphModule, **options: Any) -> None:
        super().__init__(without_vmap(gm), **options)
        self.current = gm.graph.output_node()
        self.regions = AutocastRegions()
        for node in gm.graph.nodes:  # before any node runs: a transform first disables torch's hooks of saved tensors
            if getattr(node.target, "__name__", "") in _TRANSFORMS:
                refuse(
                    "a transform of torch.func (grad, vjp, jvp, hessian ...) inside of the compiled function",
                    node=node,
                    hint="call loss.backward() or torch.autograd.grad on what the compiled function returns",
                )

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.tag_new_nodes()
        if target is _CHECKPOINT:
            body, *operands = args
            if "_checkpoint_context_fn" in body.meta or kwargs.get("context_fn") is not None:
                refuse(
                    "a selective checkpoint chooses by a Python function what to save",
                    node=self.current,
                    hint="checkpoint the layer without context_fn",
                )
            named = {key: value for key, value in kwargs.items() if key not in _CHECKPOINT_OPTIONS}
            return self._inlined(body, *operands, *named.values(), tags=_tags())
        if is_per_rank(target):
            refuse(
                "the graph is already lowered over a mesh axis",
                node=self.current,
                hint="state all axes in one plan, a.on('dp') >> b.on('sp'), or lower the graph that was normalized",
            )
        if target in _WRAPPERS:
            return self._unwrapped(target, *args, **kwargs)
        if target is ENTER:
            return self.regions.enter(*args)
        if target is EXIT:
            return self.regions.exit()
        if getattr(target, "__name__", "") == _DATA:
            return args[0].detach()
        if target is APPLY:
            return self.bodies.call({**self.current.meta, **self.tags}, args, kwargs)
        if is_opaque(target) and (call := opaque_call(target, args, kwargs, self.current)) is not None:
            results = self.bodies.call(
                {**self.current.meta, **self.tags}, (call.forward, call.backward, *call.operands), call.options
            )
            return pytree.tree_unflatten(results, call.spec)
        if isinstance(target, HigherOrderOperator) and target is not _FLEX:
            name = target.name()
            refuse(
                f"the higher-order op {name} is not supported",
                node=self.current,
                hint=_NO_HIGHER_ORDER_OP.get(name, _ANY_HIGHER_ORDER_OP),
            )
        return super().call_function(target, args, kwargs)

    def _unwrapped(self, wrapper: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
        """Runs the subgraph of a wrapper in the mode that the wrapper sets."""
        at = next(at for at, value in enumerate(args) if isinstance(value, fx.GraphModule))
        options, body, operands = args[:at], args[at], args[at + 1 :]
        if wrapper is _INVOKE:
            operands = operands[1:]  # the first one names the subgraph
        mode = _WRAPPERS[wrapper](*options)
        with mode:
            return self._inlined(body, *operands, *kwargs.values())

    def _inlined(self, body: fx.GraphModule, *operands: Any, tags: Mapping[str, Any] | None = None) -> Any:
        inner = _Inliner(body)
        inner.bodies, inner.regions, inner.calls, inner.tags = self.bodies, self.regions, self.calls, tags or {}
        return inner.run(*operands)

    def tag_new_nodes(self) -> None:
        """Adds the tags to the current metadata, which torch sets per node and the tracer copies to new nodes."""
        if self.tags and self.current.meta:
            fx_traceback.get_current_meta().update(self.tags)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.tag_new_nodes()
        value = self.current.meta.get("example_value")
        if target == "item" and isinstance(value, torch.SymFloat):
            return float(value)  # with dynamic=True a Python float is a 0-dim tensor; it is a guarded constant
        return super().call_method(target, args, kwargs)


class _CastingInliner(Casting, _Inliner):
    """Runs a graph in ATen with the casts of autocast."""


class _FunctionalInliner(Functional, _Inliner):
    """Runs a graph in ATen with writes in functional form."""


def _tags() -> dict[str, Any]:
    """Returns tags of a checkpoint's nodes for AOTAutograd's partitioner; each call is a region of its own."""
    return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(_checkpoint_ids)}
