"""The fields of a rule file, and what is said when they are wrong."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from fxrewrite.errors import RuleDefinitionError
from fxrewrite.rule import Domain, Numerics, Rng, Shapes


class RuleFileError(RuleDefinitionError):
    """A rule file is wrong as written; `problems` has one line for each thing to mend.

    Attributes:
        file: name of the file.
        problems: what is wrong, each with the rule, and the line and the column where they are known.
    """

    def __init__(self, file: str, problems: Sequence[str]) -> None:
        self.file = file
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{file}: {problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return RuleFileError, (self.file, self.problems)


class RuleEntry(BaseModel):
    """One `[[rule]]` of a rule file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    id: str = Field(min_length=1, description="family.verb_object, unique in the file")
    pattern: str = Field(description="what to look for, in the text form: mul(x, sigmoid(x))")
    replace: str = Field(description="what stands there afterwards, an expression of the captures: silu(x)")
    where: list[str] = Field(default=[], description="constraints on the captures: dtype(x) in {float32, bfloat16}")
    numerics: Numerics = Field(
        default="exact", description="exact, reassociates (equal in real arithmetic) or approximate"
    )
    rng: Rng = Field(
        default="preserves", description="what it does to random draws: preserves, removes, duplicates or changes"
    )
    shapes: Shapes = Field(
        default="preserves", description="whether shape, dtype and device stay: preserves, which is checked, or changes"
    )
    domain: Domain = Field(
        default="all",
        description="the values for which it holds: all, finite, or moderate (finite, of a size around 1)",
    )
    terminates: bool = Field(default=True, description="whether it stops firing on its own results")
    gradients: bool = Field(default=True, description="whether it keeps gradients; one that does not is for inference")
    optional: bool = Field(default=False, description="whether an atomic set goes on when this rule refuses")
    after: list[str] = Field(default=[], description="ids of rules of the same set that run earlier")
    before: list[str] = Field(default=[], description="ids of rules of the same set that run later")
    doc: str = Field(default="", description="what it does, in a few words; without it, the text of the replacement")


class RuleFile(BaseModel):
    """A whole rule file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(default="", description="name of the rule set; without it, that of the file")
    atomic: bool = Field(default=False, description="all rewrites of the set, or none")
    imports: list[str] = Field(default=[], description="modules to import, which define operators that rules name")
    rule: list[RuleEntry] = Field(min_length=1, description="the rules, in order")


def check_fields(data: Mapping[str, Any], file: str, places: Sequence[str]) -> RuleFile:
    """The file's fields, typed; `places` says for each rule where it is.

    Raises:
        RuleFileError: a field is unknown, missing or of another type; names all of them.
    """
    try:
        return RuleFile.model_validate(data)
    except ValidationError as error:
        raise RuleFileError(file, [_problem(detail, places) for detail in error.errors()]) from None


def _problem(detail: ErrorDetails, places: Sequence[str]) -> str:
    path = list(detail["loc"])
    in_rule = path[:1] == ["rule"] and len(path) > 1
    place = f"{places[int(path[1])]}: " if in_rule else ""
    path = path[2:] if in_rule else path
    name = str(path[0]) if path else "[[rule]]"
    field = name + "".join(f"[{part}]" for part in path[1:])
    if detail["type"] == "extra_forbidden":
        known = list((RuleEntry if in_rule else RuleFile).model_fields)
        near = difflib.get_close_matches(name, known, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return f"{place}unknown field {name}; {advice}"
    if detail["type"] == "missing":
        described = (RuleEntry if in_rule else RuleFile).model_fields[name].description
        return f"{place}{field} is missing: {described}"
    if field == "rule" and isinstance(detail["input"], dict):
        return "one rule is a table in a list: write [[rule]], with two brackets, not [rule]"
    return f"{place}{field} = {detail['input']!r}: {detail['msg'].replace('Input should', 'it should')}"
