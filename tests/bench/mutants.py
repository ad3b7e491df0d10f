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
import math
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
from fxrewrite.prove import prove
from fxrewrite.prove.indices import LEAST
from fxrewrite.spmd import SpmdContext
from fxrewrite.verify import Verdict, verify_rewrite
from rules.fusions.integers import MOVES
from tests.bench.proofs import anywhere, done, replaced, shipped
from tests.rules.test_verified import (
    AXIS,
    ELSEWHERE,
    OF_STRATEGIES,
    ChooseEverywhere,
    interpreted,
)

_BEGIN, _END = "<!-- mutants -->", "<!-- end of mutants -->"
_SAMPLES, _FEW = 64, 12
"""Samples of a mutant and of a rule, as by default; of a mutant that is equal by meaning."""
_RULES = 2
"""Most rules in which one and the same constraint is dropped, but for rules that would have no such mutant."""
_CHANGED = ("constant", "dimension", "operand", "cast")
_NOTHING, _NO_CALL = "nothing to change", "the changed call cannot be made"
_REFUSALS = 20
"""Graphs in a row that are refused before a mutant is given up: no graph is rewritten wrongly."""
_OF_MEMORY = ("pin_memory", "non_blocking")
"""Flags that no value depends on, and which need a device."""
_LONGEST = 300
"""Of what is written of a mutant (characters)."""
_LARGEST = 2**31
"""Larger numbers are no sizes; the last int64 has no successor."""

_REFUSED = "the engine refuses a result of another dtype or shape"
_NEARER = "the original rounds to a narrower dtype, and the replacement does not, which `reassociates` allows"
_NO_COPY = "these operators have no argument `copy`"
_EXACT = "every dtype has 0 and 1"
_SAME_CALL = "the replacement makes the same sum, product or quotient with any number that the operator takes"
_KNOWN_AT_ONCE = "what is computed when the rule is applied is a parameter: `match.once` refuses all else"
_NOT_READ = "`dequantize_per_tensor` does not read the range"
_RANGES = {"slice": 6, **dict.fromkeys(("expand", "reshape", "select", "view"), 4)}
"""Which constant is the end of the range, in moves of integers; of the others it is the fourth."""
EQUAL = {
    "dtype(x) in {float16, bfloat16, float32, float64}": _REFUSED,
    "changes_nothing(x, root)": _REFUSED,
    "is_no_narrower(x, wide)": _NEARER,
    "is_no_narrower(x, dtype)": _NEARER,
    "is_no_narrower(q, wide)": _NEARER,
    "is_no_narrower(q, dtype)": _NEARER,
    "is_no_narrower(q, cast)": _NEARER,
    "normal_forms.drop_slice: copies_nothing(root)": _NO_COPY,
    "normal_forms.drop_expand: copies_nothing(root)": _NO_COPY,
    "normal_forms.drop_alias: copies_nothing(root)": _NO_COPY,
    "normal_forms.drop_narrow: copies_nothing(root)": _NO_COPY,
    "normal_forms.new_zeros_to_zeros/cast 0": _EXACT,
    "normal_forms.new_ones_to_ones/cast 0": _EXACT,
    "normal_forms.drop_output_size/dimension 0": f"{_REFUSED}; without repeats, every dimension is the same",
    "attention.round_scores_once: dtype(q) in {float16, bfloat16, float32, float64}": (
        "softmax casts integers to the wide dtype as the original does"
    ),
    "autosp.repeat_kv_heads/dimension 0": f"{_REFUSED}; without repeats, every dimension is the same",
    "autosp.repeat_kv_heads/dimension 1": f"{_REFUSED}; without repeats, every dimension is the same",
    "autosp.repeat_kv_heads/constant 0": "repeats compose: grouped attention repeats heads of k by what is left",
    "autosp.ring_of_ranks/constant 4": "it says which ranks form a group; whole values are computed without ranks",
    "attention.write_out: is_no_sdpa(root)": "it calls scaled_dot_product_attention, as `lower_to_sdpa` does",
    "is_param(b)": _KNOWN_AT_ONCE,
    "is_param(gamma)": _KNOWN_AT_ONCE,
    "is_param(beta)": _KNOWN_AT_ONCE,
    "folding.fold_transposed_conv/constant 4": f"{_REFUSED}; a kernel of one entry has no dilation",
    "integers.dynamic_linear/cast 0": "the sums are the same in int64",
    **{f"integers.{name}/constant {_RANGES.get(name, 3)}": _NOT_READ for name in MOVES},
    "integers.relu/constant 4": _NOT_READ,
    "integers.slice/dimension 0": f"{_REFUSED}; a slice of the same shape is the whole",
    "integers.unsqueeze/dimension 0": f"{_REFUSED}; of the same shape, it is beside a dimension of size 1",
    "swiglu.fuse: shape(gate) == shape(up)": "`swiglu` is that product for operands of any shape",
    "random.draw_dropout_whole: draws(p, train)": (
        "the engine refuses draws that the original does not make; at 0 and 1 there is nothing to draw"
    ),
    "attention.sinks_behind_keys: is_a_column(sinks)": _REFUSED,
    "attention.sinks_behind_keys: are_the_others(root, others)": _REFUSED,
    "draws_nothing(p, train)": "the engine refuses a replacement that leaves out a draw",
    **{
        f"{name}/dimension {number}": f"{_REFUSED}; of the same shape, both dimensions are of size 1"
        for name, number in {
            "attention.fuse": 6,
            "attention.fuse_scaled_bias": 6,
            "attention.fuse_unbiased": 5,
            "attention_dropout.fuse": 6,
            "attention_dropout.fuse_scaled_bias": 6,
        }.items()
    },
    "dtype(hidden) in {bool}": "`masked_fill` takes bools alone, and `logical_not` makes bools",
    "dtype(kept) in {bool}": "fake tensors, of which every graph is made, take no other condition in `where`",
    **{
        f"losses.mean_of_{name}_loss/operand 0": "the loss is symmetric"
        for name in ("mse", "l1", "smooth_l1", "huber", "cosine_embedding")
    },
    "is_number(alpha)": _SAME_CALL,
    "is_number(beta)": _SAME_CALL,
    "attention.merge_factors: is_number(factor)": _SAME_CALL,
    **{
        f"attention.{name}: divides(softcap)": "with a soft cap of 0 all scores are 0, and so they are without one"
        for name in ("fuse_softcap", "fuse_softcap_filled")
    },
    "attention.split_scores: is_number(scale)": _SAME_CALL,
    "attention.split_scores: divides(divisor)": _SAME_CALL,
}
"""Why mutants are equal by meaning: by their ids, by the constraint that is dropped, or by that of one rule."""

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
    first = 1 if ops.is_commutative(ops.call_key(target, args, {})) else 0
    for place in range(first, len(args) - 1):
        if _are_different(*args[place : place + 2]):
            yield (*args[:place], args[place + 1], args[place], *args[place + 2 :])
    for place, arg in enumerate(args):
        if isinstance(arg, (list, tuple)) and len(arg) > 1 and _are_different(*arg[:2]):
            yield (*args[:place], [arg[1], arg[0], *arg[2:]], *args[place + 1 :])


def _are_different(one: Any, other: Any) -> bool:
    return isinstance(one, fx.Node) and isinstance(other, fx.Node) and one is not other


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
    way: Pattern = field(repr=False)
    pattern: Pattern = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.rule.id}/{self.kind} {self.number}"

    @property
    def guard(self) -> str:
        """The constraint that is dropped; empty if it is another kind."""
        return str(self.way.where[self.number]) if self.kind == "guard" else ""

    @property
    def equal(self) -> str:
        """Why it is equal by meaning; empty if it is not known to be."""
        return _equal({"id": self.id, "guard": self.guard})

    def mutated(self) -> Mutated:
        """The rule that does it."""
        return Mutated.of(self.rule, self.pattern, self.kind, self.number)


def places_of(rule: Rule) -> dict[str, Any]:
    """Whether a rule is true, and how many places of each kind its replacement has, in the rewrite that has most."""
    way = ways_of(rule)
    row: dict[str, Any] = {"id": rule.id, "said": "rule"}
    if way is None:
        return row | {"places": None}
    verify, pattern = way
    begin = time.process_time()
    counting = Mutated.of(rule, pattern, "", None)
    verdict = verify(counting, samples=_SAMPLES, shrink=False, wide=True)
    row |= {"places": counting.places, "is_true": verdict.ok, "why": "" if verdict.ok else _line(verdict)[:_LONGEST]}
    return row | {"seconds": round(time.process_time() - begin, 1)}


def guards_of(rules: Sequence[Rule]) -> dict[str, list[int]]:
    """Which constraints of each rule are dropped: one that many have in some of them; at least one of each rule."""
    dropped: Counter[str] = Counter()
    chosen: dict[str, list[int]] = {}
    for rule in rules:
        way = ways_of(rule)
        where = [str(one) for one in way[1].where] if way is not None else []
        most = max(_RULES, 1 + min((dropped[one] for one in where), default=0))
        chosen[rule.id] = []
        for number, one in enumerate(where):
            if dropped[one] < most:
                dropped[one] += 1
                chosen[rule.id].append(number)
    return chosen


def mutants(rule: Rule, places: Mapping[str, int] | None, guards: Sequence[int]) -> Iterator[Mutant]:
    """Yields the mutants of a rule; `guards` are the places of constraints that are dropped."""
    way = ways_of(rule)
    if way is None or places is None:
        return
    verify, pattern = way
    for kind in _CHANGED:
        count = places.get(kind, 0)
        for number in sorted({0, count - 1} if count else ()):
            yield Mutant(rule, kind, number, verify, pattern, pattern)
    for number in guards:
        kept = (*pattern.where[:number], *pattern.where[number + 1 :])
        yield Mutant(rule, "guard", number, verify, pattern, Pattern(pattern.outputs, kept))


def ways_of(rule: Rule) -> tuple[Callable[..., Verdict], Pattern] | None:
    """How tests/rules/test_verified.py verifies a rule, and of which pattern; None if it does not."""
    if any(rule.id == one.id for one in OF_STRATEGIES):
        return _verified_where_chosen, Pattern(rule.pattern.outputs)
    pays = anywhere(rule)
    return (Rule.verify, pays.pattern) if pays is not rule or rule.id not in ELSEWHERE else None


def _verified_where_chosen(rule: Rule, **options: Any) -> Verdict:
    """Verifies a rule of an attention strategy as if every attention had been left to it."""

    def rewrite(gm: fx.GraphModule) -> int:
        return RuleSet("one", ChooseEverywhere(rule.id), rule).apply(gm, context=SpmdContext(AXIS)).rewrites

    promised: dict[str, Any] = {"numerics": rule.numerics, "domain": rule.domain, "run": interpreted}
    return verify_rewrite(rule.id, rule.pattern, rewrite, sampler=rule._sampler, **promised | options)


def judged(mutant: Mutant, *, wide: bool) -> dict[str, Any]:
    """What `verify` says of a mutant, and on which inputs; in wide samples, if its rule is true of them."""
    begin = time.process_time()
    mutated = mutant.mutated()
    row: dict[str, Any] = {"id": mutant.id}
    try:
        verdict = mutant.verify(mutated, samples=_FEW if mutant.equal else _SAMPLES, shrink=False, wide=wide)
    except FxRewriteError as error:
        return row | {"said": "no mutant", "why": _line(error)[:_LONGEST]}
    example = verdict.counterexample
    why = _line(verdict).partition(": ")[2][:_LONGEST]
    said = "found" if example is not None else "not found" if verdict.samples else "no mutant"
    row |= {"said": said, "why": why, "seconds": round(time.process_time() - begin, 1)}
    row |= {"guard": mutant.guard} if mutant.guard else {}
    if example is None:
        return row
    sizes = [size for fake in mutated.inputs for size in fake.shape]
    dtypes = sorted({str(fake.dtype).removeprefix("torch.") for fake in mutated.inputs})
    ranks = sorted({fake.ndim for fake in mutated.inputs})
    return row | {
        "difference": example.difference.kind,
        "dtypes": dtypes,
        "ranks": ranks,
        "least": min(sizes, default=2),
    }


def attacked(mutant: Mutant, row: Mapping[str, Any]) -> dict[str, Any]:
    """What `prove` says of a mutant, and whether a counterexample denies it: differs in what the proof speaks of."""
    begin = time.process_time()
    proof = prove(mutant.mutated())
    told: dict[str, Any] = {
        "id": f"{mutant.id}/proof",
        "said": "proof",
        "proved": proof.strength,
        "why": proof.summary[:_LONGEST],
    }
    if row["said"] == "found" and proof.is_proved:
        is_of_values = row["difference"] in ("value", "shape", "dtype", "raises", "outputs")
        is_looked_at = set(row["dtypes"]) <= set(proof.dtypes) and set(row["ranks"]) <= set(proof.ranks)
        told["denied"] = is_of_values and is_looked_at and row["least"] >= LEAST
    return told | {"seconds": round(time.process_time() - begin, 1)}


def _kind(row: Mapping[str, Any]) -> str:
    return row["id"].rpartition("/")[2].partition(" ")[0]


def _equal(row: Mapping[str, Any]) -> str:
    """Why a mutant is equal by meaning; empty if it is not known to be."""
    rule, guard = row["id"].partition("/")[0], row.get("guard", "")
    return EQUAL.get(row["id"]) or EQUAL.get(f"{rule}: {guard}") or EQUAL.get(guard, "")


def _table(rows: list[dict[str, Any]], later: Sequence[str]) -> str:
    proofs = {row["id"].removesuffix("/proof"): row for row in rows if row["said"] == "proof"}
    rules = [row for row in rows if row["said"] == "rule"]
    changed = [row for row in rows if row["said"] in ("found", "not found", "no mutant")]
    found = [row for row in changed if row["said"] == "found"]
    equal = [row for row in changed if row["said"] == "not found" and _equal(row)]
    missed = [row for row in changed if row["said"] == "not found" and not _equal(row)]
    none = [row for row in changed if row["said"] == "no mutant"]
    share = 100 * len(found) / max(1, len(found) + len(missed))
    mutated = {row["id"].partition("/")[0] for row in changed}
    denied = [name for name, row in proofs.items() if row.get("denied")]
    beyond = [row for row in found if proofs.get(row["id"], {}).get("proved") and row["id"] not in denied]
    lines = [
        f"{len(changed)} mutants of {len(mutated)} rules (torch {torch.__version__.partition('+')[0]}, "
        f"{date.today().isoformat()}): {len(found)} of the {len(found) + len(missed)} that differ are found, "
        f"{share:.1f} %. {sum(row.get('seconds', 0) for row in rows) / 60:.0f} minutes of processor time.",
        "",
        "| changed | mutants | found | equal by meaning | missed | refused |",
        "|---|---|---|---|---|---|",
    ]
    for kind in (*_CHANGED, "guard"):
        counts = [sum(_kind(row) == kind for row in of) for of in (changed, found, equal, missed, none)]
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    tried = [row for row in found if row["id"] in proofs]
    lines += [
        "",
        f"Refused: the changed call cannot be made, or the engine refuses each result of it. {len(tried)} mutants that "
        f"are found were given to `prove`: {len(beyond) + len(denied)} are proved, of which "
        f"{len(denied)} are denied by their counterexample"
        + (f": {', '.join(f'`{name}`' for name in denied)}." if denied else ".")
        + (f" The others differ in what a proof does not speak of: {_listed(beyond, 'difference')}." if beyond else ""),
        "",
        "| equal by meaning | why |",
        "|---|---|",
    ]
    for why in dict.fromkeys(map(_equal, equal)):
        lines.append(f"| {_listed([row for row in equal if _equal(row) == why], 'guard')} | {why} |")
    lines += ["", f"Missed: {_listed(missed, 'guard') or 'none'}."]
    alone = [row["id"] for row in rules if row["places"] is not None and row["id"] not in mutated]
    elsewhere = [row["id"] for row in rules if row["places"] is None]
    false = [row["id"] for row in rules if row.get("is_true") is False]
    lines += ["", f"Nothing to change: {', '.join(f'`{name}`' for name in alone) or 'no rule'}."]
    lines += ["", f"Not mutated, as `verify` cannot test them: {', '.join(f'`{name}`' for name in elsewhere)}."]
    if false:
        lines += ["", f"False of wide samples, unchanged: {', '.join(f'`{name}`' for name in false)}."]
    if later:
        lines += ["", f"Not in this table: {', '.join(f'`{name}`' for name in later)}."]
    return "\n".join(lines)


def _listed(rows: Sequence[Mapping[str, Any]], more: str) -> str:
    return ", ".join(f"`{row['id']}`" + (f" ({row[more]})" if row.get(more) else "") for row in rows)


def _line(text: Any) -> str:
    return str(text).partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--proofs", type=Path, default=Path("proofs.jsonl"), help="of the rules, by tests.bench.proofs")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--rules", nargs="*", default=[], help="ids of rules, or parts of them; by default all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of processor time, after which it stops")
    parser.add_argument("--without", nargs="*", default=[], help="the same, of rules that are left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of small tensors; where other processes run, threads wait for each other
    known: dict[str, Any] = done(arguments.out)
    proved = {row["id"] for row in done(arguments.proofs).values() if row["proved"]}
    wanted = [r for r in shipped() if not arguments.rules or any(part in r.id for part in arguments.rules)]
    wanted = [r for r in wanted if not any(part in r.id for part in arguments.without)]
    with arguments.out.open("a", encoding="utf-8") as out:

        def note(row: dict[str, Any]) -> None:
            known[row["id"]] = row
            print(json.dumps(row), file=out, flush=True)

        changed: list[Mutant] = []
        guards = guards_of(shipped())
        complete: list[str] = []
        for rule in wanted:
            if time.process_time() > arguments.seconds:
                break
            if rule.id not in known:
                note(places_of(rule))
            places = known[rule.id]
            for mutant in mutants(rule, places["places"], guards[rule.id]):
                changed.append(mutant)
                if mutant.id not in known:
                    note({"id": mutant.id, "said": "no mutant", "why": "the process ends in a kernel"})  # if it does
                    note(judged(mutant, wide=places["is_true"]))
            complete.append(rule.id)
        for mutant in changed:
            row = known[mutant.id]
            is_open = row["said"] == "not found" or (row["said"] == "found" and mutant.rule.id in proved)
            if is_open and f"{mutant.id}/proof" not in known and time.process_time() < arguments.seconds:
                note(attacked(mutant, row))
    if arguments.table is not None:
        rows = [row for name, row in known.items() if name.partition("/")[0] in complete]
        later = [rule.id for rule in shipped() if rule.id not in complete]
        replaced(arguments.table, _BEGIN, _END, _table(rows, later))


if __name__ == "__main__":
    main()
