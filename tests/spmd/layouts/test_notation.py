"""Index notation: parsed, bound to shapes, and views split into common factors."""

from __future__ import annotations

import pytest

from fxrewrite.spmd import IndexPart, Replicate, Shard, view_map
from fxrewrite.spmd.layouts.notation import parse


def test_linear_is_independent_in_its_rows() -> None:
    indices = parse("b... i, o i, +o? -> b... o").bind([(2, 6, 8), (12, 8), None])
    assert indices is not None
    assert indices.operands == ((("b0",), ("b1",), ("i",)), (("o",), ("i",)))
    assert indices.results == ((("b0",), ("b1",), ("o",)),)
    assert indices.whole == frozenset()


def test_an_operand_that_is_added_once_is_known() -> None:
    notation = parse("b... i, +o?, o i -> b... o")
    indices, without = (notation.bind([(2, 6, 8), bias, (12, 8)]) for bias in ((12,), None))
    assert indices is not None
    assert without is not None
    assert indices.whole == without.whole == frozenset()
    assert (indices.added, without.added) == ({1}, frozenset())


@pytest.mark.parametrize(
    ("shape", "terms"), [((8, 12), (("m",), ("n",))), ((12,), (("n",),)), ((1, 12), ((), ("n",))), ((), ())]
)
def test_what_is_added_broadcasts(shape: tuple[int, ...], terms: tuple[tuple[str, ...], ...]) -> None:
    indices = parse("+m n, m k, k n -> m n").bind([shape, (8, 6), (6, 12)])
    assert indices is not None
    assert indices.operands[0] == terms
    assert indices.sizes == {"m": 8, "k": 6, "n": 12}
    assert indices.added == {0}


def test_dimensions_broadcast_where_the_notation_says_so() -> None:
    indices = parse("~b... m k, ~b... k n -> b... m n").bind([(1, 8, 6), (4, 5, 6, 12)])
    assert indices is not None
    assert indices.operands == (((), ("m",), ("k",)), (("b0",), ("b1",), ("k",), ("n",)))
    assert indices.results == ((("b0",), ("b1",), ("m",), ("n",)),)
    for shapes in ([(5, 8, 6), (4, 5, 6, 12)], [(4, 5, 8, 6), (5, 6, 12)]):
        assert parse("b... m k, b... k n -> b... m n").bind(shapes) is None


def test_an_index_of_results_alone_is_whole() -> None:
    indices = parse("!p a... -> !q a...").bind([(2, 6)], [(4, 6)])
    assert indices is not None
    assert indices.locate(indices.results[0], Shard(0)) == IndexPart("q")
    assert indices.whole == {"p", "q"}
    indices = parse("a -> a b").bind([(2,)], [(2, 4)])
    assert indices is not None
    assert indices.whole == {"b"}


def test_shapes_that_do_not_fit() -> None:
    notation = parse("m k, k n -> m n")
    assert notation.bind([(2, 3), (3, 4, 5)]) is None
    assert notation.bind([(2, 3)]) is None


@pytest.mark.parametrize("text", ["a b", "a$ -> a", "(a b) -> a"])
def test_text_that_is_no_notation(text: str) -> None:
    with pytest.raises(ValueError, match="index notation"):
        parse(text)


@pytest.mark.parametrize(
    ("before", "after", "placement", "expected"),
    [
        ((4, 6, 8), (24, 8), Shard(1), Shard(0, outer=4)),  # b s d -> (b s) d
        ((24, 8), (4, 6, 8), Shard(0, outer=4), Shard(1)),
        ((2, 16, 32), (2, 16, 4, 8), Shard(1), Shard(1)),
        ((2, 16, 32), (2, 16, 4, 8), Shard(2), Shard(2)),  # (h d) sharded on h
        ((2, 16, 4, 8), (2, 16, 32), Shard(2), Shard(2)),
        ((2, 16, 4, 8), (2, 16, 32), Shard(3), Shard(2, outer=4)),
        ((1, 16, 8), (16, 8), Shard(1), Shard(0)),
        ((2, 3, 16), (6, 16), Shard(2), Shard(1)),
        ((6, 4, 8), (4, 6, 8), Shard(2), Shard(2)),  # a block without common factors keeps what is behind it
    ],
)
def test_views_carry_a_layout(
    before: tuple[int, ...], after: tuple[int, ...], placement: Shard, expected: Shard
) -> None:
    indices = view_map(before, after)
    part = indices.locate(indices.operands[0], placement)
    assert part is not None
    assert part.index not in indices.whole
    assert indices.placement(indices.results[0], part) == expected


def test_a_block_without_common_factors_must_be_whole() -> None:
    indices = view_map((6, 4), (4, 6))
    part = indices.locate(indices.operands[0], Shard(0))
    assert part is not None
    assert part.index in indices.whole


def test_chunks_that_fall_between_indices_are_not_located() -> None:
    indices = view_map((12, 5), (3, 4, 5))
    assert indices.locate(indices.operands[0], Shard(0, outer=2)) is None
    assert indices.locate(indices.operands[0], Shard(0, outer=3)) == IndexPart("v1", 1)
    assert indices.locate(indices.operands[0], Replicate()) is None
