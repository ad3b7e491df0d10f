"""A test with an argument `registered_rule` runs once for every rule of every registered set, and without one never."""

import subprocess
import sys

import pytest

pytest_plugins = ["pytester"]

RULES = """
import torch
from fxrewrite import Pattern, Rule, RuleSet, cap

def rule(id, replacement):
    return Rule(id, Pattern((torch.neg(torch.neg(cap("x"))),)), replacement)

true = rule("signs.drop_two", lambda x: x)
false = rule("signs.drop_one", lambda x: torch.neg(x))
other = rule("signs.drop_two", lambda x: x * 1)
SIGNS = RuleSet("signs", true, RuleSet("inner", false))
AGAIN = RuleSet("again", true)
CLASH = RuleSet("clash", other)
"""
TEST = """
import signs
from fxrewrite import RuleSet
from fxrewrite.verify import verify_rewrite

def test_rule(registered_rule):
    plan = RuleSet("one", registered_rule).once()
    verify_rewrite(
        registered_rule.id, registered_rule.pattern, lambda gm: plan.apply(gm).rewrites, samples=4
    ).raise_if_false()

def test_other():
    pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # an inner run is no worker of the outer one
    pytester.syspathinsert()
    pytester.makepyfile(signs=RULES, test_rules=TEST)
    return pytester


def register(pytester: pytest.Pytester, **sets: str) -> None:
    """An installed package that registers these sets and no others: `name=OBJECT`."""
    info = pytester.path / "signs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signs\nVersion: 1.0\n")
    entries = "\n".join(f"{name} = signs:{value}" for name, value in sets.items())
    (info / "entry_points.txt").write_text(f"[fxrewrite.rules]\n{entries}\n")


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


def test_every_rule_of_every_set_is_a_test(project: pytest.Pytester) -> None:
    register(project, signs="SIGNS", again="AGAIN")
    result = run(project, "-v", "-k", "signs")
    result.assert_outcomes(passed=1, failed=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(
        ["*::test_rule[[]signs.drop_two[]] PASSED*", "*::test_rule[[]signs.drop_one[]] FAILED*"]
    )
    result.stdout.fnmatch_lines(["*VerificationError: signs.drop_one: false: value: output 0*"])


def test_two_rules_of_one_id_are_told_apart_by_their_sets(project: pytest.Pytester) -> None:
    register(project, signs="SIGNS", clash="CLASH")
    lines = run(project, "--collect-only", "-q").stdout.str()
    assert "test_rules.py::test_rule[clash/signs.drop_two]" in lines
    assert "test_rules.py::test_rule[signs/signs.drop_two]" in lines
    assert "test_rules.py::test_rule[signs.drop_one]" in lines


def test_a_broken_entry_point_is_an_error_that_names_it(project: pytest.Pytester) -> None:
    register(project, broken="NOTHING")
    result = run(project)
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*rule set 'broken' of distribution signs 1.0 (signs:NOTHING) is broken*"])


def test_tests_without_the_argument_import_no_torch() -> None:
    program = "import sys, pytest, fxrewrite.testing.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
