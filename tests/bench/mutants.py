"""The table of mutants in docs/proofs.md: shipped rules with one thing changed, judged by `verify` and by `prove`.

    constant    a number among the arguments of what the replacement made is another one
    dimension   an argument `dim` is the next dimension
    operand     two operands of a call change places
    cast        a result is rounded to bfloat16
    guard       one constraint of the pattern is dropped

A mutant that is found to differ must not be proved: this attacks the prover. One that is neither found nor proved is
either equal by meaning or missed by the samples. Resumed where it was stopped: `--out` has a line for each mutant.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import Pattern, Rule
from fxrewrite.errors import FxRewriteError, RefusedError
from fxrewrite.match.program import Program
from fxrewrite.ops import DIM_ARGUMENTS, bind
from fxrewrite.prove import prove_rewrite
from fxrewrite.verify import verify_rewrite
from tests.bench.proofs import done, replaced, shipped

_BEGIN, _END = "<!-- mutants -->", "<!-- end of mutants -->"
_SAMPLES = 12
_CHANGED = ("constant", "dimension", "operand", "cast")
_REFUSALS = 12
"""Graphs without anything to change after which there is no such mutant."""


class NoMutantError(Exception):
    """The replacement has nothing of the kind that is changed."""


@dataclass(frozen=True)
class Mutant:
    """A rule with one thing changed."""

    rule: Rule
    kind: str
    pattern: Pattern

    @property
    def id(self) -> str:
        return f"{self.rule.id}/{self.kind}"

    def rewrite(self) -> Callable[[fx.GraphModule], int]:
        """Returns what applies the mutant once."""
        changed = Rule(self.rule.id, self.pattern, self.rule.body, numerics="reassociates", shapes="changes")
        program: Program[Rule] = Program([(changed, self.pattern)])

        outcomes: Counter[bool] = Counter()

        def apply(gm: fx.GraphModule) -> int:
            before = set(gm.graph.nodes)
            count = changed._apply(gm, program)
            if count and self.kind in _CHANGED:
                made = [node for node in gm.graph.nodes if node not in before and node.op == "call_function"]
                is_changed = bool(made) and _change(gm, made, self.kind)
                outcomes[is_changed] += 1
                if outcomes[False] > _REFUSALS and not outcomes[True]:
                    raise NoMutantError("nothing to change")
                if not is_changed:
                    raise RefusedError("nothing to change")
                _propagate(gm)
            return count

        return apply


def mutants(rule: Rule) -> Iterator[Mutant]:
    """Yields the mutants of a rule."""
    yield from (Mutant(rule, kind, rule.pattern) for kind in _CHANGED)
    for number in range(len(rule.pattern.where)):
        kept = (*rule.pattern.where[:number], *rule.pattern.where[number + 1 :])
        yield Mutant(rule, f"guard {number}", Pattern(rule.pattern.outputs, kept))


def _change(gm: fx.GraphModule, made: list[fx.Node], kind: str) -> bool:
    """Changes the first thing of this kind; returns whether there was one."""
    if kind == "cast":
        node = made[-1]
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64):
            return False
        with gm.graph.inserting_after(node):
            narrow = gm.graph.call_function(torch.ops.aten.to.dtype, (node, torch.bfloat16))
        with gm.graph.inserting_after(narrow):
            wide = gm.graph.call_function(torch.ops.aten.to.dtype, (narrow, value.dtype))
        node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not narrow)
        return True
    for node in made:
        if kind == "operand":
            nodes = [n for n, arg in enumerate(node.args) if isinstance(arg, fx.Node)]
            if len(nodes) >= 2 and node.args[nodes[0]] is not node.args[nodes[1]]:
                args = list(node.args)
                args[nodes[0]], args[nodes[1]] = args[nodes[1]], args[nodes[0]]
                node.args = tuple(args)
                return True
            continue
        names = list(bind(node))
        for number, arg in enumerate(node.args):
            is_dim = number < len(names) and names[number] in DIM_ARGUMENTS
            if type(arg) not in (int, float) or is_dim != (kind == "dimension"):
                continue
            rank = getattr(node.all_input_nodes[0].meta.get("val"), "ndim", 0) if node.all_input_nodes else 0
            if is_dim and rank < 2:
                continue
            node.update_arg(number, (arg + 1) % rank if is_dim else arg + 1)
            return True
    return False


def _propagate(gm: fx.GraphModule) -> None:
    """Gives every call the value that it has now."""
    mode = next(n.meta["val"].fake_mode for n in gm.graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)
    gm.recompile()


def judged(mutant: Mutant) -> dict[str, Any]:
    """What is said of a mutant."""
    sampler = mutant.rule._sampler
    try:
        verdict = verify_rewrite(
            mutant.id,
            mutant.pattern,
            mutant.rewrite(),
            numerics="reassociates",
            domain="moderate",
            shapes="changes",
            rng="changes",
            samples=_SAMPLES,
            sampler=sampler,
            grad=False,
            terminates=False,
        )
        proof = prove_rewrite(mutant.id, mutant.pattern, mutant.rewrite(), sampler)
    except (FxRewriteError, NoMutantError) as error:
        return {"id": mutant.id, "said": "no mutant", "why": str(error).partition("\n")[0][:120]}
    if verdict.counterexample is not None:
        said = "found, AND PROVED" if proof.is_proved else "found"
    elif not verdict.samples:
        said = "no mutant"
    else:
        said = "equal, proved" if proof.is_proved else "neither"
    return {"id": mutant.id, "said": said, "why": str(verdict).partition("\n")[0][:200]}


def _table(rows: list[dict[str, Any]]) -> str:
    said = Counter(row["said"] for row in rows)
    kinds = sorted({row["id"].rpartition("/")[2].partition(" ")[0] for row in rows})
    columns = ("found", "equal, proved", "neither", "found, AND PROVED")
    lines = [
        f"{sum(said[c] for c in columns)} mutants of {len({row['id'].rpartition('/')[0] for row in rows})} rules "
        f"(torch {torch.__version__.partition('+')[0]}, {date.today().isoformat()}).",
        "",
        "| changed | found by samples | not found, and proved | neither | found and proved (a fault of the prover) |",
        "|---|---|---|---|---|",
    ]
    for kind in kinds:
        own = Counter(row["said"] for row in rows if row["id"].rpartition("/")[2].partition(" ")[0] == kind)
        lines.append(f"| {kind} | {' | '.join(str(own[column]) for column in columns)} |")
    equal = [f"`{row['id']}`" for row in rows if row["said"] == "equal, proved"]
    lines += ["", f"Proved: {', '.join(equal) or 'none'}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--rules", nargs="*", default=[], help="ids of rules, or parts of them; by default all")
    arguments = parser.parse_args()
    known = done(arguments.out)
    wanted = [r for r in shipped() if not arguments.rules or any(part in r.id for part in arguments.rules)]
    with arguments.out.open("a", encoding="utf-8") as out:
        for mutant in (mutant for rule in wanted for mutant in mutants(rule)):
            if mutant.id not in known:
                known[mutant.id] = judged(mutant)
                print(json.dumps(known[mutant.id]), file=out, flush=True)
    replaced(arguments.table, _BEGIN, _END, _table(list(known.values())))


if __name__ == "__main__":
    main()
