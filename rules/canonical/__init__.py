"""Canonical forms: no-ops are removed, views have one spelling, a mean is a sum divided by a count."""
