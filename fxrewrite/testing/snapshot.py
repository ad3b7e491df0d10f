"""Snapshots of graphs: one `.fx.txt` file of canonical text for each named stage."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from torch import fx

from fxrewrite.graph.text import GraphWriter
from fxrewrite.report import Report

__all__ = ["FxTextExtension"]


class FxTextExtension(SingleFileSnapshotExtension):
    """Compares a GraphModule by its canonical text, a report without its times, anything else by `str()`; a failure
    names the rule behind it.
    """

    file_extension = "fx.txt"
    _write_mode = WriteMode.TEXT

    def serialize(self, data: Any, **_: Any) -> str:
        written = list(GraphWriter(data).lines()) if isinstance(data, fx.GraphModule) else []
        text = data.text(times=False) if isinstance(data, Report) else str(data)
        lines = [line for _, line in written] if written else text.splitlines()
        self._makers = {
            i: node.meta["fxrewrite"] for i, (node, _) in enumerate(written) if node and "fxrewrite" in node.meta
        }
        return "\n".join(lines) + "\n"

    def diff_lines(self, serialized_data: Any, snapshot_data: Any) -> Iterator[str]:
        got, expected = str(serialized_data).splitlines(), str(snapshot_data).splitlines()
        for i, (now, was) in enumerate(zip_longest(got, expected, fillvalue="nothing")):
            if now != was:
                rules = ", ".join(self._makers.get(i, ()))
                yield f"first difference, line {i + 1}{f', made by {rules}' if rules else ''}: {now.strip()}"
                yield f"  the snapshot has: {was.strip()}"
                break
        yield from super().diff_lines(serialized_data, snapshot_data)
