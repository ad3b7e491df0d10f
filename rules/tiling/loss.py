"""A head and its cross entropy are computed a tile of rows at a time; all logits, or their gradient, are never held.

    cross_entropy(reshape(to(linear(x, w, b), float32), [-1, V]), t, ...)  ->  tiled_cross_entropy(x rows, w, b, t, ...)

Between the head and the loss there may be steps of `rules.tiling.steps` on one value (casts, factors, tanh) and
operators that only rearrange rows (reshape, slices, copies). If autograd needs gradients, a tile of logits gives its
loss and the gradients of x, w and b for a sum of losses, and the backward pass multiplies them by the incoming
gradient: the product with w is computed once. With reduction "none" each row has its own factor, so the backward pass
computes the tiles again.
Matches where the loss alone reads the logits, and all of them take more bytes than a tile, as a symbolic number of rows
may). Supports every reduction, ignored indices, class weights, label smoothing.
Does not match, in these words: "%linear is read elsewhere" (a model that returns its logits); "%x, aten::cumsum,
is between the head and the loss"; "%table is not computed by a linear"; "the weight of %linear is not a matrix"; "the
logits have rank 3"; "the targets are class probabilities"; "... fit into a tile".
Shapes: x [N, d], w [V, d], b [V], t [N] of int64 -> [] or [N].
Numerics: reassociates: the gradient of the loss is a factor that is applied last, to gradients that are in bfloat16 if
w is; those of w and b are sums over tiles in at least float32. There is no second derivative.
Source: Hsu et al., Liger Kernel, arXiv 2410.10989 (fused linear cross entropy); Wijmans et al., Cut Your Losses in
Large-Vocabulary Language Models, arXiv 2411.09009; PyTorch, aten/src/ATen/native/LossNLL.cpp.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite import DeadCode, Literal, Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.graph import Size, product
from fxrewrite.ops import bind, fake_value, has_trait, key, vjp_inside
from fxrewrite.report import bytes_text
from fxrewrite.spmd import Call, declare_product
from rules.tiling.steps import dtype_after, keeps_columns, run_steps, step_of, why_no_step, without_last_cast
from rules.tiling.tiles import TILE_BYTES, is_more_than_a_tile, rows_of_tile, tiles, type_of_sums

aten = torch.ops.aten
_FEWEST_ROWS = 256
"""Rows beyond which larger tiles stop being faster."""
_REDUCTIONS = ("none", "mean", "sum")  # indexed by the operator's `reduction`


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
    """Computes the cross entropy of the logits `steps(linear(x, weight, bias))`, a tile of rows at a time.

    Args:
        x: [N, d].
        weight: [V, d].
        bias: [V].
        target: int64 [N].
        class_weight: [V].
        steps: applied to the logits before the loss, as in `rules.tiling.steps`: "tanh(v0); to(v1, 'float32')".
        reduction: "none", "mean" or "sum".
        ignore_index: the target that does not count.
        label_smoothing: between 0 and 1.
        tile_bytes: upper limit of bytes of logits per tile. A tile has at least one row, and at most an eighth of all
            rows, if that is more than 256 and more than d.
    """
    is_sum = reduction != "none"
    asks = is_sum and torch.is_grad_enabled()
    wanted = [asks and t is not None and t.requires_grad for t in (x, weight, bias)]
    how = steps, ignore_index, label_smoothing, tile_bytes, is_sum, wanted
    loss, *_ = tiled_cross_entropy_with_grads(x, weight, bias, target, class_weight, None, *how)
    if reduction == "mean":
        loss = loss / _count(target, class_weight, ignore_index, loss.dtype)
    return loss.to(dtype_after(steps, x.dtype))


# CompositeImplicitAutograd: it stays one node of a graph, and when it runs it sees which operands require gradients.
_NAME = "fxrewrite_rules::tiled_cross_entropy"
torch.library.define(_NAME, torch.library.infer_schema(tiled_cross_entropy, mutates_args=()))
torch.library.impl(_NAME, "CompositeImplicitAutograd")(tiled_cross_entropy)


def _operations(call: Call, count: Callable[[Size], int]) -> float:
    return 2.0 * count(call.shape()[0]) * count(product(call.shape(1)))


declare_product(_NAME, _operations)


@torch.library.custom_op("fxrewrite_rules::tiled_cross_entropy_with_grads", mutates_args=())
def tiled_cross_entropy_with_grads(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    factors: torch.Tensor | None,
    steps: str,
    ignore_index: int,
    label_smoothing: float,
    tile_bytes: int,
    is_sum: bool,
    wanted: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the losses of rows or their sum, and the gradients of the sum of `factors * losses`.

    Args:
        factors: [N]; None means all ones.
        is_sum: whether the first result is the sum, in at least float32.
        wanted: which of the gradients of x, weight and bias to compute; the others are empty.
    """
    # keeps temporaries small even if all rows fit into a tile
    eighth = max(_FEWEST_ROWS, weight.shape[1], -(-len(x) // 8))
    parts = list(tiles(len(x), min(eighth, rows_of_tile(_row_bytes(weight, steps, x), tile_bytes))))
    of_x, of_weight, of_bias = _grads(x, weight, bias, wanted, sums_of=len(parts))
    losses = x.new_empty(len(x), dtype=dtype_after(steps, x.dtype))
    counted = target != ignore_index
    factors = None if factors is None else torch.where(counted, factors, 0)
    how = _How(class_weight, *without_last_cast(steps), ignore_index, label_smoothing)

    def run(rows: slice) -> None:
        """Adds one tile. A function, so that its temporaries are freed before the next tile is computed."""
        of_rows = None if factors is None else factors[rows, None]
        losses[rows], of_logits = _losses_and_grad(
            F.linear(x[rows], weight, bias), target[rows], of_rows, how, any(wanted)
        )
        if of_logits is None:
            return
        # Factors of 0 and 1 are those of few columns of x, not of V logits, and round nothing.
        kept = counted[rows, None].to(x.dtype)
        if wanted[2]:
            of_logits = of_logits * kept
        if wanted[0]:
            of_x[rows] = (of_logits @ weight).mul_(kept)
        is_first = rows.start == 0  # what it writes over may be anything
        if wanted[1] and of_weight.dtype == x.dtype:
            of_weight.addmm_(of_logits.t(), x[rows] * kept, beta=0 if is_first else 1)
        elif wanted[1]:
            product = _product_of_many(of_logits.t(), x[rows] * kept)
            of_weight.copy_(product) if is_first else of_weight.add_(product)
        if wanted[2]:
            total = of_logits.sum(0, dtype=of_bias.dtype)
            of_bias.copy_(total) if is_first else of_bias.add_(total)

    for rows in parts:
        run(rows)
    grads = of_x, of_weight.to(_type_of_grad(x.dtype)), of_bias
    if not len(x):
        for grad in grads:
            grad.zero_()
    return losses.sum(dtype=type_of_sums(losses.dtype)) if is_sum else losses, *grads


@tiled_cross_entropy_with_grads.register_fake
def _(x: Any, weight: Any, bias: Any, target: Any, class_weight: Any, factors: Any, steps: str, *others: Any) -> Any:
    is_sum, wanted = others[-2:]
    dtype = dtype_after(steps, x.dtype)
    loss = x.new_empty((), dtype=type_of_sums(dtype)) if is_sum else x.new_empty(x.shape[0], dtype=dtype)
    return loss, *_grads(x, weight, bias, wanted)


def _grads(
    x: Any, weight: Any, bias: Any, wanted: list[bool], sums_of: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocates the gradients, that of weight as the sum of so many; those that are not wanted have no entry."""
    of_weight = _type_of_grad(x.dtype) if sums_of < 2 else type_of_sums(x.dtype)
    return (
        x.new_empty(x.shape if wanted[0] else 0),
        x.new_empty(weight.shape if wanted[1] else 0, dtype=of_weight),
        x.new_empty(bias.shape if wanted[2] else 0, dtype=type_of_sums(x.dtype)),
    )


def _product_of_many(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a @ b, in float32 if they are in float16, which may not hold a sum over rows."""
    if a.dtype != torch.float16:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _type_of_grad(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the gradient of a sum of losses, which float16 may not hold before a mean divides it."""
    return torch.float32 if dtype == torch.float16 else dtype


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Saves the gradients if they were computed, else the inputs to compute them from."""
    x, weight, bias, target, class_weight, _, *ctx.how, wanted = inputs
    _, ignore_index, *_ = ctx.how
    ctx.is_made = all(want or not need for want, need in zip(wanted, ctx.needs_input_grad, strict=False))
    made = (target == ignore_index).all(), *output[1:]
    ctx.save_for_backward(*(made if ctx.is_made else (x, weight, bias, target, class_weight)))
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: torch.Tensor, *of_grads: torch.Tensor | None) -> tuple[Any, ...]:
    if any(of_grad is not None for of_grad in of_grads):
        raise RuntimeError("tiled_cross_entropy has no second derivative: take that of the loss of all logits")
    wanted = [bool(need) for need in ctx.needs_input_grad[:3]]
    if ctx.is_made:
        is_empty, *of_one = ctx.saved_tensors
        grad = torch.where(is_empty, 0, grad)  # a mean over no rows divides by 0
        made = [g * grad.expand_as(g) for g in of_one]  # expanded, because a 0-dim factor would be rounded to bfloat16
    else:
        target = ctx.saved_tensors[3]
        _, *made = tiled_cross_entropy_with_grads(*ctx.saved_tensors, grad.expand_as(target), *ctx.how, wanted)
    grads = (g.to(dtype) if want else None for g, dtype, want in zip(made, ctx.dtypes, wanted, strict=True))
    return *grads, *(None,) * 9


tiled_cross_entropy_with_grads.register_autograd(_gradients, setup_context=_save)


def _row_bytes(weight: torch.Tensor, steps: str, x: torch.Tensor) -> int:
    """Bytes per row of logits, before or after the steps, whichever is more."""
    return weight.shape[0] * max(x.element_size(), dtype_after(steps, x.dtype).itemsize)


def _count(target: torch.Tensor, class_weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype) -> Any:
    counted = target != ignore_index
    if class_weight is None:
        return counted.sum().to(dtype)
    return (class_weight[target * counted] * counted).sum(dtype=dtype)


@dataclass(frozen=True, slots=True)
class _How:
    """What the loss of a row is made of: logits that `steps` change and that are read in `dtype`, None as they are."""

    class_weight: torch.Tensor | None
    steps: str
    dtype: torch.dtype | None
    ignore_index: int
    label_smoothing: float


def _losses_and_grad(
    logits: torch.Tensor, target: torch.Tensor, factors: torch.Tensor | None, how: _How, asks: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the losses of rows, and where it `asks` the gradient of the sum of factors * losses for their logits.

    Of a row that does not count, the loss is 0, and the gradient may be anything finite.
    """
    pull_back = None
    if how.steps and asks:
        logits, pull_back = vjp_inside(lambda x: run_steps(how.steps, [x]), logits)
    elif how.steps:
        logits = run_steps(how.steps, [logits])
    log_probs, dtype = torch.log_softmax(logits, -1, dtype=how.dtype), logits.dtype
    del logits  # nobody else has them, so that they are freed where no step reads them again
    classes = log_probs.new_ones(log_probs.shape[1]) if how.class_weight is None else how.class_weight
    losses = _losses(log_probs, target, classes, how.ignore_index, how.label_smoothing)
    if not asks:
        return losses, None
    plain = how.class_weight is None and not how.label_smoothing
    named = target * (target != how.ignore_index)
    of_loss = _grad_of_losses(log_probs, named, None if plain else classes, how.label_smoothing)
    if factors is not None:
        of_loss.mul_(factors)
    of_logits = of_loss.to(dtype)
    return losses, of_logits if pull_back is None else pull_back(of_logits)[0]


def _losses(
    log_probs: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor, ignore_index: int, smoothing: float
) -> torch.Tensor:
    """Returns the cross entropy of each row."""
    of_target = F.nll_loss(log_probs, target, class_weight, ignore_index=ignore_index, reduction="none")
    if not smoothing:
        return of_target
    of_all = torch.where(target == ignore_index, 0, log_probs @ class_weight)
    return (1 - smoothing) * of_target - smoothing / len(class_weight) * of_all


def _grad_of_losses(
    log_probs: torch.Tensor, target: torch.Tensor, class_weight: torch.Tensor | None, smoothing: float
) -> torch.Tensor:
    """Returns d(loss) / d(logits) of each row, in place of `log_probs`; no class weights are all ones."""
    grad = log_probs.exp_()
    if class_weight is None:
        return grad.scatter_add_(1, target[:, None], -torch.ones_like(target, dtype=grad.dtype)[:, None])
    of_target = (1 - smoothing) * class_weight[target]
    of_all = smoothing / len(class_weight) * class_weight
    grad.mul_((of_target + of_all.sum())[:, None])
    if smoothing:
        grad.sub_(of_all)
    return grad.scatter_add_(1, target[:, None], -of_target[:, None])


@dataclass(frozen=True, slots=True)
class _Head:
    """A linear layer, the steps applied to each of its logits, and the nodes that rearrange rows, in order."""

    linear: fx.Node
    steps: str
    row_nodes: list[fx.Node]


def _head_of(logits: fx.Node) -> _Head | str:
    """Returns what computes the logits of a loss, or says why they cannot be computed in tiles."""
    step_nodes: list[fx.Node] = []
    row_nodes: list[fx.Node] = []
    node = logits
    while True:
        if len(node.users) > 1:
            return f"%{node.name} is read elsewhere"
        name = key(node)
        if node.op != "call_function":
            return f"%{node.name} is not computed by a linear"
        if name == "aten::linear":
            if fake_value(bind(node)["weight"]).dim() != 2:
                return f"the weight of %{node.name} is not a matrix"
            return _Head(node, _text(step_nodes[::-1]), row_nodes[::-1])
        if _rearranges_rows(node, name):
            row_nodes.append(node)
        elif len(node.all_input_nodes) == 1 and not why_no_step(node):
            step_nodes.append(node)
        elif not has_trait(node, "same"):
            return f"%{node.name}, {name}, is between the head and the loss"
        node = node.all_input_nodes[0]


def _text(nodes: list[fx.Node]) -> str:
    """Returns the nodes as text of steps on each logit."""
    return "; ".join(step_of(node, {node.all_input_nodes[0]: f"v{index}"}) for index, node in enumerate(nodes))


_SIZES = frozenset({"shape", "size", "start_dim"})
"""Arguments of the reshapes that `_rows` writes again."""


def _rearranges_rows(node: fx.Node, name: str) -> bool:
    """Whether the node gives other rows, or rows in another shape, of the same V logits each."""
    if has_trait(node, "reshape") and not _SIZES.isdisjoint(bind(node)):
        return keeps_columns(node)
    rank = fake_value(node).dim()
    return name == "aten::slice" and bind(node)["dim"] % rank != rank - 1


@where.predicate("logits", "target", text="is_head_alone")
def _is_head_alone(logits: fx.Node, target: fx.Node) -> bool | str:
    if fake_value(target).is_floating_point():
        return "the targets are class probabilities"
    if fake_value(logits).dim() != 2:
        return f"the logits have rank {fake_value(logits).dim()}"
    head = _head_of(logits)
    return head if isinstance(head, str) else True


def _takes_more_than(tile_bytes: int | None) -> Any:
    @where.predicate("logits", text=f"takes_more_than[{'a tile' if tile_bytes is None else f'{tile_bytes} bytes'}]")
    def takes_more(logits: fx.Node) -> bool | str:
        head, value = _head_of(logits), fake_value(logits)
        assert isinstance(head, _Head), "the guard before has looked"
        taken = value.numel() * value.element_size()
        is_more = is_more_than_a_tile(taken, _tile_of(head, value.dtype) if tile_bytes is None else tile_bytes)
        return is_more or f"the logits, {bytes_text(taken)}, fit into a tile"

    return takes_more


def _tile_of(head: _Head, dtype: torch.dtype) -> int:
    """Bytes of logits of a tile: with d rows or more they are as many as those of the gradient [V, d] of the weight.

    Each tile adds to that gradient. With few rows the sums take longer than the products: on an H200, for a head of
    2,048 x 128,256 in bfloat16, tiles of 261 rows and a model of 4 layers, 15 of the 67 ms of a step.
    """
    num_classes, width = fake_value(bind(head.linear)["weight"]).shape
    widest = max(dtype.itemsize, fake_value(head.linear).dtype.itemsize)
    of_width = width * num_classes * widest
    return max(TILE_BYTES, of_width) if isinstance(of_width, int) else TILE_BYTES


def tiled_loss_rules(tile_bytes: int | None = None) -> RuleSet:
    """Returns the rules whose tiled losses hold at most `tile_bytes` bytes of logits at once.

    None: 128 MiB, or those of as many rows as the head has inputs if that is more.
    """
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
        most = _tile_of(head, fake_value(match["logits"]).dtype) if tile_bytes is None else tile_bytes
        bias = None if b is None else match.proxy(b)
        loss = match.call(
            torch.ops.fxrewrite_rules.tiled_cross_entropy.default, x, w, bias, target, class_weight, *how, most
        )
        # must be saved: a recomputed loss would compute its gradients twice
        match.edit.set_meta(loss.node, "recompute", CheckpointPolicy.MUST_SAVE)
        return loss

    return RuleSet("tiled_loss", tile, DeadCode("untiled_logits"))


def _rows(match: Match, x: Any, head: _Head) -> Any:
    """Rearranges rows of x as the model rearranges the rows of its logits."""
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
