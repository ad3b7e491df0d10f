"""Random programs of a model, from hidden states to a loss, as text: what ranks compute of them is one device's.

    v1 = m.up(h)
    v2 = v1[:, 2:]
    v3 = v2.flatten(0, 1)
    return v3.square().mean() + F.cross_entropy(m.head(h).mT, labels)

A line is kept if it runs on one device for two lengths, so a program suits many lengths. It is known by its seed.
"""

from __future__ import annotations

import linecache
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.autosp.flash_attn import flash_attn_func
from tests.rules.parallel.models import GROUPED

BATCH, WIDTH, HEADS, CLASSES, LONGEST = 2, 6, 2, 22, 32
LENGTHS = (13, 16)
"""Lengths for which every line must run."""


class Own(torch.autograd.Function):
    """A product with a weight, and a backward that is not its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * (g @ w), 3 * (g.flatten(0, 1).t() @ x.flatten(0, 1))


class Fills(torch.autograd.Function):
    """Writes its result and its gradient into buffers, as wrappers of kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x).copy_(x.sin())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.empty_like(g).copy_(g * x.cos())


class Clips(torch.autograd.Function):
    """Its backward is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1e-3, 1e-3)


class Attends(torch.autograd.Function):
    """Attention in its forward, and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.scaled_dot_product_attention(x, x.sin(), x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.scaled_dot_product_attention(x, x.sin(), g)


def attends(x: Tensor) -> Tensor:
    """Attention of states [B, n, 6] in a custom function."""
    heads: Any = Attends.apply(x.unflatten(-1, (HEADS, -1)).transpose(1, 2))
    return heads.transpose(1, 2).flatten(2)


def flash(x: Tensor, **options: Any) -> Tensor:
    """Flash attention of the package on states [B, n, 6]."""
    heads = x.unflatten(-1, (HEADS, -1))
    return flash_attn_func(heads.sin(), heads.cos(), heads, **options).flatten(-2)


def attended(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """torch's attention of states [B, n, 6] to other states."""
    q, k = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (x, y))
    return F.scaled_dot_product_attention(q, k, k.tanh(), **options).transpose(1, 2).flatten(2)


def eager(x: Tensor, mask: Tensor) -> Tensor:
    """Attention that is written out, to tokens that the mask keeps."""
    scores = (x @ x.mT).masked_fill(~mask[:, None, :], -1e9)
    return scores.softmax(-1) @ x


SPELLINGS = (
    *("scaled", "capped", "biased", "causal", "causal by a sum", "window", "sinks", "stable", "dropped", "negated"),
    *("one kv head", "einsum", "bmm", "padded"),
)
"""What attention that is written out may have, in any combination."""


def written(m: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *how: str) -> Tensor:
    """Attention of projected states [B, n, 6], written out, to the last n tokens of the mask if that is `padded`."""
    q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (q, k, v))
    if "one kv head" in how:
        k, v = (z[:, :1].expand(-1, HEADS, -1, -1) for z in (k, v))
    q = q / 3**0.5 if "scaled" in how else q
    if "bmm" in how:
        scores = torch.bmm(q.reshape(-1, *q.shape[2:]), k.reshape(-1, *k.shape[2:]).mT)
        scores = scores.view(-1, HEADS, *scores.shape[1:])
    else:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if "einsum" in how else torch.matmul(q, k.transpose(2, 3))
    scores = 2 * torch.tanh(scores / 2) if "capped" in how else scores
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = scores - m.slopes.view(-1, 1, 1) * distance.abs() if "biased" in how else scores
    scores = scores.masked_fill(distance < 0, -torch.inf) if "causal" in how else scores
    scores = scores + torch.where(distance < 0, -1e9, 0.0) if "causal by a sum" in how else scores
    scores = torch.where(distance.abs() < 3, scores, -1e9) if "window" in how else scores
    scores = scores.masked_fill(~mask[:, None, None, -k.shape[2] :], -1e9) if "padded" in how else scores
    if "sinks" in how:
        scores = torch.cat([scores, m.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    scores = scores - scores.amax(-1, keepdim=True) if "stable" in how else scores
    shares = scores.softmax(-1)[..., : k.shape[2]]
    shares = F.dropout(shares, 0.2) if "dropped" in how else shares
    shares = shares - (1 - torch.eye(HEADS)[0]).view(-1, 1, 1) * 0.1 if "negated" in how else shares
    return (shares @ v).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


class Twice(torch.autograd.Function):
    """Two results of two values and a weight, and gradients that are made by products of parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, (x @ w).unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w + h.tanh() * w, (g * x).flatten(0, -2).sum(0) + (h * x).flatten(0, -2).sum(0)


def mixed(m: Any, x: Tensor, k: int = 2) -> Tensor:
    """A mixture of experts of states [B, n, 6], of which each token goes to `k`."""
    rows = x.flatten(0, 1)
    weights, chosen = m.route(rows).softmax(-1).topk(k, -1)
    return m.mix.experts(rows, chosen, weights / weights.sum(-1, keepdim=True)).view_as(x)


SPACE: Mapping[str, Any] = {
    "torch": torch,
    "F": F,
    "own": Own.apply,
    "fills": Fills.apply,
    "clips": Clips.apply,
    "attends": attends,
    "flash": flash,
    "attended": attended,
    "eager": eager,
    "written": written,
    "twice": Twice.apply,
    "mixed": mixed,
    "checkpoint": checkpoint,
}


_EXPERTS = MixtralConfig(hidden_size=WIDTH, intermediate_size=4, num_local_experts=4)
_EXPERTS._experts_implementation = GROUPED


class Model(nn.Module):
    """Embedding and positions, then a body and its loss, given as text, of hidden states `h`, [B, S, 6]."""

    def __init__(self, text: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.pos = nn.Embedding(CLASSES, WIDTH), nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.up, self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.head, self.score = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
        self.conv, self.depth = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=6)
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("table", torch.rand(LONGEST))
        self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (False, True, False))
        self.slopes, self.sinks = nn.Parameter(torch.rand(HEADS)), nn.Parameter(torch.rand(HEADS))
        self.tied = nn.Linear(WIDTH, CLASSES)
        self.tied.weight = self.embed.weight
        self.half, self.wider = (
            nn.Conv1d(WIDTH, WIDTH, 4, 2, 1),
            nn.Conv1d(WIDTH, 12, 3, padding=2, dilation=2, groups=3),
        )
        self.thinner, self.twofold = nn.Conv1d(12, WIDTH, 5, padding=2), nn.ConvTranspose1d(WIDTH, WIDTH, 2, 2)
        self.draw, self.paint = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, (5, 3), padding=(2, 1))
        self.route, self.mix = nn.Linear(WIDTH, 4), nn.Module()
        self.mix.experts = MixtralExperts(_EXPERTS)
        for parameter in self.mix.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.double()
        self.text = text
        self.body: Callable[..., Any] = compiled(text)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Any:
        h = torch.tanh(self.up(self.embed(ids) + self.pos[: ids.shape[1]]))
        return self.body(self, h, ids, labels, mask)


def compiled(text: str) -> Callable[..., Any]:
    """The function of a body's text."""
    name, source = f"<program {abs(hash(text))}>", "def body(m, h, ids, labels, mask):\n    B, S = ids.shape\n"
    source += "".join(f"    {line}\n" for line in text.splitlines())
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    space = dict(SPACE)
    exec(compile(source, name, "exec"), space)  # the text is made here
    return space["body"]


def batch(length: int, rows: int = BATCH) -> dict[str, Tensor]:
    """Token ids, labels of which some are ignored, and a mask of padding."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(1, CLASSES, (rows, length), generator=draw)
    labels = torch.where(torch.rand(ids.shape, generator=draw) < 0.3, -100, ids)
    labels[0, 0], labels[-1, -1] = ids[0, 0], ids[-1, -1]
    mask = torch.arange(length) < torch.tensor([[max(1, length // (1 + row))] for row in range(rows)])
    return {"ids": ids, "labels": labels, "mask": mask}


# What a line may be: {x}, {y} are values, {a}, {b}, {k}, {d}, {c} numbers; the conditions are on values.

_STATES: dict[str, tuple[str, ...]] = {
    # of any value
    "any": (
        *("torch.tanh({x})", "{x}.sigmoid()", "{x}.sin()", "F.gelu({x})", "F.softplus({x})", "{x} * {c}", "-{x}"),
        *("{x}.detach()", "{x}.abs()", "{x}.clamp(-0.4, 0.9)", "F.relu({x})", "{x}.tanh().exp()", "{x} / S", "1 - {x}"),
        *("{x}.softmax({d})", "{x}.log_softmax({d})", "{x}.cumsum({d})", "{x}.flip({d})", "{x}.roll({a}, {d})"),
        *("{x}.mean({d}, keepdim=True)", "{x}.sum({d})", "{x}.amax({d})", "{x}.logsumexp({d})", "{x}.std({d})"),
        *("{x} - {x}.mean({d}, keepdim=True)", "{x} / (1 + {x}.norm(dim={d}, keepdim=True))", "{x}.var({d})"),
        *("F.normalize({x}, dim={d})", "{x}.sort({d})[0]", "{x}.narrow({d}, {a}, {x}.shape[{d}] - {b} - {a})"),
        *("torch.cat([{x}, {x}.cos()], {d})", "torch.stack([{x}, {x}.sin()], {d})", "{x}.chunk(2, {d})[{i}]"),
        *(
            "{x}.topk(2, {d})[0]",
            "{x}.select({d}, {a})",
            "{x}.select({d}, -{a})",
            "{x}.diff(dim={d})",
            "{x}.cummax({d})[0]",
        ),
        *("{x}.unsqueeze({d})", "torch.where({x} > 0, {x}, {x} * 0.1)", "{x}.clone()", "{x}.contiguous()", "{x}.mT"),
        *(
            "F.pad({x}, ({a}, {b}))",
            "{x}.repeat_interleave(2, {d})",
            "{x}.masked_fill({x} > 0.5, 0.25)",
            "{x}.prod({d})",
        ),
        *(
            "F.layer_norm({x}, {x}.shape[-1:])",
            "{x}.flatten(0, 1)",
            "{x}.flatten(1)",
            "{x}.reshape(B, -1)",
            "{x}[None]",
        ),
        *(
            "{x}.transpose(0, 1)",
            "{x}.amin({d}, keepdim=True)",
            "{x}.median({d})[0]",
            "F.glu(torch.cat([{x}, {x}], -1))",
        ),
        *("{x}.squeeze({d})", "{x}.expand(2, *{x}.shape)", "{x}.tril()", "{x}.cumprod({d})"),
    ),
    # of rows of some tokens, n of them
    "rows": (
        *("{x}[:, {a}:]", "{x}[:, :-{a}]", "{x}[:, {a}:-{b}]", "{x}[:, -{k}:]", "{x}[:, :{k}]", "{x}[:, {a}::2]"),
        *("{x}[:, {a}:]", "{x}[:, :-{a}]", "{x}[:, {a}:-{b}]", "{x}[:, -{k}:]", "{x}[:, :{k}]", "{x}[:, -{k}:-{a}]"),
        *("{x}[:, 1:] - {x}[:, :-1]", "{x}[:, {a}:] * {x}[:, :-{a}]", "{x}[:, -1]", "{x}[:, {a}]", "{x}[:, -{a}:]"),
        "torch.cat([{x}[:, -{a}:], {x}[:, :-{a}]], 1)",
        "torch.cat([torch.zeros_like({x}[:, :{a}]), {x}[:, :-{a}]], 1)",
        *("{x}[torch.arange(B), mask.sum(1).clamp(max={x}.shape[1]) - 1]", "{x}[torch.arange(B), -{a}]"),
        "{x}[torch.arange(B)[:, None], torch.stack([ids.argmax(1), ids.argmin(1)], 1).clamp(max={x}.shape[1] - 1)]",
        "{x}.index_select(1, torch.tensor([{a}, 0, {b}]))",
        "{x}.gather(1, ids[:, :2, None].expand(-1, -1, {x}.shape[2]) % {x}.shape[1])",
        "torch.take_along_dim({x}, (ids.argmax(1) % {x}.shape[1])[:, None, None], 1)",
        "torch.cat([p.tanh() * 2 for p in {x}.split({k}, 1)], 1)",
        "torch.cat([p.softmax(-1) + 1 for p in {x}.chunk({a} + 1, 1)], 1)",
        "torch.cat([p.sin() for p in {x}.split([{a}, {x}.shape[1] - {a}], 1)], 1)",
        "torch.stack([p.exp().mean((1, 2)) for p in {x}.tanh().split({k}, 1)], 1)",
        "sum({x}[:, i:i + {a}].sum(1) * (i + 1) for i in range(0, 5, {a}))",
        "torch.cat([{x}[:, :{a}] * 2, {x}[:, {a}:]], 1)",
        *("torch.cat([{x}, {x}[:, :{a}]], 1)", "torch.cat([m.gate.expand(B, {a}, -1), {x}], 1)"),
        *("{x}.unfold(1, 3, 1).sum(-1)", "{x}.reshape(-1, {x}.shape[-1])", "{x}.transpose(0, 1)[{a}:]"),
        *("{x}.flatten(0, 1)[{a}:]", "{x}.flatten(0, 1)[-{k}:]", "{x}.flatten(0, 1).cumsum(0)", "{x}.view(-1)"),
        "{x}.flatten(0, 1).sin().unflatten(0, (B, -1))",
        "{x}.reshape(-1, {x}.shape[-1]).log_softmax(-1).view(B, -1, {x}.shape[-1])",
        "{x}.flatten(0, 1)[{a}:-{b}].cos()",
        *("torch.einsum('bsd,bse->bde', {x}, {x}.sin())", "torch.einsum('bsd,btd->bst', {x}, {x}) / S", "{x}.mT @ {x}"),
        *(
            "({x} @ {x}.mT).softmax(-1) @ {x}",
            "torch.einsum('bsd,bse->bse', {x}, {x})",
            "torch.bmm({x}, {x}.mT).tanh()",
        ),
        "{x} * m.table[: {x}.shape[1], None]",
        "{x}.scatter(1, (ids[:, :1, None] % {x}.shape[1]).expand(-1, -1, {x}.shape[2]), 0.5)",
        "torch.zeros_like({x}).scatter_add(1, (ids[:, :{x}.shape[1], None] % {x}.shape[1]).expand_as({x}), {x})",
        "{x}.index_put((torch.arange(B), ids.argmax(1) % {x}.shape[1]), {x}.mean(1))",
        "torch.zeros(B, CLS, {x}.shape[2]).double().index_add(1, ids[0, : {x}.shape[1]], {x})",
        "{x}.new_zeros(B, CLS, {x}.shape[2]).scatter_add(1, ids[:, : {x}.shape[1], None].expand_as({x}), {x})",
        "F.one_hot({x}.argmax(1), {x}.shape[1]).double().mean(1)",
        "{x} * ({x}.argmax(-1, keepdim=True) % 3)",
        "{x} * ({x} > 0).sum(1, keepdim=True)",
        "{x}[:, :, :1] * {x}",
        "{x}.argsort(1).double() / S",
        "{x}[:, torch.arange({x}.shape[1] - 1, -1, -1)]",
        "torch.stack({x}.unbind(1)[:3], 1)",
        "F.conv1d({x}.mT, torch.ones({x}.shape[2], 1, 3).double(), groups={x}.shape[2]).mT",
        "F.avg_pool1d({x}.mT, 2).mT",
    ),
    # of rows of all tokens
    "all": (
        *("{x} * mask.unsqueeze(-1)", "{x}.masked_fill(~mask[:, :, None], 0.0)", "{x} + m.embed(ids)[:, :, :1]"),
        *(
            "torch.where(mask[:, :, None], {x}, m.gate[:1])",
            "({x} * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)",
        ),
        *(
            "{x} * (ids % 3)[:, :, None]",
            "{x} * (torch.arange(S) / S)[:, None]",
            "{x} * (labels != -100).unsqueeze(-1)",
        ),
        *(
            "{x} + m.table[ids][:, :, None]",
            "{x} * mask.cumsum(1)[:, :, None] / S",
            "{x}.gather(2, (ids % 3)[:, :, None])",
        ),
        "{x}[:, {a}:] * ids[:, :-{a}, None] / 9",
        "{x}[:, :-{a}] * mask[:, {a}:, None]",
        "{x}[:, {a}:].gather(2, (ids[:, {a}:] % 5)[:, :, None]).squeeze(2)",
    ),
    # of states of some tokens, 6 features each
    "states": (
        *("m.up({x})", "m.up({x}).tanh() + {x}", "m.narrow(F.gelu(m.wide({x})))", "m.norm({x})", "{x} * m.gate"),
        *("m.head({x})", "m.head({x})", "m.head({x}[:, {a}:])", "m.head({x})[:, :-{a}]", "m.head({x})[:, -{k}:]"),
        *("m.score({x}).squeeze(-1)", "{x} @ m.embed.weight.T", "m.conv({x}.mT).mT", "m.depth({x}.mT)[..., :-2].mT"),
        *("attended({x}, {x}, is_causal=True)", "attended({x}, {x})", "attended({x}[:, {a}:], {x})", "flash({x})"),
        *("flash({x}, causal=True)", "flash({x}, causal=True, window_size=(3, 0))", "flash({x}, softcap=2.0)"),
        *("flash({x}, causal=True)[:, {a}:]", "attended({x}[:, {a}:], {x}[:, {a}:], is_causal=True)"),
        *(
            "own({x}, m.up.weight)",
            "fills({x})",
            "clips({x})",
            "fills({x}[:, {a}:])",
            "own({x}[:, :-{a}], m.up.weight)",
        ),
        *(
            "written(m, m.up({x}), m.key({x}), m.value({x}), mask, {how})",
            "m.out(written(m, {x}, {x}, {x}, mask, {how}))",
        ),
        "m.out(written(m, m.up({x}), m.key({x}), m.value({x}), mask, {how}))",
        "written(m, m.up({x}[:, {a}:]), m.key({x}), m.value({x}), mask, {how})",
        *("twice({x}, m.gate)[0]", "twice({x}, m.gate)[1] * {x}", "sum(twice({x}[:, {a}:], m.gate))", "mixed(m, {x})"),
        *("mixed(m, {x}, 1)", "mixed(m, {x}[:, {a}:])", "m.tied({x})", "F.linear({x}, m.embed.weight)"),
        *("F.dropout({x}, 0.3)", "F.dropout(m.up({x}), 0.3)", "m.half({x}.mT).mT", "m.twofold({x}.mT).mT"),
        *("m.thinner(m.wider({x}.mT).relu()).mT", "m.conv({x}.mT)[..., {a}:].mT", "m.depth({x}.mT).mT"),
        *("m.thinner(F.glu(m.wider({x}.mT), 1).repeat(1, 2, 1)).mT", "m.conv(F.pad({x}.mT, ({a}, 1)))[..., :-{a}].mT"),
        *("m.paint(m.draw({x}[:, None]).relu())[:, 0]", "m.paint(m.draw({x}.mT[:, None]).sin())[:, 0].mT"),
        "m.depth({x}.mT)[..., :{x}.shape[1]].mT * m.up({x})",
        "F.conv1d({x}.mT, m.conv.weight, m.gate, {a}, {b}, {i} + 1).mT",
        "F.conv1d({x}.mT, m.depth.weight, None, {i} + 1, {b}, {a}, 6).mT",
        "F.conv2d({x}[:, None], m.draw.weight, None, ({a}, 1), ({b}, {i}), ({i} + 1, 1)).sum(1)",
        *("checkpoint(m.up, {x}, use_reentrant=False)", "torch.einsum('bsd,ed->bse', {x}, m.up.weight)", "m.wide({x})"),
        *(
            "{x}.unflatten(-1, (2, 3)).transpose(1, 2)",
            "F.rms_norm({x}, (6,), m.gate)",
            "m.up({x}).unflatten(-1, (3, 2))",
        ),
        "torch.cat([m.head(p) for p in {x}.split({k}, 1)], 1)",
        "torch.cat([m.head(p).logsumexp(-1) for p in {x}.chunk(3, 1)], 1)",
        "torch.cat([m.up(p).relu() for p in {x}.split({k}, 1)], 1)",
        "torch.cat([m.up({x}[:, i:i + 4]) for i in range(0, S, 4)], 1)",
        "m.up({x}.flatten(0, 1)).view_as({x})",
        "m.up({x}.flatten(0, 1))[{a}:]",
        "m.up({x}.transpose(0, 1))[{a}:]",
    ),
    "states of all": (
        *("eager({x}, mask)", "attended({x}, {x}, attn_mask=mask[:, None, None, :])", "{x} + m.pos[:S]"),
        "attended({x}, {x}, attn_mask=torch.ones(S, S, dtype=torch.bool).tril())",
    ),
    # of rows of a batch and its tokens in one dimension
    "flat": (
        *("{x}.view(B, -1, {x}.shape[-1])", "{x}[{a}:]", "{x}[:-{k}]", "{x}.split(S)[0]", "{x}.unflatten(0, (B, -1))"),
        *(
            "{x}.T @ {x}",
            "{x}.index_select(0, torch.tensor([{a}, {b}]))",
            "{x}[ids[:, 0]]",
            "{x}.view(B, -1, 6)[:, {a}:]",
        ),
        *(
            "{x} * mask.flatten().unsqueeze(-1)",
            "{x}.gather(1, (ids.flatten() % 6)[:, None])",
            "{x}[::2]",
            "{x}.roll(1, 0)",
        ),
        "torch.cat([p.tanh() for p in {x}.split({k})])",
        "{x}.reshape(B, S, -1)",
    ),
    "flat states": (
        "m.tied({x})",
        "m.up({x})",
        "m.head({x})",
        "m.head({x})[{a}:]",
        "m.norm({x})",
        "{x} * m.gate",
        "m.wide({x})",
    ),
    # of two values of one shape
    "two": (
        *("{x} + {y}", "{x} + {y}", "{x} - {y}", "{x} * {y}", "torch.maximum({x}, {y})", "{x} / (1 + {y}.square())"),
        *("torch.cat([{x}, {y}], {d})", "torch.stack([{x}, {y}], {d})", "torch.where({x} > {y}, {x}, {y} * 2)"),
        *(
            "torch.lerp({x}, {y}, 0.3)",
            "{x} * {y}.detach()",
            "{x}.addcmul({y}, {y})",
            "{x} * {y}.sum({d}, keepdim=True)",
        ),
        *("torch.cat([{x}, {y}], 1)", "{x} * {y}.mean()", "{x} + {y}.softmax({d})", "{x} @ {y}.mT", "{x}.mT @ {y}"),
        "torch.einsum('bsd,btd->bst', {x}, {y})",
        "{x} * {y}.sum() / (B * S)",
    ),
    # of two values of two and three dimensions, or that broadcast
    "others": (
        *("{x} + {y}", "{x} * {y}", "{x} - {y}", "{x} * {y}.unsqueeze(1)", "{x} + {y}.unsqueeze(-1)", "{x} @ {y}"),
        *(
            "torch.cat([{x}, {y}], {d})",
            "torch.cat([{x}, {y}], 1)",
            "{x} * {y}[:, :1]",
            "{x}.mT @ {y}",
            "attended({x}, {y})",
        ),
        *("{x} * {y}.mean(1, keepdim=True)", "{x} * {y}.unsqueeze(1)", "{x} * {y}[..., None]"),
    ),
}
_WRITES: tuple[str, ...] = (
    "{v} = {x}.clone()\n{v}[:, {a}:-{b}] = {c}",
    "{v} = {x}.clone()\n{v}[:, 0] = 0.5",
    "{v} = {x} * 1\n{v} += 1",
    "{v} = {x}.sin()\n{v}.mul_(0.5)",
    "{v} = {x} * 2\n{v}[:, :{a}] *= 3",
    "{v} = torch.zeros_like({x})\n{v}[:, {a}:] = {x}[:, :-{a}]",
    "{v} = torch.empty_like({x})\n{v}.copy_({x})",
    "{v} = torch.empty_like({x})\nfor i in range(0, S, 4):\n    {v}[:, i:i + 4] = {x}[:, i:i + 4].tanh()",
    "{v} = {x}.clone()\n{v}.masked_fill_({x} > 0.3, 0.1)",
    "{v} = {x} * 1\n{v}[mask] = 0.5",
    "{v} = {x} * 1\n{v}.add_({x}.mean())",
    "with torch.no_grad():\n    {v}_ = {x}.sin()\n{v} = {v}_ * {x}",
    "{v}_, {v} = {x}.chunk(2, {d})\n{v} = {v} * {v}_",
    "{v}_, {v}, _ = {x}.split(2, -1)\n{v} = {v} * {v}_.sigmoid()",
    "{v} = {x}[:, {a}:].clone()\n{v}.relu_()",
    "{v} = {x}.cumsum(1)\n{v}[:, -1] = {x}[:, 0]",
)
_LOSSES: tuple[str, ...] = (
    *("{x}.mean()", "{x}.square().mean()", "{x}.sum() / S", "{x}.square().sum().sqrt()", "{x}.exp().mean().log()"),
    *("{x}.abs().mean()", "{x}.mean().square()", "({x}.mean(0) * {x}.sum(0)).mean()", "{x}.std()", "{x}.norm()"),
    *("{x}[:, {a}:].square().mean()", "{x}[:, -{k}:].mean()", "{x}[:, 0].square().sum()", "{x}[:, -1].mean()"),
    *("F.mse_loss({x}, {x}.detach().roll(1, 0))", "F.smooth_l1_loss({x}, {x}.detach() * 2)", "{x}.logsumexp(1).mean()"),
    *("{x}.amax(1).mean()", "{x}.topk(2, 1)[0].sum()", "{x}.sum(1).square().mean()", "{x}.sum() * {x}.mean()"),
    *(
        "F.binary_cross_entropy_with_logits({x}, ({x}.detach() > 0).double())",
        "{x}.flatten().logsumexp(0)",
        "{x}.max()",
    ),
    *("torch.stack([p.mean() for p in {x}.split({k}, 1)]).sum()", "({x} * {x}.softmax(1)).sum()", "{x}.var(1).mean()"),
)
_LOSSES_OF_LOGITS: tuple[str, ...] = (
    "F.cross_entropy({x}.flatten(0, 1), labels.flatten())",
    "F.cross_entropy({x}.mT, labels)",
    "F.cross_entropy({x}.mT, labels, reduction='none').square().mean()",
    "F.cross_entropy({x}[:, :-1].flatten(0, 1), labels[:, 1:].flatten())",
    "F.cross_entropy({x}[:, :-1].mT, ids[:, 1:], label_smoothing=0.1)",
    "F.cross_entropy({x}[:, -{k}:].flatten(0, 1), ids[:, -{k}:].flatten(), reduction='sum')",
    "F.nll_loss({x}.log_softmax(-1).flatten(0, 1), labels.flatten())",
    "-({x}.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1) * mask).sum() / mask.sum()",
    "-{x}[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[:, -{k}:].mean()",
    "-({x}.softmax(-1) * {x}.log_softmax(-1)).sum(-1)[:, :-{a}].mean()",
    "sum(F.cross_entropy(p.mT, t, reduction='sum') for p, t in zip({x}.split({k}, 1), ids.split({k}, 1)))",
    "F.kl_div({x}.log_softmax(-1), {x}.detach().roll(1, 1).softmax(-1), reduction='batchmean')",
    "({x}.argmax(-1) == ids).sum() / S * {x}.mean()",
    "F.cross_entropy({x}[torch.arange(B), mask.sum(1) - 1], ids[:, 0])",
    "F.cross_entropy({x}.flatten(0, 1), labels.flatten(), reduction='sum') / (labels != -100).sum()",
    "F.cross_entropy({x}[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)",
    "({x}.logsumexp(-1) - {x}.gather(-1, ids[..., None]).squeeze(-1)).mean() + {x}.logsumexp(-1).square().mean()",
    "-F.logsigmoid(({x}.log_softmax(-1).gather(-1, ids[:, :, None]).squeeze(-1) * mask).sum(-1)).mean()",
)

Size = tuple[int, int]
"""How long a dimension is at both lengths."""


@dataclass(frozen=True)
class Program:
    """Lines, each the code that makes one value, and summands of the loss."""

    lines: tuple[tuple[str, str], ...]
    losses: tuple[str, ...]
    returned: tuple[str, ...] = ()

    @staticmethod
    def of(text: str) -> Program:
        """A program that is written down: assignments of one line, and what it returns."""
        *body, last = text.splitlines()
        split = (line.partition(" = ") for line in body)
        lines = tuple((name, f"{{v}} = {code}") for name, _, code in split)
        return Program(lines, (last.removeprefix("return "),))

    @property
    def text(self) -> str:
        body = [code.replace("{v}", name) for name, code in self._needed()]
        out = " + ".join(self.losses)
        return "\n".join([*body, f"return {', '.join([out, *self.returned])}"])

    def _needed(self) -> list[tuple[str, str]]:
        """The lines that a loss reads."""
        wanted = set(_names(" ".join((*self.losses, *self.returned))))
        kept = list[tuple[str, str]]()
        for name, code in reversed(self.lines):
            if name in wanted:
                wanted |= set(_names(code))
                kept.insert(0, (name, code))
        return kept

    def smaller(self) -> Iterator[Program]:
        """Programs that have a line, a loss or a result less, or a value in the place of one that is made of it."""
        if self.returned:
            yield replace(self, returned=())
        for i in range(len(self.losses) if len(self.losses) > 1 else 0):
            yield replace(self, losses=(*self.losses[:i], *self.losses[i + 1 :]))
        lines = self._needed()
        for i, (name, code) in reversed(list(enumerate(lines))):
            for other in dict.fromkeys((*_names(code), "h")):
                swapped = [(n, re.sub(rf"\b{name}\b", other, c)) for n, c in lines[i + 1 :]]
                losses = tuple(re.sub(rf"\b{name}\b", other, loss) for loss in self.losses)
                returned = tuple(re.sub(rf"\b{name}\b", other, out) for out in self.returned)
                yield Program((*lines[:i], *swapped), losses, returned)
        for simple in ("{x}.square().mean()", "{x}.exp().sum()"):
            for i, loss in enumerate(self.losses):
                for name in _names(loss):
                    made = simple.format(x=name)
                    if made != loss and loss not in ("h.square().mean()", f"{name}.exp().sum()"):
                        yield replace(self, losses=(*self.losses[:i], made, *self.losses[i + 1 :]))


def _names(code: str) -> list[str]:
    return re.findall(r"\b(?:v\d+|h)\b", code)


class Builder:
    """A program that grows line by line, with its values at both lengths."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.lines = list[tuple[str, str]]()
        self.model = Model("return h.mean()").requires_grad_(False)
        self.values: list[dict[str, Tensor]] = []
        self._spaces = list[dict[str, Any]]()
        for length in LENGTHS:
            given = batch(length)
            h = torch.tanh(self.model.up(self.model.embed(given["ids"]) + self.model.pos[:length]))
            self._spaces.append({**SPACE, **given, "m": self.model, "h": h, "B": BATCH, "S": length})
            self.values.append({"h": h})

    def program(self, num_lines: int) -> Program:
        tries = 0
        while len(self.lines) < num_lines and tries < 20 * num_lines:
            tries += 1
            self._grow()
        names = [name for name, _ in self.lines] or ["h"]
        losses, unread = list[str](), [n for n in names if not any(n in _names(code) for _, code in self.lines)]
        num_losses, tries = self.rng.randint(1, 5), 0
        while len(losses) < num_losses and tries < 50:
            tries += 1
            x = unread.pop(self.rng.randrange(len(unread))) if unread else self.rng.choice(names)
            is_logits = self.values[0][x].dim() == 3 and self.values[0][x].shape[-1] == CLASSES
            loss = self._filled(
                self.rng.choice(_LOSSES_OF_LOGITS if is_logits and self.rng.random() < 0.8 else _LOSSES), x
            )
            found = self._run(f"loss = {loss}", "loss")
            if found is not None and all(value.dim() == 0 for value in found):
                losses.append(loss if self.rng.random() < 0.6 else f"{self.rng.choice((0.3, 2, 5))} * {loss}")
        returned = tuple(self.rng.sample(names, 1)) if self.rng.random() < 0.2 else ()
        return Program(tuple(self.lines), tuple(losses), returned)

    def _grow(self) -> None:
        rng, name = self.rng, f"v{len(self.lines) + 1}"
        x = self._pick()
        if rng.random() < 0.08:
            code = self._filled(rng.choice(_WRITES), x)
        else:
            kinds = self._kinds(x)
            kind = rng.choice(kinds)
            y = self._other(x, like=kind == "two")
            code = "{v} = " + self._filled(rng.choice(_STATES[kind]), x, y)
        found = self._run(code.replace("{v}", name), name)
        if found is not None:
            self.lines.append((name, code))
            for values, value in zip(self.values, found, strict=True):
                values[name] = value

    def _kinds(self, x: str) -> list[str]:
        first, second = self._sizes(x)
        kinds = ["any", "two", "others"]
        if len(first) >= 3 and first[0] == BATCH:
            kinds += ["rows"] * 5
            if first[1] == LENGTHS[0] and second[1] == LENGTHS[1]:
                kinds += ["all"] * 2
                kinds += ["states of all"] * (len(first) == 3 and first[2] == WIDTH)
            kinds += ["states"] * (4 * (len(first) == 3 and first[2] == WIDTH))
        if len(first) == 2 and first[0] > BATCH and first[1] > 1:
            kinds += ["flat"] * 4 + ["flat states"] * (2 * (first[1] == WIDTH))
        return kinds

    def _sizes(self, x: str) -> tuple[torch.Size, torch.Size]:
        return self.values[0][x].shape, self.values[1][x].shape

    def _pick(self) -> str:
        names = ["h", *(name for name, _ in self.lines)]
        x = self.rng.choice(names[-3:] if self.rng.random() < 0.7 else names)
        return x if self.values[0][x].dim() > 1 or self.rng.random() < 0.2 else self.rng.choice(names)

    def _other(self, x: str, *, like: bool) -> str:
        names = ["h", *(name for name, _ in self.lines)]
        fitting = [name for name in names if not like or self._sizes(name) == self._sizes(x)]
        return self.rng.choice(fitting)

    def _filled(self, template: str, x: str, y: str = "h") -> str:
        rng, num_dims = self.rng, max(1, self.values[0][x].dim())
        d = 1 if num_dims > 1 and rng.random() < 0.6 else rng.randrange(num_dims)
        numbers = {"a": rng.randint(1, 3), "b": rng.randint(1, 3), "k": rng.randint(1, 9), "i": rng.randint(0, 1)}
        how = ", ".join(map(repr, rng.sample(SPELLINGS, rng.randint(1, 4))))
        for key, value in {**numbers, "x": x, "y": y, "d": d, "c": rng.choice((0.5, 2.0, -1.5)), "how": how}.items():
            template = template.replace("{" + key + "}", str(value))
        return template.replace("CLS", str(CLASSES))

    def _run(self, code: str, name: str) -> list[Tensor] | None:
        """What the code makes at both lengths; None if that does not run, or is no small value of some entries."""
        found = list[Tensor]()
        for space, values in zip(self._spaces, self.values, strict=True):
            inner = {**space, **values}
            try:
                torch.manual_seed(0)
                with torch.no_grad():
                    exec(code, inner)  # the text is made here
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
                return None
            value = inner[name]
            if not isinstance(value, Tensor) or value.dtype != torch.float64 or not 0 < value.numel() < 5000:
                return None
            if not value.isfinite().all() or value.abs().max() > 100 or value.dim() > 5:
                return None
            found.append(value)
        return found


def random_program(seed: int) -> Program:
    """The program of a seed: 1 to 14 lines, and a loss."""
    rng = Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of lines that are tried
        return Builder(rng).program(rng.randint(1, 14))
