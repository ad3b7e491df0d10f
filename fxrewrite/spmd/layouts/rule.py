"""Layout rules: what an operator's indices are, as a value with an id."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from fxrewrite.errors import FxRewriteError, RuleDefinitionError, did_you_mean
from fxrewrite.graph.differentiable import is_differentiable
from fxrewrite.graph.sizes import Size, is_read_from_data, is_same_size, product, size_hint
from fxrewrite.ops import bind, is_imported, key, named_operator, no_operator
from fxrewrite.ops.schemas import Schema, schemas_of
from fxrewrite.spmd.layouts.notation import Dim, IndexMap, Notation, parse
from fxrewrite.spmd.placement import ReduceOp


@dataclass(frozen=True, slots=True)
class Call:
    """One node as a layout rule sees it: its operator, bound arguments, tensor operands and its results' shapes."""

    node: fx.Node
    key: str
    args: dict[str, Any]
    operands: tuple[fx.Node, ...]
    """The tensor arguments in schema order, lists flattened, absent ones left out."""

    @staticmethod
    def of(node: fx.Node) -> Call:
        args = bind(node)
        operands = [value for value in _flatten(args.values()) if _is_tensor_node(value)]
        return Call(node, key(node), args, tuple(operands))

    def shape(self, position: int = 0) -> Sequence[Size]:
        """The global shape of an operand."""
        return tensor_of(self.operands[position]).shape

    @property
    def num_read(self) -> int:
        """The most sizes of an operand or a result that are only known when the graph runs: no rank can count its part
        of these."""
        shapes = [*(tensor_of(operand).shape for operand in self.operands), *self.result_shapes()]
        return max((sum(map(is_read_from_data, shape)) for shape in shapes), default=0)

    def result_shapes(self) -> list[Sequence[Size]]:
        """The global shape of each result; none of its dimensions for what is no tensor."""
        return [value.shape if isinstance(value, torch.Tensor) else () for value in results_of(self.node)]

    def optional_shapes(self) -> list[Sequence[Size] | None]:
        """One shape for each tensor-typed argument of the schema, None where it is absent."""
        shapes: list[Sequence[Size] | None] = []
        target: Any = self.node.target
        for argument in target._schema.arguments:
            if "Tensor" in str(argument.type):
                value = self.args.get(argument.name)
                items = value if isinstance(value, (list, tuple)) else [value]
                shapes.extend(tensor_of(item).shape if isinstance(item, fx.Node) else None for item in items)
        return shapes


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that `node` holds."""
    return node.meta["val"]


def results_of(node: fx.Node) -> Sequence[Any]:
    """What a node gives, several values or one."""
    value = node.meta.get("val")
    return value if isinstance(value, (list, tuple)) else [value]


def _is_tensor_node(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _flatten(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value


@dataclass(frozen=True, slots=True)
class Neutral:
    """What makes an entry of an index that is summed over count nothing: `fill` in the operand at this position."""

    operand: int
    fill: float


IndexRule: TypeAlias = Callable[[Call], "IndexMap | None"]
NeutralRule: TypeAlias = Callable[[Call], "Neutral | None"]
PartsRule: TypeAlias = Callable[[Mapping[str, Any]], Any]
"""From the arguments of a call by name, tensors with their global sizes, to its results; NotImplemented of a call that
it does not know, which is then gathered."""


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """Which dimensions of an operator are independent.

    `index_map` is a notation (see `fxrewrite.spmd.layouts.notation`) or a function that gives the indices of a call,
    or None where it cannot tell; then the operator counts as one without a rule.
    """

    id: str
    ops: tuple[str, ...]
    index_map: str | IndexRule
    move_to: tuple[str, ...] = ()
    """Indices over which to spread the work when an operand is sharded on one that must be whole, in this order."""
    shape_arg: str = ""
    """The argument that states the result's shape, and so must become local."""
    run_args: tuple[tuple[str, int], ...] = ()
    """Arguments that count runs of a dimension of the result, and so must become local: ("groups", -2) counts runs of
    a convolution's channels."""

    length_args: tuple[str, ...] = ()
    """Arguments that state lengths of the results along the argument `dim`, and so must become local."""

    neutral: Literal["zeros", ""] | NeutralRule = ""
    """What padding is where the result is a sum over a padded index: zeros in any one operand that has the index, or
    what a function says of a call. Where nothing is said, operands are gathered instead of summing up padding."""
    reduce_op: ReduceOp = "sum"
    """How results of chunks are combined where the sharded index is reduced. What is not a sum has no adjoint: under
    autograd its index must be whole."""
    sends_own: bool = False
    """Whether the operator is lowered to one that sends ranks' own values itself: along an axis whose ranks have values
    of their own (`Parallelism(data="own")`) it reads and gives these, and only parameters are sharded. There, operands
    of operators without this are gathered."""
    rewritten_by: str = ""
    """The rule without which a partial sum of these operators is none: a mean over chunks has to become a sum by the
    global count. Where that rule did not run, making shapes local is refused."""

    parts: Mapping[str, PartsRule] = field(default_factory=dict[str, PartsRule], hash=False)
    """Of some of the operators, a function that computes the same by operators which run on shards: sums, and what is
    elementwise. Propagation writes these in the place of a call whose first operand is sharded on an index which must
    be whole, so that a few numbers are sent and not the operand."""

    library: str = ""
    """The library that defines the operators, where it may not be there: the rule is then for nothing."""

    def __post_init__(self) -> None:
        if not self.id or not isinstance(self.id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(f"a layout rule has a name, as in layout.relu, not {self.id!r}")
        if not self.ops or isinstance(self.ops, str):
            raise RuleDefinitionError(f'layout rule {self.id}: ops is a tuple of keys, as in ("aten::relu",)')
        if wrong := [op for op in self.ops if not isinstance(op, str)]:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(
                f'layout rule {self.id}: ops has {wrong[0]!r}; an operator is named, "aten::relu"'
            )
        if not isinstance(self.index_map, str) and not callable(self.index_map):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(
                f"layout rule {self.id}: {self.index_map!r} is neither a notation nor a function of a call"
            )
        if not isinstance(self.parts, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(
                f"layout rule {self.id}: parts has a function for each operator, {{{self.ops[0]!r}: function}}, and is "
                f"{self.parts!r}"
            )
        if others := self.parts.keys() - set(self.ops):
            raise RuleDefinitionError(
                f"layout rule {self.id}: parts of {min(others)}, which is not one of its operators"
            )
        if not callable(self.neutral) and self.neutral not in ("zeros", ""):
            raise RuleDefinitionError(
                f"layout rule {self.id}: neutral={self.neutral!r} is neither 'zeros' nor a function"
            )
        try:
            notation = parse(self.index_map) if isinstance(self.index_map, str) else None
        except ValueError as error:
            raise RuleDefinitionError(f"layout rule {self.id}: {error}") from error
        names = {name.removesuffix("...") for terms in notation.operands for name in terms} if notation else set[str]()
        if notation and (missing := [index for index in self.move_to if index not in names]):
            raise RuleDefinitionError(
                f"layout rule {self.id}: move_to names {missing[0]!r}, and no operand of {notation.text!r} has it"
            )
        whole = {name.removesuffix("...") for name in notation.whole} if notation else set[str]()
        if stay := [index for index in self.move_to if index in whole]:
            raise RuleDefinitionError(
                f"layout rule {self.id}: move_to names {stay[0]!r}, which must be whole by {self.index_map!r}; name an "
                "index that is independent"
            )
        self._check_schemas(notation)

    def _check_schemas(self, notation: Notation | None) -> None:
        """Raise if there is no such operator, or if no overload of it has the operands and arguments that are named."""
        known: list[Schema] = []
        for op in (op for op in self.ops if "::" in op):  # of Python callables there is no list
            packet = named_operator(op)
            if packet is None and op.partition("::")[0] == self.library and not is_imported(self.library):
                continue
            if packet is None:
                raise RuleDefinitionError(f"layout rule {self.id}: {no_operator(op)}")
            if not isinstance(packet, torch._ops.OpOverloadPacket):
                continue
            schemas = schemas_of(packet)
            if notation is not None and not any(_takes(notation, schema) for schema in schemas):
                counts = sorted({len(_tensors(schema)) for schema in schemas})
                takes = f"{op} takes {' or '.join(map(str, counts))} tensors"
                raise RuleDefinitionError(
                    f"layout rule {self.id}: {notation.text!r} has {len(notation.operands)} operands, and {takes}; "
                    "write one operand for each, and `x?` where it may be absent"
                )
            if notation is not None and not any(_gives(notation, schema) for schema in schemas):
                raise RuleDefinitionError(
                    f"layout rule {self.id}: {notation.text!r} has {len(notation.results)} results, and {op} gives "
                    f"{' or '.join(sorted({str(len(_returned(schema))) for schema in schemas}))}"
                )
            self._check_arguments(op, schemas, (self.shape_arg, *(name for name, _ in self.run_args)))
            known += schemas
        if known:  # lengths of one rule's operators may have other names
            self._check_arguments(", ".join(self.ops), known, self.length_args)

    def _check_arguments(self, op: str, schemas: Sequence[Schema], names: Iterable[str]) -> None:
        known = dict.fromkeys(name for schema in schemas for name in schema.names)
        for name in filter(None, names):
            if name not in known:
                near = did_you_mean(name, known) or f"; it has {', '.join(known)}"
                raise RuleDefinitionError(f"layout rule {self.id}: {op} has no argument {name!r}{near}")

    def map(self, call: Call) -> IndexMap | None:
        """The indices of a call, None where the rule cannot tell them."""
        indices = self._of_function(call) if callable(self.index_map) else self._of_notation(call)
        if indices is None or self.reduce_op == "sum" or not is_differentiable(call.node):
            return indices
        kept = {index for terms in indices.results for dim in terms for index in dim}
        return replace(indices, whole=indices.whole | (set(indices.sizes) - kept))

    def _of_function(self, call: Call) -> IndexMap | None:
        assert callable(self.index_map)
        where = f"layout rule {self.id}: its function, for {call.key} at %{call.node.name},"
        try:
            indices = self.index_map(call)
        except FxRewriteError:
            raise
        except Exception as error:
            raise RuleDefinitionError(f"{where} raised {type(error).__name__}: {error}") from error
        if indices is None:
            return None
        if not isinstance(indices, IndexMap):  # pyright: ignore[reportUnnecessaryIsInstance]  # it is the user's
            raise RuleDefinitionError(f"{where} gave {indices!r}; it gives an IndexMap, or None where it cannot tell")
        ranks, stated = [len(tensor_of(operand).shape) for operand in call.operands], [*map(len, indices.operands)]
        if ranks != stated:
            raise RuleDefinitionError(f"{where} gave indices of {stated} dimensions; its operands have {ranks}")
        if wrong := _misfit(call, indices):
            raise RuleDefinitionError(f"{where} gave {wrong}")
        return indices

    def _of_notation(self, call: Call) -> IndexMap | None:
        """The indices by the notation; None where ranks or sizes do not fit, or `dim` names what it says is free."""
        assert isinstance(self.index_map, str)
        indices = parse(self.index_map).bind(call.optional_shapes(), call.result_shapes())
        if indices is None or not _gives_results_of(call, indices):
            return None
        free = {index for index in indices.sizes if index not in indices.whole}
        kept = free & {index for terms in indices.results for dim in terms for index in dim}
        return None if any(kept.intersection(dim) for dim in _named_dims(call, indices)) else indices

    def neutral_of(self, call: Call, indices: IndexMap, index: str) -> Neutral | None:
        """How padded entries of `index` count nothing in a sum over it; None where the rule does not say."""
        if callable(self.neutral):
            found = self.neutral(call)  # values that broadcast may lack the index
            return found if found is None or indices.has(indices.operands[found.operand], index) else None
        having = [place for place, terms in enumerate(indices.operands) if indices.has(terms, index)]
        if not self.neutral or not having:
            return None
        return Neutral(min(having, key=lambda place: size_hint(product(call.shape(place)))), 0)

    def text(self) -> str:
        parts = f"; in parts: {' '.join(self.parts)}" if self.parts else ""
        return f"{self.id:<28} {' '.join(self.ops)}  {self.says()}{parts}"

    def says(self) -> str:
        """The notation, or the first line of what the function says of itself."""
        return self.index_map if isinstance(self.index_map, str) else (self.index_map.__doc__ or "").split("\n")[0]


def _takes(notation: Notation, schema: Schema) -> bool:
    """Whether the operands of the notation can be the tensors of a call; lists hold any number of them."""
    kinds = _tensors(schema)
    absent = set(range(len(kinds), len(notation.operands)))
    has_list = any(kind.startswith("List[") for kind in kinds)
    return has_list or (len(kinds) <= len(notation.operands) and absent <= notation.optional)


def _gives(notation: Notation, schema: Schema) -> bool:
    """Whether the results of the notation can be those of a call; a list has any number of them."""
    kinds = _returned(schema)
    return not kinds or any(kind.startswith("List[") for kind in kinds) or len(kinds) == len(notation.results)


def _returned(schema: Schema) -> list[str]:
    """The types of what a call gives; none where that is unknown."""
    return [str(value.type) for value in schema.overload._schema.returns] if schema.overload is not None else []


def _tensors(schema: Schema) -> list[str]:
    """The types of the parameters that are tensors, or lists of them."""
    return [parameter.kind for parameter in schema.parameters if "Tensor" in parameter.kind]


def _gives_results_of(call: Call, indices: IndexMap) -> bool:
    """Whether the results of the notation have the dimensions and sizes that those of the call have."""
    values = results_of(call.node)
    return len(values) == len(indices.results) and all(
        len(terms) == len(result.shape)
        and all(is_same_size(indices.sizes[dim[0]], size) for dim, size in zip(terms, result.shape, strict=True))
        for terms, result in zip(indices.results, values, strict=True)
        if isinstance(result, torch.Tensor)
    )


def _misfit(call: Call, indices: IndexMap) -> str:
    """What the map of a function says that the call is not; '' if nothing."""
    values = results_of(call.node)
    if len(indices.results) != len(values):
        return f"indices of {len(indices.results)} results; it has {len(values)}"
    results = [
        (terms, value.shape)
        for terms, value in zip(indices.results, values, strict=True)
        if isinstance(value, torch.Tensor)
    ]
    stated, ranks = [len(terms) for terms, _ in results], [len(shape) for _, shape in results]
    if stated != ranks:
        return f"indices of {stated} dimensions for its results; they have {ranks}"
    operands = [(terms, call.shape(i)) for i, terms in enumerate(indices.operands)]
    for dim, size in (pair for terms, shape in (*operands, *results) for pair in zip(terms, shape, strict=True)):
        if unsized := [index for index in dim if index not in indices.sizes]:
            return f"no size of its index {unsized[0]!r}"
        if not dim or not isinstance(size, int) or not indices.whole.isdisjoint(dim):
            continue  # an index that is whole may stand for several dimensions
        made = product(indices.sizes[index] for index in dim)
        if isinstance(made, int) and made != size:
            return f"indices {' '.join(dim)} of size {made} for a dimension of {size}"
    return ""


def _named_dims(call: Call, indices: IndexMap) -> Iterator[Dim]:
    """The dimensions of the first operand that the call names as those along which it runs."""
    terms = indices.operands[0] if indices.operands else ()
    for name in ("dim", "dims", "axis", "axes"):
        named = call.args.get(name)
        for dim in named if isinstance(named, (list, tuple)) else [named]:
            if isinstance(dim, int) and not isinstance(dim, bool) and -len(terms) <= dim < len(terms):
                yield terms[dim]


class LayoutRules:
    """Layout rules by operator; two rules for one operator are an error that names both."""

    def __init__(self, rules: Iterable[LayoutRule]) -> None:
        self.rules = tuple(rules)
        self._by_op: dict[str, LayoutRule] = {}
        for rule in self.rules:
            for op in rule.ops:
                if op in self._by_op:
                    raise RuleDefinitionError(f"operator {op} has two layout rules: {self._by_op[op].id} and {rule.id}")
                self._by_op[op] = rule

    def get(self, op: str) -> LayoutRule | None:
        return self._by_op.get(op)

    def of(self, node: fx.Node) -> tuple[Call, LayoutRule | None, IndexMap | None]:
        """A call, its rule, and its indices; None where there is no rule, and where that cannot tell the indices.

        An index whose size depends on data must be whole, as no rank can count its part. Of a call with a tensor that
        has several such sizes nothing is known.
        """
        call = Call.of(node)
        rule = self.get(call.key)
        indices = None if rule is None or call.num_read > 1 else rule.map(call)
        return call, rule, _known_sizes(indices) if indices is not None and call.num_read else indices

    def __iter__(self) -> Iterator[LayoutRule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)


def _known_sizes(indices: IndexMap) -> IndexMap:
    """The indices of a call, of which those must be whole whose sizes are only known when the graph runs."""
    unknown = {index for index, size in indices.sizes.items() if is_read_from_data(size)}
    return replace(indices, whole=indices.whole | unknown, section=None, lookups={})


def why_unknown(call: Call, rule: LayoutRule | None) -> str:
    """Why nothing is known of the indices of a call whose operator has this rule, or none."""
    if call.num_read > 1:
        return f"{call.key} has a tensor of which several sizes depend on data"
    if rule is not None and isinstance(rule.index_map, str):
        return (
            f"{call.key} does not fit its layout rule {rule.id}, {rule.index_map}: that has other ranks or sizes, or "
            "leaves free what the call names as its dim"
        )
    if rule is not None:
        return f"layout rule {rule.id} says nothing of this call of {call.key}: its function returned None"
    return f"{call.key} has no layout rule"
