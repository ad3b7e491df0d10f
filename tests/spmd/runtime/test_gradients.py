"""Gradients that are changed on their way out of a program."""

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it

from fxrewrite.spmd import axis_of, change_gradients
from fxrewrite.testing import fake_mesh


def test_a_sparse_gradient_stays_sparse_unless_it_is_summed() -> None:
    ids, weight = torch.tensor([[1, 3], [3, 0]]), torch.ones(5, 2, requires_grad=True)
    expected = torch.bincount(ids.flatten(), minlength=5).unsqueeze(1).expand(5, 2) * 0.5
    with fake_mesh((2,), ("sp",)) as mesh:
        for axis in (None, axis_of(mesh, "sp")):
            weight.grad = None
            (read,) = change_gradients([weight], 0.5, axis)
            F.embedding(ids, read, sparse=True).sum().backward()
            assert weight.grad is not None
            assert weight.grad.is_sparse == (axis is None)
            assert torch.equal(weight.grad.to_dense(), expected)
