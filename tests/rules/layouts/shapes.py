"""Cases of operators that move data: views, permutes, cuts, joins, indexing."""

from __future__ import annotations

import torch

from tests.rules.layouts.case import Cases, b, case, f, g, i, many, z

CASES: Cases = {
    "view": [
        case(lambda a, b, c: (f(a, 3, c), [3 * a, c])),
        case(lambda a, b, c: (f(3, a, c), [3 * a, c])),
        case(lambda a, b, c: (f(a, 2 * c), [a, 2, c]), ""),
        case(lambda a, b, c: (f(3, a, 3), [-1, 3])),
        case(lambda a, b, c: (f(a, 1, c), [a, c])),
        case(lambda a, b, c: (f(a, 15), [a, 5, 3])),
    ],
    "_unsafe_view": [case(lambda a, b, c: (f(a, 2 * c), [a, 2, c]))],
    "reshape": [
        case(lambda a, b, c: (f(a, 3, c), [3 * a, c])),
        case(lambda a, b, c: (f(3, a, c), [3 * a, c])),
        case(lambda a, b, c: (f(3 * a, c), [a, 3, c])),
        case(lambda a, b, c: (f(3, a, c).transpose(0, 1), [3 * a, c])),
        case(lambda a, b, c: (f(6, 4), [4, 6]), "0.0 0.1"),
        case(lambda a, b, c: (f(6, 4, c), [8, 3, c]), "0.0 0.1"),
    ],
    "flatten": [case(lambda a, b, c: (f(a, 3, c), 0, 1)), case(lambda a, b, c: (f(3, a, c), 0, -1))],
    "ravel": [case(lambda a, b, c: (f(a, c),))],
    **many("atleast_1d atleast_2d atleast_3d", case(lambda a, b, c: (f(a, c),)), case(lambda a, b, c: (f(a),))),
    **many("view_as reshape_as", case(lambda a, b, c: (f(a * 3, c), g(a, 3, c)))),
    "unflatten": [
        case(lambda a, b, c: (f(3 * a, c), 0, [a, 3])),
        case(lambda a, b, c: (f(3, a, 3 * c), -1, [c, -1, 3])),
        case(lambda a, b, c: (f(3, 6 * a, 3), -2, [a, 6])),
    ],
    "squeeze": [
        case(lambda a, b, c: (f(a, 1, c), 1)),
        case(lambda a, b, c: (f(a, c, 1),)),
        case(lambda a, b, c: (f(a, c), 0)),
        case(lambda a, b, c: (f(a, 1, 1, c), [1, 2, 3])),
    ],
    "expand": [case(lambda a, b, c: (f(a, 1, c), [a, 6, c])), case(lambda a, b, c: (f(a, c), [3, -1, c]))],
    "broadcast_to": [case(lambda a, b, c: (f(a, 1), [3, a, c]))],
    **many("new_zeros new_ones", case(lambda a, b, c: (f(a, c), [a, 5, c]), "0.1"), case(lambda a, b, c: (f(a), [a]))),
    "new_full": [case(lambda a, b, c: (f(a, b), [a, b, 3], 2.0))],
    **many(
        "repeat tile",
        case(lambda a, b, c: (f(a, c), [3, 1])),
        case(lambda a, b, c: (f(a, c), [2, 1, 3])),
        case(lambda a, b, c: (f(1, c), [a, 2])),
    ),
    "repeat_interleave": [
        case(lambda a, b, c: (f(a, b, c), 3, 1)),
        case(lambda a, b, c: (f(a, c), 2)),
        case(lambda a, b, c: (f(1, c), 2, 0)),
        case(lambda a, b, c: (f(a, c), _counts(a), 0), "0.0 1.0", output_size=20),
    ],
    "transpose": [case(lambda a, b, c: (f(a, b, c), 1, -1))],
    "swapaxes": [case(lambda a, b, c: (f(a, b, c), 0, 1))],
    "t": [case(lambda a, b, c: (f(a, c),)), case(lambda a, b, c: (f(c),))],
    **many("mT mH adjoint", case(lambda a, b, c: (f(a, b, c),))),
    "permute": [case(lambda a, b, c: (f(a, b, c), [2, 0, 1])), case(lambda a, b, c: (f(a, b, c), [-1, 0, -2]))],
    "unsqueeze": [case(lambda a, b, c: (f(a, c), 1)), case(lambda a, b, c: (f(a, c), -1))],
    "view_as_complex": [case(lambda a, b, c: (f(a, c, 2),), "0.2")],
    "view_as_real": [case(lambda a, b, c: (z(a, c),))],
    "diagonal": [case(lambda a, b, c: (f(a, b, c), 0, 0, 2), "0.0 0.2"), case(lambda a, b, c: (f(a, a), 1), "0.0 0.1")],
    "diag_embed": [case(lambda a, b, c: (f(a, b, c), 1, 0, 2), "0.2")],
    "unfold": [
        case(lambda a, b, c: (f(a, 3 * b, c), 1, 3, 3)),
        case(lambda a, b, c: (f(a, 2 * c), 1, 2, 1), "0.1"),
        case(lambda a, b, c: (f(a, 2 * c), 1, 2, 2)),
        case(lambda a, b, c: (f(a, 3 * b), 1, 4, 4), "0.1"),
    ],
    **many("select select_copy", case(lambda a, b, c: (f(a, b, c), 1, 1), "0.1")),
    **many("slice slice_copy", case(lambda a, b, c: (f(a, b, c), 1, 1, 3), "0.1")),
    **many("narrow narrow_copy", case(lambda a, b, c: (f(a, b, c), -1, 1, 1), "0.2")),
    **many("split unsafe_split split_copy", case(lambda a, b, c: (f(a, b, c), 2, 1), "0.1")),
    **many(
        "split_with_sizes unsafe_split_with_sizes split_with_sizes_copy",
        case(lambda a, b, c: (f(a, b + c, 3), [b, c], 1), "0.1"),
    ),
    **many("chunk unsafe_chunk", case(lambda a, b, c: (f(a, b, c), 2, -1), "0.2")),
    "tensor_split": [
        case(lambda a, b, c: (f(a, c), 2, 1), "0.1"),
        case(lambda a, b, c: (f(a, c), [1], 0), "0.0"),
    ],
    "hsplit": [case(lambda a, b, c: (f(a, 2 * c), 2), "0.1"), case(lambda a, b, c: (f(2 * c), 2), "0.0")],
    "vsplit": [case(lambda a, b, c: (f(2 * a, c), 2), "0.0")],
    **many("unbind unbind_copy", case(lambda a, b, c: (f(a, b, c), 1), "0.1")),
    "slice_scatter": [
        case(lambda a, b, c: (f(a, b, 2 * c), f(a, b, c), 2, c, 2 * c), "0.2 1.2"),
    ],
    "select_scatter": [case(lambda a, b, c: (f(a, b, c), f(a, c), 1, 0), "0.1")],
    "diagonal_scatter": [case(lambda a, b, c: (f(a, b, a), f(b, a), 0, 0, 2), "0.0 0.2 1.1")],
    "cat": [
        case(lambda a, b, c: ([f(a, b), f(a, c)], 1), "0.1 1.1"),
        case(lambda a, b, c: ([f(a), f(b)], -1), "0.0 1.0"),
    ],
    "vstack": [case(lambda a, b, c: ([f(a, c), f(b, c)],), "0.0 1.0"), case(lambda a, b, c: ([f(c), f(c)],))],
    "hstack": [
        case(lambda a, b, c: ([f(a, b), f(a, c)],), "0.1 1.1"),
        case(lambda a, b, c: ([f(a), f(c)],), "0.0 1.0"),
    ],
    "column_stack": [case(lambda a, b, c: ([f(a, b), f(a, c)],), "0.1 1.1"), case(lambda a, b, c: ([f(c), f(c)],))],
    "stack": [case(lambda a, b, c: ([f(a, c), f(a, c)], 1)), case(lambda a, b, c: ([f(a, c), f(a, c)], -1))],
    "pad": [
        case(lambda a, b, c: (f(a, b, c), [0, 1], "constant", 0.0), "0.2"),
        case(lambda a, b, c: (f(a, c), [1, 0, 0, 0]), "0.1"),
        case(lambda a, b, c: (f(a, b, c), [1, 1], "reflect"), "0.2"),
    ],
    "constant_pad_nd": [
        case(lambda a, b, c: (f(a, c), [1, 2]), "0.1"),
        case(lambda a, b, c: (f(a, b, c), [0, 0, 1, -1]), "0.1"),
    ],
    "embedding": [
        case(lambda a, b, c: (f(b, c), i(b, a, 3)), "0.0"),
        case(lambda a, b, c: (f(b, c), i(b, a), 1), "0.0"),
    ],
    "embedding_bag": [  # all four results are read
        case(lambda a, b, c: (f(b, c), i(b, 3 * a), torch.arange(0, 3 * a, 3)), "0.0 0.1 1.0 2.0"),
    ],
    "one_hot": [case(lambda a, b, c: (i(5, a, c), 5))],
    "index_select": [
        case(lambda a, b, c: (f(a, b, c), 1, i(b, b)), "0.1"),
        case(lambda a, b, c: (f(a, c), 0, i(a)), "0.0"),
    ],
    "take": [case(lambda a, b, c: (f(a, c), i(a * c, b)), "0.0 0.1")],
    "gather": [
        case(lambda a, b, c: (f(a, b, c), 1, i(b, a, 3, c)), "0.1"),
        case(lambda a, b, c: (f(a, b), 1, i(b, a, c)), "0.1"),
        case(lambda a, b, c: (f(2 * a, b, c), 1, i(b, a, b, c)), "0.0 0.1 1.0"),
        case(lambda a, b, c: (f(a, b), 0, i(a, c, b)), "0.0"),
    ],
    "take_along_dim": [
        case(lambda a, b, c: (f(a, b, c), i(b, a, 3, c), 1), "0.1"),
        case(lambda a, b, c: (f(a, b), i(b, 1, c), 1), "0.1"),
        case(lambda a, b, c: (f(1, b), i(b, a, c), 1), "0.1"),
        case(lambda a, b, c: (f(a, b), i(a * b, c)), "0.0 0.1"),
    ],
    "scatter": [
        case(lambda a, b, c: (f(a, b), 1, _distinct(a, b, b), f(a, b)), "0.1 1.1 2.1"),
        case(lambda a, b, c: (f(a, 2 * b), 1, _distinct(a, 2 * b, b), 3.0), "0.1 1.1"),
        case(lambda a, b, c: (f(2 * a, b), 1, _distinct(a, b, b), f(a, b)), "0.0 0.1 1.0 1.1 2.0 2.1"),
    ],
    "scatter_add": [
        case(lambda a, b, c: (f(a, b), 1, i(b, a, c), f(a, c)), "0.1 1.1 2.1"),
        case(lambda a, b, c: (f(b, a), 0, i(b, c, a), g(2 * c, a)), "0.0 1.0 2.0"),
    ],
    "scatter_reduce": [
        case(lambda a, b, c: (f(a, b), 1, i(b, a, c), f(a, c), "mean"), "0.1 1.1 2.1"),
        case(lambda a, b, c: (f(a, b), 1, i(b, a, c), f(a, c), "amax"), "0.1 1.1 2.1", include_self=False),
    ],
    "index_add": [case(lambda a, b, c: (f(a, b, c), 1, i(b, 2 * b), f(a, 2 * b, c)), "0.1 1.0 2.1", alpha=2.0)],
    "index_copy": [case(lambda a, b, c: (f(a, b), 1, torch.randperm(b), f(a, b)), "0.1 1.0 2.1")],
    "index_reduce": [case(lambda a, b, c: (f(a, b), 1, i(b, 2 * b), f(a, 2 * b), "amax"), "0.1 1.0 2.1")],
    "index_fill": [
        case(lambda a, b, c: (f(a, b), 1, i(b, c), 2.0), "0.1 1.0"),
        case(lambda a, b, c: (f(a, b), 1, i(b, c), f()), "0.1 1.0"),
    ],
    **many(
        "index _unsafe_index",
        case(lambda a, b, c: (f(a, b), [i(a, c)]), "0.0"),
        case(lambda a, b, c: (f(a, b, 3), [None, i(b, c, 2 * c)]), "0.1"),
        case(lambda a, b, c: (f(a, b, c), [i(a, a, 1), i(b, c)]), "0.0 0.1"),
        case(lambda a, b, c: (f(a, b, c), [i(a, c), None, i(c, c)]), "0.0 0.2"),
        case(lambda a, b, c: (f(a, b, c), [None, i(b), i(c, a)]), "0.1 0.2"),
    ),
    **many(
        "index_put _unsafe_index_put",
        case(lambda a, b, c: (f(a, b), [torch.randperm(a)], f(a, b)), "0.0 1.0 2.0"),
        case(lambda a, b, c: (f(a, b, c), [None, i(b, 2 * c)], f(2 * c, c), True), "0.1 1.0 2.0"),
        case(lambda a, b, c: (f(a, b, c), [i(a, b), None, i(c, b)], f(b, 1), True), "0.0 0.2 1.0 2.0 3.0"),
    ),
}
CASES["index_put"] += [
    case(lambda a, B, c: (f(a, c), [b(a, c)], f())),
    case(lambda a, B, c: (f(a, c, 3), [b(a, c)], f(1))),
]


def _counts(size: int) -> torch.Tensor:
    """So many counts with a sum of 20."""
    return torch.bincount(torch.randint(0, size, (20,)), minlength=size)


def _distinct(rows: int, below: int, count: int) -> torch.Tensor:
    """Places in each row, none twice."""
    return torch.stack([torch.randperm(below)[:count] for _ in range(rows)])
