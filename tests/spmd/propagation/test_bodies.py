"""Custom functions over the axis: on chunks or whole, linear or not, loss and every gradient equal one device's."""

# autograd calls forward and backward with a context

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.autograd import Function

from autosp_rules import AutoSPConfig, AutoSPError, dry_run
from autosp_rules.parallelism import AUTOSP
from fxrewrite import FxRewriteError
from fxrewrite.capture.custom_backward import custom_function
from fxrewrite.spmd import Parallelism, ReadOwn, Shard, param
from fxrewrite.testing import simulate
from rules.parallel import DATA, ZERO3
from tests.capture.test_custom_backward import Thrice
from tests.spmd.propagation.test_propagate import IDS, Body, check, gathers

# Dynamo makes the context of a custom function by calling its class, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

Tensor = torch.Tensor


class Weighted(Function):
    """A product with a weight, whose gradient is a sum over the ranks; states shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return x.view(x.shape[0], x.shape[1], 2, 4).reshape(x.shape) @ w.t() * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        dw = 5 * (x.flatten(0, 1).t() @ g.flatten(0, 1)).t()
        return 2 * (g @ w) * ctx.scale, dw.to(w.dtype).view(w.shape), None


class Several(Function):
    """Two results and one without a gradient; its backward uses only one of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(positive)
        return x * 2, x.exp(), positive

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor, _: Any) -> Tensor:
        return 7 * g * ctx.saved_tensors[0]


class Table(Function):
    """Adds a table of positions, of which a rank needs its rows only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return x + table.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        (table,) = ctx.saved_tensors
        return g * 3, (g * table).sum(0)


class Unread(Function):
    """Gives a gradient to what its forward does not read, as sparse mixers of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, g * x


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1e-3, 1e-3)


class ClippedWeight(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = g.clamp(-1e-3, 1e-3)
        return g @ w.t(), x.flatten(0, 1).t() @ g.flatten(0, 1)


class Stored(Function):
    """Computes its gradient in the forward and ignores the one that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sin())
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return ctx.saved_tensors[0].clone()


class Accumulated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g.flip(1).cumsum(1).flip(1)


class ClippedAccumulated(Accumulated):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.flip(1).cumsum(1).flip(1).clamp(-1e-2, 1e-2)


class BackwardMixes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.cumsum(1)


class Summed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sum(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * g.unsqueeze(1) * x.cos()


class Inner(Function):
    """Another custom function in its forward, whose backward never runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Thrice.apply(x) * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 5


class Scaled(Function):
    """Scales by the largest of all entries, forward and backward, and rounds, as a float8 linear does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return rounded(x) @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = rounded(g)
        return g @ w.t(), rounded(x).flatten(0, 1).t() @ g.flatten(0, 1)


def rounded(x: Tensor) -> Tensor:
    scale = x.abs().max().clamp(min=1e-12)
    return (x / scale * 448).round() / 448 * scale


@torch.compiler.allow_in_graph
class OpaqueScaled(Scaled):
    """Dynamo does not look into it."""


class Covariance(Function):
    """A sum of products of all tokens, and a sum of all gradients, weigh each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ (x.flatten(0, 1).t() @ x.flatten(0, 1)) / 100

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * g + (g * x).sum() / 10


class Wide(Function):
    """A sum over all tokens that is larger than they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = torch.cat([x, x.sin(), x.cos(), x.exp()], -1).flatten(0, 1)
        return x * (wide.t() @ wide).sin().mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class TotalGradient(Function):
    """The gradient of a weight that every rank has whole is a sum of all gradients, which is then weighed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g.sum().tanh().expand(8)


class Randomly(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) < 2)  # what it draws makes no difference

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3


def several(m: Body, x: Tensor, ids: Tensor) -> Tensor:
    y, z, positive = Several.apply(x)
    return y * positive + z


ON_CHUNKS: dict[str, Any] = {
    "own backward": lambda m, x, ids: Thrice.apply(x) + x,
    "with a weight": lambda m, x, ids: Weighted.apply(x, m.other[:8], 0.5),
    "several results": several,
    "an operand that is sliced": lambda m, x, ids: Table.apply(x, m.other[: ids.shape[1]]),
    "an operand that only has a gradient": lambda m, x, ids: Unread.apply(x, m.other[: ids.shape[1]].expand(2, 16, 8)),
    "a clipped gradient": lambda m, x, ids: Clipped.apply(x).square(),
    "a clipped gradient and a weight": lambda m, x, ids: ClippedWeight.apply(x, m.other[:8]),
    "a gradient from the forward": lambda m, x, ids: Stored.apply(x),
    "another in its forward": lambda m, x, ids: Inner.apply(x),
    "a scale of all entries": lambda m, x, ids: Scaled.apply(x, m.other[:8]),
    "a scale of all entries, opaque": lambda m, x, ids: OpaqueScaled.apply(x, m.other[:8]),
    "a sum of products and one of gradients": lambda m, x, ids: Covariance.apply(x),
    "of weights alone": lambda m, x, ids: x @ Weighted.apply(m.other[None], m.other[:8], 1.0)[0, :8],
}
GATHERED: dict[str, Any] = {
    "its forward mixes": (lambda m, x, ids: Accumulated.apply(x), "in its forward, aten::cumsum"),
    "its forward mixes, its backward clips": (
        lambda m, x, ids: ClippedAccumulated.apply(x),
        "in its forward, aten::cumsum",
    ),
    "its backward mixes": (lambda m, x, ids: BackwardMixes.apply(x), "in its backward, aten::cumsum"),
    "its forward adds up": (lambda m, x, ids: Summed.apply(x), "its forward gives a sum over the ranks"),
    "its sums are large": (lambda m, x, ids: Wide.apply(x), "to complete its sums sends more"),
    "its gradient is a complete sum": (
        lambda m, x, ids: TotalGradient.apply(x, m.other[0]),
        "is a sum that it completes",
    ),
    "it draws": (lambda m, x, ids: Randomly.apply(x), "its bodies draw random numbers"),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ON_CHUNKS)
@pytest.mark.slow
def test_runs_on_chunks(name: str, num_ranks: int) -> None:
    assert check(ON_CHUNKS[name], num_ranks=num_ranks) == []


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.slow
def test_is_gathered_and_says_why(name: str, num_ranks: int) -> None:
    body, why = GATHERED[name]
    (line,) = gathers(check(body, num_ranks=num_ranks))
    assert "a function with its own backward" in line
    assert why in line


def test_three_ranks_clip_the_same_gradient() -> None:
    ids = torch.arange(30).reshape(2, 15) % 8
    check(ON_CHUNKS["a clipped gradient and a weight"], num_ranks=3, ids=ids)
    check(GATHERED["its forward mixes, its backward clips"][0], num_ranks=3, ids=ids)


@pytest.mark.parametrize(
    "name",
    [
        "a gradient from the forward",
        "a scale of all entries",
        "a scale of all entries, opaque",
        "a sum of products and one of gradients",
        "a clipped gradient and a weight",
    ],
)
def test_padding_counts_in_no_sum_of_a_body(name: str) -> None:
    ids = torch.arange(26).reshape(2, 13) % 8
    assert not gathers(check(ON_CHUNKS[name], num_ranks=4, ids=ids))


def test_the_report_counts_what_bodies_send() -> None:
    _, report = dry_run(Body(ON_CHUNKS["a scale of all entries"]), {"ids": IDS}, num_ranks=2)
    reduced = {c.direction: (c.count, c.bytes_sent) for c in report.collectives if c.kind == "all_reduce"}
    loss = (1, 8)  # a number of float64 each
    assert reduced["forward"] == (1 + loss[0], 16 + loss[1])  # with each maximum goes whether it is NaN
    assert reduced["backward"] == (2 + loss[0], 32 + loss[1])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_backward_that_is_not_linear_gets_whole_gradients_of_whole_values(num_ranks: int) -> None:
    (line,) = check(lambda m, x, ids: x * Clipped.apply(m.other[:1]), num_ranks=num_ranks)
    assert line.startswith("summed: %autograd_function_apply")
    assert "not linear in the gradients" in line


def test_a_backward_that_ignores_gradients_of_whole_values_needs_no_sum() -> None:
    assert check(lambda m, x, ids: x * Stored.apply(m.other[:1])) == []


@pytest.mark.parametrize("name", ["with a weight", "a clipped gradient and a weight"])
def test_sizes_in_bodies_are_local_whatever_the_length(name: str) -> None:
    ids = IDS.clone()
    torch._dynamo.mark_dynamic(ids, 1)
    assert not gathers(check(ON_CHUNKS[name], ids=ids))


def test_strict_refuses_an_operator_without_a_rule_in_a_body() -> None:
    class Bounded(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.renorm(x, 2, 0, 1.0)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    with pytest.raises(AutoSPError, match="aten::renorm has no layout rule"):
        dry_run(Body(lambda m, x, ids: Bounded.apply(x)), {"ids": IDS}, num_ranks=2, config=AutoSPConfig(strict=True))


def test_a_lookup_in_a_body_is_not_where_sharding_starts() -> None:
    class Lookup(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(ids)
            return x + F.embedding(ids, w)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, Tensor]:
            (ids,) = ctx.saved_tensors
            return g, None, 2 * (F.one_hot(ids, 8).to(g.dtype).flatten(0, 1).t() @ g.flatten(0, 1))

    check(lambda m, x, ids: Lookup.apply(x, ids, m.other[:8]))


class Clips(nn.Module):
    """A loss of token ids whose gradients are clipped on their way to the embedding."""

    def __init__(self, **embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16, dtype=torch.float64, **embedding)
        self.up, self.head = (nn.Linear(16, size, dtype=torch.float64) for size in (16, 50))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(Clipped.apply(self.up(self.embedding(ids))))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        (DATA, {"dp": 2}),
        (ZERO3 | AUTOSP, {"dp": 2, "sp": 2}),
        (AUTOSP | Parallelism("rows", axis="tp", place={param("*.weight"): Shard(0)}), {"sp": 2, "tp": 2}),
    ],
    ids=["data", "ZeRO-3 and sequence", "sequence and rows"],
)
def test_a_backward_that_clips_over_several_axes(plan: Any, mesh: dict[str, int]) -> None:
    ids = torch.arange(24).reshape(2, 12) * 7 % 50
    found = simulate(Clips(), {"ids": ids}, plan, mesh)
    assert found.grad_error < 1e-9, found.grad_errors
    own = [event for event in found.report.events_of(ReadOwn) if "autograd_function_apply" in str(event)]
    assert len(own) == ("dp" in mesh)


@pytest.mark.parametrize("plan", [AUTOSP, ZERO3, DATA], ids=["whole", "in shards", "own"])
def test_a_parameter_that_is_written_to_is_refused_where_gradients_are_reduced(plan: Any) -> None:
    with pytest.raises(FxRewriteError, match=r"(embedding.weight is|%embedding_renorm_).* without max_norm"):
        simulate(Clips(max_norm=1.0), {"ids": IDS}, plan, {"sp" if plan is AUTOSP else "dp": 2})


def test_a_backward_that_clips_reads_as_it_runs(fx_snapshot: Any) -> None:
    program, _ = dry_run(Body(ON_CHUNKS["a clipped gradient and a weight"]), {"ids": IDS}, num_ranks=2)
    (function,) = filter(None, map(custom_function, program.graph.nodes))
    assert function.backward == fx_snapshot


class Weighs(nn.Module):
    """It writes to the weights of the loss that it is passed, which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        weights[:, 0] = 0
        return (self.embedding(ids).square().mean(-1) * weights).mean()


@pytest.mark.parametrize("plan", [AUTOSP, ZERO3], ids=["whole", "own"])
def test_an_argument_without_a_gradient_is_written_to(plan: Any) -> None:
    ids = torch.arange(24).reshape(2, 12) * 7 % 50
    found = simulate(Weighs(), {"ids": ids, "weights": ids.double().sin()}, plan, {plan.axis: 2})
    assert found.error < 1e-14, str(found)
