"""The tensor-parallel and expert-parallel plans that models of transformers ship, as a parallelism.

    plan = from_transformers(model, "tp") | from_transformers(model, "ep")

A style is a placement of parameters; what transformers' styles do to activations and gradients follows from that.

    colwise                              rows of a linear's weight, and its bias
    rowwise                              columns of a linear's weight; its bias is whole
    colwise_gather_output, colwise_rep   as colwise, and the output is gathered, but for the head's
    rowwise_split_input, rowwise_rep     as rowwise
    packed_colwise, packed_rowwise       as colwise and rowwise, of each half of the dimension alone
    embedding_rowwise, _colwise          rows and columns of an embedding
    grouped_gemm                         whole experts (`rules.parallel.experts`)
    those of IMPLIED                     whole; propagation finds the sums of outputs and gradients

Adapters of low rank (LoRA, by peft's names) are cut as what they adapt.
Any other style is an error that names the style and the module. Heads that the ranks do not divide are refused when the
plan meets the model (`rules.parallel.heads`), a dimension of a parameter that they do not divide likewise.
Source: transformers 5, distributed/tensor_parallel.py and mixin.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from fxrewrite import FxRewriteError
from fxrewrite.graph import matches_glob
from fxrewrite.spmd import Call, IndexMap, LayoutRule, Parallelism, Replicate, Shard, module_output, param
from rules.layouts.terms import index_map
from rules.parallel.experts import EXPERTS
from rules.parallel.heads import WHOLE_HEADS
from rules.parallel.vocabulary import VOCABULARY, VOCABULARY_LAYOUTS


def _linear(from_end: int, outer: int = 1) -> Callable[[torch.Tensor], Shard | None]:
    """Of a linear's weight, rows (2 from the end), and then its bias too, or columns (1 from the end)."""

    def held(p: torch.Tensor) -> Shard | None:
        if p.dim() > 1:
            return Shard(p.dim() - from_end, outer=outer)
        return Shard(0, outer=outer) if from_end == 2 else None

    return held


_ROWS, _COLUMNS = _linear(2), _linear(1)
HELD: Mapping[str, Callable[[torch.Tensor], Shard | None]] = {
    "colwise": _ROWS,
    "colwise_gather_output": _ROWS,
    "colwise_rep": _ROWS,
    "rowwise": _COLUMNS,
    "rowwise_split_input": _COLUMNS,
    "rowwise_rep": _COLUMNS,
    "packed_colwise": _linear(2, outer=2),
    "packed_rowwise": _linear(1, outer=2),
    "embedding_rowwise": lambda _: Shard(0),
    "embedding_colwise": lambda _: Shard(1),
    "grouped_gemm": lambda _: Shard(0),
}
"""How ranks hold a parameter of a style; None is whole."""
GATHERED = ("colwise_gather_output", "colwise_rep")
IMPLIED = frozenset(
    {
        "all_reduce",
        "ep_dispatch_experts",
        "ep_router",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "replicate",
        "replicated_with_grad_allreduce",
    }
)
"""Styles that say nothing of parameters, and whose collectives propagation finds."""


def grouped_product(call: Call) -> IndexMap | None:
    """!s k, !g k n, !g -> s n: rows in groups, each of which is multiplied by a matrix of its own"""
    if (len(call.shape()), len(call.shape(1))) != (2, 3):
        return None
    rows, matrices = list(call.args)[:2]
    operands = {rows: (("s",), ("k",)), matrices: (("g",), ("k",), ("n",)), "offs": (("g",),)}
    return index_map(call, operands, (("s",), ("n",)), whole=("s",), summed={"k"})


def _layouts() -> tuple[LayoutRule, ...]:
    """Those of operators that models of transformers run, beside ATen's."""
    products = ["aten::_grouped_mm"]
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # models of experts import what defines it
        products.append("transformers::grouped_mm_fallback")
    return (*VOCABULARY_LAYOUTS, LayoutRule("layout.grouped_product", tuple(products), grouped_product))


def from_transformers(model: nn.Module, axis: str = "tp", *, plan: Literal["tp", "ep"] | None = None) -> Parallelism:
    """The tensor-parallel or the expert-parallel plan of the model, over this axis of a mesh.

    Args:
        model: of transformers.
        axis: of the mesh.
        plan: by default the expert-parallel one over an axis that is called "ep", and the tensor-parallel one over any
            other.

    Raises:
        FxRewriteError: the model has no such plan, or a style of it means nothing here; names style and module.
    """
    plan = plan or ("ep" if axis == "ep" else "tp")
    styles: Mapping[str, str] = getattr(model, f"{plan}_plan", None) or {}
    if not styles:
        what = {"tp": "tensor", "ep": "expert"}[plan]
        raise FxRewriteError(
            f"{type(model).__name__} has no {what}-parallel plan ({plan}_plan); state placements in a Parallelism"
        )
    for where, style in styles.items():
        if style not in HELD and style not in IMPLIED:
            known = ", ".join(sorted({*HELD, *IMPLIED}))
            raise FxRewriteError(f"{where}: style {style!r} of {plan}_plan is not supported; there are {known}")
    place = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wrapper = _WRAPPER if all(name.startswith(_WRAPPER) for name in parameters) else ""
    groups: dict[str, list[str]] = {}
    for name in parameters:
        groups.setdefault(_generic(name), []).append(name)
    for glob, names in groups.items():
        planned, matrix = _planned(glob.removeprefix(wrapper))
        style = styles.get(planned, styles.get(planned.rpartition(".")[0], ""))
        held = HELD[style](parameters[names[0]]) if style in HELD and _is_cut(matrix, style) else None
        if held is not None:
            of_them = [name for name in parameters if matches_glob(name, glob)] == names
            # The model has them; a forward may still read none, and a tied one goes by one of its names.
            place |= {param(one, optional=True): held for one in ([glob] if of_them else names)}
    held_of = {parameters[name]: held for site, held in place.items() for name in parameters if site.glob == name}
    for name, parameter in parameters.items():  # a tied parameter of which a plan names one module alone
        if parameter in held_of and not any(matches_glob(name, site.glob) for site in place):
            place[param(name, optional=True)] = held_of[parameter]
    gathered = [wrapper + where for where, style in styles.items() if style in GATHERED]
    heads = _names(model, "get_output_embeddings")
    place |= {module_output(name, optional=True): Replicate() for name in gathered if name not in heads}
    embeddings = [name for name in _names(model, "get_input_embeddings") if name.removeprefix(wrapper) in styles]
    place |= {module_output(name, optional=True): Replicate() for name in embeddings}
    if not place:
        raise FxRewriteError(
            f"{plan}_plan of {type(model).__name__} names no parameter that the model has: "
            f"{', '.join(list(styles)[:3])} ..., where the model has {', '.join(list(parameters)[:3])} ..."
        )
    name = f"transformers.{type(model).__name__}"
    if plan == "ep":
        return replace(EXPERTS, name=f"{name}.experts", axis=axis, place=place)
    return Parallelism(
        name,
        axis=axis,
        place=place,
        rules=[VOCABULARY],
        placed=[WHOLE_HEADS],
        layouts=_layouts(),
    )


_WRAPPER = "base_model.model."
"""What peft puts in front of the names of a model that it adapts."""


def _planned(name: str) -> tuple[str, str]:
    """A parameter as plans name it, which know no adapters; and which of an adapter's matrices it is, A, B or ''.

    `q.weight` of `q.base_layer.weight`, of `q.lora_A.default.weight` and of `q.lora_B.default.weight`.
    """
    adapter = re.search(r"\.lora_([AB])\.[^.]+(?=\.\w+$)", name)
    if adapter is None:
        return re.sub(r"\.base_layer(?=\.\w+$)", "", name), ""
    return name[: adapter.start()] + name[adapter.end() :], adapter[1]


def _is_cut(matrix: str, style: str) -> bool:
    """Whether a linear's style says how ranks hold a matrix of its adapter: A reads its inputs, B gives its outputs."""
    return not matrix or (matrix == "A") == ("rowwise" in style and "embedding" not in style)


def _generic(name: str) -> str:
    """A name as plans write it: `layers.*.mlp` of `layers.0.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _names(model: nn.Module, getter: str) -> list[str]:
    """The names of the module that this method of transformers gives."""
    get: Callable[[], nn.Module | None] | None = getattr(model, getter, None)
    found = get() if get is not None else None
    return [name for name, module in model.named_modules() if module is found]
