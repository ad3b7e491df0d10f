"""The comparison: equal where the two runs compute the same, and a mistake in the sharded run is seen."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from autosp_rules.config import AutoSPConfig
from autosp_rules.demo.job import Job, build_config, build_model, make_batch, text_files
from autosp_rules.demo.train import (
    DRIFT_BOUND,
    GRADIENT_BOUND,
    LOSS_BOUND,
    StepRow,
    TrainingRun,
    compare,
    gradient_difference,
    relative_difference,
    worst,
)

SMALL = {
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
JOB = Job("llama", text_files(None), SMALL, seq_len=32, batch=2, ranks=1, steps=3, config=AutoSPConfig(inner="eager"))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def scaled(factor: float) -> Callable[..., Any]:
    """A backend whose loss, and so its gradients, are `factor` times what they should be."""

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            loss, *rest = gm(*args)
            return [loss * factor, *rest]

        return run

    return backend


def wrong_in_gradients_only(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A backend with the right loss and gradients that are 1 % too large."""

    def run(*args: Any) -> Any:
        loss, *rest = gm(*args)
        return [loss * 1.01 - 0.01 * loss.detach(), *rest]

    return run


@pytest.mark.usefixtures("one_rank")
def test_equal_runs_are_equal_and_train() -> None:
    rows = list(compare(JOB, "aot_eager"))
    assert [row.step for row in rows] == [1, 2, 3]
    assert all(row.is_equal for row in rows)
    assert all(row.drift < 1e-6 for row in rows)


@pytest.mark.usefixtures("one_rank")
def test_both_runs_learn() -> None:
    rows = list(compare(replace(JOB, overrides={**SMALL, "hidden_size": 64}, steps=12), "eager"))
    assert rows[-1].loss_one_device < rows[0].loss_one_device - 0.3
    assert rows[-1].loss_sharded < rows[0].loss_sharded - 0.3


@pytest.mark.usefixtures("one_rank")
def test_a_wrong_loss_is_seen_at_the_first_step() -> None:
    (row, *_) = compare(JOB, scaled(1.0001))
    assert not row.is_equal
    assert row.loss_difference == pytest.approx(1e-4, rel=0.01)


@pytest.mark.usefixtures("one_rank")
def test_wrong_gradients_are_seen_at_the_first_step() -> None:
    (row, *_) = compare(JOB, wrong_in_gradients_only)
    assert not row.is_equal
    assert row.loss_difference < LOSS_BOUND
    assert row.gradient_difference == pytest.approx(0.01, rel=0.01)


@pytest.mark.usefixtures("one_rank")
def test_what_goes_on_is_told() -> None:
    told: list[str] = []
    list(compare(JOB, "eager", told.append))
    assert told[:3] == ["compiling for 1 ranks", "compiling for one device", "training"]


def test_borrowed_weights_are_given_back() -> None:
    config = build_config("llama", SMALL)
    run = TrainingRun(build_model(config, 0), "eager")
    other = build_model(config, 1)
    own = copy.deepcopy(run.model.state_dict())
    batch = make_batch(JOB, 1)
    with run.at_weights_of(other):
        borrowed = run.backward(batch)
    assert borrowed == pytest.approx(other(**batch).loss.item(), rel=1e-6)
    assert all(torch.equal(value, own[name]) for name, value in run.model.state_dict().items())


def with_grads(**grads: list[float] | None) -> nn.Module:
    model = nn.Module()
    for name, grad in grads.items():
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = None if grad is None else torch.tensor(grad)
        model.register_parameter(name, parameter)
    return model


def test_gradient_difference_is_that_of_the_worst_parameter_against_its_own_largest() -> None:
    expected = with_grads(a=[1.0, -100.0], b=[1.0, -2.0])
    value, name = gradient_difference(with_grads(a=[1.0, -99.0], b=[1.2, -2.0]), expected)
    assert (value, name) == (pytest.approx(0.1), "b")


def test_a_gradient_that_is_zero_but_for_rounding_does_not_count() -> None:
    expected = with_grads(weight=[1.0, 1.0], key_bias=[1e-9, 0.0])
    value, _ = gradient_difference(with_grads(weight=[1.0, 1.0], key_bias=[-1e-9, 0.0]), expected)
    assert value < GRADIENT_BOUND


def test_a_gradient_that_only_one_run_has_is_infinitely_wrong() -> None:
    expected = with_grads(a=[1.0, 1.0], b=None, unused=None)
    assert gradient_difference(with_grads(a=[1.0, 1.0], b=[1.0, 0.0], unused=None), expected) == (math.inf, "b")


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_difference": 2 * LOSS_BOUND},
        {"gradient_difference": 2 * GRADIENT_BOUND},
        {"loss_one_device": 2.0 * (1 + 2 * DRIFT_BOUND)},
        {"loss_difference": math.nan},
        {"gradient_difference": math.nan},
        {"loss_sharded": math.nan},
    ],
)
def test_each_difference_decides(wrong: dict[str, float]) -> None:
    row: dict[str, Any] = {
        "step": 1,
        "loss_one_device": 2.0,
        "loss_sharded": 2.0,
        "loss_difference": 0.0,
        "gradient_difference": 0.0,
        "worst_parameter": "w",
    }
    assert StepRow(**row).is_equal
    assert not StepRow(**{**row, **wrong}).is_equal


def test_a_nan_is_the_worst_difference() -> None:
    assert math.isnan(worst([0.1, math.nan, 0.2]))
    assert worst([0.1, 0.3, 0.2]) == 0.3
    assert relative_difference(1.5, 2.0) == 0.25
