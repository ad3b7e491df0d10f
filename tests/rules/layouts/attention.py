"""Cases of attention."""

from __future__ import annotations

import torch

from tests.rules.layouts.case import Cases, b, case, f

CASES: Cases = {
    "scaled_dot_product_attention": [
        case(lambda a, b, c: (f(3, a, b, 5), f(3, a, c, 5), f(3, a, c, 5)), "1.2 2.2"),
        case(lambda a, B, c: (f(2, a, B, 5), f(2, a, c, 5), f(2, a, c, 3), _mask(1, B, c)), "1.2 2.2 3.2"),
        case(lambda a, b, c: (f(2, a, c, 5), f(2, a, c, 5), f(2, a, c, 5), f(1, a, c, c)), "1.2 2.2 3.3"),
        case(lambda a, b, c: (f(a, c, 5), f(a, c, 5), f(a, c, 5), None, 0.0, True), "0.1 1.1 2.1"),
    ],
}


def _mask(*shape: int) -> torch.Tensor:
    """A mask that leaves each query a key."""
    return b(*shape) | (torch.arange(shape[-1]) == 0)
