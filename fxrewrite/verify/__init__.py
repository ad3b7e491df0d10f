"""Tests whether a rewrite rule is true on samples of its own pattern; a counterexample is shown as a program."""

from fxrewrite.verify.build import NoSampleError as NoSampleError
from fxrewrite.verify.compare import Difference as Difference, Kind as Kind
from fxrewrite.verify.draw import Domain as Domain, Draw as Draw, Sampler as Sampler
from fxrewrite.verify.literals import numbers_of as numbers_of
from fxrewrite.verify.observe import Runner as Runner, TestBed as TestBed, random_gradients as random_gradients
from fxrewrite.verify.rewrite import DTYPES as DTYPES, verify_rewrite as verify_rewrite
from fxrewrite.verify.verdict import Counterexample as Counterexample, Verdict as Verdict
