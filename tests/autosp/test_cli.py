"""The command as a user meets it: what it prints, and its exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autosp_rules.cli import main
from autosp_rules.demo.train import StepRow

LLAMA = [
    *("--model", "llama", "--seq-len", "32", "--batch", "2"),
    *("--set", "vocab_size=258", "--set", "hidden_size=16", "--set", "intermediate_size=24"),
    *("--set", "num_hidden_layers=1", "--set", "num_attention_heads=4", "--set", "num_key_value_heads=2"),
]


@pytest.mark.gloo
def test_train_compares_two_ranks_with_one_device(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be, or not to be: that is the question. " * 20)
    status = main(
        ["train", *LLAMA, "--steps", "3", "--inner", "eager", "--text", str(text), "--option", "attention=ulysses"]
    )
    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    rows = re.findall(r"^ +(\d) +(\d\.\d{7}) +(\d\.\d{7}) +(\d\.\de-\d\d)$", out, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for _, alone, sharded, difference in rows:
        assert float(sharded) == pytest.approx(float(alone), rel=1e-6)
        assert 0 < float(difference) < 1e-4  # not 0: the sums are really taken apart
    assert "EQUAL over 3 steps" in out
    for said in ("shard_inputs", "all_to_all", "bytes", "32 tokens per rank", "nothing was refused"):
        assert said in out


@pytest.mark.gloo
def test_a_model_that_is_refused_ends_with_the_refusal(capfd: pytest.CaptureFixture[str]) -> None:
    refuse = ["--option", "breaks=refuse"]
    status = main(["train", *LLAMA, "--set", "_attn_implementation=flex_attention", "--inner", "eager", *refuse])
    out, err = capfd.readouterr()
    assert status == 1
    assert re.fullmatch(r"autosp: error: rank \d: AutoSPError: .*flex_attention.*; .*\n", err)
    assert "EQUAL" not in out


def test_runs_that_differ_end_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = StepRow(1, 5.0, 5.0, 0.0, 1e-6, "a.weight"), StepRow(2, 5.0, 5.1, 0.02, 0.3, "b.weight")
    monkeypatch.setattr("autosp_rules.demo.launch.launch", lambda *_, **__: ([right, wrong], "the report"))
    assert main(["train", *LLAMA]) == 1
    out = capsys.readouterr().out
    assert "NOT EQUAL over 2 steps" in out
    assert "the worst gradient is that of b.weight, step 2" in out
    assert "the report" in out


def test_inspect_prints_the_report_and_the_graph_without_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *LLAMA, "--ranks", "4", "--graph"]) == 0
    out = capsys.readouterr().out
    report, graph = out.split("\n\n", 1)
    assert "size 4" in report
    assert "16 tokens per rank" in report
    assert graph.count("all_to_all_single") == 2
    assert "f32[2, 8, 16]" in graph  # hidden states, S / 4 long


def test_inspect_needs_no_memory_for_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["inspect", "--model", "llama", "--set", "num_hidden_layers=2", "--set", "hidden_size=8192", "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_per_rank"] == 512
    forward = {c["kind"]: c["count"] for c in report["collectives"] if c["direction"] == "forward"}
    assert forward == {"all_to_all": 4, "all_reduce": 1}


def test_inspect_with_a_strategy_of_attention(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [f"--set={name}=6" for name in ("num_attention_heads", "num_key_value_heads")]
    sizes += ["--set=hidden_size=48", "--set=num_hidden_layers=1", "--seq-len=64", "--ranks=4"]
    assert main(["inspect", "--model", "llama", *sizes, "--option", "attention=ring_ulysses"]) == 0
    assert "attention: 1 x ring_ulysses: asked for: 2 groups of 2 ranks; " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--model", "lama"], "model type 'lama' is unknown"),
        (["train", "--model", "llama"], "parameters, which need"),
        (["train", *LLAMA, "--text", "/gone"], "text /gone does not exist"),
        (["train", *LLAMA, "--set", "hidden"], "--set hidden is not of the form key=value"),
        (["train", *LLAMA, "--option", "ring"], "--option ring is not of the form key=value"),
        (
            ["train", *LLAMA, "--option", "attention=rign"],
            "--option: attention='rign': it should be 'auto', 'ulysses', 'gather_kv', 'ring' or 'ring_ulysses'; "
            "did you mean 'ring'?",
        ),
        (["inspect", *LLAMA, "--ranks", "0"], "--ranks must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", lambda _: 2**17)  # 16 GiB
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("autosp: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_number_of_ranks_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NPROC", "0")
    assert main(["demo"]) == 2
    assert "--ranks must be at least 1" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = """
import sys
from autosp_rules.cli import main
try:
    main(["--help"])
except SystemExit:
    sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout
