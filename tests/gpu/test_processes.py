"""A figure that crashes, hangs or raises loses nothing of the others, and the table begins with what failed."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.gpu.processes import Section, run_section
from tests.gpu.table import choose_mask_kernel, table

CHILD = """
import json, os, sys, time
names = ["good", "crashes", "hangs", "after", "too late"]
with open(sys.argv[1], "a") as file:
    def write(**said):
        file.write(json.dumps(said) + "\\n")
        file.flush()
    write(names=names)
    for name in names:
        if name in json.loads(sys.argv[2]):
            continue
        write(begins=name)
        if name == "crashes":
            print("no such kernel", flush=True)
            os.abort()
        if name in ("hangs", "too late"):
            time.sleep(60)
        write(figure=name, found={"seconds": 1.0, "holds": name != "after"})
"""


def test_what_is_lost() -> None:
    seen: list[int] = []
    section = run_section(
        [[sys.executable, "-S", "-c", CHILD]], 30, a_figure=2, on_change=lambda new: seen.append(len(new["figures"]))
    )
    assert section["figures"]["good"] == {"seconds": 1.0, "holds": True}
    assert section["figures"]["crashes"]["error"].startswith("the process was ended by SIGABRT\nno such kernel")
    assert section["figures"]["hangs"]["error"].startswith("stopped after 2 s, the most that a figure may take")
    assert 'File "<string>", line 17 in <module>' in section["figures"]["hangs"]["error"], "where it hung"
    assert "after" in section["figures"]
    assert section["left_out"] == []
    assert seen[0] == 1, "the first figure was written when it was there"
    found: dict[str, Any] = {"sections": {"one": section}, "sections_left_out": ["two"]}
    rows = [line.split(" | ")[:3] for line in table(found)[5:]]
    assert [row[0] for row in rows] == ["| failed"] * 3 + ["| not so", "| left out", "| ok"]


def test_what_several_children_find_is_one_section() -> None:
    def child(*names: str) -> list[str]:
        lines = [{"names": names}, *({"begins": n} for n in names), *({"figure": n, "found": {}} for n in names)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return [sys.executable, "-S", "-c", f"import sys; open(sys.argv[1], 'a').write({text!r})"]

    section = run_section([child("a", "c"), child("b"), child()], 30, a_figure=9, on_change=lambda _: None)
    assert sorted(section["figures"]) == ["a", "b", "c"]
    assert section["left_out"] == []
    assert "error" not in section, "a child may have no figure to measure"


def test_a_child_that_does_not_start_and_one_without_time() -> None:
    def run(command: str, seconds: float) -> Section:
        return run_section([[sys.executable, "-S", "-c", command]], seconds, a_figure=9, on_change=lambda _: None)

    assert run("raise SystemExit('no card')", 30)["error"] == "the process exited with status 1\nno card\n"
    assert run("", 0)["error"] == "no time was left for it"


def test_the_default_follows_from_flex_and_rows() -> None:
    fast, slow = ({"seconds": seconds, "peak": 1, "holds": True} for seconds in (1.0, 2.0))
    wrong = {**fast, "holds": False}

    def chosen(flex: dict[str, Any], rows: dict[str, Any]) -> Any:
        return choose_mask_kernel({"window, flex, x": flex, "window, rows, x": rows, "causal, sdpa, x": fast})

    assert chosen(fast, slow) == {"mask_kernel": "auto", "compared": 1, "loses": []}
    assert chosen(slow, fast)["loses"] == ["window: 2.00 x the seconds"]
    assert chosen(wrong, slow)["mask_kernel"] == chosen({"error": "x"}, slow)["mask_kernel"] == "rows"
    assert chosen(fast, {"error": "x"})["mask_kernel"] is None
