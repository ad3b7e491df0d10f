"""A fake mesh has the asked axes, is seen as one rank, and leaves no process group behind."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxrewrite.testing import fake_mesh as open_mesh


def test_the_mesh_has_its_axes_and_is_seen_as_one_rank() -> None:
    with open_mesh((2, 4), ("dp", "sp"), rank=5) as mesh:
        assert mesh.mesh_dim_names == ("dp", "sp")
        assert (mesh["dp"].size(), mesh["sp"].size()) == (2, 4)
        assert (mesh.get_local_rank("dp"), mesh.get_local_rank("sp")) == (1, 1)


def test_collectives_have_the_right_shape() -> None:
    with open_mesh((4,), ("sp",)) as mesh:
        group = mesh.get_group("sp").group_name
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(3, 2), 4, group)
        assert torch.ops._c10d_functional.wait_tensor(gathered).shape == (12, 2)


def test_the_group_is_destroyed_also_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="inside"), open_mesh((2,), ("sp",)):
        raise RuntimeError("inside")
    assert not dist.is_initialized()


def test_errors_after_it_are_written_as_before() -> None:
    hook = sys.excepthook
    with open_mesh((2,), ("sp",)):
        pass
    assert sys.excepthook is hook


def test_a_second_mesh_is_refused_and_the_first_lives_on() -> None:
    with open_mesh((2,), ("sp",)):
        with pytest.raises(ValueError, match="already initialized"), open_mesh((4,), ("sp",)):
            pass
        assert dist.get_world_size() == 2


def test_the_fixture_makes_a_mesh(fake_mesh: Any) -> None:
    assert fake_mesh((2, 2), ("dp", "sp"), rank=3).get_coordinate() == (1, 1)


def test_and_destroys_it_after_the_test() -> None:
    assert not dist.is_initialized()
