"""What a program is reported to send over the axes of a plan."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from fxrewrite.backends import normalized
from fxrewrite.spmd import collectives_of
from fxrewrite.testing import fake_mesh
from tests.dynamo import caught


def test_a_collective_of_the_models_own_is_none_of_the_plans() -> None:
    with fake_mesh((2,), ("sp",)) as mesh:
        group = mesh.get_group("sp")

        def mean(x: Tensor) -> Tensor:
            return collectives.all_reduce(x, "sum", group).mean()

        gm, _ = caught(mean, x=torch.ones(4))
        assert collectives_of(normalized(gm), {"sp": 2}, trains=True) == []
