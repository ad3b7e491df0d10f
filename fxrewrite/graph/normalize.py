"""Dynamo's graph (torch IR, any spelling) to one spelling: pre-dispatch ATen, with autograd still above it.

Kept: the calling convention (placeholders, their names and metadata, and the outputs), symbolic shapes, source lines
(`stack_trace`, `nn_module_stack`, `from_node`) and gradient checkpointing, whose bodies are inlined and whose nodes
carry the tags that AOTAutograd itself would give them. The only file that runs torch's tracer.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite.errors import FxRewriteError, refuse
from fxrewrite.graph.bodies import nodes_of
from fxrewrite.graph.sizes import hoist_sizes
from fxrewrite.graph.source import source_line
from fxrewrite.ops import is_parameter

__all__ = ["normalize"]

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_CHECKPOINT_OPTIONS = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
_checkpoint_ids = itertools.count(1)

_NO_HIGHER_ORDER_OP = {
    "autograd_function_apply": "it holds a custom backward that a retrace would lose; "
    "use a model variant without a custom torch.autograd.Function",
    "flex_attention": "its score and mask functions index the whole sequence; use attn_implementation='sdpa'",
}


def normalize(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm`'s computation as pre-dispatch ATen over the same inputs and outputs; `gm` is not changed.

    Placeholders must carry fake values in `meta["example_value"]` or `meta["val"]`, as Dynamo's do; sizes that they
    hold as symbols stay symbols of the same ShapeEnv. Raises RefusedError under autocast, and on a higher-order op
    other than a plain activation checkpoint, naming it and its source line.
    """
    _refuse_autocast(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    inputs = [_fake_value(node) for node in placeholders]
    inliner = _Inliner(gm)
    try:
        with fx_traceback.preserve_node_meta():
            normal = make_fx(inliner.run, tracing_mode="symbolic", pre_dispatch=True)(*inputs)
    except FxRewriteError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise FxRewriteError(
            f"%{inliner.current.name} ({source_line(inliner.current)}) cannot be traced to ATen: "
            f"{type(error).__name__}: {reason}; compile the model without it"
        ) from error
    for node, original in zip(normal.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        # the tracer's own fake value: under torch.compile it lives in another mode than Dynamo's example value
        node.meta = {**original.meta, "val": node.meta["val"], "is_parameter": is_parameter(original)}
        node._rename(original.name)
        node.target = node.name
    normal.meta = dict(gm.meta)
    hoist_sizes(normal.graph)
    normal.graph.eliminate_dead_code()
    normal.recompile()
    return normal


def _refuse_autocast(gm: fx.GraphModule) -> None:
    """Casts of autocast come below the operators that are traced here: what they give would be lost."""
    hint = "cast the model, model.to(torch.bfloat16), or rewrite Dynamo's graph as it is"
    for node in nodes_of(gm):
        if node.target is torch.amp.autocast_mode._enter_autocast:
            refuse("an autocast region has no normal form", node=node, hint=hint)
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        refuse("a graph compiled under autocast has no normal form", hint=hint)


def _fake_value(node: fx.Node) -> Any:
    key = "example_value" if "example_value" in node.meta else "val"
    if key not in node.meta:
        refuse("the input has no fake value", node=node, hint="pass a graph as Dynamo or torch.export made it")
    return node.meta[key]


class _Inliner(fx.Interpreter):
    """Runs a Dynamo graph with the bodies of plain activation checkpoints inlined and tagged."""

    current: fx.Node

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is _CHECKPOINT:
            body, *operands = args
            if "_checkpoint_context_fn" in body.meta or kwargs.get("context_fn") is not None:
                refuse(
                    "a selective checkpoint chooses by a Python function what to save",
                    node=self.current,
                    hint="checkpoint the layer without context_fn",
                )
            named = {key: value for key, value in kwargs.items() if key not in _CHECKPOINT_OPTIONS}
            return _Inliner(_tagged(body)).run(*operands, *named.values())
        if isinstance(target, HigherOrderOperator):
            name = target.name()
            refuse(
                f"the higher-order op {name} is not supported",
                node=self.current,
                hint=_NO_HIGHER_ORDER_OP.get(name, "rewrite the model without it"),
            )
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = self.current.meta.get("example_value")
        if target == "item" and isinstance(value, torch.SymFloat):
            return float(value)  # a Python float that dynamic=True passes as a 0-d tensor: a constant, guarded as one
        return super().call_method(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        return super().run_node(n)


def _tagged(body: fx.GraphModule) -> fx.GraphModule:
    """The checkpoint's body with the tags that AOTAutograd's partitioner obeys, one region id per call."""
    region = next(_checkpoint_ids)
    for node in body.graph.nodes:
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        node.meta["ac_graph_id"] = region
    return body
