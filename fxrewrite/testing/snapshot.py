"""Snapshots of graphs: one `.fx.txt` file of canonical text for each named stage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from torch import fx
from torch.export import ExportedProgram

from fxrewrite.graph.text import GraphWriter
from fxrewrite.report import Report

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class FxTextExtension(SingleFileSnapshotExtension):
    """Compares a graph by its canonical text, an exported program with its signature, a report without its times, and
    anything else by `str()`; a failure names the rule behind it.

    What has no text that says something, or not the same text in every process, is an error.
    """

    file_extension = "fx.txt"
    _write_mode = WriteMode.TEXT

    def serialize(self, data: Any, **_: Any) -> str:
        graph = _graph_of(data)
        written = list(GraphWriter(graph).lines()) if graph is not None else []
        lines = [line for _, line in written] if written else _text(data).splitlines()
        if isinstance(data, ExportedProgram):
            lines += _signature(data)
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


def _graph_of(data: Any) -> fx.GraphModule | None:
    if isinstance(data, ExportedProgram):
        return data.graph_module
    if isinstance(data, fx.Graph):
        owner = data.owning_module
        return owner if isinstance(owner, fx.GraphModule) else fx.GraphModule(owner or torch.nn.Module(), data)
    return data if isinstance(data, fx.GraphModule) else None


def _signature(program: ExportedProgram) -> Iterator[str]:
    """What the inputs and outputs are that are not the user's: parameters and buffers, and what is written to them."""
    signature = program.graph_signature
    for name, target in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items():
        yield f"%{name} is {target}"
    for index, spec in enumerate(signature.output_specs):
        if spec.target is not None:
            yield f"output {index} is written to {spec.target}"


def _text(data: Any) -> str:
    text = data.text(times=False) if isinstance(data, Report) else str(data)
    items = list(data.values()) if isinstance(data, dict) else data if isinstance(data, (list, tuple)) else []
    if data is None:
        why = "it is None, as what a pass returns that changes its graph in place"
    elif any(isinstance(item, (fx.GraphModule, fx.Graph, ExportedProgram)) for item in items):
        why = f"a {type(data).__name__} shows the names of the graphs in it alone; compare each, with a name of its own"
    elif found := _ADDRESS.search(text):
        why = f"its text has an address,{found.group()}, which is another in each process"
    else:
        return text
    raise TypeError(f"fx_snapshot cannot compare this {type(data).__name__}: {why}")
