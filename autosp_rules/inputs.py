"""DeepSpeed's optional entry: marks and tags a batch before the first step."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["prepare_autosp_inputs"]


def prepare_autosp_inputs(
    input_id: Tensor | None,
    label_id: Tensor | None,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The four tensors, each with its sequence dimension marked dynamic and tagged with its role.

    Optional: without it the sequence is found by itself, and torch.compile makes the dimension dynamic when a second
    length comes. The tensors stay whole; every rank passes the same ones.

    Args:
        input_id: token ids, `[B, S]`.
        label_id: labels, `[B, S]`, not shifted.
        position_id: positions, `[B, S]`, or None to let the model count.
        attention_mask: `[B, S]`, or None.
        seq_dim: the dimension of size S.

    Raises:
        ValueError: ids or labels are missing, or `seq_dim` is not a dimension of one of the tensors.

    The signature is that of DeepSpeed's `deepspeed.compile.passes.sp_compile.prepare_autosp_inputs`.
    """
    if input_id is None:
        raise ValueError("prepare_autosp_inputs: input_id is required; pass the token ids [B, S]")
    if label_id is None:
        raise ValueError("prepare_autosp_inputs: label_id is required; pass the labels [B, S], not shifted")
    named = {"input_id": input_id, "label_id": label_id, "position_id": position_id, "attention_mask": attention_mask}
    present = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name, tensor in present.items():
        if not 0 <= seq_dim < tensor.dim():
            raise ValueError(
                f"prepare_autosp_inputs: seq_dim {seq_dim} is not a dimension of {name}, whose shape is "
                f"{tuple(tensor.shape)}; use one of 0 to {tensor.dim() - 1}"
            )
    for name, tensor in present.items():
        torch._dynamo.mark_dynamic(tensor, seq_dim)
        tensor.tag = name  # pyright: ignore[reportAttributeAccessIssue]
    return input_id, label_id, position_id, attention_mask
