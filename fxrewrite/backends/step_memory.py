"""The peak of memory of a training step, from a trace of forward and backward without data.

AOTAutograd cuts a program into a forward and a backward graph. Their storages live from the operator that makes them to
the last one that reads them, as the graphs run: views share a storage, what the forward pass returns lives until the
backward pass has read it last, results of the caller and gradients live to the end. What a custom operator allocates
inside and gives back is counted by running its body on fake tensors; it may read a seed, which is a number.

Not counted: workspaces of torch's own kernels, which are small, what libraries allocate by themselves, and fragments.
Backends that fuse operators hold at most what is counted, as a rule: an intermediate value inside a kernel has no
memory. `compiler="inductor"` counts what the code that inductor generates allocates (`inductor_memory`). Where that
cannot be run, it counts after inductor's decompositions, without values that pointwise kernels fuse, which is a guess.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fxrewrite.backends.live_bytes import LiveBytes, StepMemory, fake_like, storage_key, unknown_inside
from fxrewrite.backends.traces import on_fake_values
from fxrewrite.graph.sizes import size_hint
from fxrewrite.ops import key, tensors_of, value

_log = logging.getLogger(__name__)


_LEAST_OF_GUESS = 0.5
"""Peaks that were measured under inductor were 0.65 of a guess at least, 0.74 in models of real widths."""


def step_memory(
    gm: fx.GraphModule,
    compiler: str = "aot_eager",
    options: Mapping[str, Any] | None = None,
    *,
    limit: int | None = None,
) -> StepMemory:
    """Returns what one step of the program holds, with `.grad` of its inputs None before and results held to the end.

    Sizes are those of the trace, also where they are symbols. Without gradients it is the forward pass alone.

    Args:
        gm: a graph of ATen operators with fake values, as a backend on AOTAutograd gets it; it is not changed.
        compiler: "inductor", or any other backend on AOTAutograd, which counts as "aot_eager".
        options: of `torch.compile`, for inductor.
        limit: bytes. Where a guess is so far above it that the peak must be, too, it is returned: what inductor
            generates takes ten times as long to find.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    given, examples = _sum(inputs), [_example(node) for node in inputs]
    fuses = compiler == "inductor"
    if fuses and limit is not None:
        guess = _of_graphs(gm, examples, compiler).with_inputs(given)
        if guess.peak * _LEAST_OF_GUESS > limit:
            return guess
    if fuses:
        try:
            return _under_inductor(gm, examples, options).with_inputs(given)
        except Exception as error:  # noqa: BLE001  # any: what is generated may do what needs data, or be new to us
            _log.info("what inductor generates cannot be run without data, so its peak is a guess: %s", error)
    return _of_graphs(gm, examples, compiler).with_inputs(given)


def _of_graphs(gm: fx.GraphModule, inputs: Sequence[Any], compiler: str) -> StepMemory:
    """What the graphs hold that AOTAutograd makes of the program, above its inputs."""
    fuses = compiler == "inductor"
    forward, backward = _cut(gm, inputs, compiler)
    insides = _Insides()
    first = _held(forward, insides, fuses=fuses)
    if backward is None:
        return StepMemory(
            given=0,
            forward=first.peak,
            backward=0,
            saved=first.end,
            gradients=0,
            at=first.at,
            unknown=insides.unknown,
            is_guess=fuses,
        )
    read = backward.graph.find_nodes(op="placeholder")
    tangents = [node for node in read if node.name.startswith("tangents")]
    # The forward graph returns the caller's results, then what it saves, of which what is no input dies when read.
    results: Any = forward.graph.output_node().args[0]
    results = results[: len(results) - (len(read) - len(tangents))]
    stay = [*forward.graph.find_nodes(op="placeholder"), *(node for node in results if isinstance(node, fx.Node))]
    last = _held(backward, insides, _storages(read).keys() - _storages(stay).keys(), fuses=fuses)
    peak = first.end + _sum(tangents) + last.peak
    return StepMemory(
        given=0,
        forward=first.peak,
        backward=peak,
        saved=first.end,
        gradients=_sum(backward.graph.output_node().all_input_nodes),
        at=first.at if first.peak > peak else last.at,
        unknown=insides.unknown,
        is_guess=fuses,
    )


def _under_inductor(gm: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any] | None) -> StepMemory:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what inductor imports
        from fxrewrite.backends.inductor_memory import inductor_step  # lazy: loads inductor

    return inductor_step(gm, inputs, options)


def _example(node: fx.Node) -> Any:
    """Returns what the input is called with, as a fake value that requires a gradient where the input does."""
    found = value(node)
    if not isinstance(found, torch.Tensor):
        return found
    like = node.meta.get("example_value", found)
    return found.detach().requires_grad_(like.requires_grad)


def _cut(gm: fx.GraphModule, inputs: Sequence[Any], compiler: str) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """Returns the forward graph, and the backward graph if there is one, as AOTAutograd's partitioner makes them."""
    found: list[fx.GraphModule] = []

    def run(*args: Any) -> Any:
        with preserve_node_meta():  # tags of checkpointing reach the partitioner
            return fx.Interpreter(gm).run(*args)

    def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], **options: Any) -> Any:
        how = {"compiler": "inductor"} if compiler == "inductor" else {}
        found.extend(min_cut_rematerialization_partition(joint, joint_inputs, **how, **options))
        return tuple(found)

    def compiled(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        if not found:
            found.append(graph)
        return make_boxed_func(graph)

    def trace(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        table = {}
        if compiler == "inductor":
            from torch._inductor.decomposition import select_decomp_table  # lazy: loads inductor

            table = dict(select_decomp_table())
        aot_function(
            fn,
            compiled,  # pyright: ignore[reportArgumentType]  # torch's protocol wants other names of parameters
            partition_fn=partition,
            decompositions=table,
            keep_inference_input_mutations=True,
            enable_log=False,
        )(*args)
        return gm

    on_fake_values(trace, run, inputs)
    return (found[0], found[1]) if len(found) > 1 else (found[0], None)


def _storages(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Returns the bytes of each storage that tensors of the nodes have, by its identity."""
    tensors = (t for node in nodes for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor))
    return {storage_key(t): size_hint(t.untyped_storage().nbytes()) for t in tensors}


def _sum(nodes: Iterable[fx.Node]) -> int:
    return sum(_storages(nodes).values())


@dataclass(frozen=True, slots=True)
class _Held:
    """Bytes above those at the start of a graph: the most, at which operator, and at the end."""

    peak: int
    end: int
    at: str


class _Lifetimes:
    """When each storage of a graph is made, and when it dies: after the last node that makes or reads it.

    Inputs are there before and die only where they are among `freed`; what the graph returns stays.

    Attributes:
        nodes: what runs, in order: without the output, and without what kernels compute inside.
        made, dying: of each node, the bytes of the storages that it makes, and of those that nothing after it reads.
    """

    def __init__(self, gm: fx.GraphModule, freed: Iterable[int], *, fuses: bool) -> None:
        inside = _fused(gm) if fuses else {}
        self.nodes: list[fx.Node] = [node for node in gm.graph.nodes if node.op != "output" and node not in inside]
        self.made: dict[fx.Node, dict[int, int]] = {}
        self.dying: dict[fx.Node, dict[int, int]] = {node: {} for node in self.nodes}
        inputs = _storages(node for node in self.nodes if node.op == "placeholder")
        sizes = {storage: inputs[storage] for storage in freed}
        last: dict[int, fx.Node] = {}
        for node in self.nodes:
            own = _storages([node])
            self.made[node] = {storage: own[storage] for storage in own.keys() - sizes.keys() - inputs.keys()}
            sizes |= self.made[node]
            read = (needed for operand in node.all_input_nodes for needed in inside.get(operand, (operand,)))
            last |= dict.fromkeys([*own, *_storages(read)], node)
        for storage in sizes.keys() & last.keys() - _storages(gm.graph.output_node().all_input_nodes).keys():
            self.dying[last[storage]][storage] = sizes[storage]

    def is_overwritten(self, node: fx.Node) -> bool:
        """Whether a kernel can write the node's result over an operand of the same size that dies."""
        new = sum(self.made[node].values())
        return _is_kernel(node) and new in [self.dying[node][old] for old in self.dying[node].keys() - self.made[node]]


def _held(gm: fx.GraphModule, insides: _Insides, freed: Iterable[int] = (), *, fuses: bool = False) -> _Held:
    """Returns what a graph holds.

    Args:
        gm: the graph.
        insides: of custom operators.
        freed: storages of inputs that die with their last reader.
        fuses: whether values that only kernels read which compute them themselves have no memory, and a kernel writes
            its result over an operand of the same size that dies.
    """
    lifetimes = _Lifetimes(gm, freed, fuses=fuses)
    held = peak = 0
    at = ""
    for node in lifetimes.nodes:
        new = sum(lifetimes.made[node].values())
        most = held + insides.of(node, new) + (0 if fuses and lifetimes.is_overwritten(node) else new)
        if most > peak:
            peak, at = most, node.name
        held += new - sum(lifetimes.dying[node].values())
    return _Held(peak, held, at)


_MOVES = frozenset(
    {"aten::full", "prims::iota", "aten::cat", "aten::constant_pad_nd", "aten::embedding", "aten::index"}
)
"""Keys of operators without torch's tag that inductor computes inside of kernels as it does pointwise ones."""


def _is_kernel(node: fx.Node) -> bool:
    """Whether inductor generates a kernel for the operator, which can compute its operands too."""
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.is_view or bool(_KERNELS.intersection(node.target.tags)) or key(node) in _MOVES


_KERNELS = {torch.Tag.pointwise, torch.Tag.reduction}


def _fused(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Returns values that inductor computes inside of the kernels that read them, with the values in memory they need.

    Those of pointwise operators, and their views, that only such kernels read.
    """
    inside: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if not _is_kernel(node) or torch.Tag.reduction in node.target.tags:
            continue
        if all(_is_kernel(user) and (user in inside or not user.target.is_view) for user in node.users):
            inside.add(node)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node in inside:
            read = (m for n in node.all_input_nodes for m in found.get(n, (n,)))
            found[node] = list(dict.fromkeys(read))
    return found


class _Insides:
    """What custom operators allocate beside their results, by running their bodies on fake tensors."""

    def __init__(self) -> None:
        self._unknown: set[str] = set()
        self._known: dict[Any, int] = {}

    @property
    def unknown(self) -> tuple[str, ...]:
        """The operators whose inside is not counted."""
        return tuple(sorted(self._unknown))

    def of(self, node: fx.Node, result_bytes: int) -> int:
        """Returns the bytes that the operator holds at most beside its results, while it runs."""
        name = node.target._schema.name if isinstance(node.target, OpOverload) else ""
        if name == "aten::native_dropout":  # on a CPU, its kernel makes the mask in the operand's dtype as well
            (x, *_) = tensors_of(node)
            return size_hint(x.numel()) * x.element_size() if x.device.type == "cpu" else 0
        if name not in OPDEFS:
            self._unknown |= unknown_inside(node.target)
            return 0
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: read.meta.get("val"))
        known = name, str(tree_map_only(torch.Tensor, _shown, (args, kwargs)))
        if known not in self._known:
            self._known[known] = self._run(node.target, args, kwargs)
        return max(0, self._known[known] - result_bytes)

    def _run(self, operator: Any, args: Any, kwargs: Any) -> int:
        """Runs the body at the traced sizes, in a mode of its own, as what depends on data makes symbols in a mode."""
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode, torch.no_grad():
            args, kwargs = tree_map(fake_like, (args, kwargs))
            with LiveBytes(tree_leaves((args, kwargs))) as live:
                operator(*args, **kwargs)
        self._unknown.update(live.unknown)
        return live.peak


def _shown(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"
