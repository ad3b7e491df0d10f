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
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from autosp_rules import AutoSPConfig
from autosp_rules.transform import NoSequenceError, transform
from fxrewrite import FxRewriteError
from fxrewrite.backends import normalized
from fxrewrite.graph import size_hint
from fxrewrite.ops import key
from fxrewrite.spmd import Gathered, Shard, SpmdReport, axis_of, contexts
from fxrewrite.spmd.facts import PLACEMENT
from fxrewrite.spmd.placement import Partial
from fxrewrite.testing import RankRun, fake_mesh, run_on_ranks, simulate
from tests.programs.plans import is_for_a_length, own_rows, plan_of, random_plan, smaller_plans
from tests.programs.text import BATCH, Model, Program, batch, random_program

TOLERANCE = 1e-9
"""How far the loss or a gradient may be off, as a share of the largest gradient."""


@dataclass(frozen=True)
class Case:
    """A program with the ranks, the lengths and the way that it runs."""

    program: Program
    num_ranks: int
    lengths: tuple[int, ...]
    plan: str = ""
    attention: Any = "auto"
    rows: int = BATCH

    @staticmethod
    def of(seed: int) -> Case:
        rng = Random(seed + 10**9)
        num_ranks = rng.choice((2, 3, 4))
        short = (max(2, num_ranks - 1), num_ranks, num_ranks + 1, 2 * num_ranks - 1)
        lengths = [rng.choice(short)] if rng.random() < 0.2 else [rng.randint(5, 20)]
        program, plan, rows = random_program(seed), "", BATCH
        if rng.random() < 0.5:
            plan = random_plan(rng, Model(program.text), program.text)
            rows = own_rows(plan) * rng.choice((1, 2, 2, 3))
            if "chunks" in plan or "zigzag" in plan:
                lengths = [12 * rng.randint(1, 2)]
        if rng.random() < 0.2 and not is_for_a_length(plan):
            lengths = [rng.randint(8, 20), *rng.sample((1, *short, 12, 17, 24, 29), 2)]
        strategies = ("auto", "auto", "auto", "gather_kv", "ring", *["ulysses"] * (num_ranks == 2))
        attention = rng.choice(strategies)
        return Case(program, num_ranks, tuple(lengths), plan, attention, rows)

    def __str__(self) -> str:
        how = f"plan {self.plan}" if self.plan else f"{self.num_ranks} ranks, attention {self.attention}"
        return f"{how}, lengths {self.lengths}, {self.rows} rows:\n{self.program.text}"


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
        found = [_relative(got, want) for got, want in zip(outputs, self.outputs, strict=False)]
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
            run = _one_program if len(case.lengths) > 1 else _on_a_mesh if case.plan else _one_length
            run(case, found)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is no answer to a model
        chain: list[BaseException] = [error]
        while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) is not None:
            chain.append(inner)
        ours = next((cause for cause in chain if isinstance(cause, FxRewriteError)), None)
        if ours is not None:
            asked = ("attention='", "matches what is stated")  # for what cannot be
            is_asked = isinstance(ours, NoSequenceError) or any(said in str(ours) for said in asked)
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
    model, given = Model(case.program.text), batch(case.lengths[0], case.rows)
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
        program = _lowered(case, found, gm, mesh)
        torch.manual_seed(0)
        run = run_on_ranks(program, inputs, mesh, backward=0)
    error = max(expected.error(tree_leaves(outputs), inputs, run.gradients()) for outputs in run.outputs)
    _compare(case, found, given, error)


def _one_program(case: Case, found: Outcome) -> None:
    """What was compiled for one length runs at the others."""
    model = Model(case.program.text)
    axes = plan_of(case.plan)[1] if case.plan else {"sp": case.num_ranks}
    with fake_mesh(tuple(axes.values()), tuple(axes)) as mesh:
        ran: list[tuple[Sequence[Any], Any]] = []

        def backend(gm: fx.GraphModule, given_sizes: Sequence[Any]) -> Callable[..., Any]:
            try:
                program = _lowered(case, found, gm, mesh)
            except NoSequenceError:
                return gm
            found.reached["many lengths"] += any(isinstance(x, torch.SymInt) for x in given_sizes)

            def call(*args: Any) -> Any:
                torch.manual_seed(0)
                ran.append((args, run_on_ranks(program, args, mesh, backward=0)))
                return ran[-1][1].outputs[-1]

            return call

        run = torch.compile(model, backend=backend, fullgraph=True)
        for more, length in enumerate(case.lengths):
            given = batch(length, case.rows + more)
            expected = _Expected.of(model, given)
            if expected is None:
                continue
            ran.clear()
            for value in given.values():
                torch._dynamo.maybe_mark_dynamic(value, 0)
                torch._dynamo.maybe_mark_dynamic(value, 1)
            run(**given)
            if len(ran) == 1:  # and the program does not break
                args, made = ran[0]
                args = [size_hint(v) if isinstance(v, torch.SymInt) else v for v in args]
                errors = (
                    # over a mesh, other outputs leave in chunks, and gradients of whole inputs are complete
                    expected.error(tree_leaves(outputs)[: 1 if case.plan else None], args, grads)
                    for outputs, grads in zip(made.outputs, _gradients(case, made), strict=True)
                )
                _compare(case, found, given, max(errors))
                if found.kind == "wrong":
                    return


def _lowered(case: Case, found: Outcome, gm: fx.GraphModule, mesh: DeviceMesh) -> fx.GraphModule:
    if not case.plan:
        config = AutoSPConfig(outputs="gather", attention=case.attention, rng="global")
        program, report = transform(gm, config, axis_of(mesh, "sp"))
        _count(found, program, report.rewrites, report.events)
        return program
    program = normalized(gm)
    plan, sizes = plan_of(case.plan)
    report = SpmdReport.of(plan.plan().apply(program, context=contexts(mesh)), program, sizes)
    _count(found, program, {}, report.events)
    return program


def _gradients(case: Case, made: RankRun) -> list[list[Tensor | None]]:
    """By rank, each input's gradient: on a mesh its own, where it has one of the whole input."""
    joined = made.gradients()
    if not case.plan:
        return [joined] * len(made.grads)
    return [
        [
            one if one is not None and one.shape == of_all.shape else of_all
            for one, of_all in zip(grads, joined, strict=True)
        ]
        for grads in made.grads
    ]


def _on_a_mesh(case: Case, found: Outcome) -> None:
    plan, mesh = plan_of(case.plan)
    model, given = Model(case.program.text), batch(case.lengths[0], case.rows)
    num_parts = own_rows(case.plan)
    cut = [{name: value.chunk(num_parts)[i] for name, value in given.items()} for i in range(num_parts)]
    if any(_Expected.of(model, one) is None for one in (given, *cut)):
        return
    made = simulate(model, given, plan, mesh)
    rewrites = {entry.rule: entry.rewrites for entry in getattr(made.report, "rules", ())}
    _count(found, made.program, rewrites, made.report.events)
    found.reached.update(f"axis {member.split()[0]}" for member in case.plan.split(" | "))
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
    for plan in smaller_plans(case.plan) if case.plan else ():
        yield replace(case, plan=plan)
