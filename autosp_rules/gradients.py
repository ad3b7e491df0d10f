"""Gradients of a compiled program's inputs, in the form that their reader expects.

    GradientPlan.of(option, axis, parameters)     decides how gradients of parameters leave the program
    EnteredGradients(program, ...)(inputs)        the inputs, at each call, through which gradients flow in that form

Inside the program every rank differentiates the sum of the losses of all ranks, so the mean of gradients over the axis
is the gradient of one device (`fxrewrite.spmd.runtime.gradients`). DDP, FSDP and ZeRO take this mean over all ranks.

    "mean"     parameters: unchanged, for a reader that averages over the axis.
    "sum"      parameters: divided by P, for a reader that sums over the axis, and averages over the data axis only.
               Of parameters that eager code reads, it would count whole gradients P times, which is refused.
    "done"     parameters: averaged over the axis in the backward pass; averaging them again changes nothing.

A hook on a parameter runs before anything outside of the program averages, and may clip what it gets, or measure it. So
under "mean", parameters with a hook are averaged as under "done"; if one rank has registered it, on all of them.

Other inputs that require a gradient (`inputs_embeds`, or hidden states after a graph break) always get the gradient of
one device, because eager code reads it, which runs on whole values, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from autosp_rules.errors import AutoSPError
from autosp_rules.integrations.deepspeed_groups import deepspeed_reduction
from fxrewrite.backends import GradientReduction, gradient_reductions
from fxrewrite.graph import input_name
from fxrewrite.ops import is_parameter
from fxrewrite.spmd import (
    Axis,
    Border,
    change_gradients,
    global_ranks,
    hooked_here,
    hooked_on_any_rank,
    is_due,
)

GradientOption: TypeAlias = Literal["auto", "mean", "sum", "done"]


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """How the gradient of each parameter of a program is changed when it leaves the program."""

    reduced: bool = False
    """Whether it is averaged over the axis."""
    factor: float = 1.0
    """Factor by which it is then multiplied."""
    why: str = ""
    """The recognized wrapper, for the report."""
    unread: str = ""
    """A trained parameter under the wrapper that the program does not read, or ''."""

    @staticmethod
    def of(option: GradientOption, axis: Axis, parameters: Sequence[torch.Tensor]) -> GradientPlan:
        """Returns the plan of a setting; "auto" looks for wrappers of the parameters, in their module's forward.

        Raises:
            AutoSPError: a wrapper does not reduce as the setting says, or in an unknown way.
        """
        trained = [p for p in parameters if p.requires_grad]
        found = gradient_reductions(trained) if trained else []
        engine = deepspeed_reduction() if trained and not found else None
        hooked = next((reduction for reduction in found if reduction.hook), None)
        if hooked is not None and option == "auto":
            raise AutoSPError.of(
                f"{hooked.by} over ranks {sorted(hooked.ranks)} lets {hooked.hook} reduce gradients, and whether that "
                "averages them is not known",
                hint="state it: gradients='mean' if it averages over all ranks, 'sum' if it adds up those of axis "
                f"{axis.name}, 'done' if it leaves that axis out",
            )
        known = [reduction for reduction in found if not reduction.hook]
        plans = [_plan_for(reduction, axis, option) for reduction in [*known, *([engine] if engine else [])]]
        if len({(plan.reduced, plan.factor) for plan in plans}) > 1:
            raise AutoSPError.of(
                f"parameters of one graph are under {' and '.join(plan.why for plan in plans)}",
                hint="wrap all of them over one group of ranks",
            )
        unread = next((reduction.unread for reduction in found if reduction.unread), "")
        asked = {
            "auto": GradientPlan(),
            "mean": GradientPlan(),
            "sum": GradientPlan(factor=1 / axis.size, unread=unread),
            "done": GradientPlan(reduced=True),
        }[option]
        if not plans:
            return asked
        [plan] = plans[:1]
        if option not in ("auto", "done") and (plan.reduced, plan.factor) != (asked.reduced, asked.factor):
            raise AutoSPError.of(
                f"gradients={option!r} gives wrong gradients under {plan.why}",
                hint=f"use gradients='auto', which {plan.text()}, or wrap over all ranks, those of axis {axis.name} "
                "too",
            )
        if option == "done" and plan.factor != 1:
            raise AutoSPError.of(
                f"gradients='done' gives wrong gradients under {plan.why}",
                hint="use gradients='auto', or let it average over all ranks",
            )
        return asked if option == "done" else replace(plan, unread=unread)

    @property
    def leaves_summands(self) -> bool:
        """Whether gradients of parameters without hooks leave as the summands of ranks, which others average."""
        return not self.reduced and self.factor == 1

    def text(self) -> str:
        """Returns what is done to gradients of parameters, as text."""
        parts = ["averages them over the axis in the backward pass"] if self.reduced else []
        parts += [f"multiplies them by {self.factor:.6g}"] if self.factor != 1 else []
        return " and ".join(parts) or "leaves them to be averaged over all ranks"


def _plan_for(reduction: GradientReduction, axis: Axis, option: GradientOption) -> GradientPlan:
    """Returns how parameters' gradients must leave so that the reduction over `axis` gives those of one device.

    A reduction is `factor * sum over ranks`. With one device per replica it would average over the replicas, or, if the
    caller has chosen the divisor of fully_shard, add them up: it is 1, or the ranks of the axis.
    """
    ranks = frozenset(global_ranks(axis))
    shown = f"{reduction.by} over ranks {sorted(reduction.ranks)}"
    covered = ranks & reduction.ranks
    replicas = len(reduction.ranks) // axis.size
    if covered == ranks and len(reduction.ranks) == replicas * axis.size:
        total = reduction.factor * axis.size * replicas  # 1 for a mean over all ranks, P for a mean over replicas
        if reduction.is_mean:
            return GradientPlan(why=shown)
        if reduction.by == "fully_shard" and reduction.factor == 1 / axis.size:
            if axis.size == replicas and option in ("auto", "done"):
                raise AutoSPError.of(
                    f"fully_shard over ranks {sorted(reduction.ranks)} divides gradients by {axis.size}: the ranks of "
                    f"axis {axis.name}, or its replicas, which are as many",
                    hint=f"state it: gradients='mean' if that averages over axis {axis.name} and adds up replicas, "
                    "'sum' if it adds up over the axis and averages replicas",
                )
            if axis.size != replicas or option == "mean":
                return GradientPlan(why=shown)
        if reduction.by != "fully_shard" or reduction.factor in (1.0, 1 / replicas):
            sums = f"{shown}, which multiplies their sum by {reduction.factor:.6g}"
            factor = 1 / axis.size if reduction.factor == 1 else 1 / total
            return GradientPlan(factor=factor, why=sums)
        raise AutoSPError.of(
            f"fully_shard over ranks {sorted(reduction.ranks)} divides gradients by {1 / reduction.factor:g}: neither "
            f"all {len(reduction.ranks)} ranks, nor the {axis.size} of axis {axis.name}, nor its {replicas} replicas, "
            "nor 1",
            hint="leave set_gradient_divide_factor out, or pass one of these",
        )
    if len(covered) == 1:
        factor = 1 / (reduction.factor * len(reduction.ranks)) if reduction.by == "DeepSpeed" else 1.0
        return GradientPlan(reduced=True, factor=factor, why=shown)
    raise AutoSPError.of(
        f"{shown} covers {sorted(covered)} of the ranks {sorted(ranks)} of axis {axis.name}",
        hint="wrap over all ranks, or over ranks of which one alone is on the axis",
    )


class EnteredGradients:
    """Gives, at each call of a program, its inputs, through which gradients flow in the form that their reader expects.

    Args:
        gm: the program.
        option: the setting.
        axis: whose ranks run it.
        border: what crosses in chunks.
        is_sharded: whether each rank computes a part of it; otherwise each has complete gradients.
        is_eager: whether it runs without AOTAutograd, which refuses second derivatives.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        option: GradientOption,
        axis: Axis,
        border: Border,
        *,
        is_sharded: bool,
        is_eager: bool,
    ) -> None:
        self._option: GradientOption = option
        self._axis, self._border = axis, border
        self._is_sharded, self._is_eager = is_sharded, is_eager
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._is_parameter = [is_parameter(node) for node in placeholders]
        self._names = [input_name(node) for node in placeholders]
        self._by_name = sorted(
            (i for i, is_weight in enumerate(self._is_parameter) if is_weight), key=self._names.__getitem__
        )
        """Parameters in an order that all ranks share."""
        self._plan = GradientPlan()
        self._hooked: list[int] = []
        """Parameters with hooks."""
        self._calls = 0

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return inputs
        self._calls += 1
        if is_due(self._calls):  # a wrapper may be added after the first call
            self._look(inputs)
        elif self._is_sharded and self._plan.leaves_summands:
            self._refuse_late_hooks(inputs)
        entered = list(inputs)
        flows = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        parameters = [i for i in flows if self._is_parameter[i]]

        def change(places: Sequence[int], factor: float, over: Axis | None = None) -> None:
            changed = change_gradients([entered[i] for i in places], factor, over)
            for place, value in zip(places, changed, strict=True):
                entered[place] = value

        size, factor = self._axis.size, self._plan.factor
        if self._plan.reduced and self._is_sharded:
            change(parameters, factor / size, self._axis)
        elif factor != 1:
            change(parameters, factor)
        elif self._is_sharded:
            change([i for i in self._hooked if i in parameters], 1 / size, self._axis)
        if self._is_sharded:  # of a chunk that the rank holds, the program makes the gradient right itself
            change(
                [i for i in flows if not self._is_parameter[i] and i not in self._border.chunks], 1 / size, self._axis
            )
        if self._is_sharded and self._is_eager:
            for i in flows:  # eager operators have second derivatives, of the rank's part of the loss alone
                (entered[i],) = change_gradients([entered[i]])
        return entered

    def _look(self, inputs: Sequence[Any]) -> None:
        """Finds who reads gradients of parameters."""
        weights = [i for i in self._by_name if isinstance(inputs[i], torch.Tensor)]
        tensors = [inputs[i] for i in weights]
        self._plan = GradientPlan.of(self._option, self._axis, tensors)
        if self._plan.factor != 1 and (self._border.graph_break or self._plan.unread):
            size, name = self._axis.size, self._axis.name
            eager = (
                f"the graph breaks ({self._border.graph_break}): what runs between graphs has"
                if self._border.graph_break
                else f"this program does not read {self._plan.unread}, whose gradients are summed too: eager code has"
            )
            raise AutoSPError.of(
                f"gradients are summed over axis {name}, and {eager} whole gradients on every rank, which a sum counts "
                f"{size} times",
                hint=f"average them over axis {name}: with fully_shard, set_gradient_divide_factor({size}) of each "
                "wrapped module, and gradients='mean'; or compile the model and its loss as one graph",
            )
        if self._is_sharded:
            hooked = hooked_on_any_rank(tensors, self._axis)
            self._hooked = [i for i, has_hook in zip(weights, hooked, strict=True) if has_hook]

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
                f"parameter {self._names[late]} got a hook before call {self._calls} of a program, and ranks look "
                "for hooks at calls 1, 2, 4, 8, ...: it would read one rank's summand of the gradient",
                hint="register hooks before training, or call torch._dynamo.reset() after it, on every rank",
            )
