"""The `fxrewrite` command as a user meets it: what it prints, what it writes, and its exit status."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fxrewrite.cli import main

DOCUMENT = (Path(__file__).parents[1] / "docs" / "cli.md").read_text()
EXAMPLE = "".join(re.findall(r"^```python\n(# silu\.py\n.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL))
SESSIONS = re.findall(r"^```console\n\$ fxrewrite (.*?)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)

MORE = """
import torch
from torch import fx

import silu
from fxrewrite import RuleSet, rule, refuse
from silu import RULES, Model, use_silu


@rule("mine.never", after=["mine.use_silu"])
def never(x):
    return torch.tanh(x)


@never.replacement
def _(x):
    refuse("not today", hint="come back tomorrow")


@rule("mine.undo_silu", numerics="approximate", rng="removes", shapes="changes", optional=True)
def undo_silu(x):
    return torch.nn.functional.silu(x)


@undo_silu.replacement
def _(x):
    return x * torch.sigmoid(x)


BOTH = RuleSet("both", use_silu, never)
NONE = RuleSet("none")
STRICT = RuleSet("strict", never, atomic=True)
ENDLESS = RuleSet("endless", RuleSet("there", use_silu), RuleSet("back", undo_silu))
PLAN = RULES.once() >> RULES.fixpoint()
TRACED = fx.symbolic_trace(lambda x: x * torch.sigmoid(x))
PAIR = Model(), {"x": torch.rand(2, 4)}
ONE = Model(), torch.rand(2, 4)
ALONE = Model()
MISFIT = Model(), (1, 2)
STARRED = (lambda *tensors: sum(tensors)), (torch.rand(2),)


def raises():
    return torch.rand(2) @ torch.rand(3)


def exported():
    return torch.export.export(Model(), (torch.rand(2, 4),))


def needs(width):
    return width


class Breaks(torch.nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x


BREAKS = Breaks(), (torch.rand(2),)
RAISES = (lambda x: x.sum(0).mean([1, 2])), (torch.rand(2, 3),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the document's example and more; what was imported from it is forgotten."""
    (tmp_path / "silu.py").write_text(EXAMPLE)
    (tmp_path / "more.py").write_text(MORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    importlib.invalidate_caches()
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def shipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed sets, one of them broken."""
    info = folder / "shipper-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipper\nVersion: 2.5\n")
    (info / "entry_points.txt").write_text("[fxrewrite.rules]\naa_broken = absent:RULES\naa_mine = more:BOTH\n")
    monkeypatch.syspath_prepend(folder)


class Run:
    """What a command did."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        capsys.readouterr()
        try:
            self.status = main(argv)
        except SystemExit as stop:  # argparse
            self.status = stop.code
        self.out, self.err = capsys.readouterr()

    @property
    def data(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *argv: Run(capsys, *argv)


# The document


@pytest.mark.parametrize(("command", "expected"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_the_sessions_of_the_document(run: Any, command: str, expected: str) -> None:
    """`...` stands for anything, with the spaces before it: a slow machine fills more of a column with its time."""
    done = run(*shlex.split(command))
    said = done.out + done.err
    pattern = ".*?".join(map(re.escape, re.split(r" *\.\.\.", expected)))
    assert re.fullmatch(pattern, said, re.DOTALL), said
    assert "\x1b" not in said


def test_the_document_has_sessions_of_most_commands() -> None:
    assert EXAMPLE
    assert {command.split()[0] for command, _ in SESSIONS} == {"rules", "show", "explain", "apply"}


# rules and show


LIBRARY = """
import torch

@torch.library.custom_op("{name}::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice.register_fake
def _(x):
    return torch.empty_like(x)
"""
OF_A_LIBRARY = """{imports}
[[rule]]
id        = "lib.twice"
pattern   = "mul(x, 2)"
replace   = 'op("{name}::twice", x)'
where     = ["dtype(x) in {{float32, float64}}"]
domain    = "finite"
numerics  = "{numerics}"
gradients = false
"""


@pytest.mark.parametrize("way", ["imports", "--import", "--import file"])
def test_a_rule_file_may_name_the_operators_of_a_library(run: Any, folder: Path, way: str) -> None:
    name = f"lib_{way.strip('-').replace(' ', '_')}"
    (folder / f"{name}.py").write_text(LIBRARY.format(name=name))
    imports = f'imports = ["{name}"]' if way == "imports" else ""
    (folder / "lib.toml").write_text(OF_A_LIBRARY.format(name=name, imports=imports, numerics="exact"))
    more = {"imports": [], "--import": ["--import", name], "--import file": ["--import", f"{name}.py"]}[way]
    if more:
        missing = run("show", "lib.toml")
        assert missing.status == 2
        assert f"nothing that was imported so far defines operators of '{name}', so import its library" in missing.err
    result = run("verify", "lib.toml", "--samples", "8", *more)
    assert result.status == 0, result.out + result.err
    assert "domain finite, gradients no" in run("show", "lib.toml", *more).out


def test_a_counterexample_imports_the_library_of_its_operator(run: Any, folder: Path) -> None:
    (folder / "lib_false.py").write_text(LIBRARY.format(name="lib_false").replace("x * 2", "x * 2 + 1"))
    (folder / "lib.toml").write_text(
        OF_A_LIBRARY.format(name="lib_false", imports='imports = ["lib_false"]', numerics="approximate")
    )
    result = run("verify", "lib.toml", "--samples", "8")
    assert result.status == 1
    program = re.search(r"^# lib.twice is false.*?^print\(\"rewritten.*?$", result.out, re.MULTILINE | re.DOTALL)
    assert program is not None, result.out
    assert re.search(r"^import .*\blib_false\b", program[0], re.MULTILINE)
    ran = subprocess.run([sys.executable, "-c", program[0]], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "rewritten: " in ran.stdout


@pytest.mark.usefixtures("shipped")
def test_rules_lists_sets_with_what_is_broken(run: Any) -> None:
    done = run("rules")
    assert done.status == 0, "what another package broke is no failure of the listing"
    assert run("show", "aa_broken").status == 2
    lines = [line for line in done.out.splitlines() if line.startswith("aa_")]
    assert re.fullmatch(
        r"aa_broken +rule set 'aa_broken' of distribution shipper 2\.5 .*is broken: .*absent.*", lines[0]
    )
    assert re.fullmatch(r"aa_mine +2 rules  shipper 2\.5", lines[1])
    data = {row["name"]: row for row in run("rules", "--json").data}
    assert data["aa_mine"] == {"name": "aa_mine", "distribution": "shipper 2.5", "rules": 2}
    assert "ModuleNotFoundError" in data["aa_broken"]["error"]


@pytest.mark.usefixtures("shipped")
def test_rules_of_a_set_are_its_text(run: Any) -> None:
    done = run("rules", "aa_mine")
    assert done.status == 0
    assert done.out.splitlines()[0] == "both"
    assert "  mine.use_silu   mul(x, sigmoid(x)) -> (silu(x))" in done.out
    assert [rule["id"] for rule in run("rules", "aa_mine", "--json").data["rules"]] == ["mine.use_silu", "mine.never"]


def test_a_listing_cuts_long_patterns_and_show_does_not(run: Any) -> None:
    row = next(line for line in run("rules", "attention").out.splitlines() if "  attention.fuse " in line)
    assert len(row) < 300
    assert " ... -> (attention(q, k, v, mask, sinks, scale, softcap); " in row
    whole = run("show", "attention.fuse").out
    assert "lit(divisor))" in whole
    assert " ... " not in whole


def test_show_says_what_rules_promise_and_where_they_stand(run: Any) -> None:
    done = run("show", "more.py:ENDLESS")
    assert done.status == 0
    assert "    numerics approximate, rng removes, shapes changes, optional\n    more.undo_silu (more.py:" in done.out
    assert "after mine.use_silu" in run("show", "more:never").out
    data = run("show", "more.py:ENDLESS", "--json").data
    assert re.fullmatch("[0-9a-f]{64}", data["digest"])
    assert data["rules"][1] | {"pattern": "", "provider": "", "doc": ""} == {
        "id": "mine.undo_silu",
        "pattern": "",
        "doc": "",
        "provider": "",
        "after": [],
        "before": [],
        "numerics": "approximate",
        "rng": "removes",
        "shapes": "changes",
        "optional": True,
        "domain": "all",
        "gradients": True,
        "terminates": True,
    }


def test_show_of_a_plan_says_each_rule_once(run: Any) -> None:
    done = run("show", "more.py:PLAN")
    assert done.out.startswith("once: mine\n")
    assert done.out.count("\nmine.use_silu\n") == 1


def test_show_says_why_there_is_no_digest(run: Any, folder: Path) -> None:
    (folder / "odd.py").write_text(
        "import torch\nfrom fxrewrite import rule\nLOCK = object()\n"
        "odd = rule('odd.rule')(lambda x: torch.relu(x))\n"
        "odd.replacement(lambda x: torch.exp(x) if LOCK else x)\n"
    )
    done = run("show", "odd.py:odd")
    assert done.status == 0
    assert re.search(r"^digest  none: .*cannot be cached", done.out, re.MULTILINE)
    assert run("show", "odd.py:odd", "--json").data["digest"] is None


# explain


def test_explain_as_json(run: Any) -> None:
    (found,) = run("explain", "silu.py:use_silu", "silu.py:model", "--json").data
    (miss,) = found.pop("misses")
    assert found == {
        "rule": "mine.use_silu",
        "pattern": "mul(x, sigmoid(x))",
        "matches": 1,
        "anchors": 2,
        "operators": ["aten::mul"],
    }
    assert (miss["node"], miss["reason"]) == ("mul_1", "operator")
    assert "sigmoid" in miss["expected"]
    assert "tanh" in miss["found"]
    assert miss["source"] == "silu.py:28"


def test_explain_goes_through_all_rules_of_a_set(run: Any) -> None:
    assert [found["rule"] for found in run("explain", "more:BOTH", "silu:model", "--json").data] == [
        "mine.use_silu",
        "mine.never",
    ]


# verify


VERIFIED = """
import torch
from fxrewrite import Pattern, Rule, RuleSet, cap

x = cap("x")
true = Rule("signs.true", Pattern((torch.neg(torch.neg(x)),)), lambda x: x)
false = Rule("signs.false", Pattern((torch.abs(torch.neg(x)),)), lambda x: torch.neg(x))
broken = Rule("signs.broken", Pattern((torch.sin(x), torch.cos(x))), lambda x: torch.max(x, 0))
SIGNS = RuleSet("signs", true, false, broken)
"""


def test_verify_prints_a_line_a_rule_and_ends_with_status_1_when_one_fails(run: Any, folder: Path) -> None:
    (folder / "signs.py").write_text(VERIFIED)
    done = run("verify", "signs.py:true", "--samples", "7")
    said = "ok      signs.true  tested on 7 samples, no difference\n1 of 1 rules passed\n"
    assert (done.status, done.out) == (0, said)
    done = run("verify", "signs.py:SIGNS", "--samples", "8", "--seed", "3")
    assert done.status == 1
    lines = done.out.splitlines()
    assert lines[0] == "ok      signs.true    tested on 8 samples, no difference"
    assert lines[1].startswith("FAILED  signs.false   false: value: output 0[")
    assert "# signs.false is false" in lines, "a program to be copied, which is not indented"
    assert ", seed=3)." in done.out
    assert re.search("^FAILED  signs.broken  .*the replacement returned", done.out, re.MULTILINE)
    assert lines[-1] == "1 of 3 rules passed"
    done = run("verify", "signs.py:SIGNS", "--samples", "8", "--json")
    assert done.status == 1
    assert [(row["rule"], row["ok"]) for row in done.data] == [
        ("signs.true", True),
        ("signs.false", False),
        ("signs.broken", False),
    ]
    assert "the replacement returned" in done.data[2]["verdict"]


# apply


def test_apply_writes_the_graph_and_the_page(run: Any, folder: Path) -> None:
    done = run("apply", "silu.py:RULES", "silu.py:model", "-o", "out.fx.txt", "--page", "out.html", "--json")
    assert done.status == 0
    assert done.data["report"]["rules"][0]["rewrites"] == 1
    assert done.data["written"] == ["out.fx.txt", "out.html"]
    assert "%1: f32[2, 4] = aten.silu(%0)  # mine.use_silu\n" in (folder / "out.fx.txt").read_text()
    page = (folder / "out.html").read_text()
    assert "<title>silu.py:RULES on silu.py:model</title>" in page
    assert "- %1: f32[2, 4] = aten.sigmoid(%0)" in page  # the graph as it was before


@pytest.mark.parametrize("graph", ["more.py:TRACED", "more:PAIR", "more:ONE", "more:exported"])
def test_a_graph_can_be_given_in_several_ways(run: Any, graph: str) -> None:
    (found,) = run("explain", "silu:RULES", graph, "--json").data
    assert found["matches"] == 1


def test_level_torch_keeps_the_functions_that_the_model_calls(run: Any) -> None:
    done = run("apply", "silu.py:RULES", "silu.py:model", "--level", "torch", "--diff")
    assert "= torch.nn.functional.silu(%0" in done.out
    assert "aten." not in done.out.partition("ms\n")[2]


class Silu(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.12, when it loads one
def test_an_exported_program_is_rewritten_and_saved(run: Any, folder: Path) -> None:
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 4), Silu()), (torch.rand(2, 4),))
    torch.export.save(program, folder / "in.pt2")
    done = run("apply", "silu.py:RULES", "in.pt2", "-o", "out.pt2", "--diff")
    assert (done.status, done.err) == (0, "")
    assert "aten.silu" in done.out
    again = torch.export.load(folder / "out.pt2")
    x = torch.rand(2, 4)
    torch.testing.assert_close(again.module()(x), program.module()(x))
    assert again.graph_signature.input_specs == program.graph_signature.input_specs
    assert any("silu" in str(node.target) for node in again.graph.nodes)


def test_rules_from_a_rule_file(run: Any, folder: Path) -> None:
    (folder / "mine.toml").write_text(
        '[[rule]]\nid = "mine.use_silu"\npattern = "mul(x, sigmoid(x))"\nreplace = "silu(x)"\n'
    )
    assert "    mine.toml:mine.use_silu\n" in run("show", "mine.toml").out
    done = run("apply", "mine.toml", "silu.py:model", "--expect", "mine.use_silu=1", "--diff")
    assert (done.status, done.err) == (0, "")
    assert "= aten.silu(%0)  # mine.use_silu" in done.out


def test_fixpoint_repeats_and_says_when_it_does_not_end(run: Any) -> None:
    assert run("apply", "silu.py:RULES", "silu.py:model", "--fixpoint").status == 0
    done = run("apply", "more.py:ENDLESS", "silu.py:model", "--fixpoint")
    assert done.status == 1
    assert "fxrewrite: error: set endless still changes the graph after 8 rounds" in done.err


def test_nothing_to_do_is_said(run: Any) -> None:
    done = run("apply", "more:undo_silu", "silu:model", "--diff")
    assert done.status == 0
    assert done.out.startswith("0 rewrites by 0 of 1 rules")
    assert done.out.endswith("the graph is as before\n")


def test_expectations_of_a_run_are_not_kept(run: Any) -> None:
    assert run("apply", "more.py:PLAN", "silu.py:model", "--expect", "mine.use_silu=2").status == 1
    assert sys.modules["more"].PLAN.expectations == {}


def test_an_unmet_expectation_and_a_refusal_end_with_status_1(run: Any) -> None:
    done = run("apply", "silu.py:RULES", "silu.py:model", "--expect", "mine.use_silu=2")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("fxrewrite: error: mine.use_silu: expected at least 2 rewrites, made 1")
    done = run("apply", "more.py:STRICT", "silu.py:model")
    assert (done.status, done.out) == (1, "")
    assert re.fullmatch(
        r"fxrewrite: error: mine\.never: not today at %\w+ \(silu\.py:28\); come back tomorrow\n", done.err
    )


# What cannot be run


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("show nothing_like_that", "'nothing_like_that' is neither a registered rule set nor a rule of one"),
        ("show absent.py:RULES", "there is no file absent.py"),
        ("apply silu.py:RULES absent.pt2", "there is no file absent.pt2"),
        ("apply silu.py:RULES silu.py:Nodel", "silu.py has no object 'Nodel'; did you mean model or Model?"),
        (
            "apply silu.py:model silu.py:model",
            "silu.py:model is of type function; expected a RuleSet, a Rule or a Plan",
        ),
        ("apply silu.py:RULES silu.py:RULES", "silu.py:RULES is of type RuleSet; expected a GraphModule, an"),
        ("apply silu.py:RULES silu.py", "silu.py: say which object of the file, as in silu.py:NAME"),
        ("apply silu:RULES more:ALONE", "is of type Model; expected a GraphModule, * add its inputs: (module, inputs)"),
        ("apply silu:RULES more:needs", "more:needs needs arguments (width); expected a GraphModule"),
        ("apply silu:RULES more:raises", "more:raises() failed: RuntimeError: * (more.py:"),
        (
            "apply silu:RULES more:MISFIT",
            "more:MISFIT: the inputs do not fit forward(x): too many positional arguments",
        ),
        ("apply silu:RULES more:STARRED", "more:STARRED: forward takes *tensors; give the inputs as a dict by name"),
        ("apply silu:RULES more:BREAKS", "more:BREAKS: the model does not compile to one graph: "),
        ("apply silu:RULES bad.pt2", "bad.pt2 is not an exported program: "),
        ("apply silu:RULES more:TRACED --level aten", "more:TRACED is a graph already, at its own level"),
        ("apply silu:RULES more:TRACED -o out.pt2", "out.pt2 would be an exported program, but more:TRACED is not one"),
        ("apply more:PLAN more:TRACED --fixpoint", "--fixpoint is for a rule set"),
        ("verify more:NONE", "more:NONE has no rule to verify"),
        ("apply silu:RULES more:TRACED --expect mine.x=1", "the plan has no rule or step 'mine.x'"),
        (
            "apply silu:RULES more:TRACED --page no/such/folder.html",
            "there is no folder no/such to write no/such/folder.html to",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run: Any, folder: Path, command: str, said: str) -> None:
    (folder / "bad.pt2").write_text("no archive")
    for more in ([], ["--json"]):
        done = run(*shlex.split(command), *more)
        assert (done.status, done.out) == (2, "")
        assert re.search(".*".join(map(re.escape, said.split("*", 1) if "* " in said else [said])), done.err), done.err
        assert re.fullmatch("fxrewrite: error: [^\n]*\n", done.err)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("rewrite", "invalid choice: 'rewrite'"),
        ("apply silu.py:RULES", "the following arguments are required: GRAPH"),
        ("apply a b -o out.txt", "out.txt is neither OUT.pt2 nor OUT.fx.txt"),
        ("apply a b --expect mine.use_silu", "'mine.use_silu' is not of the form RULE=N"),
        ("apply a b --level graph", "invalid choice: 'graph'"),
        ("verify a --samples 0", "'0' is not a number above 0"),
        ("verify a --samples many", "'many' is not a number above 0"),
    ],
)
def test_a_wrong_option_prints_the_usage(run: Any, command: str, said: str) -> None:
    done = run(*shlex.split(command))
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("usage: fxrewrite")
    assert said in done.err


# Help and start-up


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", ["rules", "show", "explain", "verify", "apply", "--version", "Exit status: 0 done"]),
        ("rules", ["NAME", "--json", "package.module:OBJECT"]),
        ("show", ["RULES", "registered set", "file.py:OBJECT", "rules.toml", "digest"]),
        ("explain", ["RULE GRAPH", "--level {aten,torch}", ".pt2", "nearest misses first", "(module, inputs)"]),
        ("verify", ["--samples N", "--thorough", "600 inputs a rule", "--seed N", "(default: 64)", "drawn inputs"]),
        ("apply", ["-o OUT", "OUT.fx.txt, or OUT.pt2", "--page FILE.html", "--diff", "--fixpoint", "--expect RULE=N"]),
    ],
)
def test_help_says_what_can_be_given(run: Any, command: str, words: list[str]) -> None:
    done = run(*shlex.split(command), "--help")
    assert (done.status, done.err) == (0, "")
    for word in words:
        assert word in re.sub(r"\s+", " ", done.out)
    assert max(map(len, done.out.splitlines())) <= 120


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_real_command_starts_without_torch(option: str, folder: Path) -> None:
    program = f"import sys; sys.argv = ['fxrewrite', '{option}']\nfrom fxrewrite.cli import main\n" + (
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == "False\n"
    assert done.stdout.startswith("usage: fxrewrite" if option == "--help" else "fxrewrite ")


def test_the_real_command_in_a_process_of_its_own(folder: Path) -> None:
    command = [sys.executable, "-m", "fxrewrite", "apply", "silu:RULES", "silu:model", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["report"]["rules"][0]["rewrites"] == 1


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("apply silu:RULES more:RAISES", 2, "Dimension out of range"),
        ("apply silu:RULES odd.pt2", 2, "odd.pt2 is not an exported program"),
        ("apply more:STRICT silu:model", 1, "not today"),
    ],
    ids=["model", "program", "rule"],
)
def test_the_real_command_prints_no_log_of_torch_before_an_error(
    folder: Path, command: str, status: int, said: str
) -> None:
    with zipfile.ZipFile(folder / "odd.pt2", "w") as archive:
        archive.writestr("a", "b")
    argv = [sys.executable, "-m", "fxrewrite", *command.split()]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert re.fullmatch(f"fxrewrite: error: [^\n]*{said}[^\n]*\n", done.stderr), done.stderr
