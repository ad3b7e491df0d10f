"""A graph is compared by its canonical text, one file a stage, and a failure names the first line and its rule."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxrewrite.testing.snapshot import FxTextExtension

pytest_plugins = ["pytester"]

TEST = """
import torch
from torch import fx


def graph(*targets):
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target in targets:
        value = graph.call_function(target, (value,))
        if target is torch.exp:
            value.meta["fxrewrite"] = ("a.use_exp",)
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_stages(fx_snapshot):
    assert graph(torch.relu, torch.{after}) == fx_snapshot(name="after")
    assert {{"sp": 4}} == fx_snapshot(name="report")
"""


def test_a_snapshot_is_compared_by_its_text_and_must_be_used(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One project through its life."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # an inner run is no worker of the outer one

    def run(*options: str) -> pytest.RunResult:
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)

    pytester.makepyfile(test_rule=TEST.format(after="sin"))
    assert run("--snapshot-update").ret == 0
    folder = Path(pytester.path) / "__snapshots__" / "test_rule"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "test_stages[after].fx.txt": "%x = input\n%0 = torch.relu(%x)\n%1 = torch.sin(%0)\nreturn (%1,)\n",
        "test_stages[report].fx.txt": "{'sp': 4}\n",
    }
    assert run().ret == 0

    pytester.makepyfile(test_rule=TEST.format(after="exp"))
    differs = run()
    assert differs.ret == 1
    differs.stdout.fnmatch_lines(
        [
            "*first difference, line 3, made by a.use_exp: %1 = torch.exp(%0)",
            "*the snapshot has: %1 = torch.sin(%0)",
        ]
    )

    pytester.makepyfile(test_rule=TEST.format(after="sin").rsplit("\n", 2)[0])
    unused = run()
    assert unused.ret == 1
    unused.stdout.fnmatch_lines(["*1 snapshot unused*"])


class _Text(FxTextExtension):
    def __init__(self) -> None:
        """Needs no session of syrupy to write text."""


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        return self.up(x)


def test_an_exported_program_and_a_graph_are_canonical_text_as_well() -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch's own export
        program = torch.export.export(Counts(), (torch.rand(5, 3),), dynamic_shapes=({0: torch.export.Dim("rows")},))
        program = program.run_decompositions({})
    assert _Text().serialize(program) == (
        "%p_up_weight: f32[4, 3] = input\n"
        "%p_up_bias: f32[4] = input\n"
        "%b_calls: f32[] = input\n"
        "%x: f32[s0, 3] = input\n"
        "%0: f32[] = aten.add.Tensor(%b_calls, 1)\n"
        "%1: f32[s0, 4] = aten.linear(%x, %p_up_weight, %p_up_bias)\n"
        "return (%0, %1)\n"
        "%p_up_weight is up.weight\n"
        "%p_up_bias is up.bias\n"
        "%b_calls is calls\n"
        "output 0 is written to calls\n"
    )
    gm = fx.symbolic_trace(nn.ReLU())
    assert _Text().serialize(gm.graph) == _Text().serialize(gm)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "this NoneType: it is None, as what a pass returns that changes its graph in place"),
        ([fx.symbolic_trace(nn.ReLU())], "this list: a list shows the names of the graphs in it alone; compare each"),
        ({"a": fx.Graph()}, "this dict: a dict shows"),
        (object(), "this object: its text has an address, at 0x"),
    ],
)
def test_what_has_no_text_that_says_something_is_an_error(data: Any, why: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"fx_snapshot cannot compare {why}")):
        _Text().serialize(data)


def test_a_failure_shows_why_something_cannot_be_compared(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_none="def test_none(fx_snapshot):\n    assert None == fx_snapshot\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--snapshot-update")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*fx_snapshot cannot compare this NoneType*"])
