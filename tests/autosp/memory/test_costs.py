"""Operations of attention are one number whatever it has become, and what a backward pass reads is never too little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from autosp_rules import AutoSPConfig
from autosp_rules.attention.strategy import AttentionCall
from autosp_rules.config import AttentionOption
from autosp_rules.lengths import PLANNED_LENGTH
from autosp_rules.memory.costs import (
    ATTENTION_PASSES,
    backward_reads,
    bases_of,
    bytes_of,
    bytes_sent,
    cost_of,
    flops_of,
    sends_of,
)
from autosp_rules.transform import transform
from fxrewrite import RuleSet, normalize
from fxrewrite.ops import Trait, key, operators
from fxrewrite.spmd import FLOPS_PER_BYTE_SENT, Axis
from rules.attention.flops import ATTENTION_KEYS
from rules.attention.operator import RAISE_ATTENTION
from rules.masks.naming import NameMasks
from tests.autosp.attention_layer import Attend, Layer
from tests.autosp.one_device import captured

sdpa = F.scaled_dot_product_attention
BATCH, LENGTH, HEADS, KV_HEADS, DEPTH, WIDTH = 2, 24, 4, 2, 4, 6
IDS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 % 8
WHOLE = 2 * BATCH * HEADS * LENGTH * LENGTH * (DEPTH + WIDTH)
"""Operations of attention that hides nothing."""


def _causal_mask() -> torch.Tensor:
    positions = torch.arange(LENGTH)
    return positions[:, None] >= positions


MASKS: dict[str, tuple[Attend, int]] = {
    "nothing hidden": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), WHOLE),
    "is_causal": (lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), WHOLE // 2),
    "by keyword": (lambda q, k, v: sdpa(query=q, key=k, value=v, is_causal=True, enable_gqa=True), WHOLE // 2),
    "a causal mask": (lambda q, k, v: sdpa(q, k, v, _causal_mask(), enable_gqa=True), WHOLE // 2),
    "dropout": (lambda q, k, v: sdpa(q, k, v, dropout_p=0.5, enable_gqa=True), WHOLE),
}
CELLS: list[tuple[AttentionOption, str, int]] = [
    ("ulysses", "nothing hidden", 2),
    ("ulysses", "is_causal", 2),
    ("ulysses", "by keyword", 2),
    ("ulysses", "a causal mask", 2),
    ("ulysses", "dropout", 2),
    ("gather_kv", "nothing hidden", 3),
    ("gather_kv", "is_causal", 3),
    ("ring", "nothing hidden", 4),
    ("ring", "is_causal", 4),
    ("ring", "a causal mask", 3),
    ("ring_ulysses", "is_causal", 4),
]


def _graph(mask: str) -> fx.GraphModule:
    attend, _ = MASKS[mask]
    model = Layer(lambda m, x, q, k, v: attend(q, k, v), HEADS, KV_HEADS)
    return captured(model, {"ids": IDS.clone(), "memory": IDS.clone()})[0]


def _attention(gm: fx.GraphModule) -> fx.Node:
    (node,) = (node for node in gm.graph.nodes if key(node) in ATTENTION_KEYS)
    return node


@pytest.mark.parametrize("mask", MASKS)
def test_operations_of_one_device(mask: str) -> None:
    gm = normalize(_graph(mask))
    RuleSet("names", RAISE_ATTENTION, NameMasks()).apply(gm)
    attention = _attention(gm)
    assert AttentionCall.of(attention).flops == ATTENTION_PASSES * flops_of(attention)
    assert flops_of(attention) == MASKS[mask][1]


@pytest.mark.parametrize(("strategy", "mask", "num_ranks"), CELLS)
def test_each_rank_has_its_share_of_the_operations(strategy: AttentionOption, mask: str, num_ranks: int) -> None:
    """Whatever the strategy, and whatever operator its attention has become."""
    program, _ = transform(_graph(mask), AutoSPConfig(attention=strategy), Axis("sp", num_ranks))
    assert flops_of(_attention(program)) == MASKS[mask][1] / num_ranks


@pytest.mark.parametrize("mask_kernel", ["rows", "flex"])
def test_operations_of_attention_by_a_mask_kernel(mask_kernel: Any) -> None:
    config = AutoSPConfig(attention="ulysses", mask_kernel=mask_kernel, inner="aot_eager")
    program, _ = transform(_graph("a causal mask"), config, Axis("sp", 2))
    assert flops_of(_attention(program)) == WHOLE / 4


def test_a_ring_costs_what_it_sends_inside() -> None:
    program, _ = transform(_graph("is_causal"), AutoSPConfig(attention="ring"), Axis("sp", 4))
    ring = _attention(program)
    sends = sends_of(ring)
    assert sends
    assert bytes_sent(ring) == sends.forward > 0
    assert cost_of(ring) == WHOLE / 8 + FLOPS_PER_BYTE_SENT * sends.forward


def test_what_a_ring_sends_grows_with_the_length_that_is_planned_for() -> None:
    attend, _ = MASKS["is_causal"]
    ids = torch.zeros(BATCH, 32, dtype=torch.long)
    torch._dynamo.mark_dynamic(ids, 1)
    gm, _ = captured(Layer(lambda m, x, q, k, v: attend(q, k, v), HEADS, KV_HEADS), {"ids": ids, "memory": IDS.clone()})
    program, _ = transform(gm, AutoSPConfig(attention="ring"), Axis("sp", 4))
    sends = sends_of(_attention(program))
    assert sends
    assert bytes_sent(_attention(program)) == sends.forward * PLANNED_LENGTH // 32


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        return x + self.o(sdpa(q, k, v).transpose(1, 2).flatten(2))


class _Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.layers = nn.ModuleList([_Block(width), _Block(width)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_budget_keeps_a_ring_before_a_linear() -> None:
    """It reads keys of all ranks, and would send them once more."""
    width, length, num_ranks = 512, 1024, 8
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    gm, _ = captured(_Blocks(width).to("meta"), {"ids": ids})
    hidden = length // num_ranks * width * 4
    config = AutoSPConfig(attention="ring", checkpoint=2 * (1 + 3) * hidden)
    program, report = transform(gm, config, Axis("sp", num_ranks))
    kept = [key(n) for n in program.graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    assert kept.count("autosp::ring_attention") == 2
    assert any("nothing is sent again" in line for line in report.lines)


def _x() -> torch.Tensor:
    return torch.rand(4, 6, dtype=torch.float64) + 0.5


ROWS = torch.tensor([2, 0, 1, 1])
AT = torch.tensor([[0, 1, 2, 3, 0, 1]] * 4)
aten = torch.ops.aten
OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # what reads nothing
    "_to_copy": lambda x, y: aten._to_copy(x, dtype=torch.float32),
    "add": lambda x, y: torch.add(x, y, alpha=2),
    "add_": lambda x, y: (x * 2).add_(y),
    "arange": lambda x, y: x + torch.arange(6.0),
    "cat": lambda x, y: torch.cat([x, y]),
    "clone": lambda x, y: x.clone(),
    "constant_pad_nd": lambda x, y: torch.constant_pad_nd(x, [1, 2], 0.5),
    "copy": lambda x, y: aten.copy(x, y),
    "cumsum": lambda x, y: x.cumsum(0),
    "flip": lambda x, y: x.flip(0),
    "full": lambda x, y: x + torch.full((6,), 2.0),
    "full_like": lambda x, y: x + torch.full_like(x, 2.0),
    "mean": lambda x, y: x.mean(1),
    "neg": lambda x, y: -x,
    "ones": lambda x, y: x + torch.ones(6),
    "ones_like": lambda x, y: x + torch.ones_like(x),
    "repeat": lambda x, y: x.repeat(2, 3),
    "roll": lambda x, y: x.roll(1, 0),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=3),
    "stack": lambda x, y: torch.stack([x, y]),
    "sub": lambda x, y: x - y,
    "sum": lambda x, y: x.sum(1),
    "tril": lambda x, y: x.tril(),
    "triu": lambda x, y: x.triu(),
    "zeros": lambda x, y: x + torch.zeros(6),
    "zeros_like": lambda x, y: x + torch.zeros_like(x),
    # what shows its operand, or copies it
    "expand": lambda x, y: x.expand(3, 4, 6),
    "contiguous": lambda x, y: x.t().contiguous(),
    "flatten": lambda x, y: x.t().flatten(),
    "ravel": lambda x, y: x.t().ravel(),
    "reshape": lambda x, y: x.t().reshape(3, 8),
    "reshape_as": lambda x, y: x.t().reshape_as(y),
    "to": lambda x, y: x.to(torch.float32),
    "type_as": lambda x, y: x.type_as(y.float()),
    "dropout": lambda x, y: F.dropout(x, 0.5, training=True),
    "dropout, evaluated": lambda x, y: F.dropout(x, 0.5, training=False),
    # what reads its result
    "_softmax": lambda x, y: aten._softmax(x, -1, False),
    "exp": lambda x, y: x.exp(),
    "log_softmax": lambda x, y: x.log_softmax(-1),
    "relu": lambda x, y: x.relu(),
    "rsqrt": lambda x, y: x.rsqrt(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "softmax": lambda x, y: x.softmax(-1),
    "sqrt": lambda x, y: x.sqrt(),
    "tanh": lambda x, y: x.tanh(),
    # what reads its operands
    "abs": lambda x, y: x.abs(),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addmm": lambda x, y: torch.addmm(x[0, :4], x, y.t()),
    "baddbmm": lambda x, y: torch.baddbmm(x[None, :, :4], x[None], y.t()[None]),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x / 2, y / 2),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    "bmm": lambda x, y: torch.bmm(x[None], y.t()[None]),
    "clamp": lambda x, y: x.clamp(0.6, 1.2),
    "clamp_max": lambda x, y: aten.clamp_max(x, 1.0),
    "clamp_min": lambda x, y: aten.clamp_min(x, 1.0),
    "conv1d": lambda x, y: F.conv1d(x[None], y[:, :4, None]),
    "conv2d": lambda x, y: F.conv2d(x[None, None], y[None, None, :2, :2]),
    "conv3d": lambda x, y: F.conv3d(x[None, None, None], y[None, None, None, :2, :2]),
    "convolution": lambda x, y: aten.convolution(x[None], y[:, :4, None], None, [1], [0], [1], False, [0], 1),
    "cos": lambda x, y: x.cos(),
    "cross_entropy_loss": lambda x, y: F.cross_entropy(x, ROWS),
    "div": lambda x, y: x / y,
    "div, a number": lambda x, y: x / 3,
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "elu": lambda x, y: F.elu(x),
    "embedding": lambda x, y: F.embedding(ROWS, x),
    "erf": lambda x, y: x.erf(),
    "gather": lambda x, y: x.gather(0, AT),
    "gelu": lambda x, y: F.gelu(x),
    "group_norm": lambda x, y: F.group_norm(x, 2, y[0], y[1]),
    "hardswish": lambda x, y: F.hardswish(x),
    "index": lambda x, y: x[ROWS],
    "index_add": lambda x, y: x.index_add(0, ROWS, y),
    "index_select": lambda x, y: x.index_select(0, ROWS),
    "layer_norm": lambda x, y: F.layer_norm(x, (6,), y[0], y[1]),
    "leaky_relu": lambda x, y: F.leaky_relu(x),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "log": lambda x, y: x.log(),
    "log1p": lambda x, y: x.log1p(),
    "log_sigmoid": lambda x, y: F.logsigmoid(x),
    "masked_fill": lambda x, y: x.masked_fill(AT > 1, 0.0),
    "matmul": lambda x, y: x @ y.t(),
    "maximum": lambda x, y: torch.maximum(x, y),
    "minimum": lambda x, y: torch.minimum(x, y),
    "mish": lambda x, y: F.mish(x),
    "mm": lambda x, y: torch.mm(x, y.t()),
    "mse_loss": lambda x, y: F.mse_loss(x, y),
    "mul": lambda x, y: x * y,
    "mul, a number": lambda x, y: x * 3,
    "mul, itself": lambda x, y: x * x,
    "mv": lambda x, y: torch.mv(x, y[0]),
    "nll_loss": lambda x, y: F.nll_loss(x, ROWS),
    "repeat_interleave": lambda x, y: x.repeat_interleave(ROWS, 0),
    "repeat_interleave, a number": lambda x, y: x.repeat_interleave(2, 0),
    "rms_norm": lambda x, y: F.rms_norm(x, (6,), y[0]),
    "scatter": lambda x, y: x.scatter(0, AT, y),
    "scatter_add": lambda x, y: x.scatter_add(0, AT, y),
    "silu": lambda x, y: F.silu(x),
    "sin": lambda x, y: x.sin(),
    "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y),
    "softplus": lambda x, y: F.softplus(x),
    "square": lambda x, y: x.square(),
    "where": lambda x, y: torch.where(AT > 1, x, y),
    # of which nothing is known
    "amax": lambda x, y: x.amax(1),
    "cumprod": lambda x, y: x.cumprod(1),
    "in place": lambda x, y: (x * 2).mul_(y),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "pad by reflection": lambda x, y: F.pad(x, (1, 1), mode="reflect"),
    "pow": lambda x, y: x**y,
    "prod": lambda x, y: x.prod(1),
    "reciprocal": lambda x, y: x.reciprocal(),
    "scaled_dot_product_attention": lambda x, y: sdpa(x[None, None], y[None, None], y[None, None]),
    "sort": lambda x, y: x.sort(1)[0],
    "tan": lambda x, y: x.tan(),
    "var": lambda x, y: x.var(1),
}
UNTRIED = {"aten::_grouped_mm"}
"""It runs on accelerators alone."""


def _storages(value: Any) -> Iterator[int]:
    for x in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(x, torch.Tensor):
            yield x.untyped_storage().data_ptr()


class _Saved(fx.Interpreter):
    """What autograd saves for each node of a graph; numbers are left out."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.by_node: dict[fx.Node, list[torch.Tensor]] = {}

    def run_node(self, n: fx.Node) -> Any:
        saved = self.by_node[n] = []
        with saved_tensors_hooks(lambda x: saved.append(x) or x if x.numel() > 1 else x, lambda x: x):
            return super().run_node(n)


@pytest.mark.parametrize("name", OPERATORS)
def test_what_autograd_saves_is_among_what_a_backward_pass_reads(name: str) -> None:
    """A value of the graph is named; what an operator makes and keeps to itself is no larger than what is named."""
    torch.manual_seed(0)
    given = (_x().requires_grad_(), _x().requires_grad_())
    gm = make_fx(OPERATORS[name], pre_dispatch=True)(*given)
    run = _Saved(gm)
    run.run(*given)
    made = {storage for value in run.env.values() for storage in _storages(value)}
    for node, saved in run.by_node.items():
        if node.op != "call_function":
            continue
        reads = backward_reads(node)
        named = {storage for read in reads for storage in _storages(run.env[read])}
        inside = dict[int, int]()
        for x in saved:
            (storage,) = _storages(x)
            assert storage in named or storage not in made, (
                f"{node.format_node()} saves {tuple(x.shape)}, not in {reads}"
            )
            inside |= {} if storage in made else {storage: x.nbytes}
        assert sum(inside.values()) <= sum(map(bytes_of, reads)), node.format_node()


@pytest.mark.parametrize("trait", ["saves_nothing", "saves_result", "saves_operands"])
def test_every_operator_of_which_something_is_known_is_tried(trait: Trait) -> None:
    assert not operators(trait) - UNTRIED - {f"aten::{name}" for name in OPERATORS}


def test_dropout_in_training_makes_memory() -> None:
    """And in evaluation shows its operand's."""
    gm = make_fx(lambda x: F.dropout(F.dropout(x.exp(), 0.5, True), 0.5, False), pre_dispatch=True)(_x())
    trained = next(node for node in gm.graph.nodes if key(node) == "aten::dropout")
    assert bases_of(gm.graph.nodes)[gm.graph.output_node().all_input_nodes[0]] is trained
