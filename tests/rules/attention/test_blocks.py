"""Which blocks attention computes: bounds leave out what the mask hides, for one part of the keys and for several."""

from __future__ import annotations

import pytest
import torch

from rules.attention import blocks as module


def test_blocks_for_cuda_do_not_cut_across_the_halves_of_a_chunk_in_zigzag_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 4 ranks, rank 1 computes the keys of each other rank as one block, which flash attention runs."""
    monkeypatch.setattr(module, "_MOST_ROWS", 256)
    monkeypatch.setattr(module, "_COLUMNS", 128)
    size = 512
    chunks = [
        torch.cat([torch.arange(half * size, (half + 1) * size) for half in (rank, 7 - rank)]) for rank in range(4)
    ]
    rows, cuda = chunks[1][:, None], torch.device("cuda")
    of_parts = [module.kept_tiles([keys, rows], "le(x0, x1)", 1, 2 * size, 2 * size, cuda)[0] for keys in chunks]
    blocks = [list(module._joined(module._read(kept, 2 * size, 2 * size, cuda))) for kept in of_parts]
    assert blocks[0] == [((0, 2 * size), [(0, size)], True)]
    assert blocks[2] == blocks[3] == [((size, 2 * size), [(0, 2 * size)], True)]
    assert len(blocks[1]) == 2


LOWEST = torch.finfo(torch.float32).min
PARTS = {
    "causal": "le(x0, x1)",
    "documents of sequences": "bitwise_and(le(x0, x1), eq(x2, x3))",
    "added, and rows that keep no column of a part": f"where(le(x0, x1), 0.0, {LOWEST})",
    "added -inf": "where(le(x0, x1), x4, -inf)",
}


@pytest.mark.parametrize("text", PARTS.values(), ids=PARTS)
def test_the_tiles_of_all_parts_of_the_keys_are_those_of_each(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ROWS", 2)
    monkeypatch.setattr(module, "_COLUMNS", 2)
    num_parts, size = 3, 4
    at, documents = torch.arange(num_parts * size), torch.tensor([[0] * 5 + [1] * 7, [2] * 9 + [3] * 3])
    rows = slice(size, 2 * size)
    parts: list[list[torch.Tensor]] = []
    shared = [at[rows, None], documents[:, None, rows, None], torch.tensor([0.5, 1.0]).double()[:, None, None]]
    for part in range(num_parts):
        columns = slice(part * size, (part + 1) * size)
        parts.append([at[columns], shared[0], documents[:, None, None, columns], shared[1], shared[2]])
    q = k = torch.empty(2, 2, size, 1)
    together = module.tiles_of_parts(parts, text, q, k)
    alone = [module.kept_tiles(leaves, text, 1, size, size, q.device)[0] for leaves in parts]
    torch.testing.assert_close(list(together), alone)
    assert len({tuple(tiles.flatten().tolist()) for tiles in alone}) > 1
