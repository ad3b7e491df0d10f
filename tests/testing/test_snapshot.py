"""A graph is compared by its canonical text, one file a stage, and a failure names the first line and its rule."""

from pathlib import Path

import pytest

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
