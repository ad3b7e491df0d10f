"""Checks what all ranks of an axis must share when they call a program: inputs, weights, random generators.

    checks = RankChecks(placeholders, axis, advice, drawn=...)
    checks.before(inputs)        at every call, before the program runs

Graphs are compared when they are compiled; what only a call shows is compared here. The first call waits for the other
ranks, and names the first difference; so does a call of a program for many sizes whose sizes are new. Every later call
sends a few numbers around the axis in the background, and the next call reads them: hashes of integer inputs, sums over
a sample of floating ones, the states of generators if the program draws numbers that all ranks must share, and at calls
1, 2, 4, 8, ... a checksum of each parameter.

A program that sends nothing, one rank may run alone to evaluate: it is compared in training only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrewrite.errors import FxRewriteError
from fxrewrite.graph import source_line
from fxrewrite.graph.inputs import input_name
from fxrewrite.ops import fake_value, is_inexact, is_parameter
from fxrewrite.spmd.group import is_fake
from fxrewrite.spmd.placement import Axis
from fxrewrite.spmd.runtime.agree import SizesOfCalls, agree
from fxrewrite.spmd.runtime.fingerprint import BackgroundComparison, fingerprint, parameter_checksum

_GENERATORS = "the random number generators, which must draw alike for"
_SECONDS = 3600.0
"""How long to wait for the slowest rank to make a call, in seconds; one may save a checkpoint before."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do where ranks differ, for errors: in what they pass, in parameters, in random generators."""

    inputs: str
    parameters: str
    generators: str


def is_due(call: int) -> bool:
    """Whether costly checks are made at this call, counted from 1: at 1, 2, 4, 8, ..."""
    return call & (call - 1) == 0


@dataclass(frozen=True, slots=True)
class _Compared:
    """One value that ranks should share: what it is, what to do where they differ, and a few numbers made of it.

    One number is compared exactly; of two, the first relative to the second. Where ranks differ, they show each other
    the text, or the number.
    """

    label: str
    hint: str
    numbers: torch.Tensor
    text: str = ""


class _Pending:
    """Values that are being compared over the axis, in one tensor, on a GPU if one of them is on a GPU."""

    def __init__(self, axis: Axis, compared: Sequence[_Compared]) -> None:
        self._axis = axis
        each = [one.numbers.reshape(-1) for one in compared]
        home = max((numbers.device for numbers in each), key=lambda device: device.type != "cpu")
        self._numbers = torch.cat([numbers.to(home, non_blocking=home.type != "cpu") for numbers in each])
        self._of: list[_Compared] = []
        self._scales: list[int] = []
        for one in compared:
            count = one.numbers.numel()
            self._of += [one] * count
            self._scales += [len(self._of) - 1] * 2 if count == 2 else [-1]
        self._comparison = BackgroundComparison(axis, self._numbers)

    def settle(self) -> None:
        """Waits for the comparison.

        Raises:
            FxRewriteError: on every rank, where they differ; says in what.
        """
        wrong = self._comparison.differing(self._scales)
        if not wrong:
            return
        first, mine = self._of[wrong[0]], self._numbers.tolist()
        differ = f"differ in {first.label}"
        agree(
            self._axis,
            "\n".join(self._of[i].text or f"{self._of[i].label}: {mine[i]:.17g}" for i in wrong),
            timeout=_SECONDS,
            differ=differ,
            absent="did not call what it had compiled",
            hint=first.hint,
        )
        # this rank equals its neighbours; others differ
        raise FxRewriteError(f"the ranks of axis {self._axis.name} {differ}; {first.hint}")


class RankChecks:
    """Compares the ranks of an axis at every call of one program, or of several that read the same.

    Args:
        placeholders: inputs of the program, whose values `before` gets.
        advice: what errors say to do.
        drawn: nodes of the program that must draw the same numbers on every rank.
        same: where each rank has a batch of its own, what compares which programs they run; inputs are not compared.
        text: what the program shares with those of other ranks, for `same`.
        in_training: whether calls are compared in training only, so that a rank may evaluate alone.
        every_call: whether to compare calls after the first.
    """

    def __init__(
        self,
        placeholders: Sequence[fx.Node],
        axis: Axis,
        advice: Advice,
        *,
        drawn: Sequence[fx.Node] = (),
        same: SameProgram | None = None,
        text: str = "",
        in_training: bool = False,
        every_call: bool = True,
    ) -> None:
        self._axis, self._advice = axis, advice
        self._same, self._text = same, text
        self._in_training, self._every_call = in_training, every_call
        names = [_name(node) for node in placeholders]
        self._order = sorted(range(len(names)), key=names.__getitem__)
        """Of inputs, by name: processes may read them in different orders."""
        self._names = [names[i] for i in self._order]
        self._is_parameter = [is_parameter(placeholders[i]) for i in self._order]
        is_for_many = any(isinstance(fake_value(node), torch.SymInt) for node in placeholders)
        self._sizes: SizesOfCalls | None = None
        if is_for_many and every_call and same is None:
            self._sizes = SizesOfCalls(axis, _SECONDS, advice.inputs)
        self._drawn = drawn
        self._devices = sorted({_device_of(node) for node in drawn}, key=str)
        self._calls = 0
        self._pending: _Pending | None = None

    def before(self, inputs: Sequence[Any]) -> None:
        """Compares the present call with those of the other ranks, and reads the comparison of the last call.

        Args:
            inputs: what this rank passes.

        Raises:
            FxRewriteError: on every rank, if the ranks differ in this call (the first) or in the one before; on those
                whose sizes are new, if the sizes of this call differ.
        """
        if self._in_training and not torch.is_grad_enabled():
            return
        self._calls += 1
        if self._same is not None:
            self._same.before(self._text, wait=is_due(self._calls))
        self._settle()
        is_first = self._calls == 1
        if is_first:
            self._agree_on_first(inputs)
        if self._sizes is not None:
            batch = [(name, x) for name, x, is_weight in self._each(inputs) if not is_weight]
            shapes = (f"{name} {list(x.shape)}" for name, x in batch if isinstance(x, torch.Tensor))
            self._sizes.check(self._calls, ", ".join(shapes))
        if self._every_call or self._drawn:
            self._send(inputs)
        if is_first:
            self._settle()

    def _agree_on_first(self, inputs: Sequence[Any]) -> None:
        passed = [] if self._same else [(name, x) for name, x, is_weight in self._each(inputs) if not is_weight]
        agree(
            self._axis,
            "\n".join(f"{name}: {_shown(value)}" for name, value in passed),
            timeout=_SECONDS,
            differ="do not make the same call",
            absent="did not call what it had compiled",
            hint=f"every rank of the axis compiles, and makes the same calls: {self._advice.inputs}",
        )

    def settle(self) -> None:
        """Reads the pending comparisons, if there are any."""
        if self._same is not None:
            self._same.settle()
        self._settle()

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    def _each(self, inputs: Sequence[Any]) -> list[tuple[str, Any, bool]]:
        return list(zip(self._names, [inputs[i] for i in self._order], self._is_parameter, strict=True))

    def _send(self, inputs: Sequence[Any]) -> None:
        """Starts comparing this call."""
        each = [(n, torch.tensor(x) if isinstance(x, (int, float)) else x, p) for n, x, p in self._each(inputs)]
        tensors = [(name, x, p) for name, x, p in each if type(x) in (torch.Tensor, torch.nn.Parameter)]
        found: list[_Compared] = []
        if self._every_call:
            found += self._of_inputs([(name, x) for name, x, is_weight in tensors if not is_weight])
            if is_due(self._calls):
                found += self._of_parameters([(name, x) for name, x, is_weight in tensors if is_weight])
        found += self._of_generators()
        if found:
            self._pending = _Pending(self._axis, found)

    def _of_inputs(self, inputs: Sequence[tuple[str, torch.Tensor]]) -> list[_Compared]:
        compared = [] if self._same else [(name, x) for name, x in inputs if x.numel()]
        return [_Compared(f"input {name}{self._of_call}", self._advice.inputs, fingerprint(x)) for name, x in compared]

    def _of_parameters(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> list[_Compared]:
        weights = [(name, x) for name, x in parameters if not x.is_complex()]
        return [
            _Compared(f"parameter {name}{self._of_call}", self._advice.parameters, checksum)
            for (name, _), checksum in zip(weights, parameter_checksum(x for _, x in weights), strict=True)
        ]

    def _of_generators(self) -> list[_Compared]:
        if not self._devices:
            return []
        label = f"{_GENERATORS} %{self._drawn[0].name} {source_line(self._drawn[0])},{self._of_call}"
        return [_Compared(label, self._advice.generators, _generator_number(device)) for device in self._devices]

    @property
    def _of_call(self) -> str:
        return f" of call {self._calls} of a program"


class DistinctChunks:
    """Refuses, at the first call of a program, chunks that are the same on every rank: a batch that nobody has cut.

    Chunks of one number alone, such as those of a batch of zeros, say nothing and are let through.

    Args:
        placeholders: inputs of the program of which each rank passes its chunk.
        axis: over which they are cut.
    """

    def __init__(self, placeholders: Sequence[fx.Node], axis: Axis) -> None:
        self._names, self._axis = [input_name(node) for node in placeholders], axis
        self._is_first = True

    def settle(self) -> None:
        """Nothing is left to read."""

    def before(self, chunks: Sequence[Any]) -> None:
        """Compares what the ranks pass; reads it at once.

        Raises:
            FxRewriteError: on every rank, where all of them pass the same.
        """
        if not self._is_first:
            return
        self._is_first = False
        home = max((chunk.device for chunk in chunks), key=lambda device: device.type != "cpu")
        numbers = torch.cat([fingerprint(chunk).to(home) for chunk in chunks])
        is_told = any(chunk.numel() and bool((chunk != chunk.reshape(-1)[0]).any()) for chunk in chunks)
        differing = BackgroundComparison(self._axis, numbers).differing([-1] * numbers.numel())
        if is_told and not differing and not is_fake(self._axis):
            shown = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(self._names, chunks, strict=True))
            raise FxRewriteError(
                f"axis {self._axis.name}: every rank passes the same {shown}, which the plan says are its chunk of the "
                f"batch; pass one of {self._axis.size} parts on each rank, cut as the plan states, or use a plan whose "
                "ranks are called with the whole batch"
            )


class SameProgram:
    """Compares at every call which program the ranks of an axis run, where each has a batch of its own.

    Of programs that share the same, ranks may run different ones at once.

    Args:
        axis: of the ranks.
        advice: what to do where they run different ones.
        device: where numbers are sent from.
    """

    def __init__(self, axis: Axis, advice: str, device: torch.device) -> None:
        self._axis, self._advice, self._device = axis, advice, device
        self._pending: _Pending | None = None

    def before(self, text: str, *, wait: bool) -> None:
        """Compares the program that is run with those of the other ranks, and reads the comparison of the last call.

        Args:
            text: what programs must share.
            wait: read the present comparison, too.

        Raises:
            FxRewriteError: on every rank, if the ranks differ.
        """
        self.settle()
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # 48 bits: exact in float64
        sent = torch.full((1,), float(number), dtype=torch.float64, device=self._device)
        program = _Compared("the program that they run at a call", self._advice, sent, text)
        self._pending = _Pending(self._axis, [program])
        if wait:
            self.settle()

    def settle(self) -> None:
        """Reads the pending comparison, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()


def _name(placeholder: fx.Node) -> str:
    """The name of an input that is the same on every rank; processes may name a symbolic size differently."""
    return "a size" if isinstance(fake_value(placeholder), torch.SymInt) else input_name(placeholder)


def _shown(value: Any) -> str:
    """Returns an input's shape, and a hash of its entries if they are integers."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    entries = f" {_hash(value):013x}" if value.numel() and not is_inexact(value) else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{entries}"


def _hash(integers: torch.Tensor) -> int:
    return int(fingerprint(integers)[0].item())


def _generator_number(device: torch.device) -> torch.Tensor:
    """A float64 number of the state of a device's generator."""
    return fingerprint(_state_of(device))[:1]


def _device_of(node: fx.Node) -> torch.device:
    value = fake_value(node)
    return (value if isinstance(value, torch.Tensor) else value[0]).device


def _state_of(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
