"""An operator and the quantization of its result become one operator, which a kernel library has under another name.

    quantize(out, input=produce(..., input, weight, epsilon), scale)  ->  fused(out, input, weight, scale, epsilon)

The three operators write their results, as kernels of serving systems do, and are given by name: norms, residual
additions with norms, gated activations. Arguments go by name; the rules match what `auto_functionalized` and
`auto_functionalized_v2` make of the calls, for every epsilon, shape and dtype.
Does not match where the result is read by another operator ("no user of ... outside the match"); before autograd that
is `empty_like(result)` too, so the rules are for the slots after it. Operators whose arguments do not fit are refused
when the set is made ("takes zeros, which neither of the others has").
Shapes: those of the operators.
Numerics: approximate: a fused kernel does not round in between.
Source: vLLM, vllm/compilation/passes/fusion/rms_quant_fusion.py and act_quant_fusion.py.

>>> import torch
>>> library = torch.library.Library("doc_quantization", "DEF")
>>> for schema in ("norm(Tensor(a!) out, Tensor x, float eps)", "quant(Tensor(a!) out, Tensor x, Tensor scale)",
...                "norm_quant(Tensor(a!) out, Tensor x, Tensor scale, float eps)"):
...     _ = library.define(f"{schema} -> ()")
>>> names = ("norm", "quant", "norm_quant")
>>> print(quantized(*(f"doc_quantization::{name}" for name in names)).name)
norm_quant
"""

from __future__ import annotations

from typing import Any

import torch

from fxrewrite import Match, Pattern, Rule, RuleDefinitionError, RuleSet, cap, functional
from fxrewrite.ops import named_operator

__all__ = ["quantized"]


def quantized(produce: str, quantize: str, fused: str) -> RuleSet:
    """Returns the rules by which `quantize` of what `produce` writes first is what `fused` writes.

    What `produce` writes besides, such as a residual, `fused` writes too; a second rule matches where nobody reads it.

    Args:
        produce: name of an operator with one overload, such as "_C::rms_norm".
        quantize: of one whose first argument that it does not write to is the tensor to be quantized.
        fused: of one whose arguments have the names that they have in the others.

    Raises:
        RuleDefinitionError: there is no such operator, or `fused` takes an argument that the others do not have.
    """
    first, second, target = (_overload(name) for name in (produce, quantize, fused))
    wrote, quantizes, writes = (_written(overload) for overload in (first, second, target))
    read = next((a.name for a in second._schema.arguments if a.name not in quantizes), "")
    own = [a for a in second._schema.arguments if a.name != read]
    kept = [
        a
        for a in first._schema.arguments
        if a.name not in wrote or (a.name in _names(target) and a.name not in quantizes)
    ]
    captures = {a.name: cap(a.name, "node" if "Tensor" in str(a.type) else "literal") for a in (*own, *kept)}
    unknown = [name for name in _names(target) if name not in captures]
    more = wrote[1:]
    if unknown or not read or {*quantizes, *more} != set(writes):
        raise RuleDefinitionError(
            f"{fused} cannot stand for {quantize} of {produce}: it writes {', '.join(writes)}, and they write "
            f"{', '.join((*quantizes, *more))}; the fused operator takes {', '.join(unknown) or 'nothing'}, "
            "which neither of the others has"
        )
    given = {name: captures.get(name, ...) if name in {a.name for a in kept} else ... for name in _names(first)}
    produced = _tuple(functional(first, **given))
    outputs = _tuple(functional(second, **{read: produced[0]}, **{a.name: captures[a.name] for a in own}))

    def rule(id: str, results: tuple[str, ...], terms: tuple[Any, ...]) -> Rule:  # noqa: A002
        def replacement(match: Match) -> Any:
            arguments = {name: _proxied(match, name) for name in _names(target)}
            made = match.call(torch.ops.higher_order.auto_functionalized, target, **arguments)
            values = [made[1 + writes.index(name)] for name in results]
            return values if len(values) > 1 else values[0]

        return Rule(
            id, Pattern(terms), replacement, numerics="approximate", doc=f"{fused}({', '.join(_names(target))})"
        )

    name = fused.rpartition("::")[2]
    rules = [rule(f"{name}.without_{more[0]}", quantizes, outputs)] if more else []
    whole = rule(f"{name}.fuse", (*quantizes, *more), (*outputs, *produced[1:]))
    return RuleSet(name, whole, *rules)


def _proxied(match: Match, name: str) -> Any:
    value = match[name]
    return match.proxy(value) if isinstance(value, torch.fx.Node) else value


def _overload(name: str) -> Any:
    found: Any = named_operator(name)
    if found is None:
        raise RuleDefinitionError(f"there is no operator {name}; import the library that defines it")
    overloads = found.overloads() if hasattr(found, "overloads") else []
    if hasattr(found, "overloads") and len(overloads) != 1:
        raise RuleDefinitionError(f"{name} has the overloads {', '.join(overloads)}; name one")
    return getattr(found, overloads[0]) if overloads else found


def _names(overload: Any) -> list[str]:
    return [argument.name for argument in overload._schema.arguments]


def _written(overload: Any) -> tuple[str, ...]:
    """The arguments that the operator writes to."""
    found = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not found:
        raise RuleDefinitionError(f"{overload} writes to no argument; write a rule for it with op()")
    return tuple(found)


def _tuple(terms: Any) -> tuple[Any, ...]:
    return terms if isinstance(terms, tuple) else (terms,)
