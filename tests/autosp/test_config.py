"""A setting that is none, by name or value, is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autosp_rules import AutoSPConfig, AutoSPError, autosp
from fxrewrite.testing import fake_mesh

NO_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"atention": "ring"}, "atention is no setting; did you mean 'attention'?"),
    "value": (
        {"attention": "rign"},
        "attention='rign': it should be 'auto', 'ulysses', 'gather_kv', 'ring' or 'ring_ulysses'; did you mean 'ring'?",
    ),
    "either": (
        {"checkpoint": "ful"},
        "checkpoint='ful': it should be 'auto', 'none', 'attention' or 'full', or it should be a valid integer; "
        "did you mean 'full'?",
    ),
    "range": ({"loss_tile": 0}, "loss_tile=0: it should be greater than 0"),
    "together": (
        {"overlap": True, "inner": "aot_eager"},
        "overlap=True reorders what inductor compiles, and the inner backend is 'aot_eager'; leave overlap out, or "
        "leave inner out",
    ),
}


@pytest.mark.parametrize("name", NO_SETTINGS)
def test_what_is_no_setting_is_one_sentence(name: str) -> None:
    options, sentence = NO_SETTINGS[name]
    for made in (autosp, AutoSPConfig):
        with pytest.raises(AutoSPError) as error:
            made(**options)
        assert str(error.value) == f"autosp: {sentence}"


def test_mode_and_options_of_torch_compile_reach_the_inner_backend() -> None:
    given: list[dict[str, Any]] = []

    def inner(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        given.append(options)
        return gm.forward

    with fake_mesh((2,), ("sp",)):
        for options in ({"mode": "max-autotune"}, {"options": {"max_autotune": True}}):
            torch._dynamo.reset()
            torch.compile(torch.nn.Embedding(8, 2), backend=autosp(inner), **options)(
                torch.zeros(1, 4, dtype=torch.int64)
            )
    assert given == [{"mode": "max-autotune"}, {"options": {"max_autotune": True}}]
