"""The fake value that tracing left on a node, under whichever metadata key."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from fxrewrite.errors import refuse


class _Missing:
    """Means "no value known", which differs from the value None."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Any = _Missing()
_SCALARS = (int, float, bool, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


def value(node: fx.Node) -> Any:
    """Returns `meta["val"]` (normalized and exported graphs) or `meta["example_value"]` (Dynamo), or else MISSING."""
    meta = node.meta
    if "val" in meta:
        return meta["val"]
    return meta.get("example_value", MISSING)


def fake_value(node: fx.Node) -> Any:
    """Returns `value`, for rules that cannot continue without it.

    Raises:
        RefusedError: the graph was traced without values.
    """
    found = value(node)
    if found is MISSING:
        refuse(
            f"%{node.name} has no value in its metadata",
            hint="trace with torch.compile, torch.export or make_fx, which leave values on the graph",
            node=node,
        )
    return found


def held(owner: nn.Module, node: fx.Node) -> Any:
    """Returns the attribute of the graph's module that a `get_attr` node reads: a tensor, or a subgraph."""
    return attrgetter(str(node.target))(owner)


def is_tensor(node: fx.Node) -> bool:
    """True if the node is known to hold one tensor."""
    return isinstance(value(node), torch.Tensor)


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Returns the tensors that the node is known to hold: one, several in a list, or none."""
    found = value(node)
    return [v for v in (found if isinstance(found, (list, tuple)) else (found,)) if isinstance(v, torch.Tensor)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a value, however it is nested."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storages_in(value: Any) -> set[StorageWeakRef]:
    """Returns the memories of the strided tensors in a value; two tensors share memory if they have one in common."""
    return {StorageWeakRef(x.untyped_storage()) for x in tensors_in(value) if x.layout is torch.strided}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def has_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor has entries, and not only a shape."""
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor whose entries are integers of the same width."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def is_inexact(tensor: torch.Tensor) -> bool:
    """True for real and complex numbers, which can be differentiated."""
    return tensor.is_floating_point() or tensor.is_complex()


def has_inexact(node: fx.Node) -> bool:
    """True if the node is known to hold a tensor that can be differentiated."""
    return any(map(is_inexact, tensors_of(node)))


def value_key(node: fx.Node) -> str:
    """Returns the metadata key of this node's value; Dynamo's own graphs use "example_value"."""
    return "example_value" if "example_value" in node.meta and "val" not in node.meta else "val"


def is_scalar(node: fx.Node) -> bool:
    """True if the node is known to hold a Python number or a symbolic one."""
    found = value(node)
    return found is not MISSING and isinstance(found, _SCALARS)


def is_parameter(node: fx.Node) -> bool:
    """True if the node is known to read a parameter, a buffer or another tensor of the module itself.

    That is a `get_attr` of a tensor, or an input that holds one: Dynamo leaves a fake parameter, and for buffers the
    place in the module where an input comes from. If the graph alone does not tell, `meta["is_parameter"]` does:
    `fxrewrite.normalize` writes it, and for an exported program whoever has its signature. Graphs of AOTAutograd
    under torch.compile do not distinguish parameters from other inputs.
    """
    if node.op == "get_attr":
        owner = node.graph.owning_module  # a module in it is the subgraph of a higher-order operator
        return owner is None or not isinstance(held(owner, node), nn.Module)
    if node.op != "placeholder":
        return False
    if "is_parameter" in node.meta:
        return node.meta["is_parameter"]
    found = value(node)
    if isinstance(found, torch.nn.Parameter):
        return True
    source = getattr(node, "_dynamo_source", None)
    if source is None or not isinstance(found, torch.Tensor):
        return False
    place = source.guard_source
    return place.is_unspecialized_nn_module() or place.is_fsdp_module()  # those wrappers set views of a flat parameter
