"""The digest of a plan: a key for compile caches."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from fxrewrite import ops
from fxrewrite.identity import NoIdentityError, identity
from fxrewrite.pattern.terms import Op, subterms
from fxrewrite.plan.members import MemberSet
from fxrewrite.torch_versions import TORCH_VERSION

__all__ = ["plan_digest"]


def plan_digest(text: str, sets: Sequence[MemberSet]) -> str | None:
    """Returns the sha256 of everything that decides what a plan does; None, with a warning, if there is none.

    Args:
        text: of the plan.
        sets: that it runs.
    """
    parts = [text, f"fxrewrite {_version()}", f"torch {TORCH_VERSION}"]
    try:
        for rule in (rule for rules in sets for rule in rules.rules()):
            promises = (rule.numerics, rule.rng, rule.shapes, rule.domain, rule.terminates, rule.gradients)
            options = (rule.id, *promises, rule.optional, rule.after, rule.before)
            terms = itertools.chain.from_iterable(map(subterms, rule.pattern.outputs))
            unnamed = next((t.key for t in terms if isinstance(t, Op) and ops.is_by_address(t.key)), "")
            if unnamed:
                raise NoIdentityError(f"{unnamed} in the pattern of {rule.id} has no identity but its address")
            parts += [
                repr(options),
                identity(rule.body),
                *(identity(constraint) for constraint in rule.pattern.where),
            ]
        parts += [identity(rules.invariant) for outer in sets for rules in outer.nested()]
    except NoIdentityError as error:
        warnings.warn(f"this plan cannot be cached: {error}", stacklevel=3)
        return None
    return hashlib.sha256("\n\n".join(parts).encode()).hexdigest()


def _version() -> str:
    try:
        return version("fxrewrite")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "uninstalled"
