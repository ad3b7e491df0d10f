"""What stages need and give: an order that cannot work is an error where the set or the plan is made."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import (
    Edit,
    Note,
    Property,
    Report,
    RuleDefinitionError,
    RuleSet,
    staged,
)
from fxrewrite.graph import Fact
from fxrewrite.testing import recorded

FLAT, NAMED, SMALL = Property("flat", given_by="Flatten"), Property("named"), Property("small")


class Stage:
    """A step that does nothing but to say that it ran."""

    def __init__(self, name: str, **said: tuple[Property, ...]) -> None:
        self.name = name
        vars(self).update(said)

    def run(self, edit: Edit, context: object, report: Report) -> int:
        report.events.append(Note(text=self.name))
        return 0

    def text(self) -> str:
        return "nothing\nat all"


FLATTEN = Stage("flatten", gives=(FLAT,))
NAME = Stage("name", needs=(FLAT,), gives=(NAMED,))
SHRINK = Stage("shrink", gives=(SMALL,), precedes=(NAMED,))
PART = RuleSet("part", NAME, needs=(FLAT,))
"""A set that a set before it has to serve."""


def graph() -> fx.GraphModule:
    return make_fx(torch.neg)(torch.rand(2))


def test_a_set_in_the_right_order_runs_in_it() -> None:
    rules = RuleSet("right", FLATTEN, RuleSet("inner", SHRINK), NAME)
    assert rules.apply(graph()).lines == ("flatten", "shrink", "name")
    assert set(rules.contract.gives) == {FLAT, SMALL, NAMED}
    assert recorded(RuleSet("part", NAME, needs=(FLAT,)))[0].needs == (FLAT,)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            (NAME,),
            "set s: name needs flat, and no stage before it gives that; add one before it: Flatten gives it",
        ),
        ((NAME, FLATTEN), "set s: name needs flat, which flatten gives after it; write flatten before name"),
        ((RuleSet("a", NAME, needs=(FLAT,)), RuleSet("b", FLATTEN)), "write b before a"),
        ((FLATTEN, Stage("again", gives=(FLAT,))), "again gives flat, which flatten gives already; leave one of them"),
        ((FLATTEN, NAME, SHRINK), "set s: shrink precedes named, which name gives before it; write shrink earlier"),
        (
            (Stage("x", needs=(SMALL,), gives=(FLAT,)), Stage("y", needs=(FLAT,), gives=(SMALL,))),
            "set s: no order is right: y gives small to x, x gives flat to y; split one of these stages in two",
        ),
        ((Stage("words", needs=("flat",)),), "words: needs=('flat',): a tuple of Property objects"),  # pyright: ignore[reportArgumentType]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_order_that_cannot_work_names_both_stages_and_what_to_do(members: tuple[Stage, ...], says: str) -> None:
    with pytest.raises(RuleDefinitionError) as error:
        RuleSet("s", *members)
    assert says in str(error.value)


def test_a_plan_checks_its_sets_where_they_are_joined() -> None:
    flatten = RuleSet("flattening", FLATTEN)
    assert (flatten >> PART).apply(graph()).lines == ("flatten", "name")
    with pytest.raises(RuleDefinitionError, match="name needs flat, which flatten gives after it; write flattening"):
        PART >> flatten
    with pytest.raises(RuleDefinitionError, match="plan: flatten gives flat, which flatten gives already"):
        flatten >> flatten.once()


def test_a_part_of_a_plan_does_not_run_alone() -> None:
    plan = PART.once()
    assert dict(plan.needs) == {FLAT: "name"}
    for use in (lambda: plan.apply(graph()), plan.backend, lambda: plan.in_inductor("joint")):
        with pytest.raises(
            RuleDefinitionError, match=r"name needs flat, .* write a set, such as Flatten, that does >>"
        ):
            use()


def test_sets_that_order_each_other_are_not_joined() -> None:
    with pytest.raises(RuleDefinitionError, match="flat orders one after the other"):
        RuleSet("flattening", FLATTEN) | PART
    assert (PART | RuleSet("other")).needs == (FLAT,)


KNOWN = Fact[int]("known")


class Keep(Stage):
    """Writes a fact down, or reads it."""

    def run(self, edit: Edit, context: object, report: Report) -> int:
        output = edit.graph.output_node()
        report.events.append(Note(text=f"{self.name} {KNOWN.of(output)}"))
        edit.set_fact(output, KNOWN, 1)
        return 0


def test_stages_on_one_axis_share_what_is_known_and_those_on_another_do_not() -> None:
    one, two = RuleSet("one", Keep("write", gives=(FLAT,))), RuleSet("two", Keep("read", needs=(FLAT,)), needs=(FLAT,))
    contexts = {"dp": None, "tp": None}
    assert (one >> two).on("dp").apply(graph(), contexts).lines == ("write None", "read 1")
    assert (one.on("dp") >> one.on("tp")).apply(graph(), contexts).lines == ("write None", "write None")
    with pytest.raises(RuleDefinitionError, match="plan on tp: read needs flat, and no stage before it gives that"):
        one.on("dp") >> two.on("tp")


def test_a_method_says_what_a_general_stage_cannot_know() -> None:
    step, rules = staged(SHRINK, needs=(FLAT,)), staged(RuleSet("empty"), precedes=(NAMED,))
    assert RuleSet("s", FLATTEN, step, rules, NAME).apply(graph()).lines == ("flatten", "shrink", "name")
    for late in (step, rules):
        with pytest.raises(RuleDefinitionError, match="precedes named"):
            RuleSet("s", FLATTEN, NAME, late)
    with pytest.raises(RuleDefinitionError, match="shrink needs flat"):
        RuleSet("s", step)
    with pytest.raises(RuleDefinitionError, match=r"defined twice, in tests\.test_stages\.Stage and in tests"):
        RuleSet("s", FLATTEN, step, SHRINK)


def test_print_shows_what_stages_need_and_give() -> None:
    assert str(RuleSet("s", FLATTEN, RuleSet("names", NAME, needs=(FLAT,), precedes=(SMALL,))).once()) == (
        "once: s\n"
        "  flatten   nothing   [gives flat]\n"
        "at all\n"
        "  names   [needs flat; precedes small]\n"
        "    name   nothing   [needs flat; gives named]\n"
        "  at all"
    )
