"""One budget of memory decides what layers keep and how large tiles are: `autosp(memory="24 GiB")`.

The settings below are tried in this order, and the first with which a step fits into the budget is used. A setting that
the user gives keeps its value in all of them. A peak is that of `fxrewrite.backends.step_memory`: of the program that
these settings make, traced forward and backward without data.

    checkpoint="none"                     the partitioner decides; MLPs and the loss as without a budget
    ... and a smaller loss_tile           where the peak is in the loss
    checkpoint=n                          of layers, what costs most to compute again and fits: n bytes
    checkpoint="attention"                a layer keeps its input and attention's result
    ... and mlp_tile                      MLPs in tiles
    checkpoint="full"                     a layer keeps its input
    ... and tiles of an eighth            of MLPs and the loss

`offload` is not among them: AOTAutograd hands over all that is saved when the forward graph has ended, and takes all of
it back when the backward graph begins, so it does not lower the peak of a step that is one graph.
Numerics: those of the settings, each of which is exact or reassociates.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from autosp_rules.errors import AutoSPError
from autosp_rules.memory.checkpoint import Checkpointed, checkpoint_text
from autosp_rules.sequence import tokens_per_rank
from fxrewrite import Edit, Event, Report, RuleSet, graph_text
from fxrewrite.backends import OVERLAP, RECOMPUTE_LATE, StepMemory, step_memory
from fxrewrite.ops import tensors_of
from fxrewrite.report import bytes_text
from fxrewrite.spmd import fix_rank
from rules.tiling.tiles import TILE_BYTES

if TYPE_CHECKING:
    from autosp_rules.config import AutoSPConfig

log = logging.getLogger(__name__)
DECIDED = ("checkpoint", "mlp_tile", "loss_tile")
"""Settings that a budget decides, unless they are given."""

_PREFIXES = tuple(enumerate("KMGT", 1))
_UNITS = {"B": 1, **{f"{p}B": 1000**n for n, p in _PREFIXES}, **{f"{p}iB": 1024**n for n, p in _PREFIXES}}
_LEAST_TILE = 2**16
"""Smallest tile in bytes: below it, a tile of a real model is a row, and kernels have nothing to do."""
_SHARES = (0.97, 0.7)
"""Of the bytes that are left with checkpoint="attention", the shares that layers try to keep; what they keep raises the
peak by a little more than its bytes, where a value is computed again no longer but read later."""


def bytes_from(given: Any) -> int:
    """Returns the bytes of an int, or of a text such as "24 GiB", "1.5 GB" or "500 MB".

    Raises:
        ValueError: it is neither, or not more than 0; for pydantic, which shows it to the user.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*", given) if isinstance(given, str) else None
    size = int(float(found[1]) * _UNITS[found[2]]) if found else given
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ValueError('it takes bytes, as an int of 1 or more or as a text with a unit: "24 GiB", "500 MB"')
    return size


def _only_loss_tile(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether settings differ in the tiles of the loss alone."""
    return {**one, "loss_tile": 0} == {**other, "loss_tile": 0}


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


class MemoryFitted(Event, frozen=True):
    """A step fits into the budget of memory with these settings, chosen from what was tried."""

    kind: Literal["memory"] = "memory"
    budget: int = Field(description="bytes")
    peak: int = Field(description="bytes of a step with the settings, estimated")
    given: int = Field(description="bytes of parameters, buffers and the batch, which are part of the peak")
    gradients: int = Field(description="bytes of gradients when the step has ended")
    at: str = Field(description="operator at the peak")
    settings: dict[str, Any] = Field(description="those that the budget decided or the user gave")
    too_large: dict[str, int] = Field(description="peaks of settings that were tried before and do not fit")
    num_traces: int
    seconds: float = Field(description="that the search took")
    compiler: str = Field(description="name of the backend that the peak is estimated for")
    is_symbolic: bool = Field(description="whether the length is a symbol; the peak is for the traced length")
    is_guess: bool = Field(default=False, description="whether it is guessed what inductor fuses")
    unknown: tuple[str, ...] = Field(default=(), description="operators whose inside is not counted")

    def __str__(self) -> str:
        why = "; ".join(f"{settings} would take {bytes_text(peak)}" for settings, peak in self.too_large.items())
        inside = f"may be exceeded, as the inside of {', '.join(self.unknown)} cannot be counted without data: "
        said = (
            f"memory: {inside if self.unknown else ''}{bytes_text(self.peak)} of {bytes_text(self.budget)} "
            f"with {_said(self.settings)}"
            + (f", as {why}" if why else ", the fastest")
            + f"; {bytes_text(self.given)} are parameters, buffers and the batch, "
            f"{bytes_text(self.gradients)} gradients; the peak is at %{self.at}; "
            f"estimated in {self.seconds:.1f} s from {self.num_traces} traces"
        )
        if self.is_guess:
            said += "; which values inductor fuses is a guess, measured peaks were 0.65 to 1.18 of such estimates"
        if self.is_symbolic:
            said += "; for the traced length, as it is a symbol: a longer sequence takes more"
        return said


@dataclass(frozen=True, slots=True)
class _Try:
    """Settings, the memory of a step with them, and what layers keep."""

    settings: dict[str, Any]
    memory: StepMemory
    kept_bytes: int | None


class _Undone(Exception):  # noqa: N818  # no error: it undoes what a try changed
    """Leaves a savepoint, so that the graph is as before."""


class FitMemory:
    """The step that chooses settings by a budget, and runs the rules of memory with them.

    Args:
        config: its `memory` is the budget.
        rules: the rules of memory for settings.

    Raises:
        AutoSPError: no settings fit; it says the smallest peak and what would fit.
    """

    name = "fit_memory"

    def __init__(self, config: AutoSPConfig, given: frozenset[str], rules: Callable[[AutoSPConfig], RuleSet]) -> None:
        self._config, self._given, self._rules = config, given, rules
        assert config.memory is not None, "a budget is given"
        self._budget: int = config.memory

    def text(self) -> str:
        given = {name: getattr(self._config, name) for name in DECIDED if name in self._given}
        kept = f", with {_said(given)}" if given else ""
        most = bytes_text(self._budget)
        return f"the loss, layers and MLPs by the fastest settings whose step takes at most {most}{kept}"

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        """Chooses, adds a line to the report, runs the rules, and returns their number of changes."""
        started = time.perf_counter()
        inner = self._config.inner
        compiler = inner if isinstance(inner, str) else "a callable"
        may_keep = "checkpoint" not in self._given
        options = OVERLAP if self._config.overlap else {}
        search = _Search(edit, context, compiler, self._rules_with, may_keep, options)
        best = search.best(self._budget, map(self._settings, self._rungs()))
        if best is None:
            raise self._refusal(edit, context, search.least())
        report.events.append(
            MemoryFitted(
                budget=self._budget,
                peak=best.memory.peak,
                given=best.memory.given,
                gradients=best.memory.gradients,
                at=best.memory.at,
                settings=best.settings,
                too_large={_said(t.settings): t.memory.peak for t in search.tries if t.memory.peak > self._budget},
                num_traces=search.num_traces,
                seconds=time.perf_counter() - started,
                compiler=compiler,
                is_symbolic=any(type(t.numel()) is not int for n in edit.nodes() for t in tensors_of(n)),
                is_guess=best.memory.is_guess,
                unknown=best.memory.unknown,
            )
        )
        if best.memory.unknown:
            log.warning("autosp: %s", report.events[-1])
        return self._rules_with(best.settings).run(edit, context, report)

    def _rules_with(self, settings: Mapping[str, Any]) -> RuleSet:
        return self._rules(self._config.model_copy(update=dict(settings)))

    def _settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings, with those that the user gave in their place."""
        return {name: getattr(self._config, name) if name in self._given else settings[name] for name in settings}

    def _rungs(self) -> Iterator[dict[str, Any]]:
        """Yields settings from the fastest to the leanest."""
        tile = max(_LEAST_TILE, min(TILE_BYTES, 1 << (self._budget // 64).bit_length()))
        least = max(_LEAST_TILE, tile // 8)
        yield {"checkpoint": "none", "mlp_tile": "auto", "loss_tile": "auto"}
        yield {"checkpoint": "none", "mlp_tile": "auto", "loss_tile": tile}
        yield {"checkpoint": "attention", "mlp_tile": "auto", "loss_tile": tile}
        yield {"checkpoint": "attention", "mlp_tile": tile, "loss_tile": tile}
        yield {"checkpoint": "full", "mlp_tile": tile, "loss_tile": tile}
        yield {"checkpoint": "full", "mlp_tile": least, "loss_tile": least}

    def _refusal(self, edit: Edit, context: Any, least: _Try) -> AutoSPError:
        """The error that says how much is needed, and what would fit."""
        memory, budget = least.memory, self._budget
        fixed = memory.given + memory.gradients
        given, gradients = bytes_text(memory.given), bytes_text(memory.gradients)
        held = f"{given} are parameters, buffers and the batch, {gradients} gradients"
        if budget <= fixed:
            return AutoSPError.of(
                f"memory={bytes_text(budget)}: with any settings and any length, {held}",
                hint="shard them, as docs/training.md says",
            )
        reason = (
            f"memory={bytes_text(budget)}: the smallest peak of a step is {bytes_text(memory.peak)}, at %{memory.at}, "
            f"with {_said(least.settings)}: {held}"
        )
        share = (budget - fixed) / max(memory.peak - fixed, 1)
        tokens, ranks = tokens_per_rank(edit.gm) * context.axis.size, context.axis.size
        hint = (
            f"about {int(tokens * share):,} tokens in place of {tokens:,} fit, "
            f"or about {int(ranks / share) + 1} ranks, if these divide the heads of attention"
        )
        if self._config.logits == "keep":
            hint += ", or logits='drop' if nobody reads the logits of a loss"
        return AutoSPError.of(reason, hint=hint)


@dataclass(slots=True)
class _Search:
    """Tries settings on one graph, each program once."""

    edit: Edit
    context: Any
    """That of the graph's plan."""
    compiler: str
    rules: Callable[[Mapping[str, Any]], RuleSet]
    """The rules of memory for settings."""
    may_keep: bool
    """Whether layers may keep what a budget leaves."""
    options: Mapping[str, Any]
    """With which inductor compiles."""
    traced: dict[str, StepMemory] = field(default_factory=dict[str, StepMemory])
    """The memory of a step, by the text of its program."""
    tries: list[_Try] = field(default_factory=list[_Try])

    @property
    def num_traces(self) -> int:
        return len(self.traced)

    def best(self, budget: int, rungs: Iterator[dict[str, Any]]) -> _Try | None:
        """Returns the first try that fits; None if none does."""
        for settings in rungs:
            before = self.tries[-1] if self.tries else None
            if before is not None and settings == before.settings:
                continue
            # A smaller tile of the loss changes a peak that is in the loss, and no other.
            if before is not None and _only_loss_tile(settings, before.settings) and "entropy" not in before.memory.at:
                continue
            tried = self._try(settings, budget)
            if tried.memory.peak <= budget:
                is_open = self.may_keep and settings["checkpoint"] == "attention"
                return (is_open and self._with_more_kept(tried, budget)) or tried
            if tried.memory.given + tried.memory.gradients >= budget:
                return None  # which all settings hold when a step ends
        return None

    def _with_more_kept(self, lean: _Try, budget: int) -> _Try | None:
        """Returns the try whose layers keep what the budget leaves; None if they keep no more than in `lean`."""
        if lean.kept_bytes is None:
            return None
        for share in _SHARES:
            more = int(share * (budget - lean.memory.peak))
            tried = self._try({**lean.settings, "checkpoint": lean.kept_bytes + more}, budget)
            if tried.memory.peak <= budget:
                return tried
        return None

    def least(self) -> _Try:
        """Returns the try of the smallest peak, which is not guessed where it can be known."""
        found = min(self.tries, key=lambda one: one.memory.peak)
        return self._try(found.settings, None) if found.memory.is_guess else found

    def _try(self, settings: dict[str, Any], limit: int | None) -> _Try:
        """Returns what a step takes with these settings, roughly if far above a limit; the graph is as before."""
        report, program = Report(), None
        try:
            with self.edit.savepoint():
                self.rules(settings).run(self.edit, self.context, report)
                program = self.edit.copied()
                raise _Undone
        except _Undone:
            pass
        assert program is not None, "it was copied"
        self.context.finish(program)
        text = checkpoint_text(program) + graph_text(program)
        known = self.traced.get(text)
        if known is None or (limit is None and known.is_guess):
            fix_rank(program, lambda _: 0)  # sizes are those of every rank, and so are decisions
            options = {**self.options, **(RECOMPUTE_LATE if checkpoint_text(program) else {})}
            self.traced[text] = step_memory(program, self.compiler, options, limit=limit)
        found = next((event.found for event in report.events_of(Checkpointed)), None)
        tried = _Try(settings, self.traced[text], None if found is None else found.kept_bytes)
        self.tries.append(tried)
        return tried
