"""Effects of an operator besides its result: mutation, randomness, aliasing; and whether its operands commute."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx
from torch.fx.node import _side_effectful_functions, map_arg  # pyright: ignore[reportPrivateUsage]
from torch.overrides import handle_torch_function, has_torch_function

from fxrewrite.ops import keys
from fxrewrite.ops.binding import BindingError, Signature, bind, signature_of
from fxrewrite.ops.by_target import ByTarget
from fxrewrite.ops.tables import OPERATORS
from fxrewrite.ops.traits import operators
from fxrewrite.ops.value import held, value

__all__ = [
    "called_overload",
    "declare_per_rank",
    "declare_pure",
    "declare_virtual",
    "exchangeable",
    "is_barrier",
    "is_commutative",
    "is_maybe_view",
    "is_per_rank",
    "is_pure",
    "is_random",
    "is_view",
    "is_virtual",
    "may_be_random",
    "may_draw",
    "may_have_effects",
    "may_take_out",
    "may_write",
    "memory_origins",
    "mutated",
    "mutates",
    "sets_mode",
    "updates_statistics",
    "without_gradients",
]

_PURE: set[Any] = set()
_SEEDED = torch.Tag.nondeterministic_seeded
_MAYBE_VIEW = torch.Tag.maybe_aliasing_or_mutating
_OTHERS_RANDOM = frozenset(
    f"torch.nn.functional.{name}"
    for name in [
        "alpha_dropout",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "gumbel_softmax",
        "multi_head_attention_forward",
        "rrelu",
    ]
)
"""Python functions of torch without a schema that draw random numbers."""
_PURE_MODULES = ("torch.nn.functional.", "torch.functional.", "operator.", "math.", "torch.Tensor.")
_PURE_BUILTINS = frozenset({"builtins.getattr", "builtins.max", "builtins.min", "builtins.len", "builtins.tuple"}) | {
    f"torch.{name}" for name in ("sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_ite", "sym_sum")
}
_FUNCTIONAL_BODIES = frozenset(
    f"higher_order::{name}"
    for name in [
        "associative_scan",
        "autograd_function_apply",
        "cond",
        "custom_function_call",
        "flex_attention",
        "flex_attention_backward",
        "foreach_map",
        "invoke_subgraph",
        "map_impl",
        "scan",
        "tag_activation_checkpoint",
        "while_loop",
        "wrap",
        "wrap_activation_checkpoint",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    ]
)
"""Higher-order operators that only run their subgraphs, so their effects are those of the subgraphs."""
_CALLERS = frozenset(f"higher_order::{name}" for name in ["auto_functionalized", "auto_functionalized_v2", "out_dtype"])
"""Higher-order operators that run the overload in their first argument, and write to copies alone."""
_INPLACE_OPERATORS = frozenset(
    getattr(operator, f"i{name}")
    for name in ["add", "and", "concat", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub"]
) | {operator.itruediv, operator.ixor}
_CHECKS = ("assert", "sym_constrain", "record_function", "_sink_tokens")
"""Parts of the names of operators that must not be removed but change nothing."""
_EFFECTS: ByTarget[tuple[bool, bool]] = ByTarget()
_COMMUTATIVE = operators("commutative")
_MAYBE_VIEWS = operators("maybe_view")
_STATISTICS = operators("statistics")
_CASTS = ("aten::to", "aten::type_as")
_STATIC: dict[Any, tuple[bool, bool, bool]] = {}
"""(mutates, random, view) by overload."""


_MODE_SWITCHES = frozenset(
    {
        torch._C._set_grad_enabled,
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
        torch.autograd.grad_mode._enter_inference_mode,
        torch.autograd.grad_mode._exit_inference_mode,
    }
)


_PER_RANK: set[Any] = set()
_VIRTUAL: dict[Any, str] = {}
"""Callables, and their keys, with where rules on them are tested."""


def without_gradients(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Nodes that run while gradients are off, as under `torch.no_grad()`; of each the node that switched them off."""
    found: dict[fx.Node, fx.Node] = {}
    switch: fx.Node | None = None
    for node in nodes:
        if node.target is torch._C._set_grad_enabled:
            switch = None if node.args[0] else switch or node
        elif switch is not None:
            found[node] = switch
    return found


def declare_pure(target: Callable[..., Any]) -> Callable[..., Any]:
    """Declares that a Python callable has no effects and returns fresh memory when it is a node target; returns it.

    An undeclared callable is a barrier: no rewrite may match across it.
    """
    _PURE.add(target)
    _EFFECTS.forget(target)
    return target


def declare_per_rank(target: Callable[..., Any]) -> Callable[..., Any]:
    """Declares that a callable has no effects and returns another value on each rank, so it must not be precomputed."""
    _PER_RANK.add(target)
    return declare_pure(target)


def is_per_rank(target: object) -> bool:
    """Whether the callable returns another value on each rank."""
    return target in _PER_RANK


def declare_virtual(target: Callable[..., Any], *, tested_by: str = "") -> Callable[..., Any]:
    """Declares that a callable is a placeholder without effects, which rules replace before a graph is complete.

    What it computes on one device does not define its meaning, so a rule on it cannot be verified there.

    Args:
        target: the callable. What is returned calls it, and stands in patterns and replacements like a torch function.
        tested_by: "module:name" of a `fxrewrite.verify.TestBed`, which runs graphs where the callable has its meaning.
    """

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        tensors = [item for value in given for item in (value if isinstance(value, (list, tuple)) else [value])]
        if has_torch_function(tensors):  # a pattern or a replacement is being written down
            return handle_torch_function(call, tensors, *args, **kwargs)
        return target(*args, **kwargs)

    _VIRTUAL.update(dict.fromkeys((call, f"{target.__module__}.{target.__qualname__}"), tested_by))
    return declare_pure(call)


def tested_by(target: object) -> str:
    """Where rules on a virtual operator are tested, as it was declared; else ""."""
    return _VIRTUAL.get(target, "")


def is_virtual(target: object) -> bool:
    """Whether the callable, or the operator with this key, is such a placeholder."""
    return target in _VIRTUAL


def exchangeable(operator_key: str) -> tuple[str, str] | None:
    """The two arguments of the operator that may trade places (its others at their defaults), if there are such."""
    if operator_key in _COMMUTATIVE:
        return "self", "other"
    return ("dim0", "dim1") if operator_key == "aten::transpose" else None


def is_commutative(operator_key: str) -> bool:
    """True when `self` and `other` of the operator may trade places (its other arguments at their defaults)."""
    return operator_key in _COMMUTATIVE


def mutates(node: fx.Node) -> bool:
    """True if running the node may change anything besides its own result: memory, or the state of torch."""
    return is_barrier(node) or bool(mutated(node))


def mutated(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the argument nodes that the node writes to; empty for a barrier, whose effects are unknown."""
    if node.op not in ("call_function", "call_method"):
        return ()
    if keys.key(node).startswith("operator.set") or node.target == "__setitem__":
        return _nodes_in(node.args[0])
    if may_take_out(node.target) and node.kwargs.get("out") is not None:
        return _nodes_in(node.kwargs["out"])
    if node.target in _INPLACE_OPERATORS:
        return _nodes_in(node.args[0])
    written = _written_by_function(node)
    if written is not None:
        return written
    overload = _overload(node)
    if overload is None:
        inplace = isinstance(node.target, str) and node.target.endswith("_") and not node.target.endswith("__")
        return _nodes_in(node.args[0]) if inplace else ()
    if overload._schema.is_mutable:
        bound = bind(node)
        written = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return tuple(n for name in written if name in bound for n in _nodes_in(bound[name]))
    if keys.key(node).endswith("_") and not keys.key(node).endswith("__"):  # a wrapper called with inplace=True
        return _nodes_in(node.args[0] if node.args else next(iter(node.kwargs.values())))
    if updates_statistics(node):
        bound = bind(node)
        return _nodes_in(bound.get("running_mean")) + _nodes_in(bound.get("running_var"))
    return ()


_WRITING_FUNCTIONS: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.batch_norm: ("training", ("running_mean", "running_var")),
    F.instance_norm: ("use_input_stats", ("running_mean", "running_var")),
    F.embedding: ("max_norm", ("weight",)),
    F.embedding_bag: ("max_norm", ("weight",)),
}
"""Functions of torch that write if an argument says so: the name of that argument, and what they write to."""


def _written_by_function(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Returns what a function of torch.nn.functional writes to, if an argument decides that; None for all others."""
    target = node.target
    if isinstance(target, str) or getattr(target, "__module__", "") != "torch.nn.functional":
        return None
    names = _parameters(target)
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if target in _WRITING_FUNCTIONS:
        switch, written = _WRITING_FUNCTIONS[target]
        return tuple(n for name in written for n in _nodes_in(given.get(name))) if given.get(switch) else None
    if "inplace" in names and given.get("inplace"):
        return _nodes_in(given.get(names[0]))
    return None


def _python_parameters(target: Any) -> tuple[str, ...]:
    return _parameters(target) if getattr(target, "__module__", "") == "torch.nn.functional" else ()


@functools.cache
def _parameters(target: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin: its schema says what it writes
        return ()


def updates_statistics(node: fx.Node) -> bool:
    """True for batch and instance norms that write their running statistics, which they do in training."""
    if keys.key(node) not in _STATISTICS:
        return False
    bound = bind(node)
    return bound.get("running_mean") is not None and bool(bound.get("training", bound.get("use_input_stats")))


def is_barrier(node: fx.Node) -> bool:
    """True if the node's effects are unknown: unknown callables, changes of torch's state, submodules."""
    if node.op == "call_module":
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if target in _PURE:
        return False
    if target in _side_effectful_functions:
        return not any(part in str(target) for part in _CHECKS) and not keys.key(node).startswith("operator.")
    if target in OPERATORS or isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    name = keys.key(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return name not in _CALLERS and (name not in _FUNCTIONAL_BODIES or _body_writes(node))
    return "::" not in name and not name.startswith(_PURE_MODULES) and name not in _PURE_BUILTINS


def _body_writes(node: fx.Node) -> bool:
    """Whether a subgraph of a higher-order operator writes; torch.export puts every no_grad region into a subgraph."""
    bodies = _bodies(node)
    return bodies is None or any(mutates(inner) for body in bodies for inner in body.graph.nodes)


def _body_draws(node: fx.Node) -> bool:
    """Whether a subgraph of a higher-order operator draws random numbers, or that is unknown."""
    bodies = _bodies(node) if keys.key(node) in _FUNCTIONAL_BODIES else None
    return not bodies or any(is_random(inner) for body in bodies for inner in body.graph.nodes)


def _bodies(node: fx.Node) -> list[fx.GraphModule] | None:
    """Returns the subgraphs that a node reads; None for a graph without a module, which has no access to them."""
    attributes = [argument for argument in node.all_input_nodes if argument.op == "get_attr"]
    owner = node.graph.owning_module
    found: list[fx.GraphModule] = []
    if owner is None:
        return None if attributes else found
    for attribute in attributes:
        body = held(owner, attribute)
        if isinstance(body, fx.GraphModule):
            found.append(body)
    return found


def sets_mode(node: fx.Node) -> bool:
    """True if the node switches a mode of torch (autograd, autocast) and writes to no tensor."""
    return node.target in _MODE_SWITCHES


def is_random(node: fx.Node) -> bool:
    """True if the node draws from a random number generator. Dropout in evaluation or with p = 0 does not draw, nor
    does a recurrent network without dropout."""
    if node.op not in ("call_function", "call_method"):
        return False
    overload = _overload(node)
    if keys.key(node) in _CALLERS:
        return may_be_random(keys.key(node), called_overload(node.args))
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _body_draws(node)
    if overload is None:
        return keys.key(node) in _OTHERS_RANDOM
    return _static(overload)[1] and not _is_idle(node)


def called_overload(args: Sequence[Any]) -> torch._ops.OpOverload | None:
    """The overload that a higher-order operator without a body is given to run; None if it is not given one."""
    first = args[0] if args else None
    return first if isinstance(first, torch._ops.OpOverload) else None


@functools.cache
def may_be_random(operator_key: str, called: torch._ops.OpOverload | None = None) -> bool:
    """True if some call of the operator draws random numbers; `called` is what a higher-order operator runs."""
    if operator_key in _CALLERS:
        return called is None or _static(called)[1]
    if operator_key in _OTHERS_RANDOM:
        return True
    namespace, separator, name = operator_key.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None) if separator else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return separator != ""  # unknown, because the subgraph of a higher-order operator decides
    return any(_static(getattr(packet, overload))[1] for overload in packet.overloads())


def may_have_effects(target: Any) -> bool:
    """False if no call of the target mutates, draws or is a barrier, except calls with `out=`."""
    return may_write(target) or may_draw(target)


def may_take_out(target: Any) -> bool:
    """False if no call of the target writes to a keyword `out=`, or its schema says so, as overloads' schemas do."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return keys.key(target) not in _CALLERS  # there it is an argument of the operator that they run
    return isinstance(target, str) or not (isinstance(target, torch._ops.OpOverload) or target in OPERATORS)


def may_write(target: Any) -> bool:
    """False if no call of the target mutates or is a barrier, except calls with `out=`; cached per target."""
    return (_EFFECTS.get(target) or _EFFECTS.set(target, _possible_effects(target)))[0]


def may_draw(target: Any) -> bool:
    """False if no call of the target draws random numbers; cached per target."""
    return (_EFFECTS.get(target) or _EFFECTS.set(target, _possible_effects(target)))[1]


def _possible_effects(target: Any) -> tuple[bool, bool]:
    """(may write, may draw)"""
    name = keys.key(target)
    if (
        target in _INPLACE_OPERATORS
        or target in _WRITING_FUNCTIONS
        or (not isinstance(target, str) and "inplace" in _python_parameters(target))
    ):
        return True, True
    if isinstance(target, torch._ops.OpOverload):
        mutable, seeded, _ = _static(target)
        return mutable or name in _STATISTICS or target in _side_effectful_functions, seeded
    if not name.startswith("aten::") or not hasattr(torch.ops.aten, name.removeprefix("aten::")):
        if target in _PURE or name in ("operator.getitem", "builtins.getattr") or name.startswith("math."):
            return False, False
        return not name.startswith(_PURE_MODULES) or name == "operator.setitem" or name.endswith("_"), True
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    effects = [_possible_effects(o) for o in overloads if not any(a.is_out for a in o._schema.arguments)]
    wrapper = keys.wrapper_of(target)
    inplace = bool(wrapper and wrapper.inplace)
    return inplace or any(writes for writes, _ in effects), any(draws for _, draws in effects)


def _is_idle(node: fx.Node) -> bool:
    """True if the arguments, or by default the schema, switch the randomness off; cached per spelling."""
    signature = signature_of(node.target, node.args, node.kwargs)
    if not _SWITCHES.isdisjoint(signature.given):
        return _switch_off(signature.bind(node.args, node.kwargs))
    found = _IDLE.get(signature)
    if found is None:
        found = _IDLE[signature] = _switch_off(signature.bind(node.args, node.kwargs))
    return found


_SWITCHES = frozenset({"train", "training", "dropout_p", "p", "dropout"})
_IDLE: dict[Signature, bool] = {}


def _switch_off(bound: dict[str, Any]) -> bool:
    if bound.get("train", True) is False or bound.get("training", True) is False:
        return True
    probability = bound.get("dropout_p", bound.get("p") if "train" in bound or "training" in bound else None)
    if "num_layers" in bound:  # recurrent networks draw between layers
        probability = bound["dropout"]
    return isinstance(probability, (int, float)) and probability == 0


def is_view(node: fx.Node) -> bool:
    """True if the result may share memory with an argument: views, `reshape`, `getitem`, dropout in evaluation,
    and operators that write to an argument.
    """
    if node.op not in ("call_function", "call_method"):
        return False
    overload = _overload(node)
    if overload is None:
        return node.target not in _PURE and keys.key(node) not in _CALLERS
    if keys.key(node) in _STATISTICS:
        return False  # the result is new, although running statistics are written
    return (_static(overload)[2] and not _is_new_dtype(node)) or bool(mutated(node))


def _is_new_dtype(node: fx.Node) -> bool:
    """True for a cast to another dtype, which copies."""
    if keys.key(node) not in _CASTS or not node.all_input_nodes:
        return False
    source, result = value(node.all_input_nodes[0]), value(node)
    are_known = isinstance(source, torch.Tensor) and isinstance(result, torch.Tensor)
    return are_known and source.dtype != result.dtype


def memory_origins(node: fx.Node) -> set[fx.Node]:
    """Returns the node and everything of which it may be a view."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in found:
            found.add(current)
            if is_view(current):
                stack += current.all_input_nodes
    return found


def is_maybe_view(node: fx.Node) -> bool:
    """True if strides or arguments at run time decide whether the result shares memory, or nothing is known."""
    if not is_view(node) or mutated(node) or keys.key(node) == "operator.getitem":
        return False
    overload = _overload(node)
    return overload is None or _MAYBE_VIEW in overload.tags or keys.key(node) in _MAYBE_VIEWS


def is_pure(node: fx.Node) -> bool:
    """True if the node may be removed, repeated or moved: no mutation, no randomness, no check that may raise."""
    if node.op in ("placeholder", "output", "call_module") or node.target in _side_effectful_functions:
        return False
    return not mutates(node) and not is_random(node)


def _overload(node: fx.Node) -> torch._ops.OpOverload | None:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target
    if "::" not in keys.key(node):
        return None
    try:
        return signature_of(node.target, node.args, node.kwargs).overload
    except BindingError:
        return None  # a higher-order operator, or a call that would fail when run: nothing is known


def _static(overload: torch._ops.OpOverload) -> tuple[bool, bool, bool]:
    facts = _STATIC.get(overload)
    if facts is None:
        schema = overload._schema
        shares = any(r.alias_info is not None for r in schema.returns)  # also an argument that it wrote to and returns
        facts = _STATIC[overload] = (
            schema.is_mutable,
            _SEEDED in overload.tags,
            shares or _MAYBE_VIEW in overload.tags or overload.is_view or keys.key(overload) in _MAYBE_VIEWS,
        )
    return facts


def _nodes_in(argument: Any) -> tuple[fx.Node, ...]:
    found: list[fx.Node] = []
    map_arg(argument, found.append)  # pyright: ignore[reportArgumentType]
    return tuple(found)
