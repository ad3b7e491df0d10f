"""Tests a rewrite rule: runs samples of the pattern before and after the rewrite, until one differs."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from fxrewrite.errors import FxRewriteError
from fxrewrite.match.program import Program
from fxrewrite.ops import is_virtual, tested_by
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import Op, is_size, subterms
from fxrewrite.verify.build import FakeMode
from fxrewrite.verify.calls import Form, NoCallError
from fxrewrite.verify.compare import RulePromise
from fxrewrite.verify.draw import Domain, Draw, Sampler, contents_within
from fxrewrite.verify.facts import Facts
from fxrewrite.verify.guess import Guesses
from fxrewrite.verify.observe import Runner, TestBed
from fxrewrite.verify.points import Points
from fxrewrite.verify.readings import SEVERAL, Alternative, ChoiceSite, by_item, read, sites
from fxrewrite.verify.remedy import remedy
from fxrewrite.verify.sample import Sample, given_binding
from fxrewrite.verify.shrink import shrink
from fxrewrite.verify.snippet import snippet
from fxrewrite.verify.trial import Rewrite, Trial, Trials
from fxrewrite.verify.verdict import Counterexample, Verdict
from fxrewrite.verify.wide import varied

DTYPES = ("float32", "float64", "bfloat16", "complex64")
"""Of the inputs that are no integers or bools, unless a caller or a constraint says otherwise."""

_PROPOSALS = 30
"""Graphs proposed per requested sample, and per alternative that did not occur yet."""
_REFUSALS = 8
"""Matches refused per requested sample after which no more graphs are proposed, if the rule has rewritten none."""
_UNMATCHED = 400
"""Graphs after which no more are proposed, if none of them matches."""
_MOST, _LARGEST = 8, 1100
"""Upper limit of most sizes; of those that a rule's code names."""
_RARE = 6
"""Graphs proposed with an option that need not occur; if none of them runs, it is given up."""
_COMPLEX = 8
"""To so many samples of real numbers, one of complex numbers is added."""
_SHRINKING = 200
"""Most samples that are tried to make a counterexample smaller."""


def verify_rewrite(
    rule_id: str,
    pattern: Pattern,
    rewrite: Rewrite,
    *,
    numerics: str = "exact",
    rng: str = "preserves",
    shapes: str = "preserves",
    samples: int = 64,
    dtypes: Sequence[str | torch.dtype] | None = None,
    grad: bool = True,
    seed: int = 0,
    sampler: Sampler | None = None,
    run: Runner | None = None,
    strides: bool = False,
    domain: Domain = "all",
    tolerance: float | None = None,
    terminates: bool = True,
    constants: Sequence[float] = (),
    imports: Sequence[str] = (),
    shrink: bool = True,
    wide: bool = False,
) -> Verdict:
    """Tests a rule on graphs in which its pattern matches; equal arguments give equal verdicts in every process.

    Graphs are made from the pattern itself, in ATen overloads and in torch functions: each with other sizes, dtypes,
    memory layouts and entries, and with other legal values of what the pattern captures as a Python value or ignores.
    They are run before and after the rewrite; `fxrewrite.verify.compare` says what is compared, with which bounds.

    Args:
        rule_id: names the rule in the verdict.
        pattern: of the rule.
        rewrite: applies it once to a graph, in place; returns the number of rewrites; may raise `RefusedError`.
        numerics, rng, shapes: what the rule promises, as in `fxrewrite.rule`.
        samples: how many graphs to rewrite and compare.
        dtypes: of the inputs that are no integers or bools; by default `DTYPES` and those that a constraint names.
            Complex ones are drawn in further samples, an eighth of `samples`, if the pattern takes them and no sampler
            decides what tensors are.
        grad: whether to compare gradients, at finite real inputs.
        seed: another seed gives other samples.
        sampler: draws captures that cannot be guessed, from a `Draw`. With a sampler, an alternative that never occurs
            is a remark; without, it is an error.
        run: runs a graph, for example on simulated ranks; gradients are compared if its outputs are differentiable.
        strides: whether different strides of an output are a difference; if not, they are a remark.
        domain: the values that inputs may have: "all", "finite" (neither NaN nor infinities), or "moderate" (of a size
            around one).
        tolerance: the largest error relative to the magnitude, in place of the table's; not for "exact". Of results of
            8 bits it is relative to the largest number of their dtype: 0.01 is one step of int8.
        terminates: whether the rule promises not to fire on its own result again and again.
        constants: numbers that the rule's code names; sizes and entries next to them are drawn.
        imports: modules that define operators of the rule, for counterexamples that call one.
        shrink: whether a counterexample is made small, which takes longer than to find it.
        wide: whether inputs are drawn that the constraints alone must refuse: integers in place of other numbers, and
            guesses and smaller tensors in place of what the sampler gives, whose integers and bools mean something.

    Raises:
        FxRewriteError: there is no such dtype, or `samples` is not positive.
        RuleDefinitionError: the rule is wrong as written, on any graph.
    """
    _check_options(rule_id, samples, dtypes, domain, run, tolerance)
    drawn = tuple(map(_dtype, DTYPES if dtypes is None else dtypes))
    virtual = [t.key for term in pattern.outputs for t in subterms(term) if isinstance(t, Op) and is_virtual(t.key)]
    bed = next((_test_bed(key, pattern) for key in virtual if tested_by(key)), None) if run is None else None
    if bed is not None:
        run, sampler = bed.run, bed.sampler(sampler)
    elif virtual and run is None:
        name = virtual[0].rpartition(".")[2]
        return Verdict(
            rule_id,
            error=f"on one device {name} is only a placeholder, so a rule on it cannot be tested there; "
            "pass run= to run the graphs on simulated ranks (fxrewrite.testing.run_on_ranks)",
        )
    sizes = [int(n) for n in constants if _MOST <= n < _LARGEST and n == int(n)]
    long_sizes = sorted({size for n in sizes for size in (n, n + 1, 2 * n)})

    def search(pattern: Pattern, numerics: str, domain: Domain) -> _Search:
        facts = Facts(pattern)
        found = _Search(
            rule_id=rule_id,
            trials=Trials(
                pattern=pattern,
                rewrite=rewrite,
                promise=RulePromise(numerics, rng, shapes, strides, tolerance),
                grad=grad,
                terminates=terminates,
                run=run,
                bed=bed,
                mode=FakeMode(),
                program=Program([(rule_id, pattern)]),
            ),
            dtypes=facts.drawn(drawn) if dtypes is None else drawn,
            seed=seed,
            sampler=sampler,
            domain=domain,
            facts=facts,
            imports=tuple(imports),
            long_sizes=tuple(long_sizes),
            named=tuple(sorted(set(constants))),
            shrink=shrink,
            wide=wide,
        )
        found.points.name(constants)
        return found

    with quiet():
        verdict = search(pattern, numerics, domain).verdict(samples)
    wrong = verdict.counterexample
    if wrong is None or not shrink or sampler is not None or run is not None:
        return verdict

    def lacks() -> str:
        with quiet():
            return remedy(pattern, numerics, domain, wrong.difference.kind, search, samples)

    return replace(verdict, lacks=functools.cache(lacks))


def _check_options(
    rule_id: str,
    samples: object,
    dtypes: Sequence[str | torch.dtype] | None,
    domain: object,
    run: object,
    tolerance: float | None,
) -> None:
    """Raise FxRewriteError where an option is not what it is taken for."""
    wrong = ""
    if type(samples) is not int or samples < 1:
        wrong = f"samples={samples!r} is not a number of samples, 1 or more"
    elif isinstance(dtypes, (str, torch.dtype)) or (dtypes is not None and not dtypes):
        wrong = f"dtypes={dtypes!r} is not a list of a dtype or more; write dtypes=['float32']"
    elif domain not in get_args(Domain):
        wrong = f"domain={domain!r} is not one of {', '.join(map(repr, get_args(Domain)))}"
    elif run is not None and not callable(run):
        wrong = f"run={run!r} is not a function of a graph module and its inputs"
    elif tolerance is not None and (type(tolerance) not in (int, float) or tolerance < 0):
        wrong = f"tolerance={tolerance!r} is not a relative error, 0 or more"
    if wrong:
        raise FxRewriteError(f"verify {rule_id}: {wrong}")


def _test_bed(key: str, pattern: Pattern) -> TestBed:
    module, _, name = tested_by(key).partition(":")
    return getattr(importlib.import_module(module), name)(pattern)


@contextmanager
def quiet() -> Generator[None]:
    """Silences what the verdict says, and torch, which logs a traceback if an operator rejects fake tensors."""
    logs = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "fxrewrite.rule")]
    were = [log.disabled for log in logs]
    try:
        for log in logs:
            log.disabled = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, was in zip(logs, were, strict=True):
            log.disabled = was


def _dtype(name: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        raise FxRewriteError(
            f"{name!r} is not a floating-point or complex dtype; write float32, bfloat16, complex64 ..."
        )
    return found


@dataclass(slots=True)
class _Search:
    """Proposes samples, preferring alternatives that occurred least, and counts the outcomes."""

    rule_id: str
    trials: Trials
    dtypes: tuple[torch.dtype, ...]
    seed: int
    sampler: Sampler | None
    domain: Domain
    facts: Facts
    imports: tuple[str, ...]
    long_sizes: tuple[int, ...]
    named: tuple[float, ...]
    shrink: bool
    wide: bool
    points: Points = field(default_factory=Points)
    complex_drawn: int = 0
    complex_samples: int = 0
    complex_ungraded: str = ""
    met: Counter[Alternative] = field(default_factory=Counter[Alternative])
    proposed: Counter[Alternative] = field(default_factory=Counter[Alternative])
    counts: Counter[str] = field(default_factory=Counter[str])
    allowed: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    problems: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[str] = field(default_factory=Counter[str])
    ungraded: Counter[str] = field(default_factory=Counter[str])
    without: dict[str, None] = field(default_factory=dict[str, None])

    def verdict(self, samples: int) -> Verdict:
        """Returns the verdict after `samples` comparisons, or at the first difference."""
        index = -1
        for trial in self.draw(samples):
            index += 1
            if trial.differences:
                is_complex = bool(self.complex_drawn)
                wrong = self._counterexample(-1 if is_complex else index, trial)
                return self._verdict(samples, wrong, is_complex=is_complex)
        return self._verdict(samples, None)

    def says_enough(self, samples: int) -> bool:
        """Whether what was drawn shows that a rule is true, if nothing was different."""
        return self._verdict(samples, None).ok and self.counts["compared"] >= samples

    def draw(self, samples: int) -> Iterator[Trial]:
        """Yields trials until there were `samples` comparisons and each alternative occurred; then complex numbers."""
        wanted = {
            Alternative(site, i)
            for site in sites(self.trials.pattern)
            for i in range(len(site.options))
            if i not in site.rare
        }
        limit, index, is_extended = _PROPOSALS * samples, 0, False
        while index < limit and (self.counts["compared"] < samples or wanted - self.met.keys()):
            if not self.counts["compared"] and self.counts["refused"] >= _REFUSALS * samples:
                break
            if self.counts["uncallable"] == index >= samples:
                break
            if index >= _UNMATCHED and not self.counts["compared"] and not self.counts["refused"]:
                break
            # Enough samples, but some alternatives did not occur yet: extend the search once, in proportion to these.
            if self.counts["compared"] >= samples and not is_extended:
                is_extended = True
                limit = min(limit, index + _PROPOSALS * len(wanted - self.met.keys()))
            yield self.propose(index, most=_MOST)
            index += 1
        yield from self._draw_complex(samples)

    def _draw_complex(self, samples: int) -> Iterator[Trial]:
        """Yields trials of complex numbers, unless the pattern takes none."""
        is_asked = {dtype.is_complex for dtype in self.dtypes} == {False, True}
        if not is_asked or self.sampler is not None or self.trials.bed is not None:
            return
        if self.trials.promise.numerics == "exact":  # kernels round products of complex numbers in different orders
            rounded = replace(self.trials.promise, numerics="reassociates")
            self.trials = replace(self.trials, promise=rounded)
        self.trials = replace(self.trials, needs_derivatives=False)  # several kernels have none of complex numbers
        wanted = max(1, samples // _COMPLEX)
        for index in range(_RARE * wanted):
            if self.complex_samples == wanted or (index == _RARE and not self.complex_samples):
                break
            trial = self.propose(-1 - index, most=_MOST, is_complex=True)
            specs = [spec for _, spec in trial.sample.specs()] if trial.sample is not None else []
            if not any(spec.dtype.is_complex and 0 not in spec.shape for spec in specs):
                continue  # some operators take a tensor of complex numbers if it is empty
            self.complex_drawn += 1
            yield trial
            self.complex_samples += trial.status == "compared"
            self.complex_ungraded = self.complex_ungraded or trial.grading.why_not

    def propose(self, index: int, *, most: int, is_complex: bool = False, plain: bool = False) -> Trial:
        """Makes and tests the sample with this number; what shrinks one, or is of complex numbers, is not counted."""
        dtypes = [dtype for dtype in self.dtypes if dtype.is_complex == is_complex] or self.dtypes
        draw = Draw(
            f"{self.seed}/{index}/{most}",
            dtypes[index % len(dtypes)],
            dtypes,
            most=most,
            domain="moderate" if is_complex else self.domain,  # kernels differ in products of complex infinities
            index=index,
            sizes=self.trials.bed.sizes if self.trials.bed is not None else self.facts.sizes,
            often=0.9 if self.trials.bed is not None else 0.4,
            long_sizes=self.long_sizes,
            points=self.points.drawn(),
            named=self.named,
            wide=self.wide,
            plain=plain,
        )

        def choose(site: ChoiceSite) -> int:
            options = [Alternative(site, option) for option in range(len(site.options))]
            weights = [self.met[option] + self.proposed[option] / _PROPOSALS + draw.rng.random() for option in options]
            for rare in site.rare:  # an option that never ran is given up
                is_impossible = self.proposed[options[rare]] >= _RARE and not self.met[options[rare]]
                weights[rare] = math.inf if is_impossible else weights[rare]
            return weights.index(min(weights))

        given = self._given(draw) if self.trials.pattern.lists else None  # a sampler decides how long lists are
        try:
            several = draw.choice(*SEVERAL) if self.trials.pattern.lists else SEVERAL[0]
            reading = read(self.trials.pattern, choose, given, several=several)
        except NoCallError as error:
            trial = Trial("uncallable", str(error))
            self._count(trial, ())
            return trial
        form: Form = "aten" if draw.flag() or self.trials.bed is not None else "torch"
        terms = [term for output in reading.outputs for term in subterms(output) if isinstance(term, Op)]
        exposed = any(term.shared for term in terms) and draw.flag()
        given = by_item(reading, self._given(draw) if given is None else given)
        if given is None:
            return Trial("impossible", f"{self.rule_id}: the sampler gives lists of different lengths under one name")
        if self.wide:
            given = varied(given, reading, draw, is_complex=is_complex)
        twice = draw.flag(0.25)
        size_calls = any(map(is_size, terms)) and draw.flag()
        sample = Sample(reading, form, twice, exposed, given, size_calls)
        trial = self.trials.test(sample, Guesses(self.trials.pattern, self.facts, draw))
        if not is_complex and most == _MOST:
            self._count(trial, reading.chosen)
        return trial

    def _given(self, draw: Draw) -> dict[str, Any]:
        given: Mapping[str, Any] = self.sampler(draw) if self.sampler is not None else {}
        names = {capture.name for capture in self.trials.pattern.captures}
        unknown = [name for name in given if name.partition("@")[0] not in names]
        if unknown:
            raise FxRewriteError(f"{self.rule_id}: the sampler gives {unknown}, the pattern captures {sorted(names)}")
        params = {capture.name for capture in self.trials.pattern.captures if capture.kind == "param"}
        return {
            name: given_binding(value, is_param=name.partition("@")[0] in params or name in self.facts.params)
            for name, value in given.items()
        }

    def _count(self, trial: Trial, chosen: tuple[Alternative, ...]) -> None:
        self.proposed.update(chosen)
        self.counts[trial.status] += 1
        if trial.why:
            (self.refusals if trial.status == "refused" else self.problems)[trial.why] += 1
        if trial.status in ("refused", "compared"):
            self.met.update(chosen)
        for gm in (trial.before, trial.after):
            if gm is not None:
                self.points.read(gm)
        self.counts.update(
            proposed=1, raised=trial.raised, graded=bool(trial.grading.leaves), drawn=trial.drawn and not trial.raised
        )
        if trial.grading.why_not:
            self.ungraded[trial.grading.why_not] += 1
        self.without.update(dict.fromkeys(trial.grading.without))
        for kind in {remark.kind for remark in trial.remarks}:
            number, example = self.allowed.get(kind, (0, ""))
            first = next(str(remark) for remark in trial.remarks if remark.kind == kind)
            self.allowed[kind] = (number + 1, example or first)

    def _counterexample(self, index: int, first: Trial) -> Counterexample:
        """Returns the same kind of difference on the smallest sample found."""
        latest = self._seen_in_values(first) if self.shrink else first
        if self.shrink and self.sampler is not None:
            latest = self._drawn_smaller(index, latest)
        kind = latest.differences[0].kind

        def is_wrong(sample: Sample) -> bool:
            nonlocal latest
            trial = self.trials.test(sample, only=kind)
            if not trial.differences or trial.differences[0].kind != kind:
                return False
            latest = trial
            return True

        assert latest.sample is not None
        tried = 0
        if self.shrink:
            # If it is wrong in float64, rounding is not the cause.
            is_wrong(latest.sample.changed(lambda _, spec: spec.dtype.is_floating_point, dtype=torch.float64))
            tried = shrink(latest.sample, is_wrong, contents_within(self.domain), steps=_SHRINKING)
        assert latest.sample is not None
        assert latest.before is not None
        assert latest.after is not None
        difference = latest.differences[0]
        inputs = list(latest.sample.specs())
        program = self.trials.bed.program if self.trials.bed is not None else ""
        title = f"{self.rule_id} is false"
        text = snippet(
            title, latest.before, latest.after, inputs, difference, self.imports, program, latest.grading.leaves
        )
        return Counterexample(difference, text, tried)

    def _seen_in_values(self, first: Trial) -> Trial:
        """Retries with other entries: if only gradients differ because all is zero, values mostly differ elsewhere."""
        assert first.sample is not None
        if first.differences[0].kind != "gradient":
            return first
        trial = self.trials.test(first.sample.changed(lambda *_: True, layout="contiguous", contents="normal"))
        return trial if trial.differences and trial.differences[0].kind == "value" else first

    def _drawn_smaller(self, index: int, first: Trial) -> Trial:
        """Draws again with smaller limits of sizes, and plain tensors, as a sampler's values must not be changed.

        Returns the trial with the fewest entries, of those that differ within the least limit that has any.
        """
        kind = first.differences[0].kind
        for most, plain in itertools.product((1, 2, 3), (True, False)):
            trials = (self.propose(again, most=most, plain=plain) for again in range(index, index + _PROPOSALS))
            wrong = [trial for trial in trials if trial.differences and trial.differences[0].kind == kind]
            if wrong:
                return min(
                    wrong, key=lambda trial: sum(x.numel() for x in trial.sample.inputs()) if trial.sample else 0
                )
        return first

    def _verdict(self, samples: int, counterexample: Counterexample | None, *, is_complex: bool = False) -> Verdict:
        order = [Alternative(site, i) for site in sites(self.trials.pattern) for i in range(len(site.options))]
        stopped = counterexample is not None
        uncovered = () if stopped else tuple(str(o) for o in order if o not in self.met and o.option not in o.site.rare)
        counts = self.counts
        remarks = [f"allowed, on {number} samples: {example}" for number, example in self.allowed.values()]
        if stopped and is_complex:
            remarks.insert(0, "found on complex numbers; all samples before were equal")
        if counts["refused"] and counts["compared"] and not stopped:
            remarks.append(f"refused most often: {self.refusals.most_common(1)[0][0]}")
        if self.complex_samples:
            remarks.append(f"tested on {self.complex_samples} samples of complex numbers too")
        if self.complex_ungraded:
            remarks.append(f"of complex numbers, some gradients were not compared: {self.complex_ungraded}")
        if self.without:
            remarks.append(f"no gradient of {', '.join(self.without)}: torch has no derivative of the original there")
        if not stopped and counts["compared"] < samples:
            remarks.append(f"{counts['compared']} of {samples} samples were found among {counts['proposed']} graphs")
        return Verdict(
            self.rule_id,
            samples=counts["compared"],
            refused=counts["refused"],
            raised=counts["raised"],
            gradients=counts["graded"],
            drawn=counts["drawn"],
            variants=tuple(str(alternative) for alternative in order if alternative in self.met),
            uncovered=uncovered,
            remarks=tuple(remarks),
            counterexample=counterexample,
            error="" if counterexample is not None else self._error(uncovered),
            ungraded="" if counts["graded"] or not self.ungraded else self.ungraded.most_common(1)[0][0],
            seed=self.seed,
        )

    def _error(self, uncovered: tuple[str, ...]) -> str:
        nearest = "; ".join(problem for problem, _ in self.problems.most_common(2))
        counts = self.counts
        if counts["uncallable"] == counts["proposed"]:
            return f"no sample can be made: {nearest}"
        if not counts["compared"] and not counts["refused"]:
            return f"no sample matches: write a sampler; nearest miss: {nearest}"
        if not counts["compared"]:
            reasons = "; ".join(reason for reason, _ in self.refusals.most_common(2))
            return f"no sample is rewritten, {counts['refused']} matches are refused: {reasons}; or write a sampler"
        if counts["raised"] == counts["compared"]:
            return "the original raises on every sample: write a sampler"
        if uncovered and self.sampler is None:
            return f"{len(uncovered)} alternatives were never met: write a sampler; nearest miss: {nearest}"
        return ""
