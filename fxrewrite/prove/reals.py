"""Normal forms of real expressions: sums of products, with sums over indices pulled apart as far as they go.

    sum_k (a[k] + b[k]) * c      ->  c * sum_k a[k] + c * sum_k b[k]
    sum_k sum_l a[k] * b[l]      ->  (sum_k a[k]) * (sum_l b[l])
    sum_k sum_l a[k, l]          ->  one sum over two indices, in either order

A sum is order-free: this is what "over the reals" means. Everything else that is not a sum or a product is a function
of its operands. Source: bilinear forms over index ranges as in TASO (Jia et al., SOSP 2019) and PET (Wang et al., OSDI
2021), which prove substitutions of tensor programs by such normal forms.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
from sympy import Function, Symbol

from fxrewrite.prove.indices import Expr, Indices, idiv, imod

_total = Function("total", real=True)
_NONNEGATIVE = ("abs", "Abs", "relu")
"""Functions that are never negative."""
_BOUND = re.compile(r"_k(\d+)$")
_MOST_CONDITIONS = 5
"""Most conditions of which all combinations are compared."""
_MOST_ORDERED = 4
"""Most indices of one sum whose orders are all tried to find the smallest text."""


def apply(name: str, *args: Any) -> Expr:
    """Returns a real function of its operands that nobody interprets."""
    return Function(name, real=True)(*args)


def expanded(expr: Expr) -> Expr:
    """Returns the expression as a sum of products."""
    return sympy.expand(expr, power_base=False, log=False)


def total(expr: Expr, over: Iterable[Symbol], indices: Indices) -> Expr:
    """Returns the sum of `expr` over the given indices, each from 0 to its size minus 1."""
    over = list(over)
    terms = sympy.Add.make_args(expanded(expr))
    return sympy.Add(*(_of_product(term, over, indices) for term in terms))


def _of_product(term: Expr, over: list[Symbol], indices: Indices) -> Expr:
    for index in over:
        parts = _digits(term, index, indices)
        if parts is not None:
            return total(parts[0], [*(i for i in over if i != index), *parts[1]], indices)
    factors: list[Expr] = []
    factor: Expr
    for factor in sympy.Mul.make_args(term):
        if factor.is_Pow and factor.exp.is_Integer and factor.exp > 1:
            factors += [factor.base] * int(factor.exp)
        else:
            factors.append(factor)
    outside = [factor for factor in factors if not factor.free_symbols & set(over)]
    inside: list[Expr] = []
    over = list(over)
    for factor in (factor for factor in factors if factor.free_symbols & set(over)):
        if factor.func == _total:  # its own indices join
            body, *bound = factor.args
            renamed = {symbol: indices.fresh(size) for symbol, size in bound}
            over += renamed.values()
            inside += sympy.Mul.make_args(body.xreplace(renamed))
        else:
            inside.append(factor)
    result = sympy.Mul(*outside)
    for together, factors_of in _connected(inside, over):
        result *= _one(sympy.Mul(*factors_of), together, indices)
    for index in over:
        if not any(index in factor.free_symbols for factor in inside):
            result *= indices.sizes[index]
    return result


def _digits(term: Expr, index: Symbol, indices: Indices) -> tuple[Expr, list[Symbol]] | None:
    """If the term reads quotient and remainder of an index by a divisor of its size, returns it over two indices."""
    for atom in term.atoms(Function):
        if atom.func not in (idiv, imod) or atom.args[0] != index:
            continue
        by = atom.args[1]
        outer = sympy.cancel(indices.sizes[index] / by)
        if sympy.fraction(outer)[1] != 1 or by.free_symbols & indices.sizes.keys():
            continue
        high, low = indices.fresh(outer), indices.fresh(by)
        term = term.xreplace({idiv(index, by): high, imod(index, by): low}).xreplace({index: high * by + low})
        return term, [high, low]
    return None


def _connected(factors: list[Expr], over: list[Symbol]) -> list[tuple[list[Symbol], list[Expr]]]:
    """Groups factors that share indices; sums over different groups are independent."""
    groups: list[tuple[set[Symbol], list[Expr]]] = []
    for factor in factors:
        symbols, members = factor.free_symbols & set(over), [factor]
        apart: list[tuple[set[Symbol], list[Expr]]] = []
        for known, others in groups:
            if known & symbols:
                symbols, members = symbols | known, [*others, *members]
            else:
                apart.append((known, others))
        groups = [*apart, (symbols, members)]
    return [([index for index in over if index in symbols], members) for symbols, members in groups]


def _one(body: Expr, over: list[Symbol], indices: Indices) -> Expr:
    """Returns one sum; its indices are named by how deep sums are nested, in the order that gives the smallest text."""
    single = {index: sympy.Integer(0) for index in over if indices.sizes[index] == 1}
    if single:
        return total(body.xreplace(single), [index for index in over if index not in single], indices)
    used = (int(match[1]) for symbol in body.free_symbols if (match := _BOUND.match(symbol.name)))
    first = 1 + max(used, default=0)
    names = [Symbol(f"_k{first + n}", integer=True, nonnegative=True) for n in range(len(over))]
    orders = itertools.permutations(over) if len(over) <= _MOST_ORDERED else [tuple(over)]
    forms: list[tuple[str, Expr]] = []
    for order in orders:
        renamed = dict(zip(order, names, strict=True))
        bound = [sympy.Tuple(renamed[index], indices.sizes[index].xreplace(renamed)) for index in order]
        form = _total(body.xreplace(renamed), *bound)
        forms.append((sympy.srepr(form), form))
    return min(forms, key=lambda found: found[0])[1]


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    """Returns `a` where a condition holds, else `b`."""
    return a if a == b else apply("where", condition, expanded(a), expanded(b))


def branches(a: Expr, b: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Yields both expressions with the conditions of `where` decided, in every way; if there are many, undecided."""
    found = {
        atom.args[0]
        for expr in (a, b)
        for atom in expr.atoms(Function)
        if str(atom.func) == "where" and not any(s.name.startswith("_") for s in atom.args[0].free_symbols)
    }
    conditions = sorted(found, key=sympy.srepr) if len(found) <= _MOST_CONDITIONS else []
    for chosen in itertools.product((True, False), repeat=len(conditions)):
        decided = dict(zip(conditions, chosen, strict=True))

        def taken(condition: Expr, yes: Expr, no: Expr, decided: Any = decided) -> Expr:
            known = decided.get(condition)
            return apply("where", condition, yes, no) if known is None else yes if known else no

        is_where = Function("where", real=True)
        yield tuple(expr.replace(is_where, taken) if conditions else expr for expr in (a, b))


def is_positive(expr: Expr) -> bool:
    """Whether the expression is above 0 wherever it is defined, by its form alone."""
    if expr.is_number or expr.is_Symbol:
        return bool(expr.is_positive)
    if isinstance(expr, sympy.exp):
        return True
    if expr.func == _total:
        return is_positive(expr.args[0]) and all(size.is_positive for _, size in expr.args[1:])
    if expr.is_Add:
        return all(map(is_nonnegative, expr.args)) and any(map(is_positive, expr.args))
    if expr.is_Mul:
        return all(map(is_positive, expr.args))
    return expr.is_Pow and is_positive(expr.base) and bool(expr.exp.is_real)


def is_nonnegative(expr: Expr) -> bool:
    """Whether the expression is 0 or more wherever it is defined, by its form alone."""
    if expr.is_number or expr.is_Symbol:
        return bool(expr.is_nonnegative)
    if expr.func == _total:
        return is_nonnegative(expr.args[0])
    if expr.is_Add or expr.is_Mul:
        return all(map(is_nonnegative, expr.args))
    if expr.is_Pow:
        return bool(expr.exp.is_even) or (is_nonnegative(expr.base) and bool(expr.exp.is_real))
    return is_positive(expr) or getattr(expr.func, "__name__", "") in _NONNEGATIVE


def difference(a: Expr, b: Expr) -> Expr:
    """Returns 0 if two expressions are equal as rational functions of their atoms, else what is left of a - b."""
    left = expanded(a - b)
    if left == 0 or not left.has(sympy.Pow):
        return left
    numerator = sympy.numer(sympy.together(left))
    return sympy.Integer(0) if expanded(numerator) == 0 else left
