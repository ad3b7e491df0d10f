"""The operators between a sort of token-expert pairs by expert and its inverse become one node.

    order = sort(ids)[1]; rows = x[order // k]; ...; rows[inverse(order)]   ->   slotwise(body, [ids, x, ...])

"Slot" in names means a token-expert pair. Experts run on pairs sorted by expert: one matrix product for each run of
rows with the same expert, then all rows go back to their places. One by one, a sort, a histogram and a cumulative sum
mix all tokens. Together they do not: each row is a function of its own pair, wherever it is, so each rank may sort the
pairs of its own tokens. The step proves that operator by operator, from the inverse upwards to the sort:

- an index that a layout rule calls independent may be permuted as well as sharded, so operators whose rule keeps the
  rows apart compute each row from its own inputs;
- a gather by the order reads pairs, one by the order divided by k reads tokens, one by the sorted ids reads a table;
- a grouped product gives each row the matrix of its expert, if its groups are counted from the same ids.

Other users of the sorted rows keep them. Does not match a descending sort, or one of more than one dimension.
Refuses, and leaves unchanged: "aten::cumsum runs over the sorted pairs"; "%bias is read in the order of the pairs"; "a
grouped product whose groups are not those of the sort"; random numbers; writes, and changes of the autograd mode.
Shapes: ids [n * k], x [n, d], result [n * k, ...].
Numerics: exact. Source: Gale et al., MegaBlocks, arXiv 2211.15841, section 5; Hugging Face transformers,
integrations/moe.py (grouped_mm_experts_forward).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import Edit, Match, Pattern, RefusedError, Report, cap, either, loose, maybe, op, refuse, shared
from fxrewrite.match import Program
from fxrewrite.ops import bind, is_pure, is_random, key, mutates
from fxrewrite.spmd import Call, LayoutRules, Terms, is_same_size
from rules.experts.slots import Read, SlotBody, positions, slotwise


class Role(Enum):
    """What a value between a sort and its inverse is."""

    ORDER = "the order of the pairs"
    KEYS = "the sorted experts"
    TOKENS = "the tokens of the rows"
    ENDS = "where the rows of each expert end"
    ROWS = "an entry for each row"


_order: Any = cap("order")
_divisor: Any = cap("per_token", "literal")
_TOKENS = (
    op("floor_divide", _order, _divisor),
    op("div", _order, _divisor, rounding_mode="floor"),
    op("div", _order, _divisor, rounding_mode="trunc"),
)
_counts: Any = op("histc", maybe(shared(op("to", cap("ids"), ...))), cap("bins", "literal"), 0, cap("high", "literal"))
_ENDS: Any = op("cumsum", shared(_counts), 0, dtype=...)
_INVERSE: Any = either(
    shared(op("index_put", shared(loose(op("empty_like", _order))), [_order], shared(loose(op("arange", ...))))),
    shared(op("argsort", _order)),
)
_EXIT = Pattern((op("index", cap("rows"), [_INVERSE]),))

_INSIDE: Program[Role] = Program(
    [*((Role.TOKENS, Pattern((tokens,))) for tokens in _TOKENS), (Role.ENDS, Pattern((_ENDS,)))]
)
_EXITS: Program[None] = Program([(None, _EXIT)])
GROUPED_PRODUCTS = {
    "aten::_grouped_mm": ("self", "mat2", "offs"),
    "transformers::grouped_mm_fallback": ("input", "weight", "offs"),
}
"""Operators that multiply each group of rows by its own matrix: argument names of rows, matrices and ends of groups."""
_COUNTABLE = (torch.float32, torch.float64, torch.int32, torch.int64)
_READ_BY: dict[Role, Read] = {Role.ORDER: "slots", Role.TOKENS: "tokens"}


class FuseSlots:
    """A step that makes one node of the operators between a sort of token-expert pairs and its inverse."""

    name = "fuse_slots"

    def __init__(self, rules: LayoutRules) -> None:
        self.rules = rules

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Fuses the regions that it can prove independent, reports the others, and returns the number of fused ones."""
        nodes = edit.nodes()
        found = [match for node, name in _EXITS.roots(nodes) for _, match in _EXITS.find(node, name)]
        writers = [node for node in nodes if found and mutates(node)]
        return sum(self._fuse(edit, match, writers, report) for match in found if _is_order(match["order"]))

    def _fuse(self, edit: Edit, match: Match, writers: Iterable[fx.Node], report: Report) -> bool:
        region, exit_ = _Region(self.rules, match["order"]), match.root
        try:
            args = region.body(match), list(region.reads)
            region.check_nothing_happens(writers, exit_)
        except RefusedError as error:
            report.rule(self.name).refuse(error.filled(rule=self.name).refusal)
            return False
        made = edit.call(slotwise, args, before=exit_, like=exit_, rule=self.name, val=exit_.meta["val"])
        edit.replace_uses(exit_, made)
        _drop(edit, exit_)
        return True

    def text(self) -> str:
        return f"the operators between a sort and {_EXIT} -> slotwise(body, operands)"


class _Region:
    """The nodes that depend on the order of one sort, collected upwards from its inverse."""

    def __init__(self, rules: LayoutRules, order: fx.Node) -> None:
        self.reads: dict[fx.Node, Read] = {}
        """Operands from outside the region, and how it reads them."""
        self._rules = rules
        self._order = order
        self._sort = _sort_of(order)
        self._ids = self._sort.all_input_nodes[0]
        self._moved: dict[fx.Node, bool] = {self._sort: True}
        self._inside: set[fx.Node] = {self._sort, order}
        self._roles: dict[fx.Node, Role] = {order: Role.ORDER}
        self._per_token = 1
        self._read(self._ids, "slots", self._sort)

    def body(self, match: Match) -> SlotBody:
        """Returns the region that ends at the match, as a function of `reads`."""
        if self._role(match["rows"]) not in (Role.ROWS, Role.KEYS):
            _refuse(f"the inverse is applied to {self._role(match['rows']).value}", match.root)
        self._inside.update(match.nodes)
        graph = fx.Graph()
        made = {node: graph.placeholder(node.name) for node in self.reads}
        for node in sorted(self._inside):
            target, args, kwargs = self._for_any_number_of_slots(node)
            _check_is_known(node, (args, kwargs), made)
            made[node] = graph.call_function(target, *map_arg((args, kwargs), made.__getitem__))
            made[node].meta = dict(node.meta)
        graph.output(made[match.root])
        return SlotBody(fx.GraphModule({}, graph), tuple(self.reads.values()), self._per_token)

    def check_nothing_happens(self, writers: Iterable[fx.Node], exit_: fx.Node) -> None:
        """Refuses if a write or a change of the autograd mode is inside, because the region will run where it ends."""
        first = min(self._inside)
        for node in writers:
            if first < node < exit_:
                _refuse(f"%{node.name} writes, or changes a mode of torch, between the sort and its inverse", node)

    def _for_any_number_of_slots(self, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Returns the call of a node in a form that does not state the number of pairs."""
        args = bind(node)
        if key(node) == "aten::arange":
            if (args.get("start", 0), args.get("step", 1)) != (0, 1):
                _refuse("the inverse does not start from the positions 0, 1, 2 ...", node)
            return positions, (self._order,), {}
        rule = self._rules.get(key(node))
        if rule is None or not rule.shape_arg or args.get("dim", 0) != 0:
            return node.target, node.args, dict(node.kwargs)
        rest = node.meta["val"].shape[1 : len(args[rule.shape_arg])]
        if not all(isinstance(size, int) for size in rest):
            _refuse("the size of a row is symbolic", node)
        return node.target, (node.args[0], [-1, *rest]), {}

    # The role of each value.

    def _is_moved(self, node: fx.Node) -> bool:
        """Whether a value depends on the sort; values before the sort cannot."""
        if node not in self._moved:
            self._moved[node] = self._sort < node and any(map(self._is_moved, node.all_input_nodes))
        return self._moved[node]

    def _role(self, node: fx.Node) -> Role:
        if node not in self._roles:
            self._roles[node] = self._found_role(node)
            self._inside.add(node)
        return self._roles[node]

    def _found_role(self, node: fx.Node) -> Role:
        if node.target is operator.getitem:
            source: Any = node.args[0]
            return Role.KEYS if source is self._sort else self._role(source)
        for role, match in _INSIDE.find(node, key(node)):
            if role is Role.ENDS:
                return self._ends(match)
            if match["order"] is self._order:
                return self._tokens(match)
        if key(node) == "aten::index":
            return self._lookup(node)
        if key(node) in GROUPED_PRODUCTS:
            return self._product(node)
        return self._rows(node)

    def _tokens(self, match: Match) -> Role:
        per_token = match["per_token"]
        if not isinstance(per_token, int) or self._per_token not in (1, per_token):
            _refuse(f"the order is divided by {per_token} and by {self._per_token}", match.root)
        self._per_token = per_token
        return Role.TOKENS

    def _ends(self, match: Match) -> Role:
        """The number of pairs per expert does not depend on the order in which they are counted."""
        counted, last = match["ids"], match["bins"] - 1
        if any(node.meta["val"].dtype not in _COUNTABLE for node in match.nodes):
            _refuse("experts are counted in a dtype that cannot represent the counts", match.root)
        if match["high"] not in (last, last + 1):
            _refuse(f"experts 0 to {match['high']} are counted in {last + 1} groups", match.root)
        if counted is not self._ids and (not self._is_moved(counted) or self._role(counted) is not Role.KEYS):
            _refuse("the counted values are not the experts of the pairs", match.root)
        self._inside.update(match.nodes)
        return Role.ENDS

    def _lookup(self, node: fx.Node) -> Role:
        args = bind(node)
        table, indices = args["self"], args["indices"]
        if self._is_moved(table) or len(indices) != 1 or indices[0].meta["val"].dtype == torch.bool:
            _refuse("the sorted rows are indexed again", node)
        role = self._role(indices[0])
        if role is Role.ENDS:
            _refuse(f"{role.value} is used as an index", node)
        self._read(table, _READ_BY.get(role, "whole"), node)
        return Role.ROWS

    def _product(self, node: fx.Node) -> Role:
        args = bind(node)
        rows, matrices, ends = (args[name] for name in GROUPED_PRODUCTS[key(node)])
        others = [n for n in node.all_input_nodes if n not in (rows, matrices, ends)]
        if others or self._is_moved(matrices) or self._role(rows) is not Role.ROWS:
            _refuse("a grouped product has other operands than rows, matrices and ends", node)
        if not isinstance(ends, fx.Node) or not self._is_ends(ends):
            _refuse("a grouped product whose groups are not those of the sort", node)
        self._read(matrices, "whole", node)
        return Role.ROWS

    def _is_ends(self, node: fx.Node) -> bool:
        is_counted = any(role is Role.ENDS for role, _ in _INSIDE.find(node, key(node)))
        return is_counted and self._role(node) is Role.ENDS

    def _rows(self, node: fx.Node) -> Role:
        """Accepts an operator whose layout rule keeps the rows apart; refuses any other."""
        if node.op != "call_function" or is_random(node) or not is_pure(node):
            _refuse(f"{key(node)} draws random numbers, or has effects", node)
        call = Call.of(node)
        rule = self._rules.get(call.key)
        indices = rule.map(call) if rule is not None else None
        moved = [operand for operand in node.all_input_nodes if self._is_moved(operand)]
        if indices is None or not set(moved) <= set(call.operands):
            _refuse(f"{call.key} has no layout rule", node)
        of_operands = list(zip(call.operands, indices.operands, strict=True))
        # The index of the first dimension must be the rows in every moved operand and in every result, and nowhere
        # else.
        row = next((terms[0] for operand, terms in of_operands if operand in moved and terms), ())
        if len(row) != 1 or row[0] in indices.whole or not all(_is_by_row(terms, row) for terms in indices.results):
            _refuse(f"{call.key} runs over the sorted pairs", node)
        for operand, terms in of_operands:
            if operand in moved:
                if not _is_by_row(terms, row):
                    _refuse(f"{call.key} runs over the sorted pairs", node)
                if (role := self._role(operand)) not in (Role.ROWS, Role.KEYS):
                    _refuse(f"{call.key} reads {role.value}", node)
            elif indices.has(terms, row[0]):
                _refuse(f"%{operand.name} is read in the order of the pairs", node)
            else:
                self._read(operand, "whole", node)
        return Role.ROWS

    def _read(self, node: fx.Node, how: Read, at: fx.Node) -> None:
        slots, shape = self._ids.meta["val"].shape[0], node.meta["val"].shape
        per_entry = {"slots": 1, "tokens": self._per_token}.get(how)
        if per_entry is not None and not (shape and is_same_size(shape[0] * per_entry, slots)):
            _refuse(f"%{node.name} does not have one entry for each of the {how}", at)
        # The fused node splits an operand in one way: per pair, per token, or not at all.
        if self.reads.setdefault(node, how) != how:
            _refuse(f"%{node.name} is read as {self.reads[node]} and as {how}", at)


def _is_order(node: fx.Node) -> bool:
    """Whether the node is the order of an ascending sort of one dimension."""
    sort = _sort_of(node)
    if key(sort) not in ("aten::sort", "aten::argsort") or sort.all_input_nodes[0].meta["val"].dim() != 1:
        return False
    is_order = node is sort or node.args[1:] == (1,)
    return is_order and not bind(sort)["descending"]


def _sort_of(order: fx.Node) -> fx.Node:
    return order.all_input_nodes[0] if order.target is operator.getitem else order


def _is_by_row(terms: Terms, row: tuple[str, ...]) -> bool:
    """Whether the first dimension, and only the first, is that of the rows."""
    return terms[:1] == (row,) and not any(row[0] in dim for dim in terms[1:])


def _check_is_known(node: fx.Node, arguments: Any, made: Collection[fx.Node]) -> None:
    used: list[fx.Node] = []
    map_arg(arguments, used.append)
    for other in used:
        if other not in made:
            _refuse(f"%{other.name} is neither a tensor nor a row", node)


def _drop(edit: Edit, node: fx.Node) -> None:
    """Erases an unused node, and the nodes that only it used."""
    todo = [node]
    while todo:
        unused = todo.pop()
        if unused.op == "call_function" and unused not in edit.erased and not unused.users and is_pure(unused):
            inputs = unused.all_input_nodes
            edit.erase(unused)
            todo += inputs


def _refuse(reason: str, node: fx.Node) -> NoReturn:
    refuse(reason, node=node, hint="every rank sorts all token-expert pairs instead, which is exact too")
