"""Checks what all ranks of an axis must share when they call a program: inputs, weights, random generators.

    checks = RankChecks(placeholders, axis, advice, drawn=...)
    checks.before(inputs)        at every call, before the program runs

Graphs are compared when they are compiled; what only a call shows is compared here. The first call waits for the other
ranks, and names the first difference. Every later call sends a few numbers around the axis in the background, and the
next call reads them: hashes of integer inputs, sums over a sample of floating ones, the states of generators if the
program draws numbers that all ranks must share, and at calls 1, 2, 4, 8, ... a checksum of each parameter.

A program that runs whole has no collectives, and one rank may run it alone, as to log or to evaluate. So it sends
nothing: WholeCalls folds what it was called with in training into a few numbers, which the next program that is sharded
sends with its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
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
from fxrewrite.spmd.runtime.agree import agree
from fxrewrite.spmd.runtime.fingerprint import BackgroundComparison, fingerprint, parameter_checksum

__all__ = [
    "Advice",
    "DistinctChunks",
    "RankChecks",
    "SameProgram",
    "WholeCalls",
    "devices_of",
    "is_due",
    "say_not_compiled",
]

_GENERATORS = "the random number generators, which must draw alike for"
_SECONDS = 3600.0
"""Timeout in seconds: how long to wait for the slowest rank to finish compiling."""
_MODULUS = 2**51 - 129
"""Twice a number below it, and a fingerprint of 52 bits, add up to what a float64 number holds exactly."""


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

    One number is compared exactly; of two, the first relative to the second.
    """

    label: str
    hint: str
    numbers: torch.Tensor


class _Pending:
    """Values that are being compared over the axis, in one tensor of a device."""

    def __init__(self, axis: Axis, compared: Sequence[_Compared], home: torch.device) -> None:
        each = [one.numbers.reshape(-1) for one in compared]
        self._numbers = torch.cat([numbers.to(home, non_blocking=home.type != "cpu") for numbers in each])
        self._of: list[_Compared] = []
        self._scales: list[int] = []
        for one in compared:
            count = one.numbers.numel()
            self._of += [one] * count
            self._scales += [len(self._of) - 1] * 2 if count == 2 else [-1]
        self._comparison = BackgroundComparison(axis, self._numbers)

    def differing(self) -> list[tuple[_Compared, float]]:
        """What differs, with this rank's number, in order; waits for the comparison."""
        wrong = self._comparison.differing(self._scales)
        mine = self._numbers.tolist() if wrong else []
        return [(self._of[i], mine[i]) for i in wrong]


class WholeCalls:
    """What programs that run whole were called with since it was last compared, folded into four numbers."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._numbers = torch.zeros(4, dtype=torch.float64)
        """Of integers, of generators, and of floating inputs the value and the scale, in which each counts for 1."""
        self._names: dict[str, None] = {}

    def add(self, inputs: Sequence[tuple[str, Any]], generators: Sequence[torch.device]) -> None:
        """Fold in one call: its inputs, but for parameters, and the devices whose generators it draws from."""
        for name, x in inputs:
            if type(x) is not torch.Tensor or not x.numel():
                continue
            value, scale = fingerprint(x)
            if is_inexact(x):
                scale = scale.clamp_min(1e-300)  # of zeros alone
                self._fold(None, None, value / scale + scale.log(), torch.ones_like(scale))
            else:
                self._fold(value, None, None, None)
            self._names[name] = None
        for device in generators:
            self._fold(None, _generator_number(device), None, None)

    def _fold(self, *new: torch.Tensor | None) -> None:
        """Exact numbers so that their order counts, the others by addition; on a GPU if one of them is on a GPU."""
        devices = [self._numbers.device, *(x.device for x in new if x is not None)]
        home = max(devices, key=lambda d: d.type != "cpu")
        numbers = list(self._numbers.to(home, non_blocking=True))
        for i, x in enumerate(new):
            if x is not None and i < 2:
                numbers[i] = (2 * numbers[i] + x.to(home, non_blocking=True).reshape(())).fmod(_MODULUS)
            elif x is not None:
                numbers[i] = numbers[i] + x.to(home, non_blocking=True)
        self._numbers = torch.stack(numbers)

    def take(self, advice: Advice) -> list[_Compared]:
        """What is to be compared, the same number of it on every rank; then starts again."""
        integers, generators, value, scale = self._numbers
        names = f" ({', '.join(self._names)})" if self._names else ""
        self._clear()
        return [
            _Compared(f"integer inputs of graphs that run whole{names}", advice.inputs, integers),
            _Compared(f"{_GENERATORS} graphs that run whole", advice.generators, generators),
            _Compared(f"floating inputs of graphs that run whole{names}", advice.inputs, torch.stack([value, scale])),
        ]


class RankChecks:
    """Compares the ranks of an axis at every call of one program, or of several that read the same.

    Args:
        placeholders: inputs of the program, whose values `before` gets.
        advice: what errors say to do.
        drawn: nodes of the program that must draw the same numbers on every rank.
        inputs: whether ranks pass the same inputs; otherwise parameters and generators alone are compared.
        whole: what programs that run whole were called with, to be compared as well.
        every_call: whether to compare calls after the first.
        timeout: how long to wait for the slowest rank to finish compiling, in seconds.
    """

    def __init__(
        self,
        placeholders: Sequence[fx.Node],
        axis: Axis,
        advice: Advice,
        *,
        drawn: Sequence[fx.Node] = (),
        inputs: bool = True,
        whole: WholeCalls | None = None,
        every_call: bool = True,
        timeout: float = _SECONDS,
    ) -> None:
        self._axis, self._advice, self._timeout = axis, advice, timeout
        self._inputs, self._whole, self._every_call = inputs, whole, every_call
        names = [_name(node) for node in placeholders]
        self._order = sorted(range(len(names)), key=names.__getitem__)
        """Of inputs, by name: processes may read them in different orders."""
        self._names = [names[i] for i in self._order]
        self._is_parameter = [is_parameter(placeholders[i]) for i in self._order]
        self._drawn = drawn
        self._devices = devices_of(drawn)
        self.calls = 0
        self._home: torch.device | None = None
        """Where numbers were sent from in the last call."""
        self._pending: _Pending | None = None

    def before(self, inputs: Sequence[Any]) -> None:
        """Compares the present call with those of the other ranks, and reads the comparison of the last call.

        Args:
            inputs: what this rank passes; None for what ranks need not share.

        Raises:
            FxRewriteError: on every rank, if the ranks differ in this call (the first) or in the one before.
        """
        self.calls += 1
        self.settle()
        is_first = self.calls == 1
        if is_first:
            passed = [(name, x) for name, x, p in self._each(inputs) if not p] if self._inputs else []
            self._agree("\n".join(f"{name}: {_shown(value)}" for name, value in passed))
        if self._every_call or self._drawn:
            self._send(inputs)
        if is_first:
            self.settle()

    def _agree(self, text: str) -> None:
        _agree_on_call(self._axis, text, self._advice, self._timeout)

    def settle(self) -> None:
        """Reads the pending comparison, if there is one."""
        if self._pending is None:
            return
        wrong = self._pending.differing()
        self._pending = None
        if not wrong:
            return
        first, _ = wrong[0]
        agree(
            self._axis,
            "\n".join(f"{compared.label}: {number:.17g}" for compared, number in wrong),
            timeout=self._timeout,
            differ=f"differ in {first.label}",
            absent="did not call what it had compiled",
            hint=first.hint,
        )
        # this rank equals its neighbours; others differ
        raise FxRewriteError(f"the ranks of axis {self._axis.name} differ in {first.label}; {first.hint}")

    def finish(self) -> None:
        """Compare what programs that run whole were called with since the last call of this one."""
        self.settle()
        if self._every_call and self._home is not None:
            self._send(())
            self.settle()

    def _each(self, inputs: Sequence[Any]) -> list[tuple[str, Any, bool]]:
        return list(zip(self._names, [inputs[i] for i in self._order], self._is_parameter, strict=True))

    def _send(self, inputs: Sequence[Any]) -> None:
        """Start comparing this call, or no call but those of programs that run whole where inputs are empty."""
        each = self._each(inputs) if inputs else []
        each = [(name, torch.tensor(x) if isinstance(x, (int, float)) else x, p) for name, x, p in each]
        tensors = [(name, x, p) for name, x, p in each if type(x) in (torch.Tensor, torch.nn.Parameter)]
        found: list[_Compared] = []
        if self._every_call:
            found += self._of_inputs([(name, x) for name, x, is_weight in tensors if not is_weight])
            if is_due(self.calls):
                found += self._of_parameters([(name, x) for name, x, is_weight in tensors if is_weight])
            found += self._whole.take(self._advice) if self._whole else ()
        found += self._of_generators() if inputs else ()
        if found:
            last = self._home or torch.device("cpu")
            home = max((x.device for _, x, _ in tensors), key=lambda d: d.type != "cpu", default=last)
            self._home, self._pending = home, _Pending(self._axis, found, home)

    def _of_inputs(self, inputs: Sequence[tuple[str, torch.Tensor]]) -> list[_Compared]:
        compared = [(name, x) for name, x in inputs if x.numel()] if self._inputs else []
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
        return f" of call {self.calls} of a program"


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

    def before(self, chunks: Sequence[torch.Tensor]) -> None:
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

    Args:
        advice: what to do where they run different ones.
        timeout: how long to wait for the slowest rank, in seconds.
    """

    def __init__(self, axis: Axis, advice: str, timeout: float = _SECONDS) -> None:
        self._axis, self._advice, self._timeout = axis, advice, timeout
        self._pending: tuple[BackgroundComparison, str] | None = None

    def before(self, text: str, device: torch.device, *, wait: bool = False) -> None:
        """Compares the program that is run with those of the other ranks, and reads the comparison of the last call.

        Args:
            text: what programs must share.
            device: where numbers are sent from.
            wait: read the present comparison, too.

        Raises:
            FxRewriteError: on every rank, if the ranks differ.
        """
        self.settle()
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # 48 bits: exact in float64
        sent = torch.full((1,), float(number), dtype=torch.float64, device=device)
        self._pending = (BackgroundComparison(self._axis, sent), text)
        if wait:
            self.settle()

    def settle(self) -> None:
        """Reads the pending comparison, if there is one."""
        if self._pending is None:
            return
        (comparison, text), self._pending = self._pending, None
        if comparison.differing([-1]):
            differ = "did not run the same program at a call"
            agree(self._axis, text, timeout=self._timeout, differ=differ, hint=self._advice)
            # this rank equals its neighbours; others differ
            raise FxRewriteError(f"the ranks of axis {self._axis.name} {differ}; {self._advice}")


def devices_of(drawn: Sequence[fx.Node]) -> list[torch.device]:
    """The devices whose generators these nodes draw from."""
    return sorted({_device_of(node) for node in drawn}, key=str)


def say_not_compiled(axis: Axis, error: Exception, advice: Advice, timeout: float = _SECONDS) -> None:
    """Tells the ranks that have compiled, before their first call, that this one could not."""
    said = f"could not compile: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    with suppress(FxRewriteError):  # the other ranks raise the same
        _agree_on_call(axis, said, advice, timeout)


def _agree_on_call(axis: Axis, text: str, advice: Advice, timeout: float) -> None:
    agree(
        axis,
        text,
        timeout=timeout,
        differ="do not make the same call",
        absent="did not call what it had compiled",
        hint=f"every rank of the axis compiles, and makes the same calls: {advice.inputs}",
    )


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
