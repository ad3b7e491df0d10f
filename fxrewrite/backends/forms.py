"""Patterns after decompositions: what torch's tables make of a pattern is found by decomposing samples of it.

Autograd and inductor decompose operators before the graphs that their passes see: no `softmax` or `linear` is in them.
A form is a pattern of what they see instead. It holds for inputs of the ranks and dtypes of its samples, which is a
constraint of it; what differs between samples of one form is a size, which the shape of the result decides.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.backends.decompose import is_decomposed
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern import where
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import (
    Capture,
    Ignore,
    ListOf,
    LiteralValue,
    Op,
    Siblings,
    Term,
    as_term,
    call,
    freeze,
    subterms,
)
from fxrewrite.verify.build import Builder, FakeMode, NoSampleError
from fxrewrite.verify.calls import NoCallError
from fxrewrite.verify.draw import Draw
from fxrewrite.verify.facts import Facts
from fxrewrite.verify.guess import Guesses
from fxrewrite.verify.readings import ChoiceSite, read, sites
from fxrewrite.verify.rewrite import quiet
from fxrewrite.verify.sample import TORCH_ERRORS, Sample
from fxrewrite.verify.tensors import InputSpec

Table = Mapping[Any, Callable[..., Any]]
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_SAMPLES, _ENOUGH = 8, 2
"""Samples of a dtype and ranks that are tried for each alternative of the pattern, and how many alike are traced."""


def decomposed_in(pattern: Pattern, table: Table) -> list[str]:
    """Returns the operators of the pattern that are not in a graph after the table is applied."""
    terms = (term for output in pattern.outputs for term in subterms(output) if isinstance(term, Op))
    return sorted({term.key for term in terms if is_decomposed(term.key, table)})


def forms(
    pattern: Pattern, table: Table, dtypes: Iterable[torch.dtype], ranks: Collection[int] = (1, 2, 3, 4)
) -> tuple[Pattern, ...]:
    """Returns what the pattern is after a table of decompositions, for inputs of these floating-point dtypes.

    Args:
        pattern: without `siblings` and lists of any length, of which no form is found.
        table: decompositions by overload, as torch's `select_decomp_table()` and `default_decompositions()` give them.
        dtypes: of floating-point inputs.
        ranks: of inputs.
    """
    if pattern.lists or any(isinstance(output, Siblings) for output in pattern.outputs):
        return ()
    groups: dict[Any, list[_Form]] = {}
    more = 1 + len(sites(pattern)) + sum(capture.kind in ("literal", "any") for capture in pattern.captures)
    for dtype in dtypes:
        met: Counter[Any] = Counter()
        for ranked in _of_ranks(pattern, sorted(ranks)):
            for index in range(_SAMPLES * more):
                form = _sampled(ranked, table, _Sizes(f"{dtype} {index}", dtype), met, _ENOUGH * more)
                if form is not None:
                    groups.setdefault(form.group, []).append(form)
    found = (_general(pattern, group) for group in groups.values())
    return tuple(dict.fromkeys(form for form in found if form is not None))


def _of_ranks(pattern: Pattern, ranks: Sequence[int]) -> list[Pattern]:
    """Returns the pattern for all combinations of ranks of its first three tensors whose rank it does not state."""
    stated = Facts(pattern).ranks
    names = [c.name for c in pattern.captures if c.kind in ("node", "param") and c.name not in stated][:3]
    return [
        replace(pattern, where=(*pattern.where, *map(where.rank, names, some)))
        for some in itertools.product(ranks, repeat=len(names))
    ]


class _Ranked(Facts):
    """Guesses of a tensor whose rank is known: the last dimensions of another one, or any, as a layer's weights have.

    Floating-point inputs have one dtype, unless the pattern states theirs.
    """

    def tensor(
        self,
        name: str,
        context: Sequence[torch.Tensor],
        bound: Mapping[str, Any],
        draw: Draw,
        attempt: int,
        stated: Sequence[int] | None = None,
    ) -> InputSpec:
        spec = super().tensor(name, context, bound, draw, attempt, stated)
        rank = self.ranks.get(name)
        shapes = [tensor.shape for tensor in context if rank and tensor.ndim >= rank]
        if rank and shapes and spec.shape != stated and draw.flag(0.7):
            sizes = [size for tensor in context for size in tensor.shape]
            some = draw.choice(*shapes)[-rank:] if draw.flag() else [draw.choice(*sizes) for _ in range(rank)]
            spec = replace(spec, shape=tuple(some))
        is_free = spec.dtype.is_floating_point and name not in self.dtypes
        return replace(spec, dtype=draw.dtype) if is_free else spec


class _Sizes(Draw):
    """Draws sizes that are not 0 and not 1, few and different, and inputs that are contiguous."""

    def __init__(self, seed: str, dtype: torch.dtype) -> None:
        super().__init__(seed, dtype, _DTYPES)
        self._pool = self.rng.sample((2, 3, 4, 5, 7), 3)

    def spec(self, shape: Sequence[int], dtype: torch.dtype | None = None, *, is_param: bool = False) -> InputSpec:
        return replace(super().spec(shape, dtype, is_param=is_param), layout="contiguous")


@dataclass(frozen=True)
class _Form:
    """The decomposition of one sample.

    Attributes:
        outputs: its terms, whose captures are those of the pattern.
        inputs: rank and dtype by capture.
        bindings: of what the pattern captures, or ignores, without tensors.
    """

    outputs: tuple[Term, ...]
    inputs: tuple[tuple[str, int, torch.dtype], ...]
    bindings: Mapping[str, Any]

    @property
    def group(self) -> Any:
        """Equal for samples that differ in literals alone."""
        absent = frozenset(name for name, value in self.bindings.items() if value is None)
        return tuple(map(_skeleton, self.outputs)), self.inputs, absent


def _sampled(pattern: Pattern, table: Table, draw: Draw, met: Counter[Any], enough: int) -> _Form | None:
    """Returns the decomposition of one sample; None if it does not run, is no pattern, or `met` has enough like it."""

    def choose(site: ChoiceSite) -> int:
        return draw.integer(0, len(site.options) - 1)

    mode = FakeMode()
    try:
        reading = read(pattern, choose)
        builder = Builder(Sample(reading, "aten", False, False, {}), mode, Guesses(pattern, _Ranked(pattern), draw))
        with quiet():
            builder.calls()
            bindings, specs = builder.complete.bindings, list(builder.complete.specs())
            names, inputs = [name for name, _ in specs], tuple((n, len(spec.shape), spec.dtype) for n, spec in specs)
            said = frozenset((n, v) for n, v in bindings.items() if v is None or isinstance(v, torch.dtype))
            like = reading.outputs, inputs, said
            if met[like] == enough or any(size < 2 for _, spec in specs for size in spec.shape):
                return None
            met[like] += 1
            gm = builder.module()
            values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
            with torch.no_grad(), mode:
                traced = make_fx(torch.func.functionalize(gm), decomposition_table=dict(table))(*values)
                if any(map(ops.mutated, traced.graph.nodes)):  # as what torch makes of rms_norm in C++
                    traced = make_fx(torch.func.functionalize(traced))(*values)
        traced.graph.eliminate_dead_code()
        outputs = _terms(traced.graph, names, pattern)
    except (NoSampleError, NoCallError, RuleDefinitionError, *TORCH_ERRORS):
        return None  # a wrong guess; where all are wrong, the plan says that it found no form
    captured = {capture.name for capture in pattern.captures}
    plain = {name: value for name, value in bindings.items() if not isinstance(value, InputSpec)}
    return _Form(outputs, tuple(one for one in inputs if one[0] in captured), plain)


def _terms(graph: fx.Graph, names: Sequence[str], pattern: Pattern) -> tuple[Term, ...]:
    """Returns the outputs of a graph as terms; its inputs are captures of these names, or what a pattern ignores."""
    captures = {capture.name: capture for capture in pattern.captures}
    is_shared = any(isinstance(t, Op) and t.shared for output in pattern.outputs for t in subterms(output))
    inputs = iter(names)
    known: dict[fx.Node, Term] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = captures.get(next(inputs), Ignore())
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, dict(node.kwargs)), known.__getitem__)  # pyright: ignore[reportArgumentType]
            known[node] = call(node.target, args, kwargs, shared=is_shared)
    outputs = tuple(known[node] for node in graph.output_node().all_input_nodes)
    if len(outputs) != len(pattern.outputs) or any(t.may_draw for t in known.values() if isinstance(t, Op)):
        raise RuleDefinitionError("the decomposition draws, or two outputs are one")
    return outputs


def _skeleton(term: Term) -> Any:
    """The term without its literals; hashable."""
    if isinstance(term, Op):
        return term.key, tuple((name, _skeleton(part)) for name, part in term.args)
    if isinstance(term, ListOf):
        return tuple(map(_skeleton, term.items))
    return None if isinstance(term, LiteralValue) else term


def _general(pattern: Pattern, group: Sequence[_Form]) -> Pattern | None:
    """Returns the pattern that all forms of a group are; None if they differ in what is no size, or are too few."""
    if len(group) < 2:
        return None
    bindings = [form.bindings for form in group]
    try:
        outputs = [_joined(terms, bindings, pattern) for terms in zip(*(form.outputs for form in group), strict=True)]
        has = {capture.name for output in outputs for capture in subterms(output) if isinstance(capture, Capture)}
        kinds = {capture.name: capture.kind for capture in pattern.captures}
        absent = tuple(name for name in kinds if name not in has)
        if any(bindings[0].get(name, 0) is not None or kinds[name] == "literal" for name in absent):
            return None  # it does not tell what was captured
        constraints = [c for c in pattern.where if not set(c.names) & set(absent)]
        for name, rank, dtype in group[0].inputs:
            constraints += [where.rank(name, rank), where.dtype(name, dtype)]
        return Pattern(tuple(outputs), tuple(constraints), absent)
    except RuleDefinitionError:
        return None


def _joined(terms: Sequence[Term], bindings: Sequence[Mapping[str, Any]], pattern: Pattern, op: str = "") -> Term:
    """Returns the term that all the terms are, which have one skeleton.

    Raises:
        RuleDefinitionError: they differ in a literal that is neither captured nor the size of a view.
    """
    first = terms[0]
    if isinstance(first, Op):
        parts = [
            (name, _joined([t.args[i][1] for t in terms if isinstance(t, Op)], bindings, pattern, first.key))
            for i, (name, _) in enumerate(first.args)
        ]
        return replace(first, args=tuple(parts))
    if isinstance(first, ListOf):
        columns = zip(*(term.items for term in terms if isinstance(term, ListOf)), strict=True)
        return ListOf(tuple(_joined(column, bindings, pattern, op) for column in columns))
    if not isinstance(first, LiteralValue):
        return first
    return _literal([t.value for t in terms if isinstance(t, LiteralValue)], bindings, pattern, op)


def _literal(values: Sequence[Any], bindings: Sequence[Mapping[str, Any]], pattern: Pattern, op: str) -> Term:
    captures = {capture.name: capture for capture in pattern.captures}
    differ = len({freeze(value) for value in values}) > 1
    if isinstance(values[0], torch.device):
        return Ignore()
    for name in bindings[0]:
        bound = [each.get(name) for each in bindings]
        if len(set(map(freeze, bound))) > 1 and all(map(_is_that, values, bound)):
            return captures.get(name, Ignore())
    if not differ:
        return as_term(values[0]) if values[0] is not ... else LiteralValue(...)
    if ops.has_trait(op, "reshape", "expand"):
        return Ignore()
    if all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        return ListOf(tuple(_literal(column, bindings, pattern, op) for column in zip(*values, strict=True)))
    raise RuleDefinitionError(f"a number of {op} depends on sizes")


def _is_that(value: Any, bound: Any) -> bool:
    """Whether the value is what was bound; C++ decompositions, as that of rms_norm, round numbers to float32."""
    return type(value) is type(bound) and (
        value == bound or (isinstance(bound, float) and value == ctypes.c_float(bound).value)
    )
