"""Without all attentions but the last a step keeps what it keeps with them, and computes less; the report says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from autosp_rules import AutoSPConfig, AutoSPReport
from autosp_rules.config import AttentionOption
from autosp_rules.transform import transform
from fxrewrite.ops import key
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.attention.flops import ATTENTION_KEYS
from tests.autosp.models import batch, build
from tests.autosp.one_device import captured
from tests.autosp.partition import Partition
from tests.versions import TORCH


@cache
def _captured(kind: str) -> tuple[fx.GraphModule, list[Any]]:
    return captured(build("llama_gqa"), batch("llama_gqa", kind))


@contextmanager
def _transformed(
    num_ranks: int = 2, kind: str = "plain", **how: Any
) -> Iterator[tuple[fx.GraphModule, list[Any], AutoSPReport]]:
    gm, inputs = _captured(kind)
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        program, report = transform(gm, AutoSPConfig(**how), axis_of(mesh, "sp"))
        yield program, inputs, report


@pytest.mark.parametrize(
    ("attention", "kind", "num_ranks"),
    [("ulysses", "plain", 2), ("gather_kv", "right_padding", 2), ("ring", "plain", 4)],
)
@pytest.mark.some(1)
def test_one_is_left_and_the_program_runs(attention: AttentionOption, kind: str, num_ranks: int) -> None:
    with _transformed(num_ranks, kind, attention=attention, skip_all_but_last_attention=True) as (
        program,
        given,
        report,
    ):
        run = run_on_ranks(program, given, num_ranks, backward=0)
    names = [key(node) for node in program.graph.nodes]
    assert sum(name in ATTENTION_KEYS for name in names) == 1
    assert names.count("autosp::skipped_attention") == 1
    assert names.index("autosp::skipped_attention") < next(i for i, name in enumerate(names) if name in ATTENTION_KEYS)
    assert report.lines[0].startswith("RESULTS AND GRADIENTS ARE NOT THE MODEL'S: 1 of 2 attentions compute nothing")
    assert all(outputs[0].isfinite() for outputs in run.outputs)
    assert all(grad.isfinite().all() for grad in run.gradients() if grad is not None)


@pytest.mark.parametrize("checkpoint", ["none", "attention", "full"])
@pytest.mark.some(1)
def test_it_keeps_what_the_model_keeps(checkpoint: Any) -> None:
    kept, sent = [], []
    for skip in (False, True):
        how: dict[str, Any] = {"attention": "ulysses", "skip_all_but_last_attention": skip}
        with _transformed(checkpoint=checkpoint, **how) as (program, inputs, report):
            kept.append(Partition(program, inputs).kept(r"\.layers\.0\b"))
        sent.append(report.bytes_sent)
    missing = 4 * 2 * 2 * 16 if TORCH < (2, 13) and checkpoint != "full" else 0
    assert kept[0] + missing == kept[1] > 0  # torch 2.12 says that a logsumexp of float64 is float32
    assert sent[0] == sent[1]


def test_nothing_is_skipped_unless_asked_for() -> None:
    with _transformed() as (program, _, report):
        pass
    assert not [line for line in report.lines if "NOT THE MODEL'S" in line]
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.autosp.skipped_attention.default)
