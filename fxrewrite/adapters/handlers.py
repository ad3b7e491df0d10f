"""What handlers and checks of patterns see of a match, and a rule whose replacement is a handler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from fxrewrite import ops
from fxrewrite.adapters.expressions import TranslatedPattern
from fxrewrite.adapters.search import Trace, fake_values
from fxrewrite.adapters.traced import insert, placeholders
from fxrewrite.backends.traces import fwd_only, on_fake_values
from fxrewrite.errors import FxRewriteError, Reason, RuleDefinitionError, refuse
from fxrewrite.graph import Edit
from fxrewrite.match import Match as Found
from fxrewrite.match.safety import Effects
from fxrewrite.rule import Rule

Check = Callable[["Match"], Any]
Handler = Callable[..., Any]


class Match:
    """What checks and handlers see of a match.

    Attributes:
        nodes: the matched nodes, in graph order; the last one is the output, or the last of them.
        args, kwargs: what was captured, by position and by name.
        graph: the graph under edit: `erase_node` erases when the transaction ends, all else is the `fx.Graph`.
    """

    def __init__(self, found: Found, args: list[Any], kwargs: dict[str, Any], items: Iterable[fx.Node] = ()) -> None:
        self.found, self.args, self.kwargs = found, args, kwargs
        self.nodes = sorted({*found.nodes, *items})
        self.graph: Any = _Graph(found.edit)

    def output_nodes(self) -> list[fx.Node]:
        """The nodes that the match replaces."""
        return list(self.found.outputs)

    def output_node(self) -> fx.Node:
        """The first of the nodes that the match replaces."""
        return self.found.root

    def erase_nodes(self) -> None:
        """Erases the matched nodes that nothing reads any more."""
        for node in reversed(self.nodes):
            if not node.users and node not in self.found.edit.erased:
                self.found.edit.erase(node)

    def replace_by_example(
        self, replacement_fn: Callable[..., Any], args: Sequence[Any], trace_fn: Trace | None = None,
        run_functional_passes: bool = True,
    ) -> list[fx.Node]:  # fmt: skip
        """Replaces the match by the calls of a function of `args`, traced on their fake values; returns new nodes."""
        options = {} if trace_fn else {"run_functional_passes": run_functional_passes}
        gm = on_fake_values(trace_fn or fwd_only, replacement_fn, fake_values(args, self.found), **options)
        return self.replace_with_graph(gm.graph, tree_leaves(list(args)))

    def replace_with_graph(self, replacement_graph: fx.Graph | fx.GraphModule, args: Sequence[Any]) -> list[fx.Node]:
        """Replaces the match by the calls of a graph, whose inputs are `args`; returns new nodes."""
        graph = replacement_graph.graph if isinstance(replacement_graph, fx.GraphModule) else replacement_graph
        return self.graph.replace(self.found, lambda match: inserted(graph, args, match))

    def __repr__(self) -> str:
        return f"Match(..., {self.args}, {self.kwargs})"


class _Graph:
    """The graph of a match for handlers: what they erase is erased when the transaction ends."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self.replace: Callable[..., list[fx.Node]] = _cannot_replace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._edit.graph, name)

    def erase_node(self, node: fx.Node) -> None:
        """Erases a node that nothing reads."""
        if node not in self._edit.erased:
            self._edit.erase(node)

    def eliminate_dead_code(self, *_: Any) -> None:
        """Does nothing: the pass removes dead nodes."""


def _cannot_replace(*_: Any) -> list[fx.Node]:
    raise RuleDefinitionError("an extra_check cannot replace the match; do that in the handler")


class HandledRule(Rule):
    """A rule whose replacement is a handler, which changes the graph by itself."""

    def __init__(
        self,
        id: str,  # noqa: A002
        reading: TranslatedPattern,
        handler: Handler,
        extra_check: Check,
        promises: Mapping[str, Any],
    ) -> None:
        super().__init__(id, reading.pattern, _run_by_its_pass, doc=getattr(handler, "__name__", ""), **promises)
        self._reading, self._handler, self._check = reading, handler, extra_check

    def decisive(self) -> tuple[Any, ...]:
        return *super().decisive(), self._handler, self._check

    def _rewrite(self, edit: Edit, match: Found, effects: Effects) -> None:
        self._check_match(edit, match, effects)
        match.edit = edit
        arguments = self._reading.arguments(match)
        if isinstance(arguments, str):
            refuse(arguments, kind=Reason.CONSTRAINT)
        view = Match(match, *arguments)
        refuse_unless(self._check, view)
        checked = set[fx.Node]()

        def replace(match: Found, body: Callable[[Found], Any]) -> list[fx.Node]:
            def replacement(match: Found) -> Any:
                return body(match)

            mark = edit.num_changes
            said: dict[str, Any] = {"rng": self.rng, "shapes": self.shapes}
            Rule(self.id, self.pattern, replacement, **said)._rewrite(edit, match, effects)
            made = edit.new_since(mark)
            checked.update(made)
            return made

        view.graph.replace = replace
        mark = edit.num_changes
        near = {*match.nodes, *(n for node in match.nodes for n in (*node.all_input_nodes, *node.users))}
        with edit.raw(near), edit.graph.inserting_before(match.root):
            self._handler(view, *view.args, **view.kwargs)
        own = [node for node in edit.new_since(mark) if node not in checked]
        effects.add(own, [node for node in own if ops.may_draw(node.target) and ops.is_random(node)])


def _run_by_its_pass(match: Found) -> Any:
    raise RuleDefinitionError(f"the handler of {match.root.name} is run by its pass alone")


def refuse_unless(check: Check, match: Match) -> None:
    """Refuses a match that the check of its pattern does not take.

    Raises:
        RefusedError: the check is false.
        FxRewriteError: the check raised.
    """
    try:
        passes = check(match)
    except FxRewriteError:
        raise
    except Exception as error:
        raise FxRewriteError(
            f"extra_check {getattr(check, '__qualname__', check)} raised {type(error).__name__} "
            f"at %{match.found.root.name}: {error}"
        ) from error
    if not passes:
        refuse("extra_check is false", kind=Reason.CONSTRAINT)


def inserted(graph: fx.Graph, args: Sequence[Any], match: Found) -> Any:
    """Returns the results of the calls of a graph, which are afterwards in that of the match."""
    inputs = placeholders(graph)
    args = tree_leaves(list(args))
    if len(inputs) != len(args):
        nodes = [arg for arg in args if isinstance(arg, fx.Node)]
        if len(nodes) != len(inputs):
            raise RuleDefinitionError(f"the replacement has {len(inputs)} inputs, the match gives {len(args)} values")
        args = nodes
    results = insert(graph, dict(zip(inputs, args, strict=True)), match)
    return tuple(results) if len(results) > 1 else results[0]
