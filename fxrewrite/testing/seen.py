"""Which graphs of a model a pattern is found in: those of torch functions, of ATen, and after decompositions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxrewrite.backends import capture, exported_graph
from fxrewrite.capture import normalize
from fxrewrite.errors import first_line
from fxrewrite.match.explain import Explanation
from fxrewrite.plan import Plan, RuleSet
from fxrewrite.rule import Rule

GRAPHS: Mapping[str, str] = {
    "symbolic_trace": "fx.symbolic_trace",
    "dynamo": "plan.backend(...), pre_grad",
    "aten": 'plan.backend(..., graph="aten"), normalize',
    "export": "plan.apply_export",
    "decomposed": "plan.decomposed(table), slots after pre_grad",
}
"""Kinds of graphs, and where a plan gets them."""


@dataclass(frozen=True)
class Seen:
    """What rules match in each graph of a model.

    Attributes:
        graphs: by kind.
        explanations: by kind, of each rule by its id.
        without: kinds that the model has no graph of, and why.
    """

    graphs: Mapping[str, fx.GraphModule]
    explanations: Mapping[str, Mapping[str, Explanation]]
    without: Mapping[str, str]

    def matches(self, kind: str) -> dict[str, int]:
        """How many matches each rule has in the graph of this kind."""
        return {rule: found.num_matches for rule, found in self.explanations[kind].items()}

    def __str__(self) -> str:
        lines: list[str] = []
        for kind, place in GRAPHS.items():
            lines.append(f"{kind} ({place})")
            lines += [f"    no graph: {self.without[kind]}"] if kind in self.without else []
            for rule, found in self.explanations.get(kind, {}).items():
                nearest = str(found.misses[0]) if found.misses else f"no {' or '.join(found.root_keys)}{found.instead}"
                lines.append(f"    {rule}: {found.num_matches}{'' if found.num_matches else f'; {nearest}'}")
        return "\n".join(lines)


def seen(rules: Rule | RuleSet | Plan, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Seen:
    """Returns in which graphs of `model(**inputs)` each rule matches, and the nearest miss where it does not.

    The graphs are those before any rewrite. After decompositions rules match as `Plan.decomposed` makes them, by the
    table of `torch.export`; inductor has a table of its own.
    """
    found = RuleSet("seen", rules) if isinstance(rules, Rule) else rules
    plan = found.once() if isinstance(found, RuleSet) else found
    graphs: dict[str, fx.GraphModule] = {}
    without: dict[str, str] = {}
    ways: Mapping[str, Callable[[], fx.GraphModule]] = {
        "symbolic_trace": lambda: fx.symbolic_trace(model),  # pyright: ignore[reportArgumentType]
        "dynamo": lambda: capture(model, inputs),
        "aten": lambda: normalize(graphs["dynamo"]),
        "export": lambda: exported_graph(_exported(model, inputs)),
        "decomposed": lambda: exported_graph(_exported(model, inputs).run_decompositions()),
    }
    explanations: dict[str, dict[str, Explanation]] = {}
    for kind, make in ways.items():
        if kind == "aten" and "dynamo" in without:
            without[kind] = "there is no dynamo graph"
            continue
        try:
            with warnings.catch_warnings():  # of tracers, about themselves
                warnings.simplefilter("ignore")
                graphs[kind] = make()
        except Exception as error:  # noqa: BLE001  # of any tracer, about any model: it is what the row says
            without[kind] = f"{type(error).__name__}: {first_line(error)}"
            continue
        applied = plan
        if kind == "decomposed":
            values = [node.meta.get("val") for node in graphs[kind].graph.nodes]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            dtypes = {value.dtype for value in tensors if value.dtype.is_floating_point}
            ranks = {value.ndim for value in tensors if value.ndim}
            applied = plan.decomposed(torch.export.default_decompositions(), dtypes=dtypes, ranks=ranks)
        explanations[kind] = {rule.id: rule.explain(graphs[kind]) for rule in applied.rules()}
    return Seen(graphs, explanations, without)


def _exported(model: Callable[..., Any], inputs: Mapping[str, Any]) -> torch.export.ExportedProgram:
    class Function(torch.nn.Module):
        def forward(self, **given: Any) -> Any:
            return model(**given)

    return torch.export.export(model if isinstance(model, torch.nn.Module) else Function(), (), dict(inputs))
