"""Makes in-place operations on intermediate values functional: a write makes a new value, and its views are read again.

    x.mul_(y); z = x.view(-1)     ->    x_1 = mul(x, y); z = view(x_1, -1)
    x[:, :4].copy_(y); z = 2 * x  ->    x_1 = slice_scatter(x, y, 1, 0, 4); z = 2 * x_1

Gradients stay the same: autograd itself treats a write to a view as a scatter into its base. Results of the graph that
share memory still do: they are read from the last value of their base.
Some writes stay in place, because a functional form would not be equal or is unknown: writes to memory of the graph's
inputs, which the caller sees; writes that autograd does not see (under no_grad, through detach) to memory that it
reads; and memory with a view or a write that has no functional form here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxrewrite.capture.running import Running
from fxrewrite.graph.sizes import is_same_size, is_same_view
from fxrewrite.ops import BindingError, bind, is_barrier, is_tensor, key, mutated, operators, storages_in, tensors_of

aten = torch.ops.aten


@dataclass(eq=False)
class Memory:
    """The values of one graph that share one memory."""

    position: dict[fx.Node, int]
    """Position of every node of the graph."""
    members: dict[fx.Node, fx.Node | None] = field(default_factory=dict[fx.Node, "fx.Node | None"])
    """Each value and its base, in graph order (None: it made the memory). A write counts as a view of its target."""
    writes: list[fx.Node] = field(default_factory=list[fx.Node])
    _inverses: dict[fx.Node, Inverse | None] = field(default_factory=dict[fx.Node, "Inverse | None"])

    def inverse(self, view: fx.Node) -> Inverse | None:
        """Returns how a new value of a view gives a new value of its base; None if that is unknown."""
        if view not in self._inverses:
            base = self.members[view]
            assert base is not None, "the value that made the memory is no view"
            self._inverses[view] = _inverse_of(view, base)
        return self._inverses[view]

    def path(self, member: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yields (view, its base) from a member up to the value that made the memory."""
        while (base := self.members[member]) is not None:
            yield member, base
            member = base

    def is_read_after(self, member: fx.Node, node: fx.Node) -> bool:
        """Whether the member, or a view of it, is read after `node`."""
        late = any(self.position[user] > self.position[node] for user in member.users)
        return late or any(self.is_read_after(user, node) for user in member.users if self.members.get(user) is member)

    def has_functional_form(self) -> bool:
        """Whether all writes to this memory have an equal functional form."""
        made = [member for member, base in self.members.items() if base is None]
        if len(made) != 1 or made[0].op != "call_function":
            return False
        if any(is_barrier(user) for member in self.members for user in member.users):
            return False
        return all(
            _functional_form(write.target) is not None
            and mutated(write) == (self.members[write],)
            and write.args[0] is self.members[write]
            and all(self.inverse(view) is not None for view, _ in self.path(write))
            for write in self.writes
        )


def functional_writes(graph: fx.Graph) -> dict[fx.Node, Memory]:
    """Returns the writes of an ATen graph that can be made functional, each with the memory that it writes to.

    Nodes must have fake values in `meta["val"]` that share memory where the real values do.
    """
    if not any(mutated(node) for node in graph.nodes):
        return {}
    memories = [memory for memory in _memories(graph) if memory.writes and memory.has_functional_form()]
    hidden = _written_behind_autograd(graph, memories)
    return {write: memory for memory in memories if memory not in hidden for write in memory.writes}


class Functional(Running):
    """Runs a graph with these writes, which `functional_writes` found, in functional form."""

    def __init__(self, gm: fx.GraphModule, writes: dict[fx.Node, Memory]) -> None:
        super().__init__(gm, garbage_collect_values=False)  # views of written memory run again
        self._writes = writes
        self._grad_enabled: dict[fx.Node, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Makes results of the graph that are one memory views of its last value, as the caller may write to them."""
        if n.op == "output":
            for memory in dict.fromkeys(self._writes.values()):
                returned = [node for node in n.all_input_nodes if node in memory.members]
                if len({id(self.env[node]) for node in returned}) > 1:
                    self._share(memory, returned)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces a write by its functional form, and updates the values of all views of that memory."""
        self._grad_enabled[self.current] = torch.is_grad_enabled()
        memory = self._writes.get(self.current)
        if memory is None:
            return super().call_function(target, args, kwargs)
        value = _written_value(target, args, kwargs)
        changed = self._scatter(memory, value)
        self._read_anew(memory, changed)
        return value

    def _scatter(self, memory: Memory, value: Any) -> set[fx.Node]:
        """Puts the value where the current node writes, and into all its bases; returns the changed members."""
        changed = {self.current}
        for view, base in memory.path(self.current):
            put = memory.inverse(view)
            assert put is not None, "functional_writes has checked it"
            named: Any = self.map_nodes_to_values(bind(view), view)  # pyright: ignore[reportArgumentType]
            value = self.env[base] = put(self.env[base], value, named)
            changed.add(base)
        return changed

    def _read_anew(self, memory: Memory, changed: set[fx.Node]) -> None:
        """Runs the views again that were made before the current node and are read after it."""
        for view in memory.members:
            if view is self.current:
                return
            if view not in changed and memory.is_read_after(view, self.current):
                self._view_again(view)

    def _share(self, memory: Memory, returned: list[fx.Node]) -> None:
        """Runs all views again that lead to what is returned, with gradients where they had them."""
        needed = {view for node in returned for view, _ in memory.path(node)}
        for view in memory.members:
            if view in needed:
                mode = self._grad_enabled[view]
                with nullcontext() if mode is torch.is_grad_enabled() else torch.set_grad_enabled(mode):
                    self._view_again(view)

    def _view_again(self, view: fx.Node) -> None:
        args, kwargs = self.fetch_args_kwargs_from_env(view)
        again: Any = view.target
        self.env[view] = args[0] if view in self._writes else super().call_function(again, args, kwargs)


# Which values share memory.


def _memories(graph: fx.Graph) -> list[Memory]:
    position = {node: at for at, node in enumerate(graph.nodes)}
    found: dict[Any, Memory] = {}
    # A node's base is the operand (or write target) with the same storage that is known already. Fake values share
    # storage exactly where the real ones do.
    for node in graph.nodes:
        written = mutated(node)
        for storage in storages_in(tensors_of(node)):
            bases = [n for n in (*written, *node.all_input_nodes) if storage in storages_in(tensors_of(n))]
            if not bases and isinstance(node.meta["val"], (list, tuple)):
                continue  # several new results: each has its own memory from its getitem on
            memory = found.setdefault(storage, Memory(position))
            memory.members[node] = next((base for base in bases if base in memory.members), None)
        for target in written:
            for storage in storages_in(tensors_of(target)):
                found[storage].writes.append(node)
                found[storage].members.setdefault(node, target)
    return list(found.values())


# What autograd sees.


def _written_behind_autograd(graph: fx.Graph, memories: list[Memory]) -> set[Memory]:
    """Returns the memories that need gradients and are written where autograd does not look.

    A functional write would cut their gradient off. The set of values that need gradients is overestimated.
    """
    memory_of = {member: memory for memory in memories for member in memory.members}
    carrying: set[fx.Node | Memory] = set()
    hidden_views: dict[Memory, list[fx.Node]] = {}
    written_below_view: set[Memory] = set()
    found: set[Memory] = set()
    grad_enabled = torch.is_grad_enabled()
    # Follow grad mode through the graph. A write is hidden from autograd if it runs without gradients, or goes through
    # a view that was made without them.
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            grad_enabled = bool(node.args[0])
        memory = memory_of.get(node)
        seen = grad_enabled and key(node) not in ("aten::detach", "aten::detach_")
        views = hidden_views.get(memory, []) if memory is not None else []
        if memory is not None and node in memory.writes:
            if memory in carrying and (not seen or any(view in views for view, _ in memory.path(node))):
                found.add(memory)
            if any(memory.is_read_after(view, node) for view in views):
                written_below_view.add(memory)
        elif memory is not None and memory.members[node] is not None and not seen:
            hidden_views.setdefault(memory, []).append(node)
        if _requires_grad(node) or (seen and any(memory_of.get(n, n) in carrying for n in node.all_input_nodes)):
            carrying.add(memory or node)
    return found | (written_below_view & carrying)


def _requires_grad(node: fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    return node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor) and value.requires_grad


# Functional forms.


def _written_value(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the written value in its own dtype and shape, whatever the functional form returns."""
    written = args[0]
    form = _functional_form(target)
    assert form is not None, "functional_writes has checked it"
    positional = [a for a in target._schema.arguments[len(args) :] if not a.kwarg_only and a.name not in kwargs]
    value = form(*args, *(a.default_value for a in positional), **kwargs)
    if value.dtype != written.dtype:
        value = aten.to.dtype(value, written.dtype)
    if value.shape != written.shape:
        value = aten.expand.default(value, written.shape)
    # Views of what was written run again, and fail on other strides than those that they were made of.
    if _is_contiguous(written) and not _is_contiguous(value):
        return aten.clone.default(value, memory_format=torch.contiguous_format)
    return value


def _is_contiguous(value: torch.Tensor) -> bool:
    """Whether strides are known to be those of a contiguous tensor; adds no guard."""
    wanted: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not (is_same_size(size, 1) or is_same_size(stride, wanted)):
            return False
        wanted = wanted * size
    return True


def _copy(written: Any, source: Any, non_blocking: bool = False) -> Any:
    """Returns the value of `source`, in its own memory unless `_written_value` makes that by a cast or new strides."""
    source = source if source.device == written.device else aten.to.device(source, written.device, source.dtype)
    keeps_strides = source.shape == written.shape and _is_contiguous(source)
    is_made = source.dtype != written.dtype or (_is_contiguous(written) and not keeps_strides)
    return source if is_made else aten.clone.default(source)


def _full(written: Any, value: Any = 0) -> Any:
    return aten.full_like.default(written, value)


_FORMS: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten.detach_.default: aten.detach.default,
    aten.fill_.Scalar: _full,
    aten.fill_.Tensor: _copy,
    aten.zero_.default: _full,
    aten.normal_.default: aten.normal_functional.default,
}


def _functional_form(target: Any) -> Callable[..., Any] | None:
    """Returns a function of the value that an operator writes to its first argument; None if there is none."""
    if target in _FORMS:
        return _FORMS[target]
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.inplace_view in target.tags:
        return None
    namespace, _, name = target.name().partition(".")[0].partition("::")
    functional = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), functional, None)
    if functional == name or not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    candidates = [getattr(packet, overload) for overload in packet.overloads()]
    candidates.sort(key=lambda overload: overload._overloadname != target._overloadname)
    return next((o for o in candidates if not o._schema.is_mutable and _signature(o) == _signature(target)), None)


def _signature(overload: torch._ops.OpOverload) -> list[tuple[str, str]]:
    written, *others = overload._schema.arguments
    return [("", str(written.type)), *((argument.name, str(argument.type)) for argument in others)]


# Inverses of views.

Inverse = Callable[[Any, Any, dict[str, Any]], Any]
"""(base, new value of the view, arguments of the view by name) -> new value of the base."""


def _put_slice(base: Any, value: Any, named: dict[str, Any]) -> Any:
    return _scattered(
        aten.slice_scatter.default, base, value, named["dim"], named["start"], named["end"], named["step"]
    )


def _put_narrow(base: Any, value: Any, named: dict[str, Any]) -> Any:
    start = named["start"]
    return _scattered(aten.slice_scatter.default, base, value, named["dim"], start, start + named["length"])


def _put_entry(base: Any, value: Any, named: dict[str, Any]) -> Any:
    return _scattered(aten.select_scatter.default, base, value, named["dim"], named["index"])


def _scattered(scatter: Any, base: Any, value: Any, dim: int, *where: Any) -> Any:
    """Puts `value` into `base` along `dim`; complex numbers as pairs, since autograd has no formula for them here."""
    if not base.is_complex():
        return scatter(base, value, dim, *where)
    real, put = (aten.view_as_real.default(aten.resolve_conj.default(x)) for x in (base, value))
    return aten.view_as_complex.default(scatter(real, put, dim % base.dim(), *where))


def _put_item(base: Any, value: Any, named: dict[str, Any]) -> Any:
    return type(base)(value if at == named["b"] else item for at, item in enumerate(base))


def _reshape(base: Any, value: Any, named: dict[str, Any]) -> Any:
    return aten.reshape.default(value, base.shape)


def _permute_back(base: Any, value: Any, named: dict[str, Any]) -> Any:
    order = [dim % base.dim() for dim in named["dims"]]
    return aten.permute.default(value, [order.index(dim) for dim in range(base.dim())])


def _join(base: Any, value: Any, named: dict[str, Any]) -> Any:
    return aten.cat.default(value, named["dim"])


_INVERSES: dict[str, Inverse] = {
    "aten::slice": _put_slice,
    "aten::narrow": _put_narrow,
    "aten::select": _put_entry,
    "aten::diagonal": lambda base, value, named: aten.diagonal_scatter.default(
        base, value, named["offset"], named["dim1"], named["dim2"]
    ),
    "aten::transpose": lambda _, value, named: aten.transpose.int(value, named["dim0"], named["dim1"]),
    "aten::t": lambda _, value, __: aten.t.default(value),
    "aten::mT": lambda _, value, __: aten.transpose.int(value, -2, -1),
    "aten::permute": _permute_back,
    "aten::unsqueeze": lambda _, value, named: aten.squeeze.dim(value, named["dim"]),
    **dict.fromkeys(operators("reshape"), _reshape),
    "aten::squeeze": _reshape,
    **dict.fromkeys(operators("split"), _join),
    "aten::unbind": lambda _, value, named: aten.stack.default(value, named["dim"]),
    "operator.getitem": _put_item,
}


def _inverse_of(view: fx.Node, base: fx.Node) -> Inverse | None:
    """Returns how a new value of `view` gives a new value of `base`; None if that is unknown."""
    if mutated(view) == (base,) or (
        is_tensor(view) and is_tensor(base) and is_same_view(view.meta["val"], base.meta["val"])
    ):
        return lambda _, value, __: value
    if _dtypes(view) != _dtypes(base):
        return None  # a view of the bytes as another dtype
    try:
        bind(view)
    except BindingError:
        return None
    return _INVERSES.get(key(view))


def _dtypes(node: fx.Node) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors_of(node)}
