"""From global shapes to local ones: after it, every value's `val` is what one rank holds.

The global shape of a sharded value stays known (`global_shape`), since collectives need it. Arguments that state a
result's shape (view, reshape, expand) state the local one, and those that count runs of a dimension (groups) count the
local ones. The order of the steps matters:

1. placements are checked while shapes are global, since layout rules read global shapes;
2. inputs' and outputs' placements are written on the program, and gradients of inputs and cotangents are made right
   (`cotangents`), with operators that are placed as what they read;
3. shapes become local, node by node, bodies of higher-order operators included.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxrewrite.errors import refuse
from fxrewrite.graph.edit import Edit
from fxrewrite.graph.sizes import Size, SizeNodes, divide_exactly, is_same_size, size_hint
from fxrewrite.ops import bind, key
from fxrewrite.report import Report
from fxrewrite.spmd.context import SpmdContext
from fxrewrite.spmd.facts import GLOBAL_SHAPE, PLACEMENT, global_shape
from fxrewrite.spmd.layouts.rule import LayoutRules, tensor_of
from fxrewrite.spmd.lower.rows import keep_section, look_up, set_argument
from fxrewrite.spmd.operators.shared_nodes import size_nodes
from fxrewrite.spmd.placement import Partial, Placement, Shard, local_shape, num_entries
from fxrewrite.spmd.propagation.cotangents import write_gradients
from fxrewrite.spmd.propagation.input_placements import write_input_placements, write_output_placements
from fxrewrite.spmd.propagation.legal import DECIDED, check_lowered, check_placements
from fxrewrite.spmd.properties import LOCAL_SHAPES, PLACEMENTS
from fxrewrite.spmd.redistribute import convert_placements


class LocalizeShapes:
    """The step of a plan that makes shapes local, from the placements that propagation found.

    Args:
        name: of the step.
        rules: layout rules; those of propagation.
        own_inputs: whether each rank of the axis is called with values of its own, such as its part of a batch. The
            objective is then the mean of the ranks' losses, and what ranks hold whole are parameters alone.
    """

    def __init__(self, name: str, rules: LayoutRules, *, own_inputs: bool = False) -> None:
        self.name = name
        self.rules = rules
        self.own_inputs = own_inputs
        self.needs, self.gives = (PLACEMENTS,), (LOCAL_SHAPES,)

    def run(self, edit: Edit, context: SpmdContext, report: Report) -> int:
        context = SpmdContext.required(context, self.name)
        axis = context.axis
        num_ranks = axis.size
        # Rules that run after this step make nodes of local values, of which layout rules say nothing.
        edit.underive(PLACEMENT)
        # A redistribution that no rule lowers would be the identity on shards, and silently wrong.
        edit.before_commit(check_lowered)
        convert_placements(edit)
        check_placements(edit, self.rules)
        write_input_placements(edit, axis)
        write_output_placements(edit, axis)
        changed = write_gradients(edit, axis, context.gradients, self.name, own_inputs=self.own_inputs)
        values = _LocalValues(num_ranks)
        for part, node in ((body, node) for body in edit.parts() for node in body.nodes()):
            placements = PLACEMENT.of(node)
            if placements is None:
                continue  # sizes, and the nodes of bodies that run whole
            value = node.meta.get("val")
            if isinstance(placements, tuple) and isinstance(value, (list, tuple)):
                changed += self._localize_lengths(part, node, placements, num_ranks)
                local = [values.of(v, placement) for v, placement in zip(value, placements, strict=True)]
                part.set_meta(node, "val", type(value)(local))
            elif isinstance(placements, Partial):  # a summand has the shape of the sum
                self._refuse_unwritten(node)
                if (decided := DECIDED.of(node)) is not None and decided.lookup is not None:
                    look_up(part, node, decided.lookup, axis, self.name)
            elif isinstance(placements, Shard):
                # Arguments first: they are computed from the global `val`, which the last line replaces.
                changed += self._localize_shape_arg(part, node, placements, size_nodes(part), num_ranks)
                changed += self._localize_run_args(part, node, placements, size_nodes(part), num_ranks)
                whole = tensor_of(node)
                part.set_fact(node, GLOBAL_SHAPE, tuple(whole.shape))
                part.set_meta(node, "val", values.of(whole, placements))
                if (decided := DECIDED.of(node)) is not None and decided.stays:
                    keep_section(part, node, placements, axis, self.name)
        return changed

    def _refuse_unwritten(self, node: fx.Node) -> None:
        """Refuse an operator whose result on a shard is no summand of the global one until another rule rewrote it."""
        rule = self.rules.get(key(node))
        if rule is not None and rule.rewritten_by:
            refuse(
                f"{key(node)} over a sharded dimension counts a rank's entries alone",
                node=node,
                hint=f"run {rule.rewritten_by} between propagation and {self.name}",
            )

    def _localize_shape_arg(self, edit: Edit, node: fx.Node, placement: Shard, sizes: SizeNodes, num_ranks: int) -> int:
        """A stated shape has the local size in the sharded dimension; -1 is right as it is: it means what remains."""
        rule = self.rules.get(key(node))
        if rule is None or not rule.shape_arg:
            return 0
        args = bind(node)
        first = args.get("dim", 0)  # unflatten states sizes from `dim` of its input on
        if first < 0:
            first += len(global_shape(node.all_input_nodes[0]))
        stated, at = list(args[rule.shape_arg]), placement.dim - first
        if not 0 <= at < len(stated) or stated[at] == -1:
            return 0
        stated[at] = sizes(local_shape(node.meta["val"].shape, placement, num_ranks)[placement.dim])
        set_argument(edit, node, args, rule.shape_arg, stated)
        return 1

    def _localize_run_args(self, edit: Edit, node: fx.Node, placement: Shard, sizes: SizeNodes, num_ranks: int) -> int:
        """A count of runs (a convolution's groups) is local where a rank holds whole runs; of parts of runs it holds
        as many as there are runs."""
        rule = self.rules.get(key(node))
        changed = 0
        for name, dim in rule.run_args if rule is not None else ():
            args = bind(node)
            if placement.uneven:
                holds_runs = is_same_size(args[name], placement.outer * num_entries(tensor_of(node).shape, placement))
            else:
                holds_runs = divide_exactly(args[name], placement.outer * num_ranks) is not None
            if dim % tensor_of(node).dim() == placement.dim and holds_runs:
                runs = local_shape([args[name]], replace(placement, dim=0, inner=1), num_ranks)[0]
                set_argument(edit, node, args, name, sizes(runs))
                changed += 1
        return changed

    def _localize_lengths(self, edit: Edit, node: fx.Node, placements: tuple[Placement, ...], num_ranks: int) -> int:
        """Stated lengths of parts along the sharded dimension are local: a rank holds a chunk of each part."""
        rule = self.rules.get(key(node))
        if rule is None or not rule.length_args:
            return 0
        args, dims = bind(node), {placement.dim for placement in placements if isinstance(placement, Shard)}
        dim = args.get("dim", 0) % tensor_of(node.all_input_nodes[0]).dim()
        first = next((placement for placement in placements if isinstance(placement, Shard)), None)
        if dims != {dim} or first is None:
            return 0
        for name in rule.length_args:
            if name in args:
                stated = args[name]
                many = list(stated) if isinstance(stated, (list, tuple)) else [stated]
                held = [placement if isinstance(placement, Shard) else first for placement in placements]
                held = held if len(many) == len(held) else [first]  # one length, of all parts
                lengths = zip(many, held, strict=True)
                local = [local_shape([length], replace(of, dim=0), num_ranks)[0] for length, of in lengths]
                sizes = [size_nodes(edit)(length) for length in local]
                set_argument(edit, node, args, name, sizes if isinstance(stated, (list, tuple)) else sizes[0])
        return 1

    def text(self) -> str:
        return "values and stated shapes become local (S -> S/P)"


class _LocalValues:
    """Local fake values, one for all global ones with equal shape, strides and placement: equal layers share them, and
    making a fake tensor is most of this step's time."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._made: dict[Any, torch.Tensor] = {}

    def of(self, value: torch.Tensor, placement: object) -> torch.Tensor:
        if not isinstance(placement, Shard):
            return value
        counts = (*_counts(placement), *value.shape, *value.stride())
        looks = (value.dtype, value.device, placement.dim, placement.uneven, *map(_term, counts))
        if looks not in self._made:
            size = local_shape(value.shape, placement, self._num_ranks)[placement.dim]
            mode: Any = value.fake_mode  # pyright: ignore[reportAttributeAccessIssue]
            with mode, mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext():
                self._made[looks] = _cut(value, placement.dim, size)
        return self._made[looks]


def _cut(value: torch.Tensor, dim: int, size: Size) -> torch.Tensor:
    """A fake tensor with `size` entries in a dimension, and the strides of a tensor that was made with that size."""
    whole, run = value.shape[dim], value.shape[dim] * value.stride(dim)
    strides: list[Size] = list(value.stride())
    for outer, stride in enumerate(strides):
        if outer != dim and size_hint(stride) >= size_hint(run) > 0:
            entries = divide_exactly(stride, whole)
            strides[outer] = stride if entries is None else entries * size
    shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
    local = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    # The memory stays that of the global value, as rewrites ask which inputs share memory. `as_strided` says the same
    # in five times the time, where sizes are symbolic.
    return local.set_(value.untyped_storage(), value.storage_offset(), shape, strides)


def _counts(placement: Shard) -> tuple[Size, ...]:
    return placement.outer, placement.inner, placement.before, placement.after


def _term(size: Size) -> Any:
    return size if isinstance(size, int) else size.node.expr
