"""A test with an argument `registered_rule` runs once for every rule that the project's own distribution registers."""

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


def register(pytester: pytest.Pytester, distribution: str = "my-signs", **sets: str) -> None:
    """An installed package that registers these sets and no others: `name=OBJECT`."""
    info = pytester.path / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    entries = "\n".join(f"{name} = signs:{value}" for name, value in sets.items())
    (info / "entry_points.txt").write_text(f"[fxrewrite.rules]\n{entries}\n")


OWN = ("--fxrewrite-distribution", "my_signs")


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


def test_every_rule_of_the_own_distribution_is_a_test_and_no_other(project: pytest.Pytester) -> None:
    """Whatever else is installed, and broken, as fxrewrite's own sets are in this environment."""
    register(project, signs="SIGNS", again="AGAIN")
    register(project, "others", broken="NOTHING", clash="CLASH")
    project.makepyprojecttoml('[tool.pytest]\nfxrewrite_distribution = ["my-signs"]\n')
    result = run(project, "-v")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*::test_rule[[]signs.drop_two[]] PASSED*", "*::test_rule[[]signs.drop_one[]] FAILED*"]
    )
    result.stdout.fnmatch_lines(["*VerificationError: signs.drop_one: false: value: output 0*"])


def test_two_rules_of_one_id_are_told_apart_by_their_sets(project: pytest.Pytester) -> None:
    register(project, signs="SIGNS", clash="CLASH")
    lines = run(project, "--collect-only", "-q", *OWN).stdout.str()
    assert "test_rules.py::test_rule[clash/signs.drop_two]" in lines
    assert "test_rules.py::test_rule[signs/signs.drop_two]" in lines
    assert "test_rules.py::test_rule[signs.drop_one]" in lines


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (OWN, "*rule set 'broken' of distribution my-signs 1.0 (signs:NOTHING) is broken*"),
        ((), '*registered_rule: say whose rules, fxrewrite_distribution = [[]"my-package"] under [[]tool.pytest]*'),
        (
            ("--fxrewrite-distribution", "my-sings"),
            "*distribution 'my-sings' registers no rule sets; these do: *my-signs*",
        ),
    ],
    ids=["broken", "none", "misspelt"],
)
def test_what_cannot_be_tested_is_an_error_that_says_why(
    project: pytest.Pytester, options: tuple[str, ...], said: str
) -> None:
    register(project, broken="NOTHING")
    result = run(project, *options)
    assert result.ret != 0
    result.stdout.fnmatch_lines([said])


def test_tests_without_the_argument_import_no_torch() -> None:
    program = "import sys, pytest, fxrewrite.testing.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
