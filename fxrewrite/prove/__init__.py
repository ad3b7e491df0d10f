"""Proves rewrite rules: two sides are equal because their normal forms are."""

from fxrewrite.prove.proof import Proof as Proof, prove as prove
