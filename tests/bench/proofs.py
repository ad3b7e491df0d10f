"""The table of docs/proofs.md: which shipped rules are proved, and why the others are not.

Resumed where it was stopped: `--out` has a line for each rule that is done.
"""

from __future__ import annotations

import argparse
import copy
import json
from datetime import date
from pathlib import Path

import torch

from fxrewrite import Pattern, Rule
from fxrewrite.prove import Proof, prove
from fxrewrite.registry import registered
from rules.attention.groups import repeat_heads
from tests.rules.test_verified import BESIDE, BESIDE_ATTENTION, ELSEWHERE

_BEGIN, _END = "<!-- proofs -->", "<!-- end of proofs -->"
_LONGEST = 160
"""Longest reason in the table (characters)."""


def shipped() -> list[Rule]:
    """All registered rules, each once."""
    return list({rule.id: rule for rules in registered().values() for rule in rules.rules()}.values())


def anywhere(rule: Rule) -> Rule:
    """The rule without conditions that say where it pays, as tests/rules/test_verified.py verifies it.

    They read what is beside the pattern, which no graph of the pattern alone has.
    """
    where = rule.pattern.where
    if rule.id == repeat_heads.id:
        where = ()
    elif ELSEWHERE.get(rule.id) == BESIDE:
        where = tuple(one for one in where if str(one).partition("(")[0] not in BESIDE_ATTENTION)
    pattern = Pattern(rule.pattern.outputs, where)
    made = copy.copy(rule)
    made.pattern, made.forms = pattern, (pattern,)
    return made if len(where) < len(rule.pattern.where) else rule


def replaced(path: Path, begin: str, end: str, text: str) -> None:
    """Replaces what is between two marks of a document."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def done(path: Path) -> dict[str, dict[str, str]]:
    """The rows that were written so far, by their first column."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["id"]: row for row in map(json.loads, lines)}


def _row(rule: Rule, proof: Proof) -> dict[str, str]:
    reason = proof.summary.removeprefix("not proved: ").replace("|", "\\|").replace("*", "\\*").replace("\n", " ")
    shown = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]} ..."
    told = shown if not proof.is_proved else reason.partition(", ")[2].removeprefix(f"{proof.strength}, ")
    return {"id": rule.id, "proved": proof.strength, "why": told}


def _table(rows: list[dict[str, str]]) -> str:
    proved = [row for row in rows if row["proved"]]
    bitwise = sum(row["proved"] == "bitwise" for row in rows)
    versions = f"torch {torch.__version__.partition('+')[0]}, {date.today().isoformat()}"
    lines = [
        f"{len(proved)} of {len(rows)} rules are proved, {bitwise} of them bitwise ({versions}).",
        "",
        "| rule | proved | under which conditions and assumptions, or why not |",
        "|---|---|---|",
    ]
    ordered = sorted(rows, key=lambda row: (not row["proved"], row["id"]))
    return "\n".join([*lines, *(f"| `{row['id']}` | {row['proved'] or 'no'} | {row['why']} |" for row in ordered)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("proofs.jsonl"))
    parser.add_argument("--table", type=Path, required=True)
    arguments = parser.parse_args()
    known = done(arguments.out)
    rules = shipped()
    with arguments.out.open("a", encoding="utf-8") as out:
        for rule in rules:
            if rule.id not in known:
                known[rule.id] = _row(rule, prove(anywhere(rule)))
                print(json.dumps(known[rule.id]), file=out, flush=True)
    replaced(arguments.table, _BEGIN, _END, _table([known[rule.id] for rule in rules if rule.id in known]))


if __name__ == "__main__":
    main()
