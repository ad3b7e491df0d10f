"""Ways to train one Llama on P ranks with compiled steps: every way is a function that a rank calls to get its step.

    one device                 torch.compile, the whole sequence on every rank
    Ulysses by hand            an attention function registered with transformers, inputs sliced by the caller
    Ulysses by hand, tuned     the same with the model's own checkpointing and a loss in tiles
    DeepSpeed AutoSP           its backend as `deepspeed.compile.init_sp.init_autosp` makes it, where it is installed
    autosp                        ours as it is
    autosp, ranks not compared    compare_ranks=False
    autosp, logits dropped        checkpoint="none", logits="drop"
    autosp, layers checkpointed   checkpoint="attention", logits="drop", tiles of 4 MiB
    autosp, overlapped            the same, and overlap=True
    autosp, MLPs tiled too        as checkpointed, and mlp_tile of 4 MiB
    autosp, all checkpointed      checkpoint="full", logits="drop", tiles of 4 MiB
    autosp, all, MLPs tiled       the same, and mlp_tile of 4 MiB
    autosp, all, small tiles      checkpoint="full", logits="drop", tiles of the loss and of MLPs of 1 MiB
    autosp, ring                  attention="ring"

A step takes whole ids and labels [1, S] and returns the loss, ready for `backward`.
Source of the hand-written way: DeepSpeed-Ulysses (arXiv 2309.14509, section 3).
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
import transformers
from torch.utils.checkpoint import checkpoint

from autosp_rules import autosp

_TILES = 8  # of the tuned way
_TILE_BYTES, _SMALL = 2**22, 2**20
_CHECKPOINTED: dict[str, Any] = {"checkpoint": "attention", "logits": "drop", "loss_tile": _TILE_BYTES}


@dataclass
class Step:
    """A compiled training step, and the seconds that its way took to transform the graph before inductor."""

    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    transform_seconds: Callable[[], float] = field(default=lambda: 0.0)


def llama(layers: int, hidden: int, vocab: int) -> transformers.LlamaConfig:
    """A Llama with grouped queries, sized so that attention, MLP and head weigh as in a large one."""
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        vocab_size=vocab,
        max_position_embeddings=1 << 20,
        use_cache=False,
        attention_dropout=0.0,
    )


def is_installed(way: str) -> bool:
    return way != "DeepSpeed AutoSP" or importlib.util.find_spec("deepspeed") is not None


def _model(config: transformers.LlamaConfig, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention).train()


def _marked(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 1)
    return tensors


def _one_device(config: transformers.LlamaConfig) -> Step:
    compiled = torch.compile(_model(config), fullgraph=True)

    def run(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        _marked(ids, labels)
        return compiled(input_ids=ids, labels=labels).loss

    return Step(run)


def ours(**options: Any) -> Callable[[transformers.LlamaConfig], Step]:
    """AutoSP with these settings; models are made in the dtype of their configuration, on torch's default device."""

    def prepare(config: transformers.LlamaConfig) -> Step:
        backend = autosp(**options)
        compiled = torch.compile(_model(config), backend=backend)

        def run(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            _marked(ids, labels)
            return compiled(input_ids=ids, labels=labels).loss

        return Step(run, lambda: sum(report.seconds for report in backend.reports))

    return prepare


def _all_to_all(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
    """[..] with dimension `scatter` cut over the ranks and dimension `gather` made whole."""
    num_ranks = dist.get_world_size()
    parts = torch.stack(x.chunk(num_ranks, scatter)).contiguous()
    parts = funcol.wait_tensor(funcol.all_to_all_single_autograd(parts, None, None, dist.group.WORLD))
    return torch.cat(parts.unbind(0), gather)


def _ulysses_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """q [B, H, S / P, D], k and v [B, KV, S / P, D] of this rank to [B, S / P, H, D]."""
    q, k, v = (_all_to_all(x, 1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=module.scaling, enable_gqa=True)
    return _all_to_all(out, 2, 1).transpose(1, 2).contiguous(), None


def _shards(ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's ids, shifted labels and positions, and the number of labels on all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    chunks = [x.chunk(num_ranks, 1)[rank].clone() for x in (ids, shifted, positions)]
    return chunks[0], chunks[1], chunks[2], (shifted != -100).sum()


def _ulysses(config: transformers.LlamaConfig) -> Step:
    transformers.AttentionInterface.register("ulysses_by_hand", _ulysses_attention)
    model = _model(config, "ulysses_by_hand")

    def loss_of(ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, position_ids=positions).logits
        total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        return dist.get_world_size() * total / count  # gradients are averaged over the ranks

    compiled = torch.compile(loss_of, fullgraph=True)

    def run(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        *shards, count = _shards(ids, labels)
        return compiled(*_marked(*shards), count)

    return Step(run)


def _ulysses_tuned(config: transformers.LlamaConfig) -> Step:
    transformers.AttentionInterface.register("ulysses_by_hand", _ulysses_attention)
    model = _model(config, "ulysses_by_hand")
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def tile_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(hidden).float(), labels, reduction="sum")

    def loss_of(ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=ids, position_ids=positions).last_hidden_state.flatten(0, 1)
        total = hidden.new_zeros(())
        for part, labels_part in zip(hidden.chunk(_TILES), labels.flatten().chunk(_TILES), strict=True):
            total = total + checkpoint(tile_loss, part, labels_part, use_reentrant=False)
        return dist.get_world_size() * total / count

    compiled = torch.compile(loss_of, fullgraph=True)

    def run(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        *shards, count = _shards(ids, labels)
        return compiled(*_marked(*shards), count)

    return Step(run)


@contextmanager
def _counted(seconds: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)


def _deepspeed(config: transformers.LlamaConfig) -> Step:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    from deepspeed.compile.passes.long_context_checkpointing import register_long_context_checkpointing
    from deepspeed.compile.passes.sp_compile import apply_autosp, prepare_autosp_inputs

    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    register_long_context_checkpointing()
    seconds: list[float] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        with _counted(seconds):
            apply_autosp(gm, inputs, debug=False, sp_size=dist.get_world_size(), dp_size=1)
        return torch._inductor.compile(gm, inputs)

    torch._dynamo.config.recompile_limit = 64  # it compiles every length anew
    config.use_cache = True  # without one, transformers looks for packed documents, which its pass does not compile
    compiled = torch.compile(_model(config), backend=backend, dynamic=True, fullgraph=True)

    def run(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        prepare_autosp_inputs(ids, labels, position_id=positions, attention_mask=None, seq_dim=1)
        return compiled(input_ids=ids, labels=labels, position_ids=positions).loss

    return Step(run, lambda: sum(seconds))


WAYS: dict[str, Callable[[transformers.LlamaConfig], Step]] = {
    "one device": _one_device,
    "Ulysses by hand": _ulysses,
    "Ulysses by hand, tuned": _ulysses_tuned,
    "DeepSpeed AutoSP": _deepspeed,
    "autosp": ours(),
    "autosp, ranks not compared": ours(compare_ranks=False),
    "autosp, logits dropped": ours(checkpoint="none", logits="drop"),
    "autosp, layers checkpointed": ours(**_CHECKPOINTED),
    "autosp, overlapped": ours(**_CHECKPOINTED, overlap=True),
    "autosp, MLPs tiled too": ours(**_CHECKPOINTED, mlp_tile=_TILE_BYTES),
    "autosp, all checkpointed": ours(**{**_CHECKPOINTED, "checkpoint": "full"}),
    "autosp, all, MLPs tiled": ours(**{**_CHECKPOINTED, "checkpoint": "full"}, mlp_tile=_TILE_BYTES),
    "autosp, all, small tiles": ours(checkpoint="full", logits="drop", loss_tile=_SMALL, mlp_tile=_SMALL),
    "autosp, equal layers once": ours(checkpoint="none", logits="drop", regions="once"),
    "autosp, ring": ours(attention="ring"),
}
