"""The exception tree: every error says what, found, where and what to do, all of it in `str(exc)`.

Dynamo drops exception notes and re-wraps what a backend raises, so nothing may live outside the message.
This module imports no torch: the command line and the pytest plugin load it first.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn


class FxRewriteError(ValueError):
    """Root of all errors of fxrewrite; `str(exc)` holds the whole diagnosis."""


class RuleDefinitionError(FxRewriteError):
    """A rule, a pattern or a rule set is wrong as written, whatever graph it would meet."""


class MatchExpectationError(FxRewriteError):
    """A plan promised a number of rewrites (`plan.expect`) and made fewer; carries the nearest miss."""


class FixpointError(FxRewriteError):
    """A fixpoint still changed the graph at its limit; names the rules that kept firing."""


class InvariantError(FxRewriteError):
    """The graph would no longer be valid: an argument is used before it is defined, a value is missing."""


class VerificationError(FxRewriteError):
    """A rule was tested and is false, or could not be tested; the message is the verdict, with a counterexample."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; empty if it has none."""
    return str(error).strip().partition("\n")[0]


def named_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a message about a word that is not among the `known`: "; did you mean relu or relu6?", or nothing."""
    near = difflib.get_close_matches(str(word), list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def misread_context(error: Exception, context: object) -> str:
    """What is wrong if an error is that of reading an attribute which a plan's context does not have; else empty."""
    if not isinstance(error, AttributeError) or error.obj is not context:
        return ""
    if context is None:
        return f"{error}; no context was given, as in apply(gm, context=...)"
    return f"it reads context.{error.name}, which the {type(context).__name__} in apply(gm, context=...) does not have"


class Reason(enum.StrEnum):
    """What prevented a match (the first eight), or the rewriting of one."""

    OPERATOR = "operator"
    """The graph has another operator there, or none."""
    ARGUMENTS = "arguments"
    """The call passes an argument that the pattern does not mention, at another value than its default."""
    LITERAL = "literal"
    """A Python value differs."""
    CAPTURE = "capture"
    """The capture does not take what is there: a value of the graph, a Python value, a parameter ..."""
    SAME = "same"
    """One capture is at two places, which hold different values."""
    OUTPUT = "output"
    """The graph lacks a further output of the pattern, or a sibling."""
    OUTSIDE_USER = "outside_user"
    """A value inside the match is used outside of it."""
    CONSTRAINT = "constraint"
    """A `where` constraint does not hold."""
    RULE = "rule"
    """The rule itself refused."""
    RAISED = "raised"
    """The replacement, or an operator that it calls, raised an exception."""
    EFFECT = "effect"
    """A node between those of the match writes to memory of the match."""
    ALIAS = "alias"
    """The replacement shares memory differently, and something writes to it later."""
    DRAW = "draw"
    """The replacement draws other random numbers than the original."""
    CONVEXITY = "convexity"
    """There is no place for the new nodes after all captures and before all users."""
    ONCE = "once"
    """A tensor cannot be computed once, when the rule is applied: the module does not hold what it is computed of."""
    VALUE = "value"
    """The replacement has another shape, dtype or device."""
    OVERLAP = "overlap"
    """Another match was preferred that consumes the same nodes."""
    STALE = "stale"
    """Another rewrite has replaced a part of the match."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something was not done, as a value that can be counted, printed and snapshot.

    Attributes:
        rule: id of the rule, empty until the engine fills it in.
        reason: one clause, for example "6 heads do not divide over axis sp (size 4)".
        node: name of the node, without the percent sign.
        source: "model.py:41", or empty when the graph has no source lines.
        hint: what the reader can do about it.
        data: the numbers and words of the reason, for programs.
        kind: what kind of reason it is, to count by.
    """

    rule: str
    reason: str
    node: str = ""
    source: str = ""
    hint: str = ""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    kind: Reason = Reason.RULE

    def __str__(self) -> str:
        text = f"{self.rule}: {self.reason}" if self.rule else self.reason
        if self.node:
            text += f" at %{self.node}"
        if self.source:
            text += f" ({self.source})"
        if self.hint:
            text += f"; {self.hint}"
        return text


class RefusedError(FxRewriteError):
    """A rewrite is refused; `refusal` says why and the fields repeat it.

    `located_at` is the `fx.Node` given to `refuse`, from which the engine takes the source line.
    """

    def __init__(self, refusal: Refusal, located_at: Any = None) -> None:
        self.refusal = refusal
        self.located_at = located_at
        self.rule, self.reason, self.node = refusal.rule, refusal.reason, refusal.node
        self.source, self.hint, self.data, self.kind = refusal.source, refusal.hint, refusal.data, refusal.kind
        super().__init__(str(refusal))

    def __reduce__(self) -> tuple[Any, ...]:
        return RefusedError, (self.refusal,)  # nodes do not pickle, refusals do

    def filled(self, *, rule: str = "", node: str = "", source: str = "") -> RefusedError:
        """The same refusal with the fields that were empty filled in; what it already says wins.

        `source` belongs to `node`: when the refusal names another node, only a source for that one may be given.
        """
        old = self.refusal
        new = replace(
            old, rule=old.rule or rule, node=old.node or node, source=old.source or source, data=dict(old.data)
        )
        return RefusedError(new, self.located_at)

    def advised(self, hint: str) -> RefusedError:
        """The same refusal with one more thing that the reader can do."""
        hints = "; or ".join(filter(None, (self.refusal.hint, hint)))
        return RefusedError(replace(self.refusal, hint=hints), self.located_at)


def refuse(reason: str, *, hint: str = "", node: Any = None, kind: Reason = Reason.RULE, **data: Any) -> NoReturn:
    """Refuse the current rewrite; to be called from guards, replacements and layout rules.

    Args:
        reason: one clause with the numbers in it.
        hint: what the user can do.
        node: the `fx.Node` (or its name) to blame; the engine takes the matched root when it is missing.
        kind: what kind of reason it is; a rule that refuses needs none.
        data: the numbers of the reason, kept for programs.

    Raises:
        RefusedError: always. The engine fills in rule, node and source line.
    """
    name = "" if node is None else str(getattr(node, "name", node))
    located = node if hasattr(node, "meta") else None
    raise RefusedError(Refusal(rule="", reason=reason, node=name, hint=hint, kind=kind, data=data), located)
