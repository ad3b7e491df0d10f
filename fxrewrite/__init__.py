"""State rewrites of FX graphs as rules, know that each rule is true, run them inside any torch.compile backend."""

from typing import TYPE_CHECKING

from fxrewrite.lazy import lazy_package

if TYPE_CHECKING:
    from fxrewrite.capture import normalize as normalize
    from fxrewrite.errors import (
        FixpointError as FixpointError,
        FxRewriteError as FxRewriteError,
        InvariantError as InvariantError,
        MatchExpectationError as MatchExpectationError,
        Reason as Reason,
        Refusal as Refusal,
        RefusedError as RefusedError,
        RuleDefinitionError as RuleDefinitionError,
        VerificationError as VerificationError,
        refuse as refuse,
    )
    from fxrewrite.graph import (
        Edit as Edit,
        graph_diff as graph_diff,
        graph_digest as graph_digest,
        graph_text as graph_text,
    )
    from fxrewrite.match import Match as Match
    from fxrewrite.pattern import (
        Constraint as Constraint,
        Literal as Literal,
        Maybe as Maybe,
        Param as Param,
        Pattern as Pattern,
        any_ as any_,
        cap as cap,
        chain as chain,
        each as each,
        either as either,
        functional as functional,
        loose as loose,
        maybe as maybe,
        op as op,
        shared as shared,
        siblings as siblings,
        where as where,
    )
    from fxrewrite.plan import Plan as Plan, RuleSet as RuleSet, Step as Step, staged as staged
    from fxrewrite.plan.contracts import Property as Property
    from fxrewrite.plan.dead_code import DeadCode as DeadCode
    from fxrewrite.report import (
        ComputedOnce as ComputedOnce,
        Event as Event,
        EventLog as EventLog,
        Note as Note,
        Report as Report,
    )
    from fxrewrite.rule import Rule as Rule, rule as rule


lazy_package(__name__)
