"""A step: a pass over the graph that is not a rewrite rule, and takes part in sets like one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import fx

from fxrewrite.errors import FxRewriteError, RefusedError, misread_context
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.source import source_line
from fxrewrite.plan.contracts import Contract, Property
from fxrewrite.report import Report


@runtime_checkable
class Step(Protocol):
    """A pass over the graph that is not a rewrite rule, such as a propagation; it takes part in sets like a rule does.

    It may have `needs`, `gives` and `precedes`, tuples of `Property`: see `fxrewrite.plan.contracts`.
    """

    name: str

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Do it through `edit`, and return the number of changes. May raise `RefusedError`."""
        ...

    def text(self) -> str:
        """What it does, for `print(RuleSet)`; together with the name it is the step's part of the digest."""
        ...


class StagedStep:
    """A step under a contract that the step itself does not have."""

    def __init__(self, step: Step, said: Mapping[str, tuple[Property, ...]]) -> None:
        self.name, self.step = step.name, step
        Contract.of(step.name, *said.values())  # an error here, where the contract is written
        self.needs, self.gives, self.precedes = said["needs"], said["gives"], said["precedes"]

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        return self.step.run(edit, context, report)

    def text(self) -> str:
        return self.step.text()


def contract_of(step: Any) -> Contract:
    """What a set of rules has worked out, or a step says, that it needs, gives and precedes."""
    if isinstance(found := getattr(step, "contract", None), Contract):
        return found
    return Contract.of(step.name, *(tuple(getattr(step, verb, ())) for verb in ("needs", "gives", "precedes")))


def provider_of(step: Step) -> str:
    """Where the class of a step is defined."""
    kind = type(step.step if isinstance(step, StagedStep) else step)
    return f"{kind.__module__}.{kind.__qualname__}"


def run_step(step: Step, edit: Edit, context: Any, report: Report) -> int:
    """Runs a step, notes it in the report, and returns the number of changes.

    Raises:
        RefusedError: the step refused; its name and the source line are filled in.
        FxRewriteError: the step reads what the context does not have.
    """
    entry = report.rule(step.name)
    started = time.perf_counter()
    try:
        changes = step.run(edit, context, report)
    except RefusedError as error:
        node = error.located_at
        source = source_line(node) if isinstance(node, fx.Node) else ""
        raise error.filled(rule=step.name, source=source) from error
    except AttributeError as error:
        misread = misread_context(error, context)
        if misread:
            raise FxRewriteError(f"{step.name}: {misread}; the graph is as before") from error
        raise
    finally:
        entry.seconds += time.perf_counter() - started
    entry.rewrites += changes
    return changes
