"""What masks mean, in words, whatever their spelling; positions are told by computing them at several lengths."""

from __future__ import annotations

import pytest
import torch

from fxrewrite import RuleSet
from rules.masks.kinds import MASK_KIND, kind_of
from rules.masks.naming import NameMasks
from tests.rules.attention.test_by_rows import (
    READABLE,
    Mask,
    attend_with,
    causal,
    data,
    near,
    operands,
    positions,
    traced,
)

KINDS: dict[str, tuple[Mask, str]] = {
    "causal": (READABLE["causal"], "causal"),
    "a triangle": (READABLE["tril"], "causal and key padding"),
    "a band": (READABLE["band"], "a condition on positions"),
    "causal and padding": (READABLE["causal and padding"], "causal and key padding"),
    "window": (READABLE["window"], "causal and window 3"),
    "window to both sides": (lambda x, y: (positions(x)[1] - positions(x)[0]).abs() < 2, "window 2 to both sides"),
    "chunks": (READABLE["chunks"], "causal and chunks of 3"),
    "documents": (READABLE["documents"], "documents and causal"),
    "prefix": (READABLE["prefix"], "causal after a prefix of 3"),
    "padding of both": (
        lambda x, y: (x > 0)[:, None, None] & (x > 0)[:, None, :, None],
        "key padding and query padding",
    ),
    "added": (READABLE["added"], "causal"),
    "alibi": (READABLE["alibi"], "a bias and causal"),
    "distances": (lambda x, y: -positions(x)[1].double() * positions(x)[0], "a bias of positions"),
    "given positions": (lambda x, y: x[:, None, None] <= x[:, None, :, None], "order of given positions"),
    "nothing hidden": (lambda x, y: (positions(x)[0] >= 0) & (positions(x)[1] >= 0), "nothing hidden"),
    "strictly earlier": (lambda x, y: positions(x)[1] < positions(x)[0], "a condition on positions"),
    "either": (READABLE["either"], "a condition on data"),
}


def kind(mask: Mask, mode: str = "symbolic") -> str:
    """The text of what the mask means, which says whether it hides later keys."""
    gm = traced(attend_with(mask), [*operands(), *data()], mode)
    RuleSet("name", NameMasks()).once().apply(gm)
    (found,) = {kind_of(node) for node in gm.graph.nodes if MASK_KIND.of(node)}
    assert found is not None
    assert found.hides_later_keys == ("causal" in str(found).split(" and "))
    return str(found)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str, mode: str) -> None:
    mask, expected = KINDS[name]
    assert kind(mask, mode) == expected


def test_a_window_that_is_longer_than_the_example() -> None:
    def window(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return near(x, 4096)

    assert kind(window) == "causal and window 4096"
    assert kind(window, "fake") == "causal"


def test_no_row_is_left_out() -> None:
    def causal_but_for_an_image(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        row, column = ((at >= 400) & (at < 976) for at in positions(x))
        return causal(x) | (row & column)

    assert kind(causal_but_for_an_image) == "a condition on positions"


def test_sequences_of_a_batch_that_differ_are_not_taken_for_one() -> None:
    def first_alone(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return causal(x) | (torch.arange(x.shape[0])[:, None, None, None] < 1)

    assert kind(first_alone) == "a condition on data"
