"""`disable_in_eval`: what is called with gradients disabled runs whole on every rank, as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autosp_rules import AutoSPConfig, autosp, dry_run
from fxrewrite.testing import fake_mesh


class Tokens(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).cumsum(1)


def test_a_graph_without_gradients_is_left_alone() -> None:
    torch._dynamo.reset()
    model, ids = Tokens(8, 4), torch.arange(16).reshape(2, 8) % 8
    with fake_mesh((4,), ("sp",)) as mesh:
        backend = autosp("eager", mesh=mesh, disable_in_eval=True)
        with torch.no_grad():  # no rank waits for another: a fake mesh has none
            found = torch.compile(model.eval(), backend=backend)(ids)
    assert torch.equal(found, model(ids))
    (report,) = backend.reports
    assert report.num_ranks == 4
    assert not report.collectives
    assert report.lines == (
        "gradients are disabled, and so is AutoSP then (disable_in_eval): the graph went to the inner backend as it "
        "was, and runs whole on every rank",
    )


def test_a_graph_with_gradients_is_sharded_all_the_same() -> None:
    torch._dynamo.reset()
    model, ids = Tokens(8, 4), torch.arange(16).reshape(2, 8) % 8
    with fake_mesh((4,), ("sp",)) as mesh:
        for disable, grad in ((True, True), (False, False)):
            torch._dynamo.reset()
            backend = autosp(lambda gm, inputs: lambda *args: (model(ids),), mesh=mesh, disable_in_eval=disable)
            with torch.set_grad_enabled(grad):
                torch.compile(model, backend=backend)(ids)
            assert backend.reports[0].slices == 1


@pytest.mark.parametrize(("num_ranks", "grad"), [(1, True), (4, False)])
def test_a_dry_run_leaves_alone_what_a_run_does(num_ranks: int, grad: bool) -> None:
    ids, config = torch.arange(16).reshape(2, 8) % 8, AutoSPConfig(disable_in_eval=True)
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        _, report = dry_run(Tokens(8, 4), {"ids": ids}, num_ranks=num_ranks, config=config)
    (line,) = report.lines
    assert line.endswith("the graph went to the inner backend as it was, and runs whole on every rank")
