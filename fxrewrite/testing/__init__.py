"""Snapshots of graphs, fake meshes and simulated ranks, for tests of rules. Imports neither torch nor syrupy."""

from typing import TYPE_CHECKING

from fxrewrite.lazy import lazy_package

if TYPE_CHECKING:
    from fxrewrite.testing.fake_mesh import fake_mesh
    from fxrewrite.testing.ranks import RankRun, run_on_ranks
    from fxrewrite.testing.recorder import Recorder, recorded
    from fxrewrite.testing.snapshot import FxTextExtension

__all__ = ["FxTextExtension", "RankRun", "Recorder", "fake_mesh", "recorded", "run_on_ranks"]

lazy_package(
    __name__,
    {
        "FxTextExtension": "fxrewrite.testing.snapshot",
        "RankRun": "fxrewrite.testing.ranks",
        "Recorder": "fxrewrite.testing.recorder",
        "fake_mesh": "fxrewrite.testing.fake_mesh",
        "recorded": "fxrewrite.testing.recorder",
        "run_on_ranks": "fxrewrite.testing.ranks",
    },
)
