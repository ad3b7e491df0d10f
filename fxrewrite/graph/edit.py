"""How rules and steps change an FX graph: in a transaction that is committed, or restores the graph.

Undo replays a journal backwards, and costs what was changed, not the size of the graph. Nodes, their order, names,
arguments and metadata are as before, and so is the set of a node's `users`; keeping their order, which FX changes with
each argument, took 6 to 8 % of a plan. Nodes are erased at commit only, so a node that a rule holds stays valid during
the transaction.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import ops
from fxrewrite.errors import InvariantError, RuleDefinitionError
from fxrewrite.graph.attributes import add_attribute, drop_attribute
from fxrewrite.graph.bodies import bodies
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.facts import Fact, facts_of, forget_facts
from fxrewrite.graph.fake_values import FakeValues
from fxrewrite.graph.fx_nodes import insert_call, take_out
from fxrewrite.graph.journal import ABSENT, Journal
from fxrewrite.graph.source import copied_meta
from fxrewrite.graph.untracked import UntrackedChanges

T = TypeVar("T")
_COMPUTE: Any = object()


class Edit:
    """One transaction on the graph of `gm`.

    `with Edit(gm) as edit:` commits at the end of the block: it checks the touched nodes, erases nodes, and recompiles
    the module once. Any exception, also one from the checks, undoes everything and propagates.

    Graph modules that the graph calls, and subgraphs of higher-order operators, are graphs of their own; `edit.parts()`
    yields this transaction and theirs, which end with it.

    Attributes:
        path: where the module is in the module that the transaction began with; empty for that one.
        around: the transaction on the graph that calls this subgraph; None for the one that it began with.
        graph: the graph under edit.
        body: the first node that is not an input; new nodes that read nothing may be placed before it.
        erased: nodes that will be erased at commit; they no longer have arguments or users.
        values: computes what nodes give, as fake tensors, also if their inputs had other values.
        fake_mode: the graph's own fake tensor mode; None if its nodes have no fake values.
        computed: nodes that read what a rule computed once -> the rule, and the attributes of which; of all these, what
            no node reads any more leaves the module at commit.
    """

    def __init__(self, gm: fx.GraphModule, path: str = "", *, bodies: bool = True, around: Edit | None = None) -> None:
        self.gm = gm
        self.path = path
        self.around = around
        self.graph: fx.Graph = gm.graph
        forget_facts(self.graph)
        self._derived: dict[Fact[Any], Callable[[fx.Node], Any]] = {}
        self._shared: dict[Any, Any] = {}
        self._checks: list[Callable[[Edit], None]] = []
        self.erased: set[fx.Node] = set()
        self.values = FakeValues(gm)
        self.fake_mode = self.values.mode
        self._journal = Journal(gm, self.erased)
        body = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        if body is None:
            raise InvariantError("the graph has no output node; only complete graphs can be edited")
        self.body: fx.Node = body
        self._names: dict[int, tuple[str, Any]] = {}  # by the id of a target, which is kept alive
        self.computed: dict[fx.Node, tuple[str, tuple[str, ...]]] = {}
        self._bodies: list[Edit] | None = None if bodies else []
        self._untracked: UntrackedChanges | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        parts = [self, *self._opened()]
        with contextlib.ExitStack() as undo:
            for part in reversed(parts):
                undo.callback(part._undo, 0)
            if error is not None:
                return
            for part in parts:
                for check in part._checks:
                    check(part)
                part._check()
            undo.pop_all()
        for part in reversed(
            parts
        ):  # a graph is compiled with those within, which have none of what was erased by then
            part._commit()

    def parts(self) -> Iterator[Edit]:
        """Yields this transaction, and one per graph module within the graph, nested ones included; see `bodies`."""
        yield self
        if self._bodies is None:
            prefix = f"{self.path}." if self.path else ""
            self._bodies = [Edit(body, prefix + path, around=self) for path, body in bodies(self.gm)]
        for body in self._bodies:
            yield from body.parts()

    def owner(self, node: fx.Node) -> Edit:
        """Returns the transaction on the graph that a node is in: this one, or one around it or within."""
        if node.graph is self.graph:
            return self
        outermost = self
        while outermost.around is not None:
            outermost = outermost.around
        return next(part for part in outermost.parts() if part.graph is node.graph)

    def callers(self) -> list[fx.Node]:
        """Returns the nodes that call this subgraph, in the graph of `around`."""
        if self.around is None:
            return []
        name = self.path.removeprefix(f"{self.around.path}." if self.around.path else "")
        graph = self.around.graph
        readers = (user for read in graph.find_nodes(op="get_attr", target=name) for user in read.users)
        return [*graph.find_nodes(op="call_module", target=name), *readers]

    def _opened(self) -> Iterator[Edit]:
        for body in self._bodies or ():
            yield body
            yield from body._opened()

    @functools.cached_property
    def is_aten(self) -> bool:
        """Whether the graph calls overloads of ATen, as normalized and exported graphs do, not functions of torch."""
        calls = (n for n in self.graph.nodes if n.op == "call_method" or "::" in ops.key(n))
        first = next(calls, None)
        return first is not None and isinstance(first.target, torch._ops.OpOverload)

    @property
    def num_changes(self) -> int:
        """Number of journal records so far; if it is unchanged, nothing was changed."""
        return len(self._journal)

    def nodes(self) -> list[fx.Node]:
        """Returns the nodes of the graph as it is now, in order, without nodes that will be erased at commit."""
        erased = self.erased
        return [node for node in self.graph.nodes if node not in erased] if erased else list(self.graph.nodes)

    def copied(self) -> fx.GraphModule:
        """Returns a copy of the module with the graph as it is now, which can run while the transaction goes on."""
        return copy_module(self.gm, {node for part in self.parts() for node in part.erased})

    def calls(self) -> Iterator[tuple[str, Any, Collection[fx.Node]]]:
        """Yields the call nodes of `nodes()` in groups (opcode, target, nodes); a group has no particular order.

        FX keeps a table of the functions that a graph calls, so this does not walk the graph.
        """
        erased = self.erased
        for (op, target), found in list(self.graph._find_nodes_lookup_table.table.items()):
            nodes = [node for node in found if node not in erased] if erased else found
            if op == "call_function":
                yield op, target, nodes
            elif op in ("call_method", "call_module"):
                groups: defaultdict[Any, list[fx.Node]] = defaultdict(list)
                for node in nodes:
                    groups[node.target].append(node)
                for name, group in groups.items():
                    yield op, name, group

    def savepoint(self) -> Savepoint:
        """Returns a context manager: an exception that leaves its block undoes only the changes made in it."""
        return Savepoint(self)

    def call(
        self,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        like: fx.Node | None = None,
        rule: str = "",
        val: Any = _COMPUTE,
    ) -> fx.Node:
        """Inserts a new call node with source line, rule name and `val`, and returns it.

        Args:
            target: the callee; a string is a tensor method. A module becomes an attribute of `gm`; a graph with fake
                values takes none, as it has calls of functions.
            args: positional arguments: nodes and plain values.
            kwargs: keyword arguments.
            before: insert before this node; give exactly one of `before` and `after`.
            after: insert after this node; after a placeholder means after the last one.
            like: the node that it replaces, from which it inherits stack trace, module stack and checkpoint tags.
            rule: id of the rule that makes it, put before the rules of `like` in `meta["fxrewrite"]`.
            val: its fake value. By default only this operator is run on the values of the arguments, under the graph's
                own fake mode and without adding shape guards; in a graph without values it gets none.

        Raises:
            InvariantError: neither or both of `before` and `after` are given, or an argument has no fake value.
        """
        if (before is None) == (after is None):
            raise InvariantError(f"new node {ops.key(target)}: give exactly one of before= and after=")
        if before is None:
            assert after is not None
            before = self.body if after.op == "placeholder" else after.next
        if isinstance(target, torch.nn.Module):
            return self._call_module(target, args, kwargs or {}, before, rule)
        named = self._names.get(id(target))  # an overload hashes slowly
        if named is None:
            named = self._names[id(target)] = self.graph._target_to_str(target).replace(".", "_"), target
        node = insert_call(self.graph, before, target, tuple(args), dict(kwargs) if kwargs else {}, named[0])
        self._journal.append(("create", node))
        meta = node.meta
        if like is not None:
            meta.update(copied_meta(like))
            provenance = like.meta.get("fxrewrite", ())
            meta["fxrewrite"] = (rule, *provenance) if rule else provenance
        elif rule:
            meta["fxrewrite"] = (rule,)
        if val is _COMPUTE:
            if self.fake_mode is not None:
                meta[self.values.key] = self.values.compute(node)
        else:
            meta[self.values.key] = val
        for fact, derive in self._derived.items():
            found = derive(node)
            if found is not None:
                facts_of(self.graph).setdefault(fact, {})[node] = found
        return node

    def attach(self, value: torch.nn.Module | torch.Tensor, name: str) -> fx.Node:
        """Adds an attribute to `gm`, and returns a `get_attr` node for it, placed before all calls.

        Args:
            value: a subgraph of a higher-order operator, or another module; a parameter; or a tensor, which becomes a
                buffer.
            name: of the attribute; a number is appended where the module has one of that name.
        """
        return self._reader(add_attribute(self.gm, value, name), value, "attach")

    def read(self, path: str) -> fx.Node:
        """Returns a new `get_attr` node, placed before all calls, for a tensor that `gm` has, as `layers.0.weight`.

        Raises:
            InvariantError: `gm` has no tensor of that name.
        """
        try:
            value = operator.attrgetter(path)(self.gm)
        except AttributeError:
            value = None
        if not isinstance(value, torch.Tensor):
            raise InvariantError(f"the module has no tensor {path}")
        return self._reader(path, value, "create")

    def _reader(self, path: str, value: object, kind: str) -> fx.Node:
        """Returns a new node that reads an attribute, and records it as a change of this kind."""
        with self.graph.inserting_before(self.body):
            node = self.graph.get_attr(path)
        self._journal.append((kind, node))
        if isinstance(value, torch.Tensor) and self.fake_mode is not None:
            node.meta[self.values.key] = self.values.attribute(path)
        return node

    def _call_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], before: fx.Node, rule: str
    ) -> fx.Node:
        """Calls a module: one that `gm` has under any name, or a new attribute, called as its class."""
        if self.fake_mode is not None:
            raise RuleDefinitionError(
                f"a graph with fake values has calls of functions, and not of modules as {type(module).__name__}; call "
                "the functions that it calls"
            )
        held = next((path for path, found in self.gm.named_modules() if found is module and path), None)
        path = held or add_attribute(self.gm, module, type(module).__name__.lower())
        with self.graph.inserting_before(before):
            node = self.graph.call_module(path, args, dict(kwargs))
        self._journal.append(("create" if held else "attach", node))
        node.meta["fxrewrite"] = (rule,) if rule else ()
        return node

    def new_since(self, mark: int) -> list[fx.Node]:
        """Returns the nodes that were made since the transaction had `mark` changes (`num_changes`), in graph order."""
        made = (record[1] for record in self._journal[mark:] if record[0] in ("create", "attach"))
        return sorted(node for node in made if node not in self.erased)

    def set_args(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Sets the arguments of the node; its keyword arguments stay if `kwargs` is None."""
        self._journal.append(("args", node, node.args, node.kwargs))
        node.args = tuple(args)
        if kwargs is not None:
            node.kwargs = dict(kwargs)

    def replace_uses(self, old: fx.Node, new: fx.Node, users: Iterable[fx.Node] | None = None) -> None:
        """Makes `users` (all if None, but never `new` itself) read `new` instead of `old`."""
        for user in list(old.users if users is None else users):
            if user is not new:
                self._journal.append(("args", user, user._args, user._kwargs))
                user.replace_input_with(old, new)

    def spread(self, old: fx.Node, items: Sequence[fx.Node]) -> None:
        """Makes users of the list `old` read a list of these nodes; users that index it keep reading it."""
        for user in list(old.users):
            if user.target is operator.getitem:
                continue
            is_list = isinstance(ops.value(old), list) or isinstance(user.target, torch._ops.OpOverload)
            whole = list(items) if is_list else tuple(items)

            def read(node: fx.Node, whole: Any = whole) -> Any:
                return whole if node is old else node

            self.set_args(user, map_arg(user.args, read), map_arg(user.kwargs, read))  # pyright: ignore[reportArgumentType]

    def move(self, node: fx.Node, before: fx.Node) -> None:
        """Moves the node before another one; at commit, what it reads must be earlier, and what reads it later."""
        self._journal.append(("move", node, node.next))
        before.prepend(node)

    def set_meta(self, node: fx.Node, key: str, value: Any) -> None:
        """Sets `node.meta[key]` to `value`."""
        self._journal.append(("entry", node, node.meta, key, node.meta.get(key, ABSENT)))
        node.meta[key] = value

    def set_fact(self, node: fx.Node, fact: Fact[T], value: T) -> None:
        """Sets `fact.of(node)` to `value`."""
        known = facts_of(self.graph).setdefault(fact, {})
        self._journal.append(("entry", node, known, node, known.get(node, ABSENT)))
        known[node] = value

    def derive(self, fact: Fact[T], how: Callable[[fx.Node], T | None]) -> None:
        """From now on, every new node in this graph gets the fact `how(node)`, unless that is None.

        `how` sees the node with its arguments and fake value. If it raises, the rewrite that made the node is undone.
        """
        self._derived[fact] = how

    def underive(self, fact: Fact[Any]) -> None:
        """Stops deriving the fact for new nodes."""
        self._derived.pop(fact, None)

    def before_commit(self, check: Callable[[Edit], None]) -> None:
        """Runs `check(edit)` before the transaction commits; if it raises, everything is undone. Each runs once."""
        if check not in self._checks:
            self._checks.append(check)

    def forget(self) -> None:
        """Drops all facts of this graph, and stops deriving them; undo does not restore them."""
        self._derived.clear()
        forget_facts(self.graph)

    def shared(self, key: Any, make: Callable[[], T]) -> T:
        """Returns what this transaction's steps and rules share under `key`; `make` makes it on first use."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def erase(self, node: fx.Node) -> None:
        """Marks an unused node as erased; it leaves the graph at commit.

        Raises:
            InvariantError: the node still has users.
        """
        if node.users:
            users = ", ".join(f"%{user.name}" for user in node.users)
            raise InvariantError(f"%{node.name} cannot be erased: it is used by {users}; replace its uses first")
        self.erase_unused((node,))

    def erase_unused(self, nodes: Iterable[fx.Node]) -> None:
        """Marks as erased what nothing reads of `nodes`, one after the other: a node comes after its users."""
        for node in nodes:
            if not node.users:
                self._journal.append(("erase", node, node._args, node._kwargs))
                node._update_args_kwargs((), {})
                self.erased.add(node)

    @contextlib.contextmanager
    def raw(self, near: Iterable[fx.Node]) -> Generator[None]:
        """What the block does to the graph without this transaction is part of it: new nodes, arguments and metadata.

        For code that knows no transactions. New nodes without a value get the value that they compute.

        Args:
            near: nodes that the block may change; what it changes of others is undone with the whole transaction alone.

        Raises:
            InvariantError: the block erased a node, which no transaction can undo; or it raised after it, or an earlier
                block, had changed a node that it is not near to.
        """
        if self._untracked is None:
            self._untracked = UntrackedChanges(self.graph, self._journal, self.erased)
            self.before_commit(Edit._find_untracked)
        mark = self.num_changes
        with self._untracked.near(near):
            yield
        for node in self.new_since(mark) if self.fake_mode is not None else ():
            if node.op.startswith("call_") and ops.value(node) is ops.MISSING:
                node.meta[self.values.key] = self.values.compute(node)

    def _find_untracked(self) -> None:
        if self._untracked is not None:
            self._untracked.elsewhere()

    def _undo(self, mark: int) -> None:
        """Undoes the records of the journal from `mark` on."""
        for node in self._journal.undo(mark):
            self.values.forget(str(node.target))
            self.computed.pop(node, None)

    def _check(self) -> None:
        """Checks that every touched node reads only earlier nodes of this graph, and that every new one has a value."""
        erased, graph, checked = self.erased, self.graph, set[fx.Node]()
        for record in self._journal:
            kind, node = record[0], record[1]
            if kind == "erase" or node in erased or kind in ("entry", "attach"):
                continue
            operands = () if node in checked else node.all_input_nodes
            checked.add(node)
            for used in operands:
                if used in erased or used.graph is not graph:
                    raise InvariantError(f"%{node.name} reads %{used.name}, which is not in the graph any more")
                if not used < node:
                    raise InvariantError(
                        f"%{node.name} reads %{used.name}, which is defined after it; insert the new node later"
                    )
            early = next((user for user in node.users if user < node), None) if kind == "move" else None
            if early is not None:
                raise InvariantError(f"%{early.name} reads %{node.name}, which was moved after it")
            if kind == "create" and self.fake_mode is not None and ops.value(node) is ops.MISSING:
                raise InvariantError(f"new node %{node.name} has no value; pass val= or let it be computed")
        for node in erased:
            if node.graph is not graph:
                raise InvariantError(f"%{node.name} is to be erased, and is a node of another graph")
            if node.users:
                users = ", ".join(f"%{user.name}" for user in node.users)
                raise InvariantError(f"%{node.name} is to be erased, but {users} use it")

    def _commit(self) -> None:
        called = {str(node.target) for node in self.erased if node.op == "call_module"}
        take_out(self.graph, self.erased)
        self.erased.clear()
        for path in called:
            drop_attribute(self.gm, path)
        sources = (source for _, sources in self.computed.values() for source in sources)
        for path in {*(str(node.target) for node in self.computed), *sources}:
            readers = self.graph.find_nodes(op="get_attr", target=path)
            if not any(node.users for node in readers):
                for node in readers:
                    self.graph.erase_node(node)
                drop_attribute(self.gm, path)
        self.computed.clear()
        if self._journal:
            self._journal.clear()
            self.gm.recompile()


class Savepoint:
    """A part of a transaction that can be undone alone; see `Edit.savepoint`. A class, as every rewrite makes one."""

    __slots__ = ("_edit", "_mark")

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self._mark = edit.num_changes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._edit._undo(self._mark)  # pyright: ignore[reportPrivateUsage]
