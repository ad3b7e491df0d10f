"""Reductions and norms over a sharded dimension run in parts: exact, and a few numbers are sent."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxrewrite import RuleSet
from fxrewrite.backends import capture_with_inputs, normalized
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.ops import key
from fxrewrite.spmd import (
    Gathered,
    LayoutRule,
    LayoutRules,
    Parallelism,
    PropagatePlacements,
    Shard,
    axis_of,
    contexts,
    inputs,
    module_input,
    module_output,
)
from fxrewrite.testing import fake_mesh, run_on_ranks, simulate, try_placements
from tests.rules.test_layouts import PLAN

aten = torch.ops.aten
INF, NAN = math.inf, math.nan


def collectives(gm: torch.fx.GraphModule) -> Counter[str]:
    names = (key(node).partition("::")[2] for node in gm.graph.nodes if key(node).startswith("_c10d_functional::"))
    return Counter(name for name in names if name != "wait_tensor")


def tried(target: Any, args: tuple[Any, ...], num_ranks: int, dim: int, **kwargs: Any) -> tuple[float, Counter[str]]:
    """The error of a call whose first operand is sharded, and what it sends forward; nothing is gathered."""
    placed = Shard(dim, uneven=args[0].shape[dim] % num_ranks != 0)
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        trial = try_placements(target, args, kwargs, [placed], axis=axis_of(mesh, "sp"), plan=PLAN)
    assert not trial.gathered
    return trial.error, collectives(trial.program)


def numbers(*shape: int, mean: float = 0.0) -> torch.Tensor:
    return (torch.randn(shape, dtype=torch.float64) + mean).requires_grad_()


REDUCED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], int]] = {
    "var": (aten.var.correction, ([1],), {"correction": 1}, 2),
    "var of all": (aten.var.correction, (), {"correction": 0}, 2),
    "var of two dimensions": (aten.var.correction, ([1, -1],), {"correction": 0, "keepdim": True}, 2),
    "var less a fraction": (aten.var.correction, ([1],), {"correction": 0.5}, 2),
    "std": (aten.std.dim, ([1, 2], True, True), {}, 2),
    "std of all": (aten.std.default, (False,), {}, 2),
    "var and mean": (aten.var_mean.correction, ([1],), {"correction": 2, "keepdim": True}, 2),
    "std and mean": (aten.std_mean.correction, ([-2, 0],), {"correction": 0}, 2),
    "norm": (aten.linalg_vector_norm.default, (2, [1]), {}, 1),
    "norm of all": (aten.linalg_vector_norm.default, (), {}, 1),
    "1-norm": (aten.linalg_vector_norm.default, (1, [0, 1], True), {}, 1),
    "3-norm": (aten.linalg_vector_norm.default, (3, [1]), {}, 1),
    "1.5-norm": (aten.linalg_vector_norm.default, (1.5, [1]), {}, 1),
    "norm of a matrix": (aten.linalg_norm.default, (None, [1, 2]), {}, 1),
    "logsumexp": (aten.logsumexp.default, ([1],), {}, 2),
    "logsumexp of two dimensions": (aten.logsumexp.default, ([1, 0], True), {}, 2),
    "softmax": (aten.softmax.int, (1,), {}, 2),
    "log_softmax": (aten.log_softmax.int, (-2,), {}, 2),
    "layer_norm": (aten.layer_norm.default, ([7, 3],), {}, 2),
    "rms_norm": (aten.rms_norm.default, ([7, 3],), {}, 1),
}
"""Calls on [4, 7, 3], of which dimension 1 is sharded, and how many all-reduces each needs."""


@pytest.mark.parametrize("case", REDUCED)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_few_numbers_are_sent_and_padding_counts_nothing(case: str, num_ranks: int) -> None:
    torch.manual_seed(0)
    target, args, kwargs, num_sent = REDUCED[case]
    error, sent = tried(target, (numbers(4, 7, 3, mean=3.0), *args), num_ranks, 1, **kwargs)
    assert error < 1e-12
    weighted = 1  # the test's own sum over results that stay in shards, or none
    assert sent["all_reduce"] in (num_sent, num_sent + weighted)
    assert sent.keys() <= {"all_reduce", "all_gather_into_tensor"}  # the latter of results in shards


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.logsumexp.default, ([1],)),
        (aten.softmax.int, (1,)),
        (aten.log_softmax.int, (1,)),
        (aten.var.dim, ([1],)),
        (aten.std.dim, ([1],)),
        (aten.linalg_vector_norm.default, (2, [1])),
    ],
    ids=str,
)
def test_rows_without_numbers_are_those_of_one_device(target: Any, args: tuple[Any, ...]) -> None:
    """Values and gradients: rows of -inf, with inf, with NaN, of zeros, and masked in part.

    A gradient of a variance is NaN in the last of these, where that of one device is inf for some entries.
    """
    rows = [[-INF] * 5, [INF, 1, 2, 3, -INF], [1, 2, NAN, 4, 5], [0.0] * 5, [4, 3, 2, 1, 0]]
    if target not in (aten.var.dim, aten.std.dim):
        rows.append([-INF, -INF, 1, 2, -INF])
    x = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    for num_ranks in (2, 3):
        assert tried(target, (x, *args), num_ranks, 1)[0] < 1e-12


@pytest.mark.parametrize("correction", [0, 1, 2, 3])
def test_few_entries_divide_as_torch_does(correction: int) -> None:
    """By 0, which is inf or NaN, where there are no more entries than the correction; gradients are no numbers then."""
    x = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.float64, requires_grad=correction < 2)
    assert tried(aten.var.correction, (x, [1]), 2, 1, correction=correction)[0] < 1e-12


def test_no_digits_are_lost_where_the_mean_is_large() -> None:
    """The mean is known to 1e-7, the unit of x. E[x^2] - E[x]^2 would be wrong by 100."""
    torch.manual_seed(0)
    x = numbers(6, 8, mean=1e9)
    assert tried(aten.var.dim, (x, [1]), 4, 1)[0] < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.var.dim, ([1],)),
        (aten.std.dim, ([1],)),
        (aten.linalg_vector_norm.default, (2, [1])),
        (aten.logsumexp.default, ([1],)),
        (aten.softmax.int, (1,)),
        (aten.layer_norm.default, ([4096],)),
    ],
    ids=str,
)
def test_half_precision_is_summed_in_float32(target: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 4096) * (400 if target is aten.std.dim else 4)).to(dtype)  # 400 squared is beyond float16
    eps, largest = torch.finfo(dtype).eps, target(x, *args).abs().max().item()
    assert tried(target, (x, *args), 4, 1)[0] <= 2 * eps * largest


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linalg_vector_norm.default, (0.5, [1])),  # of which torch cuts gradients at 0
        (aten.linalg_norm.ord_str, ("nuc", [0, 1])),
        (aten.var.dim, ([1],)),
    ],
    ids=["0.5-norm", "nuclear norm", "complex numbers"],
)
def test_what_the_parts_do_not_know_is_gathered(target: Any, args: tuple[Any, ...]) -> None:
    x = torch.randn(4, 6, dtype=torch.complex128 if target is aten.var.dim else torch.float64)
    with pytest.raises(AssertionError, match="gathered"):
        tried(target, (x, *args), 2, 1)


def test_only_what_is_gathered_of_the_first_operand_runs_in_parts() -> None:
    """Rows of a layer norm are independent, and its weight is gathered."""
    x, weight = numbers(4, 6), numbers(6)
    with fake_mesh((2,), ("sp",)) as mesh:
        call = aten.layer_norm.default, (x, [6], weight), {}
        trial = try_placements(*call, [Shard(0), Shard(0)], axis=axis_of(mesh, "sp"), plan=PLAN)
    assert trial.error < 1e-12
    assert "aten::layer_norm" in map(key, trial.program.graph.nodes)


class Net(nn.Module):
    """A convolution, a norm, and the statistics that the norm keeps."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv1d(3, 6, 3, padding=1), norm, nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(self.conv(x))
        kept = [buffer.clone() for buffer in self.norm.buffers()]
        return self.head(y.relu().sum(-1)).square().mean(), y, *kept


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "without weights": lambda: nn.BatchNorm1d(6, affine=False, momentum=0.3),
    "evaluated": lambda: nn.BatchNorm1d(6).eval(),
    "instance norm": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
    "group norm": lambda: nn.GroupNorm(2, 6),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("rows", "num_ranks"), [(8, 2), (7, 2), (8, 3), (7, 4)])
@pytest.mark.some(8)
def test_norms_of_a_batch_in_shards_are_those_of_one_device(norm: str, rows: int, num_ranks: int) -> None:
    """Loss, every gradient, and the running statistics, which every rank then has."""
    torch._dynamo.reset()
    plan = Parallelism("batch", axis="dp", place={module_input("conv"): Shard(0, uneven=rows % num_ranks != 0)})
    x = torch.randn(rows, 3, 5, dtype=torch.float64) * 3 + 2
    found = simulate(Net(NORMS[norm]()).double(), {"x": x}, plan, {"dp": num_ranks})
    assert found.error < 1e-12, str(found)
    num_outputs = {"batch norm": 4, "without weights": 4, "evaluated": 4, "instance norm": 4}
    assert len(found.output_errors) == num_outputs.get(norm, 1)
    of_norm = 2 if norm.startswith(("batch", "without")) else 2 if norm == "instance norm" else 0
    assert found.sent["dp"]["all_reduce"] == 1 + of_norm  # of the loss; mean and variance
    gathered = found.report.events_of(Gathered)
    assert not gathered, gathered


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_a_dimension_in_shards_at_other_sizes(norm: str) -> None:
    """One program, that is for any length."""
    torch._dynamo.reset()
    plan = Parallelism("lengths", axis="sp", place={module_output("conv"): Shard(2, uneven=True)})
    model, x = Net(NORMS[norm]()).double(), torch.randn(4, 3, 8, dtype=torch.float64)
    torch._dynamo.mark_dynamic(x, 2)
    gm, given = capture_with_inputs(model, {"x": x})
    program = normalized(gm)
    with fake_mesh((4,), ("sp",)) as mesh:
        report = plan.plan().apply(program, context=contexts(mesh))
        assert not report.events_of(Gathered)
        for length in (8, 7, 11):
            y = torch.randn(4, 3, length, dtype=torch.float64)
            values = [
                y if value is x else length if isinstance(value, (int, torch.SymInt)) else value for value in given
            ]
            run = run_on_ranks(program, values, mesh, backward=0)
            one = copy.deepcopy(model)
            expected = one(y)
            expected[0].backward()
            for outputs in run.outputs:
                torch.testing.assert_close(outputs, tuple(value.detach() for value in expected), rtol=1e-12, atol=1e-12)
            grads = {id(value): grad for value, grad in zip(given, run.gradients(), strict=True)}
            for parameter, of_one in zip(model.parameters(), one.parameters(), strict=True):
                torch.testing.assert_close(grads[id(parameter)], of_one.grad, rtol=1e-12, atol=1e-12)


def test_parts_that_raise_or_give_another_shape_are_errors_of_the_rule() -> None:
    def halve(args: Any) -> Any:
        return args["self"].sum([1], keepdim=True)

    def fail(args: Any) -> Any:
        return args["nothing"]

    def repeat(args: Any) -> Any:
        return args["self"].abs().prod(1)

    for function, said in [
        (
            halve,
            r"layout rule mine.prod: its parts of aten::prod at %prod.* give torch.float64 \[4, 1\], and the call",
        ),
        (fail, r"its parts of aten::prod at %prod.* raised KeyError: 'nothing'"),
        (repeat, r"its parts of aten::prod at %prod.* have aten::prod, which the rule writes in parts itself"),
    ]:
        rules = LayoutRules([LayoutRule("mine.prod", ("aten::prod",), "a !b -> a", parts={"aten::prod": function})])
        plan = RuleSet("mine", PropagatePlacements("layouts", rules)).once()
        with fake_mesh((2,), ("sp",)) as mesh, pytest.raises(RuleDefinitionError, match=said):
            try_placements(aten.prod.dim_int, (numbers(4, 6), 1), {}, [Shard(1)], axis=axis_of(mesh, "sp"), plan=plan)
    with pytest.raises(RuleDefinitionError, match=r"mine\.prod: parts of aten::sum, which is not one of its operators"):
        LayoutRule("mine.prod", ("aten::prod",), "a !b -> a", parts={"aten::sum": halve})


@pytest.mark.parametrize("norm", ["batch norm", "instance norm"])
def test_statistics_over_two_axes_of_a_mesh(norm: str) -> None:
    """One has parts of the batch, the other of each sample."""
    torch._dynamo.reset()
    batch = Parallelism("batch", axis="dp", place={inputs("x"): Shard(0)})
    space = Parallelism("space", axis="sp", place={module_output("conv"): Shard(2, uneven=True)})
    x = torch.randn(4, 3, 5, dtype=torch.float64) * 3 + 2
    found = simulate(Net(NORMS[norm]()).double(), {"x": x}, batch | space, {"dp": 2, "sp": 2})
    assert found.error < 1e-12, str(found)
    assert not found.report.events_of(Gathered)
