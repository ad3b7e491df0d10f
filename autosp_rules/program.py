"""Compiled programs as Dynamo calls them, with what happens at every call: checks, and gradients and outputs converted.

ShardedProgram     each rank computes a part; inputs are whole, outputs are whole or gathered when they are used
WholeProgram       a part of a model without a sequence, which every rank runs whole
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError, raised_as_autosp_error
from autosp_rules.gradients import GradientPlan
from autosp_rules.random import draws_alike
from autosp_rules.transform import Border
from fxrewrite.ops import is_parameter
from fxrewrite.spmd import (
    Advice,
    Axis,
    RankChecks,
    WholeCalls,
    change_gradients,
    devices_of,
    is_due,
)

__all__ = ["ADVICE", "ShardedProgram", "WholeProgram"]

ADVICE = Advice(
    inputs="pass the same whole batch on every rank of the axis: sample by the data axis, as "
    "DistributedSampler(dataset, num_replicas=mesh['dp'].size(), rank=mesh.get_local_rank('dp')), or let "
    "autosp_rules.integrations share a trainer's batches",
    parameters="average gradients over all ranks, those of this axis too, or compile with autosp(gradients='done'); "
    "and start every rank from the same checkpoint",
    generators="seed all ranks alike, torch.manual_seed(seed), and let what only some ranks draw, such as a data "
    "loader's order, draw by a torch.Generator of its own",
)


class _Program:
    """What both kinds share: the form of parameters' gradients."""

    run: Callable[..., Any]
    """The graph as the inner backend compiled it."""

    def __init__(self, gm: fx.GraphModule, config: AutoSPConfig, axis: Axis, border: Border) -> None:
        self._config, self._axis, self._border, self._crossing = config, axis, border, border.crossing
        self._is_parameter = [is_parameter(node) for node in gm.graph.find_nodes(op="placeholder")]
        self._gradients = GradientPlan()
        self._runs_eagerly = config.inner == "eager" or not isinstance(config.inner, str)
        self._calls = 0

    def _entered(self, inputs: Sequence[Any], *, is_sharded: bool) -> list[Any]:
        """Returns the inputs, through which gradients flow in the form that their reader expects."""
        if not torch.is_grad_enabled():
            return list(inputs)
        self._calls += 1
        if is_due(self._calls):  # a wrapper may be added after the first call
            weights = [x for x, p in zip(inputs, self._is_parameter, strict=True) if p and isinstance(x, torch.Tensor)]
            self._gradients = GradientPlan.of(self._config.gradients, self._axis, weights)
            if self._border.graph_break and self._gradients.factor != 1:
                raise AutoSPError.of(
                    f"gradients are summed over axis {self._axis.name}, and the graph breaks "
                    f"({self._border.graph_break}): what runs between graphs has whole gradients on every rank, which "
                    f"a sum counts {self._axis.size} times",
                    hint="let gradients be averaged over all ranks, or remove the graph break",
                )
        entered = self._gradients.enter(
            inputs, self._is_parameter, self._axis, is_sharded=is_sharded, chunks=self._crossing.chunks
        )
        if not is_sharded or not self._runs_eagerly:
            return entered
        # AOTAutograd refuses second derivatives; eager operators have them, of the rank's part of the loss alone.
        flows = [isinstance(x, torch.Tensor) and x.requires_grad for x in entered]
        return [change_gradients([x])[0] if flow else x for x, flow in zip(entered, flows, strict=True)]


class ShardedProgram(_Program):
    """The compiled program of a graph whose sequence is sharded."""

    def __init__(self, gm: fx.GraphModule, config: AutoSPConfig, axis: Axis, border: Border, whole: WholeCalls) -> None:
        super().__init__(gm, config, axis, border)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._checks = RankChecks(
            placeholders, axis, ADVICE, drawn=draws_alike(gm), whole=whole, every_call=config.compare_ranks
        )
        self._outputs = border.outputs.of(gm)

    def settle(self) -> None:
        """Reads the result of comparing the ranks in the last call."""
        with raised_as_autosp_error():
            self._checks.settle()

    def finish(self) -> None:
        """Compare what programs that run whole were called with since the last call of this one; on every rank."""
        with raised_as_autosp_error():
            self._checks.finish()

    def __call__(self, *inputs: Any) -> Any:
        inputs = tuple(self._crossing.entered(inputs))
        with raised_as_autosp_error():
            self._checks.before([None if i in self._crossing.chunks else x for i, x in enumerate(inputs)])
        given = self._entered(inputs, is_sharded=True)
        try:
            outputs = self.run(*given)
        except Exception:
            self.settle()  # if the ranks differ, this raises the cause
            raise
        return self._outputs.left(self._crossing.left(outputs), given)


class WholeProgram(_Program):
    """The compiled program of a part of a model without a sequence."""

    def __init__(
        self,
        gm: fx.GraphModule,
        config: AutoSPConfig,
        axis: Axis,
        border: Border,
        whole: WholeCalls,
        check: Callable[[], None],
    ) -> None:
        super().__init__(gm, config, axis, border)
        self._names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
        self._generators = devices_of(draws_alike(gm))
        self._whole, self._check, self._is_first = whole, check, True

    def __call__(self, *inputs: Any) -> Any:
        inputs = tuple(self._crossing.entered(inputs))
        if self._config.compare_ranks and torch.is_grad_enabled():  # to evaluate, one rank may run it alone
            each = zip(self._names, inputs, self._is_parameter, strict=True)
            self._whole.add([(name, x) for name, x, is_weight in each if not is_weight], self._generators)
        if not self._is_first:
            self._check()  # from the second call on, every part of the model is compiled
        self._is_first = False
        return self.run(*self._entered(inputs, is_sharded=False))
