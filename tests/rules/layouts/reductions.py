"""Cases of reductions, scans, sorts and norms."""

from __future__ import annotations

import torch

from tests.rules.layouts.case import Cases, b, case, f, g, i, many, z

_BY_DIM = "amax amin logsumexp var std var_mean std_mean"

CASES: Cases = {
    "sum": [
        case(lambda a, b, c: (f(a, 3, c),)),
        case(lambda a, b, c: (f(a, b, c), [1, -1])),
        case(lambda a, b, c: (f(a, 3, c), [0], True)),
        case(lambda a, b, c: (i(9, a, c), [1])),
    ],
    "mean": [
        case(lambda a, b, c: (f(a, 3, c),)),
        case(lambda a, b, c: (f(a, 3, c), [-1], True)),
        case(lambda a, b, c: (f(a, 3, c), [0, 2])),
    ],
    "nansum": [case(lambda a, b, c: (torch.where(g(a, c) > 1, float("nan"), f(a, c)), [1]))],
    "count_nonzero": [case(lambda a, B, c: (b(a, c), [1])), case(lambda a, B, c: (b(a, c),))],
    **many(
        _BY_DIM,
        case(lambda a, b, c: (f(a, 3, c), [-1]), "0.2"),
        case(lambda a, b, c: (f(a, c), [0]), "0.0", keepdim=True),
    ),
    "amax": [case(lambda a, b, c: (f(a, c),), "0.0 0.1"), case(lambda a, b, c: (f(a, c), [-1]), "0.1")],
    "var": [case(lambda a, b, c: (f(a, c), False), "0.0 0.1"), case(lambda a, b, c: (f(a, c), [-1]), "0.1")],
    "aminmax": [case(lambda a, b, c: (f(a, c),), "0.1", dim=1), case(lambda a, b, c: (f(a, c),), "0.0 0.1")],
    **many("any all", case(lambda a, B, c: (b(a, c), 1), "0.1"), case(lambda a, B, c: (b(a, c), [0, 1]), "0.0 0.1")),
    **many(
        "argmax argmin",
        case(lambda a, b, c: (f(a, c), 1), "0.1"),
        case(lambda a, b, c: (f(a, c), 0, True), "0.0"),
        case(lambda a, b, c: (f(a, c),), "0.0 0.1"),
    ),
    **many(
        "max min",
        case(lambda a, b, c: (f(a, c), f(c))),
        case(lambda a, b, c: (f(a, c), 1), "0.1"),
        case(lambda a, b, c: (f(a, c),), "0.0 0.1"),
    ),
    **many("median nanmedian", case(lambda a, b, c: (f(a, c), 1), "0.1"), case(lambda a, b, c: (f(a, c),), "0.0 0.1")),
    **many("quantile nanquantile", case(lambda a, b, c: (f(a, c), 0.3, 1), "0.1")),
    "mode": [case(lambda a, b, c: (f(a, c), 1), "0.1")],
    "kthvalue": [case(lambda a, b, c: (f(a, c), 1, 0, True), "0.0")],
    "nanmean": [case(lambda a, b, c: (f(a, c), [1]), "0.1")],
    "prod": [case(lambda a, b, c: (f(a, 3, c), 2), "0.2")],
    "norm": [case(lambda a, b, c: (f(a, c), 2, [1]), "0.1"), case(lambda a, b, c: (f(a, c),), "0.0 0.1")],
    "linalg_vector_norm": [case(lambda a, b, c: (f(a, c), 2, [1]), "0.1")],
    "softmax": [case(lambda a, b, c: (f(a, 3, c), -1), "0.2"), case(lambda a, b, c: (f(a, c), 0), "0.0")],
    **many("log_softmax _safe_softmax", case(lambda a, b, c: (f(a, 3, c), -1), "0.2")),
    **many("_softmax _log_softmax", case(lambda a, b, c: (f(a, c), 1, False), "0.1")),
    **many(
        "cumsum cumprod logcumsumexp cummax cummin sort",
        case(lambda a, b, c: (f(a, c), 1), "0.1"),
        case(lambda a, b, c: (f(a, c), 0), "0.0"),
    ),
    "argsort": [case(lambda a, b, c: (f(a, c), 1), "0.1")],
    "flip": [case(lambda a, b, c: (f(a, 3, c), [0, 1]), "0.0")],
    "roll": [
        case(lambda a, b, c: (f(a, c), [1], [1]), "0.1"),
        case(lambda a, b, c: (f(a, b, c), [1, -2], [0, -1]), "0.0 0.2"),
        case(lambda a, b, c: (f(a, c), [1]), "0.0 0.1"),
    ],
    "topk": [case(lambda a, b, c: (f(a, c), 2), "0.1"), case(lambda a, b, c: (f(a, c), 1, 0), "0.0")],
    "glu": [case(lambda a, b, c: (f(a, 2 * c),), "0.1"), case(lambda a, b, c: (f(2 * a, c), 0), "0.0")],
    "diff": [
        case(lambda a, b, c: (f(a, c),), "0.1"),
        case(lambda a, b, c: (f(a, c), 1, 0, f(1, c)), "0.0"),
        case(lambda a, b, c: (f(a, c), 1, -1, None, f(a, c)), "0.1 1.1"),
    ],
    **many("tril triu", case(lambda a, b, c: (f(a, b, c), 1), "0.1 0.2")),
    **many("linalg_matrix_exp matrix_exp", case(lambda a, b, c: (f(a, b, b, high=0.0),), "0.1 0.2")),
    **many("linalg_inv inverse", case(lambda a, b, c: (_regular(a, c),), "0.1 0.2")),
    "linalg_cholesky": [case(lambda a, b, c: (_positive(a, c),), "0.1 0.2")],
    **many("fft_fft fft_ifft", case(lambda a, b, c: (z(a, c),), "0.1"), case(lambda a, b, c: (z(a, c), 3, 0), "0.0")),
    "fft_rfft": [case(lambda a, b, c: (f(a, c),), "0.1")],
    "fft_irfft": [case(lambda a, b, c: (z(a, c), 2 * c), "0.1")],
    **many("fft_fft2 fft_ifft2", case(lambda a, b, c: (z(a, b, c),), "0.1 0.2")),
    "fft_rfft2": [case(lambda a, b, c: (f(a, b, c),), "0.1 0.2")],
    "fft_irfft2": [case(lambda a, b, c: (z(a, b, c),), "0.1 0.2")],
    **many(
        "fft_fftn fft_ifftn",
        case(lambda a, b, c: (z(a, c), None, [0]), "0.0"),
        case(lambda a, b, c: (z(a, b, c), [2, 2]), "0.1 0.2"),
        case(lambda a, b, c: (z(a, c),), "0.0 0.1"),
    ),
    "cosine_similarity": [
        case(lambda a, b, c: (f(a, b, c), f(a, 1, c), 2), "0.2 1.2"),
        case(lambda a, b, c: (f(a, b), f(b), 0), "0.0"),
    ],
    "pairwise_distance": [
        case(lambda a, b, c: (f(a, c), f(a, c)), "0.1 1.1"),
        case(lambda a, b, c: (f(a, c), f(c), 2.0, 1e-6, True), "0.1 1.0"),
    ],
    "searchsorted": [
        case(lambda a, b, c: (_sorted(c), g(a, b)), "0.0"),
        case(lambda a, b, c: (_sorted(a, c), g(a, b)), "0.1"),
        case(lambda a, b, c: (_sorted(c), 0.3), "0.0"),
    ],
    "bucketize": [case(lambda a, b, c: (g(a, b), _sorted(c)), "1.0"), case(lambda a, b, c: (0.3, _sorted(c)), "0.0")],
    "histc": [case(lambda a, b, c: (g(a, c), 5, -2, 2))],
    "layer_norm": [
        case(lambda a, b, c: (f(a, 3, c), [c], f(c), f(c)), "0.2 1.0 2.0"),
        case(lambda a, b, c: (f(a, b, c), [b, c]), "0.1 0.2"),
        case(lambda a, b, c: (f(a, c), [c], None, f(c)), "0.1 1.0"),
    ],
    "native_layer_norm": [case(lambda a, b, c: (f(a, b, c), [c], f(c), None, 1e-5), "0.2 1.0")],
    "rms_norm": [case(lambda a, b, c: (f(a, b, c), [c], f(c)), "0.2 1.0")],
    "_fused_rms_norm": [case(lambda a, b, c: (f(a, b, c), [c], f(c), 1e-5), "0.2 1.0")],
    "group_norm": [
        case(lambda a, b, c: (f(a, 2 * b, c), b, f(2 * b), f(2 * b)), "0.2"),
        case(lambda a, b, c: (f(a, 6, c, 3), 1, f(6)), "0.1 0.2 1.0"),
    ],
    "instance_norm": [
        case(lambda a, b, c: (f(a, b, c), f(b), f(b), None, None, True, 0.1, 1e-5, False), "0.2"),
    ],
    "batch_norm": [
        case(lambda a, b, c: (f(a, b, c), f(b), None, None, None, True, 0.1, 1e-5, False), "0.0 0.2"),
        case(lambda a, b, c: (f(a, b, c), f(b), f(b), g(b), g(b, low=0.5), False, 0.1, 1e-5, False)),
    ],
}


def _sorted(*shape: int) -> torch.Tensor:
    return g(*shape).sort().values


def _regular(batch: int, size: int) -> torch.Tensor:
    return (torch.eye(size, dtype=torch.float64) * 8 + g(batch, size, size, low=-0.5, high=0.5)).requires_grad_()


def _positive(batch: int, size: int) -> torch.Tensor:
    x = g(batch, size, size)
    return x @ x.mT + torch.eye(size, dtype=torch.float64)
