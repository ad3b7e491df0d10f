"""The rules that the tests of backends run: one that fires in every graph, one that removes a node."""

import torch
import torch.nn.functional as F  # noqa: N812

from fxrewrite.plan import Plan, RuleSet
from fxrewrite.rule import Rule, rule

SILU = rule("act.silu", numerics="reassociates")(lambda x: x * torch.sigmoid(x))
SILU.replacement(lambda x: F.silu(x))

ZERO = rule("add.drop_zero")(lambda x: torch.add(x, 0))
ZERO.replacement(lambda x: x)


def scale(factor: float) -> Rule:
    """tanh(x) -> x * factor, with the factor in a closure: what the plan does shows in no pattern."""
    it = rule("tanh.scale", numerics="approximate")(lambda x: torch.tanh(x))
    it.replacement(lambda x: x * factor)
    return it


def plan(*rules: Rule) -> Plan:
    return RuleSet("test", *(rules or (SILU, ZERO))).once()
