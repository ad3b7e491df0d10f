"""Simulated ranks compute what torch computes, also where LocalTensorMode alone would fail."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd import LayoutRule, Parallelism, Shard, inputs, outputs, param
from fxrewrite.testing import fake_mesh, run_on_ranks, simulate
from rules.parallel import DATA, ZERO3


class Lengths(torch.nn.Module):
    """The length of what a function makes of a linear layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = torch.nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x)).abs().sum()


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y * (1 + 2j),
        lambda y: (1 - 2j) * torch.complex(y, y) + 1,
        lambda y: (3 - 1j) / (y + 1j),
        lambda y: torch.add(torch.complex(y, y), y, alpha=1 + 2j),
    ],
    ids=["times", "from the left", "divided", "alpha"],
)
def test_complex_numbers_of_python(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch._dynamo.reset()
    plan = Parallelism("mine", axis="tp", place={param("layer.weight"): Shard(0)})
    found = simulate(Lengths(function), {"x": torch.rand(2, 4)}, plan, {"tp": 2})
    assert found.loss_error < 1e-6
    assert found.grad_error < 1e-6


class Empty(Lengths):
    """Adds a parameter without entries."""

    def __init__(self) -> None:
        super().__init__(torch.relu)
        self.none = torch.nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.none.sum()


def test_a_parameter_without_entries() -> None:
    torch._dynamo.reset()
    plan = Parallelism("mine", axis="tp", place={param("layer.weight"): Shard(0)})
    found = simulate(Empty(), {"x": torch.rand(2, 4)}, plan, {"tp": 2})
    assert found.grad_error < 1e-6
    assert found.grad_errors["none"] == 0


def test_chunks_of_an_uneven_cut_that_are_cut_again_have_one_size_on_all_ranks() -> None:
    gm = fx.symbolic_trace(lambda x: (x.sum(), x * 2))
    rows = torch.arange(1.0, 8.0).requires_grad_()
    uneven = Shard(0, uneven=True)
    with fake_mesh((2, 3), ("outer", "inner")) as mesh:
        run = run_on_ranks(gm, [rows], mesh, placements={0: {"outer": uneven, "inner": uneven}}, backward=0)
    held = [doubled.tolist() for _, doubled in run.outputs]
    assert held == [[2, 4], [6, 8], [0, 0], [10, 12], [14, 0], [0, 0]]
    (grad,) = run.gradients()
    assert grad is not None
    assert grad.tolist() == [1] * 7


@pytest.mark.parametrize("of_bags", [False, True], ids=["embedding", "embedding_bag"])
def test_sparse_gradients_are_refused(of_bags: bool) -> None:
    """Ranks would add them up, or scatter them, as dense ones: torch's error said `reshape is not implemented`."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.EmbeddingBag(8, 4, sparse=True) if of_bags else nn.Embedding(8, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if of_bags:
                return self.table(ids).square().mean()
            return nn.functional.embedding(ids, self.table.weight, sparse=True).square().mean()

    ids = torch.arange(8).reshape(2, 4)
    for plan in (DATA, ZERO3):
        with pytest.raises(FxRewriteError, match=r"an embedding has sparse gradients \(.*\).*set sparse=False"):
            simulate(Sparse(), {"ids": ids}, plan, {"dp": 2})


@torch.library.custom_op("simulate_test::running", mutates_args=())
def running(x: torch.Tensor) -> torch.Tensor:
    """A running sum along the last dimension, of which the rule below says that every dimension is independent."""
    return x.cumsum(-1)


running.register_fake(torch.empty_like)
LIE = LayoutRule("simulate_test.running", ("simulate_test::running",), "a... -> a...")
COLUMNS = Parallelism("columns", axis="tp", place={param("layer.{weight,bias}"): Shard(0)}, layouts=[LIE])


class WithLogits(nn.Module):
    """Returns its loss, what the layer gives, and a running sum of that which no gradient reaches."""

    def __init__(self, returned: Callable[..., object]) -> None:
        super().__init__()
        self.layer, self.returned = nn.Linear(4, 8), returned

    def forward(self, x: torch.Tensor) -> object:
        y = self.layer(x)
        return self.returned(y.square().mean(), y, running(y.detach()))


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda loss, y, summed: (loss, y, summed), ["[1]", "[2]"]),
        (lambda loss, y, summed: {"loss": loss, "of": [summed, y]}, ["['of'][1]", "['of'][0]"]),
        (lambda loss, y, summed: (y, summed, loss), ["[0]", "[1]"]),
    ],
    ids=["tuple", "nested", "loss last"],
)
def test_a_false_layout_rule_that_reaches_one_other_output_is_found(
    returned: Callable[..., object], names: list[str]
) -> None:
    """The loss and all gradients are right, as nothing differentiated goes through it."""
    torch._dynamo.reset()
    model, x = WithLogits(returned).double(), torch.rand(4, 4, dtype=torch.float64)
    for plan, mesh in ((COLUMNS, {"tp": 2}), (ZERO3 | COLUMNS, {"dp": 2, "tp": 2})):
        found = simulate(model, {"x": x}, plan, mesh)
        assert max(found.loss_error, found.grad_error) < 1e-12
        assert sorted(found.output_errors) == sorted(names)
        assert found.output_errors[names[0]] < 1e-12
        assert found.output_error == found.output_errors[names[1]] > 0.1
        assert f", other outputs by {found.output_error:.0e} ({names[1]}); sent" in str(found)


class OfBatch(nn.Module):
    """Its loss depends on which rows are in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(self.layer(x))
        return y.exp().mean(), y.exp().sum(0)


def test_a_part_of_the_data_is_cut_before_a_plan_cuts_it_into_chunks() -> None:
    """So ranks with their own part have the rows that one device computes a loss of, in chunks over the inner axis."""
    torch._dynamo.reset()
    chunks = Parallelism("chunks", axis="cp", place={inputs("x"): Shard(0)})
    x = torch.arange(48.0, dtype=torch.float64).sin().reshape(12, 4)
    for plan, sizes in ((DATA | chunks, {"dp": 2, "cp": 3}), (replace(DATA, axis="out") | DATA | chunks, None)):
        found = simulate(OfBatch().double(), {"x": x}, plan, sizes or {"out": 2, "dp": 2, "cp": 3})
        assert max(found.loss_error, found.grad_error, found.output_error) < 1e-13, str(found)


def test_a_layout_rule_that_tells_another_shape_than_a_rank_computes_is_an_error() -> None:
    """The index of the result is another than that of the operand, which would make it a sum of whole rows."""
    torch._dynamo.reset()
    model = WithLogits(lambda loss, y, summed: (loss, summed + y)).double()
    plan = replace(COLUMNS, layouts=[replace(LIE, index_map="a... b -> a... c")])
    said = r"simulate_test::running at %running .* gives a rank \[4, 4\], and by its layout rule \[4, 8\]"
    with pytest.raises(FxRewriteError, match=said):
        simulate(model, {"x": torch.rand(4, 4, dtype=torch.float64)}, plan, {"tp": 2})


def test_outputs_that_are_stated_in_chunks_are_compared_chunk_by_chunk() -> None:
    torch._dynamo.reset()
    model, x = WithLogits(lambda loss, y, summed: (loss, y, summed)).double(), torch.rand(4, 4, dtype=torch.float64)
    plan = replace(COLUMNS, place={**COLUMNS.place, outputs(1): Shard(1), outputs(2): Shard(1)})
    found = simulate(model, {"x": x}, plan, {"tp": 4})
    assert found.sent == {"tp": {"all_reduce": 1}}
    assert found.output_errors["[1]"] < 1e-12
    assert found.output_errors["[2]"] > 0.1


def test_outputs_of_ranks_with_their_own_data_are_those_of_their_parts() -> None:
    torch._dynamo.reset()
    model = WithLogits(lambda loss, y, summed: (loss, y, summed.argmax(-1), summed > 0, y.log())).double()
    found = simulate(model, {"x": torch.randn(8, 4, dtype=torch.float64)}, DATA, {"dp": 4})
    assert list(found.output_errors) == ["[1]", "[2]", "[3]", "[4]"]  # numbers, indices, booleans, some NaN
    assert found.output_error < 1e-12


def test_what_has_no_entries_or_no_loss_is_told_what_to_do() -> None:
    plan = Parallelism("mine", axis="tp", place={param("weight"): Shard(0)})
    with pytest.raises(FxRewriteError, match=r"^weight is on the meta device, .* call model.to_empty"):
        simulate(nn.Linear(4, 4, device="meta"), {"input": torch.rand(2, 4)}, plan, {"tp": 2})
    with pytest.raises(FxRewriteError, match=r"returns no loss: .* wrap it in a module that returns one"):
        simulate(nn.Linear(4, 4), {"input": torch.rand(2, 4)}, plan, {"tp": 2})
