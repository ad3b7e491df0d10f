"""A rule: a pattern, its constraints, and the replacement, as one value with an id."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError, Reason, Refusal, RefusedError, RuleDefinitionError, refuse
from fxrewrite.graph.bodies import nodes_of
from fxrewrite.graph.edit import Edit, not_by_number
from fxrewrite.graph.sizes import is_same_size
from fxrewrite.graph.source import source_line
from fxrewrite.match.explain import Explanation, explain
from fxrewrite.match.match import Match
from fxrewrite.match.once import compute_once
from fxrewrite.match.program import Program
from fxrewrite.match.replace import Replacer
from fxrewrite.match.safety import (
    Effects,
    check_aliases,
    check_draws,
    check_later_writes,
    check_order,
    check_region,
    check_writes,
    insertion_point,
)
from fxrewrite.match.strides import is_laid_out_alike, stride_reader
from fxrewrite.pattern.pattern import ROOT, Pattern, trace
from fxrewrite.pattern.terms import Term, has_parts
from fxrewrite.pattern.where import Constraint

if TYPE_CHECKING:
    from fxrewrite.verify import Runner, Sampler, Verdict

__all__ = ["Rule", "misread_context", "rule"]

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
            raise RuleDefinitionError(f"{id!r} is no id of a rule; write it as family.verb_object")
        for value, kind in ((numerics, Numerics), (rng, Rng), (shapes, Shapes), (domain, Domain)):
            if value not in get_args(kind):
                raise RuleDefinitionError(f"rule {id}: {value!r} is none of {', '.join(map(repr, get_args(kind)))}")
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
            raise RuleDefinitionError(f"rule {self.id} has no replacement; write one with @{self.id}.replacement")
        return self._replacement

    def explain(self, gm: fx.GraphModule) -> Explanation:
        """Why the rule does or does not match, node by node, nearest misses first."""
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
        dtypes: Sequence[str] = ("float32", "float64", "bfloat16"),
        grad: bool = True,
        run: Runner | None = None,
        proof: bool = False,
        **options: Any,
    ) -> Verdict:
        """Test the rule on graphs in which its pattern matches, before and after; `str(verdict)` says what was found.

        Args:
            samples: how many graphs.
            seed: the same seed gives the same graphs in every process.
            dtypes: of floating-point inputs.
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
            raise RuleDefinitionError(f"{self.id}: {error}, at {_node_text(match.root)}") from error
        except FxRewriteError:
            raise
        except Exception as error:
            misread = misread_context(error, match.context)
            if misread:
                raise FxRewriteError(
                    f"{self.id}: the replacement raised {type(error).__name__} at {_node_text(match.root)}: {misread}; "
                    "the graph is as before"
                ) from error
            refusal = Refusal(
                rule="",
                reason=f"the replacement raised {type(error).__name__}: {error}",
                hint="let the pattern or a constraint exclude the match, or refuse() it",
                kind=Reason.RAISED,
            )
            raised = self._located(RefusedError(refusal), match)
            _log.warning("%s", raised)
            raise raised from error

    def _rewrite(self, edit: Edit, match: Match, effects: Effects) -> None:
        if match.refused is not None:
            raise match.refused
        if not self.gradients:
            _check_gradients(match)
        if effects.writers:
            check_region(match, effects)
        place = insertion_point(match)
        replacer = Replacer(edit, place, match.root, self.id)
        match.edit, match.proxy = edit, replacer.proxy
        match.call = lambda target, *args, **kwargs: replacer.call(target, args, kwargs)

        def once(function: Callable[..., Any], *args: Any, name: str | Sequence[str] = "", **kwargs: Any) -> Any:
            args, kwargs = replacer.unwrap_given(args), {key: replacer.unwrap_given(kwargs[key]) for key in kwargs}
            promised: dict[str, Any] = {"rule": self.id, "gradients": self.gradients}
            return replacer.wrap(compute_once(match, effects, function, args, kwargs, name=name, **promised))

        match.once, match.read = once, lambda path: replacer.proxy(edit.read(path))
        given = {name: match if name == "match" else replacer.wrap(match.captures[name]) for name in self._names}
        if self._wrapped is None:
            self._wrapped = ops.wrapped_in(self.body)
        body = ops.with_globals(self.body, {name: replacer.leaf(f) for name, f in self._wrapped.items()})
        results, through = self._results(body(**given), match, replacer)
        created = replacer.created
        spread = [(old, new) for old, new in zip(match.outputs, results, strict=True) if isinstance(new, list)]
        if spread:
            match, results = _with_parts(match, results)
        if self.shapes == "preserves":
            for old, new in (*zip(match.outputs, results, strict=True), *through):
                was, is_now = ops.value(old), ops.value(new)
                if was is not ops.MISSING and is_now is not ops.MISSING:
                    _check_value(old, was, is_now)
                    _check_strides(edit, old, was, is_now)
        _check_dtypes(match, created)
        check_writes(match, created)
        check_aliases(match, results, created, effects)
        for old, new in through:
            check_later_writes(old, {old, new}, effects)
        draws = [node for node in created if ops.may_draw(node.target) and ops.is_random(node)]
        check_draws(match, draws, self.rng, effects)
        if place is None:
            check_order(match, results, draws)
        made = set(created)
        for old, items in spread:
            edit.spread(old, items)
        for old, new in zip(match.outputs, results, strict=True):
            users = [user for user in old.users if user not in made] if made & old.users.keys() else None
            edit.replace_uses(old, new, users)
        for old, new in through:
            last = max(new, match.root)
            after = [user for user in old.users if user not in made and user not in match.nodes and last < user]
            edit.replace_uses(old, new, after)
        for node in reversed(created):  # calls whose result the replacement did not use
            if not node.users and node not in results and ops.is_pure(node):
                edit.erase(node)
        nodes = match.nodes if len(match.nodes) < 3 else sorted(match.nodes, reverse=True)
        for node in nodes:
            if not node.users and node not in match.kept:
                edit.erase(node)
        effects.add(created, draws)
        replacer.close()

    def _results(
        self, returned: Any, match: Match, replacer: Replacer
    ) -> tuple[list[Any], list[tuple[fx.Node, fx.Node]]]:
        """The nodes that a replacement returned, one for each output; for a list that it gives, a list of nodes.

        With them, what captures that are outputs become where that is another node.
        """
        found = replacer.unwrap(returned)
        passed = self.pattern.through
        number = len(match.outputs) + len(match.missing)
        several = number + len(passed) > 1
        results = list(found) if several and isinstance(found, (list, tuple)) else [found]
        through: list[tuple[fx.Node, fx.Node]] = []
        if passed and len(results) != number + len(passed):
            results = []
        elif passed:
            pairs = [(match.captures[name], results[place]) for place, name in passed]
            through = [(old, new) for old, new in pairs if isinstance(old, fx.Node) and isinstance(new, fx.Node)]
            through = [(old, new) for old, new in through if old is not new]
            results = [result for place, result in enumerate(results) if place not in dict(passed)]
            if not all(old is new or (old, new) in through for old, new in pairs):
                results = []
        if len(results) == number:
            results = [result for place, result in enumerate(results) if place not in match.missing]
            kept = [output for place, output in enumerate(self.pattern.outputs) if place not in match.missing]
            # siblings are as many outputs as the graph has
            terms = kept if len(kept) == len(results) else [None] * len(results)
            for place, (old, term) in enumerate(zip(match.outputs, terms, strict=True)):
                items = results[place]
                if isinstance(items, (list, tuple)):  # a tuple is no result
                    results[place] = list(items) if _is_list(old, term) else tuple(items)
        if len(results) != len(match.outputs) or not all(map(_is_result, results)):
            several_in_one = isinstance(found, fx.Node) and isinstance(ops.value(found), (list, tuple))
            hint = "; the call gives them as one value: return result[0], result[1] ..." if several_in_one else ""
            raise RuleDefinitionError(
                f"the replacement returned {found!r}; expected "
                + (f"a tuple of {number + len(passed)} values of the graph" if several else "one value of the graph")
                + hint
            )
        return results, through

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


def _is_result(found: Any) -> bool:
    return isinstance(found, fx.Node) or (isinstance(found, list) and all(isinstance(item, fx.Node) for item in found))


def _is_list(old: fx.Node, term: Term | None) -> bool:
    """Whether the value that is replaced is a list or a tuple."""
    value = ops.value(old)
    return isinstance(value, (list, tuple)) if value is not ops.MISSING else term is not None and has_parts(term)


def _with_parts(match: Match, results: Sequence[Any]) -> tuple[Match, list[fx.Node]]:
    """The match whose outputs are the parts of lists that the graph takes, in place of the lists, and what they become.

    Raises:
        RefusedError: the lists have other lengths, or a reader does not say by a number which part it takes.
    """
    outputs: list[fx.Node] = []
    nodes = dict.fromkeys(match.nodes)
    found: list[fx.Node] = []
    for old, new in zip(match.outputs, results, strict=True):
        if not isinstance(new, list):
            outputs.append(old)
            found.append(new)
            continue
        value = ops.value(old)
        if value is not ops.MISSING:
            _check_value(old, value, [ops.value(item) for item in new])
        for user in old.users:
            why = not_by_number(user, old, len(new))
            if why:
                refuse(why, hint="the replacement gives a list", node=user, kind=Reason.VALUE)
            if user.target is operator.getitem:
                outputs.append(user)
                nodes[user] = None
                index: Any = user.args[1]
                found.append(new[index])
    return replace(match, outputs=tuple(outputs), nodes=tuple(nodes)), found


def _check_gradients(match: Match) -> None:
    """Refuse a match whose result requires gradients, where the graph says so."""
    for node in match.outputs:
        value = ops.value(node)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            hint = "compile under torch.no_grad(), or give the operator a derivative"
            refuse("gradients are needed here, and the rule keeps none (gradients=False)", hint=hint, node=node)


_INDICES = frozenset({"index", "indices", "target", "mask"})
"""Names of operands whose dtype is their own."""


def _check_dtypes(match: Match, created: Sequence[fx.Node]) -> None:
    """Refuse a call that computes a fake value, and whose kernel would raise: it takes operands of one dtype."""
    for node in created:
        if not isinstance(node.target, torch._ops.OpOverload) or not ops.has_trait(node, "one_dtype"):
            continue
        bound = ops.bind(node)
        found = {name: ops.value(given) for name, given in bound.items() if isinstance(given, fx.Node)}
        dtypes = {n: v.dtype for n, v in found.items() if isinstance(v, torch.Tensor) and n not in _INDICES}
        if len(set(dtypes.values())) > 1 and "out_dtype" not in bound:
            said = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items())
            refuse(
                f"the replacement calls {ops.key(node)}, which takes one dtype, found {said}",
                hint="cast the operands in the replacement, or add a constraint same_dtype(...)",
                node=match.root,
                kind=Reason.VALUE,
            )


def misread_context(error: Exception, context: object) -> str:
    """What is wrong if the error is that of reading an attribute that the plan's context does not have; else ""."""
    if not isinstance(error, AttributeError) or error.obj is not context:
        return ""
    if context is None:
        return f"{error}; no context was given, as in apply(gm, context=...)"
    return f"it reads context.{error.name}, which the {type(context).__name__} in apply(gm, context=...) does not have"


def _node_text(node: fx.Node) -> str:
    source = source_line(node)
    return f"%{node.name}" + (f" ({source})" if source else "")


def _check_value(old: fx.Node, was: Any, is_now: Any) -> None:
    """Refuse a replacement with another shape, dtype or device."""
    if isinstance(was, (list, tuple)) and isinstance(is_now, (list, tuple)):
        if len(was) != len(is_now):
            reason = f"the replacement gives {len(is_now)} values, the original {len(was)}"
            refuse(reason, hint="repair the replacement", node=old, kind=Reason.VALUE)
        for one, other in zip(was, is_now, strict=True):
            _check_value(old, one, other)
        return
    if was is is_now:
        return
    if not isinstance(was, torch.Tensor) or not isinstance(is_now, torch.Tensor):
        if isinstance(was, (torch.Tensor, list, tuple)) or isinstance(is_now, (torch.Tensor, list, tuple)):
            reason = f"the replacement gives {_kind(is_now)}, the original {_kind(was)}"
            one_of_many = isinstance(was, torch.Tensor) and isinstance(is_now, (list, tuple))
            hint = "return one of the values, result[0]" if one_of_many else "repair the replacement"
            refuse(reason, hint=hint, node=old, kind=Reason.VALUE)
        return
    same_shape = was.ndim == is_now.ndim and all(
        a is b or is_same_size(a, b) for a, b in zip(was.shape, is_now.shape, strict=True)
    )
    if same_shape and was.dtype == is_now.dtype and was.device == is_now.device:
        return
    refuse(
        f"the replacement gives {_describe(is_now)}, the original {_describe(was)}",
        hint='repair the replacement, or declare shapes="changes" on the rule',
        node=old,
        kind=Reason.VALUE,
    )


def _check_strides(edit: Edit, old: fx.Node, was: Any, is_now: Any) -> None:
    """Refuse a replacement that lies in memory otherwise, where an operator below asks how it lies."""
    if not isinstance(was, torch.Tensor) or not isinstance(is_now, torch.Tensor) or was is is_now:
        return
    if is_laid_out_alike(was, is_now):
        return
    reader = stride_reader(edit, old, is_now)
    if reader is not None:
        refuse(
            f"the replacement has strides {tuple(is_now.stride())}, the original {tuple(was.stride())}, and "
            f"%{reader.name} ({ops.key(reader)}) depends on them",
            hint="make the replacement contiguous, or turn views into reshapes first (rules.canonical.normal_forms)",
            node=old,
            kind=Reason.VALUE,
        )


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _describe(tensor: torch.Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}] on {tensor.device}"


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
