"""An MLP in tiles has the value and the gradients of the whole one, and never holds what that computes inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from fxrewrite import RuleSet, normalize
from rules.tiling.mlp import tiled_mlp, tiled_mlp_rules
from tests.rewriting import check_left_alone
from tests.rules.tiling.tiled import Tiled

BATCH, LENGTH, DEPTH, INNER = 2, 19, 8, 61
GATED = "silu(v0); mul(v2, v1)"


class Gated(torch.nn.Module):
    def __init__(self, act: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(DEPTH, INNER, bias=bias) for _ in range(2))
        self.down, self.act = torch.nn.Linear(INNER, DEPTH, bias=bias), ACT2FN[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Plain(torch.nn.Module):
    def __init__(self, act: str, last: int = DEPTH) -> None:
        super().__init__()
        self.up, self.down, self.act = torch.nn.Linear(DEPTH, INNER), torch.nn.Linear(INNER, last), ACT2FN[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)).contiguous())


class Fused(torch.nn.Module):
    """Gate and up are one linear, as in Phi-3 (`cut` by chunk) and GPT-OSS (every other column, clamped)."""

    def __init__(self, cut: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.both, self.down, self.cut = torch.nn.Linear(DEPTH, 2 * INNER), torch.nn.Linear(INNER, DEPTH), cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.cut(self.both(x))
        return self.down(gate * torch.sigmoid(1.702 * gate) * (up.clamp(-1.0, 1.0) + 1))


class OfGPT2(torch.nn.Module):
    """Conv1D flattens rows and calls addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = Conv1D(INNER, DEPTH), Conv1D(DEPTH, INNER), ACT2FN["gelu_new"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


MLPS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": Gated,
    "gemma": lambda: Gated("gelu_pytorch_tanh"),
    "biases": lambda: Gated("relu2", bias=True),
    "gelu": lambda: Plain("gelu"),
    "written_out": lambda: Plain("gelu_accurate", last=3),
    "mish": lambda: Plain("mish"),
    "linear": lambda: Plain("linear"),
    "phi3": lambda: Fused(lambda both: both.chunk(2, -1)),
    "split": lambda: Fused(lambda both: both.split([INNER, INNER], dim=2)),
    "gpt_oss": lambda: Fused(lambda both: (both[..., ::2].clamp(max=0.5), both[..., 1::2])),
    "gpt2": OfGPT2,
}


def grads(of: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(of, leaves, torch.linspace(-1, 1, of.numel(), dtype=of.dtype).reshape(of.shape))


@pytest.mark.parametrize("name", MLPS)
@pytest.mark.some(3)
def test_no_value_of_rows_by_inner_width_is_left(name: str) -> None:
    torch.manual_seed(0)
    mlp, x = MLPS[name]().double(), torch.randn(BATCH, LENGTH, DEPTH, dtype=torch.float64, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    expected = mlp(x)
    wanted = grads(expected, leaves)
    for dynamic in (False, True):
        torch._dynamo.reset()
        backend = Tiled(tiled_mlp_rules(tile_bytes=2 * INNER * 8 * 5))  # 5 or 10 rows, and a rest
        tiled = torch.compile(mlp, backend=backend, dynamic=dynamic, fullgraph=True)(x)
        torch.testing.assert_close(tiled, expected, rtol=1e-12, atol=1e-12)
        for grad, want in zip(grads(tiled, leaves), wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)
        assert backend.most_entries() < BATCH * LENGTH * INNER


def operands(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((LENGTH, DEPTH), (INNER, DEPTH), (INNER, DEPTH), (DEPTH, INNER), (INNER,))
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def whole(x: Any, g: Any, w: Any, d: Any, b: Any) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, g, b)) * F.linear(x, w), d)


def in_tiles(x: Any, g: Any, w: Any, d: Any, b: Any, *, rows: int = 4) -> torch.Tensor:
    return tiled_mlp(x, [g, w, d], [b], [True, False, False], GATED, 2 * INNER * x.element_size() * rows)


@pytest.mark.parametrize("frozen", [(), (0,), (1, 2, 3, 4), (3,)])
def test_what_wants_no_gradient_gets_none(frozen: tuple[int, ...]) -> None:
    given = operands()
    for index in frozen:
        given[index].requires_grad_(False)
    leaves = [t for t in given if t.requires_grad]
    for grad, want in zip(grads(in_tiles(*given), leaves), grads(whole(*given), leaves), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 1, LENGTH, 100])
def test_any_tile_and_no_rows_at_all(rows: int) -> None:
    given = operands()
    torch.testing.assert_close(in_tiles(*given, rows=rows), whole(*given), rtol=1e-12, atol=1e-12)
    made = in_tiles(given[0][:0], *given[1:], rows=rows)
    assert made.shape == (0, DEPTH)
    assert not any(grad.any() for grad in torch.autograd.grad(made.sum(), given[1:]))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch 2.15's own
def test_the_operator_keeps_what_it_promises_torch() -> None:
    x, g, w, d, b = operands()
    torch.library.opcheck(
        tiled_mlp, (x.detach()[None].requires_grad_(), [g, w, d], [b], [True, False, False], GATED, 2 * INNER * 8 * 4)
    )


def test_half_precision_is_as_near_to_the_truth_as_all_rows_at_once() -> None:
    half = [t.detach().bfloat16().requires_grad_() for t in operands()]
    exact = [t.detach().double().requires_grad_() for t in half]
    truth = grads(whole(*exact), exact)
    for grad, untiled, true in zip(grads(in_tiles(*half), half), grads(whole(*half), half), truth, strict=True):
        assert (grad.double() - true).norm() <= 1.2 * (untiled.double() - true).norm()


def up(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, weight))


@pytest.mark.parametrize(
    ("mlp", "why"),
    [
        (lambda x, g, w, d: (F.linear(h := up(x, g), d), h), "%silu is read elsewhere"),
        (lambda x, g, w, d: F.linear(F.dropout(up(x, g), 0.5), d), "%dropout, aten::dropout, draws random numbers"),
        (lambda x, g, w, d: F.linear(up(x, g).softmax(-1), d), "%softmax, aten::softmax, is not a pointwise operator"),
        (lambda x, g, w, d: F.linear(up(x, g) * w[:, 0], d), "%select, aten::select, is not a pointwise operator"),
        (lambda x, g, w, d: F.linear(up(x, g) * F.linear(x, g[:1]), d), "%mul, aten::mul, has other=linear_1"),
        (lambda x, g, w, d: F.linear(up(x, g) * w.sum(), d), "%mul, aten::mul, has other=sum_1"),
        (lambda x, g, w, d: F.linear(up(x, g) + F.linear(x[0], w[0]), d), "%add, aten::add, has other=linear_1"),
        (lambda x, g, w, d: F.linear(up(x, g) * x.sum().reshape(1, 1), d), "%mul, aten::mul, has other=reshape"),
        (lambda x, g, w, d: F.linear(x, g), "%x_1 is not computed by a linear"),
        (lambda x, g, w, d: F.linear(up(x, g) * F.linear(x.sin(), w), d), "the linears read %x_1 and %sin"),
        (lambda x, g, w, d: F.linear(up(x, g) * (F.linear(x, w) > 0), d), "%gt, aten::gt, gives bool"),
        (lambda x, g, w, d: F.linear(up(x, g).reshape(1, -1, INNER), d), "the rows of %linear_1 are not those of %x_1"),
        (lambda x, g, w, d: F.linear(up(x, g).reshape(-1).reshape(-1, INNER), d), "aten::reshape, rearranges rows"),
        (lambda x, g, w, d: F.linear(up(x, g).chunk(2, 0)[0], d), "aten::chunk, does not select columns"),
        (lambda x, g, w, d: F.linear(up(x, g).clamp(max=torch.inf), d), "%clamp, aten::clamp, has max=inf"),
        (lambda x, g, w, d: F.linear(up(x[:4], g), d), "the 4 rows of %slice_1 fit into a tile"),
    ],
)
def test_what_does_not_match_and_why(mlp: Callable[..., Any], why: str) -> None:
    given = [t.detach() for t in operands()[:4]]
    (tile,) = tiled_mlp_rules(INNER * 8 * 5).rules()
    check_left_alone(RuleSet("alone", tile), tile.id, mlp, given, why)


def test_a_symbolic_number_of_rows_is_tiled_however_few_there_are() -> None:
    tiled = list[int]()

    def backend(gm: fx.GraphModule, _: Any) -> fx.GraphModule:
        gm = normalize(gm)
        tiled.append(tiled_mlp_rules().apply(gm)["tiled_mlp.tile"].rewrites)
        return gm

    mlp = Gated()
    run = torch.compile(mlp, backend=backend, fullgraph=True)
    for length in (5, 7, LENGTH):
        x = torch.rand(BATCH, length, DEPTH)
        torch.testing.assert_close(run(x), mlp(x))
    assert tiled == [0, 1]


def test_what_autocast_casts_unseen_does_not_match() -> None:
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> fx.GraphModule:
        found.append(gm)
        return gm

    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(Gated(), backend=backend, fullgraph=True)(torch.rand(LENGTH, DEPTH))
    why = str(tiled_mlp_rules(1).once().explain(found[0], "tiled_mlp.tile"))
    assert "is bfloat16, %l_x_ is float32" in why
