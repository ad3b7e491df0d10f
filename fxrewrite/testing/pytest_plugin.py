"""Fixtures for tests of graph transforms. Every pytest run of the environment loads this, so it imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["fake_mesh", "fx_snapshot"]


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
