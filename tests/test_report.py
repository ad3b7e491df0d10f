"""A report is readable as text and as JSON, and counts refusals by reason."""

import json

import torch

from fxrewrite.errors import Reason, Refusal
from fxrewrite.report import Report, RuleReport


def a_report() -> Report:
    report = Report(seconds=0.5, lines=["gathered: cumsum at %cumsum (model.py:7)"])
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
        "gathered: cumsum at %cumsum (model.py:7)",
    ]


def test_json_goes_both_ways_and_objects_become_text() -> None:
    text = a_report().model_dump_json()
    assert json.loads(text)["rules"][0]["refusals"][0]["data"] == {"dtype": "torch.float16"}
    again = Report.model_validate_json(text)
    assert again.model_dump_json() == text
    assert again["sp.attention"].rewrites == 2
    assert again.refusals[1].data == {"heads": 6}


def test_refusals_are_counted_by_reason_and_each_only_once() -> None:
    report = a_report()
    report["sp.attention"].refuse(report.refusals[0])
    assert report.refused_because() == {"6 heads do not divide": 2}
    assert report.rewrites == 2


def test_an_entry_is_one_object() -> None:
    report = Report()
    assert report.rule("a") is report.rule("a") is report["a"]
    assert isinstance(report["a"], RuleReport)
    assert str(Report()).startswith("0 rewrites by 0 of 0 rules")


def test_refusals_are_counted_by_kind_and_a_snapshot_has_no_times(fx_snapshot) -> None:
    report = Report(seconds=0.5)
    entry = report.rule("a.first")
    entry.anchors, entry.matches, entry.rewrites, entry.seconds = 3, 2, 1, 0.25
    for kind in (Reason.EFFECT, Reason.DRAW, Reason.EFFECT):
        entry.refuse(Refusal(rule="a.first", reason=f"{kind} {len(entry.refusals)}", node="x", kind=kind))
    assert report.refused_by() == {Reason.EFFECT: 2, Reason.DRAW: 1}
    assert report == fx_snapshot
