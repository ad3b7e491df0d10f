"""Linears of quantized inputs and weights multiply integers, in graphs that torchao's `convert_pt2e` makes.

    linear(dequantize_per_tensor(x), dequantize_per_channel(w), b)  ->  (_int_mm(x, w.t()) - zero * sums) * scales + b
    view(dequantize_per_tensor(x))                                   ->  dequantize_per_tensor(view(x))
    relu(dequantize_per_tensor(x))                                   ->  dequantize_per_tensor(clamp_min(x, zero))
    quantize_per_tensor(dequantize_per_tensor(x))                    ->  x

`INTEGER_LINEARS` has the first, and `QUANTIZED_MOVES` the others, by which a quantization meets the one before it
across relu and the operators of `MOVES`. What depends on the weight alone is computed once. `convert_pt2e` leaves nodes
without values, so export its graph again: `torch.export.export(gm, inputs).module()`.
Matches int8 and uint8 inputs, whose scale and zero point are numbers, or are computed by the graph; int8 weights.
Does not match a quantization to other numbers than before ("two values for scale").
Refuses a weight whose zero points are not 0, or that is an input of the graph, and on CUDA what the kernel does not
take: fewer than 17 rows, or sizes that are no multiples of 8.
Shapes: x [..., inputs], from 2 to 65,536 inputs, so that int32 holds the sums; w [outputs, inputs]; scales and zero
points of w, and b, [outputs].
Numerics: linears are approximate: integers are added exactly, where floating point numbers were rounded. Moves are
exact.
Source: Jacob et al., CVPR 2018, section 2.3; PyTorch, torch/ao/quantization/fx/_decomposed.py.

>>> x = torch.tensor([-128, 0, 127], dtype=torch.int8)
>>> def again(x):
...     y = quantized.dequantize_per_tensor(x, 0.5, 3, -128, 127, torch.int8)
...     return quantized.quantize_per_tensor(y.view(3, 1), 0.5, 3, -128, 127, torch.int8)
>>> gm = torch.fx.experimental.proxy_tensor.make_fx(again)(x)
>>> print(QUANTIZED_MOVES.fixpoint().apply(gm).rewrites, gm(x).equal(x.view(3, 1)))
2 True
"""

from __future__ import annotations

from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # pyright: ignore[reportUnusedImport]  # defines torch.ops.quantized_decomposed, as torchao does
from torch import fx

from fxrewrite import Literal, Match, Maybe, Param, Pattern, Rule, RuleSet, cap, op, refuse, shared, where
from fxrewrite.verify import Draw

aten = torch.ops.aten
quantized = torch.ops.quantized_decomposed
_MIN_ROWS, _MULTIPLE = 17, 8
"""What `_int_mm` takes on CUDA. Source: PyTorch, aten/src/ATen/native/cuda/Blas.cpp."""
_OVERFLOWING = 70_000
"""Inputs of a linear whose sum of the largest products of eight bits int32 does not hold."""
_RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}

MOVES: dict[str, dict[str, Any]] = {
    "clone": {},
    "expand": {"size": [2, -1, -1]},
    "flatten": {"start_dim": 0, "end_dim": -1},
    "permute": {"dims": [1, 0]},
    "reshape": {"shape": [-1]},
    "select": {"dim": 1, "index": 0},
    "slice": {"dim": -1, "start": 0, "end": 5, "step": 1},
    "transpose": {"dim0": 0, "dim1": 1},
    "unsqueeze": {"dim": 1},
    "view": {"size": [-1]},
}
"""Operators that give entries of their input and compute nothing; their other arguments, for an input [a, b]."""


@where.predicate("low", "high", "dtype", text="low and high are those of dtype")
def _is_whole_range(low: int, high: int, dtype: torch.dtype) -> bool:
    return _RANGES.get(dtype) == (low, high)


_FITS = tuple(map(where.parse, ("dtype(x) in {int8, uint8}", "size(w, 1) >= 2", "size(w, 1) <= 65536")))
"""Where `_int_mm` is right: for one input the CPU's, up to torch 2.14, returns what was in memory."""


def _numbers(*names: str) -> tuple[Any, ...]:
    return tuple(cap(name, Literal) for name in names)


_QUANTIZED = _numbers("scale", "zero", "low", "high", "dtype")


def _dequantized(x: Any) -> Any:
    return op("quantized_decomposed::dequantize_per_tensor", x, *_QUANTIZED)


def factors(
    w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, scale: float, zero: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what sums of products are multiplied by, in float32, and what is taken from them, int32; both [outputs].

    Args:
        w, scales, zeros: of the weight; zeros None for 0.
        scale, zero: of the input.

    Raises:
        RefusedError: a zero point of the weight is not 0.
    """
    if zeros is not None and zeros.count_nonzero():
        refuse("a zero point of the weight is not 0", hint="quantize weights symmetrically")
    return scales.to(torch.float32) * scale, w.sum(1, dtype=torch.int32) * zero


def _linear(name: str, number: Any) -> Rule:
    """Makes the rule for an input whose scale and zero point are captured as `number`: literals, or nodes."""
    numbers = (cap("scale", number), cap("zero", number), *_numbers("low", "high", "dtype"))
    weight = (cap("w", Param), cap("scales", Param), cap("zeros", Maybe), 0, ..., ..., torch.int8)
    inputs = shared(op("quantized_decomposed::dequantize_per_tensor", cap("x"), *numbers))
    weights = shared(op("quantized_decomposed::dequantize_per_channel", *weight))
    made = Rule(
        f"integers.{name}",
        Pattern((op("linear", inputs, weights, cap("b", Maybe)),), _FITS),
        numerics="approximate",
        domain="moderate",
        gradients=False,
    )

    @made.replacement
    def _(*, match: Match, x: Any, w: Any, scales: Any, zeros: Any, b: Any, scale: Any, zero: Any) -> fx.Proxy:
        """(_int_mm(x, w.t()) - zero * sums) * scales * scale + b"""
        rows, shift = _signed_rows(x, w)
        sums = aten._int_mm(rows, aten.t(w))
        if number == "literal":  # scale and zero point are part of what is computed once
            names = ("multipliers", "offsets")
            multipliers, offsets = match.once(factors, w, scales, zeros, scale, zero - shift, name=names)
            product = (sums - offsets) * multipliers
        else:
            multipliers, of_rows = match.once(factors, w, scales, zeros, 1.0, 1, name=("multipliers", "sums"))
            sums = sums - aten.to(zero - shift, torch.int32) * of_rows
            product = sums * multipliers * aten.to(scale, torch.float32)
        product = product if b is None else product + b
        return product if x.ndim == 2 else aten.reshape(product, [*x.shape[:-1], w.shape[0]])

    return made


linear = _linear("linear", "literal")
dynamic_linear = _linear("dynamic_linear", "node")


def _signed_rows(x: Any, w: Any) -> tuple[Any, int]:
    """Returns the input as int8 [rows, inputs], and what was taken from its entries."""
    count = 1
    for size in x.shape[:-1]:
        count = count * size
    if x.device.type == "cuda":
        sizes = (*w.shape, count)
        if not all(isinstance(size, int) for size in sizes) or count < _MIN_ROWS or any(s % _MULTIPLE for s in w.shape):
            refuse(f"on CUDA _int_mm takes {_MIN_ROWS} rows or more and multiples of {_MULTIPLE}, not {list(sizes)}")
    rows = aten.reshape(x, [-1, w.shape[1]])
    if x.dtype == torch.int8:
        return rows, 0
    return aten.view(aten.bitwise_xor(rows, 128), torch.int8), 128


def _moved(name: str, arguments: dict[str, Any]) -> Rule:
    """The rule that moves one operator before a dequantization."""
    given = {argument: cap(argument, "any") for argument in arguments}

    def replacement(match: Match, x: Any) -> Any:
        moved = getattr(aten, name)(x, *(_proxied(match, argument) for argument in arguments))
        return quantized.dequantize_per_tensor.default(moved, *(match[number.name] for number in _QUANTIZED))

    made = Rule(f"integers.{name}", Pattern((op(name, _dequantized(cap("x")), **given),)), replacement)
    made.sampler(lambda draw: {**_drawn(draw), **arguments})
    return made


def _proxied(match: Match, name: str) -> Any:
    value = match[name]
    return match.proxy(value) if isinstance(value, fx.Node) else value


@where.predicate("zero", "dtype", text="is_of_dtype")
def _is_of_dtype(zero: int, dtype: torch.dtype) -> bool:
    return torch.iinfo(dtype).min <= zero <= torch.iinfo(dtype).max


relu = Rule("integers.relu", Pattern((op("relu", _dequantized(cap("x"))),), (where.parse("scale > 0"), _is_of_dtype)))


@relu.replacement
def _(*, x: Any, scale: float, zero: int, low: int, high: int, dtype: torch.dtype) -> fx.Proxy:
    """dequantize_per_tensor(clamp_min(x, zero))"""
    return quantized.dequantize_per_tensor.default(aten.clamp_min(x, zero), scale, zero, low, high, dtype)


requantize = Rule(
    "integers.drop_requantize",
    Pattern(
        (op("quantized_decomposed::quantize_per_tensor", _dequantized(cap("x")), *_QUANTIZED),),
        (_is_whole_range, *map(where.parse, ("scale > 1e-30", "scale < 1e30", "low <= zero", "zero <= high"))),
    ),
    lambda x: x,
    doc="x",
)


def _drawn(draw: Draw) -> dict[str, Any]:
    """An input of eight bits, and how it was quantized; of more bits at times, if samples are wide."""
    dtype = draw.choice(*_RANGES, torch.int16) if draw.wide else draw.choice(*_RANGES)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.randint(low, high + 1, draw.shape(2), dtype=dtype)
    scale, zero = draw.choice(0.5, 0.1, 3e-3, 7.0), draw.choice(low, high, 0, 3)
    return {"x": x, "scale": scale, "zero": zero, "low": low, "high": high, "dtype": dtype}


@requantize.sampler
def _(draw: Draw) -> dict[str, Any]:
    drawn = _drawn(draw)
    if draw.wide:  # float32 does not have these numbers, or not what is next to them
        drawn["scale"] = draw.choice(drawn["scale"], 1e-40, 1e38)
        drawn["zero"] = draw.choice(drawn["zero"], 1 << 25, -(1 << 25))
    return drawn


@relu.sampler
def _(draw: Draw) -> dict[str, Any]:
    return _drawn(draw)


def _drawn_linear(draw: Draw) -> dict[str, Any]:
    drawn, outputs = _drawn(draw), draw.size()
    weight = torch.randint(-127, 128, (outputs, drawn["x"].shape[1]), dtype=torch.int8)
    if draw.wide and draw.flag(0.125):
        drawn |= {"x": torch.full((1, _OVERFLOWING), drawn["high"], dtype=drawn["dtype"]), "zero": drawn["low"]}
        weight = torch.full((1, _OVERFLOWING), 127, dtype=torch.int8)
        outputs = 1
    zeros = torch.zeros(outputs, dtype=torch.int64) if draw.flag() else None
    bias = draw.tensor(outputs) if draw.flag() else None
    return {**drawn, "w": weight, "scales": torch.rand(outputs) + 0.1, "zeros": zeros, "b": bias}


@linear.sampler
def _(draw: Draw) -> dict[str, Any]:
    return _drawn_linear(draw)


@dynamic_linear.sampler
def _(draw: Draw) -> dict[str, Any]:
    drawn = _drawn_linear(draw)
    return {**drawn, "scale": torch.tensor(drawn["scale"]), "zero": torch.tensor(drawn["zero"])}


INTEGER_LINEARS = RuleSet("integer_linears", linear, dynamic_linear)
QUANTIZED_MOVES = RuleSet("quantized_moves", *(_moved(name, given) for name, given in MOVES.items()), relu, requantize)
