"""A batch norm after a convolution or a linear becomes part of its weight and bias, for inference.

    batch_norm(conv2d(x, w, b), gamma, beta, mean, var)      ->  conv2d(x, w * s, (b - mean) * s + beta)
    batch_norm(conv_transpose2d(x, w, b), ...)               ->  the same, s along the outputs of each group
    batch_norm(linear(x, w, b), ...)                         ->  linear(x, w * s, (b - mean) * s + beta)

with s = gamma / sqrt(var + eps), computed once, when the rule is applied; the new weight and bias are buffers, and the
old ones leave the module where nothing else reads them.
Matches one, two and three dimensions, groups, any stride, padding and dilation, with and without a bias, norms with and
without gamma and beta; in evaluation, with statistics that the module holds.
Does not match a norm in training ("expected the literal False at root.training, found True"), a batch without its
dimension ("rank(x) is 3, rank(w) is 4"), a linear of more dimensions, of which a batch norm takes another for channels.
Refuses a weight that is an input of the graph, as torch.compile passes them: "%w is an input of the graph, and is known
only when the graph runs", a result that requires gradients, and "the norm has a parameter of shape [1, 3] for 3
channels", which ATen takes of an empty batch.
Shapes: x [n, c, ...], w [out, c / groups, ...], of a transposed convolution [c, out / groups, ...], the others [out].
Numerics: approximate: it rounds the new weights to the dtype of the old ones, and not what is between the two.
Source: PyTorch, torch/nn/utils/fusion.py, whose transposed convolutions have one group; Jacob et al., CVPR 2018.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
>>> gm = torch.export.export(model, (torch.rand(2, 3, 8, 8),)).module()
>>> print(FOLDING.apply(gm).lines[0].partition(" of ")[0])
computed once: self.folded_weight
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fxrewrite import Literal, Match, Maybe, Param, Pattern, Rule, RuleSet, cap, either, op, refuse
from fxrewrite.ops import bind, key
from fxrewrite.verify import Draw


def folded(
    w: torch.Tensor,
    b: torch.Tensor | None,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
    groups: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weight and bias that have the norm in them; computed in float32 or finer, in the weight's dtype.

    Args:
        w, b, gamma, beta, mean, var, eps: as in the module docstring.
        groups: of a transposed convolution, whose outputs are on the second dimension of the weight; else 0.
    """
    finer = torch.promote_types(w.dtype, torch.float32)
    scale = (var.to(finer) + eps).rsqrt()
    scale = scale if gamma is None else scale * gamma.to(finer)
    if groups:
        parts = w.to(finer).unflatten(0, (groups, w.shape[0] // groups))
        shape = (groups, 1, w.shape[1], *(1 for _ in w.shape[2:]))
        weight = (parts * scale.reshape(shape)).flatten(0, 1)
    else:
        weight = w.to(finer) * scale.reshape(-1, *(1 for _ in w.shape[1:]))
    shift = -mean.to(finer) if b is None else b.to(finer) - mean.to(finer)
    bias = shift * scale if beta is None else shift * scale + beta.to(finer)
    return weight.to(w.dtype), bias.to(w.dtype)


def _fold(match: Match, x: Any, w: Any, b: Any, gamma: Any, beta: Any, mean: Any, var: Any, eps: float) -> fx.Proxy:
    """the product, of folded w and b"""
    _, product = match.nodes
    given = bind(product)
    groups = given["groups"] if "transpose" in key(product) else 0
    channels = groups * w.shape[1] if groups else w.shape[0]
    for parameter in (gamma, beta, mean, var):  # of an empty batch ATen takes others
        if parameter is not None and tuple(parameter.shape) != (channels,):
            refuse(f"the norm has a parameter of shape {list(parameter.shape)} for {channels} channels")
    names = ("folded_weight", "folded_bias")
    weight, bias = match.once(folded, w, b, gamma, beta, mean, var, eps, groups, name=names)
    return match.call(product.target, *{**given, "input": x, "weight": weight, "bias": bias}.values())


_x, _w, _b = cap("x"), cap("w", Param), cap("b", Maybe)


def _rule(name: str, product: Any, *where: str) -> Rule:
    norm = op(
        *("batch_norm", product, cap("gamma", Maybe), cap("beta", Maybe), cap("mean", Param), cap("var", Param)),
        *(False, ..., cap("eps", Literal), ...),
    )
    held = ("is_param(b)", "is_param(gamma)", "is_param(beta)")
    return Rule(
        f"folding.{name}",
        Pattern((norm,), (*held, *where)),  # pyright: ignore[reportArgumentType]  # texts are parsed there
        _fold,
        numerics="approximate",
        domain="moderate",
        gradients=False,
    )


def _convolution(name: str, *literals: str) -> Any:
    captures = {word: cap(word, Literal) for word in literals}
    return either(*(op(f"{name}{dims}d", _x, _w, _b, **captures) for dims in (1, 2, 3)))


_CONV = _convolution("conv", "stride", "padding", "dilation", "groups")
_TRANSPOSED = _convolution("conv_transpose", "stride", "padding", "output_padding", "groups", "dilation")
fold_conv = _rule("fold_conv", _CONV, "rank(x) == rank(w)")
fold_transposed_conv = _rule("fold_transposed_conv", _TRANSPOSED, "rank(x) == rank(w)")
fold_linear = _rule("fold_linear", op("linear", _x, _w, _b), "rank(x) == 2", "rank(w) == 2")


def _norm(draw: Draw, channels: int) -> dict[str, Any]:
    """What a norm over so many channels captures, and the bias before it."""
    optional = {name: draw.tensor(channels) if draw.flag() else None for name in ("b", "gamma", "beta")}
    var = draw.tensor(channels).abs() + 0.1  # a running variance is not negative
    return {**optional, "mean": draw.tensor(channels), "var": var, "eps": draw.choice(1e-5, 1e-3)}


def _sampled(draw: Draw, *, transposed: bool) -> dict[str, Any]:
    dims, groups = draw.integer(1, 3), draw.integer(1, 3)
    inputs, outputs = draw.integer(1, 2), draw.integer(1, 2)
    kernel = [draw.integer(1, 2) for _ in range(dims)]
    several = {"stride": [draw.integer(1, 2)] * dims, "dilation": [draw.integer(1, 2)] * dims, "groups": groups}
    rows = (groups * inputs, outputs) if transposed else (groups * outputs, inputs)
    found = {
        "x": draw.tensor(draw.size(), groups * inputs, *(draw.integer(4, 5) for _ in range(dims))),
        "w": draw.tensor(*rows, *kernel) / math.sqrt(math.prod((inputs, *kernel))),
        "padding": [draw.integer(0, 1)] * dims,
        **several,
        **_norm(draw, groups * outputs),
    }
    if draw.wide and draw.flag(0.25):  # without a batch, so that the norm takes the first size for channels
        channels = groups * outputs
        found["x"] = draw.tensor(groups * inputs, *[channels] * dims)
        found["w"] = draw.tensor(*rows, *[1] * dims)
        found |= {"padding": [0] * dims, "stride": [1] * dims}
    return {**found, "output_padding": [0] * dims} if transposed else found


@fold_conv.sampler
def _(draw: Draw) -> dict[str, Any]:
    return _sampled(draw, transposed=False)


@fold_transposed_conv.sampler
def _(draw: Draw) -> dict[str, Any]:
    return _sampled(draw, transposed=True)


@fold_linear.sampler
def _(draw: Draw) -> dict[str, Any]:
    inputs, outputs = draw.size(), draw.integer(1, 4)
    found = {"x": draw.tensor(draw.size(), inputs), "w": draw.tensor(outputs, inputs), **_norm(draw, outputs)}
    if draw.wide:  # of three dimensions, the norm takes the second for channels
        found |= draw.beyond({"x": draw.tensor(draw.size(), outputs, inputs)})
    return found


FOLDING = RuleSet("folding", fold_conv, fold_transposed_conv, fold_linear)
