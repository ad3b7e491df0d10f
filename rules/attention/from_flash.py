"""Flash attention of another package, as a model calls it, becomes attention whose mask is a value of the graph.

    _flash_attn_forward(q, k, v, ..., causal=True)[0]
            ->  scaled_dot_product_attention(q, k, v, is_causal=True), with heads before rows
    _flash_attn_varlen_forward(q, k, v, cu_seq_q, cu_seq_k, ...)[0]
            ->  the same with a mask: document of q_idx == document of kv_idx

The package's function is a custom `autograd.Function` around its kernel, or the kernel alone where nothing requires
gradients; torch's `varlen_attn` is an operator with a gradient. A function matches if its forward calls one kernel that
computes attention, its backward the one that computes its gradients, and both do nothing else but move what these read
and return (heads are padded to a multiple of 8). A window is a part of the mask, and so is causal attention where there
are more keys than queries: it is aligned at the last key. Queries and keys have documents of their own.
So the mask is read by its meaning (rules/masks), computed by rows, and each rank has its rows or heads of it.
Leaves alone, in these words: "its logsumexp is read"; "it has alibi_slopes"; "it has a softcap and dropout"; "its
custom function also calls aten::mul".
Shapes: q [B, L, H, E], k [B, S, KV, E], v [B, S, KV, D] -> [B, L, H, D], or B and L in one dimension; KV divides H.
Numerics: reassociates. Rows after the last document are undefined in kernels, and a document of their own here.
Source: FlashAttention-2 (arXiv 2307.08691); Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxrewrite import Match, Pattern, Rule, RuleSet, cap, op, where
from fxrewrite.capture import custom_function
from fxrewrite.graph import operands_first, reached
from fxrewrite.ops import fake_value, has_inexact, is_view, key
from fxrewrite.spmd import is_same_size, traced
from rules.attention.flash_kernels import FlashCall, is_flash_backward, is_flash_forward
from rules.attention.operator import call_attention

_MOVES = {f"aten::{name}" for name in ("pad", "constant_pad_nd", "contiguous", "clone", "cat", "stack")}
_ALLOCATIONS = {f"aten::{name}" for name in ("empty", "empty_like", "new_empty")}
_DETACHES = {"aten::detach", "aten::alias"}


def flash_kernel(node: fx.Node) -> fx.Node | None:
    """Returns the call of a kernel that computes what `node` returns: itself, or one in its custom function."""
    function = custom_function(node)
    if function is None:
        return node if is_flash_forward(node) else None
    return next(filter(is_flash_forward, function.forward.graph.nodes), None)


def why_not_raised(node: fx.Node) -> str:
    """Says why a call for which there is a `flash_kernel` is not attention with a mask; empty if it is."""
    function, kernel = custom_function(node), flash_kernel(node)
    if kernel is None:
        return f"%{node.name} is {key(node)}"
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return "its logsumexp is read"
    if function is not None:
        also = _also_calls(function.forward, is_flash_forward) or _also_calls(function.backward, is_flash_backward)
        if also:
            return f"its custom function {also}"
    call = FlashCall.of(kernel)
    if call.others:
        return f"it has {', '.join(sorted(call.others))}"
    if call.dropout_p and (call.softcap or call.sinks is not None):
        return f"it has {'a softcap' if call.softcap else 'sinks'} and dropout"
    of_q, of_k = (fake_value(x).dtype for x in (call.q, call.k))
    return "" if of_q == of_k else f"keys have dtype {of_k}, queries {of_q}"


def _also_calls(body: fx.GraphModule, is_kernel: Callable[[fx.Node], bool]) -> str:
    """What a subgraph does beside one call of a kernel and moves of its operands and results; empty if nothing."""
    written = [node for node in body.graph.nodes if is_kernel(node)]  # a backward's results are what it wrote to
    calls = [node for node in reached([body.graph.output_node(), *written]) if node.op.startswith("call_")]
    if (count := sum(map(is_kernel, calls))) != 1:
        return f"calls {count} kernels"
    others = [node for node in calls if not is_kernel(node) and node.target is not operator.getitem]
    allowed = _MOVES | _ALLOCATIONS | _DETACHES
    other = next((node for node in others if not (is_view(node) or key(node) in allowed)), None)
    if other is not None:
        return f"also calls {key(other)}"
    kernel = next(filter(is_kernel, calls))
    further = (user for user in kernel.users if user.target is not operator.getitem or user.args[1] != 0)
    read = any(reader.op != "output" for user in further for reader in user.users)
    return "reads further results of its kernel" if read else ""


@where.predicate("flash", text="is_flash_attention")
def _is_flash_attention(flash: fx.Node) -> bool | str:
    return why_not_raised(flash) or True


raise_flash = Rule(
    "attention.raise_flash",
    Pattern((op(operator.getitem, cap("flash"), 0),), (_is_flash_attention,)),
    numerics="reassociates",
    rng="changes",  # kernels draw for dropout by themselves
    domain="finite",
    optional=True,
)


@raise_flash.replacement
def _(match: Match) -> Any:
    """attention(q, k, v, mask), with heads before rows"""
    flash = match["flash"]
    function, kernel = custom_function(flash), flash_kernel(flash)
    assert kernel is not None
    if function is None:
        return _attention(match, kernel, lambda x: match.proxy(x) if isinstance(x, fx.Node) else x)
    made: dict[fx.Node, Any] = {}
    for given, operand, gradient in zip(function.inputs, flash.args[2:], function.outgoing, strict=True):
        made[given] = match.proxy(operand) if isinstance(operand, fx.Node) else operand
        if gradient is None and has_inexact(given):  # as the function has none, though attention has one
            made[given] = match.proxy(operand).detach()

    def inside(x: Any) -> Any:
        return made[x] if isinstance(x, fx.Node) else x

    for node in operands_first(function.results[0]):
        if node is kernel:
            made[node] = (_attention(match, node, inside),)
        elif node.target is operator.getitem:
            made[node] = inside(node.args[0])[node.args[1]]
        elif key(node) in _DETACHES:  # autograd does not look into a custom function
            made[node] = inside(node.args[0])
        elif node.op == "call_function":
            made[node] = match.call(node.target, *map_arg(node.args, inside), **map_arg(dict(node.kwargs), inside))
    return made[function.results[0]]


RAISE_FLASH = RuleSet("raise_flash", raise_flash)


def _attention(match: Match, kernel: fx.Node, of: Callable[[Any], Any]) -> Any:
    """Calls attention as a kernel does; `of` gives the proxy of an operand."""
    call = FlashCall.of(kernel)
    q, k, v = map(of, (call.q, call.k, call.v))
    is_packed = call.cu_seq_q is not None
    starts = [of(x) for x in dict.fromkeys((call.cu_seq_q, call.cu_seq_k)) if x is not None]
    rows, columns = (fake_value(x.node).shape[0 if is_packed else 1] for x in (q, k))
    options: dict[str, Any] = {"scale": of(call.scale), "softcap": call.softcap, "dropout_p": call.dropout_p}
    is_plain = not is_packed and call.left < 0 and (call.right < 0 or is_same_size(rows, columns))
    mask = None
    if not is_plain or call.right > 0:
        operands = (x.node for x in (q, k, *starts))
        mask = traced(match, _documents(call) if is_packed else _window(call), *operands)
    elif call.right == 0:
        options["is_causal"] = True
    q, k, v = (x.transpose(0, 1).unsqueeze(0) if is_packed else x.transpose(1, 2) for x in (q, k, v))
    sinks = of(call.sinks)
    if sinks is not None:
        sinks = sinks.view(1, -1, 1, 1)
    out = call_attention(match, q, k, v, mask, sinks, **options)
    return out[0].transpose(0, 1) if is_packed else out.transpose(1, 2)


def _window(call: FlashCall) -> Callable[..., torch.Tensor]:
    """Returns what each query of a batch keeps, [L, S], as a function of q and k."""

    def mask(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        num_rows, num_columns = q.shape[1], k.shape[1]
        rows, columns = (torch.arange(n, device=q.device) for n in (num_rows, num_columns))
        return _near(call, rows[:, None] + (num_columns - num_rows), columns)

    return mask


def _near(call: FlashCall, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Whether keys at `columns` are in the window of queries at `rows`, which broadcast."""
    kept = columns >= rows - call.left if call.left >= 0 else None
    if call.right < 0:
        assert kept is not None
        return kept
    earlier = columns <= rows + call.right if call.right else columns <= rows
    return earlier if kept is None else earlier & kept


def _documents(call: FlashCall) -> Callable[..., torch.Tensor]:
    """Returns what each query keeps of all documents, [T, U], as a function of q, k, and where documents begin."""

    def mask(q: torch.Tensor, k: torch.Tensor, of_q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows, documents = _places(q.shape[0], of_q)
        columns, of_columns = _places(k.shape[0], others[0]) if others else (rows, documents)
        kept = documents[:, None] == of_columns
        if call.left < 0 and call.right < 0:
            return kept
        for of_k in others:  # counted from the end of a document, since it may have more keys than queries
            last = documents.clamp(max=of_q.shape[0] - 2) + 1
            rows = rows - of_q[last] + of_k[last]
        return kept & _near(call, rows[:, None], columns)

    return mask


def _places(length: Any, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the position of each row in all rows, and the number of its document, [length]."""
    positions = torch.arange(length, device=starts.device)
    return positions, torch.searchsorted(starts[1:], positions.to(starts.dtype), right=True)
