"""Cases of operators without a layout rule, which run as the operators that they are made of."""

from __future__ import annotations

from tests.rules.layouts.case import Cases, case, f, many, z

CASES: Cases = {
    "kron": [case(lambda a, b, c: (f(a, 3), f(b, c))), case(lambda a, b, c: (f(a), f(b, c)))],
    "numpy_T": [case(lambda a, b, c: (f(a, c),))],
    "matrix_H": [case(lambda a, b, c: (z(a, c),))],
    "movedim": [
        case(lambda a, b, c: (f(a, b, c), 0, -1)),
        case(lambda a, b, c: (f(a, b, 3, c), [0, 1], [2, 0])),
    ],
    "meshgrid": [
        case(lambda a, b, c: ([f(a), f(b), f(c)],), indexing="ij"),
        case(lambda a, b, c: ([f(a), f(b), f(c)],), indexing="xy"),
        case(lambda a, b, c: ([f(a), f()],), indexing="ij"),
    ],
    "trapezoid": [
        case(lambda a, b, c: (f(a, b, c),), "0.2"),
        case(lambda a, b, c: (f(a, b, c), f(a, b, c)), "0.1 1.1", dim=1),
    ],
    **many("fliplr", case(lambda a, b, c: (f(a, b, c),), "0.1")),
    **many("flipud", case(lambda a, b, c: (f(a, b, c),), "0.0")),
    "dstack": [case(lambda a, b, c: ([f(a, b, c), f(a, b, 3)],), "0.2")],
    **many("fft_fftshift fft_ifftshift", case(lambda a, b, c: (f(a, b, c), [1]), "0.1")),
    "linalg_matrix_norm": [case(lambda a, b, c: (f(a, b, c),))],
    "linalg_norm": [case(lambda a, b, c: (f(a, c), None, [1])), case(lambda a, b, c: (f(a, b, c), None, [1, -1]))],
    "frobenius_norm": [case(lambda a, b, c: (f(a, 3, c), [-1])), case(lambda a, b, c: (f(a, c), [0]), keepdim=True)],
    "linalg_matrix_power": [case(lambda a, b, c: (f(a, 4, 4), 3), "0.1 0.2")],
}
