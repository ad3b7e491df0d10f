"""Sequence mixing runs sharded on another dimension: what moves, how often, how much, and that it is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from autosp_rules import AutoSPConfig, AutoSPReport
from autosp_rules.transform import transform
from fxrewrite.backends import capture
from fxrewrite.ops import fake_value
from fxrewrite.spmd import Axis
from tests.autosp.one_device import OneDevice, captured, on_ranks
from tests.spmd.propagation.test_propagate import WITHOUT_TAGS

HIDDEN, ITEM = 8, 8
"""Features of a token, and bytes of one of them."""


class Mixer(nn.Module):
    """Embedding, a function of hidden states [B, S, 8], and their mean square."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, HIDDEN, dtype=torch.float64)
        self.depthwise = nn.Parameter(torch.randn(HIDDEN, 1, 4, dtype=torch.float64))
        self.dense = nn.Parameter(torch.randn(HIDDEN, HIDDEN, 4, dtype=torch.float64))
        self.widths = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.mix = mix

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mix(self, self.embed(ids)).square().mean()


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 8


def mixed(mix: Any, num_ranks: int, *, batch: int = 2, length: int = 16) -> AutoSPReport:
    one_device = OneDevice(Mixer(mix), {"ids": ids(batch, length)})
    return one_device.check(num_ranks, WITHOUT_TAGS, rtol=1e-10).report


def sent(report: AutoSPReport) -> dict[str, tuple[int, int]]:
    """Collectives of more than the loss, forward: how many and how many bytes."""
    found = [c for c in report.collectives if c.direction == "forward" and c.kind != "all_reduce"]
    return {c.kind: (c.count, c.bytes_sent) for c in found}


def moves(count: int, num_ranks: int, *, batch: int = 2, length: int = 16) -> dict[str, tuple[int, int]]:
    """So many all-to-alls of hidden states, and nothing else."""
    return {"all_to_all": (count, count * batch * length * HIDDEN * ITEM * (num_ranks - 1) // num_ranks**2)}


def scan(m: Mixer, x: torch.Tensor) -> torch.Tensor:
    """A causal depthwise convolution, a gate, and scans from both ends."""
    y = F.silu(F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), m.depthwise, groups=HIDDEN))
    y = (y * x.transpose(1, 2).sigmoid()).cumsum(2)
    return y.flip(2).cumsum(2).transpose(1, 2)


def recurrence(m: Mixer, x: torch.Tensor) -> torch.Tensor:
    """Linear attention by a loop over time steps: 2 heads with a state of 4 x 4 each, or 4 heads with 2 x 2."""
    heads = 4 if x.shape[0] == 2 else 2
    keys = x.view(x.shape[0], x.shape[1], heads, -1)
    state = torch.zeros(x.shape[0], heads, keys.shape[3], keys.shape[3], dtype=x.dtype)
    steps = []
    for t in range(x.shape[1]):
        state = state * 0.5 + keys[:, t, :, :, None] * keys[:, t, :, None, :]
        steps.append((state @ keys[:, t, :, :, None]).squeeze(-1))
    return torch.stack(steps, 1).flatten(2)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_convolution_its_gate_and_its_scans_move_as_one(num_ranks: int) -> None:
    assert sent(mixed(scan, num_ranks)) == moves(2, num_ranks)


def test_what_joins_a_moved_value_with_one_that_moves_anyway_moves_too() -> None:
    def residual(m: Mixer, x: torch.Tensor) -> torch.Tensor:
        return scan(m, x) + x * scan(m, x).tanh()

    assert sent(mixed(residual, 4)) == moves(2, 4)


def test_a_loop_over_time_steps_moves_to_heads() -> None:
    assert sent(mixed(recurrence, 4, length=8)) == moves(2, 4, length=8)


def test_the_dimension_that_stays_independent_is_taken() -> None:
    """Heads and head features both divide; products contract the features, so heads send less."""
    assert sent(mixed(recurrence, 2, batch=1, length=8)) == moves(2, 2, batch=1, length=8)


def test_what_travels_is_narrow() -> None:
    """Between the scans a value is three times as wide; it moves before and behind that."""

    def widened(m: Mixer, x: torch.Tensor) -> torch.Tensor:
        return (x.exp().unsqueeze(-1) * m.widths).cumsum(1).flip(1).cumsum(1).sum(-1)

    assert sent(mixed(widened, 4)) == moves(2, 4)


def test_a_dense_convolution_reads_a_halo() -> None:
    def dense(m: Mixer, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), m.dense).transpose(1, 2)

    assert sent(mixed(dense, 4)) == {"halo": (1, 2 * 3 * HIDDEN * ITEM)}


def test_a_transposed_convolution_moves_to_the_batch_or_is_gathered() -> None:
    def dense(m: Mixer, x: torch.Tensor) -> torch.Tensor:
        return F.conv_transpose1d(x.transpose(1, 2), m.dense, padding=1)[..., 1:].transpose(1, 2)

    assert sent(mixed(dense, 2))["all_to_all"][0] >= 1
    report = mixed(dense, 4)
    assert "all_to_all" not in sent(report)
    assert [line for line in report.lines if line.startswith("gathered: %conv_transpose1d")]


def test_chunks_of_the_sequence_stay_where_they_divide() -> None:
    def chunked(m: Mixer, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], 4, -1, HIDDEN).cumsum(2).reshape(x.shape)

    assert sent(mixed(chunked, 4)) == {}
    assert sent(mixed(chunked, 8)) == moves(2, 8)


def test_an_operand_that_has_no_such_dimension_is_gathered_and_named() -> None:
    def biased(m: Mixer, x: torch.Tensor) -> torch.Tensor:
        q = x.view(2, 16, 4, 2).transpose(1, 2)
        weights = (q @ q.transpose(2, 3) + x.mean(-1)[:, None, None, :]).relu()
        return (weights @ q).transpose(1, 2).flatten(2)

    report = mixed(biased, 4)
    assert sent(report)["all_to_all"] == moves(2, 4)["all_to_all"]
    (line,) = [line for line in report.lines if line.startswith("gathered")]
    assert "aten::add moved to p1; operand [1] must be whole there (256 bytes whole on each rank)" in line


def test_one_program_serves_every_length() -> None:
    model, whole = Mixer(scan), ids(2, 16)
    torch._dynamo.mark_dynamic(whole, 1)
    gm, inputs = captured(model, {"ids": whole})
    for other in (whole, ids(2, 8), ids(2, 24)):
        given = [other if value is whole else other.shape[1] if isinstance(value, int) else value for value in inputs]
        _, report, run = on_ranks(gm, given, 4, WITHOUT_TAGS, backward=0)
        assert sent(report) == moves(2, 4)
        loss = model(other)
        torch.testing.assert_close(run.outputs[3][0], loss.detach(), rtol=1e-12, atol=0)
        grads = {id(value): grad for value, grad in zip(given, run.gradients(), strict=True)}
        for parameter in (model.embed.weight, model.depthwise):
            (want,) = torch.autograd.grad(loss, parameter, retain_graph=True)
            torch.testing.assert_close(grads[id(parameter)], want, rtol=1e-10, atol=1e-12)


def test_a_symbolic_length_gets_no_guard_but_that_it_divides() -> None:
    whole = ids(4, 16)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(whole, dim)
    gm = capture(Mixer(scan), {"ids": whole})
    (env,) = {fake_value(node).fake_mode.shape_env for node in gm.graph.find_nodes(op="placeholder") if _is_ids(node)}
    before = len(env.guards)
    transform(gm, AutoSPConfig(), Axis("sp", 4))
    length = next(fake_value(node) for node in gm.graph.find_nodes(op="placeholder") if _is_ids(node)).shape[1]
    assert [str(guard.expr) for guard in env.guards[before:]] == [f"Eq(Mod({length}, 4), 0)"]


def _is_ids(node: fx.Node) -> bool:
    return isinstance(fake_value(node), torch.Tensor) and not fake_value(node).is_floating_point()


def test_what_was_gathered_is_sharded_again_where_it_is_as_long_as_the_sequence() -> None:
    def padded(m: Mixer, x: torch.Tensor) -> torch.Tensor:
        return F.pad(torch.fft.fft(x, dim=1).real, (0, 0, 0, 3))[:, 3:] @ m.embed.weight

    assert not [line for line in mixed(padded, 2).lines if line.startswith("whole")]
