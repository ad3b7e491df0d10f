"""Equal arguments have equal keys; what computes something else has another key."""

from __future__ import annotations

import math

import pytest
import torch

from fxrewrite.graph.argument_keys import identity_of

X = torch.ones(2)


@pytest.mark.parametrize("argument", [math.nan, (X, [1, None]), {"dim": slice(0, 2), "dtype": torch.int8}, ...])
def test_equal_arguments_have_one_key(argument: object) -> None:
    assert identity_of(argument) == identity_of(argument)
    hash(identity_of(argument))


@pytest.mark.parametrize(
    ("a", "b"), [(0.0, -0.0), (1, 1.0), (1, True), ([1], (1,)), (X, X.clone()), (slice(1), slice(2))]
)
def test_arguments_that_mean_something_else_have_another_key(a: object, b: object) -> None:
    assert identity_of(a) != identity_of(b)
