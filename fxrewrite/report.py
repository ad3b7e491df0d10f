"""What a plan did and did not do: counts per rule, refusals with their reasons, and events.

An event is data: its class says what happened, its fields say where and how much, and `str(event)` is the sentence that
a reader sees. Programs read classes and fields, never the sentence.

    class Scaled(Event, frozen=True):
        kind: Literal["scaled"] = "scaled"
        node: str

        def __str__(self) -> str:
            return f"scaled: %{self.node}"

    report.events.append(Scaled(node="add"))
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializeAsAny,
    field_serializer,
    model_serializer,
)

from fxrewrite.errors import FxRewriteError, Refusal, RuleDefinitionError, did_you_mean


def bytes_text(num_bytes: int) -> str:
    """Returns bytes for a reader: below 1 MiB each of them, else in the largest unit of which there is one or more."""
    unit = next((power for power in (4, 3, 2) if num_bytes >= 1024**power), 0)
    return f"{num_bytes / 1024**unit:,.4g} {'KMGT'[unit - 1]}iB" if unit else f"{num_bytes:,} bytes"


class Event(BaseModel, frozen=True, extra="forbid"):
    """Something worth saying about what a plan did; a subclass for each kind, `str(event)` is its sentence.

    JSON has the fields, and the sentence as `text`.

    Raises:
        RuleDefinitionError: when a subclass is defined: another one has its `kind`.
    """

    kind: str = Field(description="what happened, in a word or two; no two classes share one")

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        kind = cls.model_fields["kind"].default
        other = _KINDS.get(kind)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RuleDefinitionError(
                f"{cls.__module__}.{cls.__qualname__} and {other.__module__}.{other.__qualname__} are both events of "
                f"kind {kind!r}; give one of them another kind"
            )
        if isinstance(kind, str):
            _KINDS[kind] = cls

    @abstractmethod
    def __str__(self) -> str:
        """The sentence, on one line."""
        raise NotImplementedError

    @model_serializer(mode="wrap")
    def _with_text(self, fields: Any) -> dict[str, Any]:
        return {**fields(self), "text": str(self)}


_KINDS: dict[str, type[Event]] = {}
"""The class of each kind of event, of all modules that are imported."""
E = TypeVar("E", bound=Event)


class Note(Event, frozen=True):
    """A sentence for the reader, without anything that a program could need."""

    kind: Literal["note"] = "note"
    text: str

    def __str__(self) -> str:
        return self.text


class ComputedOnce(Event, frozen=True):
    """A rule computed a tensor of others that the module holds; whoever changes these later does not change it."""

    kind: Literal["computed once"] = "computed once"
    rule: str
    attribute: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        sources = f" of {', '.join(self.sources)}" if self.sources else ""
        return f"computed once: self.{self.attribute}{sources} ({self.rule})"


def _event(found: Any) -> Any:
    """An event, also of the fields that JSON has of one."""
    if not isinstance(found, dict):
        return found
    fields: dict[str, Any] = dict(found)  # pyright: ignore[reportUnknownArgumentType]
    kind = _KINDS.get(fields.get("kind", ""))
    if kind is None:
        raise ValueError(f"no event of kind {fields.get('kind')!r} is known; import the module that defines it")
    if "text" not in kind.model_fields:
        fields.pop("text", None)
    return kind.model_validate(fields)


class EventLog(BaseModel):
    """A model with events, in the order in which they happened."""

    events: list[Annotated[SerializeAsAny[Event], BeforeValidator(_event)]] = Field(
        default_factory=list[Event], description="things worth saying: gathered operators, how attention runs ..."
    )

    @property
    def lines(self) -> tuple[str, ...]:
        """The sentences of the events, for readers; what a program wants to know is in `events`."""
        return tuple(map(str, self.events))

    def events_of(self, kind: type[E]) -> list[E]:
        """The events of one class, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class RuleReport(BaseModel):
    """Counts of one rule, or of one step, over a whole plan."""

    model_config = ConfigDict(extra="forbid")

    rule: str = Field(description="id of the rule, or name of the step")
    anchors: int = Field(default=0, description="nodes whose operator is the root of the pattern")
    matches: int = Field(default=0, description="places where the pattern and its constraints held")
    rewrites: int = Field(default=0, description="changes made")
    refusals: list[Refusal] = Field(default_factory=list[Refusal], description="matches that were left alone, and why")
    seconds: float = Field(default=0.0, description="wall time in this rule's checks and replacements, or in the step")
    _known: set[Refusal] = PrivateAttr(default_factory=set[Refusal])

    def model_post_init(self, context: Any, /) -> None:
        self._known.update(self.refusals)

    @field_serializer("refusals")
    def _refusals(self, refusals: list[Refusal]) -> list[dict[str, Any]]:
        """Numbers and words stay as they are, other objects in `data` are written as text."""
        plain = (str, int, float, bool, type(None))
        return [
            {item.name: getattr(refusal, item.name) for item in fields(refusal)}
            | {"data": {name: v if isinstance(v, plain) else str(v) for name, v in refusal.data.items()}}
            for refusal in refusals
        ]

    def refuse(self, refusal: Refusal) -> None:
        """Count a refusal; a fixpoint meets the same one in every round, and it is counted once."""
        if refusal not in self._known:
            self._known.add(refusal)
            self.refusals.append(refusal)


class Report(EventLog):
    """The result of `plan.apply`: `str(report)` is a table, `model_dump_json()` the same for programs."""

    model_config = ConfigDict(extra="forbid")

    rules: list[RuleReport] = Field(default_factory=list[RuleReport], description="one entry per rule and step")
    seconds: float = Field(default=0.0, description="wall time of the whole plan, with matching and recompilation")
    _index: dict[str, RuleReport] = PrivateAttr(default_factory=dict[str, RuleReport])

    def model_post_init(self, context: Any, /) -> None:
        self._index = {entry.rule: entry for entry in self.rules}

    def rule(self, rule_id: str) -> RuleReport:
        """The entry of one rule or step, made when it is asked for the first time."""
        entry = self._index.get(rule_id)
        if entry is None:
            entry = self._index[rule_id] = RuleReport(rule=rule_id)
            self.rules.append(entry)
        return entry

    def __getitem__(self, rule_id: str) -> RuleReport:
        """The entry of one rule or step.

        Raises:
            FxRewriteError: the plan has no rule or step of that name.
        """
        if rule_id not in self._index:
            near = did_you_mean(rule_id, self._index) or f"; there are {', '.join(self._index) or 'none'}"
            raise FxRewriteError(f"the report has no rule or step {rule_id!r}{near}")
        return self._index[rule_id]

    @property
    def rewrites(self) -> int:
        """Number of changes by all rules and steps."""
        return sum(entry.rewrites for entry in self.rules)

    @property
    def refusals(self) -> list[Refusal]:
        """All refusals, in the order of the rules."""
        return [refusal for entry in self.rules for refusal in entry.refusals]

    def text(self, *, times: bool = True) -> str:
        """A table of rules, then refusals and events; without times it is the same in every run, for snapshots."""
        width = max([4, *(len(entry.rule) for entry in self.rules)])
        fired = sum(entry.rewrites > 0 for entry in self.rules)
        total = f"{self.rewrites} rewrite{'s' * (self.rewrites != 1)} by {fired} of {len(self.rules)} rules"
        rows = [total + (f" in {self.seconds:.3f} s" if times else "")]
        head = f"{'rule':{width}}  {'anchors':>7}  {'matches':>7}  {'rewrites':>8}  {'refused':>7}"
        rows.append(head + (f"  {'ms':>8}" if times else ""))
        for e in self.rules:
            counts = f"{e.rule:{width}}  {e.anchors:7}  {e.matches:7}  {e.rewrites:8}  {len(e.refusals):7}"
            rows.append(counts + (f"  {e.seconds * 1e3:8.2f}" if times else ""))
        rows += [f"refused  {refusal}" for refusal in self.refusals]
        rows += self.lines
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.text()
