"""The page of a report is one well-formed file that loads nothing, escapes all text, and shows each change in place."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.errors import Reason, Refusal, refuse
from fxrewrite.page import report_page
from fxrewrite.page.sides import Change, compare
from fxrewrite.plan import RuleSet
from fxrewrite.report import Note, Report
from fxrewrite.rule import Rule, rule

HOSTILE = "page.<script>alert('&')</script>"
VOID = {"meta"}


@rule("page.use_silu")
def use_silu(x: Any) -> Any:
    return x * torch.sigmoid(x)


@use_silu.replacement
def _(x: Any) -> Any:
    return torch.nn.functional.silu(x)


@rule("page.drop_double_neg")
def drop_double_neg(x: Any) -> Any:
    return torch.neg(torch.neg(x))


@drop_double_neg.replacement
def _(x: Any) -> Any:
    return x


@rule(HOSTILE)
def never(x: Any) -> Any:
    return torch.exp(x)


@never.replacement
def _(x: Any) -> Any:
    refuse("it is <never> & nowhere", hint='say "please"', kind=Reason.ALIAS)


RULES = RuleSet("page", use_silu, drop_double_neg, never)


def computed(x: torch.Tensor) -> torch.Tensor:
    for _ in range(9):
        x = torch.relu(x)
    x = torch.exp(x * torch.sigmoid(x))
    y = torch.relu(torch.neg(torch.neg(torch.relu(x))))
    return y * torch.sigmoid(y) + x * torch.sigmoid(x)


def applied(rules: RuleSet = RULES, function: Any = computed) -> tuple[Report, fx.GraphModule, fx.GraphModule]:
    gm = make_fx(function, tracing_mode="fake")(torch.rand(3))
    after, report = rules.once().applied(gm)
    report.events.append(Note(text="note: 1 < 2"))
    return report, gm, after


class Reader(HTMLParser):
    """Checks that tags are closed in order, and gathers what the page says and links to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids)), "an id is given twice"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        named = dict(attrs)
        assert not {name for name in named if name.startswith("on") or name == "src"}
        if "id" in named:
            self.ids.append(str(named["id"]))
        if "href" in named:
            self.links.append(str(named["href"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def cells(page: str, kind: str) -> list[str]:
    """The text of the lines that are shown as this kind of change."""
    found = re.findall(rf'<div class="{kind}"[^>]*>(.*?)</div>', page)
    return [re.sub(r"<[^>]*>", "", cell) for cell in found]


def test_the_page_is_well_formed_and_its_links_lead_somewhere() -> None:
    reader = Reader(report_page(*applied()))
    assert all(link.startswith("#") for link in reader.links)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert reader.tags["script"] == reader.tags["link"] == reader.tags["img"] == 0
    assert reader.tags["details"] == 1


def test_everything_is_escaped() -> None:
    page = report_page(*applied(), title="<b>title</b>")
    reader = Reader(page)
    assert reader.tags["b"] == reader.tags["never"] == 0
    for said in (HOSTILE, "it is <never> & nowhere", 'say "please"', "<b>title</b>", "note: 1 < 2"):
        assert said in reader.words


def test_names_of_nodes_are_escaped() -> None:
    report, before, after = applied(RuleSet("one", never))
    for gm in (before, after):
        gm.graph.find_nodes(op="placeholder")[0].name = "<i>&x"
    report[HOSTILE].refusals[0] = Refusal(HOSTILE, "no", "<i>&x", "<u>.py:1")
    reader = Reader(report_page(report, before, after))
    assert reader.tags["i"] == reader.tags["u"] == 0
    assert "%<i>&x" in reader.words
    assert "<u>.py:1" in reader.words


def test_summary_table_and_refusals_say_what_the_report_says() -> None:
    report, before, after = applied()
    reader = Reader(report_page(report, before, after))
    assert f"4 rewrites by 2 of 3 rules, 1 refusal, in {report.seconds:.3f} s" in reader.words
    entry = report["page.use_silu"]
    assert f"page.use_silu {entry.anchors} 3 3 0 {entry.seconds * 1e3:.2f}" in reader.words
    assert "alias (1)" in reader.words
    assert "%exp" in reader.words


def test_what_each_rule_changed_is_marked_and_labelled() -> None:
    page = report_page(*applied())
    assert [cell.split(" = ")[1] for cell in cells(page, "made")] == [
        f"aten.silu({value})" for value in ("%8", "%12", "%10")
    ]
    assert Counter(re.findall(r"aten\.\w+", " ".join(cells(page, "gone")))) == {
        "aten.sigmoid": 3,
        "aten.mul": 3,
        "aten.neg": 2,
    }
    assert [int(number) for number in re.findall(r'id="rule-0-(\d+)"', page)] == [0, 1]  # the last two are neighbours
    assert page.count('<a href="#rule-0-1">next</a>') == 1
    assert page.count('id="rule-1-0"') == 1  # a rule that makes no node, and is the only one


def test_the_same_input_gives_the_same_page_without_times() -> None:
    pages = [report_page(*applied(), times=False) for _ in range(2)]
    assert pages[0] == pages[1]
    assert " ms" not in Reader(pages[0]).words
    assert report_page(*applied()) != pages[0]


@pytest.mark.parametrize("side", ["before", "after"])
def test_one_graph_alone_is_shown_with_the_rules_that_made_it(side: str) -> None:
    report, before, after = applied()
    page = report_page(report, **{side: {"before": before, "after": after}[side]})
    assert f"Graph {side}" in Reader(page).words
    assert len(cells(page, "made")) == (3 if side == "after" else 0)
    assert cells(page, "gone") == []


def test_a_report_alone_has_no_graph() -> None:
    page = report_page(Report())
    assert Reader(page).words.count("Graph") == 0
    assert "0 rewrites by 0 of 0 rules, 0 refusals" in page


def test_a_graph_that_did_not_change_is_shown_whole() -> None:
    report, before, after = applied(RuleSet("none"))
    page = report_page(report, before, after)
    assert "<details>" not in page
    assert cells(page, "made") == cells(page, "gone") == cells(page, "arguments") == []
    assert len(cells(page, "same")) == 2 * len(before.graph.nodes)


def test_a_rule_with_many_rewrites_links_to_the_first_and_each_to_its_next() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(23):
            x = torch.relu(x * torch.sigmoid(x))
        return x

    page = report_page(*applied(RuleSet("one", use_silu), function))
    assert '<a href="#rule-0-19">20</a> and 3 more</td>' in page
    assert page.count(">next</a>") == 22


def test_what_changed_inside_of_a_body_is_shown_there() -> None:
    inner = fx.symbolic_trace(lambda x: x * torch.sigmoid(x))
    root = torch.nn.Module()
    root.inner = inner
    graph = fx.Graph()
    x = graph.placeholder("x")
    body = graph.get_attr("inner")
    graph.output(graph.call_function(torch.ops.higher_order.tag_activation_checkpoint, (body, x)))
    gm = fx.GraphModule(root, graph)
    after, report = RuleSet("one", use_silu).once().applied(gm)
    page = report_page(report, gm, after)
    assert report.rewrites == 1
    assert [cell.split(" = ")[0] for cell in cells(page, "gone")] == ["-   %1", "-   %2"]
    assert "@0:" in [cell.strip() for cell in cells(page, "same")]


def test_where_two_rules_may_have_dropped_a_node_both_are_named() -> None:
    @rule("page.drop_abs")
    def drop_abs(x: Any) -> Any:
        return torch.abs(torch.relu(x))

    @drop_abs.replacement
    def _(match: Any, x: Any) -> Any:
        return match.proxy(match.root.args[0])

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.neg(torch.neg(torch.abs(torch.relu(x)))))

    page = report_page(*applied(RuleSet("two", drop_double_neg, drop_abs), function))
    text = re.sub(r"<[^>]*>", "", page)
    assert "page.drop_double_neg or page.drop_abs" in text
    assert "page.drop_double_neg or page.drop_abs" not in Reader(report_page(*applied())).words


def test_rules_that_made_the_graph_before_have_places_but_no_row() -> None:
    _, _, after = applied()
    page = report_page(RuleSet("none").apply(after), None, after)
    reader = Reader(page)
    assert "page.use_silu" in reader.words
    assert {link[1:] for link in reader.links} <= set(reader.ids)


def test_lines_are_paired_by_node_and_not_by_text() -> None:
    _, before, after = applied(RuleSet("one", use_silu))
    rows = compare(before, after)
    assert [line.text for line, _ in rows if line] != [line.text for _, line in rows if line]
    for old, new in rows:
        if old and new and old.change == Change.SAME:
            assert old.node == new.node
    changes = Counter(line.change for row in rows for line in row if line)
    assert changes[Change.GONE] == 2 * changes[Change.MADE] == 6


def test_a_node_that_a_second_rule_replaced_again_names_both() -> None:
    @rule("page.silu_to_relu")
    def silu_to_relu(x: Any) -> Any:
        return torch.nn.functional.silu(x)

    @silu_to_relu.replacement
    def _(x: Any) -> Any:
        return torch.relu(x)

    both: list[Rule | RuleSet] = [RuleSet("first", use_silu), RuleSet("second", silu_to_relu)]
    _, before, after = applied(RuleSet("both", *both), lambda x: torch.exp(x * torch.sigmoid(x)))
    gone = [old for old, _ in compare(before, after) if old and old.change == Change.GONE]
    assert [line.rules for line in gone] == [("page.silu_to_relu", "page.use_silu")] * 2


def test_graphs_that_share_nothing_are_shown_side_by_side() -> None:
    def module(target: Any, name: str) -> fx.GraphModule:
        graph = fx.Graph()
        value = graph.call_function(target, (graph.placeholder(name),), name=f"{name}_call")
        graph.output((value,))
        return fx.GraphModule(torch.nn.Module(), graph)

    rows = compare(module(torch.relu, "x"), module(torch.exp, "y"))
    assert [[line.change if line else None for line in row] for row in rows] == [
        [Change.GONE, Change.MADE],
        [Change.GONE, Change.MADE],
        [Change.ARGUMENTS, Change.ARGUMENTS],  # both return a value
    ]


class HtmlExtension(SingleFileSnapshotExtension):
    file_extension = "html"
    _write_mode = WriteMode.TEXT


def test_a_small_page(snapshot: SnapshotAssertion) -> None:
    rules = RuleSet("page", use_silu, never)
    report, before, after = applied(rules, lambda x: torch.exp(x * torch.sigmoid(x)) + 1)
    page = report_page(report, before, after, title="page on a small graph", times=False)
    assert page == snapshot.use_extension(HtmlExtension)
