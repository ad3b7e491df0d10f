"""Equal layers are done once: a further one runs next to no operator on fake values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autosp_rules import AutoSPConfig, dry_run
from fxrewrite.graph.fake_values import FakeValues
from tests.autosp.models import batch, build


def _operators_run(num_layers: int, attention: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many operators a transform runs on fake values; what is captured before does not count."""
    model, inputs = build("llama_gqa", layers=num_layers), batch("llama_gqa", "plain")
    counted = 0
    call: Callable[..., Any] = FakeValues._call

    def count(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(FakeValues, "_call", count)
        dry_run(model, inputs, num_ranks=2, config=AutoSPConfig(attention=attention))
    return counted


@pytest.mark.parametrize("attention", ["ulysses", "gather_kv", "ring"])
@pytest.mark.some(1)
def test_a_further_layer_runs_few_operators_on_fake_values(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redistributions of k and v, which are Python functions, and a number of a ring, and no operator of ATen."""
    three, four = (_operators_run(n, attention, monkeypatch) for n in (3, 4))
    assert 0 <= four - three <= {"ulysses": 0, "gather_kv": 3, "ring": 1}[attention]
