"""Fixtures for tests of graph transforms. Every pytest run of the environment loads this, so it imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion
    from torch.distributed.device_mesh import DeviceMesh

    from fxrewrite.rule import Rule

__all__ = ["fake_mesh", "fx_snapshot", "pytest_generate_tests"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `registered_rule` runs once for every rule that an installed package registers.

    Its ids are those of the rules, after the name of the set where two sets have different rules of one id. An entry
    point that is broken is an error of the collection, and no rule at all is a test that is skipped.
    """
    if "registered_rule" not in metafunc.fixturenames:
        return
    from fxrewrite.registry import registered

    found: dict[str, dict[str, Rule]] = {}
    for name, rules in registered().items():
        for rule in rules.rules():
            of_one_id = found.setdefault(rule.id, {})
            if not any(rule is other for other in of_one_id.values()):
                of_one_id[name] = rule
    named = {
        f"{name}/{rule_id}" if len(by_set) > 1 else rule_id: rule
        for rule_id, by_set in found.items()
        for name, rule in by_set.items()
    }
    metafunc.parametrize("registered_rule", list(named.values()), ids=list(named))


@pytest.fixture
def fx_snapshot(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    """`assert gm == fx_snapshot(name="after")` compares with `__snapshots__/<file>/<test>[after].fx.txt`."""
    from fxrewrite.testing.snapshot import FxTextExtension

    return snapshot.use_extension(FxTextExtension)


@pytest.fixture
def fake_mesh() -> Iterator[Callable[..., DeviceMesh]]:
    """`fake_mesh((2, 4), ("dp", "sp"))` is a mesh over torch's fake process group, destroyed after the test."""
    from fxrewrite.testing.fake_mesh import fake_mesh as enter

    with ExitStack() as stack:

        def make(shape: Sequence[int], names: Sequence[str], *, rank: int = 0) -> DeviceMesh:
            return stack.enter_context(enter(shape, names, rank=rank))

        yield make
