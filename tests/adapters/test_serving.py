"""Rule sets as passes of serving systems, on stubs of what these systems give: they are not installed here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import BaseModel
from torch import fx

from fxrewrite import Match, RuleSet
from fxrewrite.adapters.autodeploy import autodeploy_transform
from fxrewrite.adapters.vllm import vllm_pass
from fxrewrite.errors import FxRewriteError
from tests.rewriting import made, silu, targets, traced


class InductorPass:
    """As vllm/compilation/passes/inductor_pass.py has it."""

    def uuid(self) -> str:
        raise AssertionError("a digest of the source of the class says nothing about its rules")

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return True


class VllmInductorPass(InductorPass):
    """As vllm/compilation/passes/vllm_inductor_pass.py has it."""

    def __init__(self, config: Any) -> None:
        self.pass_config = config.pass_config
        self.log: list[str] = []

    @staticmethod
    def time_and_log(call: Any) -> Any:
        def wrapped(self: VllmInductorPass, graph: fx.Graph) -> None:
            self.log.append("begin")
            call(self, graph)
            self.log.append("end")

        return wrapped


class Info(BaseModel, frozen=True):
    skipped: bool
    num_matches: int
    is_clean: bool = False
    has_valid_shapes: bool = False


class Registry:
    known: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register(cls, name: str) -> Any:
        return lambda found: cls.known.setdefault(name, found)


def install(monkeypatch: pytest.MonkeyPatch, path: str, **names: Any) -> None:
    """Installs a module of that path with these names, and the packages around it."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    vars(sys.modules[path]).update(names)


RULES = RuleSet("fused", silu())


def graph() -> fx.GraphModule:
    return traced(lambda x: torch.relu(x * torch.sigmoid(x)), torch.rand(2, 3))


@pytest.mark.parametrize("package", ["vllm.compilation.passes", "vllm.compilation"])
def test_rules_are_a_pass_of_vllm(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, f"{package}.inductor_pass", InductorPass=InductorPass)
    one = vllm_pass(RULES, is_applicable=lambda compile_range: compile_range.end < 9)
    assert isinstance(one, InductorPass)
    assert one.uuid() == vllm_pass(RULES).uuid() == RULES.once().digest()
    other = RuleSet("fused", made(lambda x: x * torch.sigmoid(x), lambda x: F.hardswish(x)))
    assert one.uuid() != vllm_pass(other).uuid()
    assert [one.is_applicable_for_range(SimpleNamespace(end=end)) for end in (8, 9)] == [True, False]
    gm = graph()
    for expected in (1, 0):
        one(gm.graph)
        assert one.matched_count == one.report.rewrites == expected
    assert not any("sigmoid" in target for target in targets(gm)), "what the rules add is decomposed for inductor"

    install(monkeypatch, f"{package}.vllm_inductor_pass", VllmInductorPass=VllmInductorPass)
    logged = vllm_pass(RULES.once(), config=SimpleNamespace(pass_config="c"), name="mine")
    logged(graph().graph)
    assert (logged.matched_count, logged.pass_name, logged.log) == (1, "mine", ["begin", "end"])


def test_rules_without_a_digest_are_no_pass_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = torch.rand(1)
    rules = RuleSet("nameless", made(lambda x: torch.relu(x), lambda x: x.clamp(min=nameless.item())))
    with pytest.warns(UserWarning, match="cannot be cached"), pytest.raises(FxRewriteError, match="have no digest"):
        vllm_pass(rules)


def test_rules_are_a_transform_of_autodeploy(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "tensorrt_llm._torch.auto_deploy.transform.interface"
    install(monkeypatch, path, BaseTransform=object, TransformInfo=Info, TransformRegistry=Registry)
    seen: list[Any] = []

    def scaled(match: Match, x: Any) -> Any:
        seen.append(match.context.world_size)
        return F.silu(x)

    rules = RuleSet("scaled", made(lambda x: x * torch.sigmoid(x), scaled))
    transform = autodeploy_transform("scaled", rules)()
    assert Registry.known["scaled"] is type(transform)
    gm = graph()
    for count in (1, 0):
        result, info = transform._apply(gm, None, None, SimpleNamespace(world_size=2))
        assert result is gm
        assert info == Info(skipped=False, num_matches=count, is_clean=not count, has_valid_shapes=True)
    assert seen == [2]
    assert transform.report["test.it"].anchors == 0


@pytest.mark.parametrize(
    ("make", "package"), [(vllm_pass, "vllm"), (lambda r: autodeploy_transform("x", r), "tensorrt_llm")]
)
def test_a_missing_package_is_one_sentence(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FxRewriteError, match=f"which is not installed here: pip install {package}$"):
        make(RULES)
