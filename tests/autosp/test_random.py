"""Dropout on ranks: each its own numbers on chunks, all the same on whole values; or those of one device everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autosp_rules import AutoSPConfig, AutoSPError, dry_run
from autosp_rules.random import generator_text
from autosp_rules.transform import transform
from fxrewrite.backends import rewriting_backend
from fxrewrite.ops import is_random
from fxrewrite.spmd import Shard, SpmdContext, axis_of
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.random import DRAW_BY_RANK, DRAW_WHOLE, draw_dropout_whole, rank_noise
from tests.autosp.models import batch, build, with_dropout
from tests.autosp.one_device import assert_equal_to_one_device, captured
from tests.zoo.others import NanoGPT, inputs_of

GLOBAL = AutoSPConfig(rng="global")
IDS = torch.arange(32).reshape(2, 16) % 8


class Drops(nn.Module):
    """Ones [2, 16, 4] that start sharded, through `body`."""

    def __init__(self, body: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(8, 4).double(), body
        nn.init.ones_(self.embed.weight)

    def forward(self, ids: Tensor) -> Any:
        return self.body(self.embed(ids))


def on_ranks(body: Callable[[Tensor], Any], num_ranks: int, config: AutoSPConfig | None = None) -> list[list[Tensor]]:
    """The outputs of each rank, all seeded alike."""
    gm, inputs = captured(Drops(body), {"ids": IDS})
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        program, _ = transform(gm, config or AutoSPConfig(outputs="shard"), axis_of(mesh, "sp"))
        torch.manual_seed(0)
        return run_on_ranks(program, inputs, num_ranks).outputs


@pytest.mark.parametrize("checkpointing", [False, True], ids=("keep", "checkpoint"))
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_training_with_dropout_equals_one_device(name: str, checkpointing: bool) -> None:
    model = with_dropout(build(name, checkpointing=checkpointing), 0.3)
    inputs = batch(name, "uneven_labels")
    report = assert_equal_to_one_device(model, inputs, config=GLOBAL, loss_tolerance=1e-6)  # they are in float32
    assert report.rewrites["random.draw_dropout_whole"] == (7 if name == "gpt2" else 2)


def test_a_symbolic_length_draws_the_same() -> None:
    inputs = inputs_of("")
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    assert_equal_to_one_device(NanoGPT("eager", dropout=0.3).double(), inputs, config=GLOBAL)


def test_the_numbers_of_ranks_are_not_those_of_one_device_by_default() -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_equal_to_one_device(NanoGPT("eager", dropout=0.3).double(), inputs_of(""))


def test_chunks_draw_differently_and_whole_values_alike() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.5), F.dropout(x.mean(1), 0.5)

    for outputs in zip(*on_ranks(body, 4), strict=True):
        same = [torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i]]
        assert all(same) if outputs[0].dim() == 2 else not any(same)
        assert {number for output in outputs for number in output.unique().tolist()} == {0.0, 2.0}


def test_one_devices_numbers_in_any_memory_order() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.5), F.dropout(x.transpose(1, 2) * 1.0, 0.25)

    torch.manual_seed(0)
    expected = body(torch.ones(2, 16, 4, dtype=torch.float64))
    outputs = on_ranks(body, 2, AutoSPConfig(rng="global", outputs="gather"))
    for rank in outputs:
        for found, want in zip(rank, expected, strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_draws_are_taken_off_the_value_exactly() -> None:
    verdict = draw_dropout_whole.verify(samples=24)
    verdict.raise_if_false()
    assert verdict.samples >= 24, str(verdict)


def test_noise_drops_as_often_as_asked_and_is_scaled() -> None:
    noise = rank_noise(torch.tensor(3), 1, [100_000], 0.2, torch.float32, torch.device("cpu"))
    assert noise.unique().tolist() == [0.0, 1.25]
    assert abs((noise == 0).double().mean() - 0.2) < 0.01
    torch.testing.assert_close(
        noise, rank_noise(torch.tensor(3), 1, [100_000], 0.2, torch.float32, torch.device("cpu"))
    )


@pytest.mark.parametrize(
    "body",
    [torch.rand_like, lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1)],
)
def test_other_draws_on_chunks_are_refused_where_they_must_be_one_devices(body: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        AutoSPError,
        match=r"draws random numbers for its chunk, which are not those of one device at %.*use rng='local'",
    ):
        dry_run(Drops(lambda x: x + body(x).reshape(x.shape)), {"ids": IDS}, num_ranks=2, config=GLOBAL)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return F.dropout(self.lin(x).sin(), 0.5).exp()

        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x.sum()


def _sharded(gm: fx.GraphModule, context: Any) -> Any:
    """As propagation would leave a model whose activations are sharded."""
    for node in gm.graph.nodes:
        if is_random(node):
            node.meta["layout"] = Shard(1)
    return DRAW_BY_RANK.apply(gm, context)


@pytest.mark.parametrize("rules", ["whole", "by rank"])
def test_recomputation_does_not_draw_again(rules: str) -> None:
    model, x = Checkpointed(), torch.randn(2, 16, 4, dtype=torch.float64)

    def run(inner: str) -> list[Tensor]:
        torch._dynamo.reset()
        apply = _sharded if rules == "by rank" else DRAW_WHOLE.apply
        backend = rewriting_backend(apply, inner, graph="aten", context=SpmdContext(axis_of(mesh, "sp")))
        torch.manual_seed(0)
        loss = torch.compile(model, backend=backend)(x)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    with fake_mesh((1,), ("sp",)) as mesh:
        torch.testing.assert_close(run("aot_eager"), run("eager"), rtol=1e-12, atol=0)


def test_ranks_show_each_other_their_generators_where_they_must_draw_alike() -> None:
    def shown(body: Callable[[Tensor], Tensor], seed: int, config: AutoSPConfig) -> str:
        torch.manual_seed(seed)
        return generator_text(dry_run(Drops(body), {"ids": IDS}, num_ranks=2, config=config)[0])

    def chunks(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).sum()

    def pooled(x: Tensor) -> Tensor:
        return F.dropout(x.mean(1), 0.5).sum()

    local = AutoSPConfig()
    assert not shown(chunks, 0, local)
    for body, config in ((chunks, GLOBAL), (pooled, local)):
        assert shown(body, 0, config) == shown(body, 0, config)
        assert shown(body, 0, config) != shown(body, 1, config)
        assert "draws on every rank: seed all ranks alike" in shown(body, 0, config)
