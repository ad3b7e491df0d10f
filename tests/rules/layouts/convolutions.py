"""Cases of convolutions."""

from __future__ import annotations

from tests.rules.layouts.case import Cases, case, f

CASES: Cases = {
    "conv1d": [
        case(lambda a, b, c: (f(a, b, c), f(b, 1, 4), f(b), [1], [3], [1], b), "0.2 1.2"),  # depthwise, causal
        case(lambda a, b, c: (f(b, c), f(b, 1, 3), None, [1], "same", [1], b), "0.1"),
        case(lambda a, b, c: (f(a, 2 * b, c), f(3 * b, 2, 3), None, [1], [0], [1], b), "0.2"),
        case(lambda a, b, c: (f(a, 4 * b, c), f(2 * b, b, 3), None, [1], [1], [1], 4), "0.2"),
        case(lambda a, b, c: (f(a, b, c), f(8, b, 3), f(8), [2], [1]), "0.1 0.2 1.1"),  # a bias is added once
        case(lambda a, b, c: (f(a, b, c), f(8, b, 3), None, [1], [2], [2]), "0.2"),
        case(lambda a, b, c: (f(a, b, c), f(8, b, 1), None, [1], [0], [2])),  # one position each, so no gaps between
        case(lambda a, b, c: (f(a, b, 2 * c), f(8, b, 2), None, [2], "valid"), "1.2"),
        case(lambda a, b, c: (f(a, b, 2 * c), f(8, b, 2), None, [2], [0], [2]), "0.2 1.2"),  # with gaps between
    ],
    "conv2d": [
        case(lambda a, b, c: (f(a, 4, 2 * b, 2 * c), f(8, 4, 2, 2), f(8), [2, 2]), "0.1 1.1 1.2 1.3"),  # patches
        case(lambda a, b, c: (f(a, b, 5, c), f(b, 1, 2, 2), None, [2, 1], [0], [1], b), "0.3 1.2 1.3"),
    ],
    "conv3d": [case(lambda a, b, c: (f(a, b, 3, 4, 5), f(4, b, 3, 2, 5), None, [1, 2, 1]), "1.3")],
    "conv_transpose1d": [
        case(lambda a, b, c: (f(a, b, c), f(b, 3, 4), None, [2], [1], [0], b), "0.2 1.2"),
        case(lambda a, b, c: (f(a, b, c), f(b, 8, 4), f(8), [4]), "0.1 1.0 1.2"),
        case(lambda a, b, c: (f(a, b, c), f(b, 8, 3), None, [2], [1], [1], 2), "0.2"),
    ],
    "conv_transpose2d": [case(lambda a, b, c: (f(a, 2, b, c), f(2, 4, 2, 3), None, [2, 3]), "1.2")],
    "conv_transpose3d": [case(lambda a, b, c: (f(a, 4, 2, 2, 2), f(4, 2, 1, 1, 2)), "0.4 1.4")],
}
