"""Tiny random models of the families that AutoSP must be exact on, and the kinds of batches that break others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers

VOCAB, BATCH, LENGTH = 61, 2, 16
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48}
_SMALL = {"vocab_size": VOCAB, **_WIDTHS, "num_hidden_layers": 2, "max_position_embeddings": 64}
_DECODER = {**_SMALL, "num_attention_heads": 4, "use_cache": False}


def _llama(**options: Any) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER, **options))


def _qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_DECODER, num_key_value_heads=2, head_dim=8))


def _mistral() -> torch.nn.Module:
    config = transformers.MistralConfig(**_DECODER, num_key_value_heads=2, sliding_window=5)
    return transformers.MistralForCausalLM(config)


def _gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # the default is None, on which transformers logs a warning, which breaks the graph
    return model


def _bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        **_SMALL, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, use_cache=False
    )
    return transformers.BertForMaskedLM(config)


def _lfm2() -> torch.nn.Module:
    """A short convolution along the sequence, then attention."""
    config = transformers.Lfm2Config(**_DECODER, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    return transformers.Lfm2ForCausalLM(config)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama_gqa": lambda: _llama(num_key_value_heads=2),
    "llama_mha": lambda: _llama(num_key_value_heads=4),
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gpt2": _gpt2,
    "bert": _bert,
    "lfm2": _lfm2,
}
INPUTS = ("plain", "positions", "ones_mask", "right_padding", "uneven_labels", "labels_on_one_rank", "num_items")


@cache
def _prototype(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def build(name: str, *, checkpointing: bool = False, layers: int = 2) -> torch.nn.Module:
    """A fresh float64 model; the same weights every time. Layers after the second are copies of it."""
    model = copy.deepcopy(_prototype(name))
    for stack in (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        for _ in range(layers - max(len(stack), 2)):
            stack.append(copy.deepcopy(stack[-1], {id(model.config): model.config}))
        del stack[layers:]
    if layers > 2:  # models run as many layers as their configuration says
        model.config.num_hidden_layers = layers
        if types := getattr(model.config, "layer_types", None):
            model.config.layer_types = [*types, *types[-1:] * (layers - len(types))]
    if checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers is renaming it
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def with_dropout(model: torch.nn.Module, p: float) -> torch.nn.Module:
    """The model with eager attention and every dropout, that of attention too, at `p`."""
    model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = p
    return model


def batch(model: str, kind: str, *, length: int = LENGTH, seed: int = 1) -> dict[str, Any]:
    """One batch of `kind`, as a user would pass it to the model."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (BATCH, length), generator=generator)
    labels = ids.clone()
    made: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if model == "bert":
        labels[torch.rand(labels.shape, generator=generator) > 0.5] = -100
    if kind == "positions":
        made["position_ids"] = torch.arange(length).expand(BATCH, length).contiguous()
    elif kind == "ones_mask":
        made["attention_mask"] = torch.ones(BATCH, length, dtype=torch.long)
    elif kind == "right_padding":
        mask = torch.ones(BATCH, length, dtype=torch.long)
        mask[0, length - 3 :] = 0
        mask[1, length // 4 :] = 0
        ids[mask == 0] = 0
        labels[mask == 0] = -100
        made["attention_mask"] = mask
    elif kind == "uneven_labels":
        labels[0, 2 : length - 1] = -100
        labels[1, : length // 3] = -100
    elif kind == "labels_on_one_rank":
        labels[:] = -100
        labels[:, 1:4] = ids[:, 1:4]
    elif kind == "num_items":
        labels[1, length // 2 :] = -100
        made["num_items_in_batch"] = (labels[:, 1:] != -100).sum()
    return made
