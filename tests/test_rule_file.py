"""Rule files: what they define, what is said of each mistake, digests, and the way back."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import Pattern, Rule, RuleDefinitionError, RuleSet, cap, op, where
from fxrewrite.pattern import parse, parse_term, term_text
from fxrewrite.rule_file import RuleEntry, RuleFile, RuleFileError, dump_rules, load_rules, parse_rules

ACTIVATIONS = """
# written-out activations
name = "activations"
atomic = true

[[rule]]
id       = "activations.silu"
pattern  = "mul(x, sigmoid(x))"
replace  = "silu(x)"
where    = ["dtype(x) in {float32, bfloat16}", "rank(x) >= 1"]
numerics = "approximate"
optional = true
after    = ["activations.scale"]
doc      = "x * sigmoid(x) is \\"silu\\" ✓"

[[rule]]
id      = "activations.scale"
pattern = "mul(mul(x, lit(a)), lit(b))"
replace = "mul(mul(x, b), a)"
where   = ["a > b"]
rng     = "preserves"
"""


def file_of(pattern: str, replace: str, *more: str) -> str:
    return "\n".join(["[[rule]]", 'id = "test.it"', f"pattern = '''{pattern}'''", f"replace = '''{replace}'''", *more])


def calls(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_what_a_file_defines(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text(ACTIVATIONS, encoding="utf-8")
    rules = load_rules(path)
    silu, scale = rules.rules()
    assert (rules.name, rules.atomic) == ("activations", True)
    assert (silu.id, silu.provider) == ("activations.silu", "file.toml:activations.silu")
    assert silu.pattern == parse("mul(x, sigmoid(x))", silu.pattern.where)
    assert silu.pattern.where == (where.dtype("x", torch.float32, torch.bfloat16), where.parse("rank(x) >= 1"))
    assert (silu.numerics, silu.rng, silu.shapes) == ("approximate", "preserves", "preserves")
    assert (silu.optional, silu.after, silu.before) == (True, ("activations.scale",), ())
    assert silu.doc == 'x * sigmoid(x) is "silu" ✓'
    assert scale.doc == "mul(mul(x, b), a)"
    assert (scale.optional, scale.numerics) == (False, "exact")


def test_a_file_without_a_name_gives_its_own() -> None:
    assert parse_rules(file_of("relu(x)", "x"), "noise.toml").name == "noise"


def test_rules_fire() -> None:
    gm = make_fx(lambda x: x * torch.sigmoid(x), tracing_mode="symbolic")(torch.rand(2, 3))
    report = parse_rules(ACTIVATIONS, "activations.toml").apply(gm)
    assert calls(gm) == ["aten.silu.default"]
    assert report.rule("activations.silu").rewrites == 1


def test_a_constraint_of_a_file_stands_in_the_way() -> None:
    gm = make_fx(lambda x: x * torch.sigmoid(x))(torch.rand(2, 3, dtype=torch.float64))
    rules = parse_rules(ACTIVATIONS, "activations.toml")
    assert rules.apply(gm).rewrites == 0
    (silu, _) = rules.rules()
    assert "expected dtype(x) in {float32, bfloat16}, found x has dtype float64" in str(silu.explain(gm))


def scattered(x: Any, at: Any) -> Any:
    """Nothing is scattered; an index is empty."""
    return torch.scatter(x, 0, torch.empty(0, 3, dtype=torch.int64), at)


@pytest.mark.parametrize(
    ("pattern", "replace", "run", "expected"),
    [
        ("relu(relu(x))", "relu(x)", lambda x: x.relu().relu(), "relu"),
        ("mul(x, 1)", "x", lambda x: torch.exp(x * 1), "exp"),
        ("mul(x, lit(n))", "mul(n, x)", lambda x: x * 3, "mul"),
        ("neg(sub(x, lit(n)))", "sub(n, x)", lambda x: -(x - 3), "rsub"),
        ("mul(mul(x, lit(a)), lit(b))", "mul(x, mul(a, b))", lambda x: x * 2.0 * 3.0, "mul"),
        ("mul(x, lit(a))", "div(x, div(1.0, a))", lambda x: x * 2.0, "div"),
        ("select(exp(x), 0, 0)", "exp(x[0])", lambda x: x.exp().select(0, 0), "select exp"),
        ("select(x, 1, 2)", "x[..., 2]", lambda x: x.select(1, 2), "select"),
        ("relu(x)", "cat([relu(x[:1]), relu(x[1:])])", torch.relu, "slice relu slice relu cat"),
        ("relu(x)", 'op("aten::relu", slice(x))', torch.relu, "slice relu"),
        ("gelu(x, approximate=any(how))", "gelu(x, approximate=how)", torch.nn.GELU("tanh"), "gelu"),
        ("linear(x, w, opt(b))", "linear(x, w, b)", lambda x: torch.nn.functional.linear(x, x), "linear"),
        (
            "scatter(exp(x), 0, i, lit(n))",
            "exp(scatter(x, 0, i, n))",
            lambda x: scattered(x.exp(), 1),
            "empty scatter exp",
        ),
        (
            "exp(scatter(x, 0, i, y))",
            "scatter(exp(x), 0, i, exp(y))",
            lambda x: scattered(x, x).exp(),
            "empty exp exp scatter",
        ),
        ("cat([*exp(t)])", "exp(t[-1])", lambda x: torch.cat([x.exp()]), "exp"),
        ("exp(x)", "exp(reshape(x, [size(x, 0), -1]))", torch.exp, "sym_size reshape exp"),
        (
            "flatten(x)",
            "reshape(x, [mul(size(x, 0), size(x, 1))])",
            torch.flatten,
            "sym_size sym_size <built-in function mul> reshape",
        ),
        ("add(exp(x), lit(y))", "add(add(exp(x), y), sub(exp(x), exp(x)))", lambda x: x.exp() + 2, "exp add sub add"),
    ],
)
def test_replacements(pattern: str, replace: str, run: Any, expected: str) -> None:
    x = torch.rand(3, 3)
    gm = make_fx(run, tracing_mode="symbolic", pre_dispatch=True)(x)
    shape_env = gm.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode.shape_env
    guards = len(shape_env.guards)
    parse_rules(file_of(pattern, replace), "test.toml").once().expect("test.it").apply(gm)
    assert " ".join(name.removeprefix("aten.").partition(".")[0] for name in calls(gm)) == expected
    assert len(shape_env.guards) == guards
    torch.testing.assert_close(gm(x), run(x))


def test_several_outputs() -> None:
    gm = make_fx(lambda x: (x.relu(), x.exp()))(torch.rand(3))
    parse_rules(file_of("(relu(x), exp(x))", "(abs(x), relu(exp(x)))"), "test.toml").apply(gm)
    assert calls(gm) == ["aten.abs.default", "aten.exp.default", "aten.relu.default"]


def test_an_error_at_a_match_names_the_rule() -> None:
    gm = make_fx(lambda x: torch.nn.functional.linear(x, x), pre_dispatch=True)(torch.rand(3, 3))
    rules = parse_rules(file_of("linear(x, w, opt(b))", "add(x, b)"), "test.toml")
    (refusal,) = rules.apply(gm).refusals
    assert str(refusal).startswith("test.it: the replacement raised RuntimeError: ")
    assert refusal.node == "linear"


HEAD = "file.toml: line 1, rule test.it: "
CYCLE = """
[[rule]]
id = "a.a"
pattern = "exp(x)"
replace = "x"
after = ["b.b"]
[[ rule ]] # another
id = "b.b"
pattern = "log(x)"
replace = "x"
after = ["a.a"]
"""


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("rule = ", ["file.toml: Invalid value (at end of document)"]),
        ("[[rule]]\nid = 1\nid = 2", ["file.toml: Cannot overwrite a value (at end of document)"]),
        ("", ["file.toml: rule is missing: the rules, in order"]),
        ("rule = []", ["file.toml: rule = []: List should have at least 1 item"]),
        ("[rule]", ["file.toml: one rule is a table in a list: write [[rule]], with two brackets, not [rule]"]),
        ("rule = [1]", ["file.toml: rule number 1: [[rule]] = 1: it should be a valid dictionary"]),
        ("[[rules]]", ["file.toml: rule is missing", "file.toml: unknown field rules; did you mean rule?"]),
        (f"atomic = 1\n{file_of('relu(x)', 'x')}", ["file.toml: atomic = 1: it should be a valid boolean"]),
        (
            '[[rule]]\nid = "a.b"\npatern = ""\nnumerics = "fast"',
            [
                "file.toml: line 1, rule a.b: pattern is missing: what to look for, in the text form",
                "file.toml: line 1, rule a.b: replace is missing",
                "file.toml: line 1, rule a.b: numerics = 'fast': it should be 'exact', 'reassociates' or 'approximate'",
                "file.toml: line 1, rule a.b: unknown field patern; did you mean pattern?",
            ],
        ),
        (
            'rule = [{id = "", pattern = "relu(x)", replace = "x", zzz = 1}]',
            [
                "file.toml: rule number 1: id = '': String should have at least 1 character",
                "unknown field zzz; there are id, pattern, replace",
            ],
        ),
        (file_of("relu(x)", "x", "where = [3]"), [HEAD + "where[0] = 3: it should be a valid string"]),
        (file_of("relu(x)", "x", "optional = 'yes'"), [HEAD + "optional = 'yes': it should be a valid boolean"]),
        (file_of("relu(x", "x"), [HEAD + "pattern 'relu(x', column 5: '(' was never closed"]),
        (file_of("rleu(x)", "x"), [HEAD + "pattern 'rleu(x)', column 1: there is no operator 'rleu'"]),
        (file_of("name(x)", "x"), [HEAD + "pattern 'name(x)', column 1: there is no operator 'name'"]),
        (file_of("relu_(x)", "x"), [HEAD + "pattern 'relu_(x)', column 1: aten::relu_ in a pattern writes to memory"]),
        (file_of("[exp(x)]", "x"), [HEAD + "pattern '[exp(x)]', column 1: several outputs are written (a, b)"]),
        (file_of("cat([*t])", "cat([t])"), [HEAD + "replace 'cat([t])': t is a list, and one value stands there"]),
        (file_of("cat([*t])", "relu(t)"), [HEAD + "replace 'relu(t)': t is a list"]),
        (file_of("exp(x)", "x", 'where = ["len(x) == 2"]'), [HEAD + "where: len(x) == 2 reads x as a list"]),
        (file_of("exp(x)", "x", 'where = ["sum(x) in {2}"]'), [HEAD + "where: sum(x) in {2} reads x as a list"]),
        (
            file_of('cat([*each(exp(x), on="y")])', "x"),
            [HEAD + "pattern 'cat([*each(exp(x), on=\"y\")])', column 7: each(..., on=) takes names of captures"],
        ),
        (file_of("x", "x"), [HEAD + "pattern 'x': the output x of a pattern must be an operator"]),
        (
            file_of("exp(y", "x", 'where = ["rank(x)", "rank(y) == 1", "n = 1"]'),
            [
                HEAD + "pattern 'exp(y', column 4",
                HEAD + "where 'rank(x)', column 1: there is no condition rank()",
                HEAD + "where 'n = 1', column 3: invalid syntax",
            ],
        ),
        (
            file_of("exp(x)", "y", 'where = ["rank(x)"]'),
            [
                HEAD + "where 'rank(x)'",
                HEAD + "replace 'y', column 1: y is not a capture of the pattern; it captures x",
            ],
        ),
        (
            file_of("exp(x)", "x", 'where = ["rank(z) == 1"]'),
            [HEAD + "where 'rank(z) == 1': z is not a capture of the pattern; it captures x"],
        ),
        (file_of("exp(x)", "relu(x"), [HEAD + "replace 'relu(x', column 5: '(' was never closed"]),
        (file_of("exp(x)", "relu(x, 1)"), [HEAD + "replace 'relu(x, 1)', column 1: in a pattern: aten::relu called"]),
        (file_of("exp(x)", "cat([x, ß, y])"), [HEAD + "replace 'cat([x, ß, y])', column 9: ß is not a capture"]),
        (
            file_of("exp(x)", "mul(mul(x, 'ß'), y)"),
            [HEAD + "replace \"mul(mul(x, 'ß'), y)\", column 18: y is not a capture"],
        ),
        (file_of("exp(x)", "root"), [HEAD + "replace 'root', column 1: root is not a capture"]),
        (file_of("exp(x)", "x[y]"), [HEAD + "replace 'x[y]', column 3: y is not a capture"]),
        (file_of("exp(x)", "add(x, ...)"), [HEAD + "replace 'add(x, ...)', column 8: ... stands for anything"]),
        (file_of("exp(x)", "lit(x)"), [HEAD + "replace 'lit(x)', column 1: lit() says what may be there"]),
        (file_of("exp(x)", "relu(maybe(relu(x)))"), [HEAD + "replace 'relu(maybe(relu(x)))', column 6: maybe()"]),
        (file_of("exp(x)", "x.relu()"), [HEAD + "replace 'x.relu()', column 1: x.relu() is not part of"]),
        (file_of("exp(x)", "(lambda: x)()"), [HEAD + "replace '(lambda: x)()', column 1"]),
        (
            file_of("exp(x)", 'op("os.getcwd", x)'),
            [HEAD + "replace 'op(\"os.getcwd\", x)', column 1: os.getcwd is a function of Python; a rule file calls"],
        ),
        (file_of("exp(x)", "3"), [HEAD + "replace '3': 3 is a Python value, not one of the graph"]),
        (file_of("mul(x, lit(n))", "n"), [HEAD + "replace 'n': n is a Python value, not one of the graph"]),
        (file_of("exp(x)", "(x, x)"), [HEAD + "replace '(x, x)': it gives 2 values, the pattern has 1 outputs"]),
        (
            file_of('siblings(linear(x, w), on="x")', "x"),
            [HEAD + "replace 'x': siblings() are as many as the graph has; their replacement is Python"],
        ),
        (
            file_of("exp(x)", "x") + "\n" + file_of("log(x)", "relu(y)"),
            [
                "file.toml: line 5, rule test.it: the id is defined before, at line 1, rule test.it",
                "file.toml: line 5, rule test.it: replace 'relu(y)', column 6: y is not a capture",
            ],
        ),
        (CYCLE, ["file.toml: set file: the order has a cycle: "]),
    ],
)
def test_mistakes(text: str, messages: list[str]) -> None:
    with pytest.raises(RuleFileError) as raised:
        parse_rules(text, "file.toml")
    assert isinstance(raised.value, RuleDefinitionError)
    assert raised.value.file == "file.toml"
    lines = str(raised.value).split("\n")
    assert len(lines) == len(messages) == len(raised.value.problems), str(raised.value)
    for line, message in zip(lines, messages, strict=True):
        assert message in line


def test_lines_are_not_guessed() -> None:
    text = file_of("relu(", "x", 'doc = """', "[[rule]]", '"""')
    with pytest.raises(RuleFileError, match=r"^file\.toml: rule test\.it: pattern"):
        parse_rules(text, "file.toml")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b"name = '\xe4'")
    with pytest.raises(RuleFileError, match=r"latin\.toml: it is not UTF-8, as TOML is"):
        load_rules(path)
    with pytest.raises(FileNotFoundError):
        load_rules(tmp_path / "missing.toml")


def test_errors_survive_a_process_boundary() -> None:
    with pytest.raises(RuleFileError) as raised:
        parse_rules(file_of("relu(", "("), "file.toml")
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (type(copy), str(copy), copy.problems) == (RuleFileError, str(raised.value), raised.value.problems)


def digest(text: str) -> str | None:
    return parse_rules(text, "file.toml").once().digest()


def test_digests_tell_files_apart() -> None:
    same = digest(ACTIVATIONS)
    assert same is not None
    assert digest(ACTIVATIONS) == same
    for old, new in (
        ("rank(x) >= 1", "rank(x) >= 2"),
        ("mul(mul(x, b), a)", "mul(mul(x, a), b)"),
        ('"silu(x)"', '"mul(1.0, silu(x))"'),
        ("approximate", "exact"),
        ("a > b", "a >= b"),
    ):
        assert old in ACTIVATIONS
        assert digest(ACTIVATIONS.replace(old, new)) not in (same, None)
    assert digest(file_of("exp(x)", "add(x, 1)")) != digest(file_of("exp(x)", "add(x, True)"))


def test_digests_are_equal_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "activations.toml"
    path.write_text(ACTIVATIONS, encoding="utf-8")
    code = f"from fxrewrite.rule_file import load_rules; print(load_rules({str(path)!r}).once().digest())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == digest(ACTIVATIONS)


def test_written_files_read_back() -> None:
    rules = parse_rules(ACTIVATIONS, "activations.toml")
    text = dump_rules(rules)
    again = parse_rules(text, "activations.toml")
    assert dump_rules(again) == text
    assert (again.name, again.atomic, again.text()) == (rules.name, rules.atomic, rules.text())
    assert again.once().digest() == rules.once().digest()
    for old, new in zip(rules.rules(), again.rules(), strict=True):
        assert old.pattern == new.pattern
        assert old.body == new.body
        assert (old.doc, old.provider) == (new.doc, new.provider)
    assert text.splitlines()[:6] == [
        'name = "activations"',
        "atomic = true",
        "",
        "[[rule]]",
        'id = "activations.silu"',
        'pattern = "mul(x, sigmoid(x))"',
    ]


def test_several_outputs_read_back() -> None:
    rules = parse_rules(file_of("(relu(x), exp(x))", "(exp(x), relu(x))", 'shapes = "changes"'), "two.toml")
    again = parse_rules(dump_rules(rules), "two.toml")
    assert again.text() == rules.text()
    assert 'replace = "(exp(x), relu(x))"' in dump_rules(rules)


@pytest.mark.parametrize("doc", ['"quoted" \\ and', "two\nlines\ttab", "∀ 🌍", "\x7f\x01", '"""'])
def test_every_string_reads_back(doc: str) -> None:
    it = Rule("test.it", parse("relu(x)"), body())
    it.doc = doc
    (again,) = parse_rules(dump_rules(RuleSet("set", it)), "set.toml").rules()
    assert again.doc == doc


def body() -> Any:
    return next(parse_rules(file_of("relu(x)", "x"), "body.toml").rules()).body


def test_what_cannot_be_written_is_named() -> None:
    replaced = Rule("python.replacement", parse("relu(x)"), lambda x: x)
    inner = RuleSet("inner", replaced)
    guarded = Rule("python.predicate", parse("relu(x)", [where.predicate("x", text="is_small")(bool)]), body())
    shadowed = Rule("python.shadowed", parse("relu(x)", [where.predicate("x", text="is_param")(bool)]), body())
    literal = Rule("python.literal", Pattern((op("to", cap("x"), frozenset()),)), body())
    with pytest.raises(RuleDefinitionError) as raised:
        dump_rules(RuleSet("set", inner, guarded, shadowed, literal))
    message = str(raised.value)
    assert message.startswith("set set cannot be written as a rule file: inner is a RuleSet, and a rule file has rules")
    assert "python.predicate: its constraint is_small(x) is a Python function" in message
    assert "python.shadowed: its constraint is_param(x) is a Python function" in message
    assert "python.literal: its text does not read back" in message
    with pytest.raises(RuleDefinitionError, match=r"python\.replacement: its replacement is a Python function"):
        dump_rules(inner)
    with pytest.raises(RuleDefinitionError, match="there is no rule in it; its invariant is a Python function"):
        dump_rules(RuleSet("empty", invariant=lambda nodes: ""))


def test_promises_and_imports_read_back() -> None:
    text = 'imports = ["math"]\n' + file_of(
        "sum(x)", "sum(reshape(x, [-1]))", 'domain = "moderate"', "terminates = false", "gradients = false"
    )
    rules = parse_rules(text, "sums.toml")
    (it,) = parse_rules(dump_rules(rules), "sums.toml").rules()
    assert (it.domain, it.terminates, it.gradients, it.imports) == ("moderate", False, False, ("math",))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("no_such_module", "t.toml: imports 'no_such_module': there is no module no_such_module; install its package"),
        ("this_raises", "t.toml: imports 'this_raises': importing it raises ZeroDivisionError: division by zero"),
        ("this_misses", "t.toml: imports 'this_misses': it needs the module no_such_module, which is not installed"),
    ],
)
def test_an_import_that_fails_is_said(module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "this_raises.py").write_text("1 / 0\n")
    (tmp_path / "this_misses.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuleFileError) as raised:
        parse_rules(f'imports = ["{module}"]\n' + file_of("relu(x)", "x"), "t.toml")
    assert str(raised.value).startswith(said)
    assert len(raised.value.problems) == 1


def test_every_field_is_described() -> None:
    for model in (RuleEntry, RuleFile):
        for name, field in model.model_fields.items():
            assert field.description, name


@pytest.mark.parametrize(
    "text", ["slice(x, 1, 0, 4)", "loose(slice(x))", 'op("aten::any", x, 1)', "x[slice(1, None, None)]"]
)
def test_operators_that_share_a_name_with_the_language(text: str) -> None:
    term = parse_term(text)
    assert parse_term(term_text(term)) == term
    assert term_text(term) == text


@pytest.mark.parametrize(
    ("heading", "columns", "read", "least"),
    [("Patterns", (1, 2), parse_term, 13), ("Constraints", (1,), where.parse, 15)],
)
def test_what_the_documentation_lists_is_read(heading: str, columns: tuple[int, ...], read: Any, least: int) -> None:
    text = (Path(__file__).parents[1] / "docs" / "rule-files.md").read_text(encoding="utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    found = [each for row in rows for column in columns for each in re.findall("`([^`]+)`", row[column])]
    texts = [each for each in found if re.search(r"\w[([]| in | > ", each) and "vllm" not in each]
    assert len(texts) >= least
    for each in texts:
        read(each)
