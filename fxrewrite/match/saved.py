"""Whether autograd will find what new operators save for the backward pass as they saved it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import Reason, refuse
from fxrewrite.graph.edit import Edit
from fxrewrite.match.match import Match
from fxrewrite.match.safety import Effects

__all__ = ["check_saved"]


def check_saved(
    edit: Edit, match: Match, results: Sequence[fx.Node], created: Iterable[fx.Node], effects: Effects
) -> None:
    """Refuses new operators that save what a later node writes to, unless the original saves it too.

    Autograd raises in the backward pass then: `tanh` saves its result, and `y.mul_(2)` writes to it. Calls of which it
    is not known what they write to, such as `register_hook`, are taken to write to nothing here.

    Raises:
        RefusedError: such a node writes, or may write, to what would be saved.
    """
    replaced = [(old, new) for old, new in zip(match.outputs, results, strict=True) if _requires_gradient(old)]
    if not replaced or next(effects.after(effects.writers, min(match.outputs)), None) is None:
        return
    own = [node for node in match.nodes if node not in match.kept]
    known = ops.memory_origins(*(node for old in own for node in edit.saved_for_backward(old)))
    for node in created:
        for saved in edit.saved_for_backward(node):
            memory = ops.memory_origins(saved)
            memory |= {old for old, new in replaced if saved in ops.memory_origins(new) and old not in known}
            writer = effects.later_writer(min(match.outputs), memory - known, is_known=True)
            if writer is not None:
                what = "its result" if saved is node else f"%{saved.name}"
                refuse(
                    f"the replacement's {ops.key(node)} saves {what} for the backward pass, and "
                    f"%{writer.name} ({ops.key(writer)}) writes to it later",
                    hint="functionalize the graph before rewriting it, or give the replacement a copy",
                    node=match.root,
                    kind=Reason.ALIAS,
                    effect=ops.key(writer),
                )


def _requires_gradient(node: fx.Node) -> bool:
    """Whether a value requires gradients, or may: only Dynamo's values say it."""
    unsaid = ops.value_key(node) == "val"
    found = ops.tensors_of(node)
    return torch.is_grad_enabled() and any(value.requires_grad or (unsaid and ops.is_inexact(value)) for value in found)
