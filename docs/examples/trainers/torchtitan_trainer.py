"""torchtitan's own Trainer, where ranks share sequences: its FSDP2 over all ranks, and AutoSP in each of its blocks.

torchrun --nproc-per-node 4 docs/examples/trainers/torchtitan_trainer.py --module llama3 --config llama3_debugmodel \
    --parallelism.spmd_backend partial_dtensor --training.disable_cuda_graphs --hf_assets_path TOKENIZER
"""

import os
from dataclasses import dataclass

from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from autosp_rules import autosp

SHARED = int(os.environ.get("SHARED", "2"))  # ranks that share a sequence


@dataclass
class SharedDims(ParallelDims):
    """Ranks along "cp" share whole batches: nothing is cut for them, and each of them knows the loss of its batch."""

    cp_enabled = False

    def get_optional_mesh(self, dims, **options):
        return super().get_optional_mesh("batch" if dims == "loss" else dims, **options)


class SharingTrainer(Trainer):
    def init_distributed(self):
        d = super().init_distributed()
        return SharedDims(d.dp_replicate, d.dp_shard // SHARED, SHARED, d.tp, d.pp, d.ep, d.world_size, d.spmd_backend)


def shared(parallelize):
    """What a model's `parallelize_fn` does, and AutoSP for each block."""

    def parallelized(model, *, parallel_dims, **settings):
        model, mesh = parallelize(model, parallel_dims=parallel_dims, **settings), parallel_dims.get_mesh("cp")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(mesh.size())  # torchtitan sets 1, which adds up over cp too
        backend = autosp("aot_eager", mesh=mesh, axis="cp", gradients="mean", breaks="dtensor")
        for layer in model.layers.values():
            layer.compile(backend=backend)
        return model

    return parallelized


if __name__ == "__main__":
    config = ConfigManager().parse_args()
    config.model_spec.parallelize_fn = shared(config.model_spec.parallelize_fn)
    config.loss, config.activation_checkpoint = CrossEntropyLoss.Config(), None  # AutoSP chooses what is recomputed
    SharingTrainer(config).train()
