"""What kinds of operators there are: the one table of what neither schemas nor tags of torch say.

Schemas and tags say what writes, draws and shows memory; `fxrewrite.ops.called` reads them. That a reshape keeps the
order of entries, that a product contracts a dimension, or what autograd saves, they do not say. An operator that a new
torch brings gets its words here, and whoever asks for a trait knows it.

>>> sorted(traits_of("aten::view")), has_trait("aten::clone", "same", "cast"), factors("aten::addmm")
(['reshape'], True, ('mat1', 'mat2'))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from fxrewrite.ops.binding import bind
from fxrewrite.ops.keys import key
from fxrewrite.ops.tables import DIMS_ARE_A_SET
from fxrewrite.ops.value import tensors_in, value

Trait: TypeAlias = Literal[
    "same",
    "detach",
    "cast",
    "reshape",
    "squeeze",
    "expand",
    "permute",
    "slice",
    "split",
    "zeros",
    "ones",
    "full",
    "new_dim",
    "dims_are_a_set",
    "product",
    "commutative",
    "maybe_view",
    "statistics",
    "one_dtype",
    "any_of_equal",
    "addressed",
    "saves_nothing",
    "saves_result",
    "saves_operands",
]
"""What an operator is.

same: its result is its operand, entry by entry, and so is the gradient; detach: without a gradient.
cast: the first operand in another dtype, or on another device.
reshape: the entries of the first operand in their order, in other dimensions; squeeze: with dimensions of size 1.
expand: entries are repeated along dimensions of size 1, or new ones in front; permute: dimensions change places.
slice: some entries of one dimension, that are evenly spaced; split: a list of all parts of one dimension.
zeros, ones, full: one number everywhere, see `filled_with`.
new_dim: the result has one dimension more, and the argument `dim` counts the result's.
dims_are_a_set: their order means nothing.
product: of matrices or vectors, summed over the last dimension of the first factor; see `factors`.
commutative: `self` and `other` may trade places, other arguments at their defaults.
maybe_view: a view, or the operand itself, where that is possible, and else a copy.
statistics: running statistics are written while training, which the schema does not say.
one_dtype: its kernels refuse operands of several dtypes, indices and masks aside, and meta kernels do not compare them.
any_of_equal: which of equal entries it takes, or in which order, is not documented, and may change.
addressed: it takes entries of memory by address, whatever the operand's shape says, or changes how its operand does.
saves_nothing, saves_result, saves_operands: what autograd saves of the call's tensors for the backward pass, at most;
of dropout in training it saves the noise, which is as large as the result.
"""

_FACTORS: Mapping[str, tuple[str, str]] = {
    "aten::linear": ("input", "weight"),
    "aten::matmul": ("self", "other"),
    "aten::mm": ("self", "mat2"),
    "aten::bmm": ("self", "mat2"),
    "aten::mv": ("self", "vec"),
    "aten::dot": ("self", "tensor"),
    "aten::addmm": ("mat1", "mat2"),
    "aten::baddbmm": ("batch1", "batch2"),
    "aten::_grouped_mm": ("self", "mat2"),
}
"""Matrix products, and the arguments that they multiply."""
_TABLE: Mapping[Trait, str] = {
    "same": "alias clone contiguous",
    "detach": "detach detach_copy",
    "cast": "_to_copy to type_as",
    "reshape": "_unsafe_view flatten ravel reshape reshape_as unflatten view view_as",
    "squeeze": "squeeze unsqueeze",
    "expand": "expand",
    "permute": "permute transpose",
    "slice": "narrow slice",
    "split": "chunk split split_with_sizes",
    "zeros": "new_zeros zeros zeros_like",
    "ones": "new_ones ones ones_like",
    "full": "full full_like new_full",
    "new_dim": "diag_embed stack unsqueeze",
    "dims_are_a_set": " ".join(DIMS_ARE_A_SET),
    "product": " ".join(name.removeprefix("aten::") for name in _FACTORS),
    "commutative": """
        add bitwise_and bitwise_or bitwise_xor eq fmax fmin gcd hypot lcm logaddexp logaddexp2 logical_and logical_or
        logical_xor maximum minimum mul ne
    """,
    "maybe_view": """
        atleast_1d atleast_2d atleast_3d contiguous einsum flatten ravel reshape reshape_as resolve_conj resolve_neg
        sum_to_size to type_as
    """,
    "statistics": "batch_norm instance_norm native_batch_norm",
    "one_dtype": """
        _grouped_mm _prelu_kernel _softmax_backward_data addbmm addmm addmv addr baddbmm binary_cross_entropy bmm
        complex conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution dot gcd grid_sampler
        grid_sampler_2d grid_sampler_3d heaviside index_add index_copy index_put lcm linalg_cross linear matmul mm mv
        nll_loss_forward polar put vdot
    """,
    "any_of_equal": "argsort kthvalue median mode msort nanmedian sort topk",
    "addressed": """
        as_strided as_strided_ as_strided_copy as_strided_scatter resize resize_ resize_as resize_as_ set_ squeeze_
        swapaxes_ swapdims_ t_ transpose_ unsqueeze_
    """,
    "saves_nothing": """
        _to_copy add add_ arange cat clone constant_pad_nd copy cumsum flip full full_like mean neg ones ones_like
        repeat roll rsub stack sub sum tril triu zeros zeros_like
    """,
    "saves_result": "_softmax dropout exp log_softmax relu rsqrt sigmoid sqrt softmax tanh",
    "saves_operands": """
        _grouped_mm abs addcdiv addcmul addmm baddbmm binary_cross_entropy binary_cross_entropy_with_logits bmm clamp
        clamp_max clamp_min conv1d conv2d conv3d convolution cos cross_entropy_loss div dot einsum elu embedding erf
        gather gelu group_norm hardswish index index_add index_select layer_norm leaky_relu linear log log1p
        log_sigmoid masked_fill matmul maximum minimum mish mm mse_loss mul mv nll_loss repeat_interleave rms_norm
        scatter scatter_add silu sin smooth_l1_loss softplus square where
    """,
}
_OPERATORS: Mapping[Trait, frozenset[str]] = {
    trait: frozenset(f"aten::{name}" for name in names.split()) for trait, names in _TABLE.items()
}
_TRAITS: Mapping[str, frozenset[Trait]] = {
    name: frozenset(trait for trait, names in _OPERATORS.items() if name in names)
    for name in frozenset[str]().union(*_OPERATORS.values())
}
_INDICES = frozenset({"index", "indices", "target", "mask"})
"""Names of operands whose dtype is their own."""
DIM_ARGUMENTS = frozenset({"dim", "dim0", "dim1", "dims", "start_dim", "end_dim", "source", "destination"})
"""Names of arguments that are dimensions where they are integers."""
_NONE: frozenset[Trait] = frozenset()


def traits_of(op: fx.Node | str) -> frozenset[Trait]:
    """What the operator of a node, or the one with this key, is; empty for one that the table does not have."""
    return _TRAITS.get(op if isinstance(op, str) else key(op), _NONE)


def has_trait(op: fx.Node | str, *any_of: Trait) -> bool:
    """Whether the operator of a node, or the one with this key, has one of these traits."""
    return not traits_of(op).isdisjoint(any_of)


def operators(*any_of: Trait) -> frozenset[str]:
    """Keys of the operators that have one of these traits."""
    return frozenset[str]().union(*(_OPERATORS[trait] for trait in any_of))


def factors(op: fx.Node | str) -> tuple[str, str] | None:
    """The two arguments that a matrix product multiplies, summing over the last dimension of the first; else None."""
    return _FACTORS.get(op if isinstance(op, str) else key(op))


def filled_with(node: fx.Node) -> Any:
    """The number, or the node that holds it, that is everywhere in what the node makes; None where it is not said."""
    found = traits_of(node)
    if "full" in found:
        return bind(node)["fill_value"]
    return 0 if "zeros" in found else 1 if "ones" in found else None


def clashing_dtypes(node: fx.Node) -> dict[str, torch.dtype]:
    """The dtypes of the operands by name, where a kernel takes one dtype and the call gives several; else empty."""
    given = {tensor.dtype for read in node.all_input_nodes for tensor in tensors_in(value(read))}
    if len(given) < 2 or not has_trait(node, "one_dtype"):
        return {}
    bound = bind(node)
    values = {name: value(given) for name, given in bound.items() if isinstance(given, fx.Node)}
    dtypes = {n: v.dtype for n, v in values.items() if isinstance(v, torch.Tensor) and n not in _INDICES}
    return dtypes if len(set(dtypes.values())) > 1 and "out_dtype" not in bound else {}


def exchangeable(operator_key: str) -> tuple[str, str] | None:
    """The two arguments of the operator that may trade places (its others at their defaults); else None."""
    if operator_key in _OPERATORS["commutative"]:
        return "self", "other"
    return ("dim0", "dim1") if operator_key == "aten::transpose" else None


def is_commutative(operator_key: str) -> bool:
    """Whether `self` and `other` of the operator may trade places (its other arguments at their defaults)."""
    return operator_key in _OPERATORS["commutative"]
