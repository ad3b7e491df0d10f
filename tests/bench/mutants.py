"""The table of mutants in docs/proofs.md: shipped rules with one thing changed, judged by `verify` and by `prove`.

    constant    a number among the arguments of a call of the replacement is one more, or a flag is the other
    dimension   an argument `dim` is the next dimension, or two of a permutation change places
    operand     two operands of a call change places, if the call does not commute
    cast        the result of a call is rounded to bfloat16, or a cast is left out
    guard       one constraint of the pattern is dropped

Of the places that a replacement has for a kind, the first and the last are changed, one at a time. What is changed goes
through the engine as the rule's own calls do: where the engine refuses another shape or dtype, no graph can be
rewritten wrongly. A mutant keeps the promise of its rule, and is verified as `tests/rules/test_verified.py` does it.

A mutant that is found to differ must not be proved: this attacks the prover. One that is not found is equal by meaning,
and `EQUAL` says why, or missed. Resumed where it was stopped: `--out` has a line for each mutant.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxrewrite import Edit, Pattern, Rule, RuleSet, ops
from fxrewrite.errors import FxRewriteError, Refusal, RefusedError, RuleDefinitionError
from fxrewrite.prove import Proof, prove
from fxrewrite.spmd import SpmdContext
from fxrewrite.verify import Verdict, verify_rewrite
from tests.bench.proofs import done, replaced, shipped
from tests.rules.test_verified import (
    AXIS,
    BESIDE,
    BESIDE_ATTENTION,
    ELSEWHERE,
    OF_STRATEGIES,
    ChooseEverywhere,
    interpreted,
)

_BEGIN, _END = "<!-- mutants -->", "<!-- end of mutants -->"
_SAMPLES, _PROBES = 24, 6
"""Samples of a mutant, as of a rule in test_verified.py; of a rule, to see which places it has."""
_CHANGED = ("constant", "dimension", "operand", "cast")
_NOTHING, _NO_CALL = "nothing to change", "the changed call cannot be made"
_REFUSALS = 20
"""Graphs in a row that are refused before a mutant is given up: no graph is rewritten wrongly."""
_OF_MEMORY = ("pin_memory", "non_blocking")
"""Flags that no value depends on, and which need a device."""
_LARGEST = 2**31
"""Larger numbers are no sizes; the last int64 has no successor."""

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


# What is changed


@dataclass
class Change:
    """Changes one place of one kind in the calls that a replacement makes; without a number, it counts them."""

    kind: str
    number: int | None
    seen: int = 0

    @property
    def is_done(self) -> bool:
        """Whether the place was met."""
        return self.number is not None and self.seen > self.number

    def _is_here(self) -> bool:
        self.seen += 1
        return self.number == self.seen - 1

    def call(self, make: Callable[..., fx.Node], target: Any, args: Args, kwargs: Kwargs | None, how: Any) -> fx.Node:
        """Makes a call of the replacement, changed if it has the place."""
        given = dict(kwargs or {})
        if self.kind == "cast":
            return self._cast(make, target, args, given, how)
        for new_args, new_kwargs in _changed(self.kind, target, args, given):
            if self._is_here():
                try:
                    return make(target, new_args, new_kwargs, **how)
                except Exception as error:
                    raise _refused(f"{_NO_CALL}: {type(error).__name__}: {error}") from error
        return make(target, args, given, **how)

    def _cast(self, make: Callable[..., fx.Node], target: Any, args: Args, kwargs: Kwargs, how: Any) -> fx.Node:
        node = make(target, args, kwargs, **how)
        value = ops.value(node)
        if not isinstance(value, torch.Tensor):
            return node
        is_cast = ops.key(node) == "aten::to" and isinstance(args[0], fx.Node)
        if is_cast and ops.value(args[0]).dtype != value.dtype:
            return args[0] if self._is_here() else node
        if value.dtype in (torch.float32, torch.float64) and self._is_here():
            behind = {name: given for name, given in how.items() if name not in ("before", "after")}
            before = how.get("before")
            place = {"before": before} if before is not None else {"after": node}
            narrow = make(torch.ops.aten.to.dtype, (node, torch.bfloat16), {}, **place, **behind)
            place = {"before": before} if before is not None else {"after": narrow}
            return make(torch.ops.aten.to.dtype, (narrow, value.dtype), {}, **place, **behind)
        return node


def _refused(reason: str) -> RefusedError:
    return RefusedError(Refusal(rule="", reason=reason))


def _changed(kind: str, target: Any, args: Args, kwargs: Kwargs) -> Iterator[tuple[Args, dict[str, Any]]]:
    """Yields the arguments of a call with one thing changed."""
    if kind == "operand":
        for new_args in _swapped(target, args):
            yield new_args, dict(kwargs)
        return
    names = _names(target, args, kwargs)
    first = next((ops.value(arg) for arg in args if isinstance(arg, fx.Node)), None)
    rank = getattr(first, "ndim", 0)
    for place, value in [*enumerate(args), *kwargs.items()]:
        name = names.get(place, place)
        is_dim = name in ops.DIM_ARGUMENTS
        if is_dim != (kind == "dimension") or name in _OF_MEMORY:
            continue
        new = _other_dim(value, rank) if is_dim else _other_number(value)
        if new is not None and isinstance(place, int):
            yield (*args[:place], new, *args[place + 1 :]), dict(kwargs)
        elif new is not None:
            yield args, {**kwargs, str(place): new}


def _names(target: Any, args: Args, kwargs: Kwargs) -> dict[int | str, str]:
    try:
        signature = ops.signature_of(target, args, kwargs)
    except TypeError:
        return {}
    return {index: name for name, index in signature.positions}


def _other_dim(value: Any, rank: int) -> Any:
    if rank < 2:
        return None
    if type(value) is int:
        return (value + 1) % rank
    if not isinstance(value, (list, tuple)) or not value or not all(type(item) is int for item in value):
        return None
    if len(value) == rank:  # all dimensions: their order may matter
        return [value[1], value[0], *value[2:]]
    taken = {item % rank for item in value}
    return [next(dim for dim in range(rank) if dim not in taken), *value[1:]]


def _other_number(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if type(value) in (int, float) and abs(value) < _LARGEST:
        return value + 1
    if isinstance(value, (list, tuple)) and value and type(value[0]) in (int, float):
        return [value[0] + 1, *value[1:]]
    return None


def _swapped(target: Any, args: Args) -> Iterator[Args]:
    """Yields the arguments with two neighbours exchanged, also in a list of tensors."""
    is_commutative = ops.is_commutative(ops.call_key(target, args, {}))
    for place, (one, other) in enumerate(zip(args, args[1:], strict=False)):
        if isinstance(one, fx.Node) and isinstance(other, fx.Node) and one is not other:
            if not (is_commutative and place == 0):
                yield (*args[:place], other, one, *args[place + 2 :])
    for place, arg in enumerate(args):
        if isinstance(arg, (list, tuple)) and len(arg) > 1 and arg[0] is not arg[1]:
            if all(isinstance(item, fx.Node) for item in arg[:2]):
                yield (*args[:place], [arg[1], arg[0], *arg[2:]], *args[place + 1 :])


# Mutants


class NoMutantError(RuleDefinitionError):
    """Nothing can be changed, or the engine refuses each rewrite that is."""


class Mutated(Rule):
    """A rule whose replacement makes one call otherwise, or whose pattern lacks a constraint.

    Attributes:
        places: the largest number of places of each kind in one rewrite, where they are counted.
        inputs: the inputs of the graph that was rewritten last.
        refusals: graphs that were refused; none are counted any more once one was not.
    """

    kind: str
    number: int | None
    places: Counter[str]
    inputs: list[torch.Tensor]
    refusals: int | None

    @classmethod
    def of(cls, rule: Rule, pattern: Pattern, kind: str, number: int | None) -> Mutated:
        """Makes a mutant; `kind` "" counts places."""
        new = cls.__new__(cls)
        new.__dict__.update(copy.copy(rule).__dict__)
        new.pattern, new.forms = pattern, (pattern,)
        new.kind, new.number, new.places, new.inputs, new.refusals = kind, number, Counter(), [], 0
        return new

    def rewrite(self, edit: Edit, match: Any, effects: Any) -> None:
        """Rewrites one match; refuses it if it has nothing to change."""
        self.inputs = [ops.value(node) for node in edit.graph.find_nodes(op="placeholder")]
        changes = [Change(kind, self.number) for kind in ([self.kind] if self.kind in _CHANGED else _CHANGED)]
        if self.kind == "guard":
            super().rewrite(edit, match, effects)
            return
        made = edit.call

        def call(target: Any, args: Args = (), kwargs: Kwargs | None = None, **how: Any) -> fx.Node:
            if self.kind:
                return changes[0].call(made, target, args, kwargs, how)
            node = made(target, args, kwargs, **how)
            for change in changes:
                change.call(lambda *_, node=node, **__: node, target, args, kwargs, how)
            return node

        edit.call = call  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with edit.savepoint():
                super().rewrite(edit, match, effects)
                if self.kind and not changes[0].is_done:
                    raise _refused(_NOTHING)
        except RefusedError as error:
            self.refusals = None if self.refusals is None else self.refusals + 1
            if self.kind and self.refusals == _REFUSALS:
                raise NoMutantError(error.reason) from error
            raise
        finally:
            del edit.call  # pyright: ignore[reportAttributeAccessIssue]
        self.refusals = None
        for change in changes:
            self.places[change.kind] = max(self.places[change.kind], change.seen)


@dataclass(frozen=True)
class Mutant:
    """A rule with one thing changed."""

    rule: Rule
    kind: str
    number: int
    verify: Callable[..., Verdict] = field(repr=False)
    pattern: Pattern = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.rule.id}/{self.kind} {self.number}"

    def mutated(self) -> Mutated:
        """The rule that does it."""
        return Mutated.of(self.rule, self.pattern, self.kind, self.number)


def mutants(rule: Rule) -> Iterator[Mutant]:
    """Yields the mutants of a rule."""
    way = ways_of(rule)
    if way is None:
        return
    verify, pattern = way
    counting = Mutated.of(rule, pattern, "", None)
    verify(counting, samples=_PROBES, shrink=False, grad=False)
    for kind in _CHANGED:
        for number in sorted({0, counting.places[kind] - 1} if counting.places[kind] else ()):
            yield Mutant(rule, kind, number, verify, pattern)
    for number in range(len(pattern.where)):
        kept = (*pattern.where[:number], *pattern.where[number + 1 :])
        yield Mutant(rule, "guard", number, verify, Pattern(pattern.outputs, kept))


def ways_of(rule: Rule) -> tuple[Callable[..., Verdict], Pattern] | None:
    """How tests/rules/test_verified.py verifies a rule, and of which pattern; None if it does not."""
    where = rule.pattern.where
    if any(rule.id == one.id for one in OF_STRATEGIES):
        return _verified_where_chosen, Pattern(rule.pattern.outputs)
    if rule.id == "attention.repeat_heads":
        return Rule.verify, Pattern(rule.pattern.outputs)
    if ELSEWHERE.get(rule.id) == BESIDE:
        kept = tuple(one for one in where if str(one).partition("(")[0] not in BESIDE_ATTENTION)
        return Rule.verify, Pattern(rule.pattern.outputs, kept)
    return None if rule.id in ELSEWHERE else (Rule.verify, rule.pattern)


def _verified_where_chosen(rule: Rule, **options: Any) -> Verdict:
    """Verifies a rule of an attention strategy as if every attention had been left to it."""

    def rewrite(gm: fx.GraphModule) -> int:
        return RuleSet("one", ChooseEverywhere(rule.id), rule).apply(gm, context=SpmdContext(AXIS)).rewrites

    promised: dict[str, Any] = {"numerics": rule.numerics, "domain": rule.domain, "run": interpreted}
    return verify_rewrite(rule.id, rule.pattern, rewrite, sampler=rule._sampler, **promised | options)


def judged(mutant: Mutant) -> dict[str, Any]:
    """What is said of a mutant."""
    begin = time.process_time()
    mutated = mutant.mutated()
    row: dict[str, Any] = {"id": mutant.id}
    try:
        verdict = mutant.verify(mutated, samples=_SAMPLES, shrink=False)
    except FxRewriteError as error:
        return row | {"said": "no mutant", "why": _line(error)}
    inputs = mutated.inputs
    middle = time.process_time()
    example = verdict.counterexample
    why = _line(verdict).partition(": ")[2]
    if example is None and not verdict.samples:
        return row | {"said": "no mutant", "why": why, "verified": round(middle - begin, 1)}
    proof = prove(mutated)
    said = "not found"
    if example is not None:
        said = "found"
        row["kind"] = example.difference.kind
    elif verdict.error:
        why = f"{verdict.error} ({why})"
    row |= {"said": said, "proved": proof.strength, "why": why[:300], "proof": proof.summary[:300]}
    if example is not None and proof.is_proved:
        row["denied"] = _denies(proof, example.difference.kind, inputs)
    return row | {"verified": round(middle - begin, 1), "tried": round(time.process_time() - middle, 1)}


def _denies(proof: Proof, kind: str, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a counterexample is one of the inputs that the proof speaks of, and differs in what it speaks of."""
    is_of_values = kind in ("value", "shape", "dtype", "raises", "outputs")
    dtypes = {str(fake.dtype).removeprefix("torch.") for fake in inputs}
    sizes = {size for fake in inputs for size in fake.shape}
    is_looked_at = dtypes <= set(proof.dtypes) and {fake.ndim for fake in inputs} <= set(proof.ranks)
    return is_of_values and is_looked_at and all(size >= 2 for size in sizes)


def _line(text: Any) -> str:
    return str(text).partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--table", type=Path)
    parser.add_argument("--rules", nargs="*", default=[], help="ids of rules, or parts of them; by default all")
    arguments = parser.parse_args()
    known = done(arguments.out)
    wanted = [r for r in shipped() if not arguments.rules or any(part in r.id for part in arguments.rules)]
    with arguments.out.open("a", encoding="utf-8") as out:
        for rule in wanted:
            if rule.id in known:
                continue
            begin = time.process_time()
            for mutant in mutants(rule):
                if mutant.id not in known:
                    known[mutant.id] = judged(mutant)
                    print(json.dumps(known[mutant.id]), file=out, flush=True)
            known[rule.id] = {"id": rule.id, "said": "rule", "seconds": round(time.process_time() - begin, 1)}
            print(json.dumps(known[rule.id]), file=out, flush=True)


if __name__ == "__main__":
    main()
