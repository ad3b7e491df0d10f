"""Gradients of a compiled program's inputs, in the form that their reader expects.

    GradientPlan.of(config, axis, parameters)     decides how gradients of parameters leave the program
    plan.enter(inputs, ...)                       returns the inputs, through which gradients flow in that form

Inside the program every rank differentiates the sum of the losses of all ranks, so the mean of gradients over the axis
is the gradient of one device (`fxrewrite.spmd.runtime.gradients`). DDP, FSDP and ZeRO take this mean over all ranks.

    "mean"     parameters: unchanged, for a reader that averages over the axis.
    "sum"      parameters: divided by P, for a reader that sums over the axis, and averages over the data axis only.
    "done"     parameters: averaged over the axis in the backward pass; averaging them again changes nothing.

A hook on a parameter runs before anything outside of the program averages, and may clip what it gets, or measure it. So
under "mean", parameters with a hook are averaged as under "done"; if one rank has registered it, on all of them.

Other inputs that require a gradient (`inputs_embeds`, or hidden states after a graph break) always get the gradient of
one device, because eager code reads it, which runs on whole values, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from autosp_rules.errors import AutoSPError
from autosp_rules.integrations.deepspeed_groups import deepspeed_reduction
from fxrewrite.backends import GradientReduction, gradient_reductions
from fxrewrite.spmd import Axis, change_gradients, global_ranks

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
        plans = [_plan_for(reduction, axis) for reduction in [*known, *([engine] if engine else [])]]
        if len({(plan.reduced, plan.factor) for plan in plans}) > 1:
            raise AutoSPError.of(
                f"parameters of one graph are under {' and '.join(plan.why for plan in plans)}",
                hint="wrap all of them over one group of ranks",
            )
        asked = {
            "auto": GradientPlan(),
            "mean": GradientPlan(),
            "sum": GradientPlan(factor=1 / axis.size),
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
        return asked if option == "done" else plan

    @property
    def leaves_summands(self) -> bool:
        """Whether gradients of parameters without hooks leave as the summands of ranks, which others average."""
        return not self.reduced and self.factor == 1

    def text(self) -> str:
        """Returns what is done to gradients of parameters, as text."""
        parts = ["averages them over the axis in the backward pass"] if self.reduced else []
        parts += [f"multiplies them by {self.factor:.6g}"] if self.factor != 1 else []
        return " and ".join(parts) or "leaves them to be averaged over all ranks"

    def enter(
        self,
        inputs: Sequence[Any],
        is_parameter: Sequence[bool],
        axis: Axis,
        *,
        is_sharded: bool,
        hooked: Sequence[int] = (),
        chunks: Container[int] = (),
    ) -> list[Any]:
        """Returns the inputs, with the changes to their gradients attached.

        Args:
            inputs: what the program is called with.
            is_parameter: which of them are parameters.
            is_sharded: whether the program runs on chunks; otherwise each rank has complete gradients.
            hooked: parameters with hooks, in an order that all ranks share.
            chunks: inputs of which the rank holds a chunk; the program makes their gradients right itself.
        """
        entered = list(inputs)
        if not torch.is_grad_enabled():
            return entered
        flows = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        parameters = [i for i in flows if is_parameter[i]]
        others = [i for i in flows if not is_parameter[i] and i not in chunks]

        def change(places: Sequence[int], factor: float, over: Axis | None = None) -> None:
            changed = change_gradients([inputs[i] for i in places], factor, over)
            for place, value in zip(places, changed, strict=True):
                entered[place] = value

        if self.reduced and is_sharded:
            change(parameters, self.factor / axis.size, axis)
        elif self.factor != 1:
            change(parameters, self.factor)
        elif is_sharded:
            change([i for i in hooked if i in parameters], 1 / axis.size, axis)
        if is_sharded:
            change(others, 1 / axis.size, axis)
        return entered


def _plan_for(reduction: GradientReduction, axis: Axis) -> GradientPlan:
    """Returns how parameters' gradients must leave so that the reduction over `axis` gives those of one device.

    A reduction is `factor * sum over ranks`. With one device per replica it would average over the replicas.
    """
    ranks = frozenset(global_ranks(axis))
    shown = f"{reduction.by} over ranks {sorted(reduction.ranks)}"
    covered = ranks & reduction.ranks
    replicas = len(reduction.ranks) // axis.size
    if covered == ranks and len(reduction.ranks) == replicas * axis.size:
        total = reduction.factor * axis.size * replicas  # 1 for a mean over all ranks, P for a mean over replicas
        if reduction.is_mean:
            return GradientPlan(why=shown)
        if reduction.by != "fully_shard" or reduction.factor in (1.0, 1 / replicas):
            sums = f"{shown}, which multiplies their sum by {reduction.factor:.6g}"
            factor = 1 / axis.size if reduction.factor == 1 else 1 / total
            return GradientPlan(factor=factor, why=sums)
        raise AutoSPError.of(
            f"fully_shard over ranks {sorted(reduction.ranks)} divides gradients by {1 / reduction.factor:g}: neither "
            f"all {len(reduction.ranks)} ranks, nor its {replicas} replicas of axis {axis.name}, nor 1",
            hint="leave set_gradient_divide_factor out, or pass one of these",
        )
    if len(covered) == 1:
        factor = 1 / (reduction.factor * len(reduction.ranks)) if reduction.by == "DeepSpeed" else 1.0
        return GradientPlan(reduced=True, factor=factor, why=shown)
    raise AutoSPError.of(
        f"{shown} covers {sorted(covered)} of the ranks {sorted(ranks)} of axis {axis.name}",
        hint="wrap over all ranks, or over ranks of which one alone is on the axis",
    )
