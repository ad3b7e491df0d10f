"""Whether strides matter: runs the operators that read a value on fake values with other strides."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxrewrite import ops
from fxrewrite.graph.bodies import body_of
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import is_same_size, is_same_stride
from fxrewrite.match.safety import Effects

_RUN_ON_OPERANDS = frozenset(
    f"higher_order::{name}"
    for name in [
        "invoke_subgraph",
        "tag_activation_checkpoint",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    ]
)
"""Higher-order operators that call their one subgraph on the arguments after it, in their order."""
_CUSTOM_FUNCTION = "higher_order::autograd_function_apply"
_RUN_WHOLE = ops.CALLERS | {"higher_order::flex_attention"}
"""Higher-order operators that run on fake values like others: no subgraph sees a whole operand."""


class Replaced(NamedTuple):
    """A node that is replaced.

    Attributes:
        node: the node.
        value: the fake value of what replaces it.
        readers: the users that will read this.
    """

    node: fx.Node
    value: Any
    readers: Collection[fx.Node]


def after_strides(edit: Edit, replaced: Iterable[Replaced], effects: Effects) -> dict[fx.Node, Any] | fx.Node:
    """Returns what later nodes become if values are laid out otherwise in memory, or the first that depends on that.

    Such a node fails, or draws other random numbers; it reads memory by address, as `as_strided` does; it returns a
    view instead of a copy, or the converse, and something is written to that memory later; or it is opaque, as a kernel
    of Triton. Runs the affected operators in graph order, each once, until results have their old strides, enters the
    subgraphs of checkpoints, and goes on behind what calls a subgraph, if its result changes.

    Args:
        edit: the transaction.
        replaced: what is replaced.
        effects: what the graph writes.
    """
    replaced = list(replaced)
    for one in replaced:  # Dynamo's value of an operand that is transposed in place is the one afterwards
        turned = next((u for u in one.readers if ops.has_trait(u, "addressed") and ops.mutates(u)), None)
        if turned is not None:
            return turned
    walk = _Walk(edit, effects, replaced)
    reader = walk.first_reader()
    if reader is not None:
        return reader
    around = _after_caller(edit, walk)
    if isinstance(around, fx.Node):
        return around
    stay = {one.node for one in replaced}
    return {node: value for node, value in (walk.values | walk.inner | around).items() if node not in stay}


def _after_caller(edit: Edit, walk: _Walk) -> dict[fx.Node, Any] | fx.Node:
    """As `after_strides`, in the graph around a subgraph, of which the result changes."""
    result, around = walk.result(), edit.around
    if result is None or around is None:
        return {}
    callers = edit.callers()
    if any(not _runs_on_operands(caller) or len(_bodies(around.gm, caller)) > 1 for caller in callers):
        return next(iter(edit.graph.find_nodes(op="output")))
    found = after_strides(around, [Replaced(caller, result, caller.users) for caller in callers], Effects(around))
    return found if isinstance(found, fx.Node) else dict.fromkeys(callers, result) | found


class _Walk:
    """The readers of values with other strides, in one graph.

    Attributes:
        values: nodes with other strides -> their new values.
        inner: the same as `values`, of nodes in subgraphs that are called.
    """

    def __init__(self, edit: Edit, effects: Effects, replaced: Iterable[Replaced]) -> None:
        self._edit = edit
        self._effects = effects
        self._waiting: list[fx.Node] = []
        self._seen: set[fx.Node] = set()
        self.values: dict[fx.Node, Any] = {}
        self.inner: dict[fx.Node, Any] = {}
        for node, new, readers in replaced:
            self._note(node, ops.value(node), new, readers)

    def first_reader(self) -> fx.Node | None:
        """Returns the first node that depends on strides; else all that follow are known afterwards."""
        while self._waiting:
            node = heapq.heappop(self._waiting)
            reader = self._reader(node)
            if reader is not None:
                return reader
        return None

    def result(self) -> Any:
        """Returns what the graph returns with the new values; None if they do not reach its output."""
        output = next(iter(self._edit.graph.find_nodes(op="output")))
        if self.values.keys().isdisjoint(output.all_input_nodes):
            return None
        return map_arg(output.args[0], lambda used: self.values.get(used, ops.value(used)))

    def new_values(self, values: Iterable[Any]) -> list[Any]:
        """Returns the new value of each that is a node and changes, and None of the others."""
        return [self.values.get(value) if isinstance(value, fx.Node) else None for value in values]

    def _note(self, node: fx.Node, was: Any, is_now: Any, readers: Iterable[fx.Node]) -> None:
        """Notes that a value changes, and its readers, if it does."""
        is_same = is_alike(was, is_now)
        if not is_same:
            self.values[node] = is_now
        if not is_same or _is_moved(was, is_now):
            self._push(readers)

    def _push(self, users: Iterable[fx.Node]) -> None:
        for user in users:
            if user not in self._seen and user not in self._edit.erased:
                self._seen.add(user)
                heapq.heappush(self._waiting, user)

    def _reader(self, node: fx.Node) -> fx.Node | None:
        """Returns the node, or one in its subgraphs, if it depends on strides; else notes its result."""
        if self.values.keys().isdisjoint(node.all_input_nodes):
            return self._reader_of_moved(node)
        if node.op == "output":
            return None
        if ops.has_trait(node, "addressed") or ops.is_random(node) or _is_custom(node):
            return node
        higher_order = isinstance(node.target, torch._ops.HigherOrderOperator) and ops.key(node) not in _RUN_WHOLE
        if higher_order or _runs_on_operands(node):
            return self._reader_in_subgraphs(node)
        if ops.is_barrier(node):
            return node
        try:
            was, is_now = ops.value(node), self._run(node, self.values)
            if was is ops.MISSING:
                was = self._run(node, {})
        except Exception:  # noqa: BLE001  # any error means that the operator does not accept these strides
            return node
        if self._writes_to_a_copy(node):
            return node
        if not isinstance(is_now, (torch.Tensor, list, tuple)):
            return None if is_alike(was, is_now) else node
        if _has_same_shape(was, is_now):  # else its sizes are read from data, and it is new memory
            self._note(node, was, _with_gradients(is_now, was), node.users)
        return None

    def _run(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Runs an operator; the values that it writes to stay as they are."""
        if not ops.mutates(node):
            return self._edit.values.run_with(node, values)
        own = {written: values.get(written, ops.value(written)) for written in ops.mutated(node)}
        with torch.no_grad():
            own = {written: value.detach() for written, value in own.items() if isinstance(value, torch.Tensor)}
            return self._edit.values.run_with(node, {**values, **own})

    def _writes_to_a_copy(self, node: fx.Node) -> bool:
        """Whether other strides decide that the result is a view or a copy, and its memory is written later."""
        if not ops.is_maybe_view(node) or not (self._effects.writers or self._edit.around):
            return False
        if self._edit.values.viewed(node) == self._edit.values.viewed(node, self.values):
            return False
        return self._effects.later_writer(node, ops.memory_origins(node)) is not None or _is_left_to_writes(self._edit)

    def _reader_of_moved(self, node: fx.Node) -> fx.Node | None:
        """As `_reader`, of a node whose operands have their old strides at another place of memory."""
        if ops.has_trait(node, "addressed"):
            return node
        inner = (n for body in _bodies(self._edit.gm, node) for n in body.graph.nodes)
        addressed = next((n for n in inner if ops.has_trait(n, "addressed")), None)
        if addressed is not None:
            return addressed
        if ops.is_view(node):
            self._push(node.users)
        return None

    def _reader_in_subgraphs(self, node: fx.Node) -> fx.Node | None:
        """As `_reader`, of a node that calls subgraphs: follows its operands through these."""
        bodies, operands = _bodies(self._edit.gm, node), _operands(self._edit.gm, node)
        is_function = ops.key(node) == _CUSTOM_FUNCTION  # of autograd: a forward and a backward
        if len(bodies) != 1 + is_function or not (is_function or _runs_on_operands(node)):
            return node
        walk = self._entered(node, bodies[0], self.new_values(operands))
        if isinstance(walk, fx.Node):
            return walk
        result = walk.result()
        if is_function and result is not None:  # what the forward saves goes to the backward, after the gradients
            returned: Any = bodies[0].graph.output_node().args[0]
            results, saved = map(walk.new_values, returned)
            entered = self._entered(node, bodies[1], [*(None for _ in results), *saved])
            if isinstance(entered, fx.Node):
                return entered
            result = result[0] if any(value is not None for value in results) else None
        if result is not None:
            self._note(node, ops.value(node), result, node.users)
        return None

    def _entered(self, caller: fx.Node, body: fx.GraphModule, values: Sequence[Any]) -> _Walk | fx.Node:
        """Follows new values of a subgraph's inputs, None for those that stay; or returns the first reader.

        That is the caller, if the subgraph is not known, or others call it too.
        """
        part = next((part for part in self._edit.parts() if part.gm is body), None)
        inputs = part.graph.find_nodes(op="placeholder") if part is not None else []
        if part is None or len(inputs) != len(values) or part.callers() != [caller]:
            return caller
        changed = [Replaced(i, new, i.users) for i, new in zip(inputs, values, strict=True) if new is not None]
        walk = _Walk(part, Effects(part), changed)
        reader = walk.first_reader()
        if reader is not None:
            return reader
        self.inner |= walk.values | walk.inner
        return walk


def _is_custom(node: fx.Node) -> bool:
    """Whether an operator is somebody else's, whose kernel may read memory by address, and does not say otherwise."""
    if not ops.is_of_a_library(node.target) or ops.key(node).startswith("fxrewrite"):
        return False
    overload = ops.overload_of(node.target, node.args, node.kwargs)
    return overload is None or torch.Tag.flexible_layout not in overload.tags


def _is_left_to_writes(edit: Edit) -> bool:
    """Whether a graph around a subgraph writes to any memory after it has called the subgraph."""
    while edit.around is not None:
        effects = Effects(edit.around)
        for caller in edit.callers():
            if any(not ops.sets_mode(writer) for writer in effects.after(effects.writers, caller)):
                return True
        edit = edit.around
    return False


def _runs_on_operands(node: fx.Node) -> bool:
    return node.op == "call_module" or ops.key(node) in _RUN_ON_OPERANDS


def _bodies(gm: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graphs within the graph that a node calls."""
    called = body_of(gm, node)
    return [called] if called is not None else ops.bodies_of(node) or []


def _operands(gm: fx.GraphModule, node: fx.Node) -> list[Any]:
    """Returns the arguments of a higher-order operator after its last subgraph, without texts; lists are flattened."""
    found: list[Any] = []
    for argument in node.args:
        if isinstance(argument, fx.Node) and body_of(gm, argument) is not None:
            found = []
        else:
            found += [leaf for leaf in tree_leaves(argument) if not isinstance(leaf, str)]
    return found


def is_alike(was: Any, is_now: Any) -> bool:
    """Whether two results of one operator are equal in all that strides decide."""
    if isinstance(was, torch.Tensor) and isinstance(is_now, torch.Tensor):
        return was is is_now or _is_laid_out_alike(was, is_now)
    if isinstance(was, (list, tuple)) and isinstance(is_now, (list, tuple)):
        return len(was) == len(is_now) and all(map(is_alike, was, is_now))
    if isinstance(was, (int, torch.SymInt)) and isinstance(is_now, (int, torch.SymInt)):
        return is_same_size(was, is_now)
    return was is is_now or (type(was) is type(is_now) and bool(was == is_now))


def _has_same_shape(was: Any, is_now: Any) -> bool:
    if isinstance(was, (list, tuple)) and isinstance(is_now, (list, tuple)):
        return len(was) == len(is_now) and all(map(_has_same_shape, was, is_now))
    if not isinstance(was, torch.Tensor) or not isinstance(is_now, torch.Tensor):
        return True
    return was.ndim == is_now.ndim and all(map(is_same_size, was.shape, is_now.shape))


def _with_gradients(value: Any, like: Any) -> Any:
    """Returns the tensor, or those in the list, requiring gradients where the other does."""
    leaves, spec = tree_flatten(value)
    for place, (leaf, other) in enumerate(zip(leaves, tree_leaves(like), strict=True)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad != other.requires_grad:
            leaves[place] = leaf.detach().requires_grad_(other.requires_grad)
    return tree_unflatten(leaves, spec)


def _is_laid_out_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors have equal strides, for every length that the graph admits.

    Strides of dimensions with one entry are ignored. Source: torch._prims_common.check_significant_strides.
    """
    pairs = zip(a.stride(), b.stride(), a.shape, strict=False)
    return a.ndim == b.ndim and all(m is n or is_same_stride(m, n) or is_same_size(size, 1) for m, n, size in pairs)


def _is_moved(was: Any, is_now: Any) -> bool:
    """Whether two tensors, or lists, begin at other places of their memory, or their memories differ in size."""
    if isinstance(was, (list, tuple)):
        return any(map(_is_moved, was, is_now))
    if was is is_now or not isinstance(was, torch.Tensor) or was.layout is not torch.strided:
        return False
    with contextlib.suppress(NotImplementedError, RuntimeError):  # a tensor without memory
        return not (
            is_same_size(was.storage_offset(), is_now.storage_offset())
            and is_same_size(was.untyped_storage().nbytes(), is_now.untyped_storage().nbytes())
        )
    return False
