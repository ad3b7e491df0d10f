"""In-place operations in functional form: the same numbers and gradients, bit for bit, or still in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from fxrewrite.capture import normalize
from fxrewrite.graph import source_line
from fxrewrite.ops import mutated
from tests.dynamo import caught

Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def normal_and_inputs(body: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[Any, Any, list[Any]]:
    """Dynamo's graph of `body`, its normal form, and the inputs of both."""
    graphs, given = caught(body, *inputs, inside=lambda gm: (gm, normalize(gm)), dynamic=dynamic)
    return *graphs, given


def outcome(gm: fx.GraphModule, inputs: list[Any]) -> list[torch.Tensor]:
    """Outputs, gradients of their sum, and what the inputs hold afterwards."""
    torch.manual_seed(0)
    fresh = [v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v for v in inputs]
    outputs = [v for v in gm(*fresh) if isinstance(v, torch.Tensor)]
    leaves = [v for v in fresh if isinstance(v, torch.Tensor) and v.requires_grad]
    followed = [v for v in outputs if v.requires_grad]
    ones = [torch.linspace(1, 2, v.numel(), dtype=v.dtype).view_as(v) for v in followed]
    grads = torch.autograd.grad(followed, leaves, ones, materialize_grads=True) if leaves else ()
    held = [v.detach() for v in fresh if isinstance(v, torch.Tensor)]
    return [*(v.detach() for v in outputs), *grads, *held]


def assert_equal(gm: fx.GraphModule, normal: fx.GraphModule, inputs: list[Any], *, rounding: float = 0.0) -> None:
    for a, b in zip(outcome(gm, inputs), outcome(normal, inputs), strict=True):
        torch.testing.assert_close(b, a, rtol=rounding, atol=rounding, equal_nan=True)


def writes(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if mutated(node)]


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(2)]
    return made[0].requires_grad_(), made[1].requires_grad_()


def cut_and_joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made[..., :2] = x[..., 1:3]
    made[..., 2:] = y[..., :1]  # broadcasts
    return made


def read_through_another_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * 2
    row, turned = h[1], h.t()
    h[:, 3].mul_(y[:, 0])
    row.add_(1)
    return turned * y.t()


def through_what_a_write_returns(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * 2
    z = h.mul_(y)
    h.add_(1)
    return z.sub_(y) + h


def split_parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = torch.arange(24, dtype=x.dtype).view(4, 6) * 0.1  # autograd lets no part of what it follows be written
    a, b, c = h.split([1, 2, 3], 1)
    b.mul_(a)
    c.copy_(y.detach()[:, 3:])
    b.add_(a)
    return h * x


def unbound_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = torch.arange(24, dtype=x.dtype).view(4, 6) * 0.1
    first, *_, last = h.unbind(0)
    last.add_(first)
    first.zero_()
    return h * y


def reshaped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * 1
    h.view(2, 2, 6).permute(2, 0, 1)[1].unsqueeze(0).mul_(y[:2, :2])
    h.narrow(1, 2, 3).transpose(0, 1).add_(1)
    h.flatten().unflatten(0, (8, 3)).squeeze()[0].fill_(3)
    return h


def diagonal(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * 1
    h.diagonal(1).copy_(y[0, :4])
    return h


def by_index(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * 1
    h[h > 0] = 0.5
    h[torch.tensor([0, 2])] = y[:2]
    h.masked_fill_(y < 0, -1.0)
    h.scatter_(1, torch.tensor([[0], [1], [2], [3]]), y[:, :1])
    h.index_add_(0, torch.tensor([0, 0]), y[:2])
    return h


def of_another_dtype(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x.float()
    h.add_(y)
    h[0].copy_(y[0])
    counts = torch.zeros(4, dtype=torch.int64)
    counts.add_(2)
    counts |= 1
    return h * counts[:, None]


def copies_stay_apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h, made = x * 1, torch.empty_like(x)
    made.copy_(h)
    h.mul_(y)
    return made + h


def random_numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    noise = torch.empty_like(x)
    noise.uniform_(-1, 1)
    mask = torch.empty_like(x).bernoulli_(0.5)
    return x * mask + y * noise + torch.empty_like(x).normal_() + torch.zeros_like(x).exponential_()


def unseen_where_nothing_is_differentiated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        table = torch.arange(6, dtype=x.dtype)
        table.mul_(0.5)
        table[0] = 3
    table.add_(y[0])
    return x * table


def of_an_activation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = nn.functional.relu(x + y, inplace=True)
    return h + nn.functional.dropout(x * 1, 0.5, training=True, inplace=True)


def of_complex_numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    modes = torch.fft.fft(x)
    made = torch.zeros_like(modes)
    made[..., -2:] = modes[..., :2] * y[..., :2]
    made[0] = modes[1].conj()
    made[1, 2].mul_(2j)
    return torch.fft.ifft(made).real


FUNCTIONAL: list[Body] = [
    cut_and_joined,
    read_through_another_view,
    through_what_a_write_returns,
    split_parts,
    unbound_rows,
    reshaped,
    diagonal,
    by_index,
    of_another_dtype,
    copies_stay_apart,
    random_numbers,
    unseen_where_nothing_is_differentiated,
    of_an_activation,
    of_complex_numbers,
]


@pytest.mark.parametrize("body", FUNCTIONAL, ids=lambda body: body.__name__)
def test_no_write_is_left_and_nothing_changes(body: Body) -> None:
    gm, normal, inputs = normal_and_inputs(body, *weights())
    assert writes(normal) == []
    assert_equal(gm, normal, inputs)


def behind_no_grad(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * y
    with torch.no_grad():
        h.mul_(2)
    return h * 3


def behind_detach(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * 3
    h.detach()[0].mul_(5)
    return h + y


def a_view_that_autograd_does_not_follow(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = x * 3
    seen = h.detach()
    h.mul_(y.detach())
    return h + seen.mean()


def over_repeated_memory(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = torch.view_as_complex((x * 1).view(4, 3, 2))
    h.mul_(2.0)
    return torch.view_as_real(h) + y.view(4, 3, 2)


IN_PLACE: list[Body] = [behind_no_grad, behind_detach, a_view_that_autograd_does_not_follow, over_repeated_memory]


@pytest.mark.parametrize("body", IN_PLACE, ids=lambda body: body.__name__)
def test_writes_without_a_functional_form_stay(body: Body) -> None:
    gm, normal, inputs = normal_and_inputs(body, *weights())
    assert writes(normal) == ["aten.mul_.Tensor"]
    assert_equal(gm, normal, inputs)


def test_inputs_are_still_written() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Buffer(torch.zeros(4))

        def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            self.seen[1:].add_(x.detach().sum())
            out[0].copy_(x[0].detach())
            return x * self.seen[2]

    gm, normal, inputs = normal_and_inputs(Counts(), torch.ones(4, requires_grad=True), torch.zeros(4))
    assert writes(normal) == ["aten.add_.Tensor", "aten.copy_.default"]
    assert_equal(gm, normal, inputs)
    normal(*inputs)
    buffer = next(v for v in inputs if v.shape == (4,) and not v.requires_grad)
    assert buffer.abs().sum() > 0


def test_running_statistics_are_still_written() -> None:
    gm, normal, inputs = normal_and_inputs(nn.BatchNorm1d(6), torch.randn(4, 6))
    assert_equal(gm, normal, inputs)
    before = [v.detach().clone() for v in inputs]
    normal(*inputs)
    assert sum(not torch.equal(a, b) for a, b in zip(before, inputs, strict=True)) == 3  # mean, variance, batches


def test_lengths_stay_symbolic() -> None:
    gm, normal, inputs = normal_and_inputs(cut_and_joined, *weights(), dynamic=True)
    assert writes(normal) == []
    assert_equal(gm, normal, inputs)
    assert any(
        isinstance(size, torch.SymInt)
        for n in normal.graph.nodes
        for size in getattr(n.meta["val"], "shape", ())
        if n.op == "placeholder"
    )


def test_source_lines_and_checkpoints_are_kept() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return checkpoint(read_through_another_view, x, y, use_reentrant=False)

    gm, normal, inputs = normal_and_inputs(body, *weights())
    assert_equal(gm, normal, inputs)
    (scatter, *_) = normal.graph.find_nodes(op="call_function", target=torch.ops.aten.select_scatter.default)
    assert source_line(scatter).startswith("test_functionalize.py:")
    assert scatter.meta["recompute"] == CheckpointPolicy.PREFER_RECOMPUTE
    assert "ac_graph_id" in scatter.meta


Results = tuple[torch.Tensor, ...]


def value_and_written_view(x: torch.Tensor, y: torch.Tensor) -> Results:
    h = x * y
    row = h[1]
    row.add_(1)
    return h, row


def views_of_a_written_view(x: torch.Tensor, y: torch.Tensor) -> Results:
    h = x * y
    left, whole = h[:, :2], h.t()
    left.mul_(2)
    late = left.t()[0]
    return late, whole, x * 1


def what_a_write_returns(x: torch.Tensor, y: torch.Tensor) -> Results:
    h = x * y
    return h.view(-1)[2:].add_(1), h.unsqueeze(0), h


def with_a_view_without_gradients(x: torch.Tensor, y: torch.Tensor) -> Results:
    h = x * y
    h[0].add_(1)
    return h[2:], h.detach()


SHARING = [value_and_written_view, views_of_a_written_view, what_a_write_returns, with_a_view_without_gradients]


@pytest.mark.parametrize("body", SHARING, ids=lambda body: body.__name__)
def test_results_that_share_memory_still_do(body: Callable[..., Results]) -> None:
    gm, normal, inputs = normal_and_inputs(body, *weights())
    assert writes(normal) == []
    assert_equal(gm, normal, inputs)
    assert_written_alike(gm, normal, inputs)


def test_results_that_share_memory_need_gradients_where_they_did() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> Results:
        h = x * y
        h.add_(1)
        with torch.no_grad():
            hidden = h[1]
        return h, hidden

    gm, normal, inputs = normal_and_inputs(body, *weights())
    assert writes(normal) == []
    assert_written_alike(gm, normal, inputs)


def assert_written_alike(gm: fx.GraphModule, normal: fx.GraphModule, inputs: list[Any]) -> None:
    """What the caller writes to one result changes the same others."""
    both = [[v for v in module(*inputs) if isinstance(v, torch.Tensor)] for module in (gm, normal)]
    assert [v.requires_grad for v in both[0]] == [v.requires_grad for v in both[1]]
    for index in range(len(both[0])):
        for outputs in both:
            outputs[index].detach().mul_(3.0)
        torch.testing.assert_close(both[1], both[0], rtol=0, atol=0)


def _counted(v: torch.Tensor) -> torch.Tensor:
    return torch.arange(v.numel(), dtype=v.dtype)


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda v: v[v.shape[0] // 2] if v.dim() > 1 else v[:],
    lambda v: v[..., 1:] if v.shape[-1] > 1 else v,
    lambda v: v.transpose(0, -1),
    lambda v: v.unsqueeze(-1),
    lambda v: v.squeeze(),
    lambda v: v.narrow(0, 0, 1) if v.dim() else v,
    lambda v: v.flatten() if v.is_contiguous() else v,
]
WRITES: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda v, y: v.mul_(y),
    lambda v, y: v.copy_(y),
    lambda v, y: v.copy_((y + _counted(v)).reshape(v.shape[::-1]).permute(*reversed(range(v.dim())))),
    lambda v, y: v.copy_(y + _counted(v)[: v.shape[-1]] if v.dim() else y),
    lambda v, y: v.add_(v.sum() + y),
    lambda v, y: v.fill_(0.5),
    lambda v, y: v.masked_fill_(v > y, 2.0),
]


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_of_views_and_writes(seed: int) -> None:
    choice = random.Random(seed)
    steps = [(choice.random(), choice.randrange(35), choice.random() < 0.55) for _ in range(choice.randrange(6, 14))]

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        alive, scalar = [x * 1, y * 1], y.mean()
        for which, kind, is_view in steps:
            chosen = alive[int(which * len(alive))]
            if is_view:
                alive.append(VIEWS[kind % len(VIEWS)](chosen))
            else:
                WRITES[kind % len(WRITES)](chosen, scalar)
        return tuple(v * 1 for v in alive)

    gm, normal, inputs = normal_and_inputs(program, *weights())
    assert writes(normal) == []
    assert_equal(gm, normal, inputs, rounding=1e-12)  # gradients of views may be summed in another order
