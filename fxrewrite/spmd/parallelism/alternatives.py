"""Which of a plan's alternatives are taken: those with which the lowered program costs a rank least.

    plan = choose_alternatives(plan, model, {"x": x}, {"tp": 4})     before parameters are in shards
    print(plan)                                                      what was chosen, and what the others would cost

Every combination is tried: a copy of the graph is lowered by the plan without alternatives, and `program_price` reads
what it sends and computes. So what is priced is what runs, whatever propagation makes of it, over all axes. What the
plan refuses is impossible, for the reason that it gives; what is stated wrong is an error as ever. Expectations hold of
the ways that are chosen, and are not looked at before.

Complexity: with C combinations, C times the lowering of the graph, for C up to `_MOST`. Where there are more, each
choice is made in turn with the others as they are, beginning with the first way of each, until none changes: as many
times as there are ways, for each round. A plan without alternatives is returned as it is.
The choice follows from the graph, the sizes at hand and the plan, so it is equal on ranks that share these, and in
every later run. Of symbolic lengths the sizes at hand are hints: two programs that were compiled for different ones may
differ in what they chose, unless it was chosen before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fxrewrite.backends import normalized
from fxrewrite.errors import (
    FixpointError,
    FxRewriteError,
    InvariantError,
    MatchExpectationError,
    RuleDefinitionError,
    did_you_mean,
    first_line,
)
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.modules import matches_glob, module_names
from fxrewrite.ops import is_parameter, tensors_of
from fxrewrite.report import bytes_text
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.parallelism.captured import captured_call
from fxrewrite.spmd.parallelism.parallelism import Alternatives, AnyPlan, Parallelism, Parallelisms, check_axes
from fxrewrite.spmd.placement import Axis, MisstatedError
from fxrewrite.spmd.price.choice import Chosen, choose
from fxrewrite.spmd.price.price import Price
from fxrewrite.spmd.price.program_price import program_price
from fxrewrite.spmd.propagation.sites import Placed, Site

Contexts: TypeAlias = "Callable[[], Mapping[str, SpmdContext]]"
"""Makes what a plan is applied with: a context for each axis, by its name."""
_MOST = 32
"""Most combinations that are all tried. Each is a lowering of the graph: seconds, for a model of some layers."""
_MISTAKES = (MisstatedError, RuleDefinitionError, InvariantError, FixpointError, MatchExpectationError)
"""Errors that say that something is wrong, and not that it is impossible at these sizes."""


def choose_alternatives(
    plan: AnyPlan, model: nn.Module, inputs: Mapping[str, Any], mesh: Mapping[str, int] | DeviceMesh
) -> AnyPlan:
    """The plan without alternatives, in which those are stated that cost least for `model(**inputs)`.

    Call it on every rank with inputs of one shape, before `shard_parameters`, and pass the result on from there: what
    ranks hold is chosen once. The model is captured as one graph, and not run; no process group is needed.

    Args:
        plan: the parallelism, or several.
        model: as it is before `shard_parameters`.
        inputs: arguments of a typical call, for one device; of lengths and batches, this one decides.
        mesh: axes with their numbers of ranks, the outermost first, such as `{"dp": 2, "tp": 2}`, or the mesh.

    Raises:
        FxRewriteError: every way of some alternatives is impossible; says why, of each. The plan does not fit the
            model, or an axis of the plan has no size.
    """
    check_axes(plan, mesh)
    if isinstance(mesh, DeviceMesh):
        mesh = {name: mesh.size(i) for i, name in enumerate(mesh.mesh_dim_names or ())}
    if not any(member.alternatives for member in plan.members):
        return plan
    program = normalized(captured_call(model, inputs, plan, mesh).program)
    axes = {name: SpmdContext(Axis(name, size, name)) for name, size in mesh.items()}  # nothing runs: a name is a group
    return chosen_for(plan, program, lambda: axes)


def chosen_for(plan: AnyPlan, program: fx.GraphModule, contexts: Contexts) -> AnyPlan:
    """The plan without alternatives, in which those are stated that cost least for a graph in normal form.

    Args:
        plan: the parallelism, or several; one without alternatives is returned as it is.
        program: before it is lowered; it stays as it is.
        contexts: called for each combination that is tried.

    Raises:
        FxRewriteError: as `choose_alternatives`.
    """
    if not any(member.alternatives for member in plan.members):
        return plan
    is_part = any(context.is_part for context in contexts().values())
    sites = [
        site
        for position, member in enumerate(plan.members)
        for one in member.alternatives
        for site in _sites(position, member, one, program, is_part=is_part)
    ]
    search = _Search(plan, sites, program, contexts)
    found = search.best()
    chosen = [search.chosen(found, i) for i in range(len(sites))]
    return _stated(plan, sites, found, chosen)


def require_chosen(plan: AnyPlan) -> None:
    """Raise FxRewriteError where alternatives differ in what ranks hold or are called with.

    These are chosen before a program is compiled, since every program must find the same.
    """
    for member in plan.members:
        held = next((one for one in member.alternatives if one.is_held), None)
        if held is not None:
            raise FxRewriteError(
                f"{member.name}: the ways of alternatives {held.name!r} differ in how ranks hold parameters or inputs, "
                "which is decided before the model is sharded: plan = choose_alternatives(plan, model, inputs, mesh), "
                "and pass that plan to shard_parameters and spmd"
            )


@dataclass(frozen=True, slots=True)
class _Choice:
    """One choice to be made: between the ways of alternatives, for all modules in `of`, or for the whole model."""

    member: int
    alternatives: Alternatives
    of: tuple[str, ...] = ()

    def way(self, name: str) -> Mapping[Site, Placed] | Parallelism:
        """What is stated by a way."""
        way = self.alternatives.ways[name]
        if not self.of or isinstance(way, Parallelism):
            return way
        return {_inside(module, site): placed for module in self.of for site, placed in way.items()}

    def __str__(self) -> str:
        first, *more = self.of or ("",)
        return f"{self.alternatives.name}{f' of {first}' * bool(first)}{f' and {len(more)} like it' * bool(more)}"


def _inside(module: str, site: Site) -> Site:
    """The site whose globs are over names inside of the module."""
    return replace(site, glob=f"{module}.{site.glob}", but=site.but and f"{module}.{site.but}")


def _sites(
    position: int, member: Parallelism, one: Alternatives, program: fx.GraphModule, *, is_part: bool
) -> Iterator[_Choice]:
    """The choices that alternatives ask for: one, or one for each kind of module that they are stated of."""
    if not one.each:
        yield _Choice(position, one)
        return
    shapes = _shapes(program)
    named = [name for name in shapes if matches_glob(name, one.each)]
    outermost = [name for name in named if not any(name.startswith(f"{other}.") for other in named)]
    if not outermost and not is_part:
        near = did_you_mean(one.each, shapes)
        raise MisstatedError(f"{member.name}: alternatives {one.name!r}: no module of the graph is {one.each!r}{near}")
    equal: dict[tuple[object, ...], list[str]] = {}
    for name in outermost:
        equal.setdefault(tuple(shapes[name]), []).append(name)
    yield from (_Choice(position, one, tuple(names)) for names in equal.values())


def _shapes(program: fx.GraphModule) -> dict[str, list[object]]:
    """Of each module, what it reads of parameters and computes: the shapes, in order."""
    found: dict[str, list[object]] = {}
    for node in program.graph.nodes:
        shapes = [(tuple(map(str, value.shape)), value.dtype) for value in tensors_of(node)]
        if node.op == "placeholder" and is_parameter(node):
            parts = input_name(node).split(".")
            for i in range(1, len(parts)):
                found.setdefault(".".join(parts[:i]), []).append((".".join(parts[i:]), *shapes))
        elif node.op == "call_function":
            for name in filter(None, module_names(node)):
                found.setdefault(name, []).append((str(node.target), *shapes))
    return found


def _stated(plan: AnyPlan, choices: Sequence[_Choice], taken: Sequence[str], chosen: Sequence[Chosen] = ()) -> AnyPlan:
    """The plan in which each choice is made as `taken` says."""
    members = list(plan.members)
    for i, (choice, name) in enumerate(zip(choices, taken, strict=True)):
        one = members[choice.member].with_way(choice.way(name))
        members[choice.member] = replace(one, chosen=(*one.chosen, *chosen[i : i + 1]))
    members = [replace(member, alternatives=()) for member in members]
    return members[0] if isinstance(plan, Parallelism) else Parallelisms(tuple(members))


class _Search:
    def __init__(self, plan: AnyPlan, choices: Sequence[_Choice], program: fx.GraphModule, contexts: Contexts) -> None:
        self.plan, self.choices, self.program, self.contexts = plan, choices, program, contexts
        self._ways = [list(choice.alternatives.ways) for choice in choices]
        self._found: dict[tuple[str, ...], Price | str] = {}

    def best(self) -> tuple[str, ...]:
        """The ways that are taken, by choice.

        Raises:
            FxRewriteError: no combination that was tried is possible.
        """
        if math.prod(map(len, self._ways)) <= _MOST:
            for taken in itertools.product(*self._ways):
                self._price(taken)
            return self._least()
        taken, before = tuple(ways[0] for ways in self._ways), None
        while taken != before:
            before = taken
            for i in range(len(self.choices)):
                for changed in self._changed(taken, i).values():
                    self._price(changed)
                taken = min(self._changed(taken, i).values(), key=self._total)
        if isinstance(self._price(taken), str):
            return self._least()
        return taken

    def chosen(self, taken: tuple[str, ...], i: int) -> Chosen:
        """What is said of a choice: what each of its ways costs, the other choices made as they are."""
        return choose(str(self.choices[i]), {way: self._price(at) for way, at in self._changed(taken, i).items()})

    def _least(self) -> tuple[str, ...]:
        of = " and ".join(map(str, self.choices))
        names = {", ".join(taken): taken for taken in self._found}
        return names[choose(of, {name: self._found[taken] for name, taken in names.items()}).way]

    def _changed(self, taken: tuple[str, ...], i: int) -> dict[str, tuple[str, ...]]:
        return {way: (*taken[:i], way, *taken[i + 1 :]) for way in self._ways[i]}

    def _total(self, taken: tuple[str, ...]) -> float:
        found = self._price(taken)
        return found.total if isinstance(found, Price) else math.inf

    def _price(self, taken: tuple[str, ...]) -> Price | str:
        if taken not in self._found:
            self._found[taken] = self._priced(taken)
        return self._found[taken]

    def _priced(self, taken: tuple[str, ...]) -> Price | str:
        """The price of the program that is lowered so, or why the plan refuses it."""
        stated = _stated(self.plan, self.choices, taken)
        members = tuple(replace(member, expect=()) for member in stated.members)
        contexts = self.contexts()
        program = copy_module(self.program)
        try:
            Parallelisms(members).plan().apply(program, context=contexts)
        except _MISTAKES:
            raise
        except FxRewriteError as error:
            return first_line(error)
        price = program_price(program, {name: context.axis.size for name, context in contexts.items()})
        limits = [c.alternatives.most_held for c in self.choices if c.alternatives.most_held is not None]
        if limits and price.held > min(limits):
            return (
                f"a rank would hold {bytes_text(price.held)} of parameters, and {bytes_text(min(limits))} are allowed"
            )
        return price
