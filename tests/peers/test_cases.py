"""Every case is what the table says of it, and docs/peers.md has the table."""

from __future__ import annotations

import pytest

from tests.peers.cases import Case, table, update
from tests.peers.suites import CASES, PAGE


@pytest.mark.parametrize("case", [case for case in CASES if case.check], ids=str)
def test_case(case: Case) -> None:
    assert case.check is not None
    if case.verdict != "worse":
        case.check()
        return
    try:
        case.check()
    except Exception:  # noqa: BLE001  # whatever is missing shows in its own way
        return
    pytest.fail(f"{case} does what the suite asserts: it is not worse any more")


def test_the_table_is_true() -> None:
    page = PAGE.read_text()
    assert update(page, table(CASES)) == page, "run make peers"
