"""A head and its cross entropy are computed a tile of rows at a time, forward and backward, and the logits never held.

    cross_entropy(reshape(to(linear(x, w, b), float32), [-1, V]), t, ...)  ->  tiled_cross_entropy(x rows, w, b, t, ...)

Between the head and the loss may stand steps of rules/pointwise_steps.py on one value (casts, factors, tanh) and what
rearranges rows alone (reshape, slices, copies). The backward pass computes the logits of a tile again.
Matches where the loss alone reads the logits, and all of them take more bytes than a tile. Every reduction, ignored
indices, class weights, label smoothing; static and symbolic numbers of rows.
Does not match, in these words: "%linear is read elsewhere" (a model that returns its logits); "%x, aten::erf, is
between the head and the loss"; "the logits have rank 3"; "the targets are class probabilities"; "... fit into a tile".
Shapes: x [N, d], w [V, d], b [V], t [N] of int64 -> [] or [N].
Numerics: reassociates: a sum over tiles of sums over rows, and so the gradients of w and b, added up in float32 at
least. There is no second derivative.
Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009; PyTorch,
aten/src/ATen/native/LossNLL.cpp.

>>> import torch, torch.nn.functional as F
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def loss(x, w, t):
...     return F.cross_entropy(F.linear(x, w).float().view(-1, 5), t)
>>> x, w, t = torch.rand(2, 3, 4), torch.rand(5, 4), torch.zeros(6, dtype=torch.int64)
>>> gm = make_fx(loss, tracing_mode="fake", pre_dispatch=True)(x, w, t)
>>> tiled_loss_rules(tile_bytes=40).apply(gm).rewrites > 0
True
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import DeadCode, Literal, Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.graph import size_hint
from fxrewrite.ops import bind, fake_value, key
from rules.pointwise_steps import grads_of_steps, run_steps, step_of, why_no_step

__all__ = ["TILE_BYTES", "tiled_cross_entropy", "tiled_loss_rules"]

aten = torch.ops.aten
TILE_BYTES = 2**27
"""Bytes of logits that a tile holds by default."""
_REDUCTIONS = ("none", "mean", "sum")  # by the number that the operator takes


@torch.library.custom_op("fxrewrite_rules::tiled_cross_entropy", mutates_args=())
def tiled_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    steps: str,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    tile_bytes: int,
) -> torch.Tensor:
    """The cross entropy of the logits `steps(linear(x, weight, bias))`, a tile of rows at a time.

    Args:
        x: [N, d].
        weight: [V, d].
        bias: [V].
        target: int64 [N].
        class_weight: [V].
        steps: of the logits before the loss, as `rules.pointwise_steps` has it: "tanh(v0); to(v1, 'float32')".
        reduction: "none", "mean" or "sum".
        ignore_index: the target that does not count.
        label_smoothing: between 0 and 1.
        tile_bytes: bytes of logits that a tile holds; a tile has at least one row.
    """
    losses: list[torch.Tensor] = []
    for rows in _tiles(x, weight, steps, tile_bytes):
        logits = run_steps(steps, [F.linear(x[rows], weight, bias)])[-1]
        how = _REDUCTIONS.index("none" if reduction == "none" else "sum")
        losses.append(aten.cross_entropy_loss(logits, target[rows], class_weight, how, ignore_index, label_smoothing))
    dtype = _dtype_after(steps, x.dtype)
    if reduction == "none":
        return torch.cat(losses) if losses else x.new_empty(0, dtype=dtype)
    total = torch.stack(losses).sum(dtype=_sums(dtype)) if losses else x.new_zeros((), dtype=_sums(dtype))
    if reduction == "mean":
        total = total / _count(target, class_weight, ignore_index, total.dtype)
    return total.to(dtype)


@tiled_cross_entropy.register_fake
def _(x: Any, weight: Any, bias: Any, target: Any, class_weight: Any, steps: str, reduction: str, *_: Any) -> Any:
    shape = (x.shape[0],) if reduction == "none" else ()
    return x.new_empty(shape, dtype=_dtype_after(steps, x.dtype))


@torch.library.custom_op("fxrewrite_rules::tiled_cross_entropy_backward", mutates_args=())
def tiled_cross_entropy_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    steps: str,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    tile_bytes: int,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias, each empty where it is not wanted."""
    if reduction == "mean":
        grad = grad / _count(target, class_weight, ignore_index, grad.dtype)
    of_rows = grad.expand(target.shape)
    grads = [torch.zeros_like(t, dtype=_sums(t.dtype)) for t in _wanted(x, weight, bias, wanted)]
    for rows in _tiles(x, weight, steps, tile_bytes):
        values = run_steps(steps, [F.linear(x[rows], weight, bias)])
        counted = target[rows] != ignore_index
        scale = torch.where(counted, of_rows[rows], 0)
        of_loss = _grad_of_loss(values[-1], target[rows] * counted, scale, class_weight, label_smoothing)
        (of_logits,) = grads_of_steps(steps, values, of_loss)
        if wanted[0]:
            grads[0][rows] = of_logits @ weight
        if wanted[1]:
            grads[1] += of_logits.t() @ x[rows]
        if wanted[2]:
            grads[2] += of_logits.sum(0)
    made = [g.to(t.dtype) for g, t in zip(grads, _wanted(x, weight, bias, wanted), strict=True)]
    return made[0], made[1], made[2]


@tiled_cross_entropy_backward.register_fake
def _(grad: Any, x: Any, weight: Any, bias: Any, *others: Any) -> Any:
    return tuple(torch.empty_like(t) for t in _wanted(x, weight, bias, others[-1]))


def _wanted(x: Any, weight: Any, bias: Any, wanted: list[bool]) -> list[Any]:
    """What a gradient is made like, empty where none is wanted."""
    return [t if want else x.new_empty(0) for t, want in zip((x, weight, bias), wanted, strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.how = inputs[5:]


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    wanted = [bool(want) for want in ctx.needs_input_grad[:3]]
    made = tiled_cross_entropy_backward(grad, *ctx.saved_tensors, *ctx.how, wanted)
    return *(g if want else None for g, want in zip(made, wanted, strict=True)), *(None,) * 7


tiled_cross_entropy.register_autograd(_gradients, setup_context=_save)


def _tiles(x: torch.Tensor, weight: torch.Tensor, steps: str, tile_bytes: int) -> Iterator[slice]:
    """Rows that make one tile of logits, in order; the last tile may have fewer."""
    size = max(1, tile_bytes // _row_bytes(weight.shape[0], steps, x.dtype))
    yield from (slice(start, min(start + size, len(x))) for start in range(0, len(x), size))


def _row_bytes(classes: int, steps: str, dtype: torch.dtype) -> int:
    return classes * max(dtype.itemsize, _dtype_after(steps, dtype).itemsize)


def _sums(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over tiles are added up."""
    return torch.promote_types(dtype, torch.float32)


def _count(target: torch.Tensor, class_weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype) -> Any:
    counted = target != ignore_index
    if class_weight is None:
        return counted.sum().to(dtype)
    return (class_weight[target * counted] * counted).sum(dtype=dtype)


def _grad_of_loss(
    logits: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, class_weight: torch.Tensor | None, smoothing: float
) -> torch.Tensor:
    """The gradient of the sum over rows of `scale * cross_entropy`, by the operator that autograd takes for it."""
    of_target = (1 - smoothing) * (scale if class_weight is None else scale * class_weight[target])
    grad = torch.zeros_like(logits)
    if smoothing:
        grad -= smoothing / logits.shape[1] * scale[:, None] * (1 if class_weight is None else class_weight)
    grad.scatter_add_(1, target[:, None], -of_target[:, None].to(grad.dtype))
    return aten._log_softmax_backward_data(grad, torch.log_softmax(logits, -1), 1, logits.dtype)


def _dtype_after(steps: str, dtype: torch.dtype) -> torch.dtype:
    return run_steps(steps, [torch.empty(0, dtype=dtype, device="meta")])[-1].dtype


@dataclass(frozen=True, slots=True)
class _Head:
    """A linear layer, what is done to each of its logits, and the nodes that rearrange rows, all in order."""

    linear: fx.Node
    steps: str
    row_nodes: list[fx.Node]


_COPIES = {"aten::contiguous", "aten::clone", "aten::alias"}


def _head_of(logits: fx.Node) -> _Head | str:
    """What computes the logits of a loss, or why they cannot be computed in tiles."""
    step_nodes: list[fx.Node] = []
    row_nodes: list[fx.Node] = []
    node = logits
    while True:
        if len(node.users) > 1:
            return f"%{node.name} is read elsewhere"
        name = key(node)
        if name == "aten::linear":
            return _Head(node, _text(step_nodes[::-1]), row_nodes[::-1])
        if _rearranges_rows(node, name):
            row_nodes.append(node)
        elif len(node.all_input_nodes) == 1 and not why_no_step(node):
            step_nodes.append(node)
        elif name not in _COPIES:
            return f"%{node.name}, {name}, is between the head and the loss"
        node = node.all_input_nodes[0]


def _text(nodes: list[fx.Node]) -> str:
    """What the nodes do to each logit, one after the other."""
    return "; ".join(step_of(node, {node.all_input_nodes[0]: f"v{index}"}) for index, node in enumerate(nodes))


def _rearranges_rows(node: fx.Node, name: str) -> bool:
    """Whether the node gives other rows, or rows in another shape, of the same V logits each."""
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    if name in ("aten::reshape", "aten::view", "aten::flatten"):
        return after.shape[-1] == before.shape[-1] and isinstance(after.shape[-1], int)
    return name == "aten::slice" and bind(node)["dim"] % before.dim() != before.dim() - 1


@where.predicate("logits", "target", text="is_head_alone")
def _is_head_alone(logits: fx.Node, target: fx.Node) -> bool | str:
    if fake_value(target).is_floating_point():
        return "the targets are class probabilities"
    if fake_value(logits).dim() != 2:
        return f"the logits have rank {fake_value(logits).dim()}"
    head = _head_of(logits)
    return head if isinstance(head, str) else True


def _takes_more_than(tile_bytes: int) -> Any:
    @where.predicate("logits", text=f"takes_more_than[{tile_bytes} bytes]")
    def takes_more(logits: fx.Node) -> bool | str:
        value = fake_value(logits)
        taken = size_hint(value.numel()) * value.element_size()
        return taken > tile_bytes or f"the logits, {taken:,} bytes, fit into a tile"

    return takes_more


def tiled_loss_rules(tile_bytes: int = TILE_BYTES) -> RuleSet:
    """The set whose losses hold `tile_bytes` bytes of logits at once."""
    smoothing, ignored, reduction = (cap(name, Literal) for name in ("label_smoothing", "ignore_index", "reduction"))
    loss = op(
        "cross_entropy_loss",
        cap("logits"),
        cap("target"),
        cap("class_weight", "optional"),
        reduction,
        ignored,
        smoothing,
    )
    guards = (_is_head_alone, _takes_more_than(tile_bytes))
    tile = Rule("tiled_loss.tile", Pattern((loss,), guards), numerics="reassociates", optional=True)

    @tile.replacement
    def _(match: Match, target: Any, class_weight: Any) -> Any:
        """tiled_cross_entropy(x, w, b, target, ...)"""
        head = _head_of(match["logits"])
        assert isinstance(head, _Head), "the guard has looked"
        linear = bind(head.linear)
        w, b = match.proxy(linear["weight"]), linear.get("bias")
        x = _rows(match, match.proxy(linear["input"]), head)
        how = head.steps, _REDUCTIONS[match["reduction"]], match["ignore_index"], float(match["label_smoothing"])
        bias = None if b is None else match.proxy(b)
        return match.call(
            torch.ops.fxrewrite_rules.tiled_cross_entropy.default, x, w, bias, target, class_weight, *how, tile_bytes
        )

    return RuleSet("tiled_loss", tile, DeadCode("untiled_logits"))


def _rows(match: Match, x: Any, head: _Head) -> Any:
    """The rows of x of which the loss reads the logits, rearranged as these were."""
    for node in head.row_nodes:
        args = bind(node)
        if key(node) == "aten::slice":
            x = aten.slice(x, args["dim"], args["start"], args["end"], args["step"])
        elif key(node) == "aten::flatten":
            x = aten.flatten(x, args["start_dim"], args["end_dim"])
        else:
            *sizes, _ = args["shape"] if "shape" in args else args["size"]
            sizes = [match.proxy(size) if isinstance(size, fx.Node) else size for size in sizes]
            x = aten.reshape(x, [*sizes, head.linear.all_input_nodes[1].meta["val"].shape[1]])
    return x
