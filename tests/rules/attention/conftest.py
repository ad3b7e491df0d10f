"""Fixtures of tests of attention."""

from __future__ import annotations

import pytest

from rules.attention import blocks


@pytest.fixture
def three_rows_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MOST_ROWS", 3)
    monkeypatch.setattr(blocks, "_COLUMNS", 1)
