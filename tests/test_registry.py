"""Shipped rule sets are found by name, a broken package breaks only its own, and a wrong name says what exists."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fxrewrite.errors import FxRewriteError
from fxrewrite.plan import Plan, RuleSet
from fxrewrite.registry import GROUP, RegistryError, RegistryWarning, find_object, load, raised_text, registered
from fxrewrite.rule import Rule
from fxrewrite.spmd import joined_layouts
from fxrewrite.spmd.layouts.registered import LAYOUT_GROUP
from rules.layouts import LAYOUTS

RULES = """
import torch

from fxrewrite import RuleSet, rule


@rule("{name}.use_silu")
def use_silu(x):
    return x * torch.sigmoid(x)


@use_silu.replacement
def _(x):
    return torch.nn.functional.silu(x)


RULES = RuleSet("{name}", use_silu)
PLAN = RULES.fixpoint()


class Box:
    rules = RULES
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from; what was imported from it is forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def ship(folder: Path) -> Callable[..., None]:
    """`ship("package", name="module:RULES")` installs a distribution with these entry points."""

    def install(distribution: str, group: str = GROUP, **entries: str) -> None:
        info = folder / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        importlib.invalidate_caches()

    return install


def write(folder: Path, module: str, text: str = RULES) -> Path:
    path = folder / f"{module}.py"
    path.write_text(text.format(name=module) if text is RULES else text)
    importlib.invalidate_caches()
    return path


# Registered sets


def test_sets_are_sorted_and_imported_when_they_are_asked_for(folder: Path, ship: Callable[..., None]) -> None:
    write(folder, "alpha_rules")
    ship("shipper", beta_set="alpha_rules:RULES", alpha_set="alpha_rules:RULES")
    sets = registered()
    assert list(sets) == sorted(sets)
    assert {"alpha_set", "beta_set"} <= sets.keys()
    assert len(sets) == len(list(sets))
    assert sets.distribution("alpha_set") == "shipper 1.0"
    assert "alpha_rules" not in sys.modules
    assert sets["alpha_set"] is sys.modules["alpha_rules"].RULES


def test_a_name_that_nobody_registers_is_a_key_error() -> None:
    assert registered().get("nobody_registers_this") is None
    with pytest.raises(KeyError, match="nobody_registers_this"):
        registered()["nobody_registers_this"]


@pytest.mark.parametrize(
    ("text", "value", "found"),
    [
        ("RULES = 1 / 0\n", "bad:RULES", r"ZeroDivisionError: division by zero \(bad\.py:1\)"),
        ("RULES = []\n", "bad:RULES", "expected a RuleSet, found of type list"),
        ("", "bad:RULES", "AttributeError: module 'bad' has no attribute 'RULES'"),
        ("", "absent_module:RULES", "ModuleNotFoundError: No module named 'absent_module'"),
    ],
)
def test_a_broken_package_breaks_only_its_own_set(
    folder: Path, ship: Callable[..., None], text: str, value: str, found: str
) -> None:
    write(folder, "bad", text)
    write(folder, "good")
    ship("broken-package", bad_set=value)
    ship("working", good_set="good:RULES")
    sets = registered()
    with pytest.raises(RegistryError, match=rf"'bad_set' of distribution broken-package 1\.0 \({value}\) is .*{found}"):
        sets["bad_set"]
    assert isinstance(sets["good_set"], RuleSet)
    assert load("good.use_silu") is load("good:use_silu")  # found beside a set that cannot be searched
    with pytest.raises(RegistryError, match="broken, so not searched: bad_set"):
        load("good.use_sily")


def test_what_works_is_given_and_what_is_broken_is_warned_of(folder: Path, ship: Callable[..., None]) -> None:
    write(folder, "good")
    ship("My.Rules", good_set="good:RULES", bad_set="absent_module:RULES")
    own = registered().of("my_rules")
    assert list(own) == ["bad_set", "good_set"]
    with pytest.warns(
        RegistryWarning, match=r"left out: rule set 'bad_set' of distribution My\.Rules 1\.0 .* is broken"
    ):
        assert [name for name, _ in own.working()] == ["good_set"]
    with pytest.raises(RegistryError, match=r"'mine' registers no rule sets; these do: My\.Rules, .*install it again"):
        registered().of("mine")


def test_layout_rules_of_packages_are_joined_and_what_is_broken_or_clashes_is_left_out(
    folder: Path, ship: Callable[..., None]
) -> None:
    text = """
from fxrewrite.spmd import LayoutRule, LayoutRules
NEW = LayoutRules([LayoutRule("mine.trace", ("aten::trace",), "!a !b -> ")])
OTHER = LayoutRules([LayoutRule("mine.relu", ("aten::relu",), "a... -> a...")])
"""
    write(folder, "mine_layouts", text)
    before = len(joined_layouts(LAYOUTS))
    ship("mine", LAYOUT_GROUP, zz_new="mine_layouts:NEW", zz_other="mine_layouts:OTHER", zz_broken="absent_module:NEW")
    with pytest.warns(RegistryWarning) as caught:
        joined = joined_layouts(LAYOUTS)
    found = joined.get("aten::trace")
    assert found is not None
    assert found.id == "mine.trace"
    assert len(joined) == before + 1
    said = sorted(str(warning.message) for warning in caught)
    assert said[0].startswith(
        "left out: layout rule set 'zz_broken' of distribution mine 1.0 (absent_module:NEW) is broken"
    )
    assert said[1].startswith(
        "left out: the layout rules 'zz_other' are for operators that have one already: aten::relu"
    )


def test_a_name_registered_twice_names_both(folder: Path, ship: Callable[..., None]) -> None:
    write(folder, "good")
    ship("one", twice="good:RULES")
    ship("two", twice="good:Box.rules")
    with pytest.raises(
        RegistryError, match=r"'twice' is registered twice, by one 1\.0 \(good:RULES\) and two 1\.0 \(good:Box\.rules\)"
    ):
        load("twice")
    assert "twice" in registered()


def test_our_own_sets_load_and_their_rules_have_names() -> None:
    sets = registered()
    ours = [name for name in sets if sets.distribution(name).startswith("fxrewrite ")]
    assert {"activations", "autosp", "normal_forms"} <= set(ours)
    for name in ours:
        for rule in sets[name].rules():
            assert load(rule.id) is rule


# What a user can name


def test_every_kind_of_name_leads_to_its_rules(folder: Path, ship: Callable[..., None]) -> None:
    path = write(folder, "mine")
    ship("mine", mine="mine:RULES")
    module = importlib.import_module("mine")
    assert load("mine") is load("mine:RULES") is load(f"{path}:RULES") is load("mine:Box.rules") is module.RULES
    assert isinstance(load("mine:PLAN"), Plan)
    assert isinstance(load("mine.use_silu"), Rule)
    assert load("mine.use_silu") is module.use_silu


def test_a_rule_file_is_a_set(folder: Path) -> None:
    path = folder / "mine.toml"
    path.write_text('[[rule]]\nid = "mine.use_silu"\npattern = "mul(x, sigmoid(x))"\nreplace = "silu(x)"\n')
    found = load(str(path))
    assert isinstance(found, RuleSet)
    assert [rule.id for rule in found.rules()] == ["mine.use_silu"]
    path.write_text("[[rule]]\n")
    with pytest.raises(FxRewriteError, match=r"mine\.toml"):
        load(str(path))


def test_a_rule_is_found_in_a_set_of_another_name(folder: Path, ship: Callable[..., None]) -> None:
    write(folder, "mine")
    ship("mine", zeta="mine:RULES", eta="mine:RULES")  # one rule in two sets is one rule
    assert load("mine.use_silu") is load("mine:use_silu")


def test_two_rules_of_one_id_name_both_sets(folder: Path, ship: Callable[..., None]) -> None:
    write(folder, "mine")
    write(folder, "other", RULES.format(name="mine"))
    ship("mine", zeta="mine:RULES", eta="other:RULES")
    with pytest.raises(RegistryError, match=r"'mine\.use_silu' is another rule in each of the sets eta and zeta"):
        load("mine.use_silu")


def test_a_wrong_name_says_what_was_tried_and_what_exists(folder: Path, ship: Callable[..., None]) -> None:
    write(folder, "mine")
    ship("mine", mine_set="mine:RULES")
    with pytest.raises(RegistryError) as error:
        load("mine.use_sulu")
    for said in (
        "'mine.use_sulu' is neither a registered rule set",
        "did you mean 'mine.use_silu'",
        "mine_set",
        "file.py:OBJECT",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:RULES", "there is no module no_such_module, in the current folder or installed"),
        ("mine.deeper:RULES", "there is no module mine.deeper"),
        ("mine:RULE", "mine has no object 'RULE'; did you mean RULES"),
        ("mine:Box.nothing", r"mine has no object 'Box\.nothing'"),
        ("mine:Box", "mine:Box is the Box class; expected a RuleSet, a Rule or a Plan"),
        ("mine:torch.float32", "of type dtype; expected"),
        ("mine:", "'mine:' names no object"),
        (":RULES", "':RULES' names no object"),
        ("absent.py:RULES", r"there is no file absent\.py"),
        ("mine.py", r"say which object of the file, as in mine\.py:RULES"),
        ("absent.toml", r"there is no rule file absent\.toml"),
    ],
)
def test_a_wrong_path_says_what_is_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str) -> None:
    write(folder, "mine")
    monkeypatch.chdir(folder)
    with pytest.raises(RegistryError, match=said):
        load(path)


@pytest.mark.parametrize("path", ["raises:RULES", "raises.py:RULES"])
def test_an_import_that_raises_names_the_line(folder: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    write(folder, "raises", "import torch\nfrom torch import absent_name\n")
    monkeypatch.chdir(folder)
    with pytest.raises(RegistryError, match=r"importing raises.* failed: ImportError: .*absent_name.*\(raises\.py:2\)"):
        load(path)
    assert "raises" not in sys.modules


def test_a_module_that_a_module_misses_is_not_taken_for_it(folder: Path) -> None:
    write(folder, "misses", "import absent_module\n")
    with pytest.raises(RegistryError, match=r"importing misses failed: .*'absent_module' \(misses\.py:1\)"):
        load("misses:RULES")


def test_a_file_that_does_not_parse_names_the_line(folder: Path) -> None:
    path = write(folder, "typo", "RULES = (\n")
    with pytest.raises(RegistryError, match=r"SyntaxError: '\(' was never closed \(typo\.py, line 1\)$"):
        load(f"{path}:RULES")


def test_a_file_hides_no_module_of_its_name(folder: Path) -> None:
    (folder / "deeper").mkdir()
    path = write(
        folder / "deeper", "graphlib", "import dataclasses\n\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
    )
    sys.modules.pop("graphlib", None)
    found = find_object(f"{path}:A")
    assert found is find_object(f"{path}:A")
    assert found.__module__.startswith("graphlib_")
    assert hasattr(importlib.import_module("graphlib"), "TopologicalSorter")


def test_a_file_that_nothing_else_is_named_like_has_its_own_name(folder: Path) -> None:
    (folder / "deeper").mkdir()
    path = write(folder / "deeper", "lonely_rules")
    assert find_object(f"{path}:use_silu").provider.startswith("lonely_rules.use_silu (")


def test_an_exception_without_a_message_is_its_name() -> None:
    assert raised_text(KeyboardInterrupt()) == "KeyboardInterrupt"
