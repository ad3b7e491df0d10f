"""Why ranks hold a value as they do: the chain of decisions from the value back to what was stated, and what is sent.

explain_values(edit, axis, "*.o_proj")      once placements are propagated
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxrewrite.errors import FxRewriteError, did_you_mean
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.inputs import input_name
from fxrewrite.graph.modules import matches_glob, module_names
from fxrewrite.graph.sizes import size_hint
from fxrewrite.graph.source import source_line
from fxrewrite.ops import is_tensor, key
from fxrewrite.report import bytes_text
from fxrewrite.spmd.facts import placement_of
from fxrewrite.spmd.placement import Axis, Partial, Replicate, Shard
from fxrewrite.spmd.price.price import bytes_held, redistribution_bytes
from fxrewrite.spmd.propagation.decision import Decision, operands_of
from fxrewrite.spmd.propagation.legal import DECIDED
from fxrewrite.spmd.propagation.place import STATED, argument_name
from fxrewrite.spmd.redistribute import is_added_once, redistribute

_SHOWN = 8
"""Steps of a chain that are written out before its end."""


def explain_values(edit: Edit, axis: Axis, glob: str) -> str:
    """How ranks of the axis hold the values that a glob names, why, and what is sent for whoever reads them.

    Args:
        edit: of a graph whose placements are propagated.
        axis: of the mesh.
        glob: over qualified names of parameters and arguments; of modules, whose results are meant; and over nodes.

    Raises:
        FxRewriteError: the glob names nothing of the graph; says the nearest names.
    """
    named = dict[fx.Node, str]()
    known = dict[str, None]()
    for node in edit.nodes():
        if not is_tensor(node) or node.target is redistribute:
            continue
        for name in _names(node):
            known[name] = None
            if matches_glob(name, glob):
                named.setdefault(node, name)
    if not named:
        raise FxRewriteError(f"{glob!r} names no value of the graph{did_you_mean(glob, known)}")
    return "\n".join(line for node, name in named.items() for line in _explained(node, name, axis))


def _names(node: fx.Node) -> Iterator[str]:
    """What a value is called: an input by its qualified name, a module's result by the module, each by its node."""
    if node.op == "placeholder":
        yield argument_name(node)
    elif node.op == "call_function":
        modules = list(module_names(node))
        outside = [set(module_names(user)) for user in node.users if user.target is not redistribute]
        outside += [set(module_names(u)) for n in node.users if n.target is redistribute for u in n.users]
        yield from (name for name in modules if any(name not in modules_of for modules_of in outside))
    yield node.name


def _explained(node: fx.Node, name: str, axis: Axis) -> Iterator[str]:
    shape = [size_hint(size) for size in node.meta["val"].shape]
    yield f"{name} {shape} is {placement_of(node)} over {axis}"
    chain = list(_chain(node))
    left_out = range(_SHOWN, len(chain) - 1)
    for i, step in enumerate(chain):
        if i == _SHOWN and left_out:
            yield f"    ... {len(left_out)} steps"
        if i not in left_out:
            yield f"    {_step(step, axis)}"
    for moved in (user for user in node.users if user.target is redistribute):
        readers = ", ".join(f"%{user.name}" for user in moved.users)
        yield f"    -> {placement_of(moved)} for {readers}: {_sent(moved, axis)}"


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """The node, the operand that its placement follows from, and so on up to what was stated or is replicated."""
    seen = set[fx.Node]()
    cause: fx.Node | None = node
    while cause is not None and cause not in seen:
        seen.add(cause)
        yield cause
        cause = _cause(cause)


def _cause(node: fx.Node) -> fx.Node | None:
    """The operand whose placement decided on that of the node, if it was not stated."""
    if STATED.of(node) is not None or node.op != "call_function":
        return None
    operands = node.all_input_nodes if node.target is redistribute else operands_of(node) or node.all_input_nodes
    held = [operand for operand in operands if placement_of(operand) != Replicate() or operand.target is redistribute]
    held = [operand for operand in held if not is_added_once(operand)]
    # A result is a shard because of an operand in shards, or a sum because of one that was a sum or a product's factor.
    same = [operand for operand in held if type(placement_of(operand)) is type(placement_of(node))]
    return next(iter(same or held), None)


def _sent(moved: fx.Node, axis: Axis) -> str:
    src = moved.all_input_nodes[0]
    sent = redistribution_bytes(bytes_held(src), placement_of(src), placement_of(moved), axis.size)
    return f"each rank sends {bytes_text(round(sent))}" if sent else "nothing is sent"


def _step(node: fx.Node, axis: Axis) -> str:
    is_input = node.op == "placeholder"
    said = f"{input_name(node) if is_input else f'%{node.name}'}: {placement_of(node)}"
    stated = STATED.of(node)
    if stated is not None:
        return f"{said}, stated by {stated}"
    if is_input:
        return f"{said}, since nothing is stated of it"
    if node.target is redistribute:
        rules = node.meta.get("fxrewrite", ())
        return f"{said}, a redistribution{f' by {rules[0]}' if rules else ''}: {_sent(node, axis)}"
    why = _why(node, DECIDED.of(node))
    return f"{said}{f', {why}' if why else ''}  {key(node)} {source_line(node)}".rstrip()


def _why(node: fx.Node, decision: Decision | None) -> str:
    if decision is None:
        return ""
    if decision.gathered:
        return f"since operands are gathered: {decision.gathered}"
    if isinstance(placement_of(node), Partial) and decision.why:
        return f"a summand on each rank: {decision.why}"
    if isinstance(placement_of(node), Shard):
        return decision.why
    return "since every operand is whole" if not decision.why else decision.why
