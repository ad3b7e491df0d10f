"""Proves a rule: two sides are equal because their normal forms are.

Both sides of every reading of the pattern are built with symbols for sizes, and each entry of a result becomes an
expression over entries of the inputs. Equal expressions without any arithmetic are the same floating-point operations,
which is equality of bits; equal normal forms of real expressions are equality over the reals, for finite values.
Nothing else is said: what is not proved may still be true.

Sources: Alive2 (Lopes et al., PLDI 2021) for rules that are proved with their side conditions, for one width at a time;
TASO (Jia et al., SOSP 2019) and PET (Wang et al., OSDI 2021) for tensor programs as expressions over index ranges.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import sympy
from sympy import Function
from torch import fx
from torch.utils._pytree import tree_leaves

from fxrewrite import ops
from fxrewrite.errors import named_line
from fxrewrite.match.program import Program
from fxrewrite.pattern.terms import Op, subterms
from fxrewrite.prove.arithmetic import Need, SymbolicArithmetic
from fxrewrite.prove.cases import Case, CaseSearch, NoCaseError, readings
from fxrewrite.prove.indices import Expr, Indices, is_same
from fxrewrite.prove.interpret import interpret
from fxrewrite.prove.reals import branches, difference, expanded
from fxrewrite.prove.text import brief, form_of_case, form_of_condition, readable
from fxrewrite.prove.value import At, SymbolicTensor, UndefinedError, UnknownError
from fxrewrite.verify.rewrite import quiet
from fxrewrite.verify.sample import TORCH_ERRORS

if TYPE_CHECKING:
    from fxrewrite.rule import Rule

_READINGS = 48
"""Most readings of a pattern; each has a case or more."""
_CASES = 4
"""Cases of a pattern with one reading; of ranks, broadcasts and dtypes as they are drawn."""
_SHOWN = 200
"""Longest expression that is printed (characters)."""

Strength = Literal["bitwise", "over the reals", ""]


@dataclass(frozen=True, slots=True)
class Proof:
    """What is proved of a rule.

    Attributes:
        rule: id of the rule.
        strength: "bitwise" (both sides are the same floating-point operations on the same entries), "over the reals"
            (equal for finite values, in exact arithmetic), or "" (not proved).
        cases: the inputs of each case that was proved: letters are any sizes of 2 or more; a number is that size alone;
            what is written as `name=value` was tried with this value alone.
        conditions: what sizes and numbers must satisfy, beyond the pattern: other ones were not looked at.
        assumptions: what must hold of values, such as divisors that are not zero; and how numbers were read.
        why_not: where the two sides differ, or what is not known of an operator; empty if the rule is proved.
        readings: how many readings the pattern has.
        dtypes: those of inputs in the cases; others were not looked at.
        ranks: those of inputs in the cases; others were not looked at.
        literals: values of arguments that the pattern captures or ignores, as `name=value or value`, and inputs that
            are empty in all cases; others were not looked at.
    """

    rule: str
    strength: Strength = ""
    cases: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    why_not: str = ""
    readings: int = 0
    dtypes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    literals: tuple[str, ...] = ()

    @property
    def is_proved(self) -> bool:
        """Whether both sides are equal in all cases."""
        return bool(self.strength)

    @property
    def summary(self) -> str:
        """One line, without the rule; assumptions of one form are told once."""
        if not self.is_proved:
            return f"not proved: {self.why_not}"
        where = f", where {'; '.join(self.conditions)}" if self.conditions else ""
        assumed = f", assuming {'; '.join(brief(self.assumptions, form_of_condition))}" if self.assumptions else ""
        looked_at = f"for {_either(self.dtypes)} of rank {_either(self.ranks)}"
        literals = f", with {', '.join(self.literals)}" if self.literals else ""
        return f"proved for sizes of 2 or more, {self.strength}, {looked_at}{literals}{where}{assumed}"

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self.summary}"]
        if self.is_proved:
            lines.append(f"  {self.readings} readings of the pattern; a letter is any size of 2 or more:")
            lines += [f"    {case}" for case in brief(self.cases, form_of_case)]
        return "\n".join(lines)


def prove(rule: Rule) -> Proof:
    """Returns whether a rule is proved, for values; what gradients are is tested by `Rule.verify`.

    Raises:
        RuleDefinitionError: the rule is wrong as written, on any graph.
    """
    terms = (term for output in rule.pattern.outputs for term in subterms(output))
    virtual = [term.key for term in terms if isinstance(term, Op) and ops.is_virtual(term.key)]
    if virtual:
        return Proof(rule.id, why_not=f"on one device {virtual[0].rpartition('.')[2]} is only a placeholder")
    with quiet():
        return _proof(rule)


def _proof(rule: Rule) -> Proof:
    try:
        found = readings(rule.pattern, _READINGS)
    except NoCaseError as error:
        return Proof(rule.id, why_not=str(error))
    program: Program[Rule] = Program([(rule, rule.pattern)])
    so_far = _Proved(rule.id, len(found))
    for number, reading in enumerate(found):
        try:
            most = max(1, _CASES // len(found))
            cases = CaseSearch(rule, program, reading, number, most).found()
        except NoCaseError as error:
            if 0 in reading.lists.values() and len(found) > 1:
                continue  # few operators take an empty list, and the proof says for how many items it holds
            return Proof(rule.id, why_not=f"no graph to prove it on: {error}")
        why_not = so_far.add(cases)
        if why_not:
            return Proof(rule.id, why_not=why_not, readings=len(found))
        for name, length in reading.lists.items():
            so_far.lengths.setdefault(name, set()).add(length)
    return so_far.proof()


class _Proved:
    """What is proved of a rule so far, reading by reading."""

    def __init__(self, rule: str, num_readings: int) -> None:
        self._rule, self._num_readings = rule, num_readings
        self._cases: list[Case] = []
        self._conditions: dict[str, None] = {}
        self._assumptions: dict[str, None] = {}
        self._is_bitwise = self._is_general = True
        self.lengths: dict[str, set[int]] = {}
        """Of each list that is captured, how many items it had."""

    def add(self, cases: Sequence[Case]) -> str:
        """Adds the cases of a reading in which both sides are equal; returns why they are not in one, or in none."""
        undefined, kept = "", list[Case]()
        for case in cases:
            outcome, *_ = _compared(case, is_real=False)  # without arithmetic: the same floating-point operations
            if outcome:
                try:
                    outcome, assumed = _over_reals(case)
                except UndefinedError as error:  # equal of no input at all says nothing
                    undefined = f"the original needs {error}, with {case.shown}"
                    continue
                self._is_bitwise = False
                self._assumptions |= dict.fromkeys(assumed)
            if outcome:
                return f"{outcome}, with {case.shown}"
            kept.append(case)
            self._conditions |= dict.fromkeys(case.conditions)
        if not kept:
            return f"no graph to prove it on: {undefined}"
        self._is_general &= any(case.is_open for case in kept)  # now, since decompositions ask for more
        self._cases += kept
        return ""

    def proof(self) -> Proof:
        """The proof, where every reading was added."""
        shown = tuple(dict.fromkeys(case.shown for case in self._cases))
        if not self._is_general:
            why_not = f"equal for some shapes alone: {'; '.join(shown)}"
            return Proof(self._rule, why_not=why_not, readings=self._num_readings)
        equal = _equal_literals(self._cases)
        if equal:
            why_not = f"{equal} are equal in every case: {'; '.join(shown)}"
            return Proof(self._rule, why_not=why_not, readings=self._num_readings)
        return Proof(
            self._rule,
            strength="bitwise" if self._is_bitwise else "over the reals",
            cases=shown,
            conditions=tuple(self._conditions),
            assumptions=tuple(self._assumptions),
            readings=self._num_readings,
            dtypes=tuple(sorted({ops.dtype_name(fake.dtype) for case in self._cases for fake in case.inputs})),
            ranks=tuple(sorted({fake.ndim for case in self._cases for fake in case.inputs})),
            literals=(
                *(f"{n}={_either(v)}" for n, v in _literals(self._cases).items()),
                *(f"{_either(sorted(counts))} items of {name}" for name, counts in sorted(self.lengths.items())),
                *(f"{n} empty" for n in sorted(set.intersection(*(case.empty for case in self._cases)))),
            ),
        )


def _literals(proved: Sequence[Case]) -> dict[str, list[str]]:
    """The values of each literal that is not a symbol."""
    values: dict[str, dict[str, None]] = {}
    for case in proved:
        for name, value in case.literals.items():
            values.setdefault(name, {})[str(value)] = None
    return {name: list(found) for name, found in values.items()}


def _equal_literals(proved: Sequence[Case]) -> str:
    """Two integers that the pattern captures, and that no case tells apart; empty if there are none.

    A replacement that takes one for the other would be proved.
    """
    numbers = [{n: v for n, v in case.literals.items() if type(v) is int} for case in proved]
    for one, other in itertools.combinations(sorted({name for found in numbers for name in found}), 2):
        both = [found[one] == found[other] for found in numbers if one in found and other in found]
        if both and all(both):
            return f"{one} and {other}"
    return ""


def _either(values: Sequence[Any]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def _over_reals(case: Case) -> tuple[str, list[str]]:
    """Returns why the two sides are not equal over the reals, or else what is assumed.

    Raises:
        UndefinedError: the original is a real number for no input.
    """
    outcome, before, after = _compared(case, is_real=True)
    if outcome:
        return outcome, []
    one, other = (_strongest(side.needs) for side in (before, after))
    assumed = _strongest(need for need in {**one, **other} if (need in one) != (need in other))
    told = [need.text(case.symbols.names) for need in assumed]
    return "", [*told, *before.roots, *(root for root in after.roots if root not in before.roots)]


def _strongest(needs: Iterable[Need]) -> dict[Need, None]:
    """The conditions without those that follow from another."""
    found = dict.fromkeys(needs)
    weaker = {follows for need in found for follows in need.weaker}
    return {need: None for need in found if need not in weaker}


def _compared(case: Case, *, is_real: bool) -> tuple[str, SymbolicArithmetic, SymbolicArithmetic]:
    """Returns where the two sides differ, which is empty if they do not, and what was assumed of each."""
    indices = Indices()
    before, after = (SymbolicArithmetic(is_real, indices, case.symbols.simplified) for _ in range(2))
    try:
        was = tree_leaves(interpret(case.before.graph.nodes, _inputs(before, case.before), before))
        is_now = tree_leaves(interpret(case.after.graph.nodes, _inputs(after, case.after), after))
        outcome = _difference_of_outputs(was, is_now, indices, is_real=is_real)
    except UndefinedError as error:
        if before.undefined:
            raise
        outcome = f"the replacement needs {error}"
    except UnknownError as error:
        outcome = str(error)
    except (NotImplementedError, *TORCH_ERRORS) as error:
        outcome = named_line(error)
    return outcome, before, after


def _inputs(arithmetic: SymbolicArithmetic, gm: fx.GraphModule) -> list[SymbolicTensor]:
    def entry(name: str, shape: Sequence[Expr]) -> At:
        ones = [size == 1 for size in shape]
        function = Function(name, real=True)
        return lambda index: function(*(0 if one else sympy.expand(i) for one, i in zip(ones, index, strict=True)))

    found: list[SymbolicTensor] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        fake, name = node.meta["val"], str(node.target)
        shape = arithmetic.shape(fake)
        found.append(SymbolicTensor(shape, fake.dtype, entry(name, shape), name))
    return found


def _difference_of_outputs(was: Sequence[Any], is_now: Sequence[Any], indices: Indices, *, is_real: bool) -> str:
    if len(was) != len(is_now):
        return f"{len(was)} outputs became {len(is_now)}"
    for number, (old, new) in enumerate(zip(was, is_now, strict=True)):
        found = _difference(old, new, indices, is_real=is_real)
        if found:
            return f"output {number}: {found}" if len(was) > 1 else found
    return ""


def _difference(old: Any, new: Any, indices: Indices, *, is_real: bool) -> str:
    if not isinstance(old, SymbolicTensor) or not isinstance(new, SymbolicTensor):
        return "" if type(old) is type(new) and bool(old is new) else f"{old} became {new}"
    if len(old.shape) != len(new.shape) or not all(map(is_same, old.shape, new.shape)):
        return f"shape {list(old.shape)} became {list(new.shape)}"
    if old.dtype != new.dtype:
        return f"{old.dtype} became {new.dtype}"
    if old.name == new.name:
        return ""
    index = [indices.fresh(size) if size != 1 else sympy.Integer(0) for size in old.shape]
    a, b = expanded(old.at(index)), expanded(new.at(index))
    for one, other in branches(a, b):
        if one != other and not (is_real and difference(expanded(one), expanded(other)) == 0):
            return f"{_short(one)} became {_short(other)}"
    return ""


def _short(expr: Any) -> str:
    text = readable(expr)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
