"""Tensors that a replacement computes once, when its rule is applied, of what the graph's module holds.

match.once(torch.cat, [a, b])   ->   self.layers_0_merged, a buffer, and a node that reads it
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.errors import Reason, RuleDefinitionError, refuse
from fxrewrite.graph.argument_keys import identity_of
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.walk import operands_first
from fxrewrite.match.match import Match
from fxrewrite.match.safety import Effects

Held = Mapping[str, torch.Tensor]


def compute_once(
    match: Match,
    effects: Effects,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    name: str | Sequence[str],
    rule: str,
    gradients: bool,
) -> fx.Node | tuple[fx.Node, ...]:
    """Returns nodes that read the tensors which `function` gives for the entries that `args` have now.

    Args:
        match: what is rewritten.
        effects: of its graph.
        function: of tensors and Python values; gives a tensor, or several.
        args, kwargs: nodes, tensors and Python values, also in lists.
        name: of the attribute, or of each; before it comes the path that all sources have in common.
        rule: the id of the rule.
        gradients: whether the rule keeps gradients.

    Raises:
        RefusedError: a node is not computed of what the module holds alone, or the tensors may change or be trained.
        RuleDefinitionError: the function writes to its arguments, or gives something else than tensors.
    """
    edit: Edit = match.edit
    held: dict[str, torch.Tensor] = {}
    computed: dict[fx.Node, Any] = {}
    args, kwargs = map_arg((args, dict(kwargs)), lambda node: _entries(edit, node, held, computed))  # pyright: ignore[reportArgumentType]
    _check_unwritten(match, effects, held)
    _check_untrained(match, held, gradients)
    known = edit.shared("computed once", dict[Any, tuple[Any, Any]])
    is_value = isinstance(function, Hashable)  # pyright: ignore[reportUnnecessaryIsInstance]
    same: Any = function if is_value else id(function)
    key = same, identity_of(args), identity_of(kwargs)  # values of equal calls are kept alive below
    if key in known:
        made = known[key][1]  # unless a savepoint undid it, or a rule erased it
        if all(node in edit.computed and node not in edit.erased for node in _listed(made)):
            return made
    owned, is_one = _computed(function, args, kwargs, held)
    nodes: list[fx.Node] = []
    words = [name or rule.rpartition(".")[2]] * len(owned) if isinstance(name, str) else list(name)
    if len(words) != len(owned):
        raise RuleDefinitionError(f"{_named(function)} gave {len(owned)} tensors, and there are {len(words)} names")
    for tensor, word in zip(owned, words, strict=True):
        node = edit.attach(tensor, _attribute_name(held, word))
        node.meta["fxrewrite"] = (rule,)
        edit.computed[node] = rule, tuple(held)
        nodes.append(node)
    made = nodes[0] if is_one else tuple(nodes)
    known[key] = (function, args, kwargs), made
    return made


def _computed(function: Callable[..., Any], args: Any, kwargs: Any, held: Held) -> tuple[list[torch.Tensor], bool]:
    """Returns the tensors that the function gives, with memory of their own, and whether it gave one and no list."""
    before = {path: _version(tensor) for path, tensor in held.items()}
    with unset_fake_temporarily(), torch.inference_mode(mode=False), torch.no_grad():
        result = function(*args, **kwargs)
        written = [path for path, tensor in held.items() if _version(tensor) != before[path]]
        if written:
            raise RuleDefinitionError(
                f"{_named(function)}, which is computed once, wrote to self.{written[0]}; the module is changed, so "
                "load it again, and let the function give a new tensor"
            )
        is_one = not isinstance(result, (list, tuple))
        parts: list[Any] = [result] if is_one else list(result)
        if not parts or not all(isinstance(part, torch.Tensor) for part in parts):
            raise RuleDefinitionError(
                f"{_named(function)}, which is computed once, gave {type(result).__name__}; expected a tensor, or a "
                "tuple of tensors"
            )
        return [_own(part, held) for part in parts], is_one


def _entries(edit: Edit, node: fx.Node, held: dict[str, torch.Tensor], computed: dict[fx.Node, Any]) -> Any:
    """Returns the value of a node that depends on what the module holds alone, and notes in `held` what that is."""
    for read in operands_first(node, lambda node: () if node in computed else node.all_input_nodes):
        if read not in computed:
            computed[read] = _entries_of(edit, read, held, computed)
    return computed[node]


def _entries_of(edit: Edit, node: fx.Node, held: dict[str, torch.Tensor], computed: Mapping[fx.Node, Any]) -> Any:
    """The same for a node whose operands are computed."""
    if node.op == "get_attr":
        found = ops.held(edit.gm, node)
        if not isinstance(found, torch.Tensor):
            _refuse(node, f"%{node.name} is a {type(found).__name__} and not a tensor", "compute it in the graph")
        if not ops.has_data(found):
            _refuse(
                node,
                f"self.{node.target} has no entries ({'a fake tensor' if not found.is_meta else 'on device meta'})",
                "load the weights before the rule is applied",
            )
        held[str(node.target)] = found
        return found
    if node.op == "placeholder":
        _refuse(
            node,
            f"%{node.name} is an input of the graph, and is known only when the graph runs",
            "apply the rule where weights are attributes: to torch.export.export(...).module() or to "
            "torch.fx.symbolic_trace(...); torch.compile passes them as inputs, and there the rule has to compute the "
            "tensor in the graph",
        )
    if node.op == "call_module" or not ops.is_pure(node) or ops.is_per_rank(node.target):
        _refuse(node, f"%{node.name} may be another value in every run", "compute the tensor in the graph")
    args, kwargs = map_arg((node.args, dict(node.kwargs)), computed.__getitem__)  # pyright: ignore[reportArgumentType]
    function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    with unset_fake_temporarily(), torch.inference_mode(mode=False), torch.no_grad():
        return function(*args, **kwargs)  # pyright: ignore[reportCallIssue]


def _check_unwritten(match: Match, effects: Effects, held: Held) -> None:
    """Refuses tensors that the graph writes to, or may write to: what is computed of them would be of old entries."""
    edit: Edit = match.edit
    memory = {_memory(tensor): path for path, tensor in held.items()}
    for writer in effects.writers:
        if writer in edit.erased or (writer in match.nodes and writer not in match.kept):
            continue
        if writer.op == "call_module":
            reached: Iterator[Any] = iter(edit.gm.get_submodule(str(writer.target)).state_dict(keep_vars=True).values())
        else:
            read = writer.all_input_nodes if ops.is_barrier(writer) else ops.mutated(writer)
            origins = {origin for node in read for origin in ops.memory_origins(node) if origin.op == "get_attr"}
            reached = (ops.held(edit.gm, origin) for origin in origins)
        for tensor in reached:
            path = memory.get(_memory(tensor)) if isinstance(tensor, torch.Tensor) else None
            if path is not None:
                _refuse(
                    writer,
                    f"%{writer.name} ({ops.key(writer)}) may write to self.{path}, of which a tensor is computed once",
                    "compute it in the graph, or make the model not write to it (eval())",
                    kind=Reason.EFFECT,
                )


def _check_untrained(match: Match, held: Held, gradients: bool) -> None:
    """Refuses tensors that are trained, as no gradient goes through what is computed once."""
    trained = next((path for path, tensor in held.items() if tensor.requires_grad), None)
    if gradients and trained is not None:
        _refuse(
            match.root,
            f"self.{trained} requires gradients, and what is computed of it once has none",
            "call requires_grad_(False) on the module, or declare gradients=False on the rule, then for inference",
        )


def _refuse(node: fx.Node, reason: str, hint: str, kind: Reason = Reason.ONCE) -> NoReturn:
    refuse(reason, hint=hint, node=node, kind=kind)


def _attribute_name(held: Held, word: str) -> str:
    """Returns `layers_0_merged` for the word and tensors of which all are in `layers.0`."""
    atoms = zip(*(path.split(".")[:-1] for path in held), strict=False)
    common = [names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, atoms)]
    found = re.sub(r"\W", "_", "_".join([*common, word]))
    return found if found.isidentifier() else f"_{found}"


def _own(tensor: torch.Tensor, held: Held) -> torch.Tensor:
    """Returns the tensor without autograd history, in memory of its own."""
    is_part = _is_plain(tensor) and tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    is_shared = _memory(tensor) in map(_memory, held.values())
    return tensor.detach().clone() if is_part or is_shared else tensor.detach()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _memory(tensor: torch.Tensor) -> int:
    """Returns the address of the tensor's memory; of the tensor itself where it has none, or is of another class."""
    return (tensor.untyped_storage().data_ptr() if _is_plain(tensor) else 0) or id(tensor)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # pyright: ignore[reportPrivateUsage]


def _listed(value: Any) -> tuple[fx.Node, ...]:
    return value if isinstance(value, tuple) else (value,)


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", str(function))
