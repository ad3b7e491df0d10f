"""Dropout on ranks: each its own numbers on chunks, all the same on whole values; or those of one device everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils.checkpoint import checkpoint

from autosp_rules import AutoSPConfig, AutoSPError, dry_run
from fxrewrite import RefusedError, RuleSet
from fxrewrite.backends import RewritingBackend
from fxrewrite.ops import is_random, key, may_be_random
from fxrewrite.spmd import PLACEMENT, Axis, Shard, SpmdContext, axis_of, draws_alike
from fxrewrite.testing import RankRun, fake_mesh
from rules.layouts import LAYOUTS
from rules.random import DRAW_WHOLE, DrawByRank, by_rank, draw_dropout_whole
from tests.autosp.models import batch, build, with_dropout
from tests.autosp.one_device import assert_equal_to_one_device, captured, on_ranks
from tests.known import Known
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


def drawn_on(num_ranks: int, body: Callable[[Tensor], Any], outputs: Any = "gather", **how: Any) -> list[list[Tensor]]:
    """The outputs of each rank, all seeded alike."""
    config = AutoSPConfig(outputs=outputs, **how)
    return on_ranks(*captured(Drops(body), {"ids": IDS}), num_ranks, config).run.outputs


@pytest.mark.parametrize("checkpointing", [False, True], ids=("keep", "checkpoint"))
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
@pytest.mark.some(2)
def test_training_with_dropout_equals_one_device(name: str, checkpointing: bool) -> None:
    model = with_dropout(build(name, checkpointing=checkpointing), 0.3)
    inputs = batch(name, "uneven_labels")
    report = assert_equal_to_one_device(model, inputs, config=GLOBAL, loss=1e-6)  # they are in float32
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

    for outputs in zip(*drawn_on(4, body, "shard"), strict=True):
        same = [torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i]]
        assert all(same) if outputs[0].dim() == 2 else not any(same)
        assert {number for output in outputs for number in output.unique().tolist()} == {0.0, 2.0}


def test_one_devices_numbers_in_any_memory_order() -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.dropout(x, 0.5), F.dropout(x.transpose(1, 2) * 1.0, 0.25)

    torch.manual_seed(0)
    expected = body(torch.ones(2, 16, 4, dtype=torch.float64))
    for rank in drawn_on(2, body, rng="global"):
        for found, want in zip(rank, expected, strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=0)


NOISE: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "of another dtype": lambda x: torch.rand_like(x, dtype=torch.float32),
    "integers": lambda x: torch.randint_like(x, 2, 5),
    "in place": lambda x: torch.empty_like(x).exponential_(),
    "with a probability": lambda x: torch.zeros_like(x).bernoulli_(0.3),
    "in another memory order": lambda x: torch.randn_like(x.transpose(1, 2) * 2).transpose(1, 2),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "channels": F.dropout1d,
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_of_the_shape_of_a_chunk_is_that_of_one_device(name: str) -> None:
    noise = NOISE[name]
    torch.manual_seed(0)
    expected = noise(torch.ones(2, 16, 4, dtype=torch.float64)) * 2
    for rank in drawn_on(2, lambda x: noise(x) * 2, rng="global"):
        torch.testing.assert_close(rank[0], expected, rtol=1e-12, atol=0)


def test_draws_are_taken_off_the_value_exactly() -> None:
    verdict = draw_dropout_whole.verify(samples=24)
    verdict.raise_if_false()
    assert verdict.samples >= 24, str(verdict)


aten = torch.ops.aten
HEADS = torch.ones(2, 4, 16, 8, dtype=torch.float64)
DRAWS: dict[str, tuple[OpOverload, tuple[Any, ...]]] = {
    "alpha_dropout": (aten.alpha_dropout.default, (0.5, True)),
    "bernoulli": (aten.bernoulli.p, (0.5,)),
    "cauchy": (aten.cauchy.default, (0.0, 1.0)),
    "dropout": (aten.dropout.default, (0.5, True)),
    "exponential": (aten.exponential.default, (1.0,)),
    "feature_alpha_dropout": (aten.feature_alpha_dropout.default, (0.5, True)),
    "feature_dropout": (aten.feature_dropout.default, (0.5, True)),
    "geometric": (aten.geometric.default, (0.1,)),
    "log_normal": (aten.log_normal.default, (1.0, 2.0)),
    "multinomial": (aten.multinomial.default, (64, True)),
    "native_dropout": (aten.native_dropout.default, (0.5, True)),
    "normal_functional": (aten.normal_functional.default, (0.0, 1.0)),
    "rand_like": (aten.rand_like.default, (None,) * 5),
    "randint_like": (aten.randint_like.default, (99, *(None,) * 5)),
    "randn_like": (aten.randn_like.default, (None,) * 5),
    "random": (aten.random.default, ()),
    "rrelu": (aten.rrelu.default, (0.125, 1 / 3, True)),
    "scaled_dot_product_attention": (
        aten.scaled_dot_product_attention.default,
        (HEADS, HEADS, None, 0.5, False, None, False),
    ),
    "uniform": (aten.uniform.default, (0.0, 1.0)),
}
"""A call, after its first operand, of every operator that draws and has a layout rule, so may draw on a chunk."""
GRADIENTS = [name for name in DRAWS if name.endswith(("dropout", "rrelu", "attention"))]


def test_every_operator_that_draws_on_chunks_is_tried() -> None:
    draws = {op.removeprefix("aten::") for rule in LAYOUTS if not rule.library for op in rule.ops if may_be_random(op)}
    assert draws == set(DRAWS)


def _operand(name: str) -> Tensor:
    """The first operand of the call: a matrix of rows to choose from, or heads; negative where rrelu draws."""
    if name == "multinomial":
        return torch.ones(8, 50, dtype=torch.float64)
    return -HEADS if name == "rrelu" else HEADS


def _made(name: str, seed: int, rank: int) -> Tensor:
    overload, others = DRAWS[name]
    made = by_rank(overload)(_operand(name), *others, torch.tensor(seed), rank)
    return made[0] if isinstance(made, tuple) else made


@pytest.mark.parametrize("name", DRAWS)
def test_each_rank_draws_its_own_numbers(name: str) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = _made(name, 7, 0), _made(name, 7, 1)
    assert torch.equal(first, _made(name, 7, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    torch.manual_seed(8)
    overload, others = DRAWS[name]
    names = [a.name for a in overload._schema.arguments if a.name != "generator"]
    expected = overload(**dict(zip(names, (_operand(name), *others), strict=True)))
    assert torch.equal(second, expected[0] if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_is_that_of_the_numbers_drawn(name: str) -> None:
    overload, others = DRAWS[name]
    generator = torch.Generator().manual_seed(0)

    def operand(like: Any) -> Any:
        value = torch.randn(1, 2, 3, 2, generator=generator, dtype=torch.float64)
        return value.requires_grad_() if isinstance(like, Tensor) else like

    def draw(*given: Any) -> Any:
        made = by_rank(overload)(*given, torch.tensor(3), 1)
        return made[0] if isinstance(made, tuple) else made

    assert torch.autograd.gradcheck(draw, tuple(map(operand, (_operand(name), *others))))


def test_the_gradient_under_hooks_for_saved_tensors() -> None:
    """As where `save_on_cpu` is around a whole step: torch.func refuses to run there."""
    given = [torch.rand_like(HEADS).requires_grad_() for _ in range(3)]
    overload, (*_, mask, p, causal, scale, gqa) = DRAWS["scaled_dot_product_attention"]

    def gradients() -> tuple[Tensor, ...]:
        made = by_rank(overload)(*given, mask, p, causal, scale, gqa, torch.tensor(3), 1)
        return torch.autograd.grad(made.square().sum(), given)

    expected = gradients()
    with torch.autograd.graph.save_on_cpu():
        assert all(map(torch.equal, gradients(), expected))


def test_noise_drops_as_often_as_asked_and_is_scaled() -> None:
    noise = by_rank(aten.dropout.default)(torch.ones(100_000), 0.2, True, torch.tensor(3), 1)
    assert noise.unique().tolist() == [0.0, 1.25]
    assert abs((noise == 0).double().mean() - 0.2) < 0.01


@pytest.mark.parametrize(("attention", "heads"), [("ulysses", 4), ("gather_kv", 1)])
def test_attention_drops_other_weights_on_each_rank(attention: Any, heads: int) -> None:
    """All scores are 0 and all values 1, so a row shows how many of its weights were dropped."""

    def body(x: Tensor) -> Tensor:
        ones = x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(ones * 0, ones * 0, ones, dropout_p=0.5).transpose(1, 2).flatten(2)

    rows = drawn_on(2, body, attention=attention)[0][0]
    parts = rows.chunk(2, -1 if attention == "ulysses" else 1)
    assert not torch.equal(*parts)
    assert abs(rows.mean() - 1.0) < 0.15


@pytest.mark.parametrize("length", [16, 15])
def test_ranks_differentiate_what_they_drew(length: int) -> None:
    """The gradient of the mean loss along a direction, against a difference of two losses of the same seed."""

    def body(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads.exp(), is_causal=True, dropout_p=0.5)
        return (F.rrelu(-y, training=True) * torch.rand_like(y)).square().mean()

    model = Drops(body)
    weight = model.embed.weight
    torch.manual_seed(1)
    nn.init.normal_(weight)
    gm, inputs = captured(model, {"ids": IDS[:, :length]})

    def run(moved: float) -> RankRun:
        with torch.no_grad():
            weight.add_(direction * moved)
        made = on_ranks(gm, inputs, 2, AutoSPConfig(attention="ulysses", checkpoint="full"), backward=0).run
        with torch.no_grad():
            weight.sub_(direction * moved)
        return made

    direction, step = torch.randn_like(weight), 1e-5
    at = next(i for i, value in enumerate(inputs) if value is weight)
    grad = run(0.0).gradients()[at]
    assert grad is not None
    difference = (run(step).outputs[0][0] - run(-step).outputs[0][0]) / (2 * step)
    torch.testing.assert_close((grad * direction).sum(), difference, rtol=1e-6, atol=1e-9)


def test_a_draw_on_a_chunk_that_no_rank_can_make_its_own_is_refused() -> None:
    graph = fx.Graph()
    x, h, w = map(graph.placeholder, "xhw")
    graph.output(graph.call_function(aten.rnn_tanh.input, (x, h, [w, w], False, 1, 0.5, True, False, False)))
    gm = fx.GraphModule({}, graph)
    expected = r"aten::rnn_tanh draws random numbers for a chunk and takes a list of tensors, so all ranks would draw"
    with fake_mesh((1,), ("sp",)) as mesh, pytest.raises(RefusedError, match=expected):
        _sharded(gm, SpmdContext(axis_of(mesh, "sp"), gradients="mean"))


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.sigmoid().bernoulli(),
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1),
    ],
    ids=["of probabilities", "attention"],
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
            y = F.dropout(self.lin(x).sin(), 0.5).exp()
            heads = y[:, None]
            return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)[:, 0] + y * torch.rand_like(y)

        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x.sum()


def _sharded(gm: fx.GraphModule, context: Any) -> Any:
    """As propagation would leave a model whose activations are sharded."""
    known = Known(PLACEMENT, {node: Shard(1) for node in gm.graph.nodes if is_random(node)})
    return RuleSet("draws", known, DrawByRank()).apply(gm, context)


@pytest.mark.parametrize("rules", ["whole", "by rank"])
def test_recomputation_does_not_draw_again(rules: str) -> None:
    model, x = Checkpointed(), torch.randn(2, 16, 4, dtype=torch.float64)

    def run(inner: str) -> list[Tensor]:
        torch._dynamo.reset()
        apply = _sharded if rules == "by rank" else DRAW_WHOLE.apply
        backend = RewritingBackend(
            apply, inner, graph="aten", context=SpmdContext(axis_of(mesh, "sp"), gradients="mean")
        )
        torch.manual_seed(0)
        loss = torch.compile(model, backend=backend)(x)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    with fake_mesh((1,), ("sp",)) as mesh:
        torch.testing.assert_close(run("aot_eager"), run("eager"), rtol=1e-12, atol=0)


def test_what_ranks_must_draw_alike() -> None:
    def drawn(body: Callable[[Tensor], Tensor], config: AutoSPConfig, axis: str = "sp") -> list[str]:
        program, _ = dry_run(Drops(body), {"ids": IDS}, num_ranks=2, config=config)
        return [key(node) for node in draws_alike(program, Axis(axis, 2))]

    def chunks(x: Tensor) -> Tensor:
        return F.dropout(x + torch.rand_like(x), 0.5).sum()

    def pooled(x: Tensor) -> Tensor:
        return F.dropout(x.mean(1), 0.5).sum()

    assert not drawn(chunks, AutoSPConfig())
    assert drawn(chunks, AutoSPConfig(), "tp") == ["aten::randint"] * 2, "a chunk's numbers are those of one seed there"
    assert drawn(pooled, AutoSPConfig()) == ["aten::dropout"]
    assert drawn(lambda x: F.dropout(x, 0.5).sum(), GLOBAL) == ["aten::dropout"]
