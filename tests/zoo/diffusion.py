"""Diffusion transformers of `diffusers`, of images and videos: `make zoo-diffusion`, where it is installed.

Each is built from its configuration at a tiny size, and trained as trainers do: noisy latents, states of a text and
times go in, and the loss is the mean squared error of what comes out against a target.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_outputs import CausalLMOutput

from fxrewrite.spmd import is_same_size
from tests.zoo.models import enlarge_weights
from tests.zoo.others import Other

RANKS = (2, 3, 4)
TIMES = (250.0, 700.0)
"""Of the two rows of a batch."""
FLOW_TIMES = (0.25, 0.7)
"""The same, of models that count time from 0 to 1."""


@dataclass(frozen=True)
class Sizes:
    """Of a batch: a video of `frames` x `height` x `width` patches, and `text` tokens of text."""

    frames: int = 3
    height: int = 3
    width: int = 5
    text: int = 7
    rows: int = len(TIMES)

    @property
    def patches(self) -> int:
        return self.frames * self.height * self.width


Draw: TypeAlias = "Callable[[Sizes], Any]"
"""Makes an argument of a model, or what should come out, for a batch of these sizes."""


@dataclass(frozen=True)
class Diffusion:
    """How a transformer of diffusers is built, and what it is called with: tensors, and settings."""

    config: Mapping[str, Any]
    inputs: Mapping[str, Draw]
    target: Draw | None = None
    """What comes out, if it is not like `hidden_states`."""
    sizes: Sizes = field(default_factory=Sizes)


class Denoiser(nn.Module):
    """A transformer with its loss against a target."""

    def __init__(self, transformer: nn.Module, settings: dict[str, Any]) -> None:
        super().__init__()
        self.transformer, self.settings = transformer, settings

    def forward(self, target: Tensor, **inputs: Tensor) -> CausalLMOutput:
        found = self.transformer(**inputs, **self.settings, return_dict=False)
        found = found[0] if isinstance(found, tuple) else found
        found = torch.stack(found) if isinstance(found, list) else found
        return CausalLMOutput(loss=F.mse_loss(found, target), logits=found)


def is_installed() -> bool:
    return importlib.util.find_spec("diffusers") is not None


def denoiser(name: str, dtype: torch.dtype, sizes: Sizes | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The model of that name in training mode, and one batch for it."""
    import diffusers  # most environments are without it

    made = MODELS[name]
    torch.manual_seed(0)
    transformer = getattr(diffusers, name.partition(" ")[0])(**made.config)
    for module in transformer.modules():
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0  # of labels, which no setting turns off
    sizes = sizes or made.sizes
    inputs = {name: draw(sizes) for name, draw in made.inputs.items()}
    inputs["target"] = made.target(sizes) if made.target else torch.randn(inputs["hidden_states"].shape)
    called = {k: tree_map(lambda leaf: _cast(leaf, dtype), value) for k, value in inputs.items() if _has_tensors(value)}
    settings = {name: value for name, value in inputs.items() if name not in called}
    model = Denoiser(transformer, settings).to(dtype).train()
    enlarge_weights(model)
    return model, called


def other(name: str) -> Other | None:
    """The model of that name as the zoo's other ones; None where it is not of diffusers."""
    if name not in MODELS:
        return None
    return Other(lambda attention, dtype: denoiser(name, dtype)[0], lambda dtype: denoiser(name, dtype)[1])


def sent_by_hand(gm: fx.GraphModule, num_ranks: int) -> int:
    """Bytes that a rank sends forward if each attention within a sequence is Ulysses: four all-to-alls of its chunk.

    So do the plans for context parallelism that diffusers ships, where a model has one. Attention to a text is free.
    Tokens of text whose number depends on data are not counted.
    """
    sent: Any = 0
    for node in gm.graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            values = [arg.meta["example_value"] for arg in (*node.args, *node.kwargs.values()) if hasattr(arg, "meta")]
            query, key, value = values[:3]
            if is_same_size(query.shape[-2], key.shape[-2]):
                sent += sum(each.numel() * each.element_size() for each in (query, key, value, query))
    if isinstance(sent, torch.SymInt):
        sent = int(sent.node.expr.subs(dict.fromkeys(sent.node.expr.free_symbols, 0)))
    return sent * (num_ranks - 1) // num_ranks**2


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _video(channels: int, patch: tuple[int, int, int] = (1, 2, 2)) -> Draw:
    """Latents [B, C, F, H, W] of patches of that many frames, rows and columns."""

    def draw(of: Sizes) -> Tensor:
        return torch.randn(of.rows, channels, *_times(patch, (of.frames, of.height, of.width)))

    return draw


def _image(channels: int, patch: int = 2) -> Draw:
    """Latents [B, C, H, W]; frames are rows of patches as well."""

    def draw(of: Sizes) -> Tensor:
        return torch.randn(of.rows, channels, of.frames * of.height * patch, of.width * patch)

    return draw


def _square(channels: int) -> Draw:
    """Latents [B, C, W, W]."""
    return lambda of: torch.randn(of.rows, channels, of.width * 2, of.width * 2)


def _packed(channels: int) -> Draw:
    return lambda of: torch.randn(of.rows, of.patches, channels)


def _times(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _call(hidden_states: Draw, text: int, **others: Draw) -> dict[str, Draw]:
    """Arguments that nearly all have: latents, states of a text with so many features, times."""
    found = {"hidden_states": hidden_states, "encoder_hidden_states": _of_text(text), "timestep": _times_of(TIMES)}
    return found | others


def _of_text(features: int) -> Draw:
    return lambda of: torch.randn(of.rows, of.text, features)


def _times_of(times: Sequence[float]) -> Draw:
    return lambda of: torch.tensor(times)


def _fixed(value: Any) -> Draw:
    return lambda of: value


def _floats(*shape: int) -> Draw:
    return lambda of: torch.randn(of.rows, *shape)


def _grid(of: Sizes) -> Tensor:
    """Frame, row and column of each patch [S, 3]."""
    return torch.cartesian_prod(*(torch.arange(n) for n in (of.frames, of.height, of.width)))


def _text_mask(dtype: torch.dtype) -> Draw:
    """Which tokens of text there are: all of the first row, fewer of the second."""

    def mask(of: Sizes) -> Tensor:
        lengths = torch.tensor([of.text if row % 2 == 0 else of.text - 2 for row in range(of.rows)])
        return (torch.arange(of.text) < lengths[:, None]).to(dtype)

    return mask


def _size(name: str) -> Draw:
    return lambda of: getattr(of, name)


_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8}
_CHANNELS = {"in_channels": 4, "out_channels": 4}
_WAN = {**_HEADS, **_CHANNELS, "text_dim": 16, "freq_dim": 16, "ffn_dim": 48, "num_layers": 2, "rope_max_seq_len": 32}
_WAN |= {"attention_head_dim": 12, "cross_attn_norm": True}
_FLUX = {**_HEADS, "patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2}
_FLUX |= {"joint_attention_dim": 12, "attention_head_dim": 8, "axes_dims_rope": (2, 2, 4)}
_FLUX_IDS = {"img_ids": lambda of: _grid(of).float(), "txt_ids": lambda of: torch.zeros(of.text, 3)}
_SD3 = {**_HEADS, **_CHANNELS, "sample_size": 32, "patch_size": 2, "num_layers": 3, "caption_projection_dim": 32}
_SD3 |= {"joint_attention_dim": 12, "pooled_projection_dim": 16, "pos_embed_max_size": 24}
_HUNYUAN = {
    **_HEADS,
    **_CHANNELS,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "text_embed_dim": 12,
}
_COG = {**_HEADS, **_CHANNELS, "time_embed_dim": 8, "text_embed_dim": 12, "num_layers": 2, "sample_width": 10}
_COG |= {"sample_height": 6, "sample_frames": 9, "patch_size": 2, "max_text_seq_length": 7}
_PIXART = {**_HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "patch_size": 2, "sample_size": 18}
_PIXART |= {"cross_attention_dim": 32, "caption_channels": 12, "use_additional_conditions": False}
_LTX = {**_HEADS, **_CHANNELS, "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 12}
_SIZES = {"num_frames": _size("frames"), "height": _size("height"), "width": _size("width")}


def _frames_first(channels: int) -> Draw:
    """Latents [B, F, C, H, W]."""
    return lambda of: torch.randn(of.rows, of.frames, channels, of.height * 2, of.width * 2)


def _times_of_patches(of: Sizes) -> Tensor:
    """A time for each patch [B, S], those of the first frame are 0: Wan 2.2 from an image."""
    is_later = torch.arange(of.patches) >= of.height * of.width
    return is_later * torch.tensor(TIMES)[:, None]


MODELS: dict[str, Diffusion] = {
    "WanTransformer3DModel": Diffusion(_WAN, _call(_video(4), 16)),
    "WanTransformer3DModel (times of patches)": Diffusion(_WAN, _call(_video(4), 16, timestep=_times_of_patches)),
    "WanVACETransformer3DModel": Diffusion(
        {**_WAN, "vace_layers": [0], "vace_in_channels": 6},
        _call(_video(4), 16, control_hidden_states=_video(6)),
    ),
    "SkyReelsV2Transformer3DModel": Diffusion(_WAN, _call(_video(4), 16)),
    "HunyuanVideoTransformer3DModel": Diffusion(
        {**_HUNYUAN, "pooled_projection_dim": 6, "guidance_embeds": True, "patch_size": 2, "patch_size_t": 1}
        | {"rope_axes_dim": (2, 2, 4)},
        _call(
            _video(4),
            12,
            encoder_attention_mask=_text_mask(torch.int64),
            pooled_projections=_floats(6),
            guidance=lambda of: torch.full((of.rows,), 1000.0),
        ),
    ),
    "HunyuanVideo15Transformer3DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "num_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 1}
        | {"patch_size_t": 1, "text_embed_dim": 12, "text_embed_2_dim": 10, "image_embed_dim": 6, "target_size": 16}
        | {"rope_axes_dim": (2, 2, 4), "task_type": "t2v"},
        _call(
            _video(4, (1, 1, 1)),
            12,
            encoder_attention_mask=_text_mask(torch.int64),
            encoder_hidden_states_2=_floats(4, 10),
            encoder_attention_mask_2=lambda of: torch.ones(of.rows, 4),
            image_embeds=lambda of: torch.zeros(of.rows, 3, 6),
        ),
    ),
    "HunyuanImageTransformer2DModel": Diffusion(
        {**_HUNYUAN, "patch_size": (2, 2), "rope_axes_dim": (4, 4)},
        _call(_image(4), 12, encoder_attention_mask=_text_mask(torch.int64)),
    ),
    "HunyuanDiT2DModel": Diffusion(
        {**_HEADS, "in_channels": 4, "sample_size": 18, "patch_size": 2, "num_layers": 2, "hidden_size": 32}
        | {"cross_attention_dim": 12, "cross_attention_dim_t5": 8, "pooled_projection_dim": 6, "text_len": 4}
        | {"text_len_t5": 3, "activation_fn": "gelu-approximate"},
        _call(
            _image(4),
            12,
            text_embedding_mask=lambda of: torch.ones(of.rows, of.text),
            encoder_hidden_states_t5=_floats(3, 8),
            text_embedding_mask_t5=lambda of: torch.ones(of.rows, 3),
            image_meta_size=_floats(6),
            style=lambda of: torch.zeros(of.rows, dtype=torch.int64),
            image_rotary_emb=lambda of: (torch.randn(of.patches, 8), torch.randn(of.patches, 8)),
        ),
        _image(8),
        Sizes(text=4),
    ),
    "LTXVideoTransformer3DModel": Diffusion(
        _LTX, _call(_packed(4), 12, encoder_attention_mask=_text_mask(torch.int64), **_SIZES)
    ),
    "LTX2VideoTransformer3DModel": Diffusion(
        {**_LTX, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 4}
        | {"audio_attention_head_dim": 4, "audio_cross_attention_dim": 16, "patch_size": 1, "patch_size_t": 1},
        _call(
            _packed(4),
            12,
            encoder_attention_mask=_text_mask(torch.int64),
            audio_hidden_states=_floats(9, 4),
            audio_encoder_hidden_states=lambda of: torch.randn(of.rows, of.text, 12),
            audio_num_frames=_fixed(9),
            fps=_fixed(25.0),
            **_SIZES,
        ),
    ),
    "CogVideoXTransformer3DModel": Diffusion(_COG, _call(_frames_first(4), 12)),
    "CogVideoXTransformer3DModel (1.5)": Diffusion(
        {**_COG, "patch_size_t": 2, "use_rotary_positional_embeddings": True},
        _call(
            lambda of: torch.randn(of.rows, of.frames * 2, 4, of.height * 2, of.width * 2),
            12,
            image_rotary_emb=lambda of: (torch.randn(of.patches, 8), torch.randn(of.patches, 8)),
        ),
    ),
    "CogView4Transformer2DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "patch_size": 2, "num_layers": 2, "text_embed_dim": 12, "time_embed_dim": 8}
        | {"condition_dim": 4},
        _call(
            _image(4),
            12,
            original_size=_floats(2),
            target_size=_floats(2),
            crop_coords=_floats(2),
        ),
    ),
    "MochiTransformer3DModel": Diffusion(
        {**_HEADS, "in_channels": 4, "patch_size": 2, "num_layers": 2, "pooled_projection_dim": 16}
        | {"text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 16},
        _call(_video(4), 16, encoder_attention_mask=_text_mask(torch.bool)),
    ),
    "AllegroTransformer3DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "num_layers": 2, "cross_attention_dim": 48, "sample_width": 10, "sample_height": 6}
        | {"sample_frames": 3, "caption_channels": 12, "attention_head_dim": 12},
        _call(
            _video(4),
            12,
            encoder_attention_mask=_text_mask(torch.int64),
            attention_mask=lambda of: torch.ones(of.rows, of.frames, of.height * 2, of.width * 2),
            image_rotary_emb=lambda of: _allegro_positions(of),
        ),
    ),
    "LatteTransformer3DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "sample_size": 10, "num_layers": 2, "patch_size": 2, "caption_channels": 12}
        | {"cross_attention_dim": 32, "norm_type": "ada_norm_single", "norm_elementwise_affine": False}
        | {"video_length": 3, "num_embeds_ada_norm": 1000, "activation_fn": "gelu-approximate"},
        _call(lambda of: torch.randn(of.rows, 4, of.frames, of.width * 2, of.width * 2), 12),
    ),
    "CosmosTransformer3DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "attention_head_dim": 12, "num_layers": 2, "mlp_ratio": 2, "text_embed_dim": 12}
        | {"adaln_lora_dim": 4, "max_size": (4, 32, 32), "patch_size": (1, 2, 2), "rope_scale": (2.0, 1.0, 1.0)}
        | {"concat_padding_mask": False, "extra_pos_embed_type": "learnable"},
        _call(_video(4), 12, fps=_fixed(30)),
    ),
    "Kandinsky5Transformer3DModel": Diffusion(
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 12, "in_text_dim2": 6, "time_dim": 16}
        | {"model_dim": 32, "ff_dim": 48, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (2, 2, 4)},
        _call(
            lambda of: torch.randn(of.rows, of.frames, of.height * 2, of.width * 2, 4),
            12,
            pooled_projections=_floats(6),
            text_rope_pos=lambda of: torch.arange(of.text),
            visual_rope_pos=lambda of: tuple(torch.arange(n) for n in (of.frames, of.height, of.width)),
        ),
    ),
    "FluxTransformer2DModel": Diffusion(
        {**_FLUX, "pooled_projection_dim": 16, "guidance_embeds": True},
        _call(
            _packed(4),
            12,
            pooled_projections=_floats(16),
            guidance=lambda of: torch.full((of.rows,), 3.5),
            timestep=_times_of(FLOW_TIMES),
            **_FLUX_IDS,
        ),
    ),
    "Flux2Transformer2DModel": Diffusion(
        {**_FLUX, "axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 16},
        _call(
            _packed(4),
            12,
            guidance=lambda of: torch.full((of.rows,), 3.5),
            timestep=_times_of(FLOW_TIMES),
            img_ids=lambda of: F.pad(_grid(of), (0, 1)),
            txt_ids=lambda of: torch.arange(of.text)[:, None] * torch.tensor([0, 0, 0, 1]),
        ),
    ),
    "ChromaTransformer2DModel": Diffusion(
        {**_FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        _call(
            _packed(4),
            12,
            timestep=_times_of(FLOW_TIMES),
            attention_mask=lambda of: F.pad(_text_mask(torch.bool)(of), (0, of.patches), value=True),
            **_FLUX_IDS,
        ),
    ),
    "BriaTransformer2DModel": Diffusion(
        {**_FLUX, "pooled_projection_dim": None},
        _call(_packed(4), 12, timestep=_times_of(FLOW_TIMES), **_FLUX_IDS),
    ),
    "SD3Transformer2DModel": Diffusion(_SD3, _call(_image(4), 12, pooled_projections=_floats(16))),
    "SD3Transformer2DModel (3.5)": Diffusion(
        {**_SD3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"},
        _call(_image(4), 12, pooled_projections=_floats(16)),
    ),
    "QwenImageTransformer2DModel": Diffusion(
        {**_HEADS, "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 12}
        | {"axes_dims_rope": (2, 2, 4)},
        _call(
            _packed(16),
            12,
            encoder_hidden_states_mask=_text_mask(torch.int64),
            timestep=_times_of(FLOW_TIMES),
            img_shapes=lambda of: [[(of.frames, of.height, of.width)]] * of.rows,
        ),
    ),
    "PixArtTransformer2DModel": Diffusion(
        _PIXART,
        _call(
            _image(4),
            12,
            encoder_attention_mask=_text_mask(torch.int64),
            added_cond_kwargs=_fixed({"resolution": None, "aspect_ratio": None}),
        ),
        _image(8),
    ),
    "DiTTransformer2DModel": Diffusion(
        {**_HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "num_embeds_ada_norm": 8, "patch_size": 2}
        | {
            "sample_size": 10,
            "norm_type": "ada_norm_zero",
            "activation_fn": "gelu-approximate",
            "attention_bias": True,
        },
        {"hidden_states": _square(4), "timestep": _times_of(TIMES), "class_labels": _fixed(torch.tensor([1, 3]))},
        _square(8),
    ),
    "SanaTransformer2DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "num_layers": 2, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8}
        | {"cross_attention_dim": 32, "caption_channels": 12, "sample_size": 18, "patch_size": 1},
        _call(_image(4, 1), 12, encoder_attention_mask=_text_mask(torch.int64)),
    ),
    "SanaVideoTransformer3DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "num_layers": 2, "num_cross_attention_heads": 4, "cross_attention_head_dim": 12}
        | {"attention_head_dim": 12, "cross_attention_dim": 48, "caption_channels": 12, "sample_size": 8}
        | {"patch_size": (1, 2, 2), "rope_max_seq_len": 32, "qk_norm": "rms_norm_across_heads"},
        _call(_video(4), 12, encoder_attention_mask=_text_mask(torch.int64)),
    ),
    "Lumina2Transformer2DModel": Diffusion(
        {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32, "num_layers": 2}
        | {"num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 2, "cap_feat_dim": 12}
        | {"axes_dim_rope": (4, 2, 2), "axes_lens": (64, 64, 64)},
        _call(_image(4), 12, encoder_attention_mask=_text_mask(torch.bool), timestep=_times_of(FLOW_TIMES)),
    ),
    "LuminaNextDiT2DModel": Diffusion(
        {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32, "num_layers": 2}
        | {"num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "cross_attention_dim": 12}
        | {"learn_sigma": False},
        _call(
            _image(4),
            12,
            encoder_mask=_text_mask(torch.bool),
            timestep=_times_of(FLOW_TIMES),
            image_rotary_emb=lambda of: torch.randn(24, 24, 4),
            cross_attention_kwargs=_fixed({}),
        ),
    ),
    "AuraFlowTransformer2DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "sample_size": 18, "patch_size": 2, "num_mmdit_layers": 2, "num_single_dit_layers": 2}
        | {"caption_projection_dim": 32, "joint_attention_dim": 12, "pos_embed_max_size": 324},
        _call(_image(4), 12, timestep=_times_of(FLOW_TIMES)),
    ),
    "HiDreamImageTransformer2DModel": Diffusion(
        {**_HEADS, **_CHANNELS, "patch_size": 2, "num_layers": 2, "num_single_layers": 2, "caption_channels": [12, 12]}
        | {"text_emb_dim": 6, "num_routed_experts": 4, "num_activated_experts": 2, "axes_dims_rope": (4, 2, 2)}
        | {"max_resolution": (24, 24), "llama_layers": (0, 1, 0, 1), "force_inference_output": False},
        {
            "hidden_states": _square(4),
            "timesteps": _times_of(TIMES),
            "encoder_hidden_states_t5": _of_text(12),
            "encoder_hidden_states_llama3": lambda of: torch.randn(2, of.rows, of.text, 12),
            "pooled_embeds": _floats(6),
        },
        lambda of: torch.randn(of.rows, 4, of.width**2, 4),  # in patches, where it trains
    ),
    "PRXTransformer2DModel": Diffusion(
        {"in_channels": 4, "patch_size": 2, "context_in_dim": 12, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 4}
        | {"depth": 2, "axes_dim": [4, 4]},
        _call(_image(4), 12, timestep=_times_of(FLOW_TIMES), attention_mask=_text_mask(torch.bool)),
    ),
    "ZImageTransformer2DModel": Diffusion(
        {"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 32, "n_layers": 2}
        | {"n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "cap_feat_dim": 12, "axes_dims": [4, 2, 2]}
        | {"axes_lens": [64, 32, 32]},
        {
            "x": lambda of: list(_video(4)(of)),
            "cap_feats": lambda of: [torch.randn(of.text - row, 12) for row in range(of.rows)],
            "t": _times_of(FLOW_TIMES),
        },
        _video(4),
    ),
}


def _allegro_positions(of: Sizes) -> Any:
    """Cosines and sines over three axes, and the positions that they are looked up by."""
    grid = _grid(of)
    positions = tuple(grid[:, axis].contiguous()[None] for axis in range(3))
    turns = tuple((torch.randn(n, 4), torch.randn(n, 4)) for n in (of.frames, of.height, of.width))
    return turns, positions
