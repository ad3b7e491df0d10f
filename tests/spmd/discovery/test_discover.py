"""Layout rules are found by experiment: known operators, false rules, what cannot be tried, and the command."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from fxrewrite.cli import main
from fxrewrite.registry import RegistryWarning
from fxrewrite.spmd import (
    LayoutRule,
    LayoutRules,
    SampleError,
    TensorSpec,
    compare,
    discover,
    layout_table,
    parse,
    parse_call,
    with_table,
)
from rules.layouts import LAYOUTS

aten = torch.ops.aten
DOCUMENT = Path(__file__).parents[3] / "docs" / "layouts.md"
KNOWN: list[tuple[Any, str | None, str]] = [
    (aten.relu, None, "n... -> n..."),
    (aten.add, None, "n..., n... -> n..."),
    (aten.add, "f(4, 6, 8), f(6, 1)", "n... a b, a b -> n... a b"),
    (aten.linear, None, "n... a, b a, +b? -> n... b"),
    (aten.linear, "f(4, 6), f(8, 6)", "n... a, b a, !c...? -> n... b"),
    (aten.matmul, "f(4, 6, 8), f(8, 5)", "n... a, a b -> n... b"),
    (aten.bmm, None, "a b c, a c d -> a b d"),
    (aten.softmax, "f(4, 6, 8), -1", "n... !a -> n... a"),
    (aten.softmax, "f(4, 6, 8), 1", "a !b c -> a b c"),
    (aten.sum, None, "a b c d ->"),
    (aten.sum, "f(4, 6, 8), [1]", "a b c -> a c"),
    (aten.cumsum, "f(4, 6), 0", "!a b -> a b"),
    (aten.layer_norm, None, "n... !a, !a?, !a? -> n... a"),
    (aten.gather, "f(4, 6, 8), 1, i(4, 5, 8, below=6)", "a !b c, a d c -> a d c"),
    (aten.index_select, None, "a !b c, d -> a d c"),
    (aten.embedding, None, "!a b, n... -> n... b"),
    (aten.conv1d, "f(5, 7, 17), f(13, 7, 3), f(13)", "a b !c, d b !e, +d? -> a d f"),
    (aten.conv1d, "f(5, 7, 17), f(7, 1, 3), f(7), groups=7", "a b !c, b !d !e, b? -> a b f"),
    (aten.sort, "f(4, 6, 8)", "n... !a -> n... a, n... a"),
    (aten.topk, "f(4, 6, 8), 3", "n... !a -> n... b, n... c"),
    (aten.transpose, "f(4, 6, 8), 1, 2", "a b c -> a c b"),
    (aten.cat, "[f(4, 6), f(5, 6)], 0", "!a b, !c b -> d b"),
    (aten.type_as, "f(4, 6), f(3)", "n..., !a -> n..."),
    (aten.count_nonzero, "f(4, 6), [1]", "a b -> a"),
    (aten.inverse, "f(3, 4, 4)", "n... !a !b -> n... c d"),
    (aten.unbind, "f(4, 6)", "!a n... -> n..., n..., n..., n..."),
    (aten.where, None, "n..., n..., n... -> n..."),
    (
        aten.scaled_dot_product_attention,
        None,
        "n... a !b, n... !c !b, n... !c d, !e...? -> n... a d",
    ),
]


def found(target: Any, text: str | None) -> Any:
    return discover(target, *(parse_call(text) if text is not None else ()))


def number(case: tuple[Any, str | None, str]) -> str:
    return f"{case[0]} {case[1] or ''}".strip()


@pytest.mark.parametrize("case", KNOWN, ids=number)
def test_what_is_found_is_what_is_known(case: tuple[Any, str | None, str]) -> None:
    """And the notation, read back and bound to the sample, leaves those places free that passed the experiments."""
    target, text, notation = case
    discovery = found(target, text)
    assert discovery.notation == notation
    known = compare(discovery, LAYOUTS)
    assert known is not None
    assert not known.wrong, known
    if "!e...?" in notation:
        return  # the mask that is absent has no shape to bind
    shapes = [leaf.shape for leaf in torch.utils._pytree.tree_leaves(discovery.sample) if isinstance(leaf, TensorSpec)]
    bound = parse(notation).bind(shapes)
    assert bound is not None
    free = {
        (operand, dim)
        for operand, terms in enumerate(bound.operands)
        for dim, names in enumerate(terms)
        if names and names[0] not in bound.whole
    }
    passed = {place for i in discovery.indices if i.kind != "whole" for place in i.operands}
    assert free == passed


def test_the_report_says_what_was_seen() -> None:
    text = str(found(aten.linear, None))
    assert "run on input=f(5, 7, 11), weight=f(13, 11), bias=f(13)" in text
    assert "summed  input dim 2, weight dim 1: slices of it give summands; bias is added once" in text
    depthwise = str(found(aten.conv1d, "f(5, 7, 17), f(7, 1, 3), groups=7"))
    assert "groups states its size and must become local" in depthwise
    assert "note: bias was not given, so nothing is known of it: it must be whole" in depthwise
    assert "whole   input dim 2" in depthwise
    assert "no value of other is read" in str(found(aten.type_as, "f(4, 6), f(3)"))
    assert "other dim 1 has size 1 and broadcasts" in str(found(aten.add, "f(4, 6), f(4, 1)"))
    assert "a rule for 2 of them" in str(found(aten.cat, "[f(4, 6), f(5, 6)]"))


@torch.library.custom_op("fxrewrite_test::coupled", mutates_args=())
def coupled(x: torch.Tensor) -> torch.Tensor:
    """Pointwise forward; the gradient of an entry is computed from those of its column."""
    return x * 2


def _coupled_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad - grad.mean(0, keepdim=True)


coupled.register_autograd(_coupled_backward)


def test_gradients_are_compared_too() -> None:
    discovery = found(torch.ops.fxrewrite_test.coupled, "f(4, 6)")
    assert discovery.notation == "!a b -> a b"
    assert "slices give other gradients of x" in str(discovery)


def test_a_false_rule_is_found_out() -> None:
    pointwise = LayoutRules([LayoutRule("mine.tril", ("aten::tril",), "b... s -> b... s")])
    known = compare(found(aten.tril, "f(4, 6)"), pointwise)
    assert str(known) == "registered as mine.tril: b... s -> b... s\n  WRONG: it shards self dim 0, self dim 1"


def test_indices_that_go_together_apart_are_a_false_rule() -> None:
    rule = LayoutRules([LayoutRule("mine.bmm", ("aten::bmm",), "b m !k, c !k n -> b m n")])
    known = compare(found(aten.bmm, None), rule)
    assert known is not None
    assert known.wrong == ()  # sharding one of the two batches alone is not what the rule of an index `b` in both says
    assert known.stricter


def test_dimensions_made_of_several_are_not_judged() -> None:
    known = compare(found(aten.repeat, "f(5, 7), [1, 3]"), LAYOUTS)
    assert known is not None
    assert not known.wrong
    assert known.unjudged == ("self dim 1",)


def test_a_rule_that_asks_for_more_is_safe() -> None:
    whole = LayoutRules([LayoutRule("mine.relu", ("aten::relu",), "b !s -> b s")])
    assert str(compare(found(aten.relu, "f(4, 6)"), whole)).endswith(
        "stricter: it wants whole what is independent, self dim 1"
    )
    assert compare(found(aten.exp, "f(4, 6)"), whole) is None


@pytest.mark.parametrize(
    ("target", "text", "said"),
    [
        (aten.add_, None, "aten::add_ writes to its arguments"),
        (aten.dropout, "f(4, 6), 0.5, True", "aten::dropout gives other results when it is run again"),
        (aten.linear, "f(4, 6), f(8, 5)", "aten::linear does not take these arguments: RuntimeError"),
        (aten.zeros, "[4, 6]", "aten::zeros is given no tensor"),
        (aten.item, "f(1)", "aten::item gives more than tensors"),
        (aten.upsample_nearest2d, None, "aten::upsample_nearest2d takes none of the arguments tried"),
        (torch.relu, "f(4, 6)", "aten::relu is not an operator of torch.ops"),
        (aten.stack, f"[{', '.join(['f(2, 2, 2, 2)'] * 6)}]", "too many dimensions of one size"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_tried_is_said_in_one_line(target: Any, text: str | None, said: str) -> None:
    with pytest.raises(SampleError) as caught:
        found(target, text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_are_read_and_not_run() -> None:
    args, kwargs = parse_call(
        "f(4, 6), [i(2, below=5), b(3)], c(2), (1, -2.5), dim=-1, dtype=torch.float32, mode='max'"
    )
    assert args == (
        TensorSpec("f", (4, 6)),
        [TensorSpec("i", (2,), 5), TensorSpec("b", (3,))],
        TensorSpec("c", (2,)),
        (1, -2.5),
    )
    assert kwargs == {"dim": -1, "dtype": torch.float32, "mode": "max"}
    assert parse_call("f()")[0][0].shape == ()


@pytest.mark.parametrize(
    "text", ["__import__('os')", "f(4", "f(x)", "f(0)", "i(4, under=2)", "torch.load", "x", "f(2)) + (f(3)", "open"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(SampleError, match="arguments"):
        parse_call(text)


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["spmd", *argv])
    return status, *capsys.readouterr()


def test_the_command_proposes_a_rule_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, "discover", "linear", "--layouts", "rules.layouts:LAYOUTS")
    assert status == 0
    assert out.startswith("aten::linear  n... a, b a, +b? -> n... b\n")
    assert out.endswith("it says the same\n")
    status, out, _ = command(capsys, "discover", "aten::sum.dim_IntList", "--args", "f(4, 6), [0]", "--json")
    assert status == 0
    assert json.loads(out)["notation"] == "a n... -> n..."


@pytest.mark.parametrize(
    ("index_map", "why"),
    [
        (
            "a b -> a b",
            "does not fit its layout rule mine.square, a b -> a b: that has other ranks or sizes, or leaves",
        ),
        (lambda call: None, "layout rule mine.square says nothing of this call of aten::square: its function returned"),
    ],
    ids=["notation", "function"],
)
def test_a_rule_that_says_nothing_of_a_call_is_named_with_the_reason(index_map: Any, why: str) -> None:
    found = discover(aten.square, *parse_call("f(4, 5, 6)"))
    known = compare(found, LayoutRules([LayoutRule("mine.square", ("aten::square",), index_map)]))
    assert known is not None
    assert (known.wrong, known.stricter) == ((), ())
    assert "registered as mine.square: " in str(known)
    assert f"\n  it says nothing of this call: {'aten::square ' * why.startswith('does')}{why}" in str(known)
    assert compare(found, LayoutRules([])) is None


def test_a_registered_rule_of_a_call_without_a_fake_value_is_named() -> None:
    found = discover(aten.nonzero, *parse_call("f(4, 6)"))
    known = compare(found, LayoutRules([LayoutRule("mine.nonzero", ("aten::nonzero",), lambda call: None)]))
    assert known is not None
    assert "says nothing of this call: it has no fake value: " in str(known)


WRONG = """
import torch
from fxrewrite.spmd import LayoutRule, LayoutRules

RULES = LayoutRules([LayoutRule("mine.tril", ("aten::tril",), "b... -> b...")])


@torch.library.custom_op("fxrewrite_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""


def test_the_command_ends_with_1_for_a_false_rule_and_2_for_a_mistake(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "wrong_layouts.py"
    file.write_text(WRONG)
    layouts = ["--layouts", f"{file}:RULES"]
    status, out, _ = command(capsys, "discover", "tril", "--args", "f(4, 6)", *layouts)
    assert (status, out.splitlines()[-1]) == (1, "  WRONG: it shards self dim 0, self dim 1")
    status, out, _ = command(capsys, "discover", f"{file}:twice", *layouts)
    assert (status, out.splitlines()[0]) == (0, "fxrewrite_test::twice  n... -> n...")
    assert "note: gradients were not compared: RuntimeError: Trying to backward through" in out
    assert out.endswith("its operator has no registered rule\n")
    for argv, said in [
        (["discover", "no_such_operator"], "no_such_operator is not an operator of torch"),
        (["discover", "relu", "--args", "f(x)"], "f(x) is not a tensor"),
        (["discover", "relu", "--layouts", f"{file}:twice"], "expected LayoutRules"),
        (["table", "--update", str(file)], "<!-- layout rules -->"),
    ]:
        status, _, err = command(capsys, *argv)
        assert (status, said in err) == (2, True), err


SESSIONS = re.findall(
    r"^```console\n\$ fxrewrite spmd (.*?)\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize(("line", "expected"), SESSIONS, ids=[line for line, _ in SESSIONS])
def test_the_sessions_of_the_document(capsys: pytest.CaptureFixture[str], line: str, expected: str) -> None:
    """`...` on a line of its own stands for anything."""
    _, out, _ = command(capsys, *shlex.split(line), "--layouts", "rules.layouts:LAYOUTS")
    assert re.fullmatch(".*?".join(map(re.escape, expected.split("  ...\n"))), out, re.DOTALL), out


def test_layouts_of_installed_packages_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fxrewrite.spmd.layouts.registered.entry_points", lambda group: [])
    assert "no installed package ships layout rules (fxrewrite.layouts)" in command(capsys, "table")[2]
    entries = [EntryPoint("aten", "rules.layouts:LAYOUTS", "fxrewrite.layouts")]
    monkeypatch.setattr("fxrewrite.spmd.layouts.registered.entry_points", lambda group: entries)
    assert command(capsys, "table")[1] == f"{layout_table(LAYOUTS)}\n"
    entries.append(EntryPoint("broken", "absent:RULES", "fxrewrite.layouts"))
    with pytest.warns(RegistryWarning, match=r"left out: layout rule set 'broken' .*\(absent:RULES\) is broken"):
        assert command(capsys, "table")[1] == f"{layout_table(LAYOUTS)}\n"


def test_a_table_replaces_the_one_in_a_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rules = LayoutRules(
        [LayoutRule("mine.a", ("aten::abs", "_c10d_functional::wait_tensor"), "b !s -> b s", move_to=("b",))]
    )
    of_ops = "`_c10d_functional::wait_tensor`, `abs`"
    assert layout_table(rules).splitlines()[-1] == f"| `mine.a` | b !s -> b s | moved to b, else gathered | {of_ops} |"
    document = "before\n<!-- layout rules -->\nold\n<!-- end of layout rules -->\nafter\n"
    assert with_table(document, rules) == document.replace("old", layout_table(rules))
    file = tmp_path / "rules.md"
    file.write_text(document)
    assert command(capsys, "table", "--update", str(file), "--layouts", "rules.layouts:LAYOUTS")[0] == 0
    assert file.read_text() == with_table(document, LAYOUTS)


def test_the_table_of_the_document_is_the_one_of_the_rules() -> None:
    text = DOCUMENT.read_text()
    assert text == with_table(text, LAYOUTS), (
        "run `fxrewrite spmd table --layouts rules.layouts:LAYOUTS --update docs/layouts.md`"
    )
