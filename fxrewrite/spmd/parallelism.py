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
axes stand in the order of the mesh, from the outermost to the innermost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias, get_args

from fxrewrite.errors import FxRewriteError
from fxrewrite.plan import Member, Plan, RuleSet, Step
from fxrewrite.registry import registered
from fxrewrite.rule import Rule
from fxrewrite.spmd.draws import RefuseShardedDraws
from fxrewrite.spmd.expect import Sends
from fxrewrite.spmd.lower.collectives import COLLECTIVE_RULES
from fxrewrite.spmd.lower.localize import LocalizeShapes
from fxrewrite.spmd.lower.means import REDUCTIONS
from fxrewrite.spmd.place import Place, Placed, Site, Stored
from fxrewrite.spmd.placement import Replicate, as_placement
from fxrewrite.spmd.propagate import PropagatePlacements
from fxrewrite.spmd.registered import joined_layouts
from fxrewrite.spmd.rule import LayoutRule, LayoutRules
from fxrewrite.spmd.schedule import SCHEDULE
from fxrewrite.spmd.stages import COLLECTIVE_CALLS, PLACEMENTS

__all__ = ["Parallelism", "Parallelisms", "check_axes"]

Data: TypeAlias = Literal["shared", "own"]
"""What the ranks of an axis are called with: the same values, or values of their own."""
CANONICAL = ("normal_forms", "losses", "attention")
"""The registered rule sets that bring a graph into the forms that layout rules know."""
AFTER_PLACEMENTS = ("biases",)
"""Registered rule sets that read what is stated, and run before propagation."""
DRAWS = ("random",)
"""Registered rule sets after which random numbers are drawn for whole values, as on one device."""


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
        expect: what must hold of the lowered program, such as `sends(within="*.layers.*", all_reduce=2)`.
        method: a rule set that lowers a program over the axis, in place of the one that is made of `rules`, `placed`,
            `lowered` and `layouts`; what is stated in `place` comes before it.
    """

    name: str
    _: KW_ONLY
    axis: str
    place: Mapping[Site, Placed] = field(default_factory=dict[Site, Placed])
    rules: Sequence[Member] = ()
    placed: Sequence[Member] = ()
    lowered: Sequence[Member] = ()
    layouts: Sequence[LayoutRule] = ()
    data: Data = "shared"
    expect: Sequence[Sends] = ()
    method: RuleSet | None = None

    def __post_init__(self) -> None:
        if self.data not in get_args(Data):
            raise FxRewriteError(f"{self.name}: data={self.data!r} is not one of {get_args(Data)}")
        kinds = {
            "rules": (Rule, RuleSet, Step),
            "placed": (Rule, RuleSet, Step),
            "layouts": LayoutRule,
            "expect": Sends,
        }
        for field_name, kind in kinds.items():
            given = getattr(self, field_name)
            wrong = [one for one in given if not isinstance(one, kind)] if isinstance(given, Sequence) else [given]
            if wrong:
                expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
                raise FxRewriteError(f"{self.name}: {field_name} is a list of {expected}, and has {wrong[0]!r}")
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

    @cached_property
    def rule_set(self) -> RuleSet:
        """All that is done to a program, as one transaction."""
        if self.method is not None:
            place = (Place(f"{self.name}.place", self.place),) if self.place else ()
            return RuleSet(self.name, *place, self.method, *self.expect, atomic=True)
        shipped, layouts = registered(), LayoutRules(joined_layouts(self.layouts))
        is_own = self.data == "own"
        return RuleSet(
            self.name,
            RuleSet(f"{self.name}.canonicalize", *(shipped[name] for name in CANONICAL)),
            *(() if is_own else (shipped[name] for name in DRAWS)),
            Place(f"{self.name}.place", self.place),
            *(shipped[name] for name in AFTER_PLACEMENTS),
            *((RuleSet(f"{self.name}.rules", *self.rules),) if self.rules else ()),
            PropagatePlacements(f"{self.name}.propagate", layouts, own_inputs=is_own),
            *((RuleSet(f"{self.name}.placed", *self.placed, needs=(PLACEMENTS,)),) if self.placed else ()),
            *(() if is_own else (RefuseShardedDraws(f"{self.name}.draws"),)),
            REDUCTIONS,
            LocalizeShapes(f"{self.name}.localize", layouts, own_inputs=is_own),
            COLLECTIVE_RULES,
            *((RuleSet(f"{self.name}.lowered", *self.lowered, needs=(COLLECTIVE_CALLS,)),) if self.lowered else ()),
            *self.expect,
            atomic=True,
        )

    @property
    def members(self) -> tuple[Parallelism, ...]:
        """Itself: a plan over one axis."""
        return (self,)

    def plan(self) -> Plan:
        """The plan over the axis: `plan.apply(gm, context=fxrewrite.spmd.contexts(mesh))`."""
        return _plan(self.members)

    def __or__(self, other: Parallelism | Parallelisms) -> Parallelisms:
        """Both, over their axes: `other` is applied first, and this to what its ranks compute together."""
        return Parallelisms((*self.members, *other.members))

    def __str__(self) -> str:
        return _page(self.members)


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
        """The plan over all axes, the innermost first: `plan.apply(gm, context=fxrewrite.spmd.contexts(mesh))`."""
        return _plan(self.members)

    def __or__(self, other: Parallelism | Parallelisms) -> Parallelisms:
        return Parallelisms((*self.members, *other.members))

    def __str__(self) -> str:
        return _page(self.members)


def _plan(members: Sequence[Parallelism]) -> Plan:
    """All members, the last first; then the schedule of what they send of parameters alone."""
    first, *others = reversed(members)
    plan = first.rule_set.on(first.axis)
    for member in others:
        plan = plan >> member.rule_set.on(member.axis)
    return plan >> SCHEDULE.on(members[0].axis)


def _page(members: Sequence[Parallelism]) -> str:
    pages = [f"over {member.axis}: {member.rule_set}" for member in reversed(members)]
    return "\n\n".join([*pages, f"over all axes: {SCHEDULE}"])


def check_axes(plan: Parallelism | Parallelisms, axes: Sequence[str]) -> None:
    """Raise FxRewriteError where the mesh lacks an axis of the plan, or has its axes in another order."""
    stated = [member.axis for member in plan.members]
    missing = [axis for axis in stated if axis not in axes]
    if missing:
        raise FxRewriteError(f"the plan is over axis {missing[0]!r}, and the mesh has {tuple(axes)}")
    ordered = sorted(stated, key=list(axes).index)
    if stated != ordered:
        names = {member.axis: member.name for member in plan.members}
        raise FxRewriteError(
            f"the plan is over {', '.join(stated)}, and the mesh has these axes as {', '.join(ordered)}: of two "
            f"axes that cut one parameter the inner one cuts first; write {' | '.join(names[axis] for axis in ordered)}"
        )
