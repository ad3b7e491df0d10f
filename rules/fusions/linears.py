"""Parallel linears of one input become one linear whose result is split.

    linear(x, a), linear(x, b), ...          ->  split(linear(x, cat([a, b, ...])), [rows of a, rows of b, ...], -1)
    linear(x, a, p), linear(x, b, q), ...    ->  the same, with cat([p, q, ...])

Matches all linears of one value whose weights are parameters; those with a bias and those without are merged apart.
`STACKED_LINEARS` concatenates once, when it is applied, for inference: the stacked weights are buffers, and the single
ones leave the module where nothing else reads them. Its rules refuse weights that are inputs of the graph, as
torch.compile passes them.
These are q, k and v; gate and up, with them the MLP of a parallel block (GPT-J); k and v of all decoder layers over one
encoder (T5).
Does not match a weight that is computed ("expected a parameter at root.weight, found aten::mul (%mul)") or has one
dimension ("w has rank 1"), nor a bias that is broadcast over the rows ("size(b, 0) is 1, size(w, 0) is 6").
Refuses weights of several dtypes or devices: "the weights are float32 on cpu, bfloat16 on cpu".
Shapes: x [..., d], weights [n_i, d], biases [n_i].
Numerics: reassociates. On CPU, oneMKL chooses its kernel by the number of rows: results were bitwise equal in bfloat16
and float16, mostly in float32, seldom in float64. Gradients of weights were equal; the gradient of `x` is one sum
instead of several.
Cost: every call concatenates the weights and splits their gradient, which one large product must make up for. A backend
that folds constants, as inductor's freezing does, concatenates once, as `STACKED_LINEARS` does.
Source: NVIDIA Megatron-LM, megatron/core/transformer/attention.py (linear_qkv); PyTorch,
torch/_inductor/fx_passes/freezing_patterns.py.

>>> import torch, torch.nn.functional as F
>>> class Parallel(torch.nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.q, self.k = torch.nn.Linear(4, 6), torch.nn.Linear(4, 2)
...     def forward(self, x):
...         return self.q(x), self.k(x)
>>> def exported():
...     return torch.export.export(Parallel(), (torch.rand(3, 4),)).module()
>>> print(STACKED_LINEARS.apply(exported()).lines[0])
computed once: self.weights of q.weight, k.weight (linears.stack_biased)
>>> LINEARS.apply(exported())["linears.merge_biased"].rewrites
1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxrewrite import Constraint, Match, Param, Pattern, Rule, RuleSet, cap, op, refuse, siblings, where

aten = torch.ops.aten
_x, _w, _b = cap("x"), cap("w", Param), cap("b", Param)


def _rule(name: str, linear: Any, *conditions: Constraint, is_once: bool = False) -> Rule:
    """Makes the rule that joins weights in the graph, or once, when it is applied."""
    made = Rule(
        f"linears.{name}",
        Pattern((siblings(linear, on="x"),), (where.rank("w", 2), *conditions)),
        numerics="reassociates",
        gradients=not is_once,
        optional=True,
    )

    @made.replacement
    def _(match: Match, x: fx.Proxy, w: list[fx.Proxy]) -> tuple[Any, ...]:
        """one linear of joined weights, split"""
        joined = [_joined("weights", w, match if is_once else None)]
        if "b" in match.captures:
            biases = [match.proxy(bias) for bias in match["b"]]
            joined.append(_joined("biases", biases, match if is_once else None))
        return _split(aten.linear(x, *joined), w)

    return made


def _split(merged: Any, weights: list[Any]) -> tuple[Any, ...]:
    parts = aten.split_with_sizes(merged, [weight.shape[0] for weight in weights], -1)
    return tuple(parts[index] for index in range(len(weights)))


def _joined(what: str, tensors: list[Any], once: Match | None) -> Any:
    """Concatenates the tensors; refuses different dtypes, which torch.cat would promote to one that no linear has."""
    kinds = dict.fromkeys(f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in tensors)
    if len(kinds) > 1:
        refuse(f"the {what} are {', '.join(kinds)}")
    return aten.cat(tensors) if once is None else once.once(torch.cat, tensors, name=what)


_PLAIN = (op("linear", _x, _w),)
_BIASED = op("linear", _x, _w, _b), where.rank("b", 1), where.size("b", 0, "==", "size(w, 0)")
LINEARS = RuleSet("linears", _rule("merge", *_PLAIN), _rule("merge_biased", *_BIASED))
STACKED_LINEARS = RuleSet(
    "stacked_linears", _rule("stack", *_PLAIN, is_once=True), _rule("stack_biased", *_BIASED, is_once=True)
)
