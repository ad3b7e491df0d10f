"""Which dimensions of an operator are independent, found by experiment: it is run whole and on slices, and compared.

Slicing operands along some of their dimensions gives one of three things. The same slices of the results: an index that
may be sharded. Terms whose sum is the results: an index that is contracted. Anything else, or an error: it must be
whole. Gradients of a random weighting of the results must agree as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxrewrite import ops
from fxrewrite.errors import named_line
from fxrewrite.spmd.discovery.free_dims import OperatorCall
from fxrewrite.spmd.discovery.propose import Proposal, place_text
from fxrewrite.spmd.discovery.samples import SampleError, guesses
from fxrewrite.spmd.discovery.slices import FoundIndex, Place, SliceTrial, drawn, find_indices
from fxrewrite.spmd.layouts.rule import LayoutRules, why_unknown


@dataclass(frozen=True, slots=True)
class Discovery:
    """What the experiments say of one operator.

    Attributes:
        target: the operator.
        sample: the arguments it was run on, by name, with a `TensorSpec` for each tensor.
        notation: the rule that they propose, in index notation.
        indices: independent ones first.
        names: of the tensor operands.
        notes: what the notation cannot say.
    """

    target: Any
    sample: dict[str, Any]
    notation: str
    indices: tuple[FoundIndex, ...]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        sample = ", ".join(f"{name}={_text(value)}" for name, value in self.sample.items())
        lines = [f"{ops.key(self.target)}  {self.notation}", f"  run on {sample}"]
        for index in self.indices:
            places = [place_text(self.names, place) for place in sorted(index.operands)]
            places += [f"result dim {dim}" for _, dim in sorted(index.results)][:1]
            lines.append(f"  {index.kind:6}  {', '.join(places)}: {index.why}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class Comparison:
    """A rule that is there already, against what was found.

    Attributes:
        rule: its text.
        wrong: places that it lets be sharded and the experiments do not, or not together.
        stricter: places that it wants whole although they are independent; that is safe.
        unjudged: places whose index shares a dimension with another; experiments see whole dimensions only.
        unknown: why the rule says nothing of this call; empty where it says something.
    """

    rule: str
    wrong: tuple[str, ...] = ()
    stricter: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    unknown: str = ""

    def __str__(self) -> str:
        if self.unknown:
            verdict = f"it says nothing of this call: {self.unknown}"
        elif self.wrong:
            verdict = f"WRONG: it shards {', '.join(self.wrong)}"
        elif self.stricter:
            verdict = f"stricter: it wants whole what is independent, {', '.join(self.stricter)}"
        else:
            verdict = "it says the same"
        if self.unjudged:
            verdict += f"; not judged, for they are dimensions made of several: {', '.join(self.unjudged)}"
        return f"registered as {self.rule}\n  {verdict}"


def discover(target: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None) -> Discovery:
    """Find by experiment which dimensions of an operator are independent.

    Args:
        target: an overload of a torch operator, or its packet.
        args: arguments with a `TensorSpec` for each tensor; without them, likely ones are tried. Use sizes that differ
            where dimensions are unrelated: equal ones may be one index.
        kwargs: further ones by keyword.

    Raises:
        SampleError: the operator cannot be called so, draws random numbers, writes to its arguments, or gives no
            tensor.
    """
    trial = _callable(target, args, kwargs or {})
    writer = Proposal(trial, find_indices(trial))
    notation, notes = writer.write()
    indices = [index for index in writer.indices if index.operands.isdisjoint(writer.broadcast)]
    return Discovery(trial.target, trial.sample, notation, tuple(indices), trial.names, tuple(notes))


def compare(found: Discovery, rules: LayoutRules) -> Comparison | None:
    """What a rule that is there says otherwise; None where the operator has none."""
    rule = next(filter(None, map(rules.get, ops.possible_keys(found.target))), None)
    if rule is None:
        return None
    text = f"{rule.id}: {rule.says()}"
    try:
        call, rule, indices = rules.of(OperatorCall(found.target, (), drawn(found.sample)).traced())
    except RuntimeError as error:  # as where data decide how many entries a result has
        return Comparison(text, unknown=f"it has no fake value: {named_line(error)}")
    if indices is None:
        return Comparison(text, unknown=why_unknown(call, rule))
    sizes = {name: size for name, size in indices.sizes.items() if size != 1}
    shared = {
        name
        for terms in (*indices.operands, *indices.results)
        for names in terms
        if len(sizes.keys() & set(names)) > 1
        for name in names
    }
    free = [index for index in found.indices if index.kind != "whole" and index.added <= indices.added]
    together = {place: index.operands for index in free for place in index.operands}
    wrong, unjudged, said = set[Place](), set[Place](), set[Place]()
    for name in sizes.keys() - indices.whole:
        places = {
            (operand, dim)
            for operand, terms in enumerate(indices.operands)
            for dim, parts in enumerate(terms)
            if name in parts
        }
        said |= places
        if name in shared:
            unjudged |= places
        else:
            wrong |= {place for place in places if not places <= together.get(place, frozenset())}
    groups = [tuple(place_text(found.names, p) for p in sorted(g)) for g in (wrong, together.keys() - said, unjudged)]
    return Comparison(text, groups[0], groups[1], groups[2])


def _callable(target: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any]) -> SliceTrial:
    """The first overload that takes the arguments; where they are guessed, that with most tensors, and most to find."""
    overloads = _overloads(target)
    given = args is not None or bool(kwargs)
    reason = "it has no overload that writes to nothing"
    refused: SampleError | None = None
    best: tuple[tuple[int, int, int], SliceTrial] | None = None
    for overload in overloads:
        names = [a.name for a in overload._schema.arguments]
        samples = [dict(zip(names, args or (), strict=False)) | dict(kwargs)] if given else list(guesses(overload))
        for sample in samples:
            try:
                trial = SliceTrial(overload, sample)
            except SampleError as error:
                refused = refused or error
                continue
            except Exception as error:  # noqa: BLE001  # whatever it is, it is told
                reason = named_line(error)
                continue
            free = [index for index in find_indices(trial) if index.kind != "whole"] if len(samples) > 1 else []
            sizes = {size for shape in trial.shapes for size in shape}
            worth = len(trial.operands), sum(len(index.operands) for index in free), len(sizes)
            if best is None or worth > best[0]:
                best = worth, trial
        if best is not None and given:
            break
    if best is not None:
        return best[1]
    if refused is not None:
        raise refused
    how = "does not take these arguments" if given else "takes none of the arguments tried"
    schema = f"; its schema is {overloads[0]._schema}" if overloads else ""
    raise SampleError(f"{ops.key(target)} {how}: {reason}{schema}; give others, as in f(4, 6, 8), f(12, 8), dim=-1")


def _overloads(target: Any) -> list[torch._ops.OpOverload]:
    if isinstance(target, torch._ops.OpOverload):
        found = [target]
    elif isinstance(target, torch._ops.OpOverloadPacket):
        found = [getattr(target, name) for name in target.overloads()]
    else:
        raise SampleError(
            f"{ops.key(target)} is not an operator of torch.ops; only those have a schema to call them by"
        )
    if all(overload._schema.is_mutable for overload in found):
        raise SampleError(f"{ops.key(target)} writes to its arguments; layout rules are for operators that do not")
    return [overload for overload in found if not overload._schema.is_mutable]


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_text, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    return str(value)
