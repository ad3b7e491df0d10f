"""Decomposes operators that a rewrite adds after autograd to the smaller ones that inductor expects there.

Inductor decomposes `silu`, `linear` or `layer_norm` while the model is traced, and cannot compile them afterwards. With
this, rules that add one of them can run after autograd: what they added is decomposed by inductor's own table.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.graph import copied_meta


def decompose(gm: fx.GraphModule, nodes: Iterable[fx.Node]) -> int:
    """Decomposes those of `nodes` that call an operator which inductor decomposes; returns their number.

    Args:
        gm: a graph after autograd, with fake values under `meta["val"]`.
        nodes: the nodes to consider: those that a rewrite made.
    """
    table = select_decomp_table()
    changed = 0
    for node in list(nodes):
        target = node.target
        if isinstance(target, OpOverload) and (target in table or _is_composite(target)):
            _inline(node, table)
            changed += 1
    if changed:
        gm.recompile()
    return changed


def inductor_table() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions that inductor gives to AOTAutograd, by overload."""
    return select_decomp_table()


@functools.cache
def _dispatched() -> frozenset[str]:
    """The names of all overloads but those that TorchScript alone knows, such as `aten::to.prim_Device`."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def is_decomposed(key: str, table: Mapping[Any, Callable[..., Any]]) -> bool:
    """Whether no functional overload of the operator with this key is left in a graph after the table is applied."""
    packet = ops.packet_of(key)
    if packet is None:
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    functional = [o for o in overloads if not o._schema.is_mutable and o.name() in _dispatched()]
    return bool(functional) and all(overload in table or _is_composite(overload) for overload in functional)


def _is_composite(target: OpOverload) -> bool:
    """Whether the operator is defined by others, as `linear` is, so that tracing never shows it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def _inline(node: fx.Node, table: dict[Any, Callable[..., Any]]) -> None:
    """Replaces the node by the decomposition of its operator."""
    inputs = node.all_input_nodes
    values = [ops.value(used) for used in inputs]

    def call(*given: Any) -> Any:
        found = dict(zip(inputs, given, strict=True))
        args, kwargs = map_arg((node.args, dict(node.kwargs)), found.__getitem__)  # pyright: ignore[reportArgumentType]
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    quiet = contextlib.nullcontext()
    if mode is not None and mode.shape_env is not None:
        quiet = mode.shape_env.suppress_guards()
    with quiet, torch.no_grad(), mode or contextlib.nullcontext():
        body = make_fx(call, decomposition_table=table)(*values)
    places: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    graph = node.graph
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(body.graph, places)
    for made in (places[old] for old in body.graph.nodes if old.op == "call_function"):
        made.meta = {"val": made.meta["val"], "fxrewrite": node.meta.get("fxrewrite", ()), **copied_meta(node)}
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # several outputs: every user is a getitem
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
