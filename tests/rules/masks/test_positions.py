"""What is read of a value is what its entries are, at lengths that the graph was not traced with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from rules.masks.positions import Affine, affine_of

BATCH, LENGTHS = 2, (2, 3, 14)
Of = Callable[[torch.Tensor], torch.Tensor]
"""A value of a [BATCH, S], of which the sizes are used."""


def counted(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])


def ones(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[0], x.shape[1], dtype=torch.int64)


def packed(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face models tell packed documents apart."""
    ids = counted(x)[None].expand(x.shape[0], -1)
    of_document = (torch.diff(ids, prepend=ids[:, :1] - 1) != 1).cumsum(-1)
    return of_document[torch.arange(x.shape[0])[:, None, None], counted(x)[None, :, None]]


READ: dict[str, Of] = {
    "counted": counted,
    "from a number on": lambda x: torch.arange(3, x.shape[1] + 3),
    "backwards": lambda x: torch.arange(0, -x.shape[1], -1),
    "as int32": lambda x: counted(x).int() + 1,
    "arithmetic": lambda x: 2 * (5 - counted(x)) - (-counted(x)[:, None]),
    "compared alike everywhere": lambda x: counted(x) >= 0,
    "of constants": lambda x: (1.0 - ones(x).double()) * torch.finfo(torch.float64).min,
    "counted by a sum": lambda x: ones(x).cumsum(-1) - 1,
    "a slice": lambda x: counted(x)[1:],
    "every other": lambda x: counted(x)[1::2],
    "one of them": lambda x: (counted(x)[:, None] + counted(x))[1],
    "reordered": lambda x: (counted(x)[:, None] * 3 + counted(x)).transpose(0, 1).permute(1, 0),
    "another shape": lambda x: (counted(x)[:, None] * 3 + counted(x)).view(1, x.shape[1], 1, x.shape[1]),
    "filled": lambda x: torch.full_like(x, 2.5).unsqueeze(-1),
    "differences": lambda x: torch.diff(3 * counted(x)),
    "packed": packed,
    "an index": lambda x: (counted(x) + 7)[None].expand(x.shape[0], -1)[
        torch.arange(x.shape[0])[:, None], torch.arange(1, x.shape[1])
    ],
}
NOT_READ: dict[str, Of] = {
    "data": lambda x: x,
    "a block": lambda x: (counted(x) >= 40) & (counted(x) < 616),
    "up to a number": lambda x: counted(x) < 1_000_000,
    "a size": lambda x: counted(x) + x.shape[1],
    "from behind": lambda x: counted(x).flip(0),
    "real": lambda x: counted(x).float(),
    "squares": lambda x: counted(x) * counted(x),
    "what overflows": lambda x: counted(x).int() * 4,
    "put together": lambda x: torch.cat([counted(x)[:1], counted(x)[:-1]]),
    "differences from another": lambda x: torch.diff(counted(x), prepend=counted(x)[:1]),
    "an index from behind": lambda x: counted(x)[counted(x) - 1],
    "a sum of what grows": lambda x: counted(x).cumsum(0),
    "flattened": lambda x: (counted(x)[:, None] + counted(x)).flatten(),
}


def read(of: Of) -> Affine | None:
    gm = make_fx(of, tracing_mode="symbolic", pre_dispatch=True)(torch.zeros(BATCH, 9))
    (result,) = gm.graph.output_node().all_input_nodes
    return affine_of(result)


@pytest.mark.parametrize("name", READ)
def test_what_is_read_holds_at_every_length(name: str) -> None:
    found = read(READ[name])
    assert found is not None
    for batch, length in ((batch, length) for batch in (1, 3) for length in LENGTHS):
        value = READ[name](torch.zeros(batch, length))
        expected = torch.full(value.shape, found.offset, dtype=found.dtype)
        for dim, slope in enumerate(found.slopes):
            if slope:
                index = torch.arange(value.shape[dim], dtype=found.dtype)
                expected += slope * index.view(-1, *[1] * (value.dim() - dim - 1))
        torch.testing.assert_close(value, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NOT_READ)
def test_nothing_is_said_of_other_values(name: str) -> None:
    assert read(NOT_READ[name]) is None


def test_a_long_chain_is_read() -> None:
    """Without recursion, and each node once."""
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.arange.default, (9,))
    node.meta["val"] = torch.arange(9)
    for _ in range(2000):
        node = graph.call_function(
            torch.ops.aten.sub.Tensor, (node, graph.call_function(torch.ops.aten.mul.Tensor, (node, 0)))
        )
        node.meta["val"] = node.args[1].meta["val"] = torch.arange(9)
    assert affine_of(node) == Affine((1,), 0, torch.int64)
