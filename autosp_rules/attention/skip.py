"""Every attention but the last computes nothing, to measure in less time whether a length fits into memory.

    attention(q, k, v, ...)  ->  skipped_attention(q, k, v)

Matches the final form of every kind of attention, on local shapes and after all other rules. Communication before and
after a call is kept, and so is what layers save, by the tags of the call. Only what a ring sends inside a call is not
sent. The backward saves q, k, v, the result and its logsumexp, as attention does; masks are not saved.
A call whose result does not have the dimensions of q is left alone.
Shapes: q [..., H, S, E], k [..., KV, T, E], v [..., KV, T, D] -> out [..., H, S, D], lse [..., H, S].
Numerics: none; results and gradients are not the model's, and the report says so first.
Source: DeepSpeed, deepspeed/runtime/sequence_parallel/ulysses_sp.py (skip_all_but_last_attention_debug_mode).
"""

from __future__ import annotations

from operator import getitem
from typing import Any, Literal

import torch
from torch import fx

from fxrewrite import DeadCode, Edit, Event, Report, RuleSet
from fxrewrite.ops import key
from fxrewrite.spmd import is_same_size
from rules.attention.flops import ATTENTION_KEYS
from rules.attention.kernels import lse_dtype


@torch.library.custom_op("autosp::skipped_attention", mutates_args=())
def skipped_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns zeros in the shapes of attention's result and the logsumexp of its scores; see the shapes above."""
    *outer, length, _ = q.shape
    out = q.new_zeros(*outer[:-1], length, *outer[-1:], v.shape[-1])  # strides as attention's: heads follow rows
    return out.transpose(-3, -2) if outer else out, q.new_zeros(q.shape[:-1], dtype=lse_dtype(q.dtype))


@torch.library.custom_op("autosp::skipped_attention_backward", mutates_args=())
def skipped_attention_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns zeros in the shapes of the gradients of q, k and v."""
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@skipped_attention.register_fake
def _(q: Any, k: Any, v: Any) -> Any:
    return skipped_attention._init_fn(q, k, v)


@skipped_attention_backward.register_fake
def _(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _gradients(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
    return skipped_attention_backward(dout, *ctx.saved_tensors)


skipped_attention.register_autograd(_gradients, setup_context=_save)
SKIPPED = torch.ops.autosp.skipped_attention.default


class AttentionSkipped(Event, frozen=True):
    """Results and gradients are not the model's, since calls of attention compute nothing."""

    kind: Literal["skipped attention"] = "skipped attention"
    num_skipped: int
    num_calls: int

    def __str__(self) -> str:
        return (
            f"RESULTS AND GRADIENTS ARE NOT THE MODEL'S: {self.num_skipped} of {self.num_calls} attentions compute "
            "nothing (skip_all_but_last_attention), to measure memory alone"
        )


class SkipAllButLast:
    """A step that replaces every attention of the graph but the last by `skipped_attention`."""

    name = "skip_all_but_last_attention"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Replaces the attentions, puts a warning first in the report, and returns how many were replaced."""
        attentions = [node for node in edit.nodes() if key(node) in ATTENTION_KEYS]
        skipped = [node for node in attentions[:-1] if _is_like_q(node)]
        for node in skipped:
            made = edit.call(SKIPPED, node.args[:3], after=node, like=node, rule=self.name)
            if isinstance(node.meta["val"], torch.Tensor):
                made = edit.call(getitem, (made, 0), after=made, like=node, rule=self.name)
            edit.replace_uses(node, made)
            edit.erase(node)
        report.events.insert(0, AttentionSkipped(num_skipped=len(skipped), num_calls=len(attentions)))
        return len(skipped)

    def text(self) -> str:
        return "every attention but the last returns zeros"


def _is_like_q(node: fx.Node) -> bool:
    """Whether the result has the dimensions of q, except the last."""
    value: Any = node.meta["val"]
    out = value if isinstance(value, torch.Tensor) else value[0]
    q: Any = node.all_input_nodes[0].meta["val"]
    return out.dim() == q.dim() and all(map(is_same_size, out.shape[:-1], q.shape[:-1]))


SKIP_ALL_BUT_LAST = RuleSet("skip_attention", SkipAllButLast(), DeadCode("drop_skipped_masks"))
