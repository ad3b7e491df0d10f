"""A training job: a Hugging Face model with random weights as byte-level language model of any text.

Nothing is downloaded: the model is a `model_type` that transformers knows, or a config.json; the text is on this
machine, by default the sources of Python's standard library. A batch is a pure function of the job and the step.
"""

from __future__ import annotations

import ast
import difflib
import json
import random
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosp_rules.config import AutoSPConfig

PAD, MASK, VOCABULARY = 256, 257, 258
"""Token ids besides the 256 bytes, and how many ids there are."""


class JobError(ValueError):
    """A job that cannot be run as asked; the message says what to change."""


@dataclass(frozen=True)
class Job:
    """What to train: a Hugging Face model with random weights as byte-level language model."""

    model: str
    """a `model_type` of transformers, or the path of a config.json"""
    files: tuple[Path, ...]
    """texts; a row of a batch is a piece of one of them"""
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seq_len: int = 512
    batch: int = 4
    ranks: int = 2
    steps: int = 20
    config: AutoSPConfig = field(default_factory=AutoSPConfig)
    seed: int = 0


def text_files(text: Path | None) -> tuple[Path, ...]:
    """The non-empty files at `text` (a file, or a folder and all below it); None: the standard library's sources."""
    if text is None:
        found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif text.is_dir():
        found = sorted(path for path in text.rglob("*") if path.is_file())
    elif text.is_file():
        found = [text]
    else:
        raise JobError(f"text {text} does not exist")
    files = tuple(path for path in found if path.stat().st_size)
    if not files:
        raise JobError(f"text {text or 'of the standard library'} has no file with a byte in it")
    return files


def make_batch(job: Job, step: int, *, masked: bool = False) -> dict[str, Tensor]:
    """The whole batch of one step, the same on every rank; each row is one piece of a file, padded where the file ends.

    Padding has the label -100, so the ranks hold different numbers of targets. `masked` asks for masked-language-model
    inputs: 15 % of the bytes hidden, only they are targets, and an attention mask that hides the padding.
    """
    choose = random.Random(f"{job.seed} {step}")
    ids = torch.full((job.batch, job.seq_len), PAD)
    for row in ids:
        piece = _piece(choose.choice(job.files), job.seq_len, choose)
        row[: len(piece)] = torch.tensor(list(piece))
    is_byte = ids != PAD
    if not masked:
        return {"input_ids": ids, "labels": ids.masked_fill(~is_byte, -100)}
    hidden = is_byte & (torch.rand(ids.shape, generator=torch.Generator().manual_seed(choose.getrandbits(32))) < 0.15)
    return {
        "input_ids": ids.masked_fill(hidden, MASK),
        "attention_mask": is_byte.long(),
        "labels": ids.masked_fill(~hidden, -100),
    }


def _piece(path: Path, length: int, choose: random.Random) -> bytes:
    """Up to `length` bytes of the file from a random place, short where the file ends."""
    start = choose.randrange(max(1, path.stat().st_size - length // 2))
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def parse_override(flag: str, text: str) -> tuple[str, Any]:
    """`hidden_size=256` as name and Python value; anything but a literal is a string. `flag` is the option's name."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise JobError(f"{flag} {text} is not of the form key=value")
    try:
        return name, ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(value, value))
    except (ValueError, SyntaxError):
        return name, value


def build_config(model: str, overrides: Mapping[str, Any]) -> Any:
    """The configuration of a transformers `model_type`, or of a config.json, with overrides; nothing is downloaded."""
    settings: dict[str, Any] = {}
    model_type = model
    if model.endswith(".json") or Path(model).is_file():
        settings = _read_json(Path(model))
        model_type = settings.get("model_type", "")
    config_class = _config_class(model_type)
    default = config_class()
    for name in overrides:
        if not hasattr(default, name):
            raise JobError(
                f"--set {name}: the configuration of {model_type} has no such key"
                + _close(name, [*default.to_dict(), *default.attribute_map])
            )
    settings = {**settings, **overrides}
    vocabulary = settings.get("vocab_size", default.get_text_config().vocab_size)
    for name, value in {**default.to_dict(), **settings}.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= vocabulary:
            settings[name] = None  # a token of the tokenizer that bytes replace
    try:
        config = config_class.from_dict(settings)
    except Exception as error:  # each configuration class validates in its own way
        raise JobError(f"the configuration of {model_type} is refused: {_one_line(error)}") from error
    config.use_cache = False  # a cache is for generation; training would only return it
    return config


def _config_class(model_type: str) -> Any:
    transformers = _transformers()
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        hub = "nothing is downloaded from a hub; " if "/" in model_type else ""
        raise JobError(
            f"model type {model_type!r} is unknown to transformers {transformers.__version__}"
            f"{_close(model_type, known)}; {hub}give a model_type such as llama, or the path of a config.json"
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    mappings = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MASKED_LM_MAPPING)
    if not any(config_class in mapping for mapping in mappings):
        raise JobError(f"model type {model_type!r} has no causal or masked language model in transformers")
    return config_class


def _close(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    return f" (close: {', '.join(close)})" if close else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def build_model(config: Any, seed: int = 0) -> nn.Module:
    """The language model of a configuration, in float32, random weights from `seed`, ready to train.

    It predicts the next token, or, for encoders, hidden ones.
    """
    transformers = _transformers()
    model_class = transformers.MODEL_FOR_MASKED_LM_MAPPING.get(type(config), None)
    is_encoder = getattr(model_class, "__name__", "").endswith("ForMaskedLM")
    if not is_encoder or getattr(config, "is_decoder", False):
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    torch.manual_seed(seed)
    try:
        model = model_class(config)
    except ValueError as error:
        raise JobError(f"{model_class.__name__} refuses its configuration: {_one_line(error)}") from error
    if model.loss_type is None:  # GPT-2 and others: transformers then logs a warning in forward, which breaks the graph
        model.loss_type = "ForCausalLM"  # what it falls back to
    return model.train()


def is_masked(model: nn.Module) -> bool:
    """Whether the model predicts hidden tokens, not the next one."""
    return type(model).__name__.endswith("ForMaskedLM")


def zero_dropout(config: Any) -> list[str]:
    """Set every dropout probability of `config` to zero and return their names.

    Two runs can only be compared where both compute the same function; dropout draws other numbers on other shapes.
    """
    names = [
        name for name, value in config.to_dict().items() if ("drop" in name) and isinstance(value, float) and value > 0
    ]
    for name in names:
        setattr(config, name, 0.0)
    return names


def num_parameters(config: Any) -> int:
    """How many parameters the model of `config` has, found without allocating them."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config).parameters())


def check_sizes(job: Job, config: Any) -> None:
    """Raise JobError where the job's sizes contradict each other or the model's."""
    for name in ("seq_len", "batch", "ranks", "steps"):
        value = getattr(job, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise JobError(f"--{name.replace('_', '-')} must be an int, not {value!r}")
        if value < 1:
            raise JobError(f"--{name.replace('_', '-')} must be at least 1")
    longest = getattr(config, "max_position_embeddings", None) or job.seq_len
    if 0 < longest < job.seq_len:
        raise JobError(
            f"--seq-len {job.seq_len} is longer than max_position_embeddings = {longest}; "
            f"add --set max_position_embeddings={job.seq_len}"
        )
    vocabulary = config.get_text_config().vocab_size
    if vocabulary < VOCABULARY:
        raise JobError(
            f"vocab_size = {vocabulary} is less than the {VOCABULARY} ids of a byte-level model; "
            f"add --set vocab_size={VOCABULARY}"
        )


def check_memory(job: Job, config: Any, memory: int) -> None:
    """Raise JobError where weights, gradients and AdamW alone exceed `memory` bytes."""
    count = num_parameters(config)
    needed = 4 * count * 4 * (job.ranks + 1)  # 4 float32 numbers a parameter, in each rank and for one device
    if needed > memory:
        raise JobError(
            f"{config.model_type} has {count:,} parameters, which need {needed / 2**30:.0f} GiB as weights, gradients "
            f"and AdamW of {job.ranks} ranks and one device; this machine has {memory / 2**30:.0f} GiB; "
            "make the model smaller, for example --set num_hidden_layers=2 --set vocab_size=258"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise JobError(f"model {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise JobError(f"model {path} is not JSON: {error}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise JobError("Hugging Face models need transformers: pip install 'fxrewrite[train]'") from error
    return transformers
