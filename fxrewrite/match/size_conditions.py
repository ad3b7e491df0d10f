"""What a size, dtype or device in a pattern asks of the graph: conditions on the value that it is read of."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from fxrewrite.errors import Reason, RuleDefinitionError
from fxrewrite.match.conditions import HAS_ITEMS, IS_NODE, IS_SIZE_CALL, Condition, Kind
from fxrewrite.match.values import FIRST, Path
from fxrewrite.pattern.pattern import Pattern
from fxrewrite.pattern.terms import Capture, LiteralValue, Op, Term
from fxrewrite.pattern.text import term_text


def size_conditions(
    path: Path, term: Op, captures: dict[str, Path], computed: Mapping[Term, Path], pattern: Pattern
) -> list[Condition]:
    """Returns the conditions on a size; afterwards `captures` has the value that it is read of."""
    conditions: list[Condition] = []
    bases: dict[Term, Path] = {}
    for source in _read_by_size(term):
        found = captures.get(source.name) if isinstance(source, Capture) else computed.get(source)
        if found is None and isinstance(source, Capture) and term.key == "aten::size":
            found, read = _read_from(path, term)
            captures[source.name] = found
            conditions += read
        if found is None:
            raise RuleDefinitionError(
                f"pattern {pattern}: {term_text(term)} is of {term_text(source)}, which the pattern has nowhere else; "
                "capture it, or the number"
            )
        bases[source] = found
    names = {source: f"{{{number}}}" for number, source in enumerate(bases, 1)}
    is_size = _is_size(_size_test(term, names, pattern))
    return [*conditions, is_size(path, term_text(term), *bases.values())]


@functools.cache
def _is_size(test: str) -> Kind:
    """A size, of which operand 0 is the text, and operands 1, 2 ... are the values that it is computed of."""
    return Kind(Reason.LITERAL, "{0} at {path}", test)


def _read_by_size(term: Term) -> Iterator[Term]:
    """Yields the values whose sizes, dtypes or devices a term is computed of, and the captured numbers."""
    if isinstance(term, Capture):
        yield term
    elif isinstance(term, Op):
        is_read = term.key.startswith("prim::") or term.key in ("aten::size", "aten::numel")
        for _, part in term.args:
            if not is_read:
                yield from _read_by_size(part)
            elif not isinstance(part, LiteralValue):
                yield part


def _read_from(path: Path, term: Op) -> tuple[Path, list[Condition]]:
    """Returns the path of the value whose size is at `path`, by the call that reads it, and what must hold of that."""
    if len(term.args) == 1:  # the whole shape: a list of such calls, the first of them of dimension 0
        call, dim = path / 0, 0
        conditions: list[Condition] = [HAS_ITEMS(path, 1)]
    else:
        of_dim = term.args[1][1]
        call, dim = path, of_dim.value if isinstance(of_dim, LiteralValue) else None
        conditions = []
    found = call / FIRST
    return found, [*conditions, IS_SIZE_CALL(call, dim), IS_NODE(found)]


def _size_test(term: Op, names: Mapping[Term, str], pattern: Pattern) -> str:
    """Returns the expression that is true of the value `{v}` if it is this size of the values with these names."""
    if term.key.startswith("prim::"):
        return f"is_attribute({{v}}, {names[term.args[0][1]]}, {term.key.removeprefix('prim::')!r})"
    if term.key == "aten::size" and len(term.args) == 1:
        return f"is_shape({{v}}, {names[term.args[0][1]]})"
    return f"is_number({{v}}, {_number(term, names, pattern)})"


def _number(term: Term, names: Mapping[Term, str], pattern: Pattern) -> str:
    """Returns the expression of a number that is computed of sizes of the values with these names."""
    if isinstance(term, LiteralValue):
        return repr(term.value)
    if isinstance(term, Capture):
        return names[term]
    assert isinstance(term, Op)
    if term.key == "aten::size":
        dim = term.args[1][1] if len(term.args) == 2 else None
        if not isinstance(dim, LiteralValue) or type(dim.value) is not int:
            raise RuleDefinitionError(f"pattern {pattern}: {term_text(term)} needs a dimension that is a number")
        return f"size_of({names[term.args[0][1]]}, {dim.value})"
    if term.key == "aten::numel":
        return f"numel_of({names[term.args[0][1]]})"
    return f"computed({term.key!r}, {', '.join(_number(part, names, pattern) for _, part in term.args)})"
