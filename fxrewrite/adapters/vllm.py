"""A plan as a pass of vLLM: `vllm_pass(RULES.once())`, for the pass manager that runs after autograd.

vLLM takes it in `compilation_config.inductor_compile_config["post_grad_custom_post_pass"]`, or by `pass_manager.add`.
Source: vLLM, vllm/compilation/passes/inductor_pass.py and vllm_inductor_pass.py; before version 0.13 in
vllm/compilation/.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import fx

from fxrewrite.errors import FxRewriteError
from fxrewrite.plan import Plan, RuleSet
from fxrewrite.report import Report

_PACKAGES = ("vllm.compilation.passes", "vllm.compilation")


def vllm_pass(
    rules: Plan | RuleSet,
    *,
    config: Any = None,
    name: str = "fxrewrite",
    is_applicable: Callable[[Any], bool] | None = None,
    context: Any = None,
) -> Any:
    """Returns a vLLM pass that applies the rules to each graph.

    It has `uuid()`, the digest of the rules, by which vLLM's cache tells them apart; `matched_count`, the number of
    rewrites in the last graph; and `report`, what was done and refused there.

    Args:
        rules: a plan or a set; patterns of operators that inductor decomposes match what its table makes of them.
        config: a `VllmConfig`; with it the pass is a `VllmInductorPass`, which logs times and dumps graphs.
        name: of the pass in logs and dumps.
        is_applicable: whether the pass runs for a range of sizes (in older versions a size, or None); else always.
        context: what replacements and steps get as `match.context`.

    Raises:
        FxRewriteError: vLLM is not installed, or the rules have no digest: its cache would take others for them.
    """
    plan = rules.once() if isinstance(rules, RuleSet) else rules
    inner = plan.graph_pass("post_grad_post", context=context)
    key = inner.uuid()
    if key is None:
        raise FxRewriteError(
            "vllm_pass: the rules have no digest, by which vLLM caches what it compiles; what a replacement "
            "closes over must be plain values or functions"
        )
    base: Any = (
        _base("inductor_pass", "InductorPass") if config is None else _base("vllm_inductor_pass", "VllmInductorPass")
    )

    class RulesPass(base):
        """Applies a plan to each graph."""

        def __init__(self) -> None:
            if config is not None:
                super().__init__(config)
            self.pass_name = name
            self.matched_count = 0
            self.report: Report | None = None

        def __call__(self, graph: fx.Graph) -> None:
            inner(graph)
            self.report = inner.reports.pop()
            self.matched_count = self.report.rewrites

        def uuid(self) -> str:
            return key

        def is_applicable_for_range(self, compile_range: Any) -> bool:
            return is_applicable is None or is_applicable(compile_range)

        is_applicable = is_applicable_for_shape = is_applicable_for_range

    if config is not None and hasattr(base, "time_and_log"):
        RulesPass.__call__ = base.time_and_log(RulesPass.__call__)
    return RulesPass()


def _base(module: str, name: str) -> Any:
    """A class of vLLM, in its present or its earlier package."""
    for package in _PACKAGES:
        try:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
        except ModuleNotFoundError as error:
            if not f"{package}.{module}.".startswith(f"{error.name}."):
                raise
    raise FxRewriteError("vllm_pass needs vLLM, which is not installed here: pip install vllm")
