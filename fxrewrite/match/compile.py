"""Compiles a tree of conditions to a Python function: an `if` for each, values in local variables, tables at branches.

The function takes a root, and appends `(leaf, values by path)` for every leaf all of whose conditions hold. Conditions
give their own code; lookups among several of them are written here. What follows a lookup is compiled when a graph
first has that outcome: most graphs have few of the operators that a set of rules knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import fx

from fxrewrite.match.arguments import ArgumentReader
from fxrewrite.match.conditions import ARGUMENTS, IS_LITERAL, IS_OPERATOR, NAMES, Condition, Kind
from fxrewrite.match.values import Path, part
from fxrewrite.pattern.terms import freeze

Leaf: TypeAlias = tuple[int, int]
TreeFunction: TypeAlias = Callable[[fx.Node, list[tuple[Leaf, dict[Path, Any]]]], None]

_MAX_DEPTH = 60
"""Indentation at which code continues in another function. Python's parser allows 100 levels; the rest is margin."""


class Tree:
    """Conditions with common beginnings: (kind, path) -> operands -> what follows."""

    __slots__ = ("branches", "leaves")

    def __init__(self) -> None:
        self.branches: dict[tuple[Kind, Path], dict[tuple[Any, ...], tuple[Condition, Tree]]] = {}
        self.leaves: list[Leaf] = []

    def insert(self, conditions: Sequence[Condition], leaf: Leaf) -> None:
        """Adds a list of conditions that ends at a leaf; a common beginning with earlier lists is shared."""
        tree = self
        for condition in conditions:
            targets = tree.branches.setdefault((condition.kind, condition.path), {})
            tree = targets.setdefault(condition.operands, (condition, Tree()))[1]
        tree.leaves.append(leaf)


def compile_tree(tree: Tree, root: Path) -> TreeFunction:
    """Returns a function that finds the leaves below a root whose operator already chose this tree."""
    return _Writer().write(tree, {root: "root"})


class _Outcome:
    """One outcome of a lookup: the tree that follows, its leaves, and once the outcome occurred, the function of both.

    Outcomes of one lookup that differ in their leaves alone have one function, as have many rules that differ in one
    literal: to write functions takes most of the time that a set of rules needs.
    """

    __slots__ = ("_known", "_tree", "_written", "leaves", "run")

    def __init__(self, tree: Tree, known: Sequence[Path], written: dict[Any, Callable[..., None]]) -> None:
        self.leaves: list[Leaf] = []
        self.run: Callable[..., None] | None = None
        self._tree, self._known, self._written = tree, known, written

    def write(self) -> Callable[..., None]:
        """Returns the function, which takes the leaves, the known values and where to append what it finds."""
        leaves: list[Leaf] = []
        shape = _shape(self._tree, leaves)
        if shape not in self._written:
            known = {path: f"k{place}" for place, path in enumerate(self._known)}
            self._written[shape] = _Writer(leaves).write(self._tree, known)
        self.leaves = leaves
        self.run = self._written[shape]
        return self.run


def follow(table: Mapping[Any, _Outcome], outcomes: Iterable[Any], *arguments: Any) -> None:
    """Calls the functions in the table that belong to the outcomes, each with its leaves."""
    for outcome in outcomes:
        then = table.get(outcome)
        if then is not None:
            run = then.run or then.write()
            run(then.leaves, *arguments)


def _shape(tree: Tree, leaves: list[Leaf]) -> tuple[Any, ...]:
    """Returns what a tree is but for its leaves, which are added to `leaves` in the order of the tree.

    The leaves below a table are part of it, since the table that is written for them has them.
    """
    leaves += tree.leaves
    found: list[Any] = [len(tree.leaves)]
    for (kind, path), targets in tree.branches.items():
        is_table = len(targets) > 1 and kind in (IS_LITERAL, IS_OPERATOR)
        for operands, (_, then) in targets.items():
            start = len(leaves)
            found.append((kind, path, operands, _shape(then, leaves)))
            if is_table:
                found += leaves[start:]
    return tuple(found)


def _is_plainly(frozen: Any, value: str) -> str:
    """Returns code that is true only for this literal; most literals are numbers, compared without being frozen."""
    kind, literal = frozen
    if literal is None:
        return f"{value} is None"
    if kind is float:
        number = float(literal)
        return f"type({value}) is float and {value} == {literal}" if math.isfinite(number) and number else "False"
    return f"type({value}) is {kind.__name__} and {value} == {literal!r}" if kind in (int, bool, str) else "False"


class _Writer:
    """Writes functions as text; constants and helpers are their globals, and leaves that are stated a parameter."""

    def __init__(self, leaves: Sequence[Leaf] = ()) -> None:
        self._globals: dict[str, Any] = {**NAMES, "follow": follow, "part": part}
        self._constants: dict[int, str] = {}
        self._lines: list[str] = []
        self._leaves = {leaf: f"leaves[{place}]" for place, leaf in enumerate(leaves)}
        self._count = 0

    def write(self, tree: Tree, known: dict[Path, str]) -> Callable[..., None]:
        """Returns the function of a tree, whose parameters are the known values."""
        return self._globals[self._function(tree, known)]

    def _function(self, tree: Tree, known: dict[Path, str]) -> str:
        """Writes a function whose parameters are the known values, and returns its name."""
        outer, self._lines = self._lines, []
        name = self._new("f")
        self._line(0, f"def {name}({self._values(known)}):")
        self._tree(tree, known, 1)
        exec("\n".join(self._lines), self._globals)
        self._lines = outer
        return name

    def _values(self, known: dict[Path, str]) -> str:
        """Returns the parameters of a function, and its arguments where it is called."""
        return ", ".join([*(["leaves"] if self._leaves else []), *known.values(), "found"])

    def _new(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def _constant(self, value: Any) -> str:
        """Returns the name of a global that is this object; the function keeps the object alive."""
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = self._new("c")
            self._globals[name] = value
        return name

    def _line(self, depth: int, text: str) -> None:
        self._lines.append(" " * depth + text)

    def _tree(self, tree: Tree, known: dict[Path, str], depth: int) -> None:
        if depth > _MAX_DEPTH:
            self._line(depth, f"{self._function(tree, known)}({self._values(known)})")
            return
        for leaf in tree.leaves:
            values = ", ".join(f"{self._constant(path)}: {name}" for path, name in known.items())
            self._line(depth, f"found.append(({self._leaves.get(leaf, leaf)}, {{{values}}}))")
        for (kind, path), targets in tree.branches.items():
            self._branch(kind, path, list(targets.values()), dict(known), depth)

    def _value(self, path: Path, known: dict[Path, str], depth: int) -> str:
        """Returns the variable that holds the value at a path, and assigns it here if no earlier condition read it."""
        found = known.get(path)
        if found is None:
            assert path.parent is not None
            above = self._value(path.parent, known, depth)
            found = known[path] = self._new("v")
            self._line(depth, f"{found} = part({above}, {path.step!r})")
        return found

    def _branch(
        self,
        kind: Kind,
        path: Path,
        targets: list[tuple[Condition, Tree]],
        known: dict[Path, str],
        depth: int,
    ) -> None:
        """Writes all conditions of one kind at one path."""
        value = self._value(path, known, depth)
        # Several operators at one place: look the operator up instead of testing them in turn.
        if kind is IS_OPERATOR and len(targets) > 1:
            self._line(depth, f"if isinstance({value}, Node):")
            self._follow(f"(key({value}),)", {one.operands[0]: tree for one, tree in targets}, known, depth + 1)
            return
        # Mostly its arguments are asked for next, and who reads these knows the operator by the spelling of the call.
        if kind is IS_OPERATOR and targets[0][1].branches.keys() == {(ARGUMENTS, path)} and not targets[0][1].leaves:
            operator, tree = targets[0][0].operands[0], targets[0][1]
            for condition, inner in tree.branches[ARGUMENTS, path].values():
                inside = dict(known)
                self._arguments(condition, operator, value, inside, depth)
                self._tree(inner, inside, depth + 1)
            return
        # A literal can have several outcomes (a dimension counted from either end), so it is looked up too.
        if kind is IS_LITERAL:
            above = self._value(path.parent, known, depth) if path.parent is not None else "None"
            outcomes = f"outcomes({value}, {path.step!r}, {above})"
            literals = {freeze(condition.operands[0].value): tree for condition, tree in targets}
            if len(targets) > 1:
                self._follow(outcomes, literals, known, depth)
                return
            ((literal, tree),) = literals.items()
            self._line(depth, f"if {_is_plainly(literal, value)} or {self._constant(literal)} in {outcomes}:")
            self._tree(tree, known, depth + 1)
            return
        # Other conditions are not exclusive, so each is an `if` of its own with its own copy of the known values.
        for condition, tree in targets:
            inside = dict(known)
            if kind is ARGUMENTS:
                self._arguments(condition, "", value, inside, depth)
            else:
                code = condition.code(value, lambda other, inside=inside: self._value(other, inside, depth))
                self._line(depth, f"if {code}:")
            self._tree(tree, inside, depth + 1)

    def _follow(self, outcomes: str, trees: Mapping[Any, Tree], known: dict[Path, str], depth: int) -> None:
        """Writes a call of the function that a table gives for the actual outcome."""
        written: dict[Any, Callable[..., None]] = {}
        table = {outcome: _Outcome(tree, tuple(known), written) for outcome, tree in trees.items()}
        self._line(depth, f"follow({self._constant(table)}, {outcomes}, {', '.join(known.values())}, found)")

    def _arguments(self, condition: Condition, operator: str, value: str, known: dict[Path, str], depth: int) -> None:
        """Reads all named arguments into variables at once, of a call of this operator, or of any if it is empty.

        The block that follows has them.
        """
        read, reader = self._new("r"), ArgumentReader(condition.operands, operator)
        self._line(depth, f"{read} = {self._constant(reader.read)}({value})")
        self._line(depth, f"if {read} is not None:")
        for name in condition.operands:
            known[condition.path / name] = self._new("v")
        if condition.operands:
            names = "".join(f"{known[condition.path / name]}, " for name in condition.operands)
            self._line(depth + 1, f"{names}= {read}")
