"""Tests one sample: builds, matches and rewrites it, runs it before and after, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError, InvariantError, Reason, RefusedError, RuleDefinitionError, named_line
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.outputs import Promise, shared_outputs
from fxrewrite.match.explain import explain
from fxrewrite.match.program import Program
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.verify.build import Builder, FakeMode, NoSampleError
from fxrewrite.verify.calls import NoCallError
from fxrewrite.verify.compare import Difference, Kind, RulePromise, compare, compare_gradients, relative_bound
from fxrewrite.verify.draw import Draw
from fxrewrite.verify.guess import Guesses
from fxrewrite.verify.observe import (
    Observation,
    Runner,
    TestBed,
    cotangents,
    gradients,
    largest_finite,
    observe,
    run_here,
    values_of,
    with_derivative,
)
from fxrewrite.verify.oracle import Evaluate, Oracle
from fxrewrite.verify.points import jumps, units
from fxrewrite.verify.sample import TORCH_ERRORS, Sample
from fxrewrite.verify.tensors import Contents

Rewrite = Callable[[fx.GraphModule], int]
"""Applies a rule once to a graph in place, and returns the number of rewrites."""
_MOST_APPLICATIONS = 8
_AT_JUMPS = 0.5
"""Probability that the entries of a sample are where its graph jumps."""
_POSITIVE, _NEGATIVE = ((1, 8), (1, 2)), (-8, 0)
"""Ranges of integers for operators that do not take 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Grading:
    """What a comparison of gradients showed.

    Attributes:
        leaves: positions of the inputs whose gradients were compared; empty if none were.
        without: names of the inputs of which torch has no derivative in the original.
        why_not: why no gradient was compared, where the original is differentiable; else empty.
        differences: what was found.
        remarks: differences that are rounding.
    """

    leaves: tuple[int, ...] = ()
    without: tuple[str, ...] = ()
    why_not: str = ""
    differences: tuple[Difference, ...] = ()
    remarks: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The outcome of one sample.

    Attributes:
        status: "uncallable" (no graph, whatever is drawn), "impossible" (no graph that runs), "unmatched", "refused",
            or "compared".
        why: what prevented a comparison.
        sample: with all guessed bindings.
        differences: what was found.
        remarks: differences that the rule's promise allows.
        raised: whether the original raises.
        grading: of gradients.
        drawn: whether values were not compared, because random numbers may differ.
        before, after: the graphs.
    """

    status: Literal["uncallable", "impossible", "unmatched", "refused", "compared"]
    why: str = ""
    sample: Sample | None = None
    differences: tuple[Difference, ...] = ()
    remarks: tuple[Difference, ...] = ()
    raised: bool = False
    grading: Grading = Grading()
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
        needs_derivatives: whether the rewritten graph has gradients where the original has; if not, and torch raises
            because an operator has none, no gradients are compared.
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
    needs_derivatives: bool = True

    def test(self, sample: Sample, guesses: Guesses | None = None, *, only: Kind | None = None) -> Trial:
        """Tests a sample, guessing what it leaves open. With `only`, looks no further than this kind of difference."""
        builder = Builder(sample, self.mode, guesses)
        try:
            before = builder.module()
            if self.bed is not None:
                self.bed.prepare(before)
        except NoSampleError as error:
            return Trial("impossible", str(error))
        except NoCallError as error:
            return Trial("uncallable", str(error))
        sample, after = builder.complete, before

        def refused(why: str) -> Trial:
            return Trial("refused", why, sample, before=before)

        def invalid(why: str) -> Trial:
            return Trial("compared", "", sample, (Difference("invalid", why),), before=before, after=after)

        try:
            matches = self._matches(before.graph.nodes)
        except FxRewriteError as error:
            return invalid(f"it cannot be matched: {error}")
        if not matches:
            return Trial("unmatched", _nearest_miss(self.pattern, before.graph.nodes), sample, before=before)
        if guesses is not None:
            sample = _with_multiples(sample, before, guesses.draw)
        sample = self._with_legal_integers(sample, before)
        after = copy_module(before)
        run_after = self.run or run_here
        try:
            try:
                count = self._rewritten(after)
            except RefusedError as error:
                if error.kind is not Reason.ONCE or self.bed is not None or not any(_holds(before)):
                    raise
                after = _with_attributes(before, sample.inputs())
                count = self._rewritten(after)
                run_after = _run_rewritten(before, self._rewritten, run_after)
            if not count:
                return refused("the rule refuses")
        except RuleDefinitionError:
            raise  # an invalid definition, which no sample can refute
        except (FxRewriteError, *TORCH_ERRORS) as error:
            is_refusal = isinstance(error, RefusedError)
            why = str(error) if is_refusal else f"the rewrite raises {type(error).__name__}: {error}"
            if self.bed is not None:  # perhaps the rule is for graphs at another stage, which the bed does not have
                return refused(why)
            return refused(why) if is_refusal and error.kind is not Reason.RAISED else invalid(why)
        if self.bed is not None and (why := self.bed.why_not(after)):
            return refused(why)
        try:
            after.graph.lint()
        except (RuntimeError, ValueError) as error:
            return invalid(f"the graph is malformed: {error}")
        return self._compare(sample, before, after, only, run_after)

    def _rewritten(self, gm: fx.GraphModule) -> int:
        """Applies the rule as a plan does, which copies results that would share memory; returns the rewrites."""
        outputs = Promise(gm)
        count = self.rewrite(gm)
        with suppress(InvariantError), Edit(gm) as edit:  # of lost outputs the comparison tells
            outputs.keep(edit)
        return count

    def _with_legal_integers(self, sample: Sample, before: fx.GraphModule) -> Sample:
        """Returns the sample with integers that the original takes: an operator says by raising which it does not.

        An index must be below the size of some value, a divisor must not be 0, of either sign. Each input is given as
        wide a range as the original takes: none, if it can be. In every other input some entries are an integer that
        the rule or its graphs name, if the original takes it, as a loss takes -100, which it ignores. The sample stays
        if the original raises on all ranges.
        """
        names = [name for name, spec in sample.specs() if spec.is_free_integer]

        def within(sample: Sample, names: Sequence[str], bounds: tuple[int, int] | None) -> Sample:
            return sample.changed(lambda name, _: name in names, bounds=bounds)

        def runs(sample: Sample) -> bool:
            return observe(before, sample.inputs(), self.run or run_here).error is None

        def with_named(sample: Sample) -> Sample:
            for chosen, spec in sample.specs():
                if chosen in names and spec.points and spec.seed % 2:
                    first = int(spec.points[spec.seed // 4 % len(spec.points)]) * (-1 if spec.seed & 2 else 1)
                    legal = torch.iinfo(spec.dtype)
                    numbers = [n for n in (first, -first) if legal.min <= n <= legal.max]
                    some = [sample.changed(lambda name, _, chosen=chosen: name == chosen, named=n) for n in numbers]
                    sample = next(filter(runs, some), sample)
            return sample

        if not names or runs(sample):
            return with_named(sample)
        values = [ops.value(node) for node in before.graph.nodes]
        sizes = {size for value in values if isinstance(value, torch.Tensor) for size in value.shape}
        is_odd = sum(spec.seed for _, spec in sample.specs()) % 2
        not_zero = (_NEGATIVE, *_POSITIVE) if is_odd else (*_POSITIVE, _NEGATIVE)
        ranges = [(0, size) for size in sorted(sizes - {0, 1}, reverse=True)] + [(0, 1), *not_zero]
        for place, bounds in enumerate(ranges):
            narrow = within(sample, names, bounds)
            if runs(narrow):
                for name in names if len(names) > 1 else ():
                    wider = (within(narrow, [name], wide) for wide in (None, *ranges[:place]))
                    narrow = next(filter(runs, wider), narrow)
                return with_named(narrow)
        return sample

    def _matches(self, nodes: Iterable[fx.Node]) -> bool:
        return any(next(self.program.find(node, key), None) for node, key in self.program.roots(nodes))

    def _compare(
        self, sample: Sample, before: fx.GraphModule, after: fx.GraphModule, only: Kind | None, run_after: Runner
    ) -> Trial:
        run, inputs = self.run or run_here, sample.inputs
        was, is_now = observe(before, inputs(), run), observe(after, inputs(), run_after)

        def oracle(evaluate: Evaluate, decisive: Sequence[fx.GraphModule]) -> Oracle:
            largest = partial(self._magnitude, before, inputs, was)
            decisive = decisive if self.run is None else ()
            return Oracle(before, inputs, evaluate, largest, after, is_random=was.has_drawn, decisive=decisive)

        is_at_jumps = self.promise.numerics == "reassociates" and any(map(jumps, before.graph.nodes))
        values = oracle(lambda gm, given: observe(gm, given, run).results or None, (before, after) * is_at_jumps)
        differences = compare(was, is_now, self.promise, inputs(), values, shared_outputs(before))
        comparable = self.promise.rng == "preserves" or not (was.has_drawn or is_now.has_drawn)
        grading = Grading()
        is_graded = self.grad and only in (None, "gradient") and was.error is None is is_now.error
        if is_graded and not any(d.kind in ("shape", "outputs") for d in differences):
            grading = self._grading(sample, before, after, was, run_after, oracle, comparable=comparable)
        differences += grading.differences
        if self.terminates and only in (None, "endless") and not self._ends(after):
            text = f"the rule fires again on its own result, {_MOST_APPLICATIONS} times and more"
            text += "; one that is meant to says terminates=False"
            differences.append(Difference("endless", text))
        allowed = [d for d in differences if d.kind == "strides" and not self.promise.strides]
        return Trial(
            "compared",
            "",
            sample,
            tuple(d for d in differences if d not in allowed),
            (*allowed, *grading.remarks),
            raised=was.error is not None,
            grading=grading,
            drawn=not comparable,
            before=before,
            after=after,
        )

    def _grading(
        self,
        sample: Sample,
        before: fx.GraphModule,
        after: fx.GraphModule,
        was: Observation,
        run_after: Runner,
        oracle: Callable[[Evaluate, Sequence[fx.GraphModule]], Oracle],
        *,
        comparable: bool,
    ) -> Grading:
        """Compares the gradients of those inputs of which the original has them."""
        names, inputs = [name for name, _ in sample.specs()], sample.inputs
        run, given = self.run or run_here, cotangents(was.results)
        why_not = "" if comparable else "the rule may draw other numbers"
        why_not = why_not or ("" if _is_finite(inputs()) else "some inputs are not finite")
        if why_not:
            is_differentiable = gradients(before, inputs(), given, run) is not None
            return Grading(why_not=why_not if is_differentiable else "")
        leaves, grads = with_derivative(before, inputs, given, run)
        if isinstance(grads, Exception):
            return Grading(why_not=f"the original raises in its backward: {named_line(grads)}")
        if grads is None:
            return Grading()
        others = gradients(after, inputs(), given, run_after, leaves)
        if isinstance(others, Exception) and not self.needs_derivatives:
            return Grading(why_not=f"the rewritten graph raises in its backward: {named_line(others)}")
        if run_after is not run:  # what the module holds is no input of the rewritten graph
            grads = [None if is_held else grad for grad, is_held in zip(grads, _holds(before), strict=True)]

        def backward(gm: fx.GraphModule, at: list[torch.Tensor]) -> Sequence[Any] | None:
            found = gradients(gm, at, given, run_after, leaves)
            return found if isinstance(found, list) else None

        # At a kink, where nothing is rounded, the gradient is the original's to say.
        is_free = self.promise.numerics == "approximate"
        is_free = is_free or any(ops.has_trait(node, "any_of_equal") for node in before.graph.nodes)
        exact = oracle(backward, () if is_free else (before,))
        found = compare_gradients(grads, others, names, self.promise, exact)
        bound = relative_bound(grad.dtype for grad in grads if grad is not None)
        relative = bound if self.promise.numerics == "approximate" else None
        without = tuple(
            name for place, (name, spec) in enumerate(sample.specs()) if spec.is_inexact and place not in leaves
        )
        if found and exact.explains(after, grads, others, relative):
            return Grading(leaves, without, remarks=tuple(found))
        return Grading(leaves, without, differences=tuple(found))

    def _magnitude(self, gm: fx.GraphModule, inputs: Callable[[], list[torch.Tensor]], was: Observation) -> float:
        """Returns the largest magnitude in a run, with which rounding scales; elsewhere, of what is known of it."""
        return largest_finite(values_of(gm, inputs()) if self.run is None else (*inputs(), *was.results))

    def _ends(self, after: fx.GraphModule) -> bool:
        """Whether the rule stops firing on its own result; an application that is refused is the last one."""
        again = copy_module(after)
        try:
            return any(not self.rewrite(again) for _ in range(_MOST_APPLICATIONS))
        except RefusedError:
            return True


def _holds(gm: fx.GraphModule) -> list[bool]:
    """Returns, for each input of a sample, whether it is a parameter, which the module can hold."""
    return [bool(node.meta.get("is_parameter")) for node in gm.graph.find_nodes(op="placeholder")]


def _with_attributes(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Returns a copy of a sample in which parameters are buffers with the entries that these inputs have."""
    new = copy_module(gm)
    for node, value in zip(list(new.graph.find_nodes(op="placeholder")), inputs, strict=True):
        if node.meta.get("is_parameter"):
            new.register_buffer(str(node.target), value.detach())
            with new.graph.inserting_before(node):
                held = new.graph.get_attr(str(node.target))
            held.meta = dict(node.meta)
            node.replace_all_uses_with(held)
            new.graph.erase_node(node)
    new.recompile()
    return new


def _run_rewritten(before: fx.GraphModule, rewrite: Callable[[fx.GraphModule], Any], run: Runner) -> Runner:
    """Returns what runs a rewritten sample as a function of all inputs: its rule is applied for those that it holds.

    A sample that takes all of its inputs runs as it is.
    """

    def applied(rewritten: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        if len(list(rewritten.graph.find_nodes(op="placeholder"))) == len(inputs):
            return run(rewritten, inputs)
        gm = _with_attributes(before, inputs)
        rewrite(gm)
        return run(gm, [value for value, is_held in zip(inputs, _holds(before), strict=True) if not is_held])

    return applied


def _with_multiples(sample: Sample, before: fx.GraphModule, draw: Draw) -> Sample:
    """Returns, at times, the sample with entries at which the graph jumps, if it does."""
    points = units(before)
    if not points or draw.plain or not draw.flag(_AT_JUMPS):
        return sample
    contents: Contents = "few_multiples" if draw.domain == "moderate" else "multiples"
    return sample.changed(lambda _, spec: spec.dtype.is_floating_point, contents=contents, points=points)


def _is_finite(inputs: list[torch.Tensor]) -> bool:
    """Gradients are compared at finite inputs only: elsewhere autograd's own formulas differ."""
    return all(bool(torch.isfinite(value).all()) for value in inputs)


def _nearest_miss(pattern: Pattern, nodes: Iterable[fx.Node]) -> str:
    found = explain(pattern, nodes)
    if found.misses:
        return str(found.misses[0])
    keys = ", ".join(ops.key(node) for node in nodes if node.op.startswith("call"))
    return f"no node {' or '.join(found.root_keys)} among {keys}"
