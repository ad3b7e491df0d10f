"""Every entry of the tables is run against the operator that it claims to be."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from fxrewrite import ops
from fxrewrite.ops.tables import ALIASES, CASTS, OPERATORS, WRAPPERS
from fxrewrite.ops.traits import operators

aten = torch.ops.aten
torch.manual_seed(0)
A, B = torch.rand(3, 4) + 0.1, torch.rand(3, 4) + 0.1
INTS = torch.randint(1, 9, (3, 4)), torch.randint(1, 9, (3, 4))


def run(function, args):
    """The result, or the type of the error; arguments are copied since some functions write to them."""
    try:
        return function(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    except (RuntimeError, TypeError, IndexError) as error:
        return type(error)


def same(a, b) -> bool:
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    return a == b


ARGUMENTS = [
    (A,),
    (A, B),
    (A, 2),
    INTS,
    (INTS[0],),
    (A, A.mT),
    (A > 0.5, B > 0.5),
    (A, 0, 1),
    ([A, B],),
    (A, 1),
    (A[0], B[0]),
]


@pytest.mark.parametrize(("function", "name"), list(OPERATORS.items()), ids=list(OPERATORS.values()))
def test_python_operators_are_the_aten_operators(function, name: str) -> None:
    results = [(run(function, args), run(getattr(aten, name), args)) for args in ARGUMENTS[:6]]
    agreeing = [same(a, b) for a, b in results if not isinstance(a, type) and not isinstance(b, type)]
    assert agreeing, name
    assert all(agreeing), name


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_are_the_operators_they_stand_for(alias: str) -> None:
    other = ALIASES[alias]
    results = [(run(getattr(aten, alias), args), run(getattr(aten, other), args)) for args in ARGUMENTS]
    compared = [same(a, b) for a, b in results if not isinstance(a, type) and not isinstance(b, type)]
    assert compared, "no arguments to compare on"
    assert all(compared)
    assert argument_names(alias) <= argument_names(other)


def argument_names(name: str) -> set[str]:
    packet = getattr(aten, name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return {a.name for s in schemas for a in s.arguments if not a.is_out and "Tensor" in str(s.arguments[0].type)}


@pytest.mark.parametrize("name", CASTS)
def test_casts_are_to_dtype(name: str) -> None:
    assert getattr(A, name)().dtype == CASTS[name]


@pytest.mark.parametrize("key", sorted(operators("commutative")))
def test_commutative_operators_commute(key: str) -> None:
    function = getattr(aten, key.removeprefix("aten::"))
    results = [(run(function, (a, b)), run(function, (b, a))) for a, b in ((A, B), INTS, (A > 0.5, B > 0.5))]
    assert any(not isinstance(a, type) for a, _ in results)
    assert all(same(a, b) for a, b in results)


CALLS = {
    F.max_pool1d: [(A, 2), (A, 3, 1, 1), (A, 2, None, 0, 2)],
    F.max_pool2d: [(A[None], 2), (A[None], (2, 3), 1, 1), (A[None], 2, None, 0, 1, True)],
    F.max_pool3d: [(A[None, None], 1, 2), (A[None, None], (1, 2, 2), None)],
    F.elu: [(A - 0.5,), (A - 0.5, 0.5)],
    F.leaky_relu: [(A - 0.5,), (A - 0.5, 0.3)],
    F.celu: [(A - 0.5,), (A - 0.5, 0.5)],
    F.threshold: [(A, 0.5, 2.0)],
    F.glu: [(A,), (A, 1)],
    F.batch_norm: [(A, B[0], B[1]), (A, None, None, B[0], B[1], True, 0.2, 1e-3)],
    F.instance_norm: [(A[None],), (A[None], INTS[0][:, 0] / 9, B[:, 0], None, None, False, 0.2, 1e-3)],
    F.adaptive_avg_pool2d: [(A[None], 2), (A[None], (1, 2))],
    F.nll_loss: [(A, torch.tensor([0, 1, 2])), (A, torch.tensor([0, -1, 2]), None, None, -1, None, "sum")],
    F.kl_div: [(A, B, None, None, "none"), (A, B, None, None, "sum", True)],
    F.huber_loss: [(A, B), (A, B, "none", 0.1)],
    F.smooth_l1_loss: [(A, B), (A, B, None, None, "sum", 0.1)],
    F.soft_margin_loss: [(A, B), (A, B, None, None, "sum")],
    F.hardtanh: [(A,), (A, 0.2, 0.6)],
    F.softmax: [(A, -1), (A, 0, 3, torch.float64)],
    F.log_softmax: [(A, -1), (A, 0, 3, torch.float64)],
    F.dropout: [(A, 0.0), (A, 0.5, False)],
    F.alpha_dropout: [(A, 0.5), (A, 0.0, True)],
    F.layer_norm: [(A, (4,)), (A, (4,), B[0], B[1], 1e-3)],
    F.rms_norm: [(A, (4,)), (A, (4,), B[0], 1e-3)],
    F.group_norm: [(A, 2), (A, 2, B[0], B[1], 1e-3)],
    F.embedding: [(INTS[0] % 3, A), (INTS[0] % 3, A, 1)],
    F.cross_entropy: [(A, torch.tensor([0, 1, 2])), (A, torch.tensor([0, -1, 2]), None, None, -1, None, "sum", 0.1)],
    F.mse_loss: [(A, B), (A, B, None, None, "sum")],
    F.l1_loss: [(A, B), (A, B, None, None, "none")],
    F.binary_cross_entropy_with_logits: [(A, B), (A, B, B, None, None, "sum", B[0])],
    F.binary_cross_entropy: [(A / 2, B / 2), (A / 2, B / 2, None, None, None, "sum")],
    F.cosine_embedding_loss: [(A, B, torch.ones(3)), (A, B, -torch.ones(3), 0.1, None, None, "none")],
    F.hinge_embedding_loss: [(A, B.sign()), (A, -B.sign(), 0.3, None, None, "sum")],
    F.margin_ranking_loss: [(A, B, A.sign()), (A, B, A.sign(), 0.3, None, None, "sum")],
    F.multi_margin_loss: [(A, torch.tensor([0, 1, 2])), (A, torch.tensor([0, 1, 2]), 2, 0.5, B[0], None, None, "none")],
    F.multilabel_margin_loss: [(A, INTS[0] % 4), (A, INTS[0] % 4, None, None, "sum")],
    F.poisson_nll_loss: [(A, B), (A, B, False, True, None, 1e-3, None, "sum")],
    F.triplet_margin_loss: [(A, B, A - B), (A, B, A - B, 0.5, 1.0, 1e-3, True, None, None, "sum")],
    F.unfold: [(A[None, None], 2), (A[None, None], (2, 1), 1, (0, 1), 2)],
    F.fold: [(torch.rand(1, 4, 6), (3, 4), 2), (torch.rand(1, 2, 12), (3, 4), (2, 1), 2, (1, 0))],
    F.grid_sample: [
        (A[None, None], torch.rand(1, 2, 2, 2), "bilinear", "zeros", False),
        (A[None, None], torch.rand(1, 2, 2, 2) * 3, "nearest", "reflection", True),
        (A[None, None], torch.rand(1, 2, 2, 2) * 3, "bicubic", "border", True),
    ],
    torch.functional.cdist: [(A, B), (A, B, 1.0), (A, B, 2.0, "donot_use_mm_for_euclid_dist")],
    F.adaptive_avg_pool3d: [(A[None, None], 1), (A[None, None], (1, 2, 2))],
    F.feature_alpha_dropout: [(A[None], 0.5), (A[None], 0.0, True)],
    F.rrelu: [(A - 0.5,), (A - 0.5, 0.3, 0.4)],
    F.pad: [(A, (1, 2)), (A, [1, 0], "constant", 3.0)],
    torch.functional.norm: [
        (A,),
        (A, 1, -1, True),
        (A, "fro", [0, 1]),
        (A, float("inf"), None, False, None, torch.float64),
    ],
    torch.Tensor.norm: [(A,), (A, 2.0, -1), (A, 0, (0, 1), True)],
    torch.Tensor.unflatten: [(A, 1, (2, 2)), (A, -1, [2, -1])],
}


@pytest.mark.parametrize("function", WRAPPERS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_wrappers_are_their_operator_on_the_bound_arguments(function) -> None:
    for args in CALLS.get(function, [(A - 0.5,)]):
        graph = fx.Graph()
        holders = [graph.placeholder(f"x{i}") if isinstance(a, torch.Tensor) else a for i, a in enumerate(args)]
        call = graph.call_function(function, tuple(holders))
        values = {h: a for h, a in zip(holders, args, strict=True) if isinstance(h, fx.Node)}
        bound = fx.node.map_arg(ops.bind(call), lambda n, values=values: values[n])
        assert same(function(*args), getattr(aten, WRAPPERS[function].name)(**bound)), function
