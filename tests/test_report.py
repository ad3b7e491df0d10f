"""A report is readable as text and as JSON, and counts refusals by reason."""

import json
from typing import Literal

import pytest
import torch
from pydantic import ValidationError

from fxrewrite.errors import Reason, Refusal, RuleDefinitionError
from fxrewrite.report import Event, Note, Report, RuleReport, bytes_text
from fxrewrite.spmd import Gathered, grouped


class Counted(Event, frozen=True):
    kind: Literal["counted nodes"] = "counted nodes"
    node: str
    num_nodes: int

    def __str__(self) -> str:
        return f"counted: {self.num_nodes} nodes, the first is %{self.node}"


def a_report() -> Report:
    report = Report(seconds=0.5, events=[Counted(node="cumsum", num_nodes=7)])
    entry = report.rule("sp.attention")
    entry.anchors, entry.matches, entry.rewrites, entry.seconds = 5, 4, 2, 0.002
    entry.refuse(
        Refusal("sp.attention", "6 heads do not divide", "sdpa", "model.py:41", "use 3", {"dtype": torch.half})
    )
    entry.refuse(Refusal("sp.attention", "6 heads do not divide", "sdpa_1", "model.py:41", "use 3", {"heads": 6}))
    report.rule("sp.loss")
    return report


def test_text_is_a_table_with_refusals_and_lines() -> None:
    assert str(a_report()).splitlines() == [
        "2 rewrites by 1 of 2 rules in 0.500 s",
        "rule          anchors  matches  rewrites  refused        ms",
        "sp.attention        5        4         2        2      2.00",
        "sp.loss             0        0         0        0      0.00",
        "refused  sp.attention: 6 heads do not divide at %sdpa (model.py:41); use 3",
        "refused  sp.attention: 6 heads do not divide at %sdpa_1 (model.py:41); use 3",
        "counted: 7 nodes, the first is %cumsum",
    ]


def test_json_goes_both_ways_and_objects_become_text() -> None:
    text = a_report().model_dump_json()
    assert json.loads(text)["rules"][0]["refusals"][0]["data"] == {"dtype": "torch.float16"}
    again = Report.model_validate_json(text)
    assert again.model_dump_json() == text
    assert again["sp.attention"].rewrites == 2
    assert again.refusals[1].data == {"heads": 6}


def test_an_event_is_data_and_its_sentence_is_in_json_too() -> None:
    report = a_report()
    report.events.append(Note(text="done"))
    assert report.lines == ("counted: 7 nodes, the first is %cumsum", "done")
    (event,) = report.events_of(Counted)
    assert event.num_nodes == 7
    text = report.model_dump_json()
    assert json.loads(text)["events"] == [
        {"kind": "counted nodes", "node": "cumsum", "num_nodes": 7, "text": report.lines[0]},
        {"kind": "note", "text": "done"},
    ]
    assert Report.model_validate_json(text).events == report.events


def test_a_sentence_cannot_be_added_without_an_event() -> None:
    with pytest.raises(AttributeError):
        Report().lines.append("gathered: cumsum")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="abstract"):
        Event(kind="a kind without a sentence")  # pyright: ignore[reportAbstractUsage]


def test_an_event_of_an_unknown_kind_is_not_read() -> None:
    with pytest.raises(ValidationError, match="no event of kind 'of another package' is known; import the module"):
        Report.model_validate({"rules": [], "events": [{"kind": "of another package", "text": "x"}]})


def test_two_classes_of_one_kind_are_an_error() -> None:
    with pytest.raises(RuleDefinitionError, match=r"Other and .*Counted are both events of kind 'counted nodes'"):

        class Other(Event, frozen=True):  # pyright: ignore[reportUnusedClass]
            kind: Literal["counted nodes"] = "counted nodes"

            def __str__(self) -> str:
                return "counted"


def test_each_refusal_is_counted_only_once() -> None:
    report = a_report()
    report["sp.attention"].refuse(report.refusals[0])
    assert [refusal.reason for refusal in report.refusals] == ["6 heads do not divide"] * 2
    assert report.rewrites == 2


def test_an_entry_is_one_object() -> None:
    report = Report()
    assert report.rule("a") is report.rule("a") is report["a"]
    assert isinstance(report["a"], RuleReport)
    assert str(Report()).startswith("0 rewrites by 0 of 0 rules")


def test_a_snapshot_has_no_times(fx_snapshot) -> None:
    report = Report(seconds=0.5)
    entry = report.rule("a.first")
    entry.anchors, entry.matches, entry.rewrites, entry.seconds = 3, 2, 1, 0.25
    for kind in (Reason.EFFECT, Reason.DRAW, Reason.EFFECT):
        entry.refuse(Refusal(rule="a.first", reason=f"{kind} {len(entry.refusals)}", node="x", kind=kind))
    assert report == fx_snapshot


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (0, "0 bytes"),
        (2**20 - 1, "1,048,575 bytes"),
        (2**20, "1 MiB"),
        (338_228_674_560, "315 GiB"),
        (2**52, "4,096 TiB"),
    ],
)
def test_bytes_are_said_in_the_unit_of_their_size(num_bytes: int, said: str) -> None:
    assert bytes_text(num_bytes) == said


def test_what_is_said_alike_of_several_nodes_is_one_sentence() -> None:
    def gathered(node: str, why: str) -> Gathered:
        return Gathered(node=node, source="model.py:3", why=why, num_bytes=8, is_more=False)

    events = [
        gathered("a", "one"),
        gathered("b", "one"),
        Note(text="between"),
        gathered("c", "two"),
        gathered("d", "one"),
    ]
    assert grouped(events) == [
        "gathered: 3 x, the first is %a model.py:3: one (8 bytes whole on each rank)",
        "between",
        "gathered: %c model.py:3: two (8 bytes whole on each rank)",
    ]
