"""Compiled programs as Dynamo calls them: at every call ranks are compared, gradients and outputs converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autosp_rules.config import AutoSPConfig
from autosp_rules.errors import AutoSPError, raised_as_autosp_error
from autosp_rules.gradients import GradientPlan
from autosp_rules.random import draws_alike
from fxrewrite.backends import compiled_function
from fxrewrite.graph import input_name
from fxrewrite.ops import is_parameter
from fxrewrite.spmd import (
    Advice,
    Axis,
    Border,
    RankChecks,
    change_gradients,
    hooked_here,
    hooked_on_any_rank,
    is_due,
)

ADVICE = Advice(
    inputs="pass the same whole batch on every rank of the axis: sample by the data axis, as "
    "DistributedSampler(dataset, num_replicas=mesh['dp'].size(), rank=mesh.get_local_rank('dp')), or let "
    "autosp_rules.integrations share a trainer's batches",
    parameters="average gradients over all ranks, those of this axis too, or compile with autosp(gradients='done'); "
    "and start every rank from the same checkpoint",
    generators="seed all ranks alike, torch.manual_seed(seed), and let what only some ranks draw, such as a data "
    "loader's order, draw by a torch.Generator of its own",
)


class Program:
    """The compiled program of a graph whose sequence is sharded, or of a part of a model without a sequence.

    Args:
        gm: the graph.
        config: the settings.
        axis: whose ranks run it.
        border: what crosses in chunks.
        is_sharded: whether each rank computes a part of it; otherwise every rank runs it whole.
        before: called at every call.
    """

    run: Callable[..., Any]
    """The graph as the inner backend compiled it."""
    function: int | None
    """A number of what Dynamo compiled, the same for each of its programs."""
    calls: int
    """How often it was called."""

    def __init__(
        self,
        gm: fx.GraphModule,
        config: AutoSPConfig,
        axis: Axis,
        border: Border,
        *,
        is_sharded: bool,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._axis, self._border = config, axis, border
        self._is_sharded, self._before = is_sharded, before
        self.function, self.calls = compiled_function(), 0
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._is_parameter = [is_parameter(node) for node in placeholders]
        # Of what runs whole, equal inputs give equal gradients; and one rank may run it alone, to evaluate.
        self._compared = [
            i
            for i, is_weight in enumerate(self._is_parameter)
            if i not in border.chunks and (is_sharded or not is_weight)
        ]
        self._checks = RankChecks(
            [placeholders[i] for i in self._compared],
            axis,
            ADVICE,
            drawn=draws_alike(gm),
            in_training=not is_sharded,
            every_call=config.compare_ranks,
        )
        self._gradients = GradientPlan()
        names = [input_name(node) for node in placeholders]
        self._names = names
        self._by_name = sorted(
            (i for i, is_weight in enumerate(self._is_parameter) if is_weight), key=names.__getitem__
        )
        """Parameters in an order that all ranks share."""
        self._hooked: list[int] = []
        self._runs_eagerly = config.inner == "eager" or not isinstance(config.inner, str)
        self._trained = 0

    def settle(self) -> None:
        """Reads the result of comparing the ranks in the last call."""
        with raised_as_autosp_error():
            self._checks.settle()

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        self._before()
        inputs = tuple(self._border.entered(inputs))
        if self._is_sharded or self._config.compare_ranks:
            with raised_as_autosp_error():
                self._checks.before([inputs[i] for i in self._compared])
        given = self._entered(inputs)
        try:
            outputs = self.run(*given)
        except Exception:
            self.settle()  # if the ranks differ, this raises the cause
            raise
        return self._border.left(outputs, given)

    def _refuse_late_hooks(self, inputs: Sequence[Any]) -> None:
        """Raises AutoSPError where a parameter got a hook since ranks have last looked for hooks together.

        It would read a rank's summand, and ranks do not look at every call, as they would wait for each other.
        """
        weights = [i for i in self._by_name if i not in self._hooked and isinstance(inputs[i], torch.Tensor)]
        late = next(
            (i for i, hooked in zip(weights, hooked_here([inputs[i] for i in weights]), strict=True) if hooked), None
        )
        if late is not None:
            raise AutoSPError.of(
                f"parameter {self._names[late]} got a hook before call {self._trained} of a program, and ranks look "
                "for hooks at calls 1, 2, 4, 8, ...: it would read one rank's summand of the gradient",
                hint="register hooks before training, or call torch._dynamo.reset() after it, on every rank",
            )

    def _hooked_on_any_rank(self, inputs: Sequence[Any]) -> list[int]:
        weights = [i for i in self._by_name if isinstance(inputs[i], torch.Tensor)]
        hooked = hooked_on_any_rank([inputs[i] for i in weights], self._axis)
        return [i for i, has_hook in zip(weights, hooked, strict=True) if has_hook]

    def _entered(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the inputs, through which gradients flow in the form that their reader expects."""
        if not torch.is_grad_enabled():
            return list(inputs)
        self._trained += 1
        if is_due(self._trained):  # a wrapper may be added after the first call
            weights = [x for x, p in zip(inputs, self._is_parameter, strict=True) if p and isinstance(x, torch.Tensor)]
            self._gradients = GradientPlan.of(self._config.gradients, self._axis, weights)
            if self._border.graph_break and self._gradients.factor != 1:
                raise AutoSPError.of(
                    f"gradients are summed over axis {self._axis.name}, and the graph breaks "
                    f"({self._border.graph_break}): what runs between graphs has whole gradients on every rank, which "
                    f"a sum counts {self._axis.size} times",
                    hint="let gradients be averaged over all ranks, or remove the graph break",
                )
            if self._is_sharded:
                self._hooked = self._hooked_on_any_rank(inputs)
        elif self._is_sharded and self._gradients.leaves_summands:
            self._refuse_late_hooks(inputs)
        entered = self._gradients.enter(
            inputs,
            self._is_parameter,
            self._axis,
            is_sharded=self._is_sharded,
            hooked=self._hooked,
            chunks=self._border.chunks,
        )
        if not self._is_sharded or not self._runs_eagerly:
            return entered
        # AOTAutograd refuses second derivatives; eager operators have them, of the rank's part of the loss alone.
        flows = [isinstance(x, torch.Tensor) and x.requires_grad for x in entered]
        return [change_gradients([x])[0] if flow else x for x, flow in zip(entered, flows, strict=True)]
