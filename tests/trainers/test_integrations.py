"""What the integrations refuse, in one sentence each, and the parts of other packages that they stand on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from autosp_rules import AutoSPError
from autosp_rules.integrations.accelerate import share_batches
from autosp_rules.integrations.deepspeed import replace_autosp
from fxrewrite.testing import fake_mesh


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        AutoSPError, match=r"^autosp: the package deepspeed is not installed; pip install 'fxrewrite\[tr"
    ):
        replace_autosp()


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(AutoSPError, match=r"Linear is neither a transformers\.Trainer nor an accelerate\.Accelerator"):
        share_batches(torch.nn.Linear(1, 1))


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate", reason="not installed: accelerate; see `make trainers`")
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_mesh_that_does_not_fit_is_refused(accelerator: Any) -> None:
    with fake_mesh((2, 2), ("dp", "sp")) as mesh:
        with pytest.raises(AutoSPError, match=r"the mesh has no axis 'cp'; it has \('dp', 'sp'\)"):
            share_batches(accelerator, mesh, "cp")
        with pytest.raises(AutoSPError, match="the mesh has 4 ranks, the job has 1; name the other axes too"):
            share_batches(accelerator, mesh)


def test_a_loader_that_is_already_prepared_is_refused(accelerator: Any) -> None:
    """Accelerate keeps prepared loaders in `_dataloaders`; where it no longer does, this fails."""
    accelerator.prepare(DataLoader(range(4)))  # type: ignore[arg-type]
    with pytest.raises(AutoSPError, match="has already prepared a data loader"):
        share_batches(accelerator)


def test_dispatching_is_refused(accelerator: Any) -> None:
    accelerator.dataloader_config.dispatch_batches = True
    share_batches(accelerator)
    with pytest.raises(AutoSPError, match="with dispatch_batches=True process 0 deals every other rank its own part"):
        accelerator.prepare(DataLoader(range(4)))  # type: ignore[arg-type]


def test_the_accelerator_of_a_trainer_is_refused_and_so_is_a_sampler_that_knows_ranks(
    accelerator: Any, tmp_path: Any
) -> None:
    """A Trainer keeps the bound method `gather_for_metrics`, out of reach of share_batches(trainer.accelerator)."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = Trainer(torch.nn.Linear(1, 1), args)
    args.train_sampling_strategy = "batch_rebalance"
    with pytest.raises(AutoSPError, match="'batch_rebalance' deals each rank its own batches by itself"):
        share_batches(trainer)
    args.train_sampling_strategy = "random"
    with pytest.raises(
        AutoSPError, match=r"share_batches\(trainer, mesh\) instead of share_batches\(trainer\.accelera"
    ):
        share_batches(trainer.accelerator)
    share_batches(trainer)
    assert trainer.gather_function is trainer.accelerator.gather_for_metrics


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("replica", [0, 1])
def test_replicas_of_four_ranks_read_what_two_processes_would(
    accelerator: Any, replica: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set with indices, and one without, which accelerate would otherwise read on process 0 alone."""
    state = accelerator.state._shared_state
    for rank in (2 * replica, 2 * replica + 1):
        with fake_mesh((2, 2), ("dp", "sp"), rank=rank) as mesh:
            monkeypatch.setitem(state, "num_processes", 4)
            monkeypatch.setitem(state, "process_index", rank)
            accelerator._dataloaders.clear()
            share_batches(accelerator, mesh)
            for data in (list(range(10)), _Stream()):
                loader = accelerator.prepare_data_loader(DataLoader(data, batch_size=2))  # type: ignore[arg-type]
                expected = [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
                assert _batches(loader) == expected[replica]


def _batches(loader: Any) -> list[list[int]]:
    """Without accelerate's iterator, which waits for the other processes."""
    if not isinstance(loader.dataset, IterableDataset):
        return list(loader.batch_sampler)
    rows = list(loader.dataset)
    return [rows[start : start + 2] for start in range(0, len(rows), 2)]


def test_deepspeed_has_the_method_that_is_replaced() -> None:
    engine = pytest.importorskip("deepspeed.runtime.engine", reason="not installed: deepspeed; see `make trainers`")
    original = engine.DeepSpeedEngine.get_autosp_backend
    put_back = replace_autosp("aot_eager")
    assert engine.DeepSpeedEngine.get_autosp_backend is not original
    put_back()
    assert engine.DeepSpeedEngine.get_autosp_backend is original
