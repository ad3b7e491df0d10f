"""The error that AutoSP raises: a refusal with its fields."""

from __future__ import annotations

from fxrewrite import Refusal, RefusedError

__all__ = ["AutoSPError"]


class AutoSPError(RefusedError):
    """AutoSP cannot run a model or input exactly; `rule`, `reason`, `node`, `source`, `hint` say why and where."""

    @classmethod
    def of(cls, reason: str, *, rule: str = "autosp", hint: str = "") -> AutoSPError:
        """Returns an error about the whole graph or run, not about one node."""
        return cls(Refusal(rule=rule, reason=reason, hint=hint))
