"""A plan as a transform of TensorRT-LLM's AutoDeploy: `autodeploy_transform("my_fusions", RULES)`.

Its configuration then names it: `transforms: {my_fusions: {stage: post_load_fusion}}`.
Source: TensorRT-LLM, tensorrt_llm/_torch/auto_deploy/transform/interface.py.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import fx

from fxrewrite import ops
from fxrewrite.errors import FxRewriteError
from fxrewrite.plan import Plan, RuleSet

_INTERFACE = "tensorrt_llm._torch.auto_deploy.transform.interface"


def autodeploy_transform(key: str, rules: Plan | RuleSet) -> Any:
    """Registers a transform that applies the rules, and returns its class; an instance has the last `report`.

    Replacements and steps get AutoDeploy's `SharedConfig`, with rank and world size, as `match.context`.

    Args:
        key: name of the transform in AutoDeploy's configuration.
        rules: a plan or a set, for exported graphs.

    Raises:
        FxRewriteError: TensorRT-LLM is not installed.
    """
    plan = rules.once() if isinstance(rules, RuleSet) else rules
    try:
        interface = importlib.import_module(_INTERFACE)
    except ModuleNotFoundError as error:
        if not f"{_INTERFACE}.".startswith(f"{error.name}."):
            raise
        raise FxRewriteError(
            "autodeploy_transform needs TensorRT-LLM, which is not installed here: pip install tensorrt_llm"
        ) from error

    @interface.TransformRegistry.register(key)
    class RulesTransform(interface.BaseTransform):
        """Applies a plan to each graph."""

        def _apply(self, gm: fx.GraphModule, cm: Any, factory: Any, shared_config: Any) -> tuple[fx.GraphModule, Any]:
            self.report = plan.apply(gm, shared_config)
            count = self.report.rewrites
            calls = (node for node in gm.graph.nodes if node.op == "call_function")
            has_values = count == 0 or all(ops.value(node) is not ops.MISSING for node in calls)
            return gm, interface.TransformInfo(
                skipped=False, num_matches=count, is_clean=count == 0, has_valid_shapes=has_values
            )

    return RulesTransform
