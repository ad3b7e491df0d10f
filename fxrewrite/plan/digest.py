"""The digest of a plan: a key for compile caches."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

from fxrewrite.identity import NoIdentityError, identity
from fxrewrite.plan.members import MemberSet
from fxrewrite.sources import toolkit_digest
from fxrewrite.torch_versions import TORCH_VERSION

__all__ = ["plan_digest"]


def plan_digest(text: str, sets: Sequence[MemberSet]) -> str | None:
    """Returns the sha256 of everything that decides what a plan does; None, with a warning, if there is none.

    Args:
        text: of the plan.
        sets: that it runs.
    """
    try:
        decisive = identity([*sets])
    except NoIdentityError as error:
        warnings.warn(f"this plan cannot be cached: {error}", stacklevel=3)
        return None
    parts = [text, f"fxrewrite {toolkit_digest()}", f"torch {TORCH_VERSION}", decisive]
    return hashlib.sha256("\n\n".join(parts).encode()).hexdigest()
