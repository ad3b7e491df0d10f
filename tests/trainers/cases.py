"""The runs that are compared: what a user of each trainer does, with the scripts of docs/examples/trainers."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from autosp_rules import AutoSPBackend, autosp

VOCAB = 61
Result = dict[str, Any]


def alone() -> bool:
    """Whether this is the run on one device."""
    return int(os.environ["WORLD_SIZE"]) == 1


BACKENDS: list[AutoSPBackend] = []
"""What the scripts compiled with."""


def script(name: str) -> Any:
    """The script; on one device the model is compiled without AutoSP."""
    module = importlib.import_module(name)

    def recorded(*args: Any, **options: Any) -> AutoSPBackend | str:
        if alone():
            return "eager"
        BACKENDS.append(autosp(*args, **options))
        return BACKENDS[-1]

    home = (
        importlib.import_module("autosp_rules.integrations.deepspeed") if hasattr(module, "replace_autosp") else module
    )
    home.autosp = recorded
    return module


def mesh_of(replicas: int = 2) -> DeviceMesh:
    """Replicas by ranks along the sequence."""
    world = int(os.environ["WORLD_SIZE"])
    shape = (1, 1) if world == 1 else (replicas, world // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))


def llama(dtype: torch.dtype = torch.float64, *, layers: int = 1) -> nn.Module:
    """More than 1 MiB of parameters, which is the first bucket of DistributedDataParallel."""
    torch.manual_seed(0)
    widths = {"hidden_size": 128, "intermediate_size": 640, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=64, **widths)
    model = LlamaForCausalLM(config).to(dtype)
    assert sum(p.nbytes for p in model.parameters()) > 1024**2
    return model


def documents(num: int, shortest: int = 9, longest: int = 16, *, seed: int = 1) -> list[dict[str, list[int]]]:
    """Token ids of documents, of different lengths where the two are."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (num,), generator=draw).tolist()
    return [{"input_ids": torch.randint(1, VOCAB, (length,), generator=draw).tolist()} for length in lengths]


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator: to the next multiple of 8 of the longest, with a mask, padding not counted."""
    length = -(-max(len(sample["input_ids"]) for sample in samples) // 8) * 8

    def rows(fill: int, of: Callable[[list[int]], list[int]]) -> torch.Tensor:
        return torch.tensor([of(s["input_ids"]) + [fill] * (length - len(s["input_ids"])) for s in samples])

    return {
        "input_ids": rows(0, list),
        "attention_mask": rows(0, lambda ids: [1] * len(ids)),
        "labels": rows(-100, list),
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters, by their names."""
    return {
        name.replace("_orig_mod.", "").removeprefix("module."): (
            value.full_tensor() if isinstance(value, DTensor) else value
        )
        .detach()
        .clone()
        for name, value in model.state_dict().items()
    }


def hf_trainer() -> Result:
    """Three steps with accumulation and clipping, evaluation, predictions, a resumed run, saving, generation."""
    from transformers import TrainingArguments

    module = script("hf_trainer")

    def arguments(folder: str, **settings: Any) -> TrainingArguments:
        return TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=4 if alone() else 2,
            per_device_eval_batch_size=4 if alone() else 2,
            gradient_accumulation_steps=2,
            optim="sgd",
            learning_rate=0.5,
            max_grad_norm=0.5,
            logging_steps=1,
            save_steps=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            **settings,
        )

    seen: list[Any] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions)
        hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": hits[prediction.label_ids[:, 1:] != -100].mean()}

    samples, held_out = documents(32), documents(6, longest=12)
    settings = {
        "train_dataset": samples,
        "eval_dataset": held_out,
        "data_collator": padded,
        "compute_metrics": compute_metrics,
    }
    model, args = llama(), arguments("out")
    before = weights(model)
    trainer = module.trainer_of(model, args, mesh_of(), **settings)
    trainer.train()
    after = weights(model)
    logs = [{k: v for k, v in log.items() if k in ("loss", "grad_norm")} for log in trainer.state.log_history[:3]]
    evaluated = trainer.evaluate()
    predicted = trainer.predict(held_out)
    trainer.save_model("saved")
    dist.barrier()
    saved = LlamaForCausalLM.from_pretrained("saved", dtype=torch.float64)
    torch._dynamo.reset()
    resumed = module.trainer_of(llama(), arguments("out"), mesh_of(), **settings)
    resumed.train(resume_from_checkpoint="out/checkpoint-2")
    return {
        "before": before,
        "after": after,
        "logs": logs,
        "eval_loss": evaluated["eval_loss"],
        "accuracy": evaluated["eval_accuracy"],
        "predictions": torch.from_numpy(predicted.predictions),
        "labels": torch.from_numpy(predicted.label_ids),
        "resumed": weights(resumed.model),
        "saved": weights(saved),
        "tokens": model.generate(torch.tensor([[1, 2, 3, 4]]), max_new_tokens=3, do_sample=False),
    }


def hf_trainer_deepspeed() -> Result:
    """Two ranks that share a sequence, ZeRO 2; one device has no DeepSpeed."""
    from transformers import TrainingArguments

    settings: dict[str, Any] = {}
    if not alone():
        without_shared_memory_operator()
        zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
        auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        settings = {"deepspeed": {**zero, **dict.fromkeys(auto, "auto"), "zero_force_ds_cpu_optimizer": False}}
    args = TrainingArguments(
        "out",
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.5,
        max_grad_norm=0.0,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    model = llama(torch.float32)
    before = weights(model)
    trainer = script("hf_trainer").trainer_of(
        model, args, mesh_of(1), train_dataset=documents(24), data_collator=padded
    )
    trainer.train()
    return {"before": before, "after": weights(model)}


def accelerate_loop() -> Result:
    """Loaders that are prepared, accumulation, clipping, a schedule, metrics of a data set that does not divide."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    module = script("accelerate_loop")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=True)
    model = llama()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step // (1 if alone() else 2)))
    shuffled = DataLoader(
        documents(24, shortest=16),
        batch_size=4 if alone() else 2,
        sampler=torch.utils.data.RandomSampler(range(24), generator=torch.Generator().manual_seed(3)),
        collate_fn=padded,
    )
    prepared, losses = module.train(accelerator, mesh_of(), model, optimizer, warm, shuffled)
    labels = [accelerator.gather_for_metrics(batch["labels"]) for batch in prepare_again(accelerator)]
    names = [accelerator.gather_for_metrics(batch["input_ids"].sum(1).tolist()) for batch in prepare_again(accelerator)]
    unwrapped = accelerator.unwrap_model(prepared)
    assert type(unwrapped) is LlamaForCausalLM
    return {
        "before": before,
        "after": weights(unwrapped),
        "losses": torch.tensor(losses).unflatten(0, (-1, 4)).mean(1),  # of each batch, whichever replica had it
        "labels": torch.cat(labels),
        "names": torch.tensor([name for batch in names for name in batch]),
        "rate": torch.tensor(warm.get_last_lr()),
    }


def prepare_again(accelerator: Any) -> Any:
    """A prepared loader of a data set whose last batch is not full."""
    from torch.utils.data import DataLoader

    return accelerator.prepare(
        DataLoader(documents(7, shortest=16), batch_size=4 if alone() else 2, collate_fn=padded)  # type: ignore[arg-type]
    )


def accelerate_fsdp() -> Result:
    """The same under accelerate's FSDP2 plugin, which shards each layer, embedding and head."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from torch.utils.data import DataLoader

    module = script("accelerate_loop")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    if not alone():  # accelerate leaves the plugin out on a CPU, without a word
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        assert accelerator.is_fsdp2
    model = llama(layers=2)
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    loader = DataLoader(documents(24, shortest=16), batch_size=4 if alone() else 2, collate_fn=padded)  # type: ignore[arg-type]
    prepared, losses = module.train(accelerator, mesh_of(), model, optimizer, constant, loader)
    assert alone() or sum(isinstance(part, FSDPModule) for part in prepared.modules()) > 3
    return {"before": before, "after": weights(prepared), "losses": torch.tensor(losses).unflatten(0, (-1, 4)).mean(1)}


def sft() -> Result:
    """Packed rows, then padding-free ones."""
    from datasets import Dataset
    from trl import SFTConfig

    module = script("sft")
    lengths = (6, 10)  # packed, two fill a row of 16; so static shapes do
    samples = Dataset.from_list([documents(1, n, n, seed=i)[0] for i, n in enumerate(lengths * 16)])
    results: Result = {}
    ways = {"packing": {"packing": True, "max_length": 16}, "padding_free": {"padding_free": True, "max_length": None}}
    for name, settings in ways.items():
        torch._dynamo.reset()
        args = SFTConfig(
            name,
            max_steps=3,
            per_device_train_batch_size=(2 if alone() else 1) * (2 if name == "padding_free" else 1),
            train_sampling_strategy="sequential",
            gradient_accumulation_steps=2,
            optim="sgd",
            learning_rate=0.5,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
            **settings,
        )
        model = llama()
        results["before"] = weights(model)
        trainer = module.trainer_of(model, args, mesh_of(), train_dataset=samples, processing_class=tokenizer())
        trainer.train()
        results[name] = weights(model)
        results[f"{name} logs"] = [
            {k: v for k, v in log.items() if k in ("loss", "grad_norm", "num_tokens", "mean_token_accuracy")}
            for log in trainer.state.log_history[:3]
        ]
    return results


def tokenizer() -> Any:
    """One word a number; nothing is downloaded."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def lora() -> Result:
    """Adapters with dropout: what one device draws; merged and saved."""
    return _lora(num_replicas=1)


def lora_on_a_mesh() -> Result:
    """Two replicas, which draw the same dropout for their different batches; one device takes the two in turn."""
    return _lora(num_replicas=2)


def _lora(num_replicas: int) -> Result:
    from peft import LoraConfig, PeftModel
    from transformers import TrainerCallback, TrainingArguments

    class DrawAlike(TrainerCallback):
        """Every batch of a step draws the numbers of the first one."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.state = torch.get_rng_state()

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            torch.set_rng_state(self.state)

    module = script("lora")
    model = llama()
    base = weights(model)
    in_turn = num_replicas if alone() else 1
    settings = LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj", "down_proj"])
    args = TrainingArguments(
        "out",
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=in_turn,
        optim="sgd",
        learning_rate=10.0,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = {"train_dataset": documents(12 * num_replicas, shortest=16), "data_collator": padded}
    trained = module.train(model, settings, args, mesh_of(num_replicas), callbacks=[DrawAlike()], **data)
    if dist.get_rank() == 0:
        trained.save_pretrained("adapters")
    dist.barrier()
    loaded = PeftModel.from_pretrained(llama(), "adapters").merge_and_unload()
    merged = weights(trained.merge_and_unload())
    assert all(torch.equal(merged[name], value) for name, value in weights(loaded).items())
    return {"before": base, "merged": merged}


def batches_of_ids(num: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (num, rows, 16), generator=torch.Generator().manual_seed(2))


def without_shared_memory_operator() -> None:
    """Compiling this operator of DeepSpeed's takes minutes; gloo does without."""
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None


def deepspeed_run(
    name: str, stage: int, *, batches: torch.Tensor | None = None, mesh: DeviceMesh | None = None, **settings: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses after six batches or those given, accumulation over two, SGD."""
    import deepspeed

    without_shared_memory_operator()
    torch._dynamo.reset()
    module = script(name)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,  # the default is 1.0, which would hide a factor
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    model = llama(torch.float32, layers=2)
    as_file = Path(f"stage{stage}-{dist.get_rank() if dist.is_initialized() else 0}.json")  # ranks share the folder
    as_file.write_text(json.dumps(config))
    on_mesh = {} if mesh is None else {"mesh": mesh}
    batches = batches_of_ids(6) if batches is None else batches
    engine, losses = module.train(model, str(as_file) if stage == 1 else config, batches, **on_mesh)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found = {name: value.float() for name, value in weights(model).items()}
    engine.destroy()
    return found, [loss.item() for loss in losses]


def plain_steps(
    model: nn.Module, batches: torch.Tensor, optimizer: torch.optim.Optimizer, *, accumulate: int = 1
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses on one device, by nothing but torch."""
    losses: list[float] = []
    for index, batch in enumerate(batches):
        loss = model(input_ids=batch, labels=batch).loss
        (loss / accumulate).backward()
        losses.append(loss.item())
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model), losses


def _deepspeed(name: str, stages: list[int], **settings: Any) -> Result:
    results: Result = {"before": weights(llama(torch.float32, layers=2))}
    for stage in stages:
        if alone():
            model = llama(torch.float32, layers=2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            after, losses = plain_steps(model, batches_of_ids(6), optimizer, accumulate=2)
        else:
            after, losses = deepspeed_run(name, stage, **settings)
        results |= {f"ZeRO {stage}": after, f"ZeRO {stage} losses": torch.tensor(losses)}
    return results


def deepspeed_engine() -> Result:
    results = _deepspeed("deepspeed_engine", [0, 1, 2])
    after, losses = deepspeed_run("deepspeed_engine", 1, bf16={"enabled": True})
    return {**results, "bf16": after, "bf16 losses": torch.tensor(losses)}


def deepspeed_on_a_mesh() -> Result:
    """Two replicas of two ranks; DeepSpeed is told of no mesh, and averages over all four."""
    if alone():
        return _deepspeed("deepspeed_engine", [0, 1, 2])
    mesh = mesh_of()
    results: Result = {"before": weights(llama(torch.float32, layers=2))}
    for stage in (0, 1, 2):
        batches = batches_of_ids(6)[mesh.get_local_rank("dp") :: 2]
        results[f"ZeRO {stage}"], losses = deepspeed_run(
            "deepspeed_engine", stage, batches=batches, mesh=mesh, gradient_accumulation_steps=1
        )
        both = [torch.zeros(len(losses)) for _ in range(2)]
        dist.all_gather(both, torch.tensor(losses), group=mesh.get_group("dp"))
        results[f"ZeRO {stage} losses"] = torch.stack(both, 1).flatten()
    return results


def deepspeed_zero_3() -> Result:
    return _deepspeed("deepspeed_engine", [3])


def deepspeed_autosp() -> Result:
    own = {"compile": {"deepcompile": True, "passes": ["autosp"]}, "sequence_parallel_size": 2}
    return _deepspeed("deepspeed_autosp", [0, 1, 2], **own)


def deepspeed_groups() -> Result:
    """DeepSpeed told of sequence parallelism, by an mpu and by a mesh: it then reduces gradients in other ways."""
    batches, before = batches_of_ids(6), weights(llama(torch.float32))
    if alone():
        model = llama(torch.float32)
        after, _ = plain_steps(model, batches, torch.optim.SGD(model.parameters(), lr=0.5), accumulate=2)
        return {"before": before, "mpu": after, "mesh": after}
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    without_shared_memory_operator()
    deepspeed.init_distributed("gloo")
    parallel_state_sp.initialize_sequence_parallel(2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_allow_untested_optimizer": True,
    }
    results: Result = {"before": before}
    for name, told in (("mpu", {"mpu": parallel_state_sp}), ("mesh", {"mesh_param": (2, 2)})):
        torch._dynamo.reset()
        model, mesh = llama(torch.float32), mesh_of()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=dict(config), **told)
        BACKENDS.append(autosp("aot_eager", mesh=mesh))
        engine.compile(backend=BACKENDS[-1])
        for batch in batches[mesh.get_local_rank("dp") :: 2]:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        results[name] = {key: value.float() for key, value in weights(model).items()}
        engine.destroy()
        groups.mpu = groups.mesh_device = None
    return results


def fabric_loop() -> Result:
    from lightning_fabric import Fabric

    module = script("fabric_loop")
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model, samples = llama(), [{"input_ids": ids[0], "labels": ids[0]} for ids in batches_of_ids(12)]
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    module.train(fabric, mesh_of(), model, optimizer, samples, 4 if alone() else 2)
    return {"before": before, "after": weights(model)}


def _sharded(first: int, last: int, **where: str) -> Result:
    """Batches from `first` to `last`, whole on all ranks; the optimizer has momentum, which a checkpoint must hold.

    Of four rows, gradients are too small to be clipped, unless they are P times too large.
    """

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    model = llama(layers=2)
    before = weights(model)
    if alone():
        return {
            "before": before,
            "after": plain_steps(model, batches_of_ids(5, rows=4)[:last], sgd(model.parameters()))[0],
        }
    dist.init_process_group("gloo")
    folders = {name: f"{os.environ['SHARED']}/{folder}" for name, folder in where.items()}
    trained = script("fsdp_checkpoints").train(model, sgd, mesh_of(1), batches_of_ids(5, rows=4)[first:last], **folders)
    return {"before": before, "after": weights(trained)}


def fsdp_save() -> Result:
    """Two steps, saved."""
    return _sharded(0, 2, save="step2")


def fsdp_resume() -> Result:
    """Three steps more, from what another number of ranks has saved."""
    return _sharded(2, 5, resume="step2")


def _torchtitan_on_cpus() -> None:
    """torchtitan takes CUDA where torch knows no accelerator, and asks the device about its memory: two variables.

    Nor has it a name for float64.
    """
    import torchtitan.config
    from torchtitan.tools import utils  # before any module that reads these variables

    memory = {"get_device_properties": SimpleNamespace(total_memory=1), "memory_stats": {}, "get_device_name": "CPU"}
    values = {**memory, "device_count": 1, "current_device": 0}
    calls = dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"))
    cpu = {name: lambda *_, value=value: value for name, value in {**values, **calls}.items()}
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**cpu)
    torchtitan.config.TORCH_DTYPE_MAP["float32"] = torch.float64


def torchtitan_llama() -> Result:
    return _torchtitan("llama3")


def torchtitan_qwen() -> Result:
    return _torchtitan("qwen3")


def _torchtitan(family: str) -> Result:
    """Steps of eight rows, whose numbers of labels differ, four at a time; on a mesh each replica has half of them.

    The mesh starts from a checkpoint that one device has saved.
    """
    _torchtitan_on_cpus()
    from torchtitan.components import checkpointer, dataloader, loss, metrics, optimizer, tokenizer
    from torchtitan.config import configs
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.tools.logging import logger

    logger.setLevel("ERROR")
    config_of = dataclass(kw_only=True, slots=True)

    class NoTokenizer(tokenizer.BaseTokenizer):
        Config = config_of(type("Config", (tokenizer.BaseTokenizer.Config,), {}))

        def __init__(self, config: Any, **settings: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    class Rows(dataloader.BaseDataLoader):
        Config = config_of(type("Config", (dataloader.BaseDataLoader.Config,), {}))

        def __init__(self, config: Any, **settings: Any) -> None:
            self.first, self.by, self.rows = (
                settings["dp_rank"],
                settings["dp_world_size"],
                settings["local_batch_size"],
            )

        def __iter__(self) -> Any:
            every = torch.randint(2048, (24, 33), generator=torch.Generator().manual_seed(0))
            for ids in every[self.first :: self.by].split(self.rows):
                labels = ids[:, 1:].masked_fill(torch.arange(32) < ids[:, :1] % 16, -100)
                yield {"input": ids[:, :-1], "positions": torch.arange(32).repeat(len(ids), 1)}, labels

    class Metrics(metrics.MetricsProcessor):
        Config = config_of(type("Config", (metrics.MetricsProcessor.Config,), {}))

        def log(self, step: int, loss: float, *others: Any, **more: Any) -> None:
            logged.append((loss, others[1], float(more["extra_metrics"]["n_tokens_seen"])))

    class Optimizers(optimizer.OptimizersContainer):
        Config = config_of(type("Config", (optimizer.OptimizersContainer.Config,), {}))

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return getattr(torch.optim, name)

    logged = list[tuple[float, ...]]()
    module = script("torchtitan_trainer")
    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:  # torch's flex_attention does not train on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if not alone():
        spec.parallelize_fn = module.shared(spec.parallelize_fn)
    sgd = optimizer.ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs={"lr": 0.1})
    start = f"{os.environ['SHARED_FOLDER']}/{family}"
    config = module.Trainer.Config(
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=Rows.Config(),
        metrics=Metrics.Config(log_freq=1),
        loss=loss.CrossEntropyLoss.Config(),
        optimizer=Optimizers.Config(param_groups=[sgd], implementation="foreach"),
        lr_scheduler=optimizer.LRSchedulersContainer.Config(warmup_steps=0),
        training=configs.TrainingConfig(
            local_batch_size=2,
            global_batch_size=8,
            seq_len=32,
            steps=3,
            max_norm=0.5,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=configs.ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        debug=configs.DebugConfig(seed=0, enable_structured_logging=False),
        checkpoint=checkpointer.CheckpointManager.Config(enable=True, folder=start),
    )
    trainer = (module.Trainer if alone() else module.SharingTrainer)(config)
    if alone():
        trainer.checkpointer.save(0, last_step=True)
    else:
        trainer.checkpointer.load()
    before = weights(trainer.model_parts[0])
    rows = trainer.batch_generator(
        trainer.dataloader
    )  # Trainer.train does the same with torch.distributed.set_timeout,
    for trainer.step in range(1, 4):  # which torch 2.13 does not have
        trainer.train_step(rows)
    trainer.close()
    return {"before": before, "after": weights(trainer.model_parts[0]), "logged": torch.tensor(logged)}
