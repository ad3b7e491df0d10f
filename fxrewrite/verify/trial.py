"""Tests one sample: builds, matches and rewrites it, runs it before and after, and compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError, Reason, RefusedError, RuleDefinitionError
from fxrewrite.graph.copy import copy_module
from fxrewrite.match.explain import explain
from fxrewrite.match.program import Program
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.verify.build import Builder, FakeMode, NoSampleError
from fxrewrite.verify.compare import Difference, Kind, RulePromise, compare, compare_gradients
from fxrewrite.verify.guess import Guesses
from fxrewrite.verify.observe import (
    Observation,
    Runner,
    TestBed,
    cotangents,
    gradients,
    largest_value,
    observe,
    run_here,
)
from fxrewrite.verify.sample import TORCH_ERRORS, Sample

__all__ = ["Rewrite", "Trial", "Trials"]

Rewrite = Callable[[fx.GraphModule], int]
"""Applies a rule once to a graph in place, and returns the number of rewrites."""
_MOST_APPLICATIONS = 8
_FINER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_VANISHES = 1e-3
"""Factor by which a rounding error shrinks in the finer dtype, at least: the finer has at least 13 bits more."""
_AMPLIFIED = 16.0
"""Largest ratio of a rounding error to the change of the original when its inputs change in the last bit."""
_PERTURBATIONS = 3
"""Number of random changes of the inputs that estimate that sensitivity."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The outcome of one sample.

    Attributes:
        status: "impossible" (no graph that runs), "unmatched", "refused", or "compared".
        why: what prevented a comparison.
        sample: with all guessed bindings.
        differences: what was found.
        remarks: differences that the rule's promise allows.
        raised: whether the original raises.
        graded: whether gradients were compared.
        drawn: whether values were not compared, because random numbers may differ.
        before, after: the graphs.
    """

    status: Literal["impossible", "unmatched", "refused", "compared"]
    why: str = ""
    sample: Sample | None = None
    differences: tuple[Difference, ...] = ()
    remarks: tuple[Difference, ...] = ()
    raised: bool = False
    graded: bool = False
    drawn: bool = False
    before: fx.GraphModule | None = None
    after: fx.GraphModule | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trials:
    """Tests samples of one rule.

    Attributes:
        pattern, rewrite: the rule.
        promise: what it promises.
        grad: whether gradients are compared.
        terminates: whether the rule must stop firing on its own results.
        run: runs the graphs; None runs them here.
        bed: where graphs are tested that one device does not show.
        mode: of the fake values of all graphs.
        program: finds the pattern.
    """

    pattern: Pattern
    rewrite: Rewrite
    promise: RulePromise
    grad: bool
    terminates: bool
    run: Runner | None
    bed: TestBed | None
    mode: FakeMode
    program: Program[str]

    def test(self, sample: Sample, guesses: Guesses | None = None, *, only: Kind | None = None) -> Trial:
        """Tests a sample, guessing what it leaves open. With `only`, looks no further than this kind of difference."""
        trial = self._test(sample, guesses, only)
        if self.promise.numerics == "reassociates" and all(d.error < math.inf for d in trial.differences):
            return self._less_rounding(trial, only)
        return trial

    def _test(self, sample: Sample, guesses: Guesses | None, only: Kind | None) -> Trial:
        builder = Builder(sample, self.mode, guesses)
        try:
            before = builder.module()
            if self.bed is not None:
                self.bed.prepare(before)
        except NoSampleError as error:
            return Trial("impossible", str(error))
        sample = builder.complete
        try:
            matches = self._matches(before.graph.nodes)
        except FxRewriteError as error:
            return _compared(sample, before, before, [Difference("invalid", f"it cannot be matched: {error}")])
        if not matches:
            return Trial("unmatched", _nearest_miss(self.pattern, before.graph.nodes), sample, before=before)
        after = copy_module(before)
        try:
            if not self.rewrite(after):
                return Trial("refused", "the rule refuses", sample, before=before)
        except RefusedError as error:
            if error.kind is Reason.RAISED:
                return _compared(sample, before, after, [Difference("invalid", str(error))])
            return Trial("refused", str(error), sample, before=before)
        except RuleDefinitionError:
            raise  # an invalid definition, which no sample can refute
        except (FxRewriteError, *TORCH_ERRORS) as error:
            if self.bed is not None:  # perhaps the rule is for graphs at another stage, which the bed does not have
                return Trial("refused", f"the rewrite raises {_said(error)}", sample, before=before)
            return _compared(sample, before, after, [Difference("invalid", f"the rewrite raises {_said(error)}")])
        if self.bed is not None and (why := self.bed.why_not(after)):
            return Trial("refused", why, sample, before=before)
        try:
            after.graph.lint()
        except (RuntimeError, ValueError) as error:
            return _compared(sample, before, after, [Difference("invalid", f"the graph is malformed: {error}")])
        return self._compare(sample, before, after, only)

    def _less_rounding(self, trial: Trial, only: Kind | None) -> Trial:
        """Returns the trial, with differences turned into remarks if the same entries in a finer dtype show rounding.

        If the graph in the finer dtype is not comparable, for example because it contains a constant of the coarser
        dtype, the sensitivity of the original decides what counts as rounding.
        """
        if not trial.differences:
            return trial
        assert trial.sample is not None
        if not any(spec.dtype in _FINER for _, spec in trial.sample.specs()):
            return trial
        finer = self._test(trial.sample.in_finer_dtype(_FINER), None, only)
        if finer.status == "compared":
            error = max(difference.error for difference in trial.differences)
            is_rounding = max((d.error for d in finer.differences), default=0.0) <= error * _VANISHES
        else:
            sensitivity = self._sensitivity(trial)
            is_rounding = all(d.error <= _AMPLIFIED * sensitivity[d.kind == "gradient"] for d in trial.differences)
        return replace(trial, differences=(), remarks=(*trial.remarks, *trial.differences)) if is_rounding else trial

    def _sensitivity(self, trial: Trial) -> tuple[float, float]:
        """Returns the change of values and gradients of the original if inputs change by one unit in the last place."""
        assert trial.sample is not None
        assert trial.before is not None
        specs, before, run = [spec for _, spec in trial.sample.specs()], trial.before, self.run or run_here

        def outcome(inputs: list[torch.Tensor]) -> tuple[Sequence[object], Sequence[object]]:
            results = observe(before, [value.clone() for value in inputs], run).results
            found = gradients(before, inputs, cotangents(results), run) if trial.graded else None
            return results, found if isinstance(found, list) else ()

        plain = outcome([spec.tensor() for spec in specs])
        most = [0.0, 0.0]
        for seed in range(_PERTURBATIONS):
            generator = torch.Generator().manual_seed(seed)
            changed = outcome([_in_last_place(spec.tensor(), generator) for spec in specs])
            for kind in (0, 1):
                for was, is_now in zip(plain[kind], changed[kind], strict=True):
                    most[kind] = max(most[kind], _largest_change(was, is_now))
        return most[0], most[1]

    def _matches(self, nodes: Iterable[fx.Node]) -> bool:
        return any(next(self.program.find(node, key), None) for node, key in self.program.roots(nodes))

    def _compare(self, sample: Sample, before: fx.GraphModule, after: fx.GraphModule, only: Kind | None) -> Trial:
        specs = [spec for _, spec in sample.specs()]
        run = self.run or run_here

        def inputs() -> list[torch.Tensor]:
            return [spec.tensor() for spec in specs]

        was, is_now = observe(before, inputs(), run), observe(after, inputs(), run)
        magnitude = 0.0
        if was.error is None and not (self.promise.numerics == "exact" and not self.grad):
            magnitude = self._magnitude(before, inputs(), was)
        differences = compare(was, is_now, self.promise, inputs(), magnitude)
        graded = self.grad and only in (None, "gradient") and was.error is None is is_now.error and _is_finite(inputs())
        comparable = self.promise.rng == "preserves" or not (was.has_drawn or is_now.has_drawn)
        if graded and comparable and not any(d.kind in ("shape", "outputs") for d in differences):
            given = cotangents(was.results)
            grads = gradients(before, inputs(), given, run)
            graded = isinstance(grads, list)
            if graded:
                others = gradients(after, inputs(), given, run)
                names = [name for name, _ in sample.specs()]
                differences += compare_gradients(grads, others, names, self.promise, magnitude)
        else:
            graded = False
        if self.terminates and only in (None, "endless") and not self._ends(after):
            text = f"the rule fires again on its own result, {_MOST_APPLICATIONS} times and more"
            differences.append(Difference("endless", text))
        return _compared(
            sample,
            before,
            after,
            differences,
            keeps_strides=self.promise.strides,
            raised=was.error is not None,
            graded=graded,
            drawn=not comparable,
        )

    def _magnitude(self, gm: fx.GraphModule, inputs: list[torch.Tensor], was: Observation) -> float:
        if self.run is None:
            return largest_value(gm, inputs)
        tensors = [value for value in (*inputs, *was.results) if isinstance(value, torch.Tensor)]
        finite = [value[torch.isfinite(value)].abs() for value in tensors if value.is_floating_point()]
        return max((value.max().item() for value in finite if value.numel()), default=0.0)

    def _ends(self, after: fx.GraphModule) -> bool:
        again = copy_module(after)
        return any(not self.rewrite(again) for _ in range(_MOST_APPLICATIONS))


def _in_last_place(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Changes each floating-point entry by about one unit in the last place, up or down."""
    if not value.is_floating_point():
        return value
    sign = torch.randint(0, 2, value.shape, generator=generator).to(value.dtype) * 2 - 1
    return value * (1 + torch.finfo(value.dtype).eps * sign)


def _largest_change(was: object, is_now: object) -> float:
    if not isinstance(was, torch.Tensor) or not isinstance(is_now, torch.Tensor) or not was.numel():
        return 0.0
    return (was.to(torch.float64) - is_now.to(torch.float64)).abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def _compared(
    sample: Sample,
    before: fx.GraphModule,
    after: fx.GraphModule,
    differences: list[Difference],
    *,
    keeps_strides: bool = True,
    raised: bool = False,
    graded: bool = False,
    drawn: bool = False,
) -> Trial:
    allowed = [d for d in differences if d.kind == "memory" or (d.kind == "strides" and not keeps_strides)]
    wrong = [d for d in differences if d not in allowed]
    return Trial(
        "compared",
        "",
        sample,
        tuple(wrong),
        tuple(allowed),
        raised=raised,
        graded=graded,
        drawn=drawn,
        before=before,
        after=after,
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_finite(inputs: list[torch.Tensor]) -> bool:
    """Gradients are compared at finite inputs only: elsewhere autograd's own formulas differ."""
    return all(bool(torch.isfinite(value).all()) for value in inputs)


def _nearest_miss(pattern: Pattern, nodes: Iterable[fx.Node]) -> str:
    found = explain(pattern, nodes)
    if found.misses:
        return str(found.misses[0])
    keys = ", ".join(ops.key(node) for node in nodes if node.op.startswith("call"))
    return f"no node {' or '.join(found.root_keys)} among {keys}"
