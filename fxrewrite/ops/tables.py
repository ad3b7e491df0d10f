"""Tables of what torch's schemas do not say: Python operators, aliases, Python wrappers around one ATen operator.

A differential test (tests/ops/test_tables.py) runs both spellings of every entry.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch._jit_internal import boolean_dispatched

OPERATORS: Mapping[Callable[..., Any], str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.pow: "pow",
    operator.matmul: "matmul",
    operator.neg: "neg",
    operator.pos: "positive",
    operator.abs: "abs",
    operator.invert: "bitwise_not",
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.lshift: "bitwise_left_shift",
    operator.rshift: "bitwise_right_shift",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
    operator.iand: "bitwise_and_",
    operator.ior: "bitwise_or_",
    operator.ixor: "bitwise_xor_",
    operator.ilshift: "bitwise_left_shift_",
    operator.irshift: "bitwise_right_shift_",
}
"""Python operators on tensors; on Python numbers and symbolic sizes they stay `operator.add` ..."""

ALIASES: Mapping[str, str] = {
    "__and__": "bitwise_and",
    "__lshift__": "bitwise_left_shift",
    "__or__": "bitwise_or",
    "__rshift__": "bitwise_right_shift",
    "__xor__": "bitwise_xor",
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "fix": "trunc",
    "ger": "outer",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "row_stack": "vstack",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_gammaln": "lgamma",
    "special_log1p": "log1p",
    "special_log_softmax": "log_softmax",
    "special_logsumexp": "logsumexp",
    "special_sinc": "sinc",
    "special_softmax": "softmax",
    "special_xlogy": "xlogy",
    "subtract": "sub",
    "swapdims": "transpose",
    "true_divide": "div",
}
"""Synonymous ATen names, each mapped to the name of the function of torch that people write."""

DIMS_ARE_A_SET = frozenset(
    (
        *("all", "amax", "amin", "any", "count_nonzero", "flip", "linalg_vector_norm", "logsumexp", "mean", "nansum"),
        *("std", "std_mean", "sum", "var", "var_mean"),
    )
)
"""Operators whose list of dimensions means the same in any order."""
OF_ALL = frozenset({"mean", "std", "std_mean", "sum", "var", "var_mean"})
"""Those of them where no dimension in the list means all, as None does."""
OMITTED = frozenset({"dim", "rounding_mode"})
"""Optional arguments without a default in one overload, which another overload does not have: None is to omit them."""

CASTS: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
    "int": torch.int32,
    "long": torch.int64,
    "short": torch.int16,
}
"""Tensor methods that are `to(dtype)`."""

RENAMED_KEYWORDS: Mapping[str, str] = {
    **dict.fromkeys(("input", "tensor", "x"), "self"),
    "axis": "dim",
    "keepdims": "keepdim",
}
"""Keywords of the Python bindings that have another name in the schema."""

VARARGS: Mapping[str, int] = {
    "view": 1,
    "reshape": 1,
    "permute": 1,
    "expand": 1,
    "repeat": 1,
    "tile": 1,
    "flip": 1,
    "new_zeros": 1,
    "new_ones": 1,
    "new_empty": 1,
    "einsum": 1,
    "zeros": 0,
    "ones": 0,
    "empty": 0,
    "rand": 0,
    "randn": 0,
}
"""Functions and methods whose list argument may be spread, with the position where the list starts."""


def _number_of(*names: str) -> Callable[[Any], Any]:
    """Returns a function of what Python calls by name, and ATen by its number: the place among the names."""
    return lambda value: names.index(value) if isinstance(value, str) and value in names else value


_reduction = _number_of("none", "mean", "sum")
_distance_mode = _number_of(
    "use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"
)


def _compute_mode(value: Any) -> Any:
    number = _distance_mode(value)
    return None if type(number) is int and number == 0 else number  # as torch passes the first


def _aligned(value: Any) -> Any:
    return False if value is None else value


def _padding_index(value: Any) -> Any:
    return -1 if value is None else value


def _is_negative(value: Any) -> bool:
    """True for a negative padding index: Python counts it from the end, but in the schema -1 means none."""
    return isinstance(value, int) and value < 0


def _is_batchmean(value: Any) -> bool:
    """True for the mean over the batch, which ATen does not have."""
    return value == "batchmean"


def _is_zero(value: Any) -> bool:
    """True for a threshold without a smooth part: Python calls another loss."""
    return value == 0


def _is_no_vector_norm(value: Any) -> bool:
    """True for a norm of matrices by its name; "fro" is that of the vector of all entries."""
    return value != "fro" and not isinstance(value, (int, float))


def _order(value: Any) -> Any:
    return 2 if value == "fro" else value


def _has_none(value: Any) -> bool:
    """True for an output size that is in part the input's."""
    return value is None or (isinstance(value, (list, tuple)) and None in value)


def _stride(value: Any) -> Any:
    return [] if value is None else value


@functools.cache
def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a Python function; of one that torch dispatches by a flag, those without the flag."""
    by_flag = boolean_dispatched.get(target) if isinstance(target, types.FunctionType) else None
    try:
        return inspect.signature(by_flag["if_false"] if by_flag is not None else target).parameters
    except (TypeError, ValueError):  # a builtin: its schema has them
        return {}


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A Python function that is one ATen operator with other argument names.

    Attributes:
        name: the ATen operator.
        arguments: schema name -> name in the Python signature, if they differ.
        inplace: the Python argument that turns it into the in-place operator.
        needs_default: Python arguments without a counterpart, with which it is another function. Others, such as
            `_stacklevel`, do not affect the result.
        unless: Python argument -> test of its value; if true, it is another function.
        convert: schema name -> function of the Python value.
        constants: schema arguments that the wrapper does not offer.
    """

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict[str, str])
    inplace: str = ""
    needs_default: tuple[str, ...] = ()
    unless: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict[str, Callable[[Any], bool]])
    convert: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Callable[[Any], Any]])
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def depends_on_values(self) -> bool:
        """Whether values of arguments decide if a call is the operator, and not their kinds alone."""
        return bool(self.unless or self.needs_default)


_UNARY = {"self": "input"}
_LOSS = ("size_average", "reduce")

WRAPPERS: Mapping[Callable[..., Any], Wrapper] = {
    F.softmax: Wrapper("softmax", _UNARY),
    F.log_softmax: Wrapper("log_softmax", _UNARY),
    F.relu: Wrapper("relu", _UNARY, inplace="inplace"),
    F.relu6: Wrapper("relu6", _UNARY, inplace="inplace"),
    F.silu: Wrapper("silu", _UNARY, inplace="inplace"),
    F.mish: Wrapper("mish", _UNARY, inplace="inplace"),
    F.selu: Wrapper("selu", _UNARY, inplace="inplace"),
    F.hardswish: Wrapper("hardswish", _UNARY, inplace="inplace"),
    F.hardsigmoid: Wrapper("hardsigmoid", _UNARY, inplace="inplace"),
    F.elu: Wrapper("elu", _UNARY, inplace="inplace", constants={"scale": 1, "input_scale": 1}),
    F.leaky_relu: Wrapper("leaky_relu", _UNARY, inplace="inplace"),
    F.celu: Wrapper("celu", _UNARY, inplace="inplace"),
    F.threshold: Wrapper("threshold", _UNARY, inplace="inplace"),
    F.glu: Wrapper("glu", _UNARY),
    F.hardtanh: Wrapper("hardtanh", _UNARY, inplace="inplace"),
    F.sigmoid: Wrapper("sigmoid", _UNARY),
    F.tanh: Wrapper("tanh", _UNARY),
    F.dropout: Wrapper("dropout", {"train": "training"}, inplace="inplace"),
    F.alpha_dropout: Wrapper("alpha_dropout", {"train": "training"}, inplace="inplace"),
    F.feature_alpha_dropout: Wrapper("feature_alpha_dropout", {"train": "training"}, inplace="inplace"),
    F.rrelu: Wrapper("rrelu", _UNARY, inplace="inplace"),
    F.layer_norm: Wrapper("layer_norm"),
    F.rms_norm: Wrapper("rms_norm"),
    F.group_norm: Wrapper("group_norm"),
    F.batch_norm: Wrapper("batch_norm", constants={"cudnn_enabled": True}),
    F.instance_norm: Wrapper("instance_norm", constants={"cudnn_enabled": True}),
    F.adaptive_avg_pool2d: Wrapper("adaptive_avg_pool2d", _UNARY, unless={"output_size": _has_none}),
    F.adaptive_avg_pool3d: Wrapper("adaptive_avg_pool3d", _UNARY, unless={"output_size": _has_none}),
    **{
        getattr(F, name): Wrapper(name, _UNARY, unless={"return_indices": bool}, convert={"stride": _stride})
        for name in ("max_pool1d", "max_pool2d", "max_pool3d")
    },
    F.embedding: Wrapper(
        "embedding",
        {"indices": "input"},
        needs_default=("max_norm",),
        unless={"padding_idx": _is_negative},
        convert={"padding_idx": _padding_index},
    ),
    **{
        getattr(F, name): Wrapper(name, _UNARY, needs_default=_LOSS, convert={"reduction": _reduction})
        for name in (
            *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "hinge_embedding_loss"),
            *("margin_ranking_loss", "multi_margin_loss", "multilabel_margin_loss", "poisson_nll_loss"),
            *("soft_margin_loss", "triplet_margin_loss"),
        )
    },
    **{
        getattr(F, name): Wrapper(name, _UNARY, needs_default=(*_LOSS, "weight"), convert={"reduction": _reduction})
        for name in ("binary_cross_entropy", "huber_loss", "l1_loss", "mse_loss")
    },
    F.cross_entropy: Wrapper("cross_entropy_loss", _UNARY, needs_default=_LOSS, convert={"reduction": _reduction}),
    F.nll_loss: Wrapper("nll_loss_nd", _UNARY, needs_default=_LOSS, convert={"reduction": _reduction}),
    F.kl_div: Wrapper(
        "kl_div", _UNARY, needs_default=_LOSS, unless={"reduction": _is_batchmean}, convert={"reduction": _reduction}
    ),
    F.smooth_l1_loss: Wrapper(
        "smooth_l1_loss", _UNARY, needs_default=_LOSS, unless={"beta": _is_zero}, convert={"reduction": _reduction}
    ),
    F.unfold: Wrapper("im2col", _UNARY),
    F.fold: Wrapper("col2im", _UNARY),
    F.grid_sample: Wrapper(
        "grid_sampler",
        {"interpolation_mode": "mode"},
        convert={
            "interpolation_mode": _number_of("bilinear", "nearest", "bicubic"),
            "padding_mode": _number_of("zeros", "border", "reflection"),
            "align_corners": _aligned,
        },
    ),
    torch.functional.cdist: Wrapper("cdist", convert={"compute_mode": _compute_mode}),
    F.pad: Wrapper("pad", _UNARY),
    torch.Tensor.unflatten: Wrapper("unflatten"),
    torch.functional.norm: Wrapper(
        "linalg_vector_norm",
        {"self": "input", "ord": "p"},
        needs_default=("out",),
        unless={"p": _is_no_vector_norm},
        convert={"ord": _order},
    ),
    torch.Tensor.norm: Wrapper(
        "linalg_vector_norm", {"ord": "p"}, unless={"p": _is_no_vector_norm}, convert={"ord": _order}
    ),
}
"""Python functions of torch that are exactly one ATen operator; the key of other functions is their own name."""

ATTRIBUTES: Mapping[str, str] = {"H": "matrix_H", "T": "numpy_T", "mH": "mH", "mT": "mT"}
"""Attributes of a tensor that are operators, in graphs of torch functions: `getattr(x, "mT")`."""
METHODS: Mapping[str, Callable[..., Any]] = {"norm": torch.Tensor.norm}
"""Tensor methods by name that are Python functions with a table entry, and not the operator of their name."""
