"""The error that AutoSP raises: a refusal with its fields."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from fxrewrite import FxRewriteError, Refusal, RefusedError


class AutoSPError(RefusedError):
    """AutoSP cannot run a model or input exactly; `rule`, `reason`, `node`, `source`, `hint` say why and where."""

    @classmethod
    def of(cls, reason: str, *, rule: str = "autosp", hint: str = "") -> AutoSPError:
        """Returns an error about the whole graph or run, not about one node."""
        return cls(Refusal(rule=rule, reason=reason, hint=hint))


@contextmanager
def raised_as_autosp_error() -> Generator[None]:
    """An error of fxrewrite inside of it is raised as an AutoSPError: about a node, or about the whole graph or run."""
    try:
        yield
    except AutoSPError:
        raise
    except RefusedError as error:
        raise AutoSPError(error.refusal, error.located_at) from error
    except FxRewriteError as error:
        raise AutoSPError.of(str(error)) from error
