"""Every layout rule against its operator: run whole, run on shards, values and gradients compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxrewrite import RuleSet
from fxrewrite.ops import key
from fxrewrite.spmd import LayoutTrial, LocalizeShapes, PropagateLayouts, SpmdContext, axis_of, try_layouts
from fxrewrite.testing import fake_mesh, run_on_ranks
from rules.collectives import COLLECTIVE_RULES
from rules.layouts import LAYOUTS
from rules.normal_forms import NORMAL_FORMS
from rules.reductions import REDUCTIONS

aten = torch.ops.aten
PLAN = RuleSet(
    "check",
    NORMAL_FORMS,
    PropagateLayouts("layouts", LAYOUTS),
    REDUCTIONS,
    LocalizeShapes("shapes", LAYOUTS),
    COLLECTIVE_RULES,
).once()


def f(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).requires_grad_()


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


UNARY = """
abs alias asin atan ceil celu clone contiguous cos cosh detach elu erf erfc exp exp2 expm1 floor gelu hardsigmoid
hardswish hardtanh isfinite isinf isnan leaky_relu log_sigmoid logical_not mish nan_to_num neg ones_like positive relu
relu6 round selu sgn sigmoid sign silu sin sinh softplus square tan tanh trunc zeros_like
"""
POSITIVE = "acos log log1p log2 log10 logit reciprocal rsqrt sqrt"
BINARY = """
add sub mul div remainder fmod maximum minimum fmax fmin atan2 hypot eq ne lt le gt ge logical_and logical_or
logical_xor copysign logaddexp
"""
BITWISE = "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__"

CASES: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    **{name: [lambda: (f(4, 3, 8),)] for name in UNARY.split()},
    **{name: [lambda: (f(4, 8, low=0.1, high=0.9),)] for name in POSITIVE.split()},
    **{
        name: [
            lambda: (f(4, 3, 8), f(4, 3, 8)),
            lambda: (f(4, 1, 8), f(3, 1)),
            lambda: (f(8), f(4, 8)),
            lambda: (f(4), f()),
        ]
        for name in BINARY.split()
    },
    **{name: [lambda: (b(4, 3, 8), b(4, 3, 8)), lambda: (b(4, 1), b(8))] for name in BITWISE.split()},
    "bitwise_not": [lambda: (b(4, 8),)],
    "__lshift__": [lambda: (i(5, 4, 8), i(3, 8))],
    "__rshift__": [lambda: (i(50, 4, 8), i(3, 8))],
    "floor_divide": [lambda: (i(50, 4, 8), i(5, 8) + 1)],
    "rsub": [lambda: (f(4, 8), f(4, 8))],
    "pow": [lambda: (f(4, 8), 2), lambda: (f(4, 8, low=0.5), f(8)), lambda: (2.0, f(4, 8))],
    "float_power": [lambda: (f(4, 8, low=0.5), 2.0)],
    "xlogy": [lambda: (f(4, 8), f(4, 8, low=0.1))],
    "clamp": [lambda: (f(4, 8), -1.0, 1.0)],
    "clamp_min": [lambda: (f(4, 8), -1.0)],
    "clamp_max": [lambda: (f(4, 8), 1.0)],
    "threshold": [lambda: (f(4, 8), 0.1, 0.0)],
    "to": [lambda: (f(4, 8), torch.float32)],
    "_to_copy": [lambda: (f(4, 8),)],
    "type_as": [lambda: (f(8), f(4, 8)), lambda: (f(4, 8), f(2))],
    "full_like": [lambda: (f(4, 8), 3.0)],
    "masked_fill": [lambda: (f(4, 8), b(4, 8), -1.0), lambda: (f(2, 4, 8), b(8), -1.0)],
    "where": [lambda: (b(4, 8), f(4, 8), f(8)), lambda: (b(4, 1), f(4, 8), f(4, 8))],
    "lerp": [lambda: (f(4, 8), f(4, 8), 0.3)],
    "addcmul": [lambda: (f(4, 8), f(4, 8), f(8))],
    "addcdiv": [lambda: (f(4, 8), f(4, 8), f(8, low=1.0))],
    "dropout": [lambda: (f(4, 8), 0.0, True)],
    "feature_dropout": [lambda: (f(4, 8), 0.0, True)],
    "native_dropout": [lambda: (f(4, 8), 0.0, True)],
    "sum": [lambda: (f(4, 3, 8),), lambda: (f(4, 3, 8), [1, -1]), lambda: (f(4, 3, 8), [0], True)],
    "mean": [lambda: (f(4, 3, 8),), lambda: (f(4, 3, 8), [-1], True), lambda: (f(4, 3, 8), [0, 2])],
    "amax": [lambda: (f(4, 3, 8), [-1])],
    "amin": [lambda: (f(4, 3, 8), [0], True)],
    "prod": [lambda: (f(4, 3, 8), 2)],
    "any": [lambda: (b(4, 8), 1)],
    "all": [lambda: (b(4, 8), 0)],
    "argmax": [lambda: (f(4, 8), 1)],
    "argmin": [lambda: (f(4, 8), 0, True)],
    "max": [lambda: (f(4, 8), f(8)), lambda: (f(4, 8), 1), lambda: (f(4, 8),)],
    "min": [lambda: (f(4, 8), f(4, 8)), lambda: (f(4, 8), 0)],
    "var": [lambda: (f(4, 3, 8), [-1])],
    "std": [lambda: (f(4, 3, 8), [-1])],
    "logsumexp": [lambda: (f(4, 8), [1])],
    "norm": [lambda: (f(4, 8), 2, [1])],
    "linalg_vector_norm": [lambda: (f(4, 8), 2, [1])],
    "softmax": [lambda: (f(4, 3, 8), -1), lambda: (f(4, 8), 0)],
    "log_softmax": [lambda: (f(4, 3, 8), -1)],
    "_softmax": [lambda: (f(4, 8), 1, False)],
    "_log_softmax": [lambda: (f(4, 8), 1, False)],
    "cumsum": [lambda: (f(4, 8), 1), lambda: (i(9, 4, 8), -1)],
    "cumprod": [lambda: (f(4, 8), 0)],
    "sort": [lambda: (f(4, 8), 1)],
    "argsort": [lambda: (f(4, 8), 1)],
    "flip": [lambda: (f(4, 8), [1])],
    "layer_norm": [lambda: (f(4, 3, 8), [8], f(8), f(8)), lambda: (f(4, 3, 8), [3, 8])],
    "rms_norm": [lambda: (f(4, 3, 8), [8], f(8))],
    "linear": [lambda: (f(4, 6, 8), f(12, 8), f(12)), lambda: (f(4, 8), f(12, 8)), lambda: (f(8), f(12, 8))],
    "matmul": [
        lambda: (f(4, 2, 8, 6), f(4, 2, 6, 8)),
        lambda: (f(4, 8, 6), f(6, 8)),
        lambda: (f(8), f(8)),
        lambda: (f(4, 8), f(8)),
        lambda: (f(1, 8, 4), f(4, 4, 8)),
    ],
    "mm": [lambda: (f(4, 8), f(8, 6))],
    "bmm": [lambda: (f(4, 8, 6), f(4, 6, 8))],
    "addmm": [lambda: (f(8), f(4, 6), f(6, 8))],
    "embedding": [lambda: (f(12, 8), i(12, 4, 6)), lambda: (f(12, 8), i(12, 8))],
    "view": [
        lambda: (f(4, 6, 8), [24, 8]),
        lambda: (f(4, 8), [4, 2, 4]),
        lambda: (f(2, 8, 3), [-1, 3]),
        lambda: (f(6, 4), [4, 6]),
        lambda: (f(4, 1, 8), [4, 8]),
        lambda: (f(6, 4, 8), [8, 3, 8]),
        lambda: (f(2, 12), [2, 4, 3]),
    ],
    "_unsafe_view": [lambda: (f(4, 8), [4, 2, 4])],
    "reshape": [
        lambda: (f(4, 6, 8), [24, 8]),
        lambda: (f(24, 8), [4, 6, 8]),
        lambda: (f(4, 6, 8).transpose(0, 1), [24, 8]),
    ],
    "flatten": [lambda: (f(4, 6, 8), 0, 1)],
    "unflatten": [
        lambda: (f(24, 8), 0, [4, 6]),
        lambda: (f(2, 8, 24), -1, [3, -1, 4]),
        lambda: (f(2, 24, 3), -2, [4, 6]),
    ],
    "squeeze": [lambda: (f(4, 1, 8), 1), lambda: (f(2, 8, 1),), lambda: (f(2, 4), 0)],
    "expand": [lambda: (f(4, 1, 8), [4, 6, 8]), lambda: (f(4, 8), [2, -1, 8])],
    "transpose": [lambda: (f(4, 6, 8), 1, -1)],
    "t": [lambda: (f(4, 8),)],
    "mT": [lambda: (f(2, 4, 8),)],
    "permute": [lambda: (f(4, 6, 8), [2, 0, 1])],
    "unsqueeze": [lambda: (f(4, 8), 1), lambda: (f(4, 8), -1)],
    "select": [lambda: (f(4, 6, 8), 1, 2)],
    "slice": [lambda: (f(4, 6, 8), 1, 1, 5), lambda: (f(4, 6, 8), 2, 0, 8)],
    "narrow": [lambda: (f(4, 8), 1, 0, 8), lambda: (f(4, 6, 8), 1, 1, 2)],
    "split": [lambda: (f(4, 8), 8, 1), lambda: (f(4, 6, 8), 3, 1)],
    "split_with_sizes": [lambda: (f(4, 6, 8), [2, 4], 1)],
    "chunk": [lambda: (f(4, 6, 8), 2, -1)],
    "unbind": [lambda: (f(4, 2, 8), 1)],
    "cat": [lambda: ([f(4, 6), f(4, 2)], 1)],
    "stack": [lambda: ([f(4, 6), f(4, 6)], 1)],
    "pad": [lambda: (f(4, 6, 8), [0, 1], "constant", 0.0), lambda: (f(4, 8), [1, 0, 0, 0])],
    "constant_pad_nd": [lambda: (f(4, 8), [1, 2]), lambda: (f(4, 8, 2), [0, 0, 1, -1])],
    "scaled_dot_product_attention": [
        lambda: (f(2, 4, 8, 4), f(2, 4, 8, 4), f(2, 4, 8, 4)),
        lambda: (f(2, 4, 8, 4), f(2, 4, 6, 4), f(2, 4, 6, 8), b(2, 1, 8, 6) | torch.eye(8, 6, dtype=torch.bool)),
        lambda: (f(2, 4, 8, 4), f(2, 4, 8, 4), f(2, 4, 8, 4), f(1, 4, 8, 8)),
        lambda: (f(4, 8, 4), f(4, 8, 4), f(4, 8, 4), None, 0.0, True),
    ],
    "cross_entropy_loss": [
        lambda: (f(8, 5), i(5, 8), None, 2),
        lambda: (f(8, 5), i(5, 8), f(5, low=0.1).detach(), 2, 3, 0.1),
        lambda: (f(8, 5), i(5, 8), None, 0),
        lambda: (f(4, 5, 8), i(5, 4, 8), None, 2),
        lambda: (f(8, 5), f(8, 5), None, 2),
    ],
}
RANDOM = {"bernoulli", "rand_like", "randn_like", "empty_like"}
"""Their values differ by rank on purpose; their layouts are those of every pointwise operator."""


def _target(name: str, args: tuple[Any, ...]) -> Any:
    """The overload that a traced call of these arguments resolves to."""
    packet = getattr(aten, name)
    for overload in (getattr(packet, o) for o in packet.overloads()):
        try:
            overload(*args)
        except (RuntimeError, TypeError, NotImplementedError, ValueError):
            continue
        return overload
    raise AssertionError(f"no overload of {name} takes {args}")


def _apply(gm: fx.GraphModule, context: SpmdContext) -> Any:
    return PLAN.apply(gm, context=context)


def _run(gm: fx.GraphModule, inputs: Any, num_ranks: int) -> Any:
    run = run_on_ranks(gm, inputs, num_ranks, backward=0 if gm.graph.output_node().args[0][0] is not None else None)
    return run.outputs, run.mean_grads()


def trials(name: str, args: tuple[Any, ...], num_ranks: int) -> list[LayoutTrial]:
    with fake_mesh((num_ranks,), ("sp",)) as mesh:
        return list(try_layouts(_target(name, args), args, {}, axis=axis_of(mesh, "sp"), apply=_apply, run=_run))


@pytest.mark.parametrize("name", CASES)
def test_operator_on_shards_equals_operator_whole(name: str) -> None:
    torch.manual_seed(0)
    sharded = 0
    for case in CASES[name]:
        for trial in trials(name, case(), 2):
            assert trial.error <= 1e-12, (name, trial)
            sharded += not trial.gathered
    assert sharded, f"{name}: its rule never allows a shard"


def test_every_operator_with_a_rule_has_a_case() -> None:
    ruled = {op for rule in LAYOUTS for op in rule.ops}
    tried = {key(getattr(aten, name)) for name in CASES} | {f"aten::{name}" for name in RANDOM}
    assert ruled <= tried, f"no case: {sorted(ruled - tried)}"
