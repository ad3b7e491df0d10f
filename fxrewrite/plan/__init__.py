"""Rule sets and plans: which rules run in which order, how often, all or none, and what they are expected to do."""

from fxrewrite.plan.plan import Plan as Plan
from fxrewrite.plan.rule_set import RuleSet as RuleSet, staged as staged
from fxrewrite.plan.step import Step as Step
