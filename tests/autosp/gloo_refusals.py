"""Runs in which the ranks do not agree, for `gloo_ranks.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autosp_rules import AutoSPBackend, autosp

IDS = torch.arange(32).reshape(2, 16) % 8


class Model(nn.Module):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.activation = nn.Embedding(8, 4), activation()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.activation(self.embed(ids)).mean()


def different_graphs(rank: int) -> None:
    torch.compile(Model(nn.GELU if rank else nn.SiLU), backend=autosp("eager"))(IDS)


def one_rank_never_compiles(rank: int) -> None:
    if rank == 0:
        torch.compile(Model(nn.SiLU), backend=autosp("eager", timeout=3.0))(IDS)
    else:
        raise ValueError("rank 1 is elsewhere")


def generators_that_differ(rank: int) -> None:
    """They are alike when the model is compiled and in the call after; then one rank draws something of its own."""
    torch.manual_seed(0)
    compiled = torch.compile(Model(nn.Dropout), backend=autosp("eager", rng="global"))
    torch.manual_seed(0)
    losses = torch.stack([compiled(IDS) for _ in range(2)]).detach()
    torch.manual_seed(0)
    torch.testing.assert_close(losses, torch.stack([compiled(IDS) for _ in range(2)]).detach())
    torch.manual_seed(rank)
    compiled(IDS)
    compiled(IDS)  # which reads what the last call compared


def a_second_derivative(rank: int) -> None:
    """A gradient penalty, of a copy of a compiled model, which shares its backend."""
    torch.manual_seed(0)
    compiled = torch.compile(Model(nn.SiLU), backend=autosp("eager"))
    compiled(IDS).backward()
    copied = copy.deepcopy(compiled)
    grads = torch.autograd.grad(copied(IDS), list(copied.parameters()), create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()


def different_batches(rank: int) -> None:
    """As a sampler gives that counts all ranks as replicas."""
    torch.compile(Model(nn.SiLU), backend=autosp("eager"))((IDS + rank) % 8)


def one_rank_does_not_compile(rank: int) -> None:
    def inner(gm: torch.fx.GraphModule, inputs: object) -> object:
        if rank == 1:
            raise MemoryError("no room for kernels")
        return gm.forward

    torch.compile(Model(nn.SiLU), backend=autosp(inner))(IDS)


def entry_point_and_mesh(rank: int) -> None:
    """Two replicas of a sequence over two ranks each, the backend by name; every replica gets its own batch's mean."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    torch.manual_seed(0)
    model, ids = Model(nn.SiLU), (IDS + rank // 2) % 8
    expected = model(ids)
    loss = torch.compile(model, backend="autosp", options={"inner": "eager", "mesh": mesh})(ids)
    torch.testing.assert_close(loss, expected)


class OfHiddenStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden).square().mean()


def later_batches_that_differ(rank: int) -> None:
    """The first batch is the same; then one rank's loader goes its own way, which the next call reads."""
    torch.manual_seed(0)
    compiled = torch.compile(Model(nn.SiLU), backend=autosp("eager"))
    for batch in (IDS, (IDS + rank) % 8, IDS):
        compiled(batch)


def later_hidden_states_that_differ(rank: int) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(OfHiddenStates(), backend=autosp("eager"))
    hidden = torch.randn(2, 16, 4)
    for batch in (hidden, hidden + 1e-6 * rank, torch.randn(2, 16, 4) if rank else hidden, hidden):
        compiled(batch)


def differences_that_nobody_asks_for(rank: int) -> None:
    compiled = torch.compile(Model(nn.SiLU), backend=autosp("eager", compare_ranks=False))
    for batch in (IDS, (IDS + rank) % 8, IDS):
        compiled(batch)


def weights_that_drift_apart(rank: int) -> None:
    """Nobody averages gradients, and each rank steps by its own."""
    torch.manual_seed(0)
    model = Model(nn.SiLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=autosp("eager"))
    for _ in range(8):
        compiled(IDS.sort().values).backward()
        optimizer.step()
        optimizer.zero_grad()


class WithLogits(Model):
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return super().forward(ids), self.embed(ids) * 2, self.embed(ids) * 3


def different_outputs_of_one_shape(rank: int) -> None:
    torch.manual_seed(0)
    _, *others = torch.compile(WithLogits(nn.SiLU), backend=autosp("eager", timeout=3.0))(IDS)
    others[rank].argmax(-1)


def an_output_used_on_one_rank(rank: int) -> None:
    """At first on all ranks, as in an evaluation; then on one alone, as in a log."""
    torch.manual_seed(0)
    compiled = torch.compile(WithLogits(nn.SiLU), backend=autosp("eager", timeout=3.0))
    _, logits, _ = compiled(IDS)
    logits.argmax(-1)
    _, logits, _ = compiled(IDS)
    if rank == 0:
        logits.argmax(-1)


def a_last_batch_that_differs(rank: int) -> None:
    torch.manual_seed(0)
    backend = autosp("eager")
    compiled = torch.compile(Model(nn.SiLU), backend=backend)
    for batch in (IDS, (IDS + rank) % 8):
        compiled(batch)
    backend.check_ranks()


def a_later_batch_of_another_length(rank: int) -> None:
    """Rank 0 is in a collective, of a group that ends soon, when rank 1 says why. Before, all changed the length."""
    torch.manual_seed(0)
    group = dist.new_group(timeout=timedelta(seconds=3))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("sp",))
    compiled = torch.compile(Model(nn.SiLU), backend=autosp("eager", mesh=mesh), dynamic=True)
    for length in (16, 12, 12, 14 if rank else 12):
        compiled(IDS[:, :length].clone())


class EndsWhole(Model):
    """What is behind the graph break has no sequence, and runs whole on every rank."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        pooled = self.activation(self.embed(ids)).mean((1, 2))
        torch._dynamo.graph_break()
        return self.end(pooled, targets)

    def end(self, pooled: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (nn.functional.dropout(pooled) - targets).square().mean()


def _ends_whole() -> tuple[AutoSPBackend, EndsWhole, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    backend, model = autosp("eager"), EndsWhole(nn.SiLU)
    return backend, model, torch.compile(model, backend=backend)


def targets_of_a_whole_graph_that_differ(rank: int) -> None:
    _, _, compiled = _ends_whole()
    for targets in (IDS[:, 0], IDS[:, 0] + rank, IDS[:, 0], IDS[:, 0]):
        compiled(IDS, targets)


def floating_targets_of_a_whole_graph_that_differ(rank: int) -> None:
    """Read at the end, for no call of a sharded program follows."""
    backend, _, compiled = _ends_whole()
    for targets in (torch.ones(2), torch.ones(2) + rank):
        compiled(IDS, targets)
        backend.check_ranks()


def generators_of_a_whole_graph_that_differ(rank: int) -> None:
    _, _, compiled = _ends_whole()
    for _ in range(4):
        compiled(IDS, IDS[:, 0])
        torch.manual_seed(rank)


def a_whole_graph_that_one_rank_evaluates(rank: int) -> None:
    backend, model, compiled = _ends_whole()
    end = torch.compile(model.end, backend=backend)
    for _ in range(3):
        compiled(IDS, IDS[:, 0]).backward()
        if rank == 0:
            with torch.no_grad(), torch.random.fork_rng():
                end(torch.zeros(2), IDS[:, 1])
    backend.check_ranks()


def a_model_without_a_sequence_in_parts(rank: int) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()

    compiled = torch.compile(forward, backend=autosp("eager"))
    for _ in range(2):
        compiled(torch.ones(4))


def a_part_that_a_model_calls_several_times(rank: int) -> None:
    """Dynamo compiles what makes the weights by itself, and it runs twice before what has the sequence is compiled."""

    def doubled(weight: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return weight * 2

    def forward(ids: torch.Tensor, weight: nn.Parameter, first: nn.Parameter, second: nn.Parameter) -> torch.Tensor:
        ids = ids.clamp(1)
        scale = doubled(first)
        scale = scale * doubled(second)
        return (nn.functional.embedding(ids, weight) * scale).square().mean()

    backend = autosp("eager")
    parameters = [nn.Parameter(torch.ones(size)) for size in ((16, 4), (4,), (4,))]
    for _ in range(3):
        torch.compile(forward, backend=backend)(IDS, *parameters).backward()
    assert any(report.tokens_per_rank for report in backend.reports)


def run(cases: list[str]) -> dict[str, str]:
    """For each case what this rank says, or "done"."""
    rank, messages = dist.get_rank(), dict[str, str]()
    for case in cases:
        torch._dynamo.reset()
        messages[case] = "done"
        try:
            globals()[case](rank)
        except Exception as error:  # noqa: BLE001  # the test reads it
            messages[case] = str(error)
    return messages
