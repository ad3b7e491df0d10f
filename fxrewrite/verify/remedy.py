"""What a false rule lacks: the constraints and promises with which it is true, learned from samples and tested.

Samples of the rule as it is are drawn, and each is either equal before and after or not. Conditions that the language
of constraints can say are evaluated on them, and those are chosen that leave out all wrong samples and few right ones.
The rule is tested with them; a sample that is wrong all the same is one more to leave out. In the end each condition is
left out once: what the rule is true without is not proposed.

Source: data-driven inference of preconditions (Padhi, Sharma and Millstein, PLDI 2016), for rewrites Alive-Infer
(Menendez and Nagarakatte, PLDI 2017).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from fxrewrite.match.program import Program
from fxrewrite.pattern.pattern import ROOT, Pattern
from fxrewrite.pattern.where import Constraint, parse
from fxrewrite.verify.compare import Kind
from fxrewrite.verify.draw import Domain
from fxrewrite.verify.trial import Trial

_DRAWN = 120
"""Samples from which conditions are learned at first."""
_ROUNDS = 16
"""Tests of a rule, each with a condition more than the one before, after which it is given up."""
_FEWEST = 4
"""Right samples that conditions must leave, of those that were drawn; those of fewer say too little about the rule."""
_MOST_CONDITIONS, _BEAM = 6, 24
"""Conditions of a rule, and sets of them that are kept while they are made larger."""
_FLOATS = ("float16, bfloat16, float32, float64", "float32, float64, bfloat16", "float32, float64")
_DIMS = (0, 1, -1, -2)
_PROMISES: tuple[tuple[str, Domain], ...] = (
    ("exact", "all"),
    ("reassociates", "all"),
    ("exact", "finite"),
    ("reassociates", "finite"),
    ("approximate", "all"),
    ("approximate", "finite"),
    ("approximate", "moderate"),
)
"""What a rule may promise, the strongest first."""


class Searching(Protocol):
    """A search for a difference: of one pattern, with one promise."""

    def draw(self, samples: int) -> Iterator[Trial]:
        """Yields trials, at most this many that compare something, and a few of complex numbers."""
        ...

    def says_enough(self, samples: int) -> bool:
        """Whether the trials so far tested the rule as `verify` asks it."""
        ...


Search = Callable[[Pattern, str, Domain], Searching]


@dataclass(slots=True)
class _Samples:
    """Samples by what is true of them."""

    pattern: Pattern
    candidates: Mapping[str, Constraint]
    costs: Mapping[str, float]
    right: list[frozenset[str]] = field(default_factory=list[frozenset[str]])
    wrong: list[frozenset[str]] = field(default_factory=list[frozenset[str]])

    def add(self, trial: Trial, program: Program[int]) -> bool:
        """Adds what a trial compared; returns whether it is wrong."""
        if trial.status != "compared" or trial.before is None:
            return False
        roots = program.roots(trial.before.graph.nodes)
        found = next((match for node, key in roots for _, match in program.find(node, key)), None)
        if found is not None:
            captures = {**found.captures, ROOT: found.root}
            true = frozenset(text for text, one in self.candidates.items() if not one.why_not(captures))
            (self.wrong if trial.differences else self.right).append(true)
        return bool(trial.differences)

    def chosen(self) -> tuple[str, ...] | None:
        """Returns conditions that no wrong sample satisfies and many right ones do; None if there are none.

        Of sets that are made larger one condition at a time, the best few are kept.
        """
        if not self.wrong:
            return ()
        right, wrong = (1 << len(self.right)) - 1, (1 << len(self.wrong)) - 1
        masks = {
            text: (_mask(text in one for one in self.right), _mask(text in one for one in self.wrong))
            for text in self.candidates
        }
        beam: dict[frozenset[str], tuple[int, int]] = {frozenset(): (right, wrong)}
        complete: list[frozenset[str]] = []

        def score(texts: frozenset[str], kept: int, left: int) -> float:
            costs = sum(self.costs[text] for text in texts)
            return kept.bit_count() / max(1, len(self.right)) - left.bit_count() / max(1, len(self.wrong)) - costs

        for _ in range(_MOST_CONDITIONS):
            larger: dict[frozenset[str], tuple[int, int]] = {}
            for texts, (kept, left) in beam.items():
                for text, (keeps, leaves) in masks.items():
                    if left & ~leaves and (kept & keeps).bit_count() >= _FEWEST:
                        larger[texts | {text}] = kept & keeps, left & leaves
            complete += [texts for texts, (_, left) in larger.items() if not left]
            best = sorted(larger, key=lambda texts: (-score(texts, *larger[texts]), sorted(texts)))
            beam = {texts: larger[texts] for texts in best[:_BEAM] if larger[texts][1]}
        if not complete:
            return None

        def worth(texts: frozenset[str]) -> float:
            return sum(texts <= one for one in self.right) / len(self.right) - sum(self.costs[text] for text in texts)

        chosen = max(complete, key=worth)
        return tuple(text for text in self.candidates if text in chosen)


def _mask(bits: Iterable[bool]) -> int:
    return sum(1 << place for place, bit in enumerate(bits) if bit)


def remedy(pattern: Pattern, numerics: str, domain: Domain, kind: Kind, search: Search, samples: int) -> str:
    """Returns what a false rule lacks, to be pasted into it, or that nothing was found; takes a few seconds.

    Args:
        pattern: of the rule.
        numerics, domain: what it promises.
        kind: of the difference that was found; values and gradients alone may be right under a weaker promise.
        search: draws and tests samples of a pattern under a promise.
        samples: how many samples show that it is true.
    """
    candidates = _candidates(pattern)
    ranks = {"exact": 0, "reassociates": 1, "approximate": 2, "all": 0, "finite": 1, "moderate": 2}
    promises: list[tuple[str, Domain]] = [(numerics, domain)]
    if kind in ("value", "gradient"):
        promises += (p for p in _PROMISES if ranks[p[0]] >= ranks[numerics] and ranks[p[1]] >= ranks[domain])
    for promise in dict.fromkeys(promises):
        found = _learned(pattern, candidates, promise, search, samples)
        if found is None:
            continue
        where = [f'"{one}"' for one in (*map(str, pattern.where), *found)]
        said = [f"where=[{', '.join(where)}]"] if found else []
        said += [f'numerics="{promise[0]}"'] * (promise[0] != numerics)
        said += [f'domain="{promise[1]}"'] * (promise[1] != domain)
        needed = "; without any one of the new conditions it is false" if len(found) > 1 else ""
        return f"It is true, on {samples} samples, with\n  {', '.join(said)}{needed}"
    return "No constraints on ranks, dtypes, sizes and numbers were found that make it true"


def _learned(
    pattern: Pattern, candidates: Mapping[str, float], promise: tuple[str, Domain], search: Search, samples: int
) -> tuple[str, ...] | None:
    program: Program[int] = Program([(0, pattern)])
    known = _Samples(pattern, {text: parse(text) for text in candidates}, candidates)
    for trial in search(pattern, *promise).draw(_DRAWN):
        known.add(trial, program)

    def is_true(conditions: Iterable[str]) -> bool:
        stated = replace(pattern, where=(*pattern.where, *map(parse, conditions)))
        searching = search(stated, *promise)
        for trial in searching.draw(samples):
            if known.add(trial, program) or trial.differences:
                return False
        return searching.says_enough(samples)

    for _ in range(_ROUNDS):
        found = known.chosen()
        if found is None:
            return None
        wrong = len(known.wrong)
        if is_true(found):
            for text in found:
                others = tuple(one for one in found if one != text)
                found = others if len(found) > 1 and is_true(others) else found
            return found
        if len(known.wrong) == wrong:  # it says too little, or is wrong where no condition can see it
            return None
    return None


def _candidates(pattern: Pattern) -> dict[str, float]:
    """Returns conditions on the captures of a pattern, with what each costs; those first that authors state first."""
    tensors = [one.name for one in pattern.captures if one.kind in ("node", "param", "optional")]
    tensors = [name for name in tensors if name not in pattern.lists]
    literals = [one.name for one in pattern.captures if one.kind == "literal"]
    named = (*tensors, ROOT)
    of_all = [f"same_dtype({', '.join(group)})" for group in (tensors, named) if len(group) > 1]
    found = dict.fromkeys(of_all, 0.01)
    found |= {f"rank({name}) == {rank}": 0.02 for rank in range(1, 5) for name in tensors}
    found |= {f"rank({name}) {relation}": 0.02 for relation in (">= 1", ">= 2", "<= 2") for name in tensors}
    found |= {f"dtype({name}) in {{{floats}}}": 0.02 for floats in _FLOATS for name in tensors}
    found |= {f"size({name}, {dim}) > 0": 0.02 for dim in (-1, -2, 0) for name in tensors}
    found |= {f"{name} {relation}": 0.02 for relation in ("> 0", ">= 0", "== 1", "== 0", "== -1") for name in literals}
    for a, b in itertools.combinations(named, 2):
        of_result = 0.1 if b == ROOT else 0.0
        found.setdefault(f"same_dtype({a}, {b})", 0.02 + of_result)
        found[f"shape({a}) == shape({b})"] = 0.05 + of_result
    for a, b in itertools.combinations(tensors, 2):
        found |= {f"size({a}, {i}) == size({b}, {j})": 0.1 for i, j in itertools.product(_DIMS, _DIMS)}
    return found
