"""What the corpus is made of: rules of which somebody says whether they are true, in families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxrewrite import Literal, Rule, rule


@dataclass(frozen=True)
class Case:
    """A rule, whether it is true, and if it is not, the one detail that is wrong."""

    rule: Rule
    is_true: bool
    why: str = ""


class Family:
    """Rules of one kind, and what they promise unless they say otherwise. The id of a false one ends in `_wrong`."""

    def __init__(self, name: str, **promises: Any) -> None:
        self.name, self.promises = name, promises
        self.cases: list[Case] = []

    def pair(
        self,
        name: str,
        pattern: Callable[..., Any],
        *,
        true: Callable[..., Any],
        false: Callable[..., Any] | None = None,
        false_pattern: Callable[..., Any] | None = None,
        why: str,
        **promises: Any,
    ) -> None:
        """Adds a true rule and its false twin, which differ in their replacements, their patterns or both."""
        self.true(name, pattern, true, **promises)
        self.false(name, false_pattern or pattern, false or true, why, **promises)

    def true(self, name: str, pattern: Callable[..., Any], replacement: Callable[..., Any], **promises: Any) -> None:
        """Adds a true rule."""
        made = _made(f"{self.name}.{name}", pattern, replacement, **{**self.promises, **promises})
        self.cases.append(Case(made, True))

    def false(
        self, name: str, pattern: Callable[..., Any], replacement: Callable[..., Any], why: str, **promises: Any
    ) -> None:
        """Adds a rule that is false, and says why."""
        made = _made(f"{self.name}.{name}_wrong", pattern, replacement, **{**self.promises, **promises})
        self.cases.append(Case(made, False, why))


def _made(
    identity: str,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    literals: str = "",
    sampler: Callable[..., Any] | None = None,
    **promises: Any,
) -> Rule:
    pattern.__annotations__ = dict.fromkeys(literals.split(), Literal)
    made = rule(identity, **promises)(pattern)
    made.replacement(replacement)
    if sampler is not None:
        made.sampler(sampler)
    return made


def floats(*names: str) -> list[str]:
    """Constraints: these captures are of one floating-point dtype that CPUs compute with."""
    first = f"dtype({names[0]}) in {{float32, float64, bfloat16}}"
    return [first] if len(names) == 1 else [first, f"same_dtype({', '.join(names)})"]
