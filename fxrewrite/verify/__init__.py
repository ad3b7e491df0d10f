"""Tests whether a rewrite rule is true on samples of its own pattern; a counterexample is shown as a program."""

from fxrewrite.verify.compare import Difference, Kind
from fxrewrite.verify.draw import Draw, Sampler
from fxrewrite.verify.observe import Runner
from fxrewrite.verify.rewrite import verify_rewrite
from fxrewrite.verify.verdict import Counterexample, Verdict

__all__ = ["Counterexample", "Difference", "Draw", "Kind", "Runner", "Sampler", "Verdict", "verify_rewrite"]
