"""Cases of a rule: one reading of its pattern with symbols for sizes and numbers, before and after the rewrite."""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError, Reason, RefusedError, first_line
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.sizes import size_hint
from fxrewrite.match.program import Program
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.prove.indices import Indices
from fxrewrite.prove.symbolic import Symbols, size_expression
from fxrewrite.prove.text import readable
from fxrewrite.prove.value import items_of
from fxrewrite.verify.build import Builder, FakeMode, NoSampleError
from fxrewrite.verify.calls import NoCallError
from fxrewrite.verify.draw import Draw
from fxrewrite.verify.facts import Facts
from fxrewrite.verify.guess import Guesses
from fxrewrite.verify.readings import ChoiceSite, Reading, by_item, read
from fxrewrite.verify.sample import TORCH_ERRORS, Sample, given_binding
from fxrewrite.verify.tensors import InputSpec

if TYPE_CHECKING:
    from fxrewrite.rule import Rule

_TRIES = 24
"""Most samples that are drawn for a reading."""
_IDLE = 4
"""Cases in a row without a new pair of literals, after which no more are drawn."""
Sizes: TypeAlias = 'Literal["any", "those of inputs", ""]'
_GENERAL: tuple[tuple[Sizes, bool, bool], ...] = (
    ("any", True, False),
    ("those of inputs", True, False),
    ("those of inputs", True, True),
    ("any", False, False),
    ("those of inputs", False, True),
    ("", False, False),
    ("", False, True),
)
"""How sizes, and whether numbers, among arguments of calls are symbols, and whether equal sizes of the sample are one
symbol: the rule is proved in the first, most general, way in which it rewrites the graph."""
_NUMBERS = ("float", "Scalar", "number", "Optional[float]", "Tensor")
"""Kinds of arguments that a floating-point number may be given for."""
_STEP = 0.0625
"""What equal numbers of a sample are moved apart by, so that it is known which one is which."""
_ONCE = "the rule computes a parameter once (match.once), from entries that no proof has; Rule.verify tests such a rule"
_SWAPS = ("as written", "operands swapped")


class NoCaseError(ValueError):
    """A reading of the pattern has no graph that the rule rewrites; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A graph with symbols for its sizes, before and after the rewrite.

    Attributes:
        before, after: the graphs; their placeholders are the same.
        symbols: of the sizes and numbers, with what was asked of them.
        shown: the inputs with their dtypes and sizes (a letter is any size of 2 or more), and other arguments.
        is_general: whether no size is a number above 1, and no product of sizes is a number.
        literals: arguments of calls that are no symbols, by capture: what was not looked at for other values.
    """

    before: fx.GraphModule
    after: fx.GraphModule
    symbols: Symbols
    shown: str
    is_general: bool
    literals: Mapping[str, Any]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The fake tensors that both graphs are given."""
        return [node.meta["val"] for node in self.before.graph.find_nodes(op="placeholder")]

    @property
    def conditions(self) -> tuple[str, ...]:
        """What has been asked of sizes and numbers so far, and does not follow from sizes being 2 or more."""
        indices = Indices()
        open_ones = (known for known in self.symbols.known() if known != sympy.true and not indices.follows(known))
        return tuple(dict.fromkeys(readable(known, self.symbols.names) for known in open_ones))

    @property
    def empty(self) -> set[str]:
        """Names of the inputs without entries."""
        nodes = self.before.graph.find_nodes(op="placeholder")
        return {str(node.target) for node in nodes if any(type(n) is int and n == 0 for n in node.meta["val"].shape)}

    @property
    def is_open(self) -> bool:
        """Whether every size of every input is a symbol, or the input is empty."""
        sizes = [self.symbols.simplified(size_expression(size)) for fake in self.inputs for size in fake.shape]
        are_open = bool(sizes) and all(size.free_symbols or size == 0 for size in sizes)
        return self.is_general and are_open and not _has_numbers(self.symbols)


def readings(pattern: Pattern, most: int) -> list[Reading]:
    """Returns all readings of a pattern; operands of commutative operators in one order each, alternately.

    Raises:
        NoCaseError: there are more than `most`.
    """
    found: list[Reading] = []
    pending: list[dict[ChoiceSite, int]] = [{}]
    while pending:
        chosen = pending.pop()
        opened: list[ChoiceSite] = []

        def choose(site: ChoiceSite, chosen: dict[ChoiceSite, int] = chosen, opened: Any = opened) -> int:
            if site.options == _SWAPS:
                return len(found) % 2
            if site not in chosen:
                chosen[site] = 0
                opened.append(site)
            return chosen[site]

        reading = read(pattern, choose)
        for number, site in enumerate(opened):
            before = dict.fromkeys(opened[:number], 0)
            fixed = {other: option for other, option in chosen.items() if other not in opened}
            pending += [{**fixed, **before, site: option} for option in range(1, len(site.options))]
        found.append(reading)
        if len(found) > most:
            raise NoCaseError(f"the pattern has more than {most} readings")
    return found


class CaseSearch:
    """Draws graphs that a reading matches, and finds up to `most` different cases of those that the rule rewrites."""

    _floats = (torch.float32, torch.float64, torch.bfloat16)

    def __init__(self, rule: Rule, program: Program[Rule], reading: Reading, number: int, most: int) -> None:
        self._rule, self._program = rule, program
        self._reading, self._number, self._most = reading, number, most
        self._mode, self._facts = FakeMode(), Facts(rule.pattern)
        self._general: dict[str, Case] = {}
        """By what is shown of them: cases in which every size is a symbol."""
        self._special: dict[str, Case] = {}
        self._literals = _Seen()
        self._problem = "no sample"

    @property
    def _is_done(self) -> bool:
        return len(self._general) >= self._most and self._has_open and self._literals.are_enough

    @property
    def _has_open(self) -> bool:
        return any(case.is_open for case in self._general.values())

    def found(self) -> list[Case]:
        """The cases, the general ones first; graphs that draw random numbers are left out.

        Raises:
            NoCaseError: the rule rewrites no graph that was drawn.
        """
        for attempt in range(_TRIES):
            if self._is_done:
                break
            self._add_drawn(attempt)
        if not self._general and not self._special:
            raise NoCaseError(self._problem)
        return [*self._general.values(), *list(self._special.values())[: max(0, self._most - len(self._general))]]

    def _add_drawn(self, attempt: int) -> None:
        """Draws a graph, and adds the most general case of it that the rule rewrites."""
        try:
            concrete, complete = self._drawn(attempt)
        except (NoSampleError, NoCallError) as error:
            self._problem = str(error)
            return
        apart = _apart(complete)
        for general, sample in itertools.product(_GENERAL, (complete,) if apart is complete else (apart, complete)):
            try:
                module = concrete if sample is complete else Builder(sample, self._mode).module()
                case = self._case(module, sample, general)
            except RefusedError as error:
                if error.kind is Reason.ONCE:
                    raise NoCaseError(_ONCE) from error
                self._problem = str(error)
            except (FxRewriteError, *TORCH_ERRORS) as error:
                self._problem = f"with symbolic sizes: {first_line(error)}"
            else:
                if case is not None:
                    self._add(case)
                    if case.is_general:
                        break

    def _drawn(self, attempt: int) -> tuple[fx.GraphModule, Sample]:
        """A graph that the reading matches, and what it was made of; raises NoSampleError or NoCallError."""
        kind, dtype = (_LargerDraw if attempt % 2 else Draw), self._floats[attempt % 3]
        draw = kind(f"{self._number}/{attempt}", dtype, self._floats, index=0, sizes=self._facts.sizes)
        sampler = self._rule._sampler
        given = by_item(self._reading, sampler(draw)) if sampler is not None else {}
        if given is None:
            raise NoSampleError("the sampler gives lists of other lengths")
        bindings = {name: given_binding(value) for name, value in given.items()}
        sample = Sample(self._reading, "aten", False, False, bindings, size_calls=True)
        builder = Builder(sample, self._mode, Guesses(self._rule.pattern, self._facts, draw))
        module = builder.module()
        if any(ops.may_draw(node.target) and ops.is_random(node) for node in module.graph.nodes):
            raise NoSampleError("it draws random numbers")
        return module, builder.complete

    def _case(self, concrete: fx.GraphModule, sample: Sample, general: tuple[Sizes, bool, bool]) -> Case | None:
        """The graph of a sample with symbols, before and after the rewrite; None if it does not match any more."""
        sizes, numbers, equal_sizes = general
        symbols = Symbols(equal_sizes=equal_sizes)
        inputs = {
            node: symbols.tensor(
                [int(size) for size in node.meta["val"].shape], node.meta["val"].dtype, str(node.target)
            )
            for node in concrete.graph.find_nodes(op="placeholder")
        }
        literals = _Literals(symbols, sample.bindings, sizes, numbers, list(inputs.values()))
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in concrete.graph.nodes:
            if node.op == "output":
                graph.output(map_arg(node.args[0], new.__getitem__))
                continue
            made = new[node] = graph.node_copy(node, new.__getitem__)
            if node.op == "placeholder":
                made.meta["val"] = inputs[node]
            else:
                first = next((n.meta["val"] for n in made.all_input_nodes if ops.is_tensor(n)), None)
                literals.generalize(made, first)
                made.meta["val"] = symbols.run(made)
        before = fx.GraphModule(torch.nn.Module(), graph)
        if not any(next(self._program.find(node, key), None) for node, key in self._program.roots(before.graph.nodes)):
            return None
        after = copy_module(before)
        if not self._rule._apply(after, self._program):
            return None
        for node in after.graph.nodes:
            if (
                node.op == "call_function"
            ):  # a rewrite adds no guard to a graph; what its operators ask is a condition here
                node.meta["val"] = symbols.run(node)
        shown, is_general = _shown(before, symbols, literals)
        return Case(before, after, symbols, shown, is_general and not _has_numbers(symbols), literals.fixed())

    def _add(self, case: Case) -> None:
        if self._literals.add(case) or len(self._general) < self._most or not self._has_open:
            (self._general if case.is_general else self._special).setdefault(case.shown, case)


class _Seen:
    """Values of literals that are no symbols, and of dtypes, in pairs: a rule may be true of some of them alone."""

    def __init__(self) -> None:
        self._pairs: set[Any] = set()
        self._idle = _IDLE

    def add(self, case: Case) -> bool:
        """Returns whether a case has a pair that none had before."""
        literals = sorted((name, str(value)) for name, value in case.literals.items())
        dtypes = (
            [(f"dtype of {number}", str(fake.dtype)) for number, fake in enumerate(case.inputs)] if literals else []
        )
        new = {*itertools.combinations([*literals, *dtypes], 2), *((one, one) for one in literals)} - self._pairs
        self._pairs |= new
        self._idle = 0 if new else self._idle + 1
        return bool(new)

    @property
    def are_enough(self) -> bool:
        """Whether the last cases had no new pair."""
        return self._idle >= _IDLE


def _apart(sample: Sample) -> Sample:
    """Returns the sample with different numbers for all captures of floating-point numbers but 0."""
    seen: set[float] = set()
    for name, value in sample.bindings.items():
        if isinstance(value, float) and value:
            moved = value
            while moved in seen:
                moved += _STEP
            seen.add(moved)
            if moved != value:
                sample = sample.with_binding(name, moved)
    return sample


class _LargerDraw(Draw):
    """Draws sizes of 2 or more, which become symbols."""

    def size(self, *, least: int = 1) -> int:
        return max(2, super().size(least=least))


class _Literals:
    """Symbols in place of sizes and numbers that the pattern captures or ignores; one for each capture.

    Attributes:
        shown: arguments of calls by name, with symbols where there are any.
    """

    def __init__(
        self, symbols: Symbols, bindings: Mapping[str, Any], sizes: Sizes, numbers: bool, inputs: Sequence[torch.Tensor]
    ) -> None:
        self._symbols, self._sizes, self._numbers = symbols, sizes, numbers
        self._dims = [size for fake in inputs for size in fake.shape if isinstance(size, torch.SymInt)]
        self._made: dict[str, Any] = {}
        tensors = {n for n, v in bindings.items() if any(isinstance(item, InputSpec) for item in items_of(v))}
        self._bound = {n: v for n, v in bindings.items() if n not in tensors and not isinstance(v, str)}
        self.shown = {name.rpartition(".")[2]: value for name, value in self._bound.items() if value is not ...}

    def fixed(self) -> dict[str, Any]:
        """What is shown, without symbols and lists that have one; a symbol that the rule read as a number is that."""
        found = {name: self._read(value) for name, value in self.shown.items()}
        return {name: value for name, value in found.items() if not any(map(_is_symbol, items_of(value)))}

    def _read(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._read(item) for item in value]
        if not _is_symbol(value):
            return value
        expr = self._symbols.simplified(size_expression(value))
        return value if expr.free_symbols else float(expr) if isinstance(value, torch.SymFloat) else int(expr)

    def generalize(self, node: fx.Node, first: torch.Tensor | None) -> None:
        """Replaces literals among the arguments of a call on a tensor."""
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        kinds = {a.name: _kind(a.real_type) for a in node.target._schema.arguments}
        order = [a.name for a in node.target._schema.arguments]
        near = list(first.shape) if first is not None else []
        node.args = tuple(self._general(value, kinds[order[n]], near) for n, value in enumerate(node.args))
        node.kwargs = {name: self._general(value, kinds[name], near) for name, value in node.kwargs.items()}

    def _general(self, value: Any, kind: str, near: Sequence[Any]) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float, list, tuple)):
            return value
        plain = list(value) if isinstance(value, (list, tuple)) else value  # fx keeps lists of a type of its own
        names = (name for name, bound in self._bound.items() if type(bound) is type(plain) and bound == plain)
        name = next(names, None)
        if isinstance(value, (list, tuple)):
            label = None if name is None else name.rpartition(".")[2]
            made = [self._one(item, kind, f"{label}[{n}]", near[n:]) if label else item for n, item in enumerate(value)]
            self.shown |= {label: made} if label else {}
            return made
        if name is None:
            return value
        label = name.rpartition(".")[2]
        self.shown[label] = self._one(value, kind, label, ())
        return self.shown[label]

    def _one(self, value: Any, kind: str, label: str, near: Sequence[Any]) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, int) and self._sizes and "SymInt" in kind and 1 < value < 1 << 31:
            if self._sizes == "those of inputs":
                return next((size for size in (*near[:1], *self._dims) if size_hint(size) == value), value)
            if label not in self._made:
                self._made[label] = self._symbols.size(value, label)
            return self._made[label]
        if isinstance(value, float) and value and math.isfinite(value) and self._numbers and kind in _NUMBERS:
            if label not in self._made:
                self._made[label] = self._symbols.number(value, label)
            return self._made[label]
        return value


def _kind(declared: Any) -> str:
    """The type of an argument, "SymInt" for sizes and lists of them: as text, torch says that they are int."""
    inner = declared
    while inner.kind() in ("ListType", "OptionalType"):
        inner = inner.getElementType()
    return "SymInt" if inner.kind() == "SymIntType" else str(declared)


def _is_symbol(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _has_numbers(symbols: Symbols) -> bool:
    """Whether it was asked that sizes, or a product of sizes, are a number other than 0."""
    equal = (known for known in symbols.known() if isinstance(known, sympy.Eq))
    return any(side.is_number and side != 0 for known in equal for side in known.args)


def _shown(gm: fx.GraphModule, symbols: Symbols, literals: _Literals) -> tuple[str, bool]:
    """The text of a case, and whether none of its sizes is a number above 1."""
    letters = (a + b for a in ("", *string.ascii_lowercase) for b in string.ascii_lowercase)
    named: dict[sympy.Symbol, sympy.Symbol] = {}

    def text(size: Any) -> str:
        expr = symbols.simplified(size_expression(size))
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in named:
                named[symbol] = sympy.Symbol(next(letters))
        return readable(expr.xreplace(named))

    parts: list[str] = []
    is_general = True
    for node in gm.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        sizes = [symbols.simplified(size_expression(size)) for size in fake.shape]
        is_general &= all(size.free_symbols or size <= 1 for size in sizes)
        parts.append(f"{node.target} {str(fake.dtype).removeprefix('torch.')}[{', '.join(map(text, fake.shape))}]")
    for name, value in literals.shown.items():
        if _is_symbol(value):
            parts.append(f"{name}={text(value)}")
        elif isinstance(value, list):
            parts.append(f"{name}=[{', '.join(text(v) if isinstance(v, torch.SymInt) else str(v) for v in value)}]")
        else:
            parts.append(f"{name}={value}")
    return ", ".join(parts), is_general
