"""The operator refuses what kernels do not check: they would read memory that is not theirs."""

from __future__ import annotations

import pytest
import torch

from rules.attention.operator import ATTEND, attention

Q, K, V = torch.rand(3, 2, 4, 6, 8)


def test_there_are_as_many_values_as_keys() -> None:
    for attend in (attention, ATTEND):
        with pytest.raises(ValueError, match="attention takes 1 keys, but 6 values"):
            attend(Q, K[..., :1, :], V)
        with pytest.raises(ValueError, match="attention takes 6 keys, but 5 values"):
            attend(Q, K, V[..., :5, :], softcap=2.0)


def test_sinks_are_one_column() -> None:
    attention(Q, K, V, None, torch.rand(2, 4, 6, 1))
    with pytest.raises(ValueError, match="attention takes one column of sinks, not 3"):
        attention(Q, K, V, None, torch.rand(2, 4, 6, 3))
