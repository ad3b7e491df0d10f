"""Tensor parallelism for decoders with separate q, k, v, gate and up projections: attention by heads, MLPs by features.

MEGATRON     Each rank holds the rows of q, k, v, gate and up, and the columns of o and down, which contract a sharded
             dimension: two all-reduces a layer forward, and two backward. Embedding and head are sharded by rows of
             the vocabulary (`rules.parallel.vocabulary`); one that does not divide is an error, whose remedies are
             `model.resize_token_embeddings(pad_to_multiple_of=...)` and MEGATRON_LAYERS.
MEGATRON_SP  Moreover, norms and residuals run on chunks of the sequence: two reduce-scatters and two all-gathers a
             layer take the place of the all-reduces, and send as many bytes.
Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053, section 3); Korthikanti et al. (arXiv 2205.05198, section 4.2).
"""

from dataclasses import replace

from fxrewrite.spmd import Parallelism, Replicate, Shard, module_input, module_output, param, sends
from rules.parallel.heads import WHOLE_HEADS
from rules.parallel.vocabulary import VOCABULARY, VOCABULARY_LAYOUTS

_ROWS, _COLUMNS = "*.{q,k,v,gate,up}_proj", "*.{o,down}_proj"
LAYERS = {
    param(f"{_ROWS}{{,.base_layer}}.weight"): Shard(0),
    param(f"{_COLUMNS}{{,.base_layer}}.weight"): Shard(1),
    param(f"{_ROWS}.lora_B.*.weight", optional=True): Shard(0),
    param(f"{_COLUMNS}.lora_A.*.weight", optional=True): Shard(1),
}
"""Adapters of low rank (LoRA, by peft's names) are cut as what they adapt; of those of columns the ranks sum what is
between their two matrices, which is small."""
_ADAPTERS = "*.lora_*"
ENDS = {
    param("*{embed_tokens,lm_head}{,.base_layer,.modules_to_save.*}.weight", optional=True): Shard(0),
    module_output("*embed_tokens", optional=True): Replicate(),
    module_input("*lm_head", optional=True): Replicate(),
}
"""What the head reads is stated, since a loss that needs all classes of a token, as one with weights of classes, would
otherwise have all from the last layer's sum on compute on rows, where that is cheaper than to gather logits."""
CHUNKS = {
    module_output("*embed_tokens", optional=True): Shard(1),
    module_output("*.{o,down}_proj{,.base_layer}"): Shard(1),
    module_input("*.{self_attn,mlp}"): Replicate(),
}

_MIXTURES = 'of a mixture of experts, from_transformers(model, "tp") cuts the experts, too'

MEGATRON_LAYERS = Parallelism(
    "megatron_layers",
    axis="tp",
    place=LAYERS,
    placed=[WHOLE_HEADS],
    expect=[sends(within="*layers.*", but=_ADAPTERS, all_reduce=2, hint=_MIXTURES)],
)
MEGATRON = replace(
    MEGATRON_LAYERS, name="megatron", place=LAYERS | ENDS, rules=[VOCABULARY], layouts=tuple(VOCABULARY_LAYOUTS)
)
MEGATRON_SP = replace(
    MEGATRON,
    name="megatron_sp",
    place=LAYERS | ENDS | CHUNKS,
    expect=[sends(within="*layers.*", but=_ADAPTERS, all_gather=2, reduce_scatter=2, hint=_MIXTURES)],
)
