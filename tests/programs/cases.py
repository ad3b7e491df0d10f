"""Random programs on simulated ranks, compared with one device; what was reached of what places values."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from autosp_rules import AutoSPConfig
from autosp_rules.parallelism import AUTOSP
from autosp_rules.transform import NoSequenceError, transform
from fxrewrite import FxRewriteError
from fxrewrite.graph import size_hint
from fxrewrite.ops import key
from fxrewrite.spmd import Gathered, Parallelism, Shard, axis_of, inputs, param
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.placement import Partial
from fxrewrite.testing import fake_mesh, run_on_ranks, simulate
from rules.parallel import ZERO3
from tests.programs.text import Model, Program, batch, random_program

TOLERANCE = 1e-9
"""How far the loss or a gradient may be off, as a share of the largest gradient."""

ROWS = Parallelism("rows", axis="tp", place={param("{up,wide,head,embed,narrow}.weight", optional=True): Shard(0)})
COLUMNS = Parallelism("columns", axis="tp", place={param("{up,wide,head,embed}.weight", optional=True): Shard(1)})
VOCABULARY = Parallelism(
    "vocabulary",
    axis="tp",
    place={param("{embed,wide,narrow,head}.weight", optional=True): Shard(0), param("gate", optional=True): Shard(0)},
)
CHUNKS = Parallelism("chunks", axis="sp", place={inputs("ids"): Shard(1), inputs("labels", optional=True): Shard(1)})
PLANS: Mapping[str, tuple[Any, Mapping[str, int]]] = {
    "sequence and rows": (AUTOSP | ROWS, {"sp": 2, "tp": 2}),
    "sequence and columns": (AUTOSP | COLUMNS, {"sp": 2, "tp": 2}),
    "sequence of three and rows": (AUTOSP | VOCABULARY, {"sp": 3, "tp": 2}),
    "chunks": (replace(AUTOSP, name="given", place=CHUNKS.place), {"sp": 2}),
    "columns": (COLUMNS, {"tp": 2}),
    "rows": (VOCABULARY, {"tp": 2}),
    "batch and sequence": (ZERO3 | AUTOSP, {"dp": 2, "sp": 2}),
    "three axes": (ZERO3 | AUTOSP | VOCABULARY, {"dp": 2, "sp": 2, "tp": 2}),
}


@dataclass(frozen=True)
class Case:
    """A program with the ranks, the lengths and the way that it runs."""

    program: Program
    num_ranks: int
    lengths: tuple[int, ...]
    plan: str = ""
    attention: Any = "auto"

    @staticmethod
    def of(seed: int) -> Case:
        rng = Random(seed + 10**9)
        num_ranks = rng.choice((2, 3, 4))
        short = (max(2, num_ranks - 1), num_ranks, num_ranks + 1, 2 * num_ranks - 1)
        lengths = [rng.choice(short)] if rng.random() < 0.2 else [rng.randint(5, 20)]
        plan, way = "", rng.random()
        if way < 0.2:
            plan = rng.choice(list(PLANS))
            lengths = [length + length % 2 for length in lengths] if plan == "chunks" else lengths
        elif way < 0.32:
            lengths = [rng.randint(8, 20), *rng.sample((1, *short, 12, 17, 24, 29), 2)]
        strategies = ("auto", "auto", "auto", "gather_kv", "ring", *["ulysses"] * (num_ranks == 2))
        attention = rng.choice(strategies)
        return Case(random_program(seed), num_ranks, tuple(lengths), plan, attention)

    def __str__(self) -> str:
        how = f"plan {self.plan}" if self.plan else f"{self.num_ranks} ranks, attention {self.attention}"
        return f"{how}, lengths {self.lengths}:\n{self.program.text}"


@dataclass
class Outcome:
    """What became of a case: "exact", "wrong", "refused", "crash", or "nothing" that could be compared."""

    kind: str = "nothing"
    why: str = ""
    reached: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True)
class _Expected:
    outputs: list[Tensor]
    grads: Mapping[int, Tensor | None]

    @staticmethod
    def of(model: nn.Module, given: Mapping[str, Tensor]) -> _Expected | None:
        """What one device computes; None if that fails, or is no number somewhere."""
        parameters = list(model.parameters())
        try:
            torch.manual_seed(0)
            outputs = tree_leaves(model(**given))
            grads = torch.autograd.grad(outputs[0], parameters, allow_unused=True)
        except (RuntimeError, IndexError, ValueError):
            return None
        values = [*outputs, *(grad for grad in grads if grad is not None)]
        if any(grad.is_sparse for grad in values) or not all(bool(value.isfinite().all()) for value in values):
            return None
        by_id = {id(leaf): grad for leaf, grad in zip(parameters, grads, strict=True)}
        return _Expected([out.detach() for out in outputs], by_id)

    def error(self, outputs: Sequence[Tensor], given: Sequence[Any], grads: Sequence[Tensor | None]) -> float:
        """The largest difference, as a share of the largest gradient, or of the largest number of an output."""
        found = [_relative(got, want) for got, want in zip(outputs, self.outputs, strict=True)]
        largest = max((g.abs().max().item() for g in self.grads.values() if g is not None), default=0.0) or 1.0
        for value, grad in zip(given, grads, strict=True):
            want = self.grads.get(id(value))
            off = want if grad is None else grad if want is None else grad - want
            if off is not None:
                found.append(off.abs().nan_to_num(torch.inf).max().item() / largest)
        return max(found)


def _relative(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return torch.inf
    off = (got - want).abs().double().nan_to_num(torch.inf)
    return off.max().item() / max(1.0, want.abs().max().item()) if off.numel() else 0.0


def _is_blunt(model: nn.Module, given: Mapping[str, Tensor], error: float) -> bool:
    """Whether one device alone is as far off, where parameters differ by their rounding."""
    expected = _Expected.of(model, given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-14 * torch.randn_like(parameter))
    other = _Expected.of(model, given)
    if expected is None or other is None:
        return True
    grads = [other.grads[id(parameter)] for parameter in model.parameters()]
    return expected.error(other.outputs, list(model.parameters()), grads) > 1e-4 * error


def check(case: Case) -> Outcome:
    """The case on one device and on ranks."""
    found = Outcome()
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of what a program does
            run = _on_a_mesh if case.plan else _one_program if len(case.lengths) > 1 else _one_length
            run(case, found)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is no answer to a model
        chain: list[BaseException] = [error]
        while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) is not None:
            chain.append(inner)
        ours = next((cause for cause in chain if isinstance(cause, FxRewriteError)), None)
        if ours is not None:
            is_asked = isinstance(ours, NoSequenceError) or "attention='" in str(ours)  # for what cannot be
            found.kind, found.why = "nothing" if is_asked else "refused", str(ours)
        elif any(isinstance(cause, (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)) for cause in chain):
            found.why = "the program breaks"
        else:
            where = traceback.extract_tb(chain[-1].__traceback__)[-1]
            found.kind = "crash"
            found.why = f"{type(chain[-1]).__name__} {str(chain[-1])[:300]} ({where.filename}:{where.lineno})"
    return found


def _compare(case: Case, found: Outcome, given: Mapping[str, Tensor], error: float) -> None:
    if error > TOLERANCE and not _is_blunt(Model(case.program.text), given, error):
        found.kind, found.why = "wrong", f"off by {error:.1e} at length {given['ids'].shape[1]}"
    elif found.kind == "nothing":
        found.kind = "exact"


def _one_length(case: Case, found: Outcome) -> None:
    model, given = Model(case.program.text), batch(case.lengths[0])
    expected = _Expected.of(model, given)
    if expected is None:
        return
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((gm, list(inputs)))
        return gm

    torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(**given)
    if len(graphs) != 1:
        return  # a program that breaks
    gm, inputs = graphs[0]
    inputs = [size_hint(v) if isinstance(v, torch.SymInt) else v for v in inputs]
    with fake_mesh((case.num_ranks,), ("sp",)) as mesh:
        config = AutoSPConfig(outputs="gather", attention=case.attention)
        program, report = transform(gm, config, axis_of(mesh, "sp"))
        _count(found, program, report.rewrites, report.events)
        torch.manual_seed(0)
        run = run_on_ranks(program, inputs, case.num_ranks, backward=0)
    error = max(expected.error(tree_leaves(outputs), inputs, run.gradients()) for outputs in run.outputs)
    _compare(case, found, given, error)


def _one_program(case: Case, found: Outcome) -> None:
    """What was compiled for one length runs at the others."""
    model = Model(case.program.text)
    with fake_mesh((case.num_ranks,), ("sp",)) as mesh:
        ran: list[tuple[Sequence[Any], Any]] = []

        def backend(gm: fx.GraphModule, given_sizes: Sequence[Any]) -> Callable[..., Any]:
            config = AutoSPConfig(outputs="gather", attention=case.attention)
            try:
                program, report = transform(gm, config, axis_of(mesh, "sp"))
            except NoSequenceError:
                return gm
            _count(found, program, report.rewrites, report.events)
            found.reached["many lengths"] += any(isinstance(x, torch.SymInt) for x in given_sizes)

            def call(*args: Any) -> Any:
                torch.manual_seed(0)
                ran.append((args, run_on_ranks(program, args, case.num_ranks, backward=0)))
                return ran[-1][1].outputs[-1]

            return call

        run = torch.compile(model, backend=backend, fullgraph=True)
        for length in case.lengths:
            given = batch(length)
            expected = _Expected.of(model, given)
            if expected is None:
                continue
            ran.clear()
            for value in given.values():
                torch._dynamo.maybe_mark_dynamic(value, 1)
            run(**given)
            if len(ran) == 1:  # and the program does not break
                args, made = ran[0]
                args = [size_hint(v) if isinstance(v, torch.SymInt) else v for v in args]
                errors = (expected.error(tree_leaves(outputs), args, made.gradients()) for outputs in made.outputs)
                _compare(case, found, given, max(errors))
                if found.kind == "wrong":
                    return


def _on_a_mesh(case: Case, found: Outcome) -> None:
    plan, mesh = PLANS[case.plan]
    model, given = Model(case.program.text), batch(case.lengths[0])
    if _Expected.of(model, given) is None:
        return
    made = simulate(model, given, plan, mesh)
    rewrites = {entry.rule: entry.rewrites for entry in getattr(made.report, "rules", ())}
    _count(found, made.program, rewrites, made.report.events)
    found.reached[f"plan {case.plan}"] += 1
    if made.num_nan:
        return
    _compare(case, found, given, made.error)


def _count(found: Outcome, program: fx.GraphModule, rewrites: Mapping[str, int], events: Sequence[Any]) -> None:
    """Counts once for a program each mechanism that it has."""
    reached = {f"rule {rule}" for rule, count in rewrites.items() if count}
    for node in program.graph.nodes:
        placement = PLACEMENT.of(node)
        for placed in placement if isinstance(placement, tuple) else (placement,):
            reached |= set(_mechanisms(placed))
        if isinstance(placement, Partial) and key(node) == "aten::masked_fill":
            reached.add("lookup")
        if node.op == "call_function":
            found.reached[f"op {key(node)}"] += 1
    for event in events:
        reached.add(f"event {event.kind}")
        if isinstance(event, Gathered):
            reached.add(f"gathered {event.why}")
    found.reached.update(reached)


def _mechanisms(placement: Any) -> Iterator[str]:
    if isinstance(placement, Partial):
        yield f"partial {placement.reduce_op}"
    if isinstance(placement, Shard):
        yield f"shard dim {placement.dim}"
        if placement.is_section:
            yield "section"
            if not (isinstance(placement.outer, int) and placement.outer == 1):
                yield "section of runs"
        if not (isinstance(placement.outer, int) and placement.outer == 1):
            yield "outer"
        if not (isinstance(placement.inner, int) and placement.inner == 1):
            yield "inner"
        if placement.uneven:
            yield "uneven"


def shrunk(case: Case, is_same: Callable[[Outcome], bool], seconds: float = 60) -> Case:
    """A smaller case of which the outcome is the same in kind."""
    until = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for smaller in _smaller(case):
            if time.monotonic() > until:
                break
            if is_same(check(smaller)):
                case, changed = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    if case.attention != "auto":
        yield replace(case, attention="auto")
    for i in range(len(case.lengths) if len(case.lengths) > 1 else 0):
        yield replace(case, lengths=(*case.lengths[:i], *case.lengths[i + 1 :]))
    for program in case.program.smaller():
        yield replace(case, program=program)
    if case.num_ranks > 2 and not case.plan:
        yield replace(case, num_ranks=2)
