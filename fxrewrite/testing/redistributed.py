"""Where rules over redistributions are tested: on simulated ranks, each with its part of the sample's inputs.

On one device a redistribution is the identity, so a rule that forgets a sum would look true there. Here every sample
gets placements of its inputs with which all its redistributions start from what their operands are:

    start(x, placement, axis)        an input, whole outside of the graph; from here on it is placed so
    finish(x, placement, axis)       an output, whole outside of the graph; up to here it is placed so

The rule is applied between the two, where a plan applies it: after placements are known, before shapes are local. Then
both graphs are lowered with the layout rules of all installed packages, which refuse what is placed wrongly, and run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxrewrite.errors import FxRewriteError, RefusedError, refuse
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.edit import Edit
from fxrewrite.ops import emit_aten, is_inexact, is_per_rank, key
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import Capture, Op, subterms
from fxrewrite.plan import RuleSet
from fxrewrite.plan.dead_code import DeadCode
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.group import COLLECTIVES, axis_of
from fxrewrite.spmd.layouts.registered import joined_layouts
from fxrewrite.spmd.layouts.rule import LayoutRules
from fxrewrite.spmd.lower.collectives import COLLECTIVE_RULES
from fxrewrite.spmd.lower.localize import LocalizeShapes
from fxrewrite.spmd.placement import Axis, Partial, Placement, Replicate, Shard, is_same_placement
from fxrewrite.spmd.propagation.decision import Decision, operands_of, replicated
from fxrewrite.spmd.propagation.infer import inferred
from fxrewrite.spmd.propagation.legal import DECIDED
from fxrewrite.spmd.properties import PLACEMENTS
from fxrewrite.spmd.redistribute import redistribute
from fxrewrite.spmd.virtual import declare_virtual
from fxrewrite.testing.fake_mesh import fake_mesh
from fxrewrite.testing.ranks import run_on_ranks
from fxrewrite.verify.build import NoSampleError
from fxrewrite.verify.draw import Draw, Sampler

_AXIS = "ranks"
_MOST_TRIED = 400
"""Of placements of the inputs for one sample; five tensors of two dimensions have 1,024."""
_MOST_DRAWN = 50
"""Of placements that redistributions state, until the constraints that read only these hold."""


@declare_virtual(lambda args, _: args[1])
def start(x: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    """An input, which is placed as `placement` from here on."""
    return x


@declare_virtual(lambda *_: Replicate())
def finish(x: torch.Tensor, placement: Placement, axis: Axis) -> torch.Tensor:
    """An output, which is placed as `placement` up to here."""
    return x


class OnRanks:
    """Runs graphs with redistributions on simulated ranks.

    Attributes:
        sizes: of dimensions that ranks divide.
        program: runs the program of a counterexample.
    """

    sizes = (2, 4, 12)
    program = "fxrewrite.testing.redistributed:on_ranks"

    def __init__(self, pattern: Pattern) -> None:
        self._layouts = joined_layouts(())
        terms = [term for output in pattern.outputs for term in subterms(output) if isinstance(term, Op)]
        self._constraints = pattern.where
        moved = [dict(term.args) for term in terms if term.key == key(redistribute)]
        self._placements = _names(moved, "src", "dst")
        self._axes = _names(moved, "axis")
        self._lowered: WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = WeakKeyDictionary()

    def sampler(self, other: Sampler | None) -> Sampler:
        """Draws what redistributions say; `other` draws the rest."""

        def draw_all(draw: Draw) -> dict[str, Any]:
            given: dict[str, Any] = dict.fromkeys(self._axes, Axis(_AXIS, draw.choice(2, 2, 4)))
            for _ in range(_MOST_DRAWN):
                given |= {name: _drawn(draw) for name in self._placements}
                if not any(c.why_not(given) for c in self._constraints if given.keys() >= set(c.names)):
                    break
            return {**given, **(other(draw) if other is not None else {})}

        return draw_all

    def prepare(self, gm: fx.GraphModule) -> None:
        """Write into the graph how its inputs and outputs are placed.

        Raises:
            NoSampleError: with no placements of the inputs can its redistributions start from what they say.
        """
        graph = gm.graph
        axis = _axis(graph)
        with Edit(gm) as edit:
            placed = self._placed(edit, axis)
            inputs = [node for node in graph.find_nodes(op="placeholder") if node in placed]
            output = graph.output_node()
            outputs = {operand: placed[operand] for operand in operands_of(output)}
        for node in reversed(inputs):
            with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
                _mark(node, start, placed[node], axis, lambda user: user.target is not start)
        for operand, placement in outputs.items():
            with graph.inserting_before(output):
                _mark(operand, finish, placement, axis, lambda user: user is output)
        gm.recompile()
        try:
            self._lowered[gm] = _local(gm, self._layouts)
        except ValueError as error:
            raise NoSampleError(str(error)) from error

    def why_not(self, gm: fx.GraphModule) -> str:
        """Whether the rule lowers: it made what ranks tell each other, of values that are whole here."""
        lowered = next(
            (node for node in gm.graph.nodes if is_per_rank(node.target) or node.target in COLLECTIVES.values()), None
        )
        if lowered is None:
            return ""
        return (
            f"its result has {key(lowered)}, so it is for graphs whose shapes are local; "
            "lower a graph with it and without it, and compare by fxrewrite.testing.run_on_ranks"
        )

    def _placed(self, edit: Edit, axis: Axis) -> dict[fx.Node, Placement]:
        """The placement of every value, by placements of the inputs with which redistributions are as they say."""
        nodes = edit.nodes()
        inputs = [node for node in nodes if node.op == "placeholder" and _is_tensor(node)]
        choices = [_choices(_value(node), axis.size) for node in inputs]
        tried = list(itertools.islice(itertools.product(*choices), 16 * _MOST_TRIED))
        random.Random(len(tried)).shuffle(tried)
        problem = "it has no redistribution"
        for placements in tried[:_MOST_TRIED]:
            for node, placement in zip(inputs, placements, strict=True):
                edit.set_fact(node, PLACEMENT, placement)
            try:
                _infer(edit, self._layouts)
                for node in edit.graph.find_nodes(op="call_function", target=redistribute):
                    if is_same_placement(node.args[1], node.args[2]):
                        refuse(f"%{node.name} moves nothing")
                return {node: _one(PLACEMENT.of(node)) for node in nodes if _is_tensor(node)}
            except RefusedError as error:
                problem = str(error)
        raise NoSampleError(f"no placements of the inputs fit: {problem}")

    def run(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """The outputs, whole, and how many of other ranks differ from the first rank's."""
        program = self._lowered.get(gm)
        if program is None:
            program = self._lowered[gm] = _local(gm, self._layouts)
        return list(_Run.apply(program, _axis(gm.graph).size, *inputs))


def on_ranks(function: Callable[..., Sequence[Any]], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """What the program of a counterexample gives on simulated ranks, as `OnRanks.run` gives it."""
    graph = _Tracer().trace(function)
    gm = fx.GraphModule({}, graph)
    FakeTensorProp(gm).propagate(*(value.detach() for value in inputs))
    return list(_Run.apply(_local(gm, joined_layouts(())), _axis(gm.graph).size, *inputs))


def _local(gm: fx.GraphModule, layouts: LayoutRules) -> fx.GraphModule:
    """The program of a rank.

    Raises:
        ValueError: a value is placed otherwise than its user needs, or nothing lowers a redistribution.
    """
    local = copy_module(gm)
    _write_overloads(local)
    graph = local.graph
    size = _axis(graph).size
    with fake_mesh((size,), (_AXIS,)) as mesh:
        axis = axis_of(mesh, _AXIS)
        for node in graph.find_nodes(op="call_function", target=start):
            node.target, node.args = redistribute, (node.args[0], Replicate(), node.args[1], axis)
        for node in graph.find_nodes(op="call_function", target=finish):
            node.target, node.args = redistribute, (node.args[0], node.args[1], Replicate(), axis)
        for node in graph.find_nodes(op="call_function", target=redistribute):
            node.args = (*node.args[:3], axis)
        plan = RuleSet(
            "on_ranks",
            _Infer(layouts),
            LocalizeShapes("shapes", layouts),
            COLLECTIVE_RULES,
            DeadCode("unused"),
        )
        try:
            plan.apply(local, context=SpmdContext(axis, gradients="mean"))
        except FxRewriteError as error:
            raise ValueError(str(error)) from error
    return local


def _write_overloads(gm: fx.GraphModule) -> None:
    """Afterwards calls of torch's functions and methods are overloads, as a plan has them where placements are known.

    A sample that is a redistribution alone does not tell a replacement to make overloads.
    """
    with Edit(gm) as edit:
        for node in edit.nodes():
            if node.op == "call_method" or (node.op == "call_function" and not isinstance(node.target, OpOverload)):

                def emit(target: Any, args: tuple[Any, ...], kwargs: Any, node: fx.Node = node) -> fx.Node:
                    same = (target, args, dict(kwargs)) == (node.target, node.args, node.kwargs)
                    return node if same else edit.call(target, args, kwargs, before=node, like=node)

                made = emit_aten(node.target, node.args, node.kwargs, emit)
                if made is not node:
                    edit.replace_uses(node, made)
                    edit.erase(node)


class _Tracer(fx.Tracer):
    """Leaves placements and axes as they are, which FX would write as calls of their classes."""

    def create_arg(self, a: Any) -> Any:
        return a if isinstance(a, (Axis, Replicate, Shard, Partial)) else super().create_arg(a)


class _Infer:
    """The step that places every value as its operands are placed; nothing is redistributed for that."""

    name = "infer_placements"
    gives = (PLACEMENTS,)

    def __init__(self, layouts: LayoutRules) -> None:
        self._layouts = layouts

    def run(self, edit: Edit, context: object, report: Report) -> int:
        for node in edit.nodes():
            if node.op == "placeholder" and _is_tensor(node):
                edit.set_fact(node, PLACEMENT, Replicate())
        _infer(edit, self._layouts)
        output = edit.graph.output_node()
        decision: Decision = replicated(len(operands_of(output)), 0)
        edit.set_fact(output, DECIDED, decision)
        return 0

    def text(self) -> str:
        return "every value as its operands are placed"


def _infer(edit: Edit, layouts: LayoutRules) -> None:
    """Place every value as its operands are placed.

    Raises:
        RefusedError: an operator cannot run so, or a redistribution does not start from what its operand is.
    """
    for node in edit.nodes():
        if node.op != "call_function" or not operands_of(node):
            continue
        if node.target is redistribute:
            have, stated = PLACEMENT.of(operands_of(node)[0]), node.args[1]
            if not isinstance(stated, (Shard, Partial, Replicate)) or not is_same_placement(_one(have), stated):
                refuse(f"%{node.name} starts from {stated}, and its operand is {have}")
            _check_fits(node, node.args[2])
        placement = inferred(node, layouts)
        if placement is None:
            refuse(f"nothing says how ranks hold %{node.name}")
        edit.set_fact(node, PLACEMENT, placement)


def _check_fits(node: fx.Node, placement: Any) -> None:
    axis: Any = node.args[3]
    if placement not in _choices(_value(node), axis.size):
        refuse(f"%{node.name}: {placement} over {axis.size} ranks does not fit {list(_value(node).shape)}")


def _choices(value: torch.Tensor, num_ranks: int) -> list[Placement]:
    """Every placement that a value of this shape can have."""
    found: list[Placement] = [Shard(dim) for dim, size in enumerate(value.shape) if size and size % num_ranks == 0]
    return [*found, *([Partial()] if is_inexact(value) else []), Replicate()]


def _drawn(draw: Draw) -> Placement:
    return draw.choice(Replicate(), Partial(), Shard(0), Shard(1))


def _names(moved: Sequence[dict[str, Any]], *arguments: str) -> list[str]:
    parts = [args[name] for args in moved for name in arguments if name in args]
    return list(dict.fromkeys(part.name for part in parts if isinstance(part, Capture)))


def _mark(node: fx.Node, target: Any, placement: Placement, axis: Axis, moves: Callable[[fx.Node], bool]) -> None:
    args: tuple[Any, ...] = (node, placement, axis)
    marked = node.graph.call_function(target, args)
    marked.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(marked, lambda user: user is not marked and moves(user))


def _axis(graph: fx.Graph) -> Axis:
    axes = {arg for node in graph.nodes for arg in node.args if isinstance(arg, Axis)}
    if len(axes) != 1:
        raise NoSampleError(f"its redistributions are over {len(axes)} axes")
    return axes.pop()


class _Run(torch.autograd.Function):
    """A local program on simulated ranks, and its adjoint by the program's own backward pass.

    Gives the first rank's outputs, and whether another rank has others.
    """

    @staticmethod
    def forward(ctx: Any, program: fx.GraphModule, num_ranks: int, *inputs: torch.Tensor) -> Any:
        ctx.program, ctx.num_ranks = program, num_ranks
        ctx.save_for_backward(*inputs)
        with fake_mesh((num_ranks,), (_AXIS,)):
            results = run_on_ranks(program, [x.detach() for x in inputs], num_ranks).outputs
        differ = sum(
            not torch.allclose(found, first, rtol=0, atol=0, equal_nan=True)
            for others in results[1:]
            for found, first in zip(others, results[0], strict=True)
        )
        found = (*(value.clone() for value in results[0]), torch.tensor(differ))
        ctx.mark_non_differentiable(*(value for value in found if not value.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(ctx.saved_tensors, needed, strict=True)]
        *of_outputs, _ = (grad if grad.is_floating_point() else None for grad in grads)
        with fake_mesh((ctx.num_ranks,), (_AXIS,)), torch.enable_grad():
            found = run_on_ranks(ctx.program, inputs, ctx.num_ranks, backward=of_outputs).gradients()
        zeros = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True))
        return None, None, *(grad if needs else None for grad, needs in zip(zeros, needed, strict=True))


def _value(node: fx.Node) -> torch.Tensor:
    return node.meta["val"]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _one(placement: Any) -> Placement:
    """The placement of a value that is one tensor."""
    if not isinstance(placement, (Shard, Partial, Replicate)):
        refuse(f"a value is {placement}")
    return placement
