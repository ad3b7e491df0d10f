"""Who averages gradients of parameters, and what the program therefore does to them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard

from autosp_rules import AutoSPError, autosp, gradients as module
from autosp_rules.gradients import GradientPlan
from fxrewrite.backends import GradientReduction, gradient_reductions
from fxrewrite.spmd import axis_of, fingerprint, parameter_checksum
from fxrewrite.testing import fake_mesh
from tests.autosp.one_device import assert_equal_to_one_device

ALL, DP = frozenset(range(4)), frozenset((0, 2))
WEIGHTS = [torch.nn.Parameter(torch.ones(2))]


def plan(monkeypatch: pytest.MonkeyPatch, reduction: GradientReduction | None, option: Any = "auto") -> GradientPlan:
    """The plan of rank 0 on a mesh of 2 replicas, [[0, 1], [2, 3]]."""
    monkeypatch.setattr(module, "gradient_reductions", lambda parameters: [reduction] if reduction else [])
    with fake_mesh((2, 2), ("dp", "sp")) as mesh:
        return GradientPlan.of(option, axis_of(mesh, "sp"), WEIGHTS)


@pytest.mark.parametrize(
    ("by", "ranks", "factor", "option", "reduced", "scale"),
    [
        ("DistributedDataParallel", ALL, 1 / 4, "auto", False, 1.0),
        ("DistributedDataParallel", DP, 1 / 2, "auto", True, 1.0),
        ("fully_shard", ALL, 1 / 4, "auto", False, 1.0),
        ("fully_shard", DP, 1 / 2, "auto", True, 1.0),
        ("fully_shard", ALL, 1.0, "auto", False, 1 / 2),
        ("fully_shard", ALL, 1 / 2, "sum", False, 1 / 2),  # the divisor is the number of replicas
        ("fully_shard", ALL, 1 / 2, "mean", False, 1.0),  # it is the size of the axis
        ("DeepSpeed", ALL, 2 / 4, "auto", False, 1 / 2),  # initialize(mpu=...): divides by the replicas
        ("DeepSpeed", DP, 2 / 2, "auto", True, 1 / 2),  # initialize(mesh_param=...): reduces over the replicas alone
    ],
)
def test_a_wrapper_decides(
    monkeypatch: pytest.MonkeyPatch,
    by: str,
    ranks: frozenset[int],
    factor: float,
    option: str,
    reduced: bool,
    scale: float,
) -> None:
    """Per parameter: (what the wrapper sums and scales) of (what the program returns) is the mean over all ranks."""
    found = plan(monkeypatch, GradientReduction(by, ranks, factor), option)
    assert (found.reduced, found.factor) == (reduced, scale)
    of_ranks = torch.tensor([3.0, 5.0, 11.0, 13.0])  # what ranks have, each P times a summand; the mean is 8
    of_axes = of_ranks.view(2, 2).mean(1, keepdim=True).expand(2, 2).flatten()
    returned = (of_axes if found.reduced else of_ranks) * found.factor
    adds_replicas = by == "fully_shard" and (factor == 1 or (factor, option) == (1 / 2, "mean"))
    by_hand = 16.0 if adds_replicas else 8.0
    assert factor * returned[sorted(ranks)].sum() == by_hand


@pytest.mark.parametrize(
    ("option", "reduced", "scale"), [("mean", False, 1.0), ("sum", False, 0.5), ("done", True, 1.0)]
)
def test_a_setting_decides_where_no_wrapper_is_known(
    monkeypatch: pytest.MonkeyPatch, option: str, reduced: bool, scale: float
) -> None:
    for reduction in (None, GradientReduction("DistributedDataParallel", ALL, 1 / 4, hook="add_up")):
        found = plan(monkeypatch, reduction, option)
        assert (found.reduced, found.factor) == (reduced, scale)


def _add_up(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


_add_up.__annotations__ = {}  # torch compares them with classes, and here they are text


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (default_hooks.allreduce_hook, ""),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), ""),
        (_add_up, "_add_up"),
        (default_hooks.fp16_compress_wrapper(_add_up), "fp16_compress_wrapper.<locals>.fp16_compress_wrapper_hook"),
    ],
    ids=["averages", "averages what is compressed", "one's own", "one's own, of what is compressed"],
)
def test_hooks_that_torch_does_not_ship_are_unknown(hook: Any, said: str) -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.extend(gradient_reductions(list(self.parameters())))
            return super().forward(x)

    found = list[GradientReduction]()
    with fake_mesh((2,), ("sp",)):
        wrapped = nn.parallel.DistributedDataParallel(Model(2, 2))
        wrapped.register_comm_hook(None, hook)
        wrapped(torch.ones(1, 2))
    (reduction,) = found
    assert (reduction.hook, reduction.is_mean) == (said, True)


def test_a_divisor_is_the_size_of_the_axis_where_replicas_are_not_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    reduction = GradientReduction("fully_shard", frozenset(range(6)), 1 / 2)
    monkeypatch.setattr(module, "gradient_reductions", lambda parameters: [reduction])
    with fake_mesh((3, 2), ("dp", "sp")) as mesh:
        found = [GradientPlan.of(option, axis_of(mesh, "sp"), WEIGHTS) for option in ("auto", "mean")]
        with pytest.raises(AutoSPError, match="gradients='sum' gives wrong gradients under fully_shard over ranks"):
            GradientPlan.of("sum", axis_of(mesh, "sp"), WEIGHTS)
    assert {(plan.reduced, plan.factor) for plan in found} == {(False, 1.0)}


class Attention(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.scaled_dot_product_attention(*(super().forward(x)[:, None],) * 3, is_causal=True)[:, 0]


def _fully_sharded(model: Any) -> nn.Module:
    for part in (model[1], model):
        fully_shard(part).set_gradient_divide_factor(1.0)
    return model


def _ddp_that_adds_up(model: nn.Module) -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, _add_up)
    return wrapped


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's guards
@pytest.mark.parametrize(("wrap", "option"), [(_fully_sharded, "auto"), (_ddp_that_adds_up, "sum")])
def test_a_sum_would_count_parameters_of_eager_code_once_for_each_rank(wrap: Any, option: Any) -> None:
    """As torchtitan compiles: layer by layer, the embedding and the head are eager code."""
    model = nn.Sequential(nn.Embedding(8, 4), Attention(4, 4), nn.Linear(4, 8))
    ids = torch.arange(16).reshape(2, 8) % 8
    with fake_mesh((2,), ("sp",)) as mesh:
        backend = autosp("eager", mesh=mesh, gradients=option, compare_ranks=False)
        model[1].compile(backend=backend)
        wrapped = wrap(model)
        with pytest.raises(
            AutoSPError, match=r"this program does not read 0.weight, .* set_gradient_divide_factor\(2\)"
        ):
            wrapped(ids)


REFUSED = {
    "mean over the replicas": (
        "mean",
        GradientReduction("DistributedDataParallel", DP, 1 / 2),
        "gives wrong gradients",
    ),
    "sum over all": (
        "sum",
        GradientReduction("DistributedDataParallel", ALL, 1 / 4),
        "leaves them to be averaged over",
    ),
    "done, then summed": ("done", GradientReduction("fully_shard", ALL, 1.0), "'done' gives wrong gradients"),
    "a part of the axis": (
        "auto",
        GradientReduction("fully_shard", frozenset((2, 3)), 1 / 2),
        r"covers \[\] of the ranks \[0, 1\]",
    ),
    "a hook of one's own": (
        "auto",
        GradientReduction("DistributedDataParallel", ALL, 1 / 4, hook="add_up"),
        "lets add_up reduce gradients, and whether that averages them is not known; state it: gradients='mean' if",
    ),
    "an odd divisor": ("auto", GradientReduction("fully_shard", ALL, 1 / 3), "divides gradients by 3: neither all 4"),
    "a divisor of two meanings": (
        "auto",
        GradientReduction("fully_shard", ALL, 1 / 2),
        "divides gradients by 2: the ranks of axis sp, or its replicas, which are as many; state it: gradients=",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    option, reduction, message = REFUSED[name]
    with pytest.raises(AutoSPError, match=message):
        plan(monkeypatch, reduction, option)


def test_what_deepspeed_reduces_is_read_off_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_mesh((2, 2), ("dp", "sp")) as mesh:
        groups = SimpleNamespace(
            mpu=None,
            mesh_device=mesh,
            _get_sequence_parallel_world_size=lambda: 2,
            _get_sequence_data_parallel_group=lambda: mesh.get_group("dp"),
        )
        monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", groups)
        found = GradientPlan.of("auto", axis_of(mesh, "sp"), WEIGHTS)
        assert dist.get_process_group_ranks(mesh.get_group("dp")) == [0, 2]
    assert (found.reduced, found.factor) == (True, 0.5)
    assert "DeepSpeed over ranks [0, 2]" in found.why


def test_fingerprints_tell_batches_apart_and_roundings_not() -> None:
    ids = torch.arange(4096).view(4, 1024)
    assert torch.equal(fingerprint(ids), fingerprint(ids.clone()))
    for other in (ids.roll(1, 1), ids.flip(0), ids + (torch.arange(4096).view(4, 1024) == 77)):
        assert fingerprint(other)[0] != fingerprint(ids)[0]
    for shape in ((1, 2**20 + 1), (8, 2**18)):
        ids = torch.zeros(shape, dtype=torch.int64)
        ids[0, 1] = 7
        assert fingerprint(ids)[0] != fingerprint(torch.zeros_like(ids))[0]
    assert fingerprint(torch.ones(3, dtype=torch.complex64).conj()).shape == (2,)
    long = torch.zeros(1, 1, 100_000)
    long[..., ::98] = 1  # what a sample of a thousand sees
    assert 1000 < fingerprint(long)[1] <= 1024
    filled = torch.full((1, 1, 16, 16), torch.finfo(torch.float64).min, dtype=torch.float64)
    assert fingerprint(filled.triu(1)).isfinite().all()
    x = torch.randn(4, 512, 64, generator=torch.Generator().manual_seed(0))
    value, scale = fingerprint(x)
    rounded, _ = fingerprint(x.bfloat16())
    assert (value - rounded).abs() < 2e-3 * scale
    for seed in range(1, 20):
        other, _ = fingerprint(torch.randn(4, 512, 64, generator=torch.Generator().manual_seed(seed)))
        assert (value - other).abs() > 2e-3 * scale


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_a_checksum_of_parameters_sees_one_bit(dtype: torch.dtype) -> None:
    x = torch.ones(3, 5).to(dtype)
    y = x.clone()
    y[1, 2] = 0
    [a, b, c] = parameter_checksum([x, y, x.mT.contiguous().mT])
    assert a == c != b


def test_a_checksum_of_parameters_sees_their_order() -> None:
    x, long = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(5000.0)
    of = [x, x.flip(0), x.flip(1), x.mT, long, long.flip(0), long.roll(1024)]
    assert len({number.item() for number in parameter_checksum(of)}) == len(of)
    assert torch.equal(*parameter_checksum([long, long.clone()]))


class Unscaled(nn.Module):
    """A layer whose attention is scaled by hidden states, of which no gradient is wanted."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.q, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50)
        self.view = view

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        with torch.no_grad():
            scale = self.view(hidden)
        q = self.q(hidden).view(*input_ids.shape, 2, 8).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(hidden.shape)
        logits = self.head(hidden + attended * scale)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :],
        lambda x: x.narrow(1, 0, 16),
        lambda x: x.expand(2, -1, -1),
        lambda x: x.view(x.shape),
        lambda x: x.to(x.dtype),
        lambda x: x,
    ],
    ids=["slice", "narrow", "expand", "view", "to", "itself"],
)
def test_a_view_under_no_grad_carries_no_gradient(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ids = torch.arange(32).reshape(2, 16) % 7
    assert_equal_to_one_device(Unscaled(view).double(), {"input_ids": ids})
