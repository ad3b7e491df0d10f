"""Runs a replacement: its torch calls on proxies become new nodes, created through the transaction."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.fx.proxy import TracerBase

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.graph.edit import Edit
from fxrewrite.match.match import Match
from fxrewrite.match.once import compute_once
from fxrewrite.match.safety import Effects
from fxrewrite.pattern.terms import tensor_text

_aten = torch.ops.aten


class NodeProxy(fx.Proxy):
    """A node in a replacement. Shape, dtype and device come from its fake value and create no nodes; only a symbolic
    size becomes a node when it is used.
    """

    tracer: Replacer

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None
    ) -> NodeProxy:
        """Replaces FX's version, which maps over all arguments twice to find the tracer; this is a hot path."""
        args, kwargs = args or (), kwargs or {}
        first = args[0] if args and isinstance(args[0], NodeProxy) else _first((*args, *kwargs.values()))
        return first.tracer.call(orig_method.__name__ if _is_method(orig_method) else orig_method, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Supports fields of a named tuple, such as the result of `torch.topk`, and mT and T; FX handles methods."""
        target = self.node.target
        if isinstance(target, torch._ops.OpOverload):
            fields = [returned.name for returned in target._schema.returns]
            if name in fields:
                return self.tracer.call(operator.getitem, (self, fields.index(name)), {})
        if name == "mT" or (name == "T" and self.ndim == 2):
            return self.transpose(-2, -1)
        if isinstance(ops.value(self.node), torch.Tensor) and not hasattr(torch.Tensor, name):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        return super().__getattr__(name)

    def _tensor(self) -> torch.Tensor:
        found = ops.value(self.node)
        if not isinstance(found, torch.Tensor):
            raise RuleDefinitionError(
                f"%{self.node.name} has no tensor value in its metadata, so the replacement cannot read its shape or "
                "dtype; propagate fake values through the graph first"
            )
        return found

    @property
    def shape(self) -> _Shape:
        """The shape; a symbolic size becomes a node when it is read."""
        return _Shape(self, self._tensor())

    @property
    def dtype(self) -> torch.dtype:
        return self._tensor().dtype

    @property
    def device(self) -> torch.device:
        return self._tensor().device

    @property
    def ndim(self) -> int:
        return self._tensor().ndim

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Returns the shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]


@functools.cache
def _is_method(function: Any) -> bool:
    return torch.overrides.is_tensor_method_or_property(function)


def _first(items: Iterable[Any]) -> NodeProxy:
    return next(item for item in _flat(items) if isinstance(item, NodeProxy))


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item


class _Shape:
    """A shape whose symbolic sizes become nodes when they are used."""

    def __init__(self, proxy: NodeProxy, tensor: torch.Tensor) -> None:
        self._proxy = proxy
        self._sizes = tuple(tensor.shape)

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Any]:
        return (self[dim] for dim in range(len(self)))

    def __getitem__(self, dim: Any) -> Any:
        if isinstance(dim, slice):
            return tuple(self[index] for index in range(len(self))[dim])
        size = self._sizes[dim]
        if isinstance(size, int):
            return size
        return self._proxy.tracer.call(_aten.sym_size.int, (self._proxy, range(len(self))[dim]), {})


class Replacer(TracerBase):
    """Creates the nodes of one replacement.

    Args:
        edit: the transaction.
        before: the node before which new nodes are inserted; None inserts each after the last node that it reads.
        like: the replaced node, whose metadata new nodes inherit.
        rule: id of the rule.
        effects: of the graph.
        gradients: whether the rule keeps gradients.

    Attributes:
        created: the new nodes, in order.
    """

    def __init__(
        self, edit: Edit, before: fx.Node | None, like: fx.Node, *, rule: str, effects: Effects, gradients: bool
    ) -> None:
        super().__init__()
        self.graph = edit.graph
        self.created: list[fx.Node] = []
        self._edit = edit
        self._before = before
        self._like = like
        self._rule = rule
        self._effects = effects
        self._gradients = gradients
        self._is_aten = isinstance(like.target, torch._ops.OpOverload) or edit.is_aten
        self._proxies: dict[fx.Node, NodeProxy] = {}
        self._modes = ops.modes_now()

    def proxy(self, node: fx.Node) -> NodeProxy:
        """Returns the proxy of a node; each node has one proxy."""
        found = self._proxies.get(node)
        if found is None:
            found = self._proxies[node] = NodeProxy(node, self)
        return found

    def close(self) -> None:
        """Drops the proxies, which refer back to this object: one reference cycle less per rewrite."""
        self._proxies.clear()

    def wrap(self, value: Any) -> Any:
        """Converts a captured value to what the replacement receives: nodes become proxies, also inside lists."""
        if isinstance(value, fx.Node):
            return self.proxy(value)
        if type(value) is list:
            return [self.wrap(item) for item in value]
        return map_arg(value, self.proxy)  # pyright: ignore[reportArgumentType]

    def unwrap(self, value: Any) -> Any:
        """Converts proxies to nodes, and shapes to lists of sizes; leaves all else unchanged."""
        if isinstance(value, fx.Proxy):
            return value.node
        if isinstance(value, _Shape):
            value = list(value)
        if isinstance(value, (list, tuple)):
            items = [self.unwrap(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {name: self.unwrap(item) for name, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self.unwrap, (value.start, value.stop, value.step)))
        if isinstance(value, torch.Tensor):
            raise RuleDefinitionError(
                f"a replacement used a tensor that is not a value of the graph ({tensor_text(value)}); make it in the "
                "graph, match.call(torch.full, ...), bring it along, match.once(lambda: tensor), or use a number"
            )
        return value

    def unwrap_given(self, value: Any) -> Any:
        """Converts as `unwrap` does what is given to a function that is called at once, which may be tensors too."""
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            return [*map(self.unwrap_given, value)] if isinstance(value, list) else (*map(self.unwrap_given, value),)
        return self.unwrap(value)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any | None = None,
        proxy_factory_fn: Callable[[fx.Node], fx.Proxy] | None = None,
    ) -> NodeProxy:
        """Makes a new node for a call on proxies; FX calls this."""
        del name, type_expr, proxy_factory_fn
        if kind not in ("call_function", "call_method"):
            raise RuleDefinitionError(
                f"a replacement can call functions and methods of tensors, not make a {kind} node"
            )
        return self.call(target, args, kwargs)

    def call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NodeProxy:
        """Makes a node that calls `target`; in a graph of ATen overloads, torch functions become overloads."""
        unwrap, target = self.unwrap, ops.operator_of(target)
        args = tuple([item.node if type(item) is NodeProxy else unwrap(item) for item in args])
        kwargs = {name: unwrap(item) for name, item in kwargs.items()} if kwargs else {}
        if isinstance(target, torch.nn.Module):
            return self.proxy(self._create(target, args, kwargs))
        is_packet = isinstance(target, torch._ops.OpOverloadPacket)
        if is_packet or (self._is_aten and not isinstance(target, torch._ops.OpOverload)):
            return self.proxy(ops.emit_aten(target, args, kwargs, self._create))
        return self.proxy(self._create(target, args, kwargs))

    def once(
        self,
        match: Match,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        name: str | Sequence[str],
    ) -> Any:
        """Returns proxies of tensors that are computed now; see `compute_once`."""
        args, kwargs = self.unwrap_given(args), {key: self.unwrap_given(kwargs[key]) for key in kwargs}
        promised: dict[str, Any] = {"rule": self._rule, "gradients": self._gradients}
        return self.wrap(compute_once(match, self._effects, function, args, kwargs, name=name, **promised))

    def detached(self, node: fx.Node) -> fx.Node:
        """Returns a new node: the value without its gradient."""
        return self.unwrap(self.call(torch.detach, (node,), {}))

    def leaf(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as `torch.fx.wrap` means it: of values of the graph, a node that calls it."""

        def called(*args: Any, **kwargs: Any) -> Any:
            has_value = any(isinstance(item, NodeProxy) for item in _flat((*args, *kwargs.values())))
            return self.call(wrapped, args, kwargs) if has_value else wrapped(*args, **kwargs)

        return called

    def _create(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        if ops.modes_now() != self._modes:
            raise RuleDefinitionError(
                f"a replacement calls {ops.key(target)} in a mode of its own, as under torch.no_grad() or autocast, "
                "which a graph does not hold; write x.detach() for a value without its gradient, and casts as "
                "x.to(dtype)"
            )
        before, after = self._before, None
        if before is None:
            read: list[fx.Node] = []
            map_arg((args, dict(kwargs)), read.append)  # pyright: ignore[reportArgumentType]
            after = max(read, default=None)
            before = None if after is not None else self._edit.body
        node = self._edit.call(target, args, kwargs, before=before, after=after, like=self._like, rule=self._rule)
        self.created.append(node)
        return node
