"""The canonical operator key: one name for every spelling of one operator."""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxrewrite.identity import NoIdentityError, identity
from fxrewrite.ops.by_target import ByTarget
from fxrewrite.ops.names import operator_of
from fxrewrite.ops.tables import ALIASES, ATTRIBUTES, CASTS, METHODS, OPERATORS, WRAPPERS, Wrapper, parameters_of
from fxrewrite.ops.value import is_scalar

_aten = torch.ops.aten
_KEYS: ByTarget[str] = ByTarget()
_FUNCTIONS: ByTarget[str | Callable[[fx.Node], str]] = ByTarget()
_DUNDERS = {
    **{f"__{op.__name__.rstrip('_')}__": name for op, name in OPERATORS.items()},
    "__radd__": "add",
    "__rmul__": "mul",
    "__rand__": "bitwise_and",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
    "__div__": "div",
}


def _aten_key(name: str) -> str:
    inplace = name.endswith("_") and not name.endswith("__")
    plain = name[:-1] if inplace else name
    plain = ALIASES.get(plain, plain)
    return f"aten::{plain}_" if inplace else f"aten::{plain}"


def _is_aten(name: str) -> bool:
    return hasattr(_aten, name)


def _method_key(name: str) -> str:
    if name in _DUNDERS:
        return f"aten::{_DUNDERS[name]}"
    if name in CASTS:
        return "aten::to"
    if name in METHODS:
        return _aten_key(WRAPPERS[METHODS[name]].name)
    return _aten_key(name) if _is_aten(name) else f"torch.Tensor.{name}"


def _target_key(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return _aten_key(name) if namespace == "aten" else target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return _aten_key(name) if namespace == "aten" else target._qualified_op_name
    if isinstance(target, torch.library.CustomOpDef):
        return _target_key(operator_of(target))
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{target.namespace}::{target.name()}"
    if target in OPERATORS:
        return f"aten::{OPERATORS[target]}"
    name = getattr(target, "__name__", type(target).__name__)
    module = getattr(target, "__module__", None) or ""
    if hasattr(target, "__objclass__") and issubclass(torch.Tensor, target.__objclass__):
        return _method_key(name)
    if target in WRAPPERS:
        return _aten_key(WRAPPERS[target].name)
    builtin = inspect.isbuiltin(target)
    if builtin and (module == "torch" or module.startswith("torch._C")) and _is_aten(name):
        return _aten_key(name)
    if module == "torch.functional" and name in ("einsum", "split"):
        return f"aten::{name}"
    if module == "torch._tensor":
        return _method_key(name)
    if module == "_operator":
        module = "operator"
    if name and getattr(sys.modules.get(module), name, None) is target:
        return f"{module}.{name}"
    qualname = getattr(target, "__qualname__", None) or name
    return f"{module}.{qualname}{_distinction(target, qualname)}"


def _distinction(target: Any, qualname: str) -> str:
    """Returns what tells a callable from others of the same name: "#" and a hash of its code and what it holds.

    Empty for what is named uniquely; "#0x" and a hash where it holds something that has no identity but its address.
    """
    if "<" not in qualname and isinstance(target, _NAMED):
        return ""
    if isinstance(target, type):  # the identity of a class is its name
        return f"#{id(target):#x}"
    try:
        return f"#{_hash(identity(target, objects='refuse'))}"
    except NoIdentityError:
        return f"#0x{_hash(identity(target, objects='address'))}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_NAMED = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.GetSetDescriptorType, types.ClassMethodDescriptorType),
)
"""Callables that a module has one of under their name, unless they were made inside of a function."""


def is_by_address(found: str) -> bool:
    """Whether a key depends on an address, and so means something in this process alone."""
    return "#0x" in found


def key(node_or_target: Any) -> str:
    """Returns the canonical key of what a node computes, equal for all its spellings.

    "aten::mul" for `torch.ops.aten.mul.Tensor`, `torch.mul`, `x.mul(y)` and `x * y` on tensors; an in-place
    operator has its own key, "aten::mul_". Python arithmetic on numbers and symbolic sizes is "operator.mul".
    Callables that are not torch operators are "module.qualname", and so is the class of a submodule that a node calls;
    closures, partials and others of which several have that name have a hash of what they hold after it. Nodes that
    call nothing return their opcode.

    Args:
        node_or_target: an `fx.Node`, or the target of one. A string is a tensor method.
    """
    if isinstance(node_or_target, fx.Node):
        op = node_or_target.op
        if op == "call_function":
            target = node_or_target.target
            found = _FUNCTIONS.facts.get(id(target))
            if found is None:
                found = _FUNCTIONS.set(target, _resolver(target))
            return found if isinstance(found, str) else found(node_or_target)
        if op == "call_method":
            return call_key(node_or_target.target, node_or_target.args, node_or_target.kwargs)
        return key(callee(node_or_target)) if op == "call_module" else op
    found = _KEYS.get(node_or_target)
    if found is None:
        is_method = isinstance(node_or_target, str)
        new = _method_key(node_or_target) if is_method else _target_key(node_or_target)
        found = _KEYS.set(node_or_target, new)
    return found


def callee(node: fx.Node) -> Any:
    """Returns what the node calls: its target, or the class of the submodule that its target names."""
    if node.op != "call_module":
        return node.target
    owner = node.graph.owning_module
    return type(owner.get_submodule(str(node.target))) if owner is not None else torch.nn.Module


def possible_keys(target: Any) -> tuple[str, ...]:
    """Returns all keys that calls of a function may have; one, unless arguments or operands decide."""
    found = key(target)
    if target in OPERATORS:
        return found, f"operator.{target.__name__}"
    wrapper = wrapper_of(target)
    if wrapper is not None:
        in_place = (f"{found}_",) if wrapper.inplace else ()
        return found, *in_place, _python_name(python_function(target))
    if target is getattr:
        return found, *map(_aten_key, ATTRIBUTES.values())
    return (found, "aten::split_with_sizes") if found == "aten::split" else (found,)


def _resolver(target: Any) -> str | Callable[[fx.Node], str]:
    """Returns the key of a function, or, if arguments or operands decide, a function of the node that returns it."""
    found = key(target)
    if target in OPERATORS:
        on_numbers = f"operator.{target.__name__}"  # sizes are added and multiplied too
        return lambda node: on_numbers if is_scalar(node) else found
    if wrapper_of(target) is not None or found == "aten::split" or target is getattr:
        return lambda node: call_key(target, node.args, node.kwargs)
    return found


def call_key(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns the key of `target(*args, **kwargs)`; for some targets the arguments decide between two operators."""
    found = key(target)
    target = python_function(target)
    wrapper = wrapper_of(target)
    if wrapper is None:
        attribute = attribute_of(target, args)
        return key(attribute) if attribute is not None else _by_argument(found, args, kwargs)
    given = dict(zip(parameters_of(target), args, strict=False)) | dict(kwargs)
    if wrapper.inplace and given.get(wrapper.inplace, False):
        return found + "_"
    other = any(given.get(name) is not None for name in wrapper.needs_default)
    other = other or any(test(given[name]) for name, test in wrapper.unless.items() if name in given)
    return _python_name(target) if other else found


def attribute_of(target: Any, args: tuple[Any, ...]) -> torch._ops.OpOverload | None:
    """Returns the operator that reading an attribute of a tensor is, as `x.mT`; None for any other call."""
    is_read = target is getattr and len(args) == 2 and isinstance(args[0], fx.Node) and not is_scalar(args[0])
    name = ATTRIBUTES.get(args[1]) if is_read and isinstance(args[1], str) else None
    return getattr(_aten, name).default if name is not None else None


def _python_name(target: Any) -> str:
    """Returns the name under which a wrapper of torch is found."""
    module, name = target.__module__, target.__name__
    own = getattr(sys.modules.get(module), name, None)
    return f"{module}.{name if own is target else target.__qualname__}"


def _by_argument(found: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns "aten::split_with_sizes", as tracing does, for `split` with a list of sizes."""
    if found == "aten::split":
        sizes = args[1] if len(args) > 1 else next((v for k, v in kwargs.items() if k.startswith("split_size")), None)
        if isinstance(sizes, (list, tuple)):
            return "aten::split_with_sizes"
    return found


def wrapper_of(target: Any) -> Wrapper | None:
    """Returns the table entry of a Python function that wraps one ATen operator, or None."""
    target = python_function(target)
    return None if isinstance(target, str) else WRAPPERS.get(target)


def python_function(target: Any) -> Any:
    """Returns the function that a tensor method is, of those that are written in Python; anything else as it is."""
    return METHODS.get(target, target) if isinstance(target, str) else target


def is_scalar_argument(argument: Any) -> bool:
    """True for an integer, a symbolic integer, or a node known to hold one."""
    return is_scalar(argument) if isinstance(argument, fx.Node) else isinstance(argument, (int, torch.SymInt))
