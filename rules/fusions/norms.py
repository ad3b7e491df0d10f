"""Decomposed RMSNorm and LayerNorm become one operator; casts and weights move inside where the rounding is the same.

    x * rsqrt(mean(x ** 2, -1, keepdim=True) + eps)                  ->  rms_norm(x, [d], None, eps)
    (x - mean(x)) * rsqrt(var(x) + eps)                              ->  layer_norm(x, [d], None, None, eps)
    norm(x.float()).to(x.dtype)                                      ->  norm(x)
    (norm(x.float()) * weight.float() + bias.float()).to(x.dtype)    ->  norm(x, weight, bias)
    norm(x) * weight + bias                                          ->  norm(x, weight, bias)

Matches `x * x` and `square(x)` for the power; a division by `sqrt` and a power of -0.5 for `rsqrt`; the variance as the
mean of squared differences or as `var(correction=0)`; only the variance in float32, as in T5; `type_as` for the cast.
Llama in half precision multiplies by its weight after the cast: that product stays. Gemma's `1 + weight` is a float32
weight: its casts stay.
Refuses the following, because the operator computes in float32 and rounds once:
  - "the spelling rounds to bfloat16 after each step, rms_norm once";
  - "the spelling rounds the norm to bfloat16 before it is scaled, rms_norm after that";
  - "x is float64, its mean square float32", "x is float64, normalized in float32, given back in float64";
  - "the weight is float32, x is bfloat16";
  - "eps is left to rms_norm, which takes another one for each dtype".
Does not match a weight or bias of another shape than [d] ("the weight is [4, 8], the norm takes [8]").
Shapes: x [..., d], weight and bias [d].
Numerics: reassociates. On CPU the value of rms_norm is bitwise equal to what it replaces, and so are its gradients in
float32 and float64. layer_norm sums in another order, and holds for finite values: with infinite weights it may give
NaN for infinity, or the converse.
Source: PyTorch, aten/src/ATen/native/layer_norm.cpp; Hugging Face transformers, modeling_llama.py (LlamaRMSNorm),
modeling_t5.py (T5LayerNorm), modeling_gemma.py (GemmaRMSNorm), modeling_cohere.py (CohereLayerNorm).

>>> import torch
>>> from torch.fx.experimental.proxy_tensor import make_fx
>>> def norm(x, weight):
...     return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
>>> gm = make_fx(norm, tracing_mode="fake", pre_dispatch=True)(torch.rand(2, 8), torch.rand(8))
>>> NORMS.apply(gm).rewrites
2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Pattern, Rule, RuleSet, cap, either, maybe, op, refuse, shared, where
from fxrewrite.graph import is_same_size
from fxrewrite.ops import dtype_name, fake_value

if TYPE_CHECKING:
    from fxrewrite.verify import Draw

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_FLOAT = (*_HALF, torch.float32, torch.float64)
_HAS_ROWS = where.parse("rank(x) >= 1")


@where.predicate("power", text="is_two")
def _is_two(power: float) -> bool | str:
    return power == 2 or f"the power is {power}"


def _square(x: Any) -> Any:
    power: Any = cap("power", Literal)
    return either(torch.pow(x, power), x * x, torch.square(x))


def _over_root(x: Any, variance: Any) -> Any:
    """Returns the spellings of `x / sqrt(variance + eps)`."""
    shifted = variance + cap("eps", Literal)
    return either(x * torch.rsqrt(shifted), x / torch.sqrt(shifted), x * torch.pow(shifted, -0.5))


_x: Any = cap("x")
_centered = _x - _x.mean(-1, keepdim=True)
_variance = either(
    _square(_centered).mean(-1, keepdim=True),
    torch.var(_x, -1, correction=0, keepdim=True),
    _x.var(-1, unbiased=False, keepdim=True),
)
_wide: Any = maybe(shared(op("to", _x, dtype=cap("wide", Literal))))

to_layer_norm = Rule(
    "norms.to_layer_norm",
    Pattern((_over_root(_centered, _variance),), (_is_two, _HAS_ROWS, where.dtype("x", *_FLOAT))),
    numerics="reassociates",
    domain="moderate",
    optional=True,
)
to_rms_norm = Rule(
    "norms.to_rms_norm",
    Pattern((_over_root(_x, _square(_wide).mean(-1, keepdim=True)),), (_is_two, _HAS_ROWS, where.dtype("x", *_FLOAT))),
    numerics="reassociates",
    optional=True,
)


@to_layer_norm.replacement
def _(x: torch.Tensor, eps: float) -> Any:
    """layer_norm(x, [d], None, None, eps)"""
    _check_rounding("layer_norm", x.dtype)
    return aten.layer_norm(x, [x.shape[-1]], None, None, eps)


@to_rms_norm.replacement
def _(x: torch.Tensor, eps: float, wide: torch.dtype | None) -> Any:
    """rms_norm(x, [d], None, eps)"""
    dtype = wide or x.dtype
    _check_rounding("rms_norm", dtype)
    if x.dtype.itemsize > dtype.itemsize:
        refuse(f"x is {dtype_name(x.dtype)}, its mean square {dtype_name(dtype)}")
    return aten.rms_norm(x if x.dtype == dtype else aten.to(x, dtype), [x.shape[-1]], None, eps)


def _check_rounding(norm: str, dtype: torch.dtype) -> None:
    if dtype in _HALF:
        refuse(f"the spelling rounds to {dtype_name(dtype)} after each step, {norm} once")


def _fits(scale: str) -> Any:
    """The weight or bias has the shape of the normalized dimension: [d]."""

    def check(found: fx.Node, shape: list[Any]) -> bool | str:
        sizes = fake_value(found).shape
        fits = len(sizes) == len(shape) == 1 and is_same_size(sizes[0], _size(shape[0]))
        return fits or f"the {scale} is {list(sizes)}, the norm takes {shape}"

    return where.predicate(scale, "shape", text="fits")(check)


def _size(size: Any) -> Any:
    return fake_value(size) if isinstance(size, fx.Node) else size


_shape, _eps, _cast = cap("shape", "any"), cap("eps", Literal), cap("wide", Literal)
_weight: Any = cap("weight")
_bias: Any = cap("bias")


def _narrowed(y: Any) -> Any:
    return either(op("to", y, dtype=...), op("type_as", y, ...))


def _widened(y: Any) -> Any:
    return shared(op("to", y, dtype=_cast))  # in a float32 residual stream the no-op cast has other users


def _narrow(norm: str, in_wide: Any, *fitting: Any) -> Rule:
    """Makes the rule that moves the casts around `in_wide` into the norm."""
    made = Rule(
        f"norms.narrow_{norm}",
        Pattern((_narrowed(in_wide),), (*fitting, where.dtype("x", *_FLOAT))),
        numerics="reassociates",
        domain="finite" if norm == "layer_norm" else "all",
        optional=True,
        after=[f"norms.to_{norm}"],
    )

    @made.sampler
    def _(draw: Draw) -> dict[str, Any]:
        size = draw.size(least=2)  # layer_norm of one entry is 0 but for rounding
        scales = {constraint.names[0]: draw.tensor(size) for constraint in fitting}
        x, wide = draw.tensor(*draw.shape(2), size), torch.promote_types(draw.dtype, torch.float32)
        return {"x": x, "shape": [size], "eps": draw.choice(1e-6, 0.5), "wide": wide, **scales}

    @made.replacement
    def _(match: Match, x: torch.Tensor, shape: Any, eps: float | None, wide: torch.dtype) -> Any:
        """norm(x, weight, bias)"""
        result = fake_value(match.root).dtype
        if result != x.dtype or wide != (torch.float32 if x.dtype in _HALF else x.dtype):
            refuse(f"x is {dtype_name(x.dtype)}, normalized in {dtype_name(wide)}, given back in {dtype_name(result)}")
        if eps is None and wide != x.dtype:
            refuse("eps is left to rms_norm, which takes another one for each dtype")
        return _call(match, norm, x, shape, eps)

    return made


def _scale(norm: str, scaled: Any, *fitting: Any) -> Rule:
    """Makes the rule that moves the weight and bias of `scaled` into the norm."""
    made = Rule(
        f"norms.scale_{norm}",
        Pattern((scaled,), (*fitting, where.dtype("x", *_FLOAT))),
        numerics="reassociates",
        domain="finite" if norm == "layer_norm" else "all",
        optional=True,
        after=[f"norms.narrow_{norm}"],
    )

    @made.replacement
    def _(match: Match, x: torch.Tensor, shape: Any, eps: float | None) -> Any:
        """norm(x, weight, bias)"""
        if x.dtype in _HALF:
            refuse(f"the spelling rounds the norm to {dtype_name(x.dtype)} before it is scaled, {norm} after that")
        return _call(match, norm, x, shape, eps)

    return made


def _call(match: Match, norm: str, x: torch.Tensor, shape: Any, eps: float | None) -> Any:
    scales: list[Any] = []
    for name in ("weight", "bias")[: 1 if norm == "rms_norm" else 2]:
        scale = match.captures.get(name)
        if scale is not None and fake_value(scale).dtype != x.dtype:
            refuse(f"the {name} is {dtype_name(scale.meta['val'].dtype)}, x is {dtype_name(x.dtype)}")
        scales.append(None if scale is None else match.proxy(scale))
    return getattr(aten, norm)(x, shape, *scales, eps)


_rms: Any = aten.rms_norm(_x, _shape, None, _eps)
_rms_wide: Any = aten.rms_norm(_widened(_x), _shape, None, _eps)
_layer: Any = aten.layer_norm(_x, _shape, None, None, _eps)
_layer_wide: Any = aten.layer_norm(_widened(_x), _shape, None, None, _eps)
_weight_wide: Any = maybe(_widened(_weight))
_bias_wide: Any = maybe(_widened(_bias))

NORMS = RuleSet(
    "norms",
    to_layer_norm,  # before to_rms_norm, which would match its x - mean(x)
    to_rms_norm,
    _narrow("rms_norm", maybe(_rms_wide * _weight_wide), _fits("weight")),
    _narrow("layer_norm", maybe(maybe(_layer_wide * _weight_wide) + _bias_wide), _fits("weight"), _fits("bias")),
    _scale("rms_norm", _rms * _weight, _fits("weight")),
    _scale("layer_norm", either(maybe(_layer * _weight) + _bias, _layer * _weight), _fits("weight"), _fits("bias")),
)
