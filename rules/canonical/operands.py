"""What operators read, in one spelling: a number instead of a tensor of one number, sizes instead of another operand.

    div(x, sqrt(tensor(8.0)))     ->  div(x, full([], 2.828...))      FoldNumbers
    div(x, full([], 8.0))         ->  div(x, 8.0)                     and of mul, masked_fill, where
    where(kept, x, full_like(x, -inf))  ->  where(kept, x, -inf)
    where(hidden, -inf, x)        ->  masked_fill(x, hidden, -inf)
    expand_as(mask, x)            ->  expand(mask, shape of x)        so that x has no other user
    triu(ones_like(x), 1)         ->  expand(triu(ones([L, S]), 1), shape of x)      likewise, of x [*, L, S]; and tril
    x.type(dtype)                 ->  to(x, dtype)

GPT-2, DistilBERT and T5 write their attention so. Leaves alone a number that the dtype of x or of the tensor would
round, in the words "0.1 is not a number of torch.float16"; a tensor that makes the result larger or of another dtype;
and, in FoldNumbers, functions that devices round in different ways, such as exp, attributes of the module other than
literals, and graphs with writes.
Numerics: exact.
Source: PyTorch, aten/src/ATen/native/BinaryOps.cpp (a number is a tensor without dimensions).

>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> gm = make_fx(lambda x: x / torch.full((), 8.0), tracing_mode="fake")(torch.rand(2, 3))
>>> OPERANDS.apply(gm)["operands.number_in_div"].rewrites
1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxrewrite import Edit, Literal, Match, Pattern, Report, Rule, RuleSet, cap, either, loose, op, shared, where
from fxrewrite.ops import bind, fake_value, filled_with, held, key, may_write, value
from fxrewrite.spmd import is_same_size, size_proxy

if TYPE_CHECKING:
    from fxrewrite.verify import Draw

aten = torch.ops.aten

_ROUNDED: dict[str, Callable[..., torch.Tensor]] = {
    "aten::sqrt": torch.sqrt,
    "aten::neg": torch.neg,
    "aten::mul": torch.mul,
    "aten::div": torch.div,
}
"""Functions that IEEE 754 rounds in one way, so that every device computes the same number."""
_COPIES = {"aten::lift_fresh_copy", "aten::detach", "aten::alias", "aten::clone", "aten::to", "aten::_to_copy"}


class FoldNumbers:
    """Each tensor without dimensions that is computed from numbers alone is `full`, with that number."""

    name = "fold_numbers"

    def run(self, edit: Edit, context: object, report: Report) -> int:
        nodes = edit.nodes()
        known: dict[fx.Node, torch.Tensor] = {}
        for node in nodes:
            made = value(node)
            if not isinstance(made, torch.Tensor) or made.dim() or made.requires_grad:
                continue
            if (number := _number(node, known)) is not None:
                known[node] = number.to(made.dtype)
        folded = [node for node in known if filled_with(node) is None and any(user not in known for user in node.users)]
        if not folded or any(may_write(node) for node in nodes if node.op.startswith("call")):
            return 0
        for node in folded:
            made = value(node)
            options = {"dtype": made.dtype, "device": made.device}
            full = edit.call(
                aten.full.default, ([], known[node].item()), options, before=node, like=node, rule=self.name
            )
            edit.replace_uses(node, full)
        return len(folded)

    def text(self) -> str:
        return "tensors of one number that depend on numbers alone"


def _number(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """Returns what the node holds, a tensor without dimensions, or None; `known` has what nodes before it hold."""
    dtype = value(node).dtype
    filled = filled_with(node)
    if isinstance(filled, (int, float)):
        return torch.full((), filled, dtype=dtype)
    if node.op == "get_attr":
        # a literal, torch.tensor(8.0), is only copied; what is read in another way, its owner may change
        is_literal = {key(user) for user in node.users} == {"aten::lift_fresh_copy"}
        owner = node.graph.owning_module
        found = held(owner, node) if is_literal and owner is not None else None
        return found.detach().cpu() if type(found) is torch.Tensor else None
    if node.target is torch.tensor and node.args and isinstance(node.args[0], (int, float)):
        return torch.tensor(node.args[0], dtype=dtype)
    name = key(node)
    if not node.all_input_nodes or any(operand not in known for operand in node.all_input_nodes):
        return None
    if name in _COPIES:
        return known[node.all_input_nodes[0]]
    if name not in _ROUNDED:
        return None
    given = bind(node)
    operands = [given[name] for name in ("self", "other") if name in given]
    if given.get("rounding_mode") is not None or any(isinstance(operand, (str, complex)) for operand in operands):
        return None
    return _ROUNDED[name](*(known[x] if isinstance(x, fx.Node) else x for x in operands))


_X, _C, _NUMBER = cap("x"), cap("condition"), cap("number", Literal)
_uniform: Any = either(
    loose(shared(op("full", cap("size", "any"), _NUMBER))), loose(shared(op("full_like", cap("like"), _NUMBER)))
)


@where.predicate("x", "number", "root", text="stands_for")
def _stands_for(x: fx.Node, number: Any, root: fx.Node) -> bool | str:
    """The tensor of this number gives the result neither another dtype nor another shape, and is not rounded."""
    of_x, made = fake_value(x), fake_value(root)
    if isinstance(number, (bool, complex)):
        return f"{number!r} is not a real number"
    if not of_x.is_floating_point() or of_x.dtype != made.dtype:
        return f"x has dtype {of_x.dtype}, the result {made.dtype}"
    if len(of_x.shape) != len(made.shape) or not all(map(is_same_size, of_x.shape, made.shape)):
        return f"x has shape {tuple(of_x.shape)}, the result {tuple(made.shape)}"
    filled = {fake_value(node).dtype for node in root.all_input_nodes if filled_with(node) is not None}
    for dtype in {*filled, of_x.dtype} if filled - {of_x.dtype} else ():
        if _rounded(number, dtype) != number:
            return f"{number} is not a number of {dtype}"
    return True


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.full((), number, dtype=torch.float64).to(dtype).item()


def _number_in(name: str, root: Any, replacement: Callable[..., Any]) -> Rule:
    made = Rule(f"operands.number_in_{name}", Pattern((root,), (_stands_for,)), optional=True)

    @made.replacement
    def _(match: Match, x: fx.Proxy) -> Any:
        """the same with the number"""
        conditions = [match.proxy(match["condition"])] if "condition" in match.captures else []
        return replacement(x, *conditions, _rounded(match["number"], fake_value(match["x"]).dtype))

    @made.sampler
    def _(draw: Draw) -> dict[str, Any]:
        """Samples a number, as a tensor of one entry, or of the shape of x."""
        shape = draw.shape(draw.integer(1, 4))
        captured = {capture.name for capture in made.pattern.captures}
        found = {
            "x": draw.tensor(*shape),
            "condition": draw.mask(*shape),
            "like": draw.tensor(*shape),
            "size": draw.choice([], [1], [1] * len(shape)),
            "number": draw.choice(8.0, -0.3, 3, float("-inf") if "condition" in captured else 0.125),
        }
        return {name: given for name, given in found.items() if name in captured}

    return made


def _where(x: Any, condition: Any, number: float) -> Any:
    return aten.where.ScalarOther(condition, x, number)


type_to_to = Rule(
    "operands.type_to_to",
    Pattern((op(torch.Tensor.type, cap("x"), cap("dtype", "any")),)),
    optional=True,
)


@type_to_to.replacement
def _(match: Match, x: fx.Proxy) -> Any:
    """to(x, dtype of the result)"""
    return aten.to(x, fake_value(match.root).dtype)


@type_to_to.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples any dtype, narrower ones too."""
    return {"x": draw.tensor(*draw.shape(draw.integer(0, 4))), "dtype": draw.choice(draw.dtype, torch.float32)}


expand_as_to_expand = Rule(
    "operands.expand_as_to_expand", Pattern((op("expand_as", cap("x"), cap("other")),)), optional=True
)


@expand_as_to_expand.replacement
def _(match: Match, x: Any) -> Any:
    """expand(x, shape of other), because nothing else of `other` is read"""
    wanted, held = fake_value(match["other"]).shape, fake_value(match["x"]).shape
    own = [None] * (len(wanted) - len(held)) + list(held)
    return aten.expand(
        x,
        [
            -1 if b is not None and is_same_size(a, b) else size_proxy(match, a)
            for a, b in zip(wanted, own, strict=True)
        ],
    )


@expand_as_to_expand.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples x with fewer dimensions than `other`, and with ones in any of them."""
    shape = draw.shape(draw.integer(1, 4))
    own = [draw.choice(1, size) for size in shape[draw.integer(0, len(shape)) :]]
    return {"x": draw.tensor(*own), "other": draw.tensor(*shape)}


_like: Any = either(loose(op("ones_like", _X)), loose(op("full_like", _X, _NUMBER)))
triangle_of_like = Rule(
    "operands.triangle_of_like",
    Pattern(
        (either(*(op(name, like, cap("diagonal", Literal)) for name in ("tril", "triu") for like in _like.options)),)
    ),
    optional=True,
)


@triangle_of_like.replacement
def _(match: Match, number: Any, diagonal: int) -> Any:
    """a triangle of two dimensions, expanded, because nothing but the shape of x is read"""
    made = fake_value(match.root)
    sizes, options = [size_proxy(match, size) for size in made.shape], {"dtype": made.dtype, "device": made.device}
    full = match.call(aten.full.default, sizes[-2:], 1 if number is None else number, **options)
    triangle = torch.tril if key(match.root) == "aten::tril" else torch.triu
    return aten.expand(triangle(full, diagonal), sizes)


@triangle_of_like.sampler
def _(draw: Draw) -> dict[str, Any]:
    """Samples batches of any rank, lengths that differ, and diagonals beside them."""
    numbers = draw.choice(0.0, -0.3, float("-inf"))
    return {"x": draw.tensor(*draw.shape(draw.integer(2, 4))), "number": numbers, "diagonal": draw.integer(-2, 2)}


OPERANDS = RuleSet(
    "operands",
    FoldNumbers(),
    RuleSet(
        "operands.spellings",
        type_to_to,
        expand_as_to_expand,
        triangle_of_like,
        _number_in("mul", op("mul", _X, _uniform), lambda x, number: x * number),
        _number_in("div", op("div", _X, _uniform), lambda x, number: x / number),
        _number_in("masked_fill", op("masked_fill", _X, _C, loose(shared(op("full", [], _NUMBER)))), torch.masked_fill),
        _number_in("where", op("where", _C, _X, _uniform), _where),
        _number_in("where_not", op("where", _C, either(*_uniform.options, _NUMBER), _X), torch.masked_fill),
    ),
)
