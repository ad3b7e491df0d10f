"""What a ring holds while it runs, and in what dtype it sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autosp_rules.attention.ring_kernel import ring_attention, ring_attention_backward
from fxrewrite.ops import bodies_of_communicating
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh
from rules.attention import blocks, by_rows

HEADS, ROWS, DEPTH, RANKS = 2, 64, 4, 2


class _Seen(TorchDispatchMode):
    """Every tensor that is made, also in the bodies of operators of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[int, torch.dtype]] = []
        opaque = (by_rows.attention_by_rows, by_rows.attention_by_rows_backward)
        self._bodies: dict[Any, Callable[..., Any]] = {
            **bodies_of_communicating(),
            **{operator._opoverload: operator._init_fn for operator in opaque},
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._bodies:
            with self:
                made = self._bodies[func](*args, **(kwargs or {}))
        else:
            made = func(*args, **(kwargs or {}))
        self.tensors += [(x.numel(), x.dtype) for x in _tensors(made)]
        return made


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    for x in made if isinstance(made, (tuple, list)) else [made]:
        if isinstance(x, torch.Tensor):
            yield x


@pytest.mark.parametrize(("width", "softcap"), [(DEPTH, 0.0), (6, 0.0), (DEPTH, 1.5)])
def test_without_a_mask_no_scores_of_all_rows_are_held(
    width: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel for the CPU (a width of 4), and with products of matrices, as on other devices."""
    monkeypatch.setattr(blocks, "_MOST_ENTRIES", 8 * HEADS * ROWS)
    q, k, v = (torch.randn(1, HEADS, ROWS, n, requires_grad=True) for n in (DEPTH, DEPTH, width))
    with fake_mesh((RANKS,), ("sp",)) as mesh, _Seen() as seen:
        place = (0, RANKS, 1, False, axis_of(mesh, "sp").group)
        out, _ = ring_attention(q, k, v, [], "", 0.5, softcap, None, *place)
        out.sum().backward()
    assert max(numel for numel, _ in seen.tensors) <= HEADS * ROWS * (DEPTH + width)  # k and v, on their way


def test_results_have_the_strides_that_a_compiler_expects() -> None:
    """Inductor compiles what reads a result for the strides of the fake one, also where heads follow rows in memory."""
    q, k, v = (torch.randn(1, ROWS, HEADS, DEPTH).transpose(1, 2).requires_grad_() for _ in range(3))
    with fake_mesh((1,), ("sp",)) as mesh:
        place = ([], "", 0.5, 0.0, None, 0, 1, 1, False, axis_of(mesh, "sp").group)
        out, lse = ring_attention(q, k, v, *place)
        given = out.detach(), q.detach(), k.detach(), v.detach(), out.detach(), lse.detach(), *place[:4], *place[5:]
        grads = ring_attention_backward(*given)
        with FakeTensorMode(allow_non_fake_inputs=True):
            expected = ring_attention(q, k, v, *place) + ring_attention_backward(*given)
    assert [x.stride() for x in (out, lse, *grads)] == [x.stride() for x in expected]
