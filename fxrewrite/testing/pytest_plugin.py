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

_OPTION = "fxrewrite_distribution"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Whose rules `registered_rule` runs over: `--fxrewrite-distribution NAME`, or the setting of the same name."""
    parser.addini(_OPTION, "distributions whose registered rules a test with `registered_rule` runs over", type="args")
    parser.getgroup("fxrewrite").addoption(
        f"--{_OPTION.replace('_', '-')}",
        action="append",
        metavar="NAME",
        help="a distribution whose registered rules a test with `registered_rule` runs over; can be repeated",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `registered_rule` runs once for every rule that the project's own distribution registers.

    Which that is says `fxrewrite_distribution = ["my-package"]` under `[tool.pytest]`. Ids of tests are those of the
    rules, after the name of the set where two sets have different rules of one id. A broken entry point of the
    distribution is an error of the collection; those of others are not looked at.
    """
    if "registered_rule" not in metafunc.fixturenames:
        return
    from fxrewrite.registry import RegistryError, registered

    distributions = metafunc.config.getoption(_OPTION) or metafunc.config.getini(_OPTION)
    if not distributions:
        raise RegistryError(
            f'registered_rule: say whose rules, {_OPTION} = ["my-package"] under [tool.pytest] of pyproject.toml or '
            f"--{_OPTION.replace('_', '-')} my-package"
        )
    sets = {name: rules for own in distributions for name, rules in registered().of(own).items()}
    found: dict[str, dict[str, Rule]] = {}
    for name, rules in sets.items():
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
