"""Jobs: the text becomes batches, the model is the user's own, mistakes are one sentence before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autosp_rules.demo.job import (
    MASK,
    PAD,
    Job,
    JobError,
    build_config,
    build_model,
    check_memory,
    check_sizes,
    is_masked,
    make_batch,
    num_parameters,
    parse_override,
    text_files,
    zero_dropout,
)

SMALL = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    (folder / "below").mkdir(parents=True)
    (folder / "a.txt").write_bytes(bytes(range(32)))
    (folder / "below" / "b.bin").write_bytes(bytes(range(200, 256)) * 10)
    (folder / "empty.txt").touch()
    return folder


def job(text: Path, **settings: object) -> Job:
    return Job("llama", text_files(text), **{"overrides": SMALL, "seq_len": 64, "batch": 4, **settings})  # type: ignore[arg-type]


def test_text_is_a_file_a_folder_with_all_below_or_the_standard_library(text: Path) -> None:
    assert [path.name for path in text_files(text)] == ["a.txt", "b.bin"]
    assert text_files(text / "a.txt") == (text / "a.txt",)
    assert "argparse.py" in [path.name for path in text_files(None)]


def test_text_without_a_byte_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"text .*gone does not exist"):
        text_files(tmp_path / "gone")
    with pytest.raises(JobError, match=r"text .*empty\.txt has no file with a byte in it"):
        text_files(text / "empty.txt")


def test_a_batch_is_bytes_of_the_files_then_padding_without_labels(text: Path) -> None:
    one = job(text / "a.txt")
    ids, labels = make_batch(one, 1).values()
    for row, row_labels in zip(ids.tolist(), labels.tolist(), strict=True):
        length = row.index(PAD)
        assert bytes(row[:length]) in bytes(range(32))
        assert row_labels[:length] == row[:length]
        assert row[length:] == [PAD] * (64 - length)
        assert row_labels[length:] == [-100] * (64 - length)


def test_a_batch_depends_on_seed_and_step_only(text: Path) -> None:
    first = make_batch(job(text), 1)["input_ids"]
    assert torch.equal(first, make_batch(job(text), 1)["input_ids"])
    assert not torch.equal(first, make_batch(job(text), 2)["input_ids"])
    assert not torch.equal(first, make_batch(job(text, seed=1), 1)["input_ids"])


def test_a_masked_batch_hides_some_bytes_and_only_they_are_targets(text: Path) -> None:
    plain = make_batch(job(text), 1)
    masked = make_batch(job(text), 1, masked=True)
    hidden = masked["input_ids"] == MASK
    is_byte = plain["input_ids"] != PAD
    assert 0.05 < hidden[is_byte].float().mean() < 0.3
    assert torch.equal(masked["labels"], plain["input_ids"].masked_fill(~hidden, -100))
    assert torch.equal(masked["attention_mask"], is_byte.long())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("hidden_size=64", 64),
        ("rope_theta=1e4", 1e4),
        ("tie_word_embeddings=true", True),
        ("sliding_window=null", None),
        ("hidden_act=gelu", "gelu"),
        ("hidden_act=", ""),
    ],
)
def test_overrides_are_python_values(text: str, value: object) -> None:
    assert parse_override("--set", text) == (text.split("=", maxsplit=1)[0], value)


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(JobError, match="--set hidden_size is not of the form key=value"):
        parse_override("--set", "hidden_size")


def test_a_model_type_and_a_config_json_give_the_same_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SMALL}))
    by_type, by_file = build_model(build_config("llama", SMALL)), build_model(build_config(str(path), {}))
    assert type(by_file).__name__ == "LlamaForCausalLM"
    for p, q in zip(by_type.parameters(), by_file.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_seed_decides_the_weights() -> None:
    config = build_config("llama", SMALL)
    first, again, other = (build_model(config, seed).lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_encoder_predicts_hidden_tokens_and_as_decoder_the_next() -> None:
    bert = {**SMALL, "pad_token_id": None}
    assert is_masked(build_model(build_config("bert", bert)))
    assert not is_masked(build_model(build_config("bert", {**bert, "is_decoder": True})))


def test_gpt2_compiles_to_one_graph() -> None:
    config = build_config("gpt2", {"vocab_size": 258, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16})
    zero_dropout(config)
    ids = torch.zeros(1, 16, dtype=torch.long)
    step = torch.compile(build_model(config), backend="eager", fullgraph=True)
    assert step(input_ids=ids, labels=ids).loss.isfinite()


def test_tokens_beyond_the_vocabulary_are_none(capfd: pytest.CaptureFixture[str]) -> None:
    config = build_config("modernbert", SMALL)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.cls_token_id) == (None,) * 4
    assert "token_id" not in capfd.readouterr().err


def test_dropout_is_set_to_zero_and_named() -> None:
    config = build_config("gpt2", {})
    assert zero_dropout(config) == ["resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"]
    assert zero_dropout(config) == []


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ("lama", {}, r"model type 'lama' is unknown to transformers .* \(close: llama, .*; give a model_type"),
        (
            "meta-llama/Llama-3.2-1B",
            {},
            r"nothing is downloaded from a hub; give a model_type such as llama, or the path",
        ),
        ("clip", {}, "model type 'clip' has no causal or masked language model"),
        ("gone.json", {}, "model gone.json cannot be read: No such file"),
        ("llama", {"hiden_size": 1}, r"--set hiden_size: .* llama has no such key \(close: hidden_size"),
        ("llama", {"hidden_size": "big"}, "the configuration of llama is refused: .*expected int, got str"),
    ],
)
def test_a_model_that_does_not_exist_is_refused(model: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(JobError, match=message):
        build_config(model, overrides)


def test_a_broken_config_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(JobError, match=r"config\.json is not JSON"):
        build_config(str(path), {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1"),
        ({"ranks": 2.0}, "--ranks must be an int, not 2.0"),
        ({"seq_len": 128}, "--seq-len 128 is longer than max_position_embeddings = 64; add --set max_pos.*=128"),
        (
            {"overrides": {**SMALL, "vocab_size": 256}},
            "vocab_size = 256 is less than the 258 ids .* --set vocab_size=258",
        ),
    ],
)
def test_sizes_that_contradict_are_refused(text: Path, settings: dict[str, object], message: str) -> None:
    asked = job(text, **settings)
    with pytest.raises(JobError, match=message):
        check_sizes(asked, build_config("llama", asked.overrides))


def test_sizes_that_fit_pass(text: Path) -> None:
    check_sizes(job(text), build_config("llama", SMALL))


def test_a_model_too_large_for_the_machine_is_refused_without_building_it(text: Path) -> None:
    config = build_config("llama", {})
    assert num_parameters(config) == 6_738_415_616
    with pytest.raises(
        JobError, match=r"llama has 6,738,415,616 parameters, which need 301 GiB .* this machine has 16 GiB"
    ):
        check_memory(job(text), config, 16 * 2**30)
    check_memory(job(text), build_config("llama", SMALL), 2**30)
