"""Snapshots of graphs, fake meshes and simulated ranks, for tests of rules. Imports neither torch nor syrupy."""

from typing import TYPE_CHECKING

from fxrewrite.lazy import lazy_package

if TYPE_CHECKING:
    from fxrewrite.testing.explain import explain_placement as explain_placement
    from fxrewrite.testing.fake_mesh import fake_mesh as fake_mesh
    from fxrewrite.testing.placements import PlacementTrial as PlacementTrial, try_placements as try_placements
    from fxrewrite.testing.ranks import RankRun as RankRun, run_on_ranks as run_on_ranks
    from fxrewrite.testing.recorder import Recorder as Recorder, recorded as recorded
    from fxrewrite.testing.seen import Seen as Seen, seen as seen
    from fxrewrite.testing.simulate import Simulated as Simulated, simulate as simulate
    from fxrewrite.testing.snapshot import FxTextExtension as FxTextExtension


lazy_package(__name__)
