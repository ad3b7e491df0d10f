"""Every causal language model of the installed transformers, at a size of a few thousand parameters.

`tiny_config` sets the fields that most configurations share; `OVERRIDES` says what a class needs beside them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

VOCAB, BATCH, LENGTH = 64, 2, 16
MOST_PARAMETERS = 2_000_000

_SIZES: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32),
    "hidden_size_global": 32,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "d_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "feed_forward_size", "dim_ff", "dff", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    # depths
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks"), 2),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 4),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_head", "dim_head", "kv_channels"), 8),
    # low-rank attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    # lengths
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64),
    **dict.fromkeys(("max_target_positions", "max_source_positions"), 64),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_chunk_size"), 6),
    # state spaces
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "vocab_size": VOCAB,
    "type_vocab_size": 2,
    "use_cache": False,
    "use_mamba_kernels": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "query_pre_attn_scalar": 8,
    "is_decoder": True,
    "sep_token_id": 3,
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A tiny configuration inside another one."""

    config_class: str
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)


_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_INKLING2: dict[str, Any] = {
    "unpadded_vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "n_layers_per_attn_res_block": 1,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("swa_head_dim", "d_rel", "rel_extent"), 8),
}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_VISION = {"image_size": 16, "patch_size": 4}

OVERRIDES: dict[str, dict[str, Any]] = {
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": VOCAB},
    "CodeGenForCausalLM": {"rotary_dim": 4},
    "CohereCompassForCausalLM": {
        "layer_types": _TWO_KINDS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _TWO_KINDS},
    },
    "CsmDepthDecoderForCausalLM": {"backbone_hidden_size": 32, "num_codebooks": LENGTH},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "FuyuForCausalLM": {"patch_size": 4, "image_size": 12, "text_config": Part("PersimmonConfig")},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3ForConditionalGeneration": {"vision_config": Part("SiglipVisionConfig", _VISION), "mm_tokens_per_image": 4},
    "Gemma3nForCausalLM": {
        **_PER_LAYER,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "layer_types": _TWO_KINDS,
    },
    "Gemma4AssistantForCausalLM": {
        "backbone_hidden_size": 32,
        "text_config": Part("Gemma4TextConfig", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 2}),
    },
    "Gemma4ForCausalLM": {**_PER_LAYER, "global_head_dim": 8, "layer_types": _TWO_KINDS},
    "Gemma4ForConditionalGeneration": {
        "text_config": Part("Gemma4TextConfig", {**_PER_LAYER, "global_head_dim": 8, "layer_types": _TWO_KINDS}),
        "vision_config": Part("Gemma4VisionConfig", {"position_embedding_size": 64}),
    },
    "Gemma4UnifiedAssistantForCausalLM": {
        "backbone_hidden_size": 32,
        "text_config": Part("Gemma4UnifiedTextConfig", {"num_kv_shared_layers": 2}),
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "text_config": Part("Gemma4UnifiedTextConfig", {"global_head_dim": 8, "layer_types": _TWO_KINDS}),
        "vision_config": Part("Gemma4UnifiedVisionConfig", {"mm_embed_dim": 32, "mm_posemb_size": 16}),
    },
    "GitForCausalLM": {"vision_config": _VISION},
    "GotOcr2ForConditionalGeneration": {
        "text_config": Part("Qwen2Config"),
        "vision_config": {
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 64,
            "mlp_dim": 32,
            "global_attn_indexes": [1],
        },
    },
    "Inkling2ForCausalLM": _INKLING2,
    "Inkling2LoopForCausalLM": {
        **_INKLING2,
        "loop_gate_rank": 8,
        "loop_layer_index_start": 1,
        **dict.fromkeys(("loop_layer_index_end", "loop_num_passes"), 2),
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashForCausalLM": {"zero_expert_num": 2, "expert_ffn_hidden_size": 24},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 4},
    "MiMoV2FlashForCausalLM": {"num_key_value_heads": 2},
    "MossTranscribeDiarizeForConditionalGeneration": {"text_config": Part("Qwen3Config")},
    "MusicgenForCausalLM": {"num_codebooks": 2},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 2},
    "NemotronHForCausalLM": {"n_groups": 2},
    "Phi4MultimodalForCausalLM": {
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "crop_size": 16,
        },
    },
    "ReformerModelWithLMHead": {
        "attention_head_size": 8,
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ("local", "lsh"),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "RoCBertForCausalLM": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": VOCAB,
        "shape_embed_dim": 16,
        "shape_vocab_size": VOCAB,
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"]},
    "ZambaForCausalLM": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}


_IMAGES = {"GitForCausalLM": (16, 16)}
"""Height and width of the images that a model cannot do without."""


def names() -> list[str]:
    """Classes that AutoModelForCausalLM knows, and every other `*ForCausalLM` of transformers."""
    found = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    for package in pkgutil.iter_modules(transformers.models.__path__):
        module = importlib.import_module(f"transformers.models.{package.name}")
        found |= {name for name in dir(module) if name.endswith("ForCausalLM") and not name.startswith("AutoModel")}
    return sorted(found)


def model_class(name: str) -> type[transformers.PreTrainedModel]:
    if hasattr(transformers, name):
        return getattr(transformers, name)
    for package in pkgutil.iter_modules(transformers.models.__path__):
        module = importlib.import_module(f"transformers.models.{package.name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise ValueError(f"transformers {transformers.__version__} has no {name}")


def tiny_config(config_class: type, overrides: dict[str, Any] | None = None) -> Any:
    """A configuration of `config_class`, and of the configurations that it is made of, without dropout."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in _SIZES.items() if name in fields}
    values |= {name: 0.0 for name, f in fields.items() if _is_dropout(name) and isinstance(f.default, (int, float))}
    for name in _ABSENT_BY_DEFAULT:
        if name in values and fields[name].default is None:
            del values[name]
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if name in fields and dataclasses.is_dataclass(part):
            values[name] = tiny_config(part).to_dict()
    for name, value in (overrides or {}).items():
        if isinstance(value, Part):
            values[name] = tiny_config(getattr(transformers, value.config_class), value.overrides).to_dict()
        elif isinstance(value, dict) and isinstance(values.get(name), dict):
            values[name] = {**values[name], **value}
        else:
            values[name] = value
    return config_class(**values)


_ABSENT_BY_DEFAULT = ("q_lora_rank", "n_shared_experts", "sliding_window", "forced_eos_token_id")
"""What a model without it is built differently."""


def _is_dropout(name: str) -> bool:
    return any(part in name for part in ("dropout", "pdrop", "layerdrop", "jitter"))


def build(name: str, attention: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The model in training mode; see `enlarge_weights`."""
    torch.manual_seed(0)
    cls = model_class(name)
    overrides = dict(OVERRIDES.get(name, {}))
    config = tiny_config(cls.config_class, overrides)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters: a field of the configuration needs an override")
    model = cls._from_config(config, attn_implementation=attention, dtype=dtype).train()
    if hasattr(config, "_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # grouped_mm has no float64, and eager breaks the graph
    if getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"  # what it falls back to, with a warning that breaks the graph
    enlarge_weights(model)
    return model


def enlarge_weights(model: torch.nn.Module) -> None:
    """Draws all parameters anew, so large that a wrong position shows in the loss."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.15)
            else:
                parameter.add_(noise * 0.1)


def inputs_of(name: str, seed: int = 2) -> dict[str, torch.Tensor]:
    """Token ids [B, S] and labels, of which the rows count unevenly many."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 2 : LENGTH - 3] = -100
    labels[1, : LENGTH // 3] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if name in _IMAGES:
        inputs["pixel_values"] = torch.randn(BATCH, 3, *_IMAGES[name], generator=generator, dtype=torch.float64)
    codebooks = OVERRIDES.get(name, {}).get("num_codebooks")
    if codebooks and codebooks != LENGTH:  # several streams of tokens for one sequence
        streams = torch.randint(4, VOCAB, (BATCH, codebooks, LENGTH), generator=generator)
        inputs["input_ids"] = streams.flatten(0, 1)
        inputs["labels"] = streams.transpose(1, 2).contiguous().masked_fill(labels[..., None] == -100, -100)
    return inputs
