"""Plans in inductor, compiled and run: never a wrong result out of a cache, also from another process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor import config, custom_graph_pass
from torch._inductor.codecache import FxGraphCache
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed import _functional_collectives as funcol

from fxrewrite.backends import OVERLAP, GraphPass, RewritingBackend, installed
from fxrewrite.backends.inductor import SLOTS
from fxrewrite.errors import refuse
from fxrewrite.plan import RuleSet
from fxrewrite.rule import rule
from fxrewrite.testing import fake_mesh
from tests.backends.cache_worker import cached, function
from tests.backends.plans import SILU, plan, scale
from tests.versions import NO_OVERLAP, TORCH

pytestmark = pytest.mark.slow  # the first compilation takes ten seconds, the others a fraction of one

HIT = {"autograd_cache_hit": 1, "fxgraph_cache_hit": 1}
MISS = {"autograd_cache_miss": 1, "autograd_cache_saved": 1, "fxgraph_cache_miss": 1}
BYPASS = {"autograd_cache_bypass": 1, "fxgraph_cache_bypass": 1}


@pytest.fixture(autouse=True, scope="module")
def _kernels_of_these_tests() -> Iterator[None]:
    """Kernels are found by their source, which says all; a C++ compiler takes most of the time."""
    with fresh_cache():
        yield


@pytest.fixture(autouse=True)
def _caches_of_this_test() -> None:
    """Graphs, which the tests are about, are not found again."""
    FxGraphCache.clear()
    AOTAutogradCache.clear()


@pytest.mark.parametrize("how", ["pre_grad", "joint", "post_grad_pre", "torch"])  # "aten": in the test after the next
@pytest.mark.some(2)
def test_equal_plans_share_what_was_compiled_and_others_never_do(how: str) -> None:
    """Two plans that differ in nothing but a closure's value: torch's own keys, and our uuid, tell them apart."""
    assert cached(how, 2.0) == {"result": 3.0, **MISS}
    assert cached(how, 2.0) == {"result": 3.0, **HIT}
    assert cached(how, 3.0) == {"result": 4.0, **MISS}
    assert cached(how, 2.0) == {"result": 3.0, **HIT}


@pytest.mark.parametrize("slot", SLOTS)
def test_a_plan_without_a_digest_is_never_found_in_a_cache(slot: Any) -> None:
    for factor in (2.0, 3.0):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            with installed(slot, plan(scale(factor)).apply, None) as ours:
                assert torch.compile(function)(torch.ones(2)).tolist() == [factor + 1] * 2
            assert [report.rewrites for report in ours.reports] == [1]
            bypassed = {**counters["inductor"], **counters["aot_autograd"]}
            if slot != "pre_grad":  # there inductor runs it first, and keys what came out
                assert {name: bypassed[name] for name in BYPASS} == BYPASS
                assert not any(bypassed.get(name) for name in MISS | HIT)


def test_the_plan_of_another_process_is_found_again(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root), "PYTHONHASHSEED": "random"}

    def process(factors: str) -> Any:
        command = [sys.executable, "-m", "tests.backends.cache_worker", factors, "pre_grad", "joint", "aten"]
        return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, cwd=root).stdout)

    assert process("2") == [{"result": 3.0, **MISS}] * 3
    assert process("2,3") == [{"result": 3.0, **HIT}, {"result": 4.0, **MISS}] * 3


def test_constants_of_a_normal_form_are_not_confused() -> None:
    """Tracing makes attributes of them, of which AOTAutograd's key has the metadata only."""
    for value in (2.0, 3.0):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x, value=value: x * torch.sigmoid(x) * torch.tensor([1.0, value]),
            backend=RewritingBackend(plan(SILU).apply, "inductor", graph="aten"),
        )
        torch.testing.assert_close(compiled(torch.ones(2)), torch.sigmoid(torch.ones(2)) * torch.tensor([1.0, value]))


def test_the_digest_covers_both_passes_of_a_slot() -> None:
    counters.clear()
    for first, second in ((2.0, 5.0), (3.0, 5.0), (2.0, 5.0)):
        torch._dynamo.reset()
        a, b = plan(scale(first)), plan(scale(second))
        with installed("joint", a.apply, a.digest()), installed("joint", b.apply, b.digest()):
            assert torch.compile(function)(torch.ones(2)).tolist() == [first + 1] * 2
    found = counters["inductor"]
    assert (found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]) == (2, 1)


def test_beside_a_pass_without_uuid_nothing_is_cached() -> None:
    graphs: list[fx.Graph] = []
    counters.clear()
    mine = plan(scale(2.0))
    with config.patch(joint_custom_pre_pass=graphs.append), installed("joint", mine.apply, mine.digest()) as ours:
        assert torch.compile(function)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert len(graphs) == len(ours.reports) == 1
    assert counters["inductor"]["fxgraph_cache_bypass"] == 1


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"), reason="torch 2.11 has no inference-aware passes"
)
def test_an_inference_aware_pass_beside_ours_still_learns_what_it_asks_for() -> None:
    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):
        seen: list[bool] = []  # noqa: RUF012

        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            self.seen.append(is_inference)

        def uuid(self) -> str:
            return "aware"

    with config.patch(post_grad_custom_pre_pass=Aware()), installed("post_grad_pre", plan().apply, plan().digest()):
        torch.compile(function)(torch.ones(2))
    assert Aware.seen == [True]


def gated(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.sigmoid(x) + 0) @ x.t()


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 0, lambda y: y * torch.sigmoid(y), (x,)) * 2


@pytest.mark.parametrize(
    ("model", "dynamic", "slot"),
    [*((gated, True, slot) for slot in SLOTS), (branches, False, "pre_grad"), (branches, False, "post_grad_post")],
)
@pytest.mark.some(2)
def test_results_and_gradients_are_those_of_the_model(slot: Any, model: Any, dynamic: bool) -> None:
    """The pass gets forward, backward and bodies of branches, one of which would return its input without `+ 0`."""
    rules = plan()
    for train in (False, True):
        torch._dynamo.reset()
        x, y = (torch.linspace(-1, 2, 12).reshape(4, 3).requires_grad_(train) for _ in range(2))
        with installed(slot, rules.apply, rules.digest()) as ours:
            got, expected = torch.compile(model, dynamic=dynamic)(x), model(y)
            torch.testing.assert_close(got, expected)
            if train:
                got.sum().backward()
                expected.sum().backward()
                torch.testing.assert_close(x.grad, y.grad)
        is_simplified = TORCH >= (2, 14) and slot not in ("pre_grad", "joint")  # inductor itself drops `+ 0` before
        least = 1 if train or is_simplified else 2
        if is_simplified and train and slot == "joint_post" and model is gated:
            least = 0  # `+ 0` was all: the backward pass reads the sigmoid as well
        assert sum(report.rewrites for report in ours.reports) >= least


@pytest.mark.skipif(TORCH >= (2, 14), reason="inductor returns the input for x + 0, also without us")
def test_what_the_caller_may_write_to_is_no_input() -> None:
    for slot in SLOTS:
        torch._dynamo.reset()
        x = torch.ones(3)
        with installed(slot, plan().apply, plan().digest()) as ours:  # pyright: ignore[reportArgumentType]
            torch.compile(lambda x: (x + 0, x + 1))(x)[0].zero_()
        assert x.tolist() == [1, 1, 1]
        assert ours.reports[0].rewrites == 1


@pytest.mark.parametrize("slot", SLOTS)
def test_the_sentence_of_a_rule_comes_out_of_the_first_call(slot: Any) -> None:
    never = rule("tanh.never")(lambda x: torch.tanh(x))
    never.replacement(lambda x: refuse("6 heads do not divide over 4 ranks"))
    failing = RuleSet("s", never, atomic=True).once()
    with installed(slot, failing.apply, failing.digest()), pytest.raises(Exception, match="6 heads do not") as failed:
        torch.compile(function)(torch.ones(2))
    assert "tanh.never: 6 heads do not divide over 4 ranks at %tanh" in str(failed.value)


def test_a_pass_bound_to_one_function_runs_in_its_recompilations_too() -> None:
    rules = plan(scale(2.0))
    ours = GraphPass("joint", rules.apply, rules.digest())
    compiled = torch.compile(function, options={SLOTS["joint"]: ours}, dynamic=False)
    assert compiled(torch.ones(2)).tolist() == [3.0] * 2
    assert compiled(torch.ones(3)).tolist() == [3.0] * 3
    assert [report.rewrites for report in ours.reports] == [1, 1]
    assert config.joint_custom_pre_pass is None


def test_what_was_compiled_before_the_scope_is_not_touched() -> None:
    compiled = torch.compile(function)
    before = compiled(torch.ones(2))
    with installed("joint", plan(scale(2.0)).apply, None) as ours:
        torch.testing.assert_close(compiled(torch.ones(2)), before)
    assert ours.reports == []


def test_a_mode_of_torch_compile_reaches_inductor_through_the_backend() -> None:
    seen: list[bool] = []

    def spy(gm: fx.GraphModule, context: object) -> None:
        seen.append(config.epilogue_fusion)

    backend = RewritingBackend(plan(scale(2.0)).apply, "inductor")
    options = {"epilogue_fusion": not config.epilogue_fusion, SLOTS["joint"]: GraphPass("joint", spy, "spy")}
    assert torch.compile(function, backend=backend, options=options)(torch.ones(2)).tolist() == [3.0, 3.0]
    assert seen == [not config.epilogue_fusion]


def test_inductor_compiles_both_graphs_with_gradients_and_dynamic_sizes() -> None:
    for graph in ("torch", "aten"):
        torch._dynamo.reset()
        backend = RewritingBackend(plan().apply, "inductor", graph=graph)
        compiled = torch.compile(gated, backend=backend)
        for length in (4, 5):
            x, y = (torch.linspace(-1, 2, length * 3).reshape(length, 3).requires_grad_() for _ in range(2))
            torch._dynamo.mark_dynamic(x, 0)
            got, expected = compiled(x), gated(y)
            torch.testing.assert_close(got, expected)
            got.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
        assert [report.rewrites for report in backend.reports] == [2]


@pytest.mark.parametrize(
    ("options", "order"),
    [(NO_OVERLAP, ["all_reduce", "wait_tensor", "mm", "mm"]), (OVERLAP, ["all_reduce", "mm", "wait_tensor", "mm"])],
)
def test_overlap_waits_for_a_collective_behind_what_does_not_need_it(options: Any, order: list[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(x, "sum", torch.distributed.group.WORLD)
        return (total + 1) @ (x @ x)

    with fake_mesh((2,), ("sp",)):
        _, (code,) = run_and_get_code(torch.compile(function, options=dict(options)), torch.ones(8, 8))
    called = re.findall(r"^ [^#\n]*?(all_reduce_?|wait_tensor|extern_kernels[.]mm)[.(]", code, re.MULTILINE)
    assert [name.rsplit(".")[-1].strip("_") for name in called][:4] == order
