"""Random draws on sharded values: either the whole value's numbers, or numbers of each rank's own.

    dropout(x, p, True)   ->  x * clone(dropout(ones(shape of x), p, True))             DRAW_WHOLE, before propagation
    randn_like(x)         ->  randn_like(empty(shape of x))                             DRAW_WHOLE
    dropout(x, p, True)   ->  x * dropout_by_rank(ones_like(x), p, True, seed, rank)    DrawByRank, on local shapes
    draw(x, ...)          ->  draw_by_rank(x, ..., seed, rank)                          DrawByRank, any other operator

DRAW_WHOLE separates the draw from the value. What is drawn depends on sizes only, so every rank draws the numbers of
the whole value, as one device does, and consumers read their chunk. With the same generator state the numbers equal
those of one device, element for element. The price: every rank draws (and for a moment holds) all of them.
DrawByRank gives each operator that draws on a chunk different numbers on different ranks, although all ranks are seeded
equally, which replicated draws need. A seed is drawn from the common generator, which stays equal on all ranks, and the
operator becomes a stateless one: the same call with a generator seeded with `seed + rank`. Its gradient repeats the
call with the same draws, so attention with dropout runs forward once more in the backward pass.
Both are right under activation checkpointing: the chunk of the noise is saved, or the seed that reproduces it.
DRAW_WHOLE matches dropout in training with 0 < p < 1, also that of channels, and what reads of its operand the shape
alone: `randn_like`, `exponential_` and the like. DrawByRank matches every operator that draws on a chunk: noise,
`bernoulli`, `multinomial`, attention with dropout. It refuses, in these words: "takes a list of tensors"; "draws by a
generator of its own".
Numerics: exact; DrawByRank changes the numbers. inductor has its own generator, which gives the numbers of eager mode
only with `torch._inductor.config.fallback_random = True`.
Source: PyTorch, aten/src/ATen/native/Dropout.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.library import CustomOpDef
from torch.utils.checkpoint import CheckpointPolicy

from fxrewrite import Edit, Literal, Match, Report, RuleSet, either, refuse, rule, where
from fxrewrite.ops import HOST_WAITS, bind, is_random, key, vjp_inside
from fxrewrite.spmd import DRAWS_APART, SpmdContext, draws_on_chunk, rank_node, size_hint, size_nodes, size_proxy

aten = torch.ops.aten


@where.predicate("p", "train", text="draws")
def _draws(p: float, train: bool) -> bool:
    return train and 0.0 < p < 1.0


@where.predicate("x", text="reads_data")
def _reads_data(x: fx.Node) -> bool:
    """False for what this rule itself makes (ones, possibly permuted), so that it does not match its own result."""
    return key(x.all_input_nodes[0] if key(x) == "aten::permute" else x) != "aten::ones"


def _saved(match: Match, made: fx.Proxy) -> fx.Proxy:
    """Marks a value that the backward reads and must not draw again, so checkpointing saves it."""
    match.edit.set_meta(made.node, "recompute", CheckpointPolicy.MUST_SAVE)
    return made


def _drawn(match: Match, made: fx.Proxy) -> fx.Proxy:
    """Clears the mark of a draw: it is never repeated, because the value made from it is saved instead."""
    match.edit.set_meta(made.node, "recompute", None)
    return made


def _whole(match: Match, x: fx.Node, factory: Any) -> fx.Proxy:
    """Calls `factory` with the whole value's shape and memory order; the order of draws follows the memory order."""
    value: torch.Tensor = x.meta["val"]
    order = _order(value)
    sizes = [size_proxy(match, value.shape[dim]) for dim in order]
    made = _drawn(match, match.call(factory, sizes, dtype=value.dtype, device=value.device))
    if order == list(range(value.dim())):
        return made
    return _drawn(match, aten.permute(made, [order.index(dim) for dim in range(value.dim())]))


def _order(value: torch.Tensor) -> list[int]:
    """The dimensions by their strides in memory, the longest first; draws follow it."""
    strides = [size_hint(stride) for stride in torch.empty_like(value).stride()]
    return sorted(range(value.dim()), key=lambda dim: -strides[dim])


@rule("random.draw_dropout_whole", where=[_draws, _reads_data])
def draw_dropout_whole(x: torch.Tensor, p: Literal, train: Literal) -> Any:
    """dropout in training, of entries or of channels"""
    return either(aten.dropout(x, p, train), aten.feature_dropout(x, p, train))


@draw_dropout_whole.replacement
def _(match: Match, x: fx.Proxy, p: float) -> fx.Proxy:
    """x * dropout(ones), drawn in the shape of the whole value"""
    dropout = aten.feature_dropout if key(match.root) == "aten::feature_dropout" else aten.dropout
    noise = _drawn(match, dropout(_whole(match, match["x"], aten.ones.default), p, True))
    return aten.mul(x, _saved(match, aten.clone(noise)))


_FILLS = frozenset(
    f"aten::{name}"
    for name in ("cauchy", "exponential", "geometric", "log_normal", "normal_functional", "random", "uniform")
)
"""Operators that fill a tensor with what they draw: written in place, they are `exponential_` and the like."""


def _reads_shape(node: fx.Node) -> bool:
    """Whether what a node draws depends on the shape of its operand alone, and not on its entries."""
    name = key(node)
    with_p = name == "aten::bernoulli" and len(node.all_input_nodes) == 1 and bind(node).get("p") is not None
    return name.endswith("_like") or name in _FILLS or with_p


class DrawNoiseWhole:
    """A step after which noise is drawn in the shape of the whole value, which it does not read for that."""

    name = "draw_noise_whole"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Gives the operators an empty tensor of the same shape and memory order, and returns their number."""
        drawn = [node for node in edit.nodes() if is_random(node) and _reads_shape(node)]
        drawn = [node for node in drawn if _is_read(node.all_input_nodes[0])]
        for node in drawn:
            x = node.all_input_nodes[0]
            made = _empty(edit, x, before=node)
            edit.set_args(node, tuple(made if arg is x else arg for arg in node.args))
        return len(drawn)

    def text(self) -> str:
        return "noise of the shape of a value (`randn_like(x)`) is drawn for the whole value: randn_like(empty(shape))"


def _is_read(x: fx.Node) -> bool:
    """False for an empty tensor of a stated size, possibly permuted: ranks have it whole."""
    return key(x.all_input_nodes[0] if key(x) == "aten::permute" and x.all_input_nodes else x) != "aten::empty"


def _empty(edit: Edit, x: fx.Node, *, before: fx.Node) -> fx.Node:
    """An empty tensor of the shape, dtype and memory order of `x`."""
    value: torch.Tensor = x.meta["val"]
    order, sizes = _order(value), size_nodes(edit)

    def call(target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        return edit.call(target, args, kwargs, before=before, like=before, rule=DrawNoiseWhole.name)

    shape = [sizes(value.shape[dim]) for dim in order]
    made = call(aten.empty.memory_format, shape, dtype=value.dtype, device=value.device)
    if order == list(range(value.dim())):
        return made
    return call(aten.permute.default, made, [order.index(dim) for dim in range(value.dim())])


DRAW_WHOLE = RuleSet("draw_whole", draw_dropout_whole, DrawNoiseWhole())


class DrawByRank:
    """A step after which no operator draws the same numbers on different ranks for different chunks."""

    name = "draw_by_rank"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Replaces the operators, and returns their number. Refuses one that cannot be made stateless."""
        drawn = [node for node in edit.nodes() if draws_on_chunk(node)]
        for node in drawn:
            edit.replace_uses(node, _drawn_by_rank(edit, node, SpmdContext.required(context, self.name)))
            edit.erase(node)
        return len(drawn)

    def text(self) -> str:
        return "operators that draw on a chunk get a generator seeded for this rank"


def _drawn_by_rank(edit: Edit, node: fx.Node, context: SpmdContext) -> fx.Node:
    def call(target: Any, *args: Any, rule: str = DrawByRank.name, **kwargs: Any) -> fx.Node:
        return edit.call(target, args, kwargs, before=node, like=node, rule=rule)

    why = _why_not_by_rank(node)
    if why:
        refuse(
            f"{key(node)} draws random numbers for a chunk and {why}, so all ranks would draw the same",
            node=node,
            hint="draw for the whole value, which is torch.rand(shape), or with an operator that takes neither",
        )
    given = {name: value for name, value in bind(node).items() if name != "generator"}
    x: Any = node.all_input_nodes[0]
    is_dropout = key(node) == "aten::dropout"
    if is_dropout:
        given["input"] = call(aten.ones_like.default, x)
    seed = call(aten.randint.default, 2**63 - 1, [], rule="random.draw_seed", dtype=torch.int64, device=_CPU)
    edit.set_meta(seed, "recompute", CheckpointPolicy.MUST_SAVE)
    edit.set_meta(seed, DRAWS_APART, context.axis.name)
    made = call(by_rank(_overload(node)), *given.values(), seed, rank_node(edit, context.axis))
    return call(aten.mul.Tensor, x, made) if is_dropout else made


_CPU = torch.device("cpu")


def _overload(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload), node.target
    return node.target


def _why_not_by_rank(node: fx.Node) -> str:
    if any("List[Tensor]" in str(argument.type) for argument in _overload(node)._schema.arguments):
        return "takes a list of tensors"
    return "draws by a generator of its own" if bind(node).get("generator") is not None else ""


@cache
def by_rank(overload: OpOverload) -> OpOverload:
    """Registers, once per overload, an operator equal to `overload` but stateless, and returns it.

    Its arguments are those of `overload`, a seed (an integer tensor on the CPU, so that nothing waits for an
    accelerator) and a rank, all positional. It draws from a generator of this seed and rank only, which it seeds, so a
    CUDA graph cannot record it.
    """
    schema = overload._schema
    name = "_".join(filter(None, (*schema.name.split("::"), schema.overload_name, "by_rank")))
    parameters, results = _positional(str(schema))
    drawn = _Drawn(overload, tuple(parameter.rpartition(" ")[2] for parameter in parameters))
    given = ", ".join([*parameters, "Tensor seed", "SymInt rank"])
    forward = torch.library.custom_op(
        f"fxrewrite_rules::{name}", drawn.draw, mutates_args=(), schema=f"({given}) -> {results}", tags=HOST_WAITS
    )
    forward.register_fake(lambda *values: drawn.call(values[:-2]))
    backward = torch.library.custom_op(
        f"fxrewrite_rules::{name}_backward",
        drawn.draw_backward,
        mutates_args=(),
        schema=f"({given}, bool[] wanted, Tensor[] grads) -> Tensor[]",
        tags=HOST_WAITS,
    )
    backward.register_fake(
        lambda *values: [torch.empty_like(x) for x, want in zip(values, values[-2], strict=False) if want]
    )
    _differentiate(forward, backward, reads_values=not schema.name.endswith("_like"))
    return getattr(torch.ops.fxrewrite_rules, name).default


def _positional(schema: str) -> tuple[list[str], str]:
    """Returns the parameters of a schema, without defaults and its generator, and its results, both as text."""
    text, _, results = schema.partition("(")[2].rpartition(") -> ")
    parameters = [text for text in re.sub(r"=(\[[^]]*\]|[^,]*)", "", text).split(", ") if text != "*"]
    return [text for text in parameters if not text.startswith("Generator?")], results


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What a stateless operator runs: an overload with its arguments by name, from a generator of a seed and a rank."""

    overload: OpOverload
    names: tuple[str, ...]

    def call(self, values: Sequence[Any]) -> Any:
        return self.overload(**dict(zip(self.names, values, strict=True)))

    def draw(self, *given: Any) -> Any:
        *values, seed, rank = given
        with _seeded(_tensors(values)[0].device, (int(seed) + rank) % 2**63):
            return self.call(values)

    def draw_backward(self, *given: Any) -> list[torch.Tensor]:
        """The gradients of the `wanted` arguments: the call is repeated with the same draws."""
        *values, wanted, grads = given
        at = [i for i, want in enumerate(wanted) if want]

        def of_wanted(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made = self.draw(*(chosen[at.index(i)] if i in at else value for i, value in enumerate(values)))
            return tuple(x for x in _results(made) if x.is_floating_point())

        _, pull_back = vjp_inside(of_wanted, *(values[i] for i in at))
        found = pull_back(*grads)
        return [torch.empty_like(values[i]).copy_(grad) for i, grad in zip(at, found, strict=True)]


def _differentiate(forward: CustomOpDef, backward: CustomOpDef, *, reads_values: bool) -> None:
    """Makes `backward` the gradient of `forward`; one that reads no values, only their shapes, has none."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = _results(output)
        ctx.is_real = [x.is_floating_point() for x in results]
        if not reads_values:
            ctx.mark_non_differentiable(*results)
            return
        ctx.mark_non_differentiable(*(x for x, is_real in zip(results, ctx.is_real, strict=True) if not is_real))
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in inputs))

    def gradients(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = [bool(want) for want in ctx.needs_input_grad]
        values = [b if a is None else a for a, b in zip(ctx.saved_tensors, ctx.others, strict=True)]
        real = [grad for grad, is_real in zip(grads, ctx.is_real, strict=True) if is_real]
        found = iter(backward(*values, wanted, real))
        return tuple(next(found) if want else None for want in wanted)

    forward.register_autograd(gradients, setup_context=save)


def _results(made: Any) -> tuple[torch.Tensor, ...]:
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


@contextmanager
def _seeded(device: torch.device, seed: int) -> Generator[None]:
    """Seeds the device's default generator for the duration of the block, and restores its state afterwards."""
    generator: torch.Generator = (
        torch.default_generator
        if device.type == "cpu"
        else torch.get_device_module(device).default_generators[device.index]
    )
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
