"""Reading rule files: TOML, then fields, then patterns, constraints and replacements; every error has its place."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern import Constraint, parse, where
from fxrewrite.pattern.pattern import ROOT
from fxrewrite.plan import RuleSet
from fxrewrite.rule import Rule
from fxrewrite.rule_file.expression import parse_expression
from fxrewrite.rule_file.schema import RuleEntry, RuleFileError, check_fields

_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*(rule|'rule'|\"rule\")[ \t]*\]\]", re.MULTILINE)


def load_rules(path: str | Path) -> RuleSet:
    """The rule set that a TOML file defines; its name is that of the file, unless the file says another.

    Raises:
        RuleFileError: the file is no rule file; says what to mend, all of it at once.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RuleFileError(path.name, [f"it is not UTF-8, as TOML is: {error}"]) from error
    return parse_rules(text, path.name)


def parse_rules(text: str, name: str) -> RuleSet:
    """The rule set that the text of a rule file defines.

    Args:
        text: TOML; see docs/rule-files.md.
        name: of the file, for messages and for `Rule.provider`.

    Raises:
        RuleFileError: as `load_rules`.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RuleFileError(name, [str(error)]) from error
    places = _places(text, data)
    file = check_fields(data, name, places)
    problems: list[str] = []
    for module in file.imports:
        try:
            _import(module)
        except RuleDefinitionError as error:
            problems.append(str(error))
    if problems:  # what they define would be missing below
        raise RuleFileError(name, problems)
    rules: list[Rule] = []
    defined: dict[str, str] = {}
    for entry, place in zip(file.rule, places, strict=True):
        if entry.id in defined:
            problems.append(f"{place}: the id is defined before, at {defined[entry.id]}")
        defined.setdefault(entry.id, place)
        made = _rule(entry, name, file.imports)
        if isinstance(made, Rule):
            rules.append(made)
        else:
            problems += [f"{place}: {problem}" for problem in made]
    if problems:
        raise RuleFileError(name, problems)
    try:
        return RuleSet(file.name or name.removesuffix(".toml"), *rules, atomic=file.atomic)
    except RuleDefinitionError as error:  # the order has a cycle
        raise RuleFileError(name, [str(error)]) from error


def _import(module: str) -> None:
    """Import the module; a RuleDefinitionError says why that cannot be done."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            why = f"there is no module {error.name}; install its package, or mend the name"
        else:
            why = f"it needs the module {error.name}, which is not installed"
        raise RuleDefinitionError(f"imports {module!r}: {why}") from error
    except Exception as error:
        why = f"importing it raises {type(error).__name__}: {error}"
        raise RuleDefinitionError(f"imports {module!r}: {why}") from error


def _rule(entry: RuleEntry, file: str, imports: Sequence[str]) -> Rule | list[str]:
    """The rule of an entry, or what is wrong with it."""
    problems: list[str] = []
    constraints: list[Constraint] = []
    for text in entry.where:
        try:
            constraints.append(where.parse(text))
        except RuleDefinitionError as error:
            problems.append(_said("where", text, error))
    try:
        pattern = parse(entry.pattern)
    except RuleDefinitionError as error:
        return [_said("pattern", entry.pattern, error), *problems]
    names = [capture.name for capture in pattern.captures]
    for constraint in constraints:
        unknown = [name for name in constraint.names if name not in (*names, ROOT)]
        if unknown:
            found = f"{', '.join(unknown)} is not a capture of the pattern; it captures {', '.join(names) or 'nothing'}"
            problems.append(f"where {str(constraint)!r}: {found}")
    try:
        replacement = parse_expression(entry.replace, pattern)
    except RuleDefinitionError as error:
        return [*problems, _said("replace", entry.replace, error)]
    if problems:
        return problems
    options: dict[str, Any] = entry.model_dump(exclude={"pattern", "replace", "where", "doc"})
    try:
        constrained = replace(pattern, where=tuple(constraints))
    except RuleDefinitionError as error:
        return [f"where: {str(error).removeprefix('constraint ')}"]
    provider = f"{file}:{entry.id}"
    made = Rule(pattern=constrained, replacement=replacement, provider=provider, imports=imports, **options)
    made.doc = entry.doc or str(replacement)
    return made


def _said(field: str, text: str, error: RuleDefinitionError) -> str:
    """What is wrong with the text of a field; parsers begin with the text and the column, others do not know them."""
    message = str(error)
    for language in ("pattern ", "constraint "):
        if message.startswith(f"{language}{text!r}"):
            return f"{field} {message.removeprefix(language)}"
    return f"{field} {text!r}: {message}"


def _places(text: str, data: Mapping[str, Any]) -> Sequence[str]:
    """For each rule "line 3, rule activations.silu"; no line where counting headers does not find all rules."""
    rules = data.get("rule")
    entries: list[Any] = rules if isinstance(rules, list) else []
    lines = [text.count("\n", 0, header.start()) + 1 for header in _HEADER.finditer(text)]
    places: list[str] = []
    for index, entry in enumerate(entries):
        found = entry.get("id") if isinstance(entry, dict) else None
        rule = f"rule {found}" if isinstance(found, str) and found else f"rule number {index + 1}"
        places.append(f"line {lines[index]}, {rule}" if len(lines) == len(entries) else rule)
    return places
