"""A rule: a pattern, its constraints, and the replacement, as one value with an id."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from torch import fx
from torch.fx.proxy import TraceError

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError, Reason, Refusal, RefusedError, RuleDefinitionError, misread_context
from fxrewrite.graph.bodies import nodes_of, require_graph
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.source import source_line, with_source
from fxrewrite.identity import NoIdentityError
from fxrewrite.match.explain import Explanation, explain
from fxrewrite.match.match import Match
from fxrewrite.match.program import Program
from fxrewrite.match.replace import Replacer
from fxrewrite.match.returned import returned_nodes, with_parts
from fxrewrite.match.safety import (
    Effects,
    check_aliases,
    check_draws,
    check_later_writes,
    check_modes,
    check_order,
    check_region,
    check_saved,
    check_writes,
    insertion_point,
    may_act,
)
from fxrewrite.match.same_value import check_dtypes, check_gradients, check_values, needs_detach
from fxrewrite.pattern.pattern import ROOT, Pattern, trace
from fxrewrite.pattern.terms import Op, subterms
from fxrewrite.pattern.where import Constraint

if TYPE_CHECKING:
    import torch

    from fxrewrite.verify import Runner, Sampler, Verdict

_log = logging.getLogger(__name__)
Numerics = Literal["exact", "reassociates", "approximate"]
Rng = Literal["preserves", "removes", "duplicates", "changes"]
Shapes = Literal["preserves", "changes"]
Domain = Literal["all", "finite", "moderate"]
Replacement = Callable[..., Any]


class Rule:
    """Pattern -> replacement, with what it promises.

    Made by `@rule(...)` on the pattern function; `@the_rule.replacement` adds the other half.

    Attributes:
        id: `family.verb_object`, unique in a set.
        pattern: what it looks for.
        numerics: "exact", "reassociates" (equal in real arithmetic) or "approximate".
        rng: what it does to random draws: "preserves", "removes", "duplicates", "changes".
        shapes: "preserves", checked on fake values for every rewrite, or "changes".
        domain: the values for which it holds: "all"; "finite" ones (NaN and infinities may come out otherwise); or
            finite ones of "moderate" size (where large ones overflow or cancel on one side, as exp(x) does above 88).
        terminates: whether it stops firing on its own results. A rule whose result holds its own pattern, such as one
            that splits a product, says False: it runs `.once()`, never to a fixpoint.
        gradients: whether it keeps gradients. A rule that does not, since its operator has no derivative, is refused
            where a value of the graph says that it requires gradients.
        imports: modules that define the operators it names; a counterexample imports them.
        optional: whether an atomic set goes on when this rule refuses; the refusal is in the report.
        after, before: ids of rules in the same set that run earlier, or later.
        forms: what it matches: the pattern, or what `Plan.decomposed` made of it.
        doc: first line of the docstring of the replacement, or else of the pattern function.
        provider: where it is defined, "rules/attention/composite.py:12".
    """

    def __init__(
        self,
        id: str,  # noqa: A002
        pattern: Pattern,
        replacement: Replacement | None = None,
        *,
        numerics: Numerics = "exact",
        rng: Rng = "preserves",
        shapes: Shapes = "preserves",
        domain: Domain = "all",
        terminates: bool = True,
        gradients: bool = True,
        optional: bool = False,
        after: Iterable[str] = (),
        before: Iterable[str] = (),
        imports: Iterable[str] = (),
        doc: str = "",
        provider: str = "",
    ) -> None:
        if not isinstance(id, str) or not id or any(c.isspace() for c in id):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleDefinitionError(f"{id!r} is not the id of a rule; write it as family.verb_object")
        for value, kind in ((numerics, Numerics), (rng, Rng), (shapes, Shapes), (domain, Domain)):
            if value not in get_args(kind):
                raise RuleDefinitionError(f"rule {id}: {value!r} is not one of {', '.join(map(repr, get_args(kind)))}")
        self.id = id
        self.pattern = pattern
        self.forms: tuple[Pattern, ...] = (pattern,)
        self.numerics = numerics
        self.rng = rng
        self.shapes = shapes
        self.domain: Domain = domain
        self.terminates = terminates
        self.gradients = gradients
        self.optional = optional
        self.after = (after,) if isinstance(after, str) else tuple(after)
        self.before = (before,) if isinstance(before, str) else tuple(before)
        self.imports = (imports,) if isinstance(imports, str) else tuple(imports)
        self.doc = doc
        self.provider = provider
        self._replacement: Replacement | None = None
        self._names: tuple[str, ...] = ()
        self._sampler: Sampler | None = None
        self._wrapped: dict[str, Callable[..., Any]] | None = None
        if replacement is not None:
            self.replacement(replacement)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A rule is a value: sets and plans know their rules by identity, and copies of them hold the same rules."""
        return self

    def replacement(self, function: Replacement) -> Replacement:
        """Decorator: afterwards the rule rewrites its matches with this function, which is returned.

        Its parameters are captures by name, and `match` if it wants the `Match`. Node captures arrive as proxies on
        which torch functions create nodes. It returns what replaces the output, or a tuple for several outputs, and
        may `refuse`.

        Raises:
            RuleDefinitionError: a parameter is no capture, or the rule has a replacement already.
        """
        if self._replacement is not None:
            raise RuleDefinitionError(f"rule {self.id}: it has a replacement already, at {_place(self._replacement)}")
        captures = [capture.name for capture in self.pattern.captures]
        names = tuple(inspect.signature(function).parameters)
        unknown = [name for name in names if name not in captures and name not in ("match", ROOT)]
        if unknown:
            raise RuleDefinitionError(
                f"rule {self.id}: the replacement asks for {unknown}, the pattern captures {captures}"
            )
        self._replacement, self._names = function, names
        self.doc = _first_line(function) or self.doc
        self.provider = self.provider or _place(function)
        return function

    @property
    def body(self) -> Replacement:
        """The replacement function.

        Raises:
            RuleDefinitionError: the rule has none.
        """
        if self._replacement is None:
            name = self.id.rpartition(".")[2]
            raise RuleDefinitionError(f"rule {self.id} has no replacement; write one with @{name}.replacement")
        return self._replacement

    def decisive(self) -> tuple[Any, ...]:
        """What decides what the rule does; see `fxrewrite.identity`.

        Raises:
            NoIdentityError: an operator in the pattern is known by its address only.
        """
        terms = itertools.chain.from_iterable(map(subterms, self.pattern.outputs))
        unnamed = next((term.key for term in terms if isinstance(term, Op) and ops.is_by_address(term.key)), "")
        if unnamed:
            raise NoIdentityError(f"{unnamed} in the pattern of {self.id} has no identity but its address")
        promises = (self.numerics, self.rng, self.shapes, self.domain, self.terminates, self.gradients, self.optional)
        pattern = (str(self.pattern), self.pattern.where)
        return self.id, pattern, promises, self.after, self.before, self.body

    def explain(self, gm: fx.GraphModule) -> Explanation:
        """Why the rule does or does not match, node by node, nearest misses first."""
        require_graph("explain", gm)
        return self.explain_in(list(nodes_of(gm)))

    def explain_in(self, nodes: Sequence[fx.Node]) -> Explanation:
        """The same for the nodes of a graph; of several forms the one that comes nearest."""
        found = [explain(form, nodes) for form in self.forms] or [explain(self.pattern, nodes)]
        return max(found, key=lambda one: (one.num_matches, one.nearness))

    def decomposed(self, forms: Iterable[Pattern]) -> Rule:
        """The rule, which matches these forms of its pattern and nothing else."""
        new = copy.copy(self)
        new.forms = tuple(forms)
        return new

    def sampler(self, function: Sampler) -> Sampler:
        """Decorator: `verify` takes captures from this function, where they cannot be guessed; it is returned.

        It gets a `fxrewrite.verify.Draw`, and gives values by the names of captures.
        """
        self._sampler = function
        return function

    def verify(
        self,
        *,
        samples: int = 64,
        seed: int = 0,
        dtypes: Sequence[str | torch.dtype] | None = None,
        grad: bool = True,
        run: Runner | None = None,
        proof: bool = False,
        **options: Any,
    ) -> Verdict:
        """Test the rule on graphs in which its pattern matches, before and after; `str(verdict)` says what was found.

        Args:
            samples: how many graphs.
            seed: the same seed gives the same graphs in every process.
            dtypes: of inputs that are no integers or bools; by default float32, float64, bfloat16, those that a
                constraint names and, where the pattern takes it and no sampler is given, complex64.
            grad: whether gradients are compared; never those of a rule that says that it does not keep them.
            run: runs a graph, for example on simulated ranks; by default on one device.
            proof: whether to prove it too, with `fxrewrite.prove`; that takes seconds. A rule that is not proved may
                still be true.
            options: further ones of `fxrewrite.verify.verify_rewrite`.

        Raises:
            RuleDefinitionError: the rule is wrong as written, on any graph: there is nothing that could be true of it.
        """
        from fxrewrite.verify import numbers_of, verify_rewrite

        program: Program[Rule] = Program([(self, self.pattern)])  # once: of many readings it takes longer than a trial
        promised: dict[str, Any] = {"domain": self.domain, "terminates": self.terminates}
        verdict = verify_rewrite(
            self.id,
            self.pattern,
            lambda gm: self._apply(gm, program),
            numerics=self.numerics,
            rng=self.rng,
            shapes=self.shapes,
            samples=samples,
            seed=seed,
            dtypes=dtypes,
            grad=grad and self.gradients,
            sampler=self._sampler,
            run=run,
            constants=tuple(numbers_of(self.body)),
            imports=self.imports or (getattr(self.body, "__module__", ""),),
            **promised | options,
        )
        if proof and verdict.counterexample is None:
            from fxrewrite.prove import prove

            verdict = replace(verdict, proof=prove(self).summary)
        return verdict

    def _apply(self, gm: fx.GraphModule, program: Program[Rule]) -> int:
        """Rewrite a graph by this rule alone, users first; gives the number of rewrites. Raises what it refuses."""
        count = 0
        with Edit(gm) as edit:
            effects = Effects(edit)
            for node, key in program.roots(reversed(program.candidates(edit))):
                found = () if node in edit.erased else program.find(node, key)
                for _, match in itertools.islice(found, 1):
                    self.rewrite(edit, match, effects)
                    count += 1
        return count

    def rewrite(self, edit: Edit, match: Match, effects: Effects) -> None:
        """Replace one match; afterwards it is replaced completely, or, on any exception, nothing has changed.

        Raises:
            RefusedError: a safety check, or the replacement, refuses, or the replacement raised; rule, node and source
                line are filled in.
            FxRewriteError: the rule, or the context that it reads, is wrong whatever it matches.
        """
        try:
            with edit.savepoint():
                self._rewrite(edit, match, effects)
        except RefusedError as error:
            raise self._located(error, match) from error
        except RuleDefinitionError as error:
            raise RuleDefinitionError(f"{self.id}: {error}, at {with_source(match.root)}") from error
        except FxRewriteError:
            raise
        except Exception as error:
            misread = misread_context(error, match.context)
            if misread:
                raise FxRewriteError(
                    f"{self.id}: the replacement raised {type(error).__name__} at {with_source(match.root)}: "
                    f"{misread}; the graph is as before"
                ) from error
            refusal = _raised(match.root, error)
            raised = self._located(RefusedError(refusal), match)
            _log.warning("%s", raised)
            raise raised from error

    def _rewrite(self, edit: Edit, match: Match, effects: Effects) -> None:
        self._check_match(edit, match, effects)
        place = insertion_point(match)
        check_modes(match, place, effects)
        replacer = Replacer(edit, place, match.root, rule=self.id, effects=effects, gradients=self.gradients)
        results, passed = returned_nodes(self._replaced(edit, match, replacer), self.pattern, match)
        created = replacer.created
        lists = [(old, new) for old, new in zip(match.outputs, results, strict=True) if isinstance(new, list)]
        if lists:
            match, results = with_parts(match, results)
        # A value that the graph has already may carry gradients that the replaced one, made under no_grad, did not.
        results = [
            replacer.detached(new) if new not in created and needs_detach(edit, old, new, effects) else new
            for old, new in zip(match.outputs, results, strict=True)
        ]
        acting = [node for node in created if may_act(node)]
        draws = [node for node in acting if ops.is_random(node)]
        later = self._check_replacement(edit, match, results, passed, created, acting, draws, effects)
        if place is None:
            check_order(match, results, draws)
        for old, items in lists:
            edit.spread(old, items)
        _replace(edit, match, results, passed, created)
        for node, value in later.items():
            edit.owner(node).set_meta(node, ops.value_key(node), value)
        if acting:
            effects.add(acting, draws)

    def _check_match(self, edit: Edit, match: Match, effects: Effects) -> None:
        """Refuses a match that nothing may replace, whatever the replacement is."""
        if match.refused is not None:
            raise match.refused
        if not self.gradients:
            check_gradients(edit, match)
        if effects.writers:
            check_region(match, effects)
            check_modes(match, match.root, effects)

    def _check_replacement(
        self,
        edit: Edit,
        match: Match,
        results: list[fx.Node],
        passed: Sequence[tuple[fx.Node, fx.Node]],
        created: list[fx.Node],
        acting: list[fx.Node],
        draws: list[fx.Node],
        effects: Effects,
    ) -> dict[fx.Node, Any]:
        """Refuses a replacement that is not what it replaces: in shape and dtype, memory, writes or random draws.

        Returns the values of later nodes that have other strides with it.
        """
        later: dict[fx.Node, Any] = {}
        if self.shapes == "preserves":
            replaced = (*zip(match.outputs, results, strict=True), *passed)
            later = check_values(edit, replaced, effects, (created, match.nodes))
        check_dtypes(match, created)
        if acting:
            check_writes(match, created, acting)
        if effects.writers:
            check_aliases(match, results, created, effects)
            check_saved(edit, match, results, created, effects)
        for old, new in passed:
            check_later_writes(old, {old, new}, effects)
        check_draws(match, draws, self.rng, effects)
        return later

    def _replaced(self, edit: Edit, match: Match, replacer: Replacer) -> Any:
        """Runs the replacement, and returns what it returned, with nodes for proxies."""
        match.edit, match.replacer = edit, replacer
        given = {name: match if name == "match" else replacer.wrap(match.captures[name]) for name in self._names}
        if self._wrapped is None:
            self._wrapped = ops.wrapped_in(self.body)
        body = self.body
        if self._wrapped:
            body = ops.with_globals(body, {name: replacer.leaf(f) for name, f in self._wrapped.items()})
        try:
            return replacer.unwrap(body(**given))
        finally:
            match.replacer = None
            replacer.close()

    def _located(self, error: RefusedError, match: Match) -> RefusedError:
        node = error.located_at if isinstance(error.located_at, fx.Node) else None
        if node is None and not error.node:
            node = match.root
        source = source_line(node) if node is not None else ""
        return error.filled(rule=self.id, node=node.name if node is not None else "", source=source)

    def __str__(self) -> str:
        return f"{self.id}   {self.pattern}" + (f" -> ({self.doc})" if self.doc else "")

    def __repr__(self) -> str:
        return f"<Rule {self}>"


def rule(
    id: str,  # noqa: A002
    *,
    numerics: Numerics = "exact",
    where: Sequence[Constraint | str] = (),
    rng: Rng = "preserves",
    shapes: Shapes = "preserves",
    domain: Domain = "all",
    terminates: bool = True,
    gradients: bool = True,
    optional: bool = False,
    after: Iterable[str] = (),
    before: Iterable[str] = (),
    imports: Iterable[str] = (),
) -> Callable[[Callable[..., Any]], Rule]:
    """Decorator: the pattern function becomes a `Rule`; its `.replacement` takes the other half.

    Parameters of the pattern capture nodes; annotated `Literal` a Python value, `Maybe` a node or None, `Param` a
    parameter, `Any` anything. Constraints in `where` may be texts: `where=["rank(x) == 4"]`.

    Raises:
        RuleDefinitionError: the pattern cannot be traced; see `fxrewrite.pattern.trace`.
    """

    if not isinstance(id, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # `@rule` without an id
        raise RuleDefinitionError('a rule needs an id: write @rule("family.verb_object")')

    def wrap(function: Callable[..., Any]) -> Rule:
        try:
            pattern = trace(function, where)
        except RuleDefinitionError as error:
            raise RuleDefinitionError(f"rule {id}: {error}") from error
        doc, provider = _first_line(function), _place(function)
        return Rule(
            id,
            pattern,
            numerics=numerics,
            rng=rng,
            shapes=shapes,
            domain=domain,
            terminates=terminates,
            gradients=gradients,
            optional=optional,
            after=after,
            before=before,
            imports=imports,
            doc=doc,
            provider=provider,
        )

    return wrap


def _replace(
    edit: Edit,
    match: Match,
    results: Sequence[fx.Node],
    passed: Sequence[tuple[fx.Node, fx.Node]],
    created: Sequence[fx.Node],
) -> None:
    """Lets the graph read the results, and erases what nobody reads any more."""
    new_nodes = set(created)
    for old, new in zip(match.outputs, results, strict=True):
        others = None if new_nodes.isdisjoint(old.users) else [user for user in old.users if user not in new_nodes]
        edit.replace_uses(old, new, others)
    for old, new in passed:
        last = max(new, match.root)
        after = [user for user in old.users if user not in new_nodes and user not in match.nodes and last < user]
        edit.replace_uses(old, new, after)
    for node in reversed(created):  # calls whose result the replacement did not use
        if not node.users and node not in results and ops.is_pure(node):
            edit.erase(node)
    edit.erase_unused(match.unread)
    replaced = [node for node in match.nodes if node not in match.kept] if match.kept else match.nodes
    edit.erase_unused(replaced if len(replaced) < 3 else sorted(replaced, reverse=True))


def _raised(root: fx.Node, error: Exception) -> Refusal:
    """Says that a replacement raised; inside of a vmap, which has no values to compute with, no replacement can run."""
    vmap = ops.vmap_around(root)
    if vmap is not None:
        reason = f"it is inside of a torch.vmap, from %{vmap.name} on, whose values exist only while that runs"
        hint = "fxrewrite.normalize and the slots of inductor make a vmap operators on whole tensors, which match"
    else:
        reason = f"the replacement raised {type(error).__name__}: {error}"
        hint = "let the pattern or a constraint exclude the match, or refuse() it"
        if isinstance(error, TraceError):
            hint = "it cannot branch on entries of values, which exist only when the graph runs, but on their shapes"
    return Refusal(rule="", reason=reason, hint=hint, kind=Reason.RAISED)


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
