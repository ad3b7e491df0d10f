"""Random graphs that run: a small vocabulary of operators in all their spellings, every shape and value known.

Used with the `random.Random` that hypothesis hands out (`st.randoms(use_true_random=False)`), so failures shrink.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch._subclasses import FakeTensorMode

aten = torch.ops.aten
Shape = tuple[int, ...]
SQUARE: Shape = (4, 4)
FAKE = FakeTensorMode()

UNARY: Mapping[str, Sequence[Any]] = {
    "relu": (torch.relu, F.relu, "relu", aten.relu.default, aten.relu),
    "sigmoid": (torch.sigmoid, F.sigmoid, "sigmoid", aten.sigmoid.default, torch.special.expit),
    "neg": (torch.neg, operator.neg, "neg", aten.neg.default, torch.negative),
    "tanh": (torch.tanh, F.tanh, "tanh", aten.tanh.default),
    "sin": (torch.sin, "sin", aten.sin.default),
    "cos": (torch.cos, "cos", aten.cos.default),
}
BINARY: Mapping[str, Sequence[Any]] = {
    "add": (torch.add, operator.add, "add", aten.add.Tensor),
    "mul": (torch.mul, operator.mul, "mul", aten.mul.Tensor, torch.multiply),
    "sub": (torch.sub, operator.sub, "sub", aten.sub.Tensor, torch.subtract),
    "maximum": (torch.maximum, "maximum", aten.maximum.default),
    "matmul": (torch.matmul, operator.matmul, "matmul", aten.matmul.default),
}
NUMBERS = (2, 2.0, 0.5, 1)


class Builder:
    """A graph that grows by one random call at a time; the values that calls take are float64."""

    def __init__(self, rng: Random, values: bool) -> None:
        self.rng = rng
        self.values = values
        self.graph = fx.Graph()
        self.pool: list[tuple[fx.Node, Shape]] = []
        for name in "ab":
            self._tensor(self.graph.placeholder(name), SQUARE)
        self._tensor(self.graph.get_attr("weight"), SQUARE)

    def _tensor(self, node: fx.Node, shape: Shape, dtype: torch.dtype = torch.float64) -> fx.Node:
        if self.values:
            with FAKE:
                node.meta["val"] = torch.empty(shape, dtype=dtype)
        if dtype == torch.float64:
            self.pool.append((node, shape))
        return node

    def pick(self, shape: Shape = SQUARE) -> fx.Node:
        """A value of this shape, mostly a recent one."""
        fitting = [node for node, found in self.pool if found == shape]
        recent = fitting[-4:] if self.rng.random() < 0.7 else fitting
        return self.rng.choice(recent)

    def node(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        return self.graph.create_node(op, target, args, dict(kwargs))

    def call(self, target: Any, args: tuple[Any, ...], shape: Shape = SQUARE, **kwargs: Any) -> fx.Node:
        return self._tensor(self.node(target, args, kwargs), shape)

    def parts(self, target: Any, args: tuple[Any, ...], shapes: Sequence[Shape], **kwargs: Any) -> None:
        """A call that gives a tuple, and its parts."""
        node = self.node(target, args, kwargs)
        items = [self.call(operator.getitem, (node, index), shape) for index, shape in enumerate(shapes)]
        if self.values:
            node.meta["val"] = tuple(item.meta["val"] for item in items)

    def unary(self) -> None:
        self.call(self.rng.choice(UNARY[self.rng.choice(list(UNARY))]), (self.pick(),))

    def binary(self) -> None:
        rng, name = self.rng, self.rng.choice(list(BINARY))
        target, left = rng.choice(BINARY[name]), self.pick()
        right: Any = self.pick()
        if name in ("add", "mul", "sub") and rng.random() < 0.3:
            right = rng.choice(NUMBERS)
            if target in (operator.add, operator.mul, operator.sub) and rng.random() < 0.5:
                left, right = right, left
        style = rng.random()
        if style < 0.15 and target not in (operator.add, operator.mul, operator.sub, operator.matmul):
            self.call(target, (left,), other=right)
        elif style < 0.25 and name in ("add", "sub") and target in (torch.add, torch.sub, "add", "sub"):
            self.call(target, (left, right), alpha=rng.choice((1, 2)))
        else:
            self.call(target, (left, right))

    def along_a_dim(self) -> None:
        rng, x, dim = self.rng, self.pick(), self.rng.choice((-2, -1, 0, 1))
        spellings: list[Callable[[], Any]] = [
            lambda: self.call(torch.softmax, (x, dim)),
            lambda: self.call(torch.softmax, (x,), dim=dim),
            lambda: self.call(F.softmax, (x,), dim=dim, dtype=None),
            lambda: self.call("softmax", (x, dim)),
            lambda: self.call(aten.softmax.int, (x, dim)),
            lambda: self.call(torch.cumsum, (x, dim)),
            lambda: self.call("cumsum", (x,), dim=dim),
        ]
        rng.choice(spellings)()

    def view(self) -> None:
        rng, x = self.rng, self.pick()
        spellings: list[Callable[[], Any]] = [
            lambda: self.call(torch.transpose, (x, 0, 1)),
            lambda: self.call("transpose", (x, -1, -2)),
            lambda: self.call(aten.transpose.int, (x, 0, 1)),
            lambda: self.call(torch.swapdims, (x, 0, 1)),
            lambda: self.call("permute", (x, 1, 0)),
            lambda: self.call(torch.permute, (x, (1, 0))),
            lambda: self.call("reshape", (x, 4, 4)),
            lambda: self.call(torch.reshape, (x, (4, 4))),
            lambda: self.call(operator.getitem, (x, slice(None))),
            lambda: self.call(aten.alias.default, (x,)),
            lambda: self.call("clone", (x,)),
            lambda: self.call("transpose", (self.call(torch.transpose, (x, 0, 1)), 0, 1)),
        ]
        rng.choice(spellings)()

    def several(self) -> None:
        rng, x, y = self.rng, self.pick(), self.pick()
        spellings: list[Callable[[], Any]] = [
            lambda: self.call(torch.where, (self._tensor(self.node(torch.gt, (x, 0), {}), SQUARE, torch.bool), x, y)),
            lambda: self.call(torch.addmm, (x, y, self.pick()), beta=rng.choice((1, 2))),
            lambda: self.call("clamp", (x,), min=-0.5),
            lambda: self.call(torch.clamp, (x, None, 0.5)),
            lambda: self.call(F.linear, (x, y)),
            lambda: self.call(torch.lerp, (x, y, 0.5)),
        ]
        rng.choice(spellings)()

    def lists(self) -> None:
        rng, x, y = self.rng, self.pick(), self.pick()
        spellings: list[Callable[[], Any]] = [
            lambda: self.call(torch.cat, ([x, y],), (8, 4)),
            lambda: self.call(torch.cat, ((x, y), 0), (8, 4)),
            lambda: self.call(torch.concat, ([x, y],), (8, 4), dim=-2),
            lambda: self.parts(torch.chunk, (x, 2, 0), [(2, 4)] * 2),
            lambda: self.parts("chunk", (x, 2), [(2, 4)] * 2, dim=-2),
            lambda: self.parts(torch.split, (x, 2), [(2, 4)] * 2),
            lambda: self.parts("split", (x, [1, 3], 0), [(1, 4), (3, 4)]),
            lambda: self.parts(torch.topk, (x, 4), [SQUARE], dim=rng.choice((-1, 0))),
        ]
        rng.choice(spellings)()
        if any(shape == (8, 4) for _, shape in self.pool) and rng.random() < 0.5:
            self.parts(torch.chunk, (self.pick((8, 4)), 2, 0), [SQUARE, SQUARE])
        if any(shape == (2, 4) for _, shape in self.pool) and rng.random() < 0.5:
            self.call(aten.cat.default, ([self.pick((2, 4)), self.pick((2, 4))],))

    def random(self) -> None:
        """A draw: of a contiguous value, since a mask is drawn in the order of memory."""
        rng, x = self.rng, self.call("contiguous", (self.pick(),))
        spellings: list[Callable[[], Any]] = [
            lambda: self.call(F.dropout, (x, 0.5)),
            lambda: self.call(torch.dropout, (x, 0.5, True)),
            lambda: self.call(F.dropout, (x, 0.5), training=False),
            lambda: self.call(torch.bernoulli, (self.call("sigmoid", (x,)),)),
        ]
        rng.choice(spellings)()

    def write(self) -> None:
        """A call that writes to memory of a value, which may be a view, an input or the parameter."""
        rng, x, y = self.rng, self.pick(), self.pick()
        spellings: list[Callable[[], Any]] = [
            lambda: self.call("add_", (x, 1)),
            lambda: self.call(aten.mul_.Tensor, (x, 0.5)),
            lambda: self.call(operator.iadd, (x, 1)),
            lambda: self.call("relu_", (x,)),
            lambda: self.call(F.relu, (x,), inplace=True),
            lambda: self.call("copy_", (x, self.call("clone", (y,)))),
            lambda: self.graph.call_function(operator.setitem, (x, 0, 0.25)),
        ]
        rng.choice(spellings)()


def random_module(
    rng: Random, *, size: int | None = None, values: bool = True, draws: bool = True, writes: bool = False
) -> fx.GraphModule:
    """A module of 5 to 40 nodes on two inputs of shape (4, 4) and one parameter.

    Args:
        rng: where chance comes from.
        size: number of steps, each of which makes one node or a few.
        values: whether nodes have fake values in `meta["val"]`.
        draws: whether some calls draw random numbers.
        writes: whether some calls write to memory.
    """
    builder = Builder(rng, values)
    steps = [builder.unary] * 5 + [builder.binary] * 6 + [builder.view] * 3
    steps += [builder.along_a_dim, builder.several, builder.lists]
    steps += [builder.random] * draws + [builder.write] * (3 * writes)
    for _ in range(size if size is not None else rng.randint(2, 22)):
        rng.choice(steps)()
    last = [node for node, _ in builder.pool[-rng.randint(1, 4) :]]
    builder.graph.output(tuple(last))
    root = torch.nn.Module()
    root.weight = torch.nn.Parameter(weight(), requires_grad=False)
    return fx.GraphModule(root, builder.graph)


def weight() -> torch.Tensor:
    return torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh inputs of a random module, always the same."""
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return first, second


def run(gm: fx.GraphModule) -> list[torch.Tensor]:
    """Results of the module, and what it left in its inputs and its parameter, which are restored."""
    given = inputs()
    parameter: Any = gm.weight
    torch.manual_seed(0)
    results: Any = gm(*given)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    found = [tensor.detach().clone() for tensor in (*results, *given, parameter)]
    parameter.data.copy_(weight())
    return found
