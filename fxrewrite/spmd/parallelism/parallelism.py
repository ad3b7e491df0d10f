"""A parallelism as data: what is stated of a model over one mesh axis. Everything else follows from it.

    TENSOR = Parallelism(
        "tensor",
        axis="tp",
        place={param("*.{q,k,v}_proj.weight"): Shard(0), param("*.o_proj.weight"): Shard(1)},
        expect=[sends(within="*.layers.*", all_reduce=2)],
    )
    step = torch.compile(shard_parameters(model, DATA | TENSOR, mesh), backend=spmd(DATA | TENSOR, mesh=mesh))

Canonical forms, propagation, gradients, lowering and the check that the result is legal are implied; `print(plan)` is
the page. `a | b` is a plan over both axes: b is applied first, and a to what the ranks of b's axis compute together, so
axes are written in the order of the mesh, from the outermost to the innermost.

`alternatives` are ways to state a part of it, of which `fxrewrite.spmd.parallelism.alternatives` chooses by price.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from torch.distributed.device_mesh import DeviceMesh

from fxrewrite.errors import FxRewriteError, did_you_mean
from fxrewrite.graph.edit import Edit
from fxrewrite.plan import Plan, RuleSet, Step
from fxrewrite.plan.contracts import Property
from fxrewrite.plan.members import Member
from fxrewrite.registry import registered
from fxrewrite.report import Report, bytes_text
from fxrewrite.rule import Rule
from fxrewrite.spmd.layouts.registered import joined_layouts
from fxrewrite.spmd.layouts.rule import LayoutRule, LayoutRules
from fxrewrite.spmd.lower.collectives import COLLECTIVE_RULES
from fxrewrite.spmd.lower.localize import LocalizeShapes
from fxrewrite.spmd.lower.means import REDUCTIONS
from fxrewrite.spmd.operators.draws import RefuseShardedDraws
from fxrewrite.spmd.parallelism.expect import Fires, Sends
from fxrewrite.spmd.parallelism.schedule import SCHEDULE
from fxrewrite.spmd.placement import Replicate, as_placement, check_num_ranks
from fxrewrite.spmd.price.choice import Chosen
from fxrewrite.spmd.propagation.decompose import DecomposeUnknown
from fxrewrite.spmd.propagation.place import Place
from fxrewrite.spmd.propagation.propagate import PropagatePlacements
from fxrewrite.spmd.propagation.sites import Placed, Site, Stored
from fxrewrite.spmd.properties import COLLECTIVE_CALLS, PLACEMENTS

Data: TypeAlias = Literal["shared", "own"]
"""What the ranks of an axis are called with: the same values, or values of their own."""
CANONICAL = ("normal_forms", "flex_attention", "flash_attention", "losses", "attention", "convolutions")
"""The registered rule sets that bring a graph into the forms that layout rules know."""
LOWERED = ("convolutions_on_ranks",)
"""Those after which it has none of the operators that these forms have and torch has not."""
DRAWS = ("random",)
"""Registered rule sets after which random numbers are drawn for whole values, as on one device."""


@dataclass(frozen=True)
class Alternatives:
    """Several ways to state a part of a parallelism, of which the cheapest that is possible is chosen.

        Alternatives("head", {"rows": {param("lm_head.weight"): Shard(0)}, "whole": {}})

    Attributes:
        name: of what there are several ways for.
        ways: by name, the one to prefer among equals first: what is stated besides the rest of the parallelism. That is
            placements, or a `Parallelism` over the same axis, with rules, layouts or a method of its own.
        each: a glob over modules. Each outermost one that matches is decided on alone, but that those with equal shapes
            are decided on together; globs of the ways are then over names inside of the module. By default the whole
            model is decided on at once.
        most_held: the most bytes of parameters that a rank may hold, of all parameters of the program. What exceeds it
            is impossible. By default there is no limit.

    Raises:
        FxRewriteError: there are not two different ways, or a way has no placements of its own.
    """

    name: str
    ways: Mapping[str, Mapping[Site, Placed] | Parallelism]
    _: KW_ONLY
    each: str = ""
    most_held: int | None = None

    def __post_init__(self) -> None:
        of = f"alternatives {self.name!r}"
        if len(self.ways) < 2:
            raise FxRewriteError(f"{of} has {len(self.ways)} of the two or more ways to choose from; state it in place")
        named = list(self.ways.items())
        for i, (name, way) in enumerate(named):
            if not isinstance(way, (Mapping, Parallelism)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise FxRewriteError(f"{of}: {name} is placements by site, or a Parallelism, and not {way!r}")
            if isinstance(way, Parallelism) and (self.each or way.alternatives):
                why = "each module has placements alone" if self.each else "a way has no alternatives of its own"
                raise FxRewriteError(f"{of}: {name} is a Parallelism, and {why}; state its placements")
            same = next((other for other, before in named[:i] if before == way), None)
            if same is not None:
                raise FxRewriteError(f"{of}: {same} and {name} state the same; drop one of them")
            outside = [site for site in _placed(way) if self.each and site.kind in ("inputs", "outputs")]
            if outside:
                raise FxRewriteError(f"{of}: {name} states {outside[0]}, which no module that {self.each!r} names has")

    @property
    def is_held(self) -> bool:
        """Whether the ways differ in what a rank holds of parameters, or is called with."""
        sites = [{s: placed for s, placed in _placed(way).items() if s.kind in _HELD} for way in self.ways.values()]
        return any(of_way != sites[0] for of_way in sites)

    def __str__(self) -> str:
        said = (
            f"{name}: {way.name if isinstance(way, Parallelism) else _said(way)}" for name, way in self.ways.items()
        )
        each = f" of each {self.each}" if self.each else ""
        limit = "" if self.most_held is None else f", with {bytes_text(self.most_held)} of parameters at most"
        return f"alternatives {self.name}{each}, by price{limit}: {'; '.join(said)}"


_HELD = ("param", "inputs")
"""Kinds of sites whose placement is that of what a rank holds or is called with."""


def _placed(way: Mapping[Site, Placed] | Parallelism) -> Mapping[Site, Placed]:
    return way.place if isinstance(way, Parallelism) else way


def _said(place: Mapping[Site, Placed]) -> str:
    return ", ".join(f"{site} {placed}" for site, placed in place.items()) or "nothing stated"


class _SayChosen:
    """The step that tells the report which alternatives were chosen."""

    def __init__(self, name: str, chosen: Sequence[Chosen]) -> None:
        self.name, self._chosen = name, chosen

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        report.events.extend(self._chosen)
        return 0

    def text(self) -> str:
        return "\n".join(map(str, self._chosen))


@dataclass(frozen=True)
class Parallelism:
    """What is stated of a model over one axis of a mesh.

    Attributes:
        name: of the parallelism.
        axis: of the mesh.
        place: how ranks hold parameters, inputs, outputs, and what modules read and compute; the rest follows. A glob
            that matches nothing, and a placement that does not fit, are errors.
        rules: rewrites of the global program, before placements are propagated.
        placed: rewrites of the global program whose placements are known.
        lowered: rewrites of the rank's program.
        layouts: layout rules beside those that packages register.
        data: "shared", where all ranks of the axis are called with the same values and return the same; or "own",
            where each has its own part of a batch: the objective is the mean of the ranks' losses. Parameters are
            then whole, or `Stored`, or in shards that an operator of `layouts` sends values to (`sends_own`); where
            anything else reads such shards, they are gathered.
        expect: what must hold of the lowered program, such as `sends(within="*.layers.*", all_reduce=2)`, and which of
            its rules must fire, `fires("my.rule")`.
        method: a rule set that lowers a program over the axis, in place of the one that is made of `rules`, `placed`,
            `lowered` and `layouts`; what is stated in `place` comes before it.
        alternatives: what there are several ways for; `simulate` and `spmd` choose by price, and
            `choose_alternatives` before parameters are in shards.
        chosen: the ways that were chosen, for the report. `choose_alternatives` writes it.
    """

    name: str
    _: KW_ONLY
    axis: str
    place: Mapping[Site, Placed] = field(default_factory=dict[Site, Placed])
    rules: Sequence[Member] = ()
    placed: Sequence[Member] = ()
    lowered: Sequence[Member] = ()
    layouts: Sequence[LayoutRule] | LayoutRules = ()
    data: Data = "shared"
    expect: Sequence[Sends | Fires] = ()
    method: RuleSet | None = None
    alternatives: Sequence[Alternatives] = ()
    chosen: Sequence[Chosen] = ()

    def __post_init__(self) -> None:
        for field_name, text in (("name", self.name), ("axis", self.axis)):
            if not isinstance(text, str) or not text:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise FxRewriteError(f"a parallelism has a name and the name of its axis, not {field_name}={text!r}")
        if self.data not in get_args(Data):
            raise FxRewriteError(f"{self.name}: data={self.data!r} is not one of {get_args(Data)}")
        if isinstance(self.layouts, LayoutRules):
            object.__setattr__(self, "layouts", self.layouts.rules)
        kinds = {
            "rules": (Rule, RuleSet, Step),
            "placed": (Rule, RuleSet, Step),
            "lowered": (Rule, RuleSet, Step),
            "layouts": LayoutRule,
            "expect": (Sends, Fires),
            "alternatives": Alternatives,
        }
        for field_name, kind in kinds.items():
            given = getattr(self, field_name)
            wrong = [one for one in given if not isinstance(one, kind)] if isinstance(given, Sequence) else [given]
            if wrong:
                expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
                raise FxRewriteError(f"{self.name}: {field_name} is a list of {expected}, and has {wrong[0]!r}")
        if not isinstance(self.method, RuleSet | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FxRewriteError(f"{self.name}: method is a RuleSet, and not {self.method!r}")
        if not isinstance(self.place, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise FxRewriteError(
                f"{self.name}: place maps sites to placements, {{param(...): Shard(0)}}, not {self.place!r}"
            )
        for site, placed in self.place.items():
            if not isinstance(site, Site):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise FxRewriteError(f"{self.name}: {site!r} names no site; write param({site!r}), for parameters")
            is_whole = as_placement(placed) == Replicate()
            is_sent_for = any(rule.sends_own for rule in self.layouts)
            is_held = is_whole or isinstance(placed, Stored) or is_sent_for
            if self.data == "own" and not (site.kind == "param" and is_held):
                raise FxRewriteError(
                    f"{self.name}: {site} as {placed}: ranks of axis {self.axis} have values of their own "
                    "(data='own'), so only parameters are equal on them; hold one as Stored(Shard(dim)), which is "
                    "gathered before use"
                )
        self._check_alternatives()
        self._check_fires()
        # What is changed later in the caller's dictionary or lists is not stated here: every use of a plan is the same.
        object.__setattr__(self, "place", dict(self.place))
        for field_name in kinds:
            object.__setattr__(self, field_name, tuple(getattr(self, field_name)))

    def _check_fires(self) -> None:
        """Raise FxRewriteError where a rule must fire that the parallelism does not have."""
        known = [rule.id for members in self._slots().values() for rule in _rules_of(members)]
        for stated in self.expect:
            if isinstance(stated, Fires) and stated.rule not in known:
                near = did_you_mean(stated.rule, known) or f"; its rules are {', '.join(known) or 'none'}"
                raise FxRewriteError(
                    f"{self.name}: {stated.rule!r} is to fire, and none of rules=, placed=, lowered= or method= has it"
                    f"{near}"
                )

    def _slots(self) -> dict[str, Sequence[Member]]:
        """What holds its rules, by the name of the field."""
        fields: dict[str, Sequence[Member]] = {name: getattr(self, name) for name in ("rules", "placed", "lowered")}
        return {**fields, "method": () if self.method is None else (self.method,)}

    def _slot(self, name: str, needs: tuple[Property, ...] = ()) -> Iterator[RuleSet | Step]:
        """The rules of a field, between steps that count those that must fire; nothing if there are none."""
        members = self._slots()[name]
        if not members:
            return
        rules = self.method if name == "method" else None
        rules = rules or RuleSet(f"{self.name}.{name}", *members, needs=needs)
        found = {rule.id: rule for rule in _rules_of(members)}
        stated = [one for one in self.expect if isinstance(one, Fires) and one.rule in found]
        yield from (one.begin() for one in stated)
        yield rules
        yield from (one.end(f"{name}=", found[one.rule]) for one in stated)

    def _check_alternatives(self) -> None:
        """Raise FxRewriteError where a site is stated twice, or a way does not fit the rest."""
        stated: dict[Site, str] = dict.fromkeys(self.place, "place")
        names = set[str]()
        for one in self.alternatives:
            if one.name in names:
                raise FxRewriteError(f"{self.name}: two alternatives are called {one.name!r}; give each its name")
            names.add(one.name)
            of = f"alternatives {one.name!r}"
            sites = dict.fromkeys(site for way in one.ways.values() for site in _placed(way))
            for site in () if one.each else sites:
                if site in stated:
                    raise FxRewriteError(
                        f"{self.name}: {site} is stated in {stated[site]} and in {of}; state it in one of them"
                    )
            stated |= {} if one.each else dict.fromkeys(sites, of)
            for name, way in one.ways.items():
                if isinstance(way, Parallelism) and (way.axis, way.data) != (self.axis, self.data):
                    found = f"is over axis {way.axis!r} with data={way.data!r}"
                    raise FxRewriteError(
                        f"{self.name}: {of}: {name} {found}, and {self.name} over {self.axis!r} with {self.data!r}"
                    )
                self.with_way(way)

    def with_way(self, way: Mapping[Site, Placed] | Parallelism) -> Parallelism:
        """What is stated here and by the way, without alternatives.

        Raises:
            FxRewriteError: both have a method, or one has a method and the other rules.
        """
        if not isinstance(way, Parallelism):
            return replace(self, place={**self.place, **way}, alternatives=())
        both = {kind: _joined(getattr(self, kind), getattr(way, kind)) for kind in _LISTS}
        method = self.method or way.method
        lists = [kind for kind in _LISTS if kind != "expect" and both[kind]]
        if method is not None and (lists or (self.method and way.method)):
            other = lists[0] if lists else "another method"
            raise FxRewriteError(
                f"{self.name}: {method.name} is the method of one of {self.name} and {way.name}, and {other} of the "
                "other would not run; state the rules in the method"
            )
        return replace(self, place={**self.place, **way.place}, method=method, alternatives=(), **both)

    @cached_property
    def rule_set(self) -> RuleSet:
        """All that is done to a program, as one transaction."""
        chosen = (_SayChosen(f"{self.name}.chosen", self.chosen),) if self.chosen else ()
        expected = [one for one in self.expect if isinstance(one, Sends)]
        if self.method is not None:
            place = (Place(f"{self.name}.place", self.place),) if self.place else ()
            return RuleSet(self.name, *chosen, *place, *self._slot("method"), *expected, atomic=True)
        shipped, layouts = registered(), LayoutRules(joined_layouts((), self.layouts))
        is_own = self.data == "own"
        return RuleSet(
            self.name,
            *chosen,
            RuleSet(
                f"{self.name}.canonicalize",
                *(shipped[name] for name in CANONICAL),
                DecomposeUnknown(f"{self.name}.decompose_unknown", layouts),
            ),
            *(() if is_own else (shipped[name] for name in DRAWS)),
            Place(f"{self.name}.place", self.place),
            *self._slot("rules"),
            PropagatePlacements(f"{self.name}.propagate", layouts, own_inputs=is_own, moves_draws=is_own),
            *self._slot("placed", (PLACEMENTS,)),
            *(() if is_own else (RefuseShardedDraws(f"{self.name}.draws"),)),
            REDUCTIONS,
            LocalizeShapes(f"{self.name}.localize", layouts, own_inputs=is_own),
            *(shipped[name] for name in LOWERED),
            COLLECTIVE_RULES,
            *self._slot("lowered", (COLLECTIVE_CALLS,)),
            *expected,
            atomic=True,
        )

    @property
    def members(self) -> tuple[Parallelism, ...]:
        """Itself: a plan over one axis."""
        return (self,)

    def plan(self) -> Plan:
        """The plan over the axis: `plan.apply(gm, context=fxrewrite.spmd.contexts(mesh))`."""
        return Parallelisms(self.members).plan()

    def __or__(self, other: Parallelism | Parallelisms) -> Parallelisms:
        """Both, over their axes: `other` is applied first, and this to what its ranks compute together."""
        return Parallelisms(self.members).__or__(other)

    def __str__(self) -> str:
        return str(Parallelisms(self.members))


@dataclass(frozen=True)
class Parallelisms:
    """Several over the axes of a mesh, from the outermost to the innermost.

    Raises:
        FxRewriteError: two are over one axis.
    """

    members: tuple[Parallelism, ...]

    def __post_init__(self) -> None:
        seen = dict[str, str]()
        for member in self.members:
            if member.axis in seen:
                raise FxRewriteError(
                    f"{seen[member.axis]} and {member.name} are both over axis {member.axis!r}: an axis has one "
                    "parallelism; state both in one, or use an axis for each"
                )
            seen[member.axis] = member.name

    def plan(self) -> Plan:
        """The plan over all axes, the innermost first: `plan.apply(gm, context=fxrewrite.spmd.contexts(mesh))`.

        Last comes the schedule of what they send of parameters alone.
        """
        open_ones = [f"{member.name}: {one.name}" for member in self.members for one in member.alternatives]
        if open_ones:
            raise FxRewriteError(
                f"{', '.join(open_ones)}: which of the alternatives is taken is not chosen yet; "
                "call choose_alternatives(plan, model, inputs, mesh), or pass the plan to spmd or simulate, which "
                "choose"
            )
        first, *others = reversed(self.members)
        plan = first.rule_set.on(first.axis)
        for member in others:
            plan = plan >> member.rule_set.on(member.axis)
        return plan >> SCHEDULE.on(self.members[0].axis)

    def __or__(self, other: Parallelism | Parallelisms) -> Parallelisms:
        if not isinstance(other, (Parallelism, Parallelisms)):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return Parallelisms((*self.members, *other.members))

    def __str__(self) -> str:
        pages = [
            "\n  ".join([f"over {member.axis}: {member.rule_set}", *map(str, member.alternatives)])
            for member in reversed(self.members)
        ]
        return "\n\n".join([*pages, f"over all axes: {SCHEDULE}"])


AnyPlan: TypeAlias = Parallelism | Parallelisms
"""What may be stated of a model: one parallelism, or several joined by `|`."""
_LISTS = ("rules", "placed", "lowered", "layouts", "expect")
"""Fields of a parallelism that are lists."""


def _rules_of(members: Sequence[Member]) -> Iterator[Rule]:
    """The rules among the members and in their sets."""
    for member in members:
        if isinstance(member, (Rule, RuleSet)):
            yield from (member,) if isinstance(member, Rule) else member.rules()


def _joined(of: Sequence[Any], more: Sequence[Any]) -> tuple[Any, ...]:
    """The members of both; what is in both, once."""
    return (*of, *(one for one in more if not any(one is other for other in of)))


def check_axes(plan: AnyPlan, mesh: Mapping[str, int] | DeviceMesh | None) -> None:
    """Raise FxRewriteError where the mesh lacks an axis of the plan, has them in another order, or is no mesh."""
    if not isinstance(plan, (Parallelism, Parallelisms)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FxRewriteError(f"the plan is a {type(plan).__name__}; pass a Parallelism, or several, a | b")
    if not isinstance(mesh, (Mapping, DeviceMesh)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FxRewriteError(
            f'the mesh is a {type(mesh).__name__}; pass a DeviceMesh, or for simulated ranks their numbers, {{"tp": 2}}'
        )
    if isinstance(mesh, Mapping):
        for size in mesh.values():
            check_num_ranks(size)
    axes = tuple(mesh) if isinstance(mesh, Mapping) else mesh.mesh_dim_names or ()
    stated = [member.axis for member in plan.members]
    missing = [axis for axis in stated if axis not in axes]
    if missing:
        raise FxRewriteError(
            f"the plan is over axis {missing[0]!r}, and the mesh has no axis {missing[0]!r}; it has {tuple(axes)}"
        )
    ordered = sorted(stated, key=list(axes).index)
    if stated != ordered:
        names = {member.axis: member.name for member in plan.members}
        raise FxRewriteError(
            f"the plan is over {', '.join(stated)}, and the mesh has these axes as {', '.join(ordered)}: of two "
            f"axes that cut one parameter the inner one cuts first; write {' | '.join(names[axis] for axis in ordered)}"
        )
