"""The error that AutoSP raises: a refusal with its fields."""

from __future__ import annotations

from fxrewrite import Refusal, RefusedError

__all__ = ["AutoSPError"]


class AutoSPError(RefusedError):
    """A model or input that AutoSP cannot run exactly; `rule`, `reason`, `node`, `source`, `hint` say why and where."""

    @classmethod
    def of(cls, reason: str, *, rule: str = "autosp", hint: str = "") -> AutoSPError:
        """An error that concerns the whole graph or run, not one node."""
        return cls(Refusal(rule=rule, reason=reason, hint=hint))
