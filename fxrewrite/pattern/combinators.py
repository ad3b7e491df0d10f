"""Combinators: terms that a traced function cannot express."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxrewrite import ops
from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern.terms import (
    ONCE,
    Capture,
    CaptureKind,
    Chain,
    Each,
    Either,
    Ignore,
    ListOf,
    LiteralValue,
    Maybe,
    Op,
    Siblings,
    Term,
    as_term,
    call,
    subterms,
    tracing,
)


class Literal:
    """Annotation of a pattern parameter that captures a Python value: `def pattern(x, scale: Literal)`."""


class Param:
    """Annotation of a pattern parameter that captures a parameter or buffer: `def pattern(x, weight: Param)`."""


any_ = Ignore()
"""Matches anything without capturing it; the same as `...`."""


_KINDS: Mapping[Any, CaptureKind] = {
    inspect.Parameter.empty: "node",
    Literal: "literal",
    Maybe: "optional",
    Param: "param",
    Any: "any",
}


def captures_of(function: Callable[..., Any]) -> tuple[Capture, ...]:
    """Returns the captures that the parameters of a pattern function are.

    Raises:
        RuleDefinitionError: an annotation or a default is not supported, or the function has no signature.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError as error:
        raise RuleDefinitionError(f"pattern {name}: {error}; annotations are read when the rule is defined") from error
    except ValueError as error:
        raise RuleDefinitionError(f"pattern {name}: {error}; write a Python function that calls it") from error
    captures: list[Capture] = []
    for parameter in parameters.values():
        kind = "node" if _is_tensor(parameter.annotation) else _KINDS.get(parameter.annotation)
        if kind is None or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RuleDefinitionError(
                f"pattern {name}: parameter {parameter} must be plain, or annotated Literal, Maybe, Param or Any"
            )
        if parameter.default is not parameter.empty:
            raise RuleDefinitionError(
                f"pattern {name}: parameter {parameter.name} is a capture, and its default {parameter.default!r} is "
                f"not read; write that value in the pattern, or {parameter.name}: Literal to capture any value"
            )
        captures.append(Capture(parameter.name, kind))
    return tuple(captures)


def _is_tensor(annotation: Any) -> bool:
    return getattr(annotation, "__module__", "").startswith("torch") and getattr(annotation, "__name__", "") == "Tensor"


def cap(name: str, kind: type[Literal | Maybe | Param] | CaptureKind = "node") -> Capture:
    """Returns a capture; `kind` is "node", "optional", "param", "literal" or "any", or the equivalent annotation."""
    return Capture(name, _KINDS[kind] if isinstance(kind, type) else kind)


def op(target: Any, *args: Any, **kwargs: Any) -> Op:
    """Returns a term for a node that calls `target`, in any spelling of the call.

    Args:
        target: a torch function or overload, any callable that nodes call, or a key: "aten::mul", "mul".
        args: arguments in the order of the target's signature: terms, `...`, or literals that must be equal.
        kwargs: arguments by name.

    Raises:
        RuleDefinitionError: there is no such operator, or the arguments do not fit it.
    """
    return call(_named(target) if isinstance(target, str) else target, args, kwargs)


def _named(name: str) -> Any:
    found = ops.named_operator(name)
    if found is None:
        raise RuleDefinitionError(ops.no_operator(name))
    return found


def maybe(step: Term, without: Any = None) -> Maybe:
    """Returns an optional step: `maybe(scores + mask)` matches the sum, or `scores` alone with `mask` None.

    Args:
        step: an operator.
        without: the term that matches when the step is absent; by default the step's first operand.

    Raises:
        RuleDefinitionError: the step is not an operator, or has no operand to use as `without`.
    """
    step = _operator(step, "maybe")
    if without is None:
        without = first_operand(step)
        if without is None:
            raise RuleDefinitionError(f"maybe({step!r}): state with without= what matches when the step is absent")
    return Maybe(step, as_term(without))


def _operator(term: Term, combinator: str) -> Op:
    if not isinstance(term, Op):
        raise RuleDefinitionError(f"{combinator}() takes an operator, not {term!r}")
    return term


def first_operand(step: Op) -> Term | None:
    """Returns the first argument of an operator that is a value of the graph, or None."""
    return next((term for _, term in step.args if not isinstance(term, (LiteralValue, ListOf, Ignore))), None)


def either(*options: Any) -> Either:
    """Returns a term that matches as the first of the options that does: `either(x * c, x / c)`."""
    if len(options) < 2:
        raise RuleDefinitionError("either() takes two options or more")
    return Either(tuple(as_term(option) for option in options))


def each(term: Any, *, on: str | tuple[str, ...] = ()) -> ListOf:
    """Returns a list, all of whose items match: `torch.cat(each(lambda t: torch.relu(t)))`.

    As a part of a longer list it is `[first, *each(...)]`. In the match its captures are lists, in the order of items.

    Args:
        term: what each item is: a term, or a function whose parameters are the captures that become lists; other
            captures that it reads are one value, which all items share.
        on: of a term, the captures that all items share.

    Raises:
        RuleDefinitionError: `on` names no capture of the item.
    """
    if callable(term):
        inner = captures_of(term)
        with tracing():
            made = as_term(term(*inner))
        others = (part.name for part in subterms(made) if isinstance(part, Capture) and part not in inner)
        return ListOf((Each(made, tuple(dict.fromkeys(others))),))
    item = as_term(term)
    names: Any = (on,) if isinstance(on, str) else on
    captured = {part.name for part in subterms(item) if isinstance(part, Capture)}
    if not isinstance(names, tuple) or not captured.issuperset(names):
        raise RuleDefinitionError(
            f'each(..., on=) takes names of captures that all items share, as in on="x"; an item has '
            f"{', '.join(sorted(captured)) or 'none'}"
        )
    return ListOf((Each(item, names),))


def shared(term: Term) -> Op:
    """Returns the operator, allowed to have users outside the match; then the node stays in the graph for them."""
    return replace(_operator(term, "shared"), shared=True)


def loose(term: Term) -> Op:
    """Returns the operator with any further arguments allowed: `loose(op("slice", cap("x")))` matches every slice."""
    return replace(_operator(term, "loose"), loose=True)


def functional(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what an operator that writes leaves in each argument it writes to, in a graph without writes.

    Torch makes graphs functional by `auto_functionalized` and `auto_functionalized_v2`; the terms match both. One
    written argument gives one term, several give a tuple, in the order of the schema:
    `out = functional("vllm::rms_norm", ..., x, w, 1e-6)`. A written list gives a list of terms, one for each item; an
    argument that is None gives none. An argument that is a view of a larger tensor does not match in the second form.

    Args:
        target: an overload that writes, or the name of an operator with one such overload.
        args: arguments in the order of the schema, those that are written to included.
        kwargs: arguments by name.

    Raises:
        RuleDefinitionError: the operator writes to nothing, has several overloads, or the arguments do not fit it.
    """
    overload = _writing_overload(target)
    given = _by_name(target, overload, args, kwargs)
    written = [_Written.of(target, argument, given[argument.name]) for argument in _written_arguments(overload)]
    places: dict[str, int | None] = {}
    bases: list[Any] = []
    for argument in written:
        if argument.is_list:
            places[f"_{argument.name}_length"] = len(argument.items)
        for index, item in enumerate(argument.items):
            places[argument.place(index)] = None if item is None else len(bases)
            bases += [] if item is None else [item]
    higher = torch.ops.higher_order
    one = call(higher.auto_functionalized, (overload,), given)
    read = {name: value for name, value in given.items() if name not in {argument.name for argument in written}}
    two = call(higher.auto_functionalized_v2, (overload,), {**read, **places, "_all_bases": bases})
    first = max(1, len(overload._schema.returns))  # what the operator returns comes first, None if nothing
    parts: list[Any] = []
    for number, argument in enumerate(written):
        result, is_list = one[first + number], argument.is_list
        at = [(result[i] if is_list else result, places[argument.place(i)]) for i in range(len(argument.items))]
        terms = [either(term, two[first + base]) for term, base in at if base is not None]
        parts += [terms] if is_list else terms
    return parts[0] if len(parts) == 1 else tuple(parts)


def _writing_overload(target: Any) -> torch._ops.OpOverload:
    """The overload that `functional` is given, or the only one of the operator."""
    found = _named(target) if isinstance(target, str) else target
    if isinstance(found, torch._ops.OpOverloadPacket):
        overloads = [getattr(found, name) for name in found.overloads()]
        found = overloads[0] if len(overloads) == 1 else found
    if not isinstance(found, torch._ops.OpOverload) or not _written_arguments(found):
        raise RuleDefinitionError(f"functional() takes one overload that writes to an argument, not {target}")
    return found


def _written_arguments(overload: torch._ops.OpOverload) -> list[Any]:
    return [a for a in overload._schema.arguments if a.alias_info and a.alias_info.is_write]


def _by_name(target: Any, overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All arguments of the overload, in the order of its schema."""
    arguments = overload._schema.arguments
    names = [a.name for a in arguments]
    by_place = dict(zip(names, args, strict=False))
    given = {a.name: a.default_value for a in arguments if a.has_default_value()} | by_place | kwargs
    if set(given) != set(names) or len(args) > len(names) or by_place.keys() & kwargs.keys():
        by_name = f" and {', '.join(kwargs)} by name" if kwargs else ""
        raise RuleDefinitionError(
            f"functional({target}) takes the arguments {', '.join(names)}, each once, not {len(args)} by place{by_name}"
        )
    return {name: given[name] for name in names}


@dataclass(frozen=True)
class _Written:
    """What is written to by one argument: the items of a list, or one value."""

    name: str
    items: list[Any]
    is_list: bool

    @classmethod
    def of(cls, target: Any, argument: Any, given: Any) -> _Written:
        if not str(argument.type).startswith("List["):
            return cls(argument.name, [given], is_list=False)
        if not isinstance(given, (list, tuple)) or any(isinstance(item, Each) for item in given):
            raise RuleDefinitionError(
                f"functional({target}) takes {argument.name} item by item, as in [a, b], and writes to each"
            )
        return cls(argument.name, list(given), is_list=True)

    def place(self, index: int) -> str:
        """How auto_functionalized_v2 calls the position of an item among all that is written to."""
        return f"_{self.name}_{index}_base_index" if self.is_list else f"_{self.name}_base_index"


def chain(base: Any, *targets: Any, least: int = 0, most: int = 8) -> Chain:
    """Returns a run of `least` to `most` operators among `targets`, starting at `base`: `chain(x, "view", most=3)`.

    Each reads the previous one as its first operand; its other arguments may be anything. The longest run that fits
    matches; `match.nodes` contains its nodes.

    Raises:
        RuleDefinitionError: there is no target, or not 0 <= least <= most.
    """
    if not targets or not 0 <= least <= most or most < 1:
        raise RuleDefinitionError(f"chain() takes operators and 0 <= least <= most, not {targets}, {least}, {most}")
    return Chain(as_term(base), tuple(dict.fromkeys(map(_key, targets))), least, most)


def _key(target: Any) -> str:
    if isinstance(target, str) and "." in target:  # the key of a Python callable, as the text form has it
        return target
    return ops.key(_named(target) if isinstance(target, str) else target)


def once(term: Term) -> Op:
    """Returns, for a replacement, what the rule computes of parameters when it is applied, as `match.once` does.

    Raises:
        RuleDefinitionError: it is not an operator.
    """
    return Op(ONCE, (("tensor", _operator(term, "once")),))


def siblings(each: Term, *, on: str, least: int = 2) -> Siblings:
    """Returns all values like `each` that read the capture `on`: `siblings(op("linear", cap("x"), ...), on="x")`.

    It must be the only output of a pattern. In the match `on` is one value, and every other capture is a list with one
    item per sibling, in graph order; the replacement returns as many values. Constraints must hold for each sibling.

    Raises:
        RuleDefinitionError: `each` is not an operator.
    """
    if not isinstance(each, (Op, Maybe, Either)):
        raise RuleDefinitionError(f"siblings() takes an operator, not {each!r}")
    return Siblings(each, on, least)
