"""A setting that is none, by name or value, is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from autosp_rules import AutoSPConfig, AutoSPError, autosp

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
}


@pytest.mark.parametrize("name", NO_SETTINGS)
def test_what_is_no_setting_is_one_sentence(name: str) -> None:
    options, sentence = NO_SETTINGS[name]
    for made in (autosp, AutoSPConfig):
        with pytest.raises(AutoSPError) as error:
            made(**options)
        assert str(error.value) == f"autosp: {sentence}"
