"""Writing rule files: the way back, for rules that are data."""

from __future__ import annotations

import json

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.pattern import parse, where
from fxrewrite.pattern.text import terms_text
from fxrewrite.plan import RuleSet
from fxrewrite.rule import Rule
from fxrewrite.rule_file.expression import Expression, parse_expression
from fxrewrite.rule_file.schema import RuleEntry, RuleFile


def dump_rules(rule_set: RuleSet) -> str:
    """The text of a rule file: `parse_rules` makes of it a set with the same name, rules, order and options.

    Raises:
        RuleDefinitionError: a member is a set or a step; an invariant, a replacement or a predicate is Python; a
            pattern holds a literal that has no text form. Names each of them.
    """
    problems = [] if rule_set.members else ["there is no rule in it"]
    if rule_set.invariant is not None:
        problems.append("its invariant is a Python function")
    entries: list[RuleEntry] = []
    for member in rule_set.members:
        if not isinstance(member, Rule):
            problems.append(f"{member.name} is a {type(member).__name__}, and a rule file has rules only")
            continue
        why_not = _why_not(member)
        if why_not:
            problems.append(f"{member.id}: {why_not}")
        else:
            entries.append(_entry(member))
    if problems:
        raise RuleDefinitionError(f"set {rule_set.name} cannot be written as a rule file: {'; '.join(problems)}")
    imports = list(dict.fromkeys(module for rule in rule_set.rules() for module in rule.imports))
    file = RuleFile(name=rule_set.name, atomic=rule_set.atomic, imports=imports, rule=entries)
    return "\n".join(_fields(file) + [line for entry in file.rule for line in ("", "[[rule]]", *_fields(entry))]) + "\n"


def _why_not(rule: Rule) -> str:
    """Why a rule has no text form; empty when it has one."""
    if not isinstance(rule.body, Expression):
        return "its replacement is a Python function"
    for constraint in rule.pattern.where:
        try:
            if where.parse(str(constraint)) == constraint:
                continue
        except RuleDefinitionError:
            pass
        return f"its constraint {constraint} is a Python function"
    text = terms_text(rule.pattern.outputs)
    try:
        if parse(text, rule.pattern.where) != rule.pattern:
            return f"its pattern {text} reads back as another"
        if parse_expression(str(rule.body), rule.pattern) != rule.body:
            return f"its replacement {rule.body} reads back as another"
    except RuleDefinitionError as error:
        return f"its text does not read back: {error}"
    return ""


def _entry(rule: Rule) -> RuleEntry:
    replace = str(rule.body)
    same = ("id", "numerics", "rng", "shapes", "domain", "terminates", "gradients", "optional")
    return RuleEntry.model_validate(
        {name: getattr(rule, name) for name in same}
        | {
            "pattern": terms_text(rule.pattern.outputs),
            "replace": replace,
            "where": [str(constraint) for constraint in rule.pattern.where],
            "after": list(rule.after),
            "before": list(rule.before),
            "doc": "" if rule.doc == replace else rule.doc,
        }
    )


def _fields(model: RuleEntry | RuleFile) -> list[str]:
    """`field = value` for every field that is not at its default; the rules themselves come after."""
    return [
        f"{name} = {_toml(value)}" for name, value in model.model_dump(exclude={"rule"}, exclude_defaults=True).items()
    ]


def _toml(value: str | bool | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace(
        "\x7f", "\\u007F"
    )  # TOML's strings are JSON's but for this one
