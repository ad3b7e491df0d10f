"""Cases of products and losses."""

from __future__ import annotations

import torch

from tests.rules.layouts.case import Case, Cases, b, case, f, g, i, many, z

_ELEMENTWISE = "l1_loss smooth_l1_loss huber_loss kl_div"
_NONE, _SUM = 0, 2
_FLOAT32 = {"out_dtype": torch.float32}


def f8(*shape: int) -> torch.Tensor:
    """Integers from -1 to 1 in float8, whose products add up exactly, also in bfloat16."""
    return torch.randint(-1, 2, shape).to(torch.float8_e4m3fn)


def powers_of_two(*shape: int) -> torch.Tensor:
    """Scales that round nothing."""
    return 2.0 ** torch.randint(-3, 4, shape)


def _einsum(equation: str, args: object, whole: str = "") -> Case:
    return case(lambda a, b, c: (equation, list(args(a, b, c))), whole)  # type: ignore[operator]


CASES: Cases = {
    "linear": [
        case(lambda a, b, c: (f(a, 3, b), f(c, b), f(c))),
        case(lambda a, b, c: (f(a, b), f(c, b))),
        case(lambda a, b, c: (f(b), f(c, b))),
    ],
    "bilinear": [
        case(lambda a, b, c: (f(a, 3), f(a, b), f(c, 3, b), f(c)), "1.1 2.2"),
        case(lambda a, b, c: (f(a, 3), f(a, b), f(c, 3, b)), "1.1 2.2"),
    ],
    "matmul": [
        case(lambda a, b, c: (f(3, a, b, c), f(3, a, c, b))),
        case(lambda a, b, c: (f(a, b, c), f(c, b))),
        case(lambda a, b, c: (f(c), f(c))),
        case(lambda a, b, c: (f(a, c), f(c))),
        case(lambda a, b, c: (f(c), f(a, c, b))),
        case(lambda a, b, c: (f(1, b, c), f(a, c, 3))),
    ],
    "mm": [case(lambda a, b, c: (f(a, c), f(c, b)))],
    "bmm": [case(lambda a, b, c: (f(a, b, c), f(a, c, 3)))],
    "mv": [case(lambda a, b, c: (f(a, c), f(c)))],
    "dot": [case(lambda a, b, c: (f(c), f(c)))],
    "vdot": [case(lambda a, b, c: (z(c), z(c)))],
    "outer": [case(lambda a, b, c: (f(a), f(c)))],
    "inner": [case(lambda a, b, c: (f(a, b, c), f(3, c))), case(lambda a, b, c: (f(c), f(c)))],
    "linalg_vecdot": [
        case(lambda a, b, c: (f(a, c), f(c))),
        case(lambda a, b, c: (f(a, 3, c), f(a, 3, c)), dim=0),
    ],
    "addmm": [
        case(lambda a, b, c: (f(c), f(a, b), f(b, c))),
        case(lambda a, b, c: (f(a, 1), f(a, b), f(b, c))),
        case(lambda a, b, c: (f(a, c), f(a, b), f(b, c))),
    ],
    "addmv": [case(lambda a, b, c: (f(a), f(a, b), f(b)))],
    "addr": [case(lambda a, b, c: (f(a, c), f(a), f(c))), case(lambda a, b, c: (f(c), f(a), f(c)))],
    "addbmm": [case(lambda a, b, c: (f(a, c), f(b, a, 3), f(b, 3, c)))],
    "baddbmm": [
        case(lambda a, b, c: (f(a, b, 3), f(a, b, c), f(a, c, 3))),
        case(lambda a, b, c: (f(a, 1, c), f(a, 3, b), f(a, b, c))),
        case(lambda a, b, c: (f(1), f(a, 3, b), f(a, b, c)), beta=0.5),
    ],
    "_scaled_mm": [
        case(lambda a, b, c: (f8(a, 32 * c), f8(b, 32 * c).t(), torch.ones(()), torch.ones(())), **_FLOAT32),
        case(
            lambda a, b, c: (f8(a, 16 * c), f8(b, 16 * c).t(), torch.ones(1, 1), torch.ones(1), torch.ones(b)),
            **_FLOAT32,
        ),
        case(
            lambda a, b, c: (f8(a, 16 * c), f8(b, 16 * c).t(), powers_of_two(a, 1), powers_of_two(1, b)),
            out_dtype=torch.bfloat16,
        ),
    ],
    "tensordot": [
        case(lambda a, b, c: (f(a, b, c), f(c, 3, b), [1, 2], [2, 0])),
        case(lambda a, b, c: (f(a, 3), f(b, c), [], [])),
    ],
    "cdist": [case(lambda a, b, c: (f(a, b, 3), f(a, c, 3))), case(lambda a, b, c: (f(a, 3, b), f(c, b)), "0.2 1.1")],
    **many(
        "linalg_solve_triangular",
        case(lambda a, b, c: (_triangular(a, b), f(a, b, c)), "0.1 0.2 1.1", upper=False),
        case(lambda a, b, c: (_triangular(1, b), f(a, c, b)), "0.1 0.2 1.2", upper=False, left=False),
    ),
    "linalg_solve": [case(lambda a, b, c: (_triangular(a, b), f(a, b, c)), "0.1 0.2 1.1")],
    "einsum": [
        _einsum("bsd,de->bse", lambda a, b, c: (f(3, a, b), f(b, c))),
        _einsum("b s d, b t d -> b s t", lambda a, b, c: (f(3, a, b), f(3, c, b))),
        _einsum("...i,...j->...ij", lambda a, b, c: (f(a, 1, b), f(3, c))),
        _einsum("i...,i...", lambda a, b, c: (f(c, a, 1), f(c, 1, b))),
        _einsum("ba,ab", lambda a, b, c: (f(a, b), f(b, a))),
        _einsum("cb,a", lambda a, b, c: (f(c, b), f(a))),
        _einsum("ij,jk,kl->li", lambda a, b, c: (f(a, b), f(b, c), f(c, 3))),
        _einsum("ii->i", lambda a, b, c: (f(a, a),), "0.0 0.1"),
        _einsum("bii,ic->bc", lambda a, b, c: (f(a, b, b), f(b, c)), "0.1 0.2 1.0"),
        _einsum("ab->a", lambda a, b, c: (f(a, b),)),
        _einsum("ab,bc->ac", lambda a, b, c: (f(a, 1), f(b, c))),
        _einsum("...,->...", lambda a, b, c: (f(a, b), f())),
    ],
    "cross_entropy_loss": [
        case(lambda a, b, c: (f(a, 5), i(5, a), None, _SUM)),
        case(lambda a, b, c: (f(a, b), i(b, a), None, _SUM), "0.1"),
        case(lambda a, b, c: (f(a, b), i(b, a), g(b, low=0.1), _SUM, 1, 0.1), "0.1 2.0"),
        case(lambda a, b, c: (f(a, b), i(b, a), None, _NONE), "0.1"),
        case(lambda a, b, c: (f(a, 5, c), i(5, a, c), None, _SUM)),
        case(lambda a, b, c: (f(a, b), f(a, b), None, _SUM), "0.1 1.1"),
        case(lambda a, b, c: (f(a, b, c), f(a, b, c), g(b, low=0.1), _NONE, -100, 0.2), "0.1 1.1 2.0"),
    ],
    "nll_loss_nd": [
        case(lambda a, b, c: (f(a, b), i(b, a), g(b, low=0.1), _SUM, 0), "0.1 2.0"),
        case(lambda a, b, c: (f(a, b, c), i(b, a, c), None, _NONE), "0.1"),
    ],
    "nll_loss": [case(lambda a, b, c: (f(a, b), i(b, a), None, _SUM), "0.1")],
    "nll_loss2d": [case(lambda a, b, c: (f(a, b, c, 3), i(b, a, c, 3), None, _SUM), "0.1")],
    **many(
        _ELEMENTWISE,
        case(lambda a, b, c: (f(a, 3, c), f(a, 3, c, low=0.1), _SUM)),
        case(lambda a, b, c: (f(a, c), f(a, c, low=0.1), _NONE)),
    ),
    "mse_loss": [
        case(lambda a, b, c: (f(a, 3, c), f(a, 3, c), _SUM)),
        case(lambda a, b, c: (f(a, c), f(a, c), _NONE)),
        case(lambda a, b, c: (f(a), f(a), _SUM)),
    ],
    "binary_cross_entropy": [case(lambda a, B, c: (f(a, c, low=0.1, high=0.9), b(a, c).double(), g(a, c), _SUM))],
    "binary_cross_entropy_with_logits": [
        case(lambda a, B, c: (f(a, c), b(a, c).double(), g(a, 1), g(c), _SUM)),
        case(lambda a, B, c: (f(a, c), b(a, c).double(), None, g(c), _NONE)),
    ],
    "soft_margin_loss": [case(lambda a, B, c: (f(a, c), 2.0 * b(a, c) - 1, _SUM))],
    "hinge_embedding_loss": [case(lambda a, B, c: (f(a, c), 2.0 * b(a, c) - 1, 1.0, _SUM))],
    "margin_ranking_loss": [case(lambda a, B, c: (f(a, c), f(a, c), 2.0 * b(a, c) - 1, 0.1, _SUM))],
    "poisson_nll_loss": [case(lambda a, b, c: (f(a, c), g(a, c, low=0.1), True, False, 1e-8, _SUM))],
    "cosine_embedding_loss": [
        case(lambda a, B, c: (f(a, c), f(a, c), 2.0 * b(a) - 1, 0.1, _SUM), "0.1 1.1"),
        case(lambda a, B, c: (f(a, c), f(a, c), 2.0 * b(a) - 1, 0.1, _NONE), "0.1 1.1"),
    ],
    "triplet_margin_loss": [
        case(lambda a, b, c: (f(a, c), f(a, c), f(a, c), 1.0, 2.0, 1e-6, True, _SUM), "0.1 1.1 2.1")
    ],
}


def _triangular(batch: int, size: int) -> object:
    x = g(batch, size, size, low=0.1, high=0.4).tril()
    x.diagonal(dim1=-2, dim2=-1).add_(2.0)
    return x.requires_grad_()
