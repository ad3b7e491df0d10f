"""What a torch.compile backend does whose programs run on ranks, whatever it lowers a graph to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from torch import fx

from fxrewrite.backends import (
    compile_regions,
    find_backend,
    reached_recompile_limit,
    refuse_dependence_on_values,
)
from fxrewrite.report import EventLog
from fxrewrite.spmd.events import ProgramIsLast, RegionsCompiled
from fxrewrite.spmd.group import fix_rank
from fxrewrite.spmd.placement import Axis
from fxrewrite.spmd.runtime.agree import compiling
from fxrewrite.spmd.runtime.borders import Border

log = logging.getLogger(__name__)
R = TypeVar("R", bound=EventLog)
P = TypeVar("P", bound="_Settles")


class _Settles(Protocol):
    """A compiled program, which compares the ranks when it is called."""

    def settle(self) -> None: ...


class RanksBackend(Generic[R, P]):
    """A torch.compile backend that makes each graph one program of all ranks, and passes it to an inner backend.

    Attributes:
        inner: the backend that compiles the program of a rank.
        reports: one for each compiled graph, in order.
    """

    def __init__(
        self, name: str, inner: str | Callable[..., Any], *, regions: Literal["whole", "once"], timeout: float
    ) -> None:
        find_backend(inner)
        self.__name__ = name
        self.inner = inner
        self.reports: list[R] = []
        self._regions, self._timeout = regions, timeout
        self._programs: list[P] = []

    def _compiled(
        self,
        program: fx.GraphModule,
        examples: Sequence[Any],
        compile_inner: Callable[..., Any],
        axes: Sequence[Axis],
        border: Border,
        report: R,
    ) -> Callable[..., Any]:
        """Compiles this rank's program: whole, or each distinct region of it once.

        Args:
            program: which the ranks of these axes have agreed on; it is changed.
            examples: fake values of what it is called with.
            compile_inner: the inner backend, with its options.
            axes: along which a rank that cannot compile it tells the others.
            border: of the program, whose `left` reads more than its outputs.
            report: gets what is to be said.
        """
        if limit := reached_recompile_limit():
            report.events.append(ProgramIsLast(limit=limit))
            log.warning("%s: %s", self.__name__, report.events[-1])
        self.reports.append(report)
        report.events.extend(border.prepare(program))
        fix_rank(program)
        with compiling(axes, self._timeout), refuse_dependence_on_values(self.inner):
            if self._regions == "whole":
                return compile_inner(program, examples)
            run, found = compile_regions(program, examples, compile_inner)
            report.events.append(RegionsCompiled(found=found))
            return run

    def check_ranks(self) -> None:
        """Reads the results of comparing the ranks in the last calls, which otherwise the next calls would read.

        Call it on every rank at the end of a training, before weights are saved.

        Raises:
            FxRewriteError: on every rank, where the ranks of an axis were called with different values.
        """
        for program in self._programs:
            program.settle()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The backend itself, as a function is: copies of a compiled model, as for averaged weights, share it."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What it was made of: a compiled model that is loaded from a file compiles again."""
        return {**vars(self), "reports": [], "_programs": []}
