"""Fake values of nodes, computed by running one operator on the values of its operands."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from fxrewrite import ops
from fxrewrite.errors import InvariantError
from fxrewrite.graph.argument_keys import argument_key
from fxrewrite.graph.sizes import is_read_from_data
from fxrewrite.torch_versions import hint_of_size, reshapes_of_any_length, symbolic_kernels


class FakeValues:
    """The fake values of a graph.

    Attributes:
        mode: the graph's own fake tensor mode; None if its nodes have no fake values.
        key: the metadata key that holds values.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.mode, self.key = _mode_of(gm.graph)
        self._attributes: dict[str, Any] = {}
        self._runs: dict[Any, tuple[Any, ...]] = {}
        """Results of calls, and what keeps the addresses in the key alive."""
        self._seen: dict[int, tuple[FakeTensor, tuple[str, int]]] = {}
        """Fake values, kept alive, and the number of their look, by their address."""
        self._numbers: dict[Any, int] = {}
        """Of looks, which take longer to hash."""

    def compute(self, node: fx.Node) -> Any:
        """Computes the node's value by running its operator on fake values; equal calls are run once."""
        target = node.target
        autocasts = ops.autocasts_at(node)
        same = (id(target), self._looks(node.args), self._looks(node.kwargs) if node.kwargs else (), autocasts)
        found = self._runs.get(same)
        if found is not None:
            return found[0]
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._of_input)  # pyright: ignore[reportArgumentType]
        result = self._call(target, args, kwargs, autocasts)
        is_operator = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
        if (is_operator or target is operator.getitem) and not _has_data_sizes(result):
            self._runs[same] = (result, target, node.args, node.kwargs)
        return result

    def _looks(self, value: Any) -> Any:
        """A key of arguments that is equal if operators run in the same way on them."""
        return argument_key(value, self._look)

    def _look(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            seen = self._seen.get(id(ops.value(value)))
            return self._looks(self._of_input(value)) if seen is None else seen[1]
        if isinstance(value, torch.SymInt):
            return "SymInt", value.node.expr
        if not isinstance(value, FakeTensor):
            return id(value)
        seen = self._seen.get(id(value))
        if seen is None:
            look = look_of(value)
            number = self._numbers.setdefault(id(value) if look is None else look, len(self._numbers))
            seen = self._seen[id(value)] = value, ("fake", number)
        return seen[1]

    def run_with(
        self, node: fx.Node, values: Mapping[fx.Node, Any], *, saving: Callable[[torch.Tensor], Any] | None = None
    ) -> Any:
        """Returns the result of a node if some inputs had these values, and the others their own; changes nothing.

        `saving` is called with what autograd saves.
        """

        def value_of(used: fx.Node) -> Any:
            return tree_map_only(FakeTensor, self._adopted, values[used]) if used in values else self._of_input(used)

        args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)  # pyright: ignore[reportArgumentType]
        return self._call(node.target, args, kwargs, ops.autocasts_at(node), saving)

    def saved_for_backward(self, node: fx.Node, trained: Collection[fx.Node] | None = None) -> list[fx.Node]:
        """Returns which of a node and its inputs autograd saves; all of these if that cannot be tried.

        `trained` are the inputs that have gradients; None: those whose values say it, or all where none does.
        """
        inputs = node.all_input_nodes
        candidates = [node, *inputs]
        if isinstance(node.target, torch._ops.HigherOrderOperator):  # its bodies are not traced for autograd
            return candidates
        of_values = self.key == "example_value" and trained is None
        leaves = [
            _leaf if of_values else _as_trained_leaf if trained is None or one in trained else torch.Tensor.detach
            for one in inputs
        ]
        saved: list[torch.Tensor] = []
        try:
            memories = [ops.storages_in(self._of_input(used)) for used in inputs]
            same = (
                "saved",
                id(node.target),
                argument_key((node.args, node.kwargs), lambda leaf: self._placed(leaf, inputs)),
                tuple(tuple(bool(one & other) for other in memories) for one in memories),
                tuple(leaves),
                ops.autocasts_at(node),
            )
            if same in self._runs:
                return [candidates[place] for place in self._runs[same][0]]
            given = {
                used: tree_map_only(torch.Tensor, leaf, self._of_input(used))
                for used, leaf in zip(inputs, leaves, strict=True)
            }
            result = self.run_with(node, given, saving=saved.append)
        except Exception:  # noqa: BLE001  # any error means that nothing is known
            return candidates
        memory = ops.storages_in(saved)
        places = [place for place, value in enumerate((result, *given.values())) if memory & ops.storages_in(value)]
        self._runs[same] = (places, node.target, node.args, node.kwargs)
        return [candidates[place] for place in places]

    def _placed(self, leaf: Any, inputs: Sequence[fx.Node]) -> Any:
        """The look of an argument, and which of the inputs it is."""
        return (inputs.index(leaf) if isinstance(leaf, fx.Node) else None, self._look(leaf))

    def returns_operand(self, node: fx.Node) -> bool:
        """Whether the operator returns its first operand itself, the same object, as `x.to(x.dtype)` does."""
        mode = self.mode
        if node.op not in ("call_function", "call_method") or mode is None or not node.args or ops.mutates(node):
            return False
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._of_input)  # pyright: ignore[reportArgumentType]
        function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        with mode, mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext():
            return isinstance(args[0], torch.Tensor) and function(*args, **kwargs) is args[0]

    def viewed(self, node: fx.Node, values: Mapping[fx.Node, Any] = MappingProxyType({})) -> set[fx.Node] | None:
        """Returns the operands whose memory the result shares, as strides decide; None if the node cannot be run.

        `values` are those that some operands would have instead of their own.
        """
        if self.mode is None or isinstance(node.target, torch._ops.HigherOrderOperator) or ops.mutates(node):
            return None
        try:
            given = {used: values.get(used, self._of_input(used)) for used in node.all_input_nodes}
            own = ops.storages_in(self.run_with(node, given))
            return {used for used, value in given.items() if not own.isdisjoint(ops.storages_in(value))}
        except Exception:  # noqa: BLE001  # any error means that nothing is known
            return None

    def _call(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        autocasts: Sequence[tuple[Any, ...]],
        saving: Callable[[torch.Tensor], Any] | None = None,
    ) -> Any:
        """Calls the target on fake values, under the graph's own mode and autocasts, and without adding guards.

        The caller's hooks for saved tensors, as of a checkpoint around the compiled call, see nothing of it.
        """
        mode = self.mode
        assert mode is not None
        function = getattr(torch.Tensor, target) if isinstance(target, str) else target
        quiet = mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext()
        # torch's own cache makes every new result twice, which takes most of the time where sizes are expressions
        uncached = disable_fake_tensor_cache(mode) if _has_symbols((args, kwargs)) else contextlib.nullcontext()
        is_one = ops.has_trait(ops.key(target), "reshape") and _has_traced_one((args, kwargs))
        any_length = reshapes_of_any_length() if is_one else contextlib.nullcontext()
        with contextlib.ExitStack() as stack, mode, quiet, uncached, symbolic_kernels(), any_length:
            stack.enter_context(ops.without_saved_tensors_hooks())
            if saving is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saving, torch.zeros_like))
            for region in autocasts:
                stack.enter_context(torch.autocast(*region, cache_enabled=False))
            if isinstance(target, torch._ops.HigherOrderOperator):
                return _without_tracing(function, args, kwargs)
            return tree_map_only(torch.Tensor, _leaf, function(*args, **kwargs))

    def _of_input(self, node: fx.Node) -> Any:
        found = ops.value(node)
        if found is not ops.MISSING:
            return self._adopted(found) if isinstance(found, FakeTensor) else found
        if node.op == "get_attr":
            return self.attribute(str(node.target))
        raise InvariantError(
            f"%{node.name} has no value in its metadata, so none can be computed for its new user; "
            "propagate fake values through the graph first, or pass val="
        )

    def _adopted(self, fake: FakeTensor) -> FakeTensor:
        """Converts the value to the graph's mode, because make_fx with real inputs gives every node its own mode."""
        mode = self.mode
        assert mode is not None
        symbolic = any(isinstance(size, torch.SymInt) for size in (*fake.shape, *fake.stride()))
        if fake.fake_mode is mode or symbolic:
            return fake
        with mode:
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)  # pyright: ignore[reportReturnType]

    def attribute(self, path: str) -> Any:
        """Returns the fake value of the parameter, buffer or submodule that a `get_attr` node reads."""
        if path not in self._attributes:
            found: Any = operator.attrgetter(path)(self.gm)
            mode = self.mode
            if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor) and mode is not None:
                found = mode.from_tensor(found, static_shapes=True)
            self._attributes[path] = found
        return self._attributes[path]

    def forget(self, path: str) -> None:
        """Forgets the value of an attribute, which the module may have otherwise later."""
        self._attributes.pop(path, None)


def look_of(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors on which operators run, and are traced, in the same way; None if not known."""
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return None
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    terms = tuple(size if isinstance(size, int) else size.node.expr for size in sizes)
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    return type(tensor), isinstance(tensor, torch.nn.Parameter), tensor.dtype, tensor.device, tensor.dim(), terms, flags


def _has_symbols(arguments: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for tensor in ops.tensors_in(arguments) for size in tensor.shape)


def _has_traced_one(arguments: Any) -> bool:
    """Whether a symbolic size is 1 in the trace, as is the chunk of each rank where there are as many ranks."""
    leaves = tree_leaves(arguments)
    sizes = (size for leaf in leaves for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)))
    return any(isinstance(size, torch.SymInt) and hint_of_size(size, fallback=0) == 1 for size in sizes)


def _has_data_sizes(result: Any) -> bool:
    """Whether a result has sizes that data decide: the same ones twice would be taken for equal."""
    leaves = tree_leaves(result)
    return any(is_read_from_data(leaf) for leaf in leaves if isinstance(leaf, (torch.Tensor, torch.SymInt)))


def _mode_of(graph: fx.Graph) -> tuple[FakeTensorMode | None, str]:
    """Returns the fake mode of the graph's values, and the metadata key that holds them.

    Either all nodes have values or none has, so the search ends at the first call without one.
    """
    for node in graph.nodes:
        found = ops.value(node)
        if isinstance(found, FakeTensor):
            return found.fake_mode, ops.value_key(node)
        if found is ops.MISSING and node.op in ("call_function", "call_method", "call_module"):
            break
    return None, "val"


def _without_tracing(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a higher-order operator, which would trace its bodies for autograd, in a fake mode of its own."""
    is_differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in ops.tensors_in((args, kwargs)))
    with torch.no_grad():
        result = function(*args, **kwargs)
    if not is_differentiated:
        return result
    return tree_map_only(torch.Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), result)


def _as_trained_leaf(value: torch.Tensor) -> torch.Tensor:
    """Returns the value as a leaf of autograd with the same memory, which requires a gradient where it can."""
    return value.detach().requires_grad_(ops.is_inexact(value))


def _leaf(value: torch.Tensor) -> torch.Tensor:
    """Returns the value without its autograd history, but with its requires_grad."""
    return value.detach().requires_grad_() if value.requires_grad else value
