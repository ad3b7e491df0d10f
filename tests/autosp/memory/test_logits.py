"""Logits that are dropped are None; the loss, then computed in tiles, and its gradients stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

from autosp_rules import AutoSPConfig, AutoSPError, dry_run
from autosp_rules.memory.logits import DropLogits
from autosp_rules.transform import transform
from fxrewrite import RuleSet, normalize
from fxrewrite.spmd import axis_of
from fxrewrite.testing import fake_mesh
from tests.autosp.models import VOCAB, batch, build
from tests.autosp.one_device import assert_equal_to_one_device, captured
from tests.autosp.partition import Partition

DROP = AutoSPConfig(logits="drop", loss_tile=VOCAB * 8 * 3)


@pytest.mark.parametrize("kind", ["uneven_labels", "num_items"])
def test_the_loss_in_tiles_is_that_of_one_device(kind: str) -> None:
    """The model casts its logits to float32, and so their gradient."""
    model, inputs = build("qwen3", layers=1), batch("qwen3", kind)
    rounding = {"loss": 1e-6, "grads": 1e-6}
    report = assert_equal_to_one_device(model, inputs, ranks=(2,), config=DROP, **rounding)
    assert report.rewrites["tiled_loss.tile"] == 1
    assert any("is None: logits='drop'" in line for line in report.lines)


def test_no_value_has_all_logits() -> None:
    program, _ = dry_run(build("gpt2", layers=1), batch("gpt2", "plain"), num_ranks=2, config=DROP)
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "call_function"]
    assert not [v for v in values if isinstance(v, torch.Tensor) and VOCAB in v.shape]


def test_the_model_returns_none() -> None:
    def without_logits(gm: fx.GraphModule, _: Any) -> fx.GraphModule:
        gm = normalize(gm)
        RuleSet("drop", DropLogits()).apply(gm)
        return gm

    model, inputs = build("llama_gqa", layers=1), batch("llama_gqa", "plain")
    output = torch.compile(model, backend=without_logits, fullgraph=True)(**inputs)
    assert output.logits is None
    assert output.loss == model(**inputs).loss


def test_no_loss_no_drop() -> None:
    inputs = batch("llama_gqa", "plain")
    del inputs["labels"]
    with pytest.raises(AutoSPError, match=r"has no logits of a cross entropy.*pass labels"):
        dry_run(build("llama_gqa", layers=1), inputs, num_ranks=2, config=DROP)


@pytest.mark.parametrize("loss_tile", [2**20, 64])
def test_a_model_that_returns_its_loss_alone_is_as_without_the_option(loss_tile: int) -> None:
    class Alone(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids)[0]

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    report = assert_equal_to_one_device(
        Alone(_Head(loss)),
        {"ids": torch.arange(32).reshape(2, 16)},
        config=AutoSPConfig(logits="drop", loss_tile=loss_tile),
    )
    assert "logits='drop' changes nothing: the logits %linear are not an output" in report.lines


def test_a_loss_that_is_written_out_is_told_how_to_be_written() -> None:
    def by_gather(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(2, ids[..., None]).mean()

    with pytest.raises(AutoSPError, match=r"%log_softmax .*write it as F.cross_entropy\(logits"):
        dry_run(_Head(by_gather), {"ids": torch.arange(32).reshape(2, 16)}, num_ranks=2, config=DROP)


class _Head(nn.Module):
    """Logits and their loss, which `loss` computes of logits [B, S, V] and labels [B, S]."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), loss
        self.double()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.embed(ids))
        return self.loss(logits, ids), logits


@pytest.mark.parametrize(
    ("loss", "is_tiled"),
    [
        (lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()), True),
        (lambda logits, ids: F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1)), True),
        (lambda logits, ids: F.cross_entropy(logits.transpose(1, 2), ids), False),
    ],
    ids=["flat", "shifted", "rows"],
)
def test_logits_that_are_held_nevertheless_are_reported(loss: Any, is_tiled: bool) -> None:
    ids = torch.arange(32).reshape(2, 16)
    report = assert_equal_to_one_device(_Head(loss), {"ids": ids}, ranks=(2, 3), config=DROP)
    assert report.rewrites.get("tiled_loss.tile", 0) == is_tiled
    assert any("its loss is not computed in tiles" in line for line in report.lines) != is_tiled


def test_a_program_for_any_length_is_tiled_from_the_first_on() -> None:
    model = _Head(lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()))
    ids = torch.arange(32).reshape(2, 16)
    torch._dynamo.mark_dynamic(ids, 1)
    report = assert_equal_to_one_device(model, {"ids": ids}, ranks=(2,), config=AutoSPConfig(logits="drop"))
    assert report.rewrites["tiled_loss.tile"] == 1


class _Shown(_Head):
    """Its loss reads the logits, and `shown` of them is returned."""

    def __init__(self, *shown: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()))
        self.shown = shown

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, logits = super().forward(ids)
        return loss, *(show(logits) for show in self.shown)


def test_logits_in_another_type_or_shape_are_dropped_too() -> None:
    model = _Shown(torch.Tensor.float, lambda logits: logits.transpose(0, 1).contiguous())
    report = assert_equal_to_one_device(model, {"ids": torch.arange(32).reshape(2, 16)}, ranks=(2,), config=DROP)
    assert report.rewrites["tiled_loss.tile"] == 1
    shapes = f"output %to (2, 16, {VOCAB}) is None: logits='drop'; output %contiguous (16, 2, {VOCAB}) is None"
    assert any(line.startswith(shapes) for line in report.lines), report.lines


@pytest.mark.parametrize(
    "shown", [lambda logits: logits.argmax(-1), lambda logits: logits[:, -1:]], ids=["argmax", "last"]
)
def test_logits_that_something_else_reads_are_held_and_reported(shown: Any) -> None:
    model, inputs = _Shown(shown), {"ids": torch.arange(32).reshape(2, 16)}
    report = assert_equal_to_one_device(model, inputs, ranks=(2,), config=DROP)
    assert not report.rewrites.get("tiled_loss.tile")
    (line,) = (line for line in report.lines if "changes nothing" in line)
    assert line.endswith(" reads them besides their loss")
    assert any("its loss is not computed in tiles" in line for line in report.lines)
    both = assert_equal_to_one_device(_Shown(torch.Tensor.float, shown), inputs, ranks=(2,), config=DROP)
    assert any("output %to (" in line for line in both.lines)
    assert any("its loss is not computed in tiles" in line for line in both.lines)


class _Predictor(nn.Module):
    """A layer that returns a loss of its own, as those that predict more than one token do."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.head = nn.Linear(8, 8), nn.Linear(8, VOCAB)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.proj(x).tanh()).flatten(0, 1), ids.flatten())


class _Predictors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, 8), nn.ModuleList(_Predictor() for _ in range(2))
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.layers[0](x, ids) + 0.3 * self.layers[1](x, ids.roll(-1, 1))


def test_a_loss_in_tiles_is_in_no_layer_that_is_computed_again() -> None:
    model, inputs = _Predictors(), {"ids": torch.arange(32).reshape(2, 16)}
    config = DROP.model_copy(update={"checkpoint": "full", "logits": "keep"})
    report = assert_equal_to_one_device(model, inputs, ranks=(2,), config=config)
    assert report.rewrites["tiled_loss.tile"] == 2
    gm, args = captured(model, inputs)
    with fake_mesh((2,), ("sp",)) as mesh:
        partition = Partition(transform(gm, config, axis_of(mesh, "sp"))[0], args)
    assert partition.num_again("tanh") == 2
    assert partition.num_again("tiled_cross_entropy") == 0
