"""Regional compilation: an inner backend compiles each distinct region of a graph once, however often it repeats.

    h = layer(x, w0)          f, g = inner(layer), inner(loss)
    h = layer(h, w1)    ->    h = f(x, w0)
    return loss(h)            h = f(h, w1)
                              return g(h)

A region is an autograd function of its own, as a block that is compiled by hand. So what it saves for the backward pass
is decided within it, and no kernel is fused over its border. It draws random numbers of its own in each call.
Source: PyTorch's tutorial on regional compilation, and torchtitan, which compile a model's blocks one by one, by hand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from fxrewrite.backends.dynamo import backend_name, find_backend, inner_compiler, normalized, refuse_precompile
from fxrewrite.backends.replayed_views import has_own_gradient, is_higher_order, replayed_views
from fxrewrite.capture.autocast import drop_regions, shield
from fxrewrite.graph.differentiable import differentiated
from fxrewrite.graph.fake_values import FakeValues
from fxrewrite.graph.repeats import Part, cut_repeats
from fxrewrite.graph.sizes import is_read_from_data, is_same_size
from fxrewrite.ops import held, memory_origins, mutates, value

Compiler = Callable[..., Any]


@dataclass(frozen=True)
class Regions:
    """What was compiled of a graph, and how often it is called; `str` is a sentence."""

    calls: tuple[int, ...]
    """Of each distinct region, how often it is called."""
    num_nodes: int
    """Nodes of the graph."""
    num_compiled: int
    """Nodes of the distinct regions."""
    left_out: tuple[str, ...] = ()
    """Why repeats are no regions, or several."""

    def __str__(self) -> str:
        said = "nothing repeats, the graph is compiled whole"
        if len(self.calls) > 1:
            repeated = ", ".join(f"{count} times" for count in self.calls if count > 1)
            said = (
                f"{len(self.calls)} regions are compiled for {sum(self.calls)} calls (one is called {repeated}): "
                f"{self.num_compiled:,} nodes of {self.num_nodes:,}"
            )
        return "; ".join([said, *self.left_out])


def regional(inner: str | Compiler = "inductor", on_report: Callable[[Regions], None] | None = None) -> Compiler:
    """Returns a backend for `torch.compile` that compiles equal regions of a graph once, by `inner`.

    Args:
        inner: a backend's name, or its function.
        on_report: called with the Regions of each graph, after it was compiled.

    Raises:
        FxRewriteError: no such backend.
    """
    find_backend(inner)

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        refuse_precompile()
        run, report = compile_regions(normalized(gm), example_inputs, inner_compiler(inner, **options))
        if on_report is not None:
            on_report(report)
        return run

    compile_graph.__qualname__ = f"regional({backend_name(inner)})"  # ranks compare the name
    return compile_graph


def compile_regions(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_inner: Compiler
) -> tuple[Callable[..., Any], Regions]:
    """Returns the graph compiled region by region, and what was compiled.

    Args:
        gm: a graph in normal form.
        example_inputs: fake values, as Dynamo passes them.
        compile_inner: `(gm, example_inputs) -> callable`.
    """
    drop_regions(gm.graph)  # what switches autocast off is around all of the graph; each region gets its own
    _find_strides(gm)
    cut = cut_repeats(gm)
    if len(cut.parts) < 2:
        shield(gm.graph)
        gm.recompile()
        num_nodes = sum(len(part.nodes) for part in cut.parts)
        return compile_inner(gm, list(example_inputs)), Regions((1,), num_nodes, num_nodes, tuple(cut.left_out))
    mode = detect_fake_mode(example_inputs) or FakeTensorMode()
    differentiated = _differentiated(gm, example_inputs)
    program, at, root = fx.Graph(), dict[fx.Node, fx.Node](), nn.Module()
    inputs = [_faked(found, mode) for found in example_inputs]
    given: dict[fx.Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in (*given, *gm.graph.find_nodes(op="get_attr")):
        attribute = None if node in given else held(gm, node)
        if not isinstance(attribute, fx.GraphModule):
            at[node] = program.node_copy(node)
        if isinstance(attribute, torch.Tensor):
            _hold(root, str(node.target), attribute)
            given[node] = _faked(attribute, mode)
    regions: dict[Hashable, _Region] = {}
    for part in cut.parts:
        examples = [
            given[node] if node in given else _example(value(node), mode, requires_grad=node in differentiated)
            for node in part.reads
        ]
        look = part.key, tuple(node in differentiated for node in part.reads), _shared_memory(part, examples)
        gives = _Given.of(part)
        if look not in regions:
            with tracing(TracingContext(mode)):  # AOTAutograd writes what it learns of a graph into this context
                run = compile_inner(_module_of(gm, part, gives), examples)
            regions[look] = _Region(f"region_{len(regions)}", run, part)
            root.add_module(regions[look].name, regions[look])
        regions[look].num_calls += 1
        call = program.call_module(regions[look].name, tuple(at[node] for node in part.reads))
        at.update((node, program.call_function(operator.getitem, (call, i))) for i, node in enumerate(gives.results))
        at.update((node, program.node_copy(node, at.__getitem__)) for node in gives.after)
    program.node_copy(gm.graph.output_node(), at.__getitem__)
    report = Regions(
        tuple(region.num_calls for region in regions.values()),
        sum(len(part.nodes) for part in cut.parts),
        sum(len(region.part.nodes) for region in regions.values()),
        tuple(cut.left_out),
    )
    return fx.GraphModule(root, program), report


def _find_strides(gm: fx.GraphModule) -> None:
    """Finds the strides that values have when the graph runs, which a region is compiled for.

    A graph that was lowered to local shapes has those of dense values, where a view of a chunk has others.
    """
    values = FakeValues(gm)
    if values.mode is None:
        return
    for node in gm.graph.nodes:
        known = value(node)
        if not isinstance(known, torch.Tensor) or mutates(node) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if any(map(is_read_from_data, known.shape)):
            continue  # another size at each run on fake values
        strides = values.compute(node).stride()
        if not all(map(is_same_size, strides, known.stride())):
            with values.mode:
                node.meta[values.key] = torch.empty_strided(
                    known.shape, strides, dtype=known.dtype, device=known.device
                )


class _Region(nn.Module):
    """A compiled part of a graph."""

    def __init__(self, name: str, run: Callable[..., Any], part: Part) -> None:
        super().__init__()
        self.name, self.part, self.num_calls, self._run = name, part, 0, run

    def forward(self, *values: Any) -> Any:
        return self._run(*values)


def _differentiated(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> set[fx.Node]:
    """The values that require gradients, and perhaps some that do not: an operator may have none."""
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))

    def requires(node: fx.Node) -> bool:
        value = given[node] if node in given else held(gm, node)
        return isinstance(value, torch.Tensor) and value.requires_grad

    nodes = list(gm.graph.nodes)
    if torch.is_grad_enabled():
        return differentiated(nodes, requires)
    return {node for node in nodes if node.op in ("placeholder", "get_attr") and requires(node)}


@dataclass(slots=True)
class _Given:
    """What a region gives of its part, so that no gradient is lost (`replayed_views`).

    Attributes:
        results: nodes of the part.
        copied: those of which it gives a copy.
        after: nodes of the part that the program itself runs, of the results.
    """

    results: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    copied: set[fx.Node] = field(default_factory=set[fx.Node])
    after: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])

    @staticmethod
    def of(part: Part) -> _Given:
        inside = set(part.nodes)
        replayed, given = set(replayed_views(part.gives, inside)), _Given()
        for node in part.gives:
            given._add(node, inside, is_replayed=node in replayed)
        return given

    def _add(self, node: fx.Node, inside: set[fx.Node], *, is_replayed: bool) -> None:
        if is_replayed and not any(map(is_higher_order, memory_origins(node) & inside)):
            for operand in node.all_input_nodes:
                self._add(operand, inside, is_replayed=operand in inside and has_own_gradient(operand, inside))
            self.after[node] = None
        elif node in inside:
            self.results[node] = None
            self.copied |= {node} if is_replayed else set()


def _module_of(gm: fx.GraphModule, part: Part, gives: _Given) -> fx.GraphModule:
    """A part as a module of its own, which runs without autocast as the graph does."""
    graph, at, root = fx.Graph(), dict[fx.Node, fx.Node](), nn.Module()
    for node in part.reads:
        at[node] = graph.placeholder(node.name)
        at[node].meta = dict(node.meta)
    for node in part.nodes:
        for operand in node.all_input_nodes:
            if operand not in at:  # the subgraph of a higher-order operator: other values are read
                at[operand] = graph.node_copy(operand)
                _hold(root, str(operand.target), held(gm, operand))
        if node.op == "call_module":
            _hold(root, str(node.target), gm.get_submodule(str(node.target)))
        at[node] = graph.node_copy(node, at.__getitem__)
    for node in gives.copied:
        at[node] = graph.call_function(torch.ops.aten.clone.default, (at[node],))
    graph.output(tuple(at[node] for node in gives.results))
    shield(graph)
    return fx.GraphModule(root, graph)


def _hold(root: nn.Module, path: str, held: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    setattr(root, name, held)


def _faked(found: Any, mode: FakeTensorMode) -> Any:
    """The fake value of an input, which Dynamo passes as it is, with the symbols that Dynamo has for its sizes."""
    if not isinstance(found, torch.Tensor) or isinstance(found, FakeTensor):
        return found
    context = TracingContext.try_get()
    sizes: Any = context.tensor_to_context.get(found) if context is not None else None
    if sizes is None:
        return mode.from_tensor(found, static_shapes=True)
    return mode.from_tensor(found, symbolic_context=sizes, source=sizes.tensor_source)


def _example(found: Any, mode: FakeTensorMode, *, requires_grad: bool) -> Any:
    """A value that a region returns, as an input of another one: in memory of its own, as nothing writes to it."""
    if not isinstance(found, torch.Tensor):
        return found
    with mode:
        made = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device)
    return made.requires_grad_(requires_grad)


def _shared_memory(part: Part, given: Sequence[Any]) -> Hashable:
    """Which inputs share memory and where in it they are, for a region that writes to some.

    AOTAutograd passes overlapping inputs as one memory, and compiles their places in it as constants.
    """
    if not any(map(mutates, part.nodes)):
        return None
    sharing: dict[Any, list[int]] = {}
    for i, found in enumerate(given):
        if isinstance(found, torch.Tensor):
            sharing.setdefault(StorageWeakRef(found.untyped_storage()).cdata, []).append(i)
    return tuple(
        (i, str(given[i].storage_offset()), str(given[i].untyped_storage().nbytes()), together[0])
        for together in sharing.values()
        if len(together) > 1
        for i in together
    )
