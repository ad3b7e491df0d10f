"""Inputs of a model: checks of their names, and DeepSpeed's optional function that prepares a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autosp_rules.errors import AutoSPError


def why_not_called(model: Callable[..., Any], inputs: Mapping[str, Any]) -> AutoSPError | None:
    """Returns the error of a model that cannot be called as `model(**inputs)`, by the names of its arguments, or None.

    Only for a call that failed: hooks and decorators may accept names that the signature does not show.
    """
    function = model.forward if isinstance(model, nn.Module) else model
    name = f"{type(model).__name__}.forward" if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    if not isinstance(inputs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        return AutoSPError.of(f"the inputs are a {type(inputs).__name__}", hint="pass a mapping: {name: value}")
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_all else sorted(set(inputs) - {p.name for p in named})
    missing = [p.name for p in named if p.default is p.empty and p.name not in inputs]
    said = [f"takes no argument {', '.join(unknown)}"] if unknown else []
    said += [f"is called without {', '.join(missing)}"] if missing else []
    if not said:
        return None
    takes = ", ".join(p.name if p.default is p.empty else f"{p.name} (optional)" for p in named)
    return AutoSPError.of(f"{name} {' and '.join(said)}", hint=f"its arguments are {takes or 'none'}")


def prepare_autosp_inputs(
    input_id: Tensor | None,
    label_id: Tensor | None = None,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the four tensors, with their sequence dimension marked dynamic and each tagged with its role.

    Optional: without it AutoSP finds the sequence itself, and torch.compile makes the dimension dynamic when a second
    length occurs. The tensors stay whole; every rank passes the same ones. A length at which the model takes another
    path, such as that of its whole mask, gets a program of its own.

    Args:
        input_id: token ids, `[B, S]`.
        label_id: labels, `[B, S]`, not shifted, or None if the model takes its labels from the ids.
        position_id: positions, `[B, S]`, or None to let the model count.
        attention_mask: `[B, S]`, or None.
        seq_dim: the dimension of size S.

    Raises:
        ValueError: ids are missing, or `seq_dim` is not a dimension of one of the tensors.

    The signature is that of DeepSpeed's `deepspeed.compile.passes.sp_compile.prepare_autosp_inputs`, which requires
    labels.
    """
    if input_id is None:
        raise ValueError("prepare_autosp_inputs: input_id is required; pass the token ids [B, S]")
    named = {"input_id": input_id, "label_id": label_id, "position_id": position_id, "attention_mask": attention_mask}
    present = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name, tensor in present.items():
        if not 0 <= seq_dim < tensor.dim():
            raise ValueError(
                f"prepare_autosp_inputs: seq_dim {seq_dim} is not a dimension of {name}, whose shape is "
                f"{tuple(tensor.shape)}; use one of 0 to {tensor.dim() - 1}"
            )
    for name, tensor in present.items():
        torch._dynamo.maybe_mark_dynamic(tensor, seq_dim)
        tensor.tag = name  # pyright: ignore[reportAttributeAccessIssue]
    return input_id, label_id, position_id, attention_mask
