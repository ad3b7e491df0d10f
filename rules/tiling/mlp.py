"""An MLP is computed a tile of rows at a time, forward and backward; its intermediate values never exist as a whole.

    linear(act(linear(x, w, b)), w2, b2)                      ->  tiled_mlp(x, [w, w2], [b, b2], ...)
    linear(act(linear(x, g, a)) * linear(x, w, b), w2, b2)    ->  tiled_mlp(x, [g, w, w2], [a, b, b2], ...)

Between the linears there may be pointwise operators (silu, gelu, relu, its square, tanh, sums and products of them,
also decomposed), parts of a linear that computes gate and up together (chunk, split, slice),
and operators that keep the rows (reshape, copies). A linear may be written as addmm. The backward pass recomputes a
tile's intermediate values.
Matches if the results of the inner linears take more bytes than a tile (a symbolic number of rows may).
Does not match, in these words: "%silu is read elsewhere"; "%dropout, aten::dropout, draws random numbers"; "%softmax,
aten::softmax, is not a pointwise operator"; "%scale is not computed by a linear"; "the linears read %x
and %y"; "%to is float32, %x is bfloat16"; "the rows of %linear_1 are not those of %x"; "the 4 rows of %x fit into a
tile".
Shapes: x [..., d], inner weights [n_i, d] and biases [n_i], the last weight [o, n] and bias [o] -> [..., o].
Numerics: reassociates: rows are independent, so the result is that of all rows; gradients of weights and biases are
sums over tiles in at least float32. There is no second derivative.
Source: Bekman et al., Arctic Long Sequence Training, arXiv 2506.13996 (TiledMLP).

>>> import torch, torch.nn.functional as F
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> mlp = lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)
>>> gm = make_fx(mlp, tracing_mode="fake", pre_dispatch=True)(
...     torch.rand(2, 3, 4), torch.rand(8, 4), torch.rand(8, 4), torch.rand(4, 8)
... )
>>> tiled_mlp_rules(tile_bytes=128).apply(gm)["tiled_mlp.tile"].rewrites
1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx

from fxrewrite import Constraint, DeadCode, Match, Pattern, Rule, RuleSet, any_, either, loose, op, where
from fxrewrite.graph import Size, is_same_size, product, reached, size_hint
from fxrewrite.ops import bind, dtype_name, fake_value, has_trait, is_random, key, value, vjp_inside
from fxrewrite.spmd import Call, declare_product
from rules.tiling.steps import keeps_columns, run_steps, step_of, why_no_step
from rules.tiling.tiles import TILE_BYTES, is_more_than_a_tile, rows_of_tile, tiles, type_of_sums

aten = torch.ops.aten


@torch.library.custom_op("fxrewrite_rules::tiled_mlp", mutates_args=())
def tiled_mlp(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    has_bias: list[bool],
    steps: str,
    tile_bytes: int,
) -> torch.Tensor:
    """Computes the last linear of `steps` of the inner linears of x, a tile of rows at a time.

    Args:
        x: [..., d].
        weights: of the inner linears, [n_i, d], and of the last one, [o, n].
        biases: [n_i] and [o], of the linears that have one.
        has_bias: for each linear, whether it has a bias.
        steps: computed from the results of the inner linears, v0, v1 and so on, as in `rules.tiling.steps`:
            "silu(v0); mul(v2, v1)".
        tile_bytes: bytes of results of the inner linears per tile; a tile has at least one row.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty(len(rows), weights[-1].shape[0])
    for tile in tiles(len(rows), rows_of_tile(_row_bytes(rows, weights), tile_bytes)):
        hidden = run_steps(steps, _results(rows[tile], weights, biases, has_bias))
        out[tile] = F.linear(hidden, weights[-1], biases[-1] if has_bias[-1] else None)
    return out.reshape(*x.shape[:-1], out.shape[-1])


@tiled_mlp.register_fake
def _(x: Any, weights: Any, *_: Any) -> Any:
    return x.new_empty(*x.shape[:-1], weights[-1].shape[0])


def _operations(call: Call, count: Callable[[Size], int]) -> float:
    weights = [weight.meta["val"].numel() for weight in call.args["weights"]]
    return 2.0 * count(product(call.shape()[:-1])) * sum(map(count, weights))


declare_product("fxrewrite_rules::tiled_mlp", _operations, 3.0)  # once to compute again, and a product for each factor


@torch.library.custom_op("fxrewrite_rules::tiled_mlp_backward", mutates_args=())
def tiled_mlp_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    has_bias: list[bool],
    steps: str,
    tile_bytes: int,
    wanted: list[bool],
) -> list[torch.Tensor]:
    """Returns the gradients of x, of the weights and of the biases, in this order; those not wanted are empty."""
    rows, of_out = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    of_rows, *like = _wanted(x.new_empty(rows.shape), weights, biases, wanted)
    totals = [torch.zeros_like(t, dtype=type_of_sums(t.dtype)) for t in like]
    of_weights, of_biases = totals[: len(weights)], totals[len(weights) :]
    biased = [index for index, has in enumerate(has_bias) if has]
    for tile in tiles(len(rows), rows_of_tile(_row_bytes(rows, weights), tile_bytes)):
        results = _results(rows[tile], weights, biases, has_bias)
        hidden, pull_back = vjp_inside(lambda *given: run_steps(steps, given), *results)
        # Gradients of the results of all linears, the last one included, then of their weights, biases and inputs.
        of_results = [*pull_back(of_out[tile] @ weights[-1]), of_out[tile]]
        operands = [rows[tile]] * (len(weights) - 1) + [hidden]
        for total, of_result, operand, want in zip(of_weights, of_results, operands, wanted[1:], strict=False):
            if want:
                total.add_(of_result.t() @ operand)
        for total, index, want in zip(of_biases, biased, wanted[1 + len(weights) :], strict=True):
            if want:
                total.add_(of_results[index].sum(0))
        if wanted[0]:
            of_rows[tile] = reduce(torch.add, map(torch.mm, of_results[:-1], weights[:-1]))
    of_x = of_rows.reshape(x.shape) if wanted[0] else of_rows
    return [of_x, *(total.to(t.dtype) for total, t in zip(totals, like, strict=True))]


@tiled_mlp_backward.register_fake
def _(grad: Any, x: Any, weights: Any, biases: Any, *others: Any) -> Any:
    return [torch.empty_like(t) for t in _wanted(x.new_empty(x.shape), weights, biases, others[-1])]


def _wanted(x: Any, weights: Any, biases: Any, wanted: list[bool]) -> list[Any]:
    """Returns the tensors whose gradients are computed, with empty ones in place of those not wanted."""
    return [t if want else x.new_empty(0) for t, want in zip((x, *weights, *biases), wanted, strict=True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weights, biases, *ctx.how = inputs
    ctx.save_for_backward(x, *weights, *biases)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, *others = ctx.saved_tensors
    num = len(ctx.how[0])
    of_x, of_weights, of_biases, *_ = ctx.needs_input_grad
    wanted = [bool(want) for want in (of_x, *of_weights, *of_biases)]
    made = tiled_mlp_backward(grad, x, others[:num], others[num:], *ctx.how, wanted)
    first, *more = (g if want else None for g, want in zip(made, wanted, strict=True))
    return first, more[:num], more[num:], None, None, None


tiled_mlp.register_autograd(_gradients, setup_context=_save)


def _results(
    rows: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor], has_bias: list[bool]
) -> list[torch.Tensor]:
    """Computes the inner linears of these rows."""
    left = iter(biases)
    return [
        F.linear(rows, weight, next(left) if has else None)
        for weight, has in zip(weights[:-1], has_bias[:-1], strict=True)
    ]


def _row_bytes(rows: torch.Tensor, weights: list[torch.Tensor]) -> int:
    """Bytes per row of the results of the inner linears."""
    return rows.element_size() * sum(len(weight) for weight in weights[:-1])


_ITEM = "operator.getitem"


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear, either `linear` or `addmm(bias, input, weight)` with a weight [in, out]."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    is_transposed: bool = False

    @staticmethod
    def of(node: fx.Node) -> _Linear | None:
        if key(node) not in ("aten::linear", "aten::addmm"):
            return None
        given = bind(node)
        if key(node) == "aten::linear":
            is_matrix = fake_value(given["weight"]).dim() == 2
            return _Linear(given["input"], given["weight"], given["bias"]) if is_matrix else None
        is_plain = given["alpha"] == given["beta"] == 1 and fake_value(given["self"]).dim() == 1
        return _Linear(given["mat1"], given["mat2"], given["self"], is_transposed=True) if is_plain else None

    @property
    def width(self) -> int:
        return size_hint(fake_value(self.weight).shape[1 if self.is_transposed else 0])


@dataclass(frozen=True, slots=True)
class Mlp:
    """An MLP: a last linear, inner linears that read one value, and what is computed between them.

    Attributes:
        x: the value that the inner linears read.
        linears: the inner linears, then the last.
        inside: the inner linears, and all nodes between them and the last one, in graph order.
        steps: what the nodes between compute, as `tiled_mlp` takes it.
    """

    x: fx.Node
    linears: tuple[_Linear, ...]
    inside: tuple[fx.Node, ...]
    steps: str

    @property
    def num_rows(self) -> Size:
        """Number of rows of x: the product of its leading dimensions."""
        return product(fake_value(self.x).shape[:-1])

    def rows_of_tile(self, tile_bytes: int) -> int:
        """Returns how many rows of x a tile has."""
        widths = (linear.width for linear in self.linears[:-1])
        return rows_of_tile(fake_value(self.x).element_size() * sum(widths), tile_bytes)


def mlp_of(last: fx.Node) -> Mlp | str:
    """Returns the MLP whose last linear is this node, or says why it cannot be computed in tiles."""
    linear = _Linear.of(last)
    if linear is None:
        return f"%{last.name} is not a linear"
    # Walk upwards from the last linear's input; inner linears (not None) end the walk.
    found: dict[fx.Node, _Linear | None] = {}
    for node in reached([linear.input], lambda n: [] if found[n] else _read(n)):
        found[node] = _Linear.of(node)
        why = "" if found[node] else _why_not_inside(node)
        if why:
            return why
    inside = sorted(found)
    inner = [made for node in inside if (made := found[node])]
    why = _why_not_alone(last, inside, inner)
    if why:
        return why
    # The results of the inner linears are v0, v1, ...; each step appends one more value.
    names = {node: f"v{index}" for index, node in enumerate(node for node in inside if found[node])}
    steps: list[str] = []
    for node in inside:
        if _changes_nothing(node):
            names[node] = names[_read(node)[0]]
        elif not found[node] and isinstance(value(node), torch.Tensor):
            steps.append(step_of(node, names))
            names[node] = f"v{len(inner) + len(steps) - 1}"
    return Mlp(inner[0].input, (*inner, linear), tuple(inside), "; ".join(steps))


def _read(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node between the linears reads; sizes of a view are none."""
    return node.all_input_nodes[: 1 if has_trait(node, "reshape") else None]


def _changes_nothing(node: fx.Node) -> bool:
    """Whether the rows of the result are those of the first operand."""
    return has_trait(node, "same", "reshape") or (key(node) == "aten::dropout" and not is_random(node))


def _why_not_inside(node: fx.Node) -> str:
    """Says why a node must not be between the linears; empty if it may be."""
    if node.op != "call_function":
        return f"%{node.name} is not computed by a linear"
    name = key(node)
    if is_random(node):
        return f"%{node.name}, {name}, draws random numbers"
    if has_trait(node, "reshape"):
        return "" if keeps_columns(node) else f"%{node.name}, {name}, rearranges rows"
    if _changes_nothing(node) or any(key(user) == _ITEM for user in node.users):
        return ""
    return why_no_step(node)


def _why_not_alone(last: fx.Node, inside: Sequence[fx.Node], inner: Sequence[_Linear]) -> str:
    """Says why the nodes are not a function of the rows of one value that only the last linear reads."""
    x = inner[0].input
    other = next((linear.input for linear in inner if linear.input is not x), None)
    if other is not None:
        return f"the linears read %{x.name} and %{other.name}"
    mine = {*inside, last}
    for node in inside:
        if any(user not in mine for user in node.users):
            return f"%{node.name} is read elsewhere"
    dtype = fake_value(x).dtype
    for node in (*inside, last):
        made = value(node)
        if isinstance(made, torch.Tensor) and made.dtype != dtype:
            return f"%{node.name} is {dtype_name(made.dtype)}, %{x.name} is {dtype_name(dtype)}"
    before, after = fake_value(x).shape[:-1], fake_value(last).shape[:-1]
    if len(before) != len(after) or not all(map(is_same_size, before, after)):
        return f"the rows of %{last.name} are not those of %{x.name}"
    return ""


@where.predicate("root", text="is_mlp")
def _is_mlp(root: fx.Node) -> bool | str:
    mlp = mlp_of(root)
    return mlp if isinstance(mlp, str) else True


def _takes_more_than(tile_bytes: int) -> Constraint:
    @where.predicate("root", text=f"takes_more_than[{tile_bytes} bytes]")
    def takes_more(root: fx.Node) -> bool | str:
        mlp = mlp_of(root)
        return isinstance(mlp, Mlp) and (
            is_more_than_a_tile(mlp.num_rows, mlp.rows_of_tile(tile_bytes))
            or f"the {mlp.num_rows:,} rows of %{mlp.x.name} fit into a tile"
        )

    return takes_more


def tiled_mlp_rules(tile_bytes: int = TILE_BYTES, *guards: Constraint) -> RuleSet:
    """Returns the rules whose tiled MLPs hold at most `tile_bytes` bytes of results of their inner linears at once.

    Args:
        tile_bytes: bytes per tile; a tile has at least one row.
        guards: further constraints on `root`, the last linear of an MLP.
    """
    linear: Any = either(loose(op("linear", any_, any_)), loose(op("addmm", any_, any_, any_)))
    pattern = Pattern((linear,), (_is_mlp, _takes_more_than(tile_bytes), *guards))
    tile = Rule("tiled_mlp.tile", pattern, numerics="reassociates", optional=True)

    @tile.replacement
    def _(match: Match) -> Any:
        """tiled_mlp(x, weights, biases, ...)"""
        mlp = mlp_of(match.root)
        assert isinstance(mlp, Mlp), "the guard has looked"
        weights = [match.proxy(linear.weight) for linear in mlp.linears]
        weights = [w.t() if linear.is_transposed else w for w, linear in zip(weights, mlp.linears, strict=True)]
        biases = [match.proxy(linear.bias) for linear in mlp.linears if linear.bias is not None]
        how = [linear.bias is not None for linear in mlp.linears], mlp.steps, tile_bytes
        return match.call(torch.ops.fxrewrite_rules.tiled_mlp.default, match.proxy(mlp.x), weights, biases, *how)

    return RuleSet("tiled_mlp", tile, DeadCode("untiled_mlp"))
