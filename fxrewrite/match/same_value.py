"""Checks whether a replacement gives what it replaces: shape, dtype, device, strides and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason, refuse
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import is_same_size
from fxrewrite.graph.walk import reached
from fxrewrite.match.match import Match
from fxrewrite.match.safety import Effects
from fxrewrite.match.strides import Replaced, after_strides, is_alike
from fxrewrite.pattern.terms import tensor_text


def check_values(
    edit: Edit, replaced: Iterable[tuple[fx.Node, fx.Node]], effects: Effects, own: Iterable[Iterable[fx.Node]]
) -> dict[fx.Node, Any]:
    """Refuse replacements with another shape, dtype or device, or with other strides if a reader depends on them.

    Returns what later nodes become, as they have other strides then.

    Args:
        edit: the transaction.
        replaced: pairs of a node and what replaces it.
        effects: what the graph writes.
        own: groups of nodes that keep what they read: those of the replacement, and of the match.
    """
    changed: list[tuple[fx.Node, Any, Any]] = []
    for old, new in replaced:
        was, is_now = ops.value(old), ops.value(new)
        if was is not is_now and was is not ops.MISSING and is_now is not ops.MISSING:
            _check_shape(old, was, is_now)
            changed.append((old, was, is_now))
    if not changed:
        return {}
    kept = set(itertools.chain(*own))
    found = after_strides(edit, [Replaced(old, now, old.users.keys() - kept) for old, _, now in changed], effects)
    if isinstance(found, fx.Node):
        old, was, is_now = next((one for one in changed if not is_alike(one[1], one[2])), changed[0])
        refuse(
            f"the replacement has strides {_strides(is_now)}, the original {_strides(was)}, and "
            f"%{found.name} ({ops.key(found)}) depends on them",
            hint="make the replacement contiguous, or turn views into reshapes first (rules.canonical.normal_forms)",
            node=old,
            kind=Reason.VALUE,
        )
    return found


def check_parts(old: fx.Node, new: Sequence[fx.Node]) -> None:
    """Refuse nodes that replace a list, and whose values are not those of its items."""
    was = ops.value(old)
    if was is not ops.MISSING:
        _check_shape(old, was, [ops.value(item) for item in new])


def _check_shape(old: fx.Node, was: Any, is_now: Any) -> None:
    """Refuse a replacement with another shape, dtype or device."""
    if isinstance(was, (list, tuple)) and isinstance(is_now, (list, tuple)):
        if len(was) != len(is_now):
            reason = f"the replacement gives {len(is_now)} values, the original {len(was)}"
            refuse(reason, hint="repair the replacement", node=old, kind=Reason.VALUE)
        for one, other in zip(was, is_now, strict=True):
            _check_shape(old, one, other)
        return
    if was is is_now:
        return
    if not isinstance(was, torch.Tensor) or not isinstance(is_now, torch.Tensor):
        if isinstance(was, (torch.Tensor, list, tuple)) or isinstance(is_now, (torch.Tensor, list, tuple)):
            reason = f"the replacement gives {_kind(is_now)}, the original {_kind(was)}"
            one_of_many = isinstance(was, torch.Tensor) and isinstance(is_now, (list, tuple))
            hint = "return one of the values, result[0]" if one_of_many else "repair the replacement"
            refuse(reason, hint=hint, node=old, kind=Reason.VALUE)
        return
    same_shape = was.ndim == is_now.ndim and all(
        a is b or is_same_size(a, b) for a, b in zip(was.shape, is_now.shape, strict=True)
    )
    if same_shape and was.dtype == is_now.dtype and was.device == is_now.device:
        return
    new, old_one = (f"{tensor_text(one)} on {one.device}" for one in (is_now, was))
    refuse(
        f"the replacement gives {new}, the original {old_one}",
        hint='repair the replacement, or declare shapes="changes" on the rule',
        node=old,
        kind=Reason.VALUE,
    )


def _strides(value: Any) -> str:
    """Describes the strides of a tensor, or of each in a list, and where in its memory it begins if not at 0."""
    if not isinstance(value, torch.Tensor):
        return ", ".join(map(_strides, value))
    offset = value.storage_offset()
    return f"{tuple(value.stride())}" + ("" if is_same_size(offset, 0) else f" from offset {offset} on")


def needs_detach(edit: Edit, old: fx.Node, new: fx.Node, effects: Effects) -> bool:
    """Whether gradients would flow through `new`, a value of the graph, where none flowed through `old`.

    That was made under `torch.no_grad()`, then. They do flow there through an operator that returns its operand itself,
    as `x.contiguous()` may.
    """
    is_now = ops.value(new)
    if not isinstance(is_now, torch.Tensor) or not (is_now.is_floating_point() or is_now.is_complex()):
        return False
    if not effects.is_without_gradients(old) or effects.is_without_gradients(new):
        return False
    node = old
    while node is not new and edit.values.returns_operand(node):
        node = node.all_input_nodes[0]
    return node is not new


def check_gradients(edit: Edit, match: Match) -> None:
    """Refuse a match whose result requires gradients, or may require some, in a graph without values."""
    for node in match.outputs:
        value = ops.value(node)
        if isinstance(value, torch.Tensor) and (value.requires_grad or _is_computed_of_trained(node)):
            hint = "compile under torch.no_grad(), or give the operator a derivative"
            refuse("gradients are needed here, and the rule keeps none (gradients=False)", hint=hint, node=node)
        if value is ops.MISSING and (trained := _trained(edit)):
            refuse(
                f"the module is in training mode and self.{trained} requires gradients; the rule is for inference "
                "(gradients=False)",
                hint="call eval() on the module, or requires_grad_(False)",
                node=node,
            )


def _is_computed_of_trained(node: fx.Node) -> bool:
    """Whether a node of a normalized graph, whose values do not say it, is computed of what requires gradients.

    Inputs of such a graph also have the values that Dynamo gave them.
    """
    if ops.value_key(node) != "val" or not torch.is_grad_enabled():
        return False
    inputs = [one for one in node.graph.find_nodes(op="placeholder") if "example_value" in one.meta]
    trained = {one for one in inputs if getattr(one.meta["example_value"], "requires_grad", False)}
    return bool(trained) and not trained.isdisjoint(reached([node]))


def _trained(edit: Edit) -> str:
    """Returns the first parameter or buffer that requires gradients, if a module around the graph trains; else ""."""
    training = edit.gm.training
    while edit.around is not None:
        edit = edit.around
        training = training or edit.gm.training
    held = itertools.chain(edit.gm.named_parameters(), edit.gm.named_buffers())
    return next((name for name, tensor in held if tensor.requires_grad), "") if training else ""


def check_dtypes(match: Match, created: Sequence[fx.Node]) -> None:
    """Refuse a call that computes a fake value, and whose kernel would raise: it takes operands of one dtype."""
    for node in created:
        dtypes = ops.clashing_dtypes(node) if isinstance(node.target, torch._ops.OpOverload) else {}
        if dtypes:
            said = ", ".join(f"{name} {ops.dtype_name(dtype)}" for name, dtype in dtypes.items())
            refuse(
                f"the replacement calls {ops.key(node)}, which takes one dtype, found {said}",
                hint="cast the operands in the replacement, or add a constraint same_dtype(...)",
                node=match.root,
                kind=Reason.VALUE,
            )


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
