"""A traced graph as a pattern, as what a match must be like, and as the nodes of a replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.graph import Edit, is_same_size
from fxrewrite.match import Match
from fxrewrite.pattern import Capture, Ignore, Term
from fxrewrite.pattern.terms import call, frozen, tensor_text

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of the graph, in order."""
    return list(graph.find_nodes(op="placeholder"))


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    """What the graph returns, in order.

    Raises:
        RuleDefinitionError: it returns something else than values, or tuples of values.
    """
    found = graph.output_node().args[0]
    items = list(found) if isinstance(found, (list, tuple)) else [found]
    wrong = [item for item in items if not isinstance(item, fx.Node)]
    if wrong or not items:
        raise RuleDefinitionError(
            f"a pattern or a replacement returns {found!r}; it returns values computed from its inputs"
        )
    return items  # pyright: ignore[reportReturnType]


def computed_by(graph: fx.Graph) -> list[fx.Node]:
    """The outputs of a pattern's graph that are no inputs of it: those of its matches, in order."""
    return [output for output in outputs_of(graph) if output.op != "placeholder"]


def as_it_is(_: fx.Node, value: Any) -> Any:
    """The literal itself."""
    return value


def terms(graph: fx.Graph, inputs: Mapping[fx.Node, Term], literal: Callable[[fx.Node, Any], Any]) -> tuple[Term, ...]:
    """Returns the outputs of the graph as terms of a pattern.

    Args:
        graph: of calls of functions, methods and modules, which are found by their classes.
        inputs: a term for each placeholder. An attribute of the module captures a parameter, by the node's name.
        literal: what stands for the arguments of a node, where they hold no other node: a number, a list of numbers ...

    Raises:
        RuleDefinitionError: the graph calls what no pattern can say.
    """
    known: dict[fx.Node, Any] = dict(inputs)
    for node in graph.nodes:
        if node.op == "get_attr":
            known[node] = Capture(node.name, "param")
        elif node.op in ("call_function", "call_method", "call_module"):
            args, kwargs = _terms((node.args, dict(node.kwargs)), node, known, literal)
            made = call(ops.callee(node), args, kwargs)
            known[node] = made if node.all_input_nodes else replace(made, loose=True)  # layout=strided is no layout
    return tuple(known[node] for node in outputs_of(graph))


def _terms(value: Any, node: fx.Node, known: Mapping[fx.Node, Any], literal: Callable[[fx.Node, Any], Any]) -> Any:
    if isinstance(value, fx.Node):
        return Ignore() if _is_size(value) else known[value]
    if isinstance(value, (list, tuple)):
        items = [_terms(item, node, known, literal) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {name: _terms(item, node, known, literal) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_terms(item, node, known, literal) for item in (value.start, value.stop, value.step)))
    return literal(node, value)


def _is_size(node: fx.Node) -> bool:
    """Whether the node is a symbolic number that is computed: sizes are compared by value, however they are written."""
    return node.op != "placeholder" and isinstance(ops.value(node), (torch.SymInt, torch.SymFloat))


def correspondence(
    graph: fx.Graph, given: Mapping[fx.Node, Any], match: Match, *, values: bool = True
) -> dict[fx.Node, Any] | str:
    """Returns for each node of a pattern's graph what it is in the match; or, as a sentence, where they differ.

    Args:
        graph: the traced pattern, for the sizes and dtypes of this match.
        given: what the match captured, for each placeholder.
        match: where its pattern, perhaps with literals ignored, was found.
        values: whether literals, shapes and dtypes are compared too.
    """
    found: dict[fx.Node, Any] = dict(given)
    inside, why = set(match.nodes), ""
    for wanted, root in zip(computed_by(graph), match.outputs, strict=True):
        placed, said = _place(wanted, root, found, inside, values)
        if placed is None:
            return said or why
        found = placed
    return found


Placed = tuple[dict[fx.Node, Any] | None, str]


def _place(wanted: Any, found: Any, known: dict[fx.Node, Any], inside: set[fx.Node], values: bool) -> Placed:
    """The assignment in which `wanted` is `found`, or None and the reason."""
    if not isinstance(wanted, fx.Node):
        return _compare(wanted, found, known, inside, values)
    if wanted in known:
        same = known[wanted] is found or (not isinstance(found, fx.Node) and _frozen(found) == _frozen(known[wanted]))
        return (known, "") if same else (None, f"%{wanted.name} is {_text(known[wanted])} and {_text(found)}")
    if _is_size(wanted):
        return _compare(ops.value(wanted), found, known, inside, values)
    if wanted.op == "get_attr":
        return {**known, wanted: found}, ""
    if not isinstance(found, fx.Node) or found not in inside or ops.key(found) != ops.key(wanted):
        return None, f"expected {ops.key(wanted)}, found {_text(found)}"
    reason = _difference(ops.value(wanted), ops.value(found)) if values else ""
    if wanted.op == "call_module" and _options(wanted) != _options(found):
        reason = f"{wanted.graph.owning_module.get_submodule(str(wanted.target))}"  # pyright: ignore[reportOptionalMemberAccess]
    if reason:
        return None, f"expected {reason} at %{found.name}"
    first: Placed | None = None
    for pairs in _arguments(wanted, found):
        placed: Placed = ({**known, wanted: found}, "")
        for name, one, other in pairs:
            assert placed[0] is not None
            placed = _place(one, other, placed[0], inside, values)
            if placed[0] is None:
                placed = None, placed[1] if "%" in placed[1] else f"{placed[1]} at %{found.name}.{name}"
                break
        if placed[0] is not None:
            return placed
        first = first or placed
    assert first is not None
    return first


def _options(node: fx.Node) -> dict[str, Any]:
    """What was said to the module that the node calls: its attributes without tensors, hooks and submodules."""
    owner = node.graph.owning_module
    assert owner is not None
    module = owner.get_submodule(str(node.target))
    plain = (bool, int, float, str, tuple, list, type(None), torch.dtype)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return {name: value for name, value in public.items() if isinstance(value, plain)}


def _arguments(wanted: fx.Node, found: fx.Node) -> Iterator[list[tuple[str, Any, Any]]]:
    """The arguments by name, in both; of a commutative operator also with the operands exchanged."""
    one, other = (_without_defaults(ops.bind(node)) for node in (wanted, found))
    pairs = [(name, one.get(name), other.get(name)) for name in {**one, **other}]
    yield pairs
    if ops.is_commutative(ops.key(wanted)) and len(pairs) > 1:
        (a, x, p), (b, y, q), *rest = pairs
        yield [(a, x, q), (b, y, p), *rest]


def _without_defaults(bound: dict[str, Any]) -> dict[str, Any]:
    """The arguments without those of factories that say what is so anyway."""
    return {name: v for name, v in bound.items() if (name, v) not in (("layout", torch.strided), ("pin_memory", False))}


def _compare(wanted: Any, found: Any, known: dict[fx.Node, Any], inside: set[fx.Node], values: bool) -> Placed:
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)) and len(wanted) == len(found):
        placed: Placed = known, ""
        for one, other in zip(wanted, found, strict=True):
            assert placed[0] is not None
            placed = _place(one, other, placed[0], inside, values)
            if placed[0] is None:
                return placed
        return placed
    if not values:
        return known, ""
    number = ops.value(found) if isinstance(found, fx.Node) else found
    if isinstance(wanted, _NUMBERS) and isinstance(number, _NUMBERS) and not isinstance(wanted, bool):
        same = is_same_size(wanted, number)  # pyright: ignore[reportArgumentType]
    else:
        same = not isinstance(found, fx.Node) and _frozen(wanted) == _frozen(found)
    return (known, "") if same else (None, f"expected {wanted!r}, found {_text(found)}")


def _frozen(value: Any) -> Any:
    """The literal, hashable; lists and tuples are equal, as FX keeps either."""
    return frozen(list(value) if isinstance(value, (list, tuple)) else value)


def _text(value: Any) -> str:
    return f"%{value.name} ({ops.key(value)})" if isinstance(value, fx.Node) else repr(value)


def _difference(wanted: Any, found: Any) -> str:
    """In which shape or dtype two values differ, as "float32[2, 3], found float32[3, 2]"; empty if in none."""
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        return ""
    same = len(wanted.shape) == len(found.shape) and all(map(is_same_size, wanted.shape, found.shape))
    if same and wanted.dtype == found.dtype:
        return ""
    return f"{tensor_text(wanted)}, found {tensor_text(found)}"


def insert(graph: fx.Graph, given: Mapping[fx.Node, Any], match: Match) -> list[Any]:
    """Makes the calls of a traced replacement in the graph of the match; returns proxies of its outputs.

    Its modules and tensors come along, but for a module that the graph of the match has under the same name, of one
    class and with the same options: that one, with its weights, is called.
    """
    known: dict[fx.Node, Any] = {node: match.proxy(v) if isinstance(v, fx.Node) else v for node, v in given.items()}
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            args, kwargs = map_arg((node.args, dict(node.kwargs)), known.__getitem__)  # pyright: ignore[reportArgumentType]
            known[node] = match.call(node.target, *args, **kwargs)
        elif node.op == "call_module":
            args, kwargs = map_arg((node.args, dict(node.kwargs)), known.__getitem__)  # pyright: ignore[reportArgumentType]
            known[node] = match.call(_module(node, match), *args, **kwargs)
        elif node.op == "get_attr":
            assert graph.owning_module is not None
            known[node] = match.proxy(_brought(ops.held(graph.owning_module, node), str(node.target), match.edit))
    return [known[node] for node in outputs_of(graph)]


def _module(node: fx.Node, match: Match) -> torch.nn.Module:
    """The module that a call of a replacement means in the graph of the match."""
    graph: fx.Graph = match.edit.graph
    called = graph.find_nodes(op="call_module", target=node.target)
    owner = node.graph.owning_module
    assert owner is not None
    own = owner.get_submodule(str(node.target))
    same = [one for one in called if ops.callee(one) is type(own) and _options(one) == _options(node)]
    return match.module(same[0]) if same else own


def _brought(value: Any, name: str, edit: Edit) -> fx.Node:
    """A node that reads a tensor which a replacement brings along; all matches of a transaction share it."""
    known = edit.shared("brought along", dict[int, fx.Node])
    node = known.get(id(value))
    if node is None or node in edit.erased or getattr(edit.gm, str(node.target), None) is not value:
        node = known[id(value)] = edit.attach(value, name.replace(".", "_"))
    return node
