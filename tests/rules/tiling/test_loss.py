"""A loss in tiles has the value and the gradients of the loss of all logits, and never holds these."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import fx
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fxrewrite import RuleSet, normalize
from rules.tiling.loss import tiled_cross_entropy, tiled_cross_entropy_with_grads, tiled_loss_rules
from tests.rewriting import check_left_alone
from tests.rules.tiling.tiled import Tiled

ROWS, DEPTH, CLASSES = 37, 8, 61
TILE = CLASSES * 8 * 5  # five rows in float64: the last tile has two


def operands(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, DEPTH), (CLASSES, DEPTH), (CLASSES,))
    x, w, b = (torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::3] = -100
    return x, w, b, target


def whole(x: Any, w: Any, b: Any, target: Any, class_weight: Any, steps: str, **how: Any) -> torch.Tensor:
    logits = F.linear(x, w, b)
    if "tanh" in steps:
        logits = torch.tanh(logits / 3) * 3
    return F.cross_entropy(logits.float() if "float32" in steps else logits, target, class_weight, **how)


@pytest.mark.parametrize("tile_rows", [1, 5, 100])
@pytest.mark.parametrize("steps", ["", "to(v0, 'float32')", "div(v0, 3.0); tanh(v1); mul(v2, 3.0)"])
def test_values_and_gradients_are_those_of_all_logits(steps: str, tile_rows: int) -> None:
    x, w, b, target = operands()
    rounding = 1e-6 if "float32" in steps else 1e-12
    weights = torch.rand(CLASSES, dtype=torch.float32 if "float32" in steps else torch.float64)
    cases = itertools.product(("none", "mean", "sum"), (0.0, 0.1), (None, weights), (-100, int(target[1])))
    for reduction, smoothing, class_weight, ignored in cases:
        labels = torch.where(target == -100, ignored, target)
        how = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        for leaves in ((x, w, b), (x, w)):
            bias = leaves[2] if len(leaves) == 3 else None
            expected = whole(x, w, bias, labels, class_weight, steps, **how)
            how_in_tiles = steps, reduction, ignored, smoothing, TILE // 5 * tile_rows
            loss = tiled_cross_entropy(x, w, bias, labels, class_weight, *how_in_tiles)
            torch.testing.assert_close(loss, expected, rtol=rounding, atol=rounding)
            seed = torch.rand_like(expected)
            grads = torch.autograd.grad(loss, leaves, seed)
            for grad, want in zip(grads, torch.autograd.grad(expected, leaves, seed), strict=True):
                torch.testing.assert_close(grad, want, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rows", [0, 6])
def test_where_nothing_counts_there_is_no_gradient(rows: int, reduction: str) -> None:
    x, w, b, _ = operands()
    target = torch.full((rows,), 3)
    expected = F.cross_entropy(F.linear(x[:rows], w, b), target, ignore_index=3, reduction=reduction).sum()
    loss = tiled_cross_entropy(x[:rows], w, b, target, None, "", reduction, 3, 0.0, TILE).sum()
    torch.testing.assert_close(loss, expected, equal_nan=True)
    for scaled in (loss, loss / 0):  # as a sum by a global count is, of which no rank counts any
        grads = torch.autograd.grad(scaled, (x, w, b), retain_graph=True)
        assert all((grad == 0).all() for grad in grads)


def losses(reduction: str, *leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w, b, target = *leaves, operands()[3]
    tiled = tiled_cross_entropy(x, w, b, target, None, "", reduction, -100, 0.0, TILE)
    return tiled, whole(x, w, b, target, None, "", reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_is_scaled_used_twice_and_differentiated_twice(reduction: str) -> None:
    leaves = operands()[:3]
    tiled, expected = (3.7 * loss + loss.square() for loss in losses(reduction, *leaves))
    wanted = torch.autograd.grad(expected, leaves)
    for _ in range(2):
        for grad, want in zip(torch.autograd.grad(tiled, leaves, retain_graph=True), wanted, strict=True):
            torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)
    assert all((grad == 0).all() for grad in torch.autograd.grad(0 * tiled, leaves))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_second_derivative_is_refused(reduction: str) -> None:
    leaves = operands()[:3]
    grads = torch.autograd.grad(losses(reduction, *leaves)[0].sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="tiled_cross_entropy has no second derivative"):
        torch.autograd.grad(grads[0].sum() + leaves[0].sum(), leaves, allow_unused=True)


class Calls(TorchDispatchMode):
    """What is asked for of the operator, call by call, and how many numbers of each gradient it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = list[list[bool]]()
        self.sizes = list[list[int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.fxrewrite_rules.tiled_cross_entropy_with_grads.default:
            self.wanted.append(args[-1])
            self.sizes.append([grad.numel() for grad in out[1:]])
        return out


ALL, NONE = [True, True, True], [False, False, False]


@pytest.mark.parametrize(("reduction", "calls"), [("none", [NONE, ALL]), ("mean", [ALL]), ("sum", [ALL])])
def test_logits_are_computed_once_where_a_number_is_differentiated(reduction: str, calls: list[list[bool]]) -> None:
    leaves = operands()[:3]
    with Calls() as made:
        torch.autograd.grad(losses(reduction, *leaves)[0].sum(), leaves)
    assert made.wanted == calls


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("frozen", [{0}, {1}, {1, 2}])
def test_what_is_frozen_has_no_gradient(frozen: set[int], reduction: str) -> None:
    leaves = [leaf.detach() if index in frozen else leaf for index, leaf in enumerate(operands()[:3])]
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    with Calls() as made:
        tiled, expected = losses(reduction, *leaves)
        grads = torch.autograd.grad(tiled.sum(), learned)
    assert made.wanted[-1] == [leaf.requires_grad for leaf in leaves]
    assert made.sizes[-1] == [leaf.numel() * leaf.requires_grad for leaf in leaves]
    for grad, want in zip(grads, torch.autograd.grad(expected.sum(), learned), strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_no_gradients_are_computed_without_autograd(without: Callable[[], Any]) -> None:
    with Calls() as made, without():
        tiled, expected = losses("mean", *operands()[:3])
    torch.testing.assert_close(tiled, expected, rtol=1e-12, atol=0)
    assert made.wanted == [NONE]
    assert made.sizes == [[0, 0, 0]]


def test_gradients_that_were_not_asked_for_are_computed_when_they_are_needed() -> None:
    """As where a graph was traced without gradients, and is differentiated."""
    x, w, b, target = operands()
    loss, *_ = tiled_cross_entropy_with_grads(x, w, b, target, None, None, "", -100, 0.0, TILE, True, NONE)
    expected = torch.autograd.grad(whole(x, w, b, target, None, "", reduction="sum"), (x, w, b))
    for grad, want in zip(torch.autograd.grad(loss, (x, w, b)), expected, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-12, atol=1e-12)


def test_a_target_that_is_no_class_is_an_error() -> None:
    x, w, b, target = operands()
    with pytest.raises(IndexError, match="Target 61 is out of bounds"):
        tiled_cross_entropy(x, w, b, target.clamp(min=CLASSES), None, "", "mean", -100, 0.0, TILE)


@pytest.mark.parametrize("steps", ["", "to(v0, 'float32')"])
@pytest.mark.parametrize(("dtype", "loss_scale", "rows"), [(torch.bfloat16, 1.0, 37), (torch.float16, 2.0**14, 4096)])
def test_half_precision_is_as_near_to_the_truth_as_all_logits(
    dtype: torch.dtype, loss_scale: float, rows: int, steps: str
) -> None:
    """In float16 a mean over many rows has gradients that vanish unless the loss is scaled."""
    x, *parameters, target = (t.detach() for t in operands())
    x, target = (t.repeat(-(-rows // ROWS), *[1] * (t.dim() - 1))[:rows] for t in (x, target))
    half = [t.to(dtype).requires_grad_() for t in (x, *parameters)]
    exact = [t.detach().double().requires_grad_() for t in half]

    def grads(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [grad.double() / loss_scale for grad in torch.autograd.grad(loss.float() * loss_scale, leaves)]

    exactly, at_once = whole(*exact, target, None, ""), whole(*half, target, None, steps)
    loss = tiled_cross_entropy(*half, target, None, steps, "mean", -100, 0.0, TILE)
    assert loss.dtype == at_once.dtype
    assert (loss - exactly).abs() <= 1.2 * (at_once - exactly).abs() + 1e-6
    truth, before = torch.autograd.grad(exactly, exact), grads(at_once, half)
    for leaf, grad, untiled, true in zip(half, grads(loss, half), before, truth, strict=True):
        assert (grad - true).norm() <= 1.2 * (untiled - true).norm() + 1e-9, leaf.shape


def test_a_sum_over_rows_that_float16_does_not_hold() -> None:
    """Of gradients of the weight, before a mean divides them."""
    x, w = torch.full((16384, 8), 40.0, dtype=torch.float16), torch.zeros(64, 8, dtype=torch.float16)
    target = torch.zeros(len(x), dtype=torch.int64)
    expected, found = (w.clone().requires_grad_() for _ in range(2))
    F.cross_entropy(F.linear(x, expected).float(), target).backward()
    tiled_cross_entropy(x, found, None, target, None, "to(v0, 'float32')", "mean", -100, 0.0, 2**30).backward()
    torch.testing.assert_close(found.grad, expected.grad)


def spelled(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As models of Hugging Face do it: shifted labels, soft-capped logits in float32, a sum by a count."""
    logits = torch.tanh(F.linear(x, w) * 0.5 / 30.0) * 30.0
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    total = F.cross_entropy(logits.float().view(-1, CLASSES), shifted, reduction="sum", ignore_index=-100)
    return total / (shifted != -100).sum()


def sliced(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w)[:, :-1, :].contiguous()
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels[:, 1:].reshape(-1))


def padded(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A head with more rows than there are classes, and a bounded activation behind it."""
    logits = F.linear(x, w)[..., : CLASSES - 3].sigmoid().reshape(-1, CLASSES - 3)
    return F.cross_entropy(logits * 4, labels.flatten() % (CLASSES - 3))


@pytest.mark.parametrize(
    ("loss", "dynamic"),
    [(spelled, False), (spelled, True), (sliced, False), (sliced, True), (padded, False)],  # a cut of s classes is none
)
@pytest.mark.some(2)
def test_no_value_of_rows_by_classes_is_left(loss: Callable[..., torch.Tensor], dynamic: bool) -> None:
    x, w = torch.randn(2, 19, DEPTH).requires_grad_(), torch.randn(CLASSES, DEPTH).requires_grad_()
    labels = torch.randint(CLASSES, (2, 19))
    backend = Tiled(tiled_loss_rules(CLASSES * 4 * 5))
    compiled = torch.compile(loss, backend=backend, dynamic=dynamic)(x, w, labels)
    grads = torch.autograd.grad(compiled, (x, w))
    assert backend.most_entries() < 36 * CLASSES
    for grad, want in zip(grads, torch.autograd.grad(loss(x, w, labels), (x, w)), strict=True):
        torch.testing.assert_close(grad, want)


def test_a_symbolic_number_of_rows_is_tiled_however_few_there_are() -> None:
    """The program stays for any number of them."""
    x, w = torch.randn(2, 19, DEPTH).requires_grad_(), torch.randn(CLASSES, DEPTH).requires_grad_()
    labels, tiled = torch.randint(CLASSES, (2, 19)), list[int]()

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        gm = normalize(gm)
        tiled.append(tiled_loss_rules().apply(gm).rule("tiled_loss.tile").rewrites)
        return gm

    run = torch.compile(spelled, backend=backend, fullgraph=True)
    for length in (5, 7, 11):
        cut = x[:, :length].detach().requires_grad_()
        given = cut, w, labels[:, :length]
        wanted = torch.autograd.grad(spelled(*given), (cut, w))
        for grad, want in zip(torch.autograd.grad(run(*given), (cut, w)), wanted, strict=True):
            torch.testing.assert_close(grad, want)
    assert tiled == [0, 1]


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
@pytest.mark.parametrize("loss", [spelled, lambda *args: checkpoint(spelled, *args, use_reentrant=False)])
def test_gradients_are_kept_and_not_what_they_are_computed_of(
    loss: Callable[..., torch.Tensor], partition: Any
) -> None:
    """Also where the model says that its loss is computed again."""
    x, w = torch.randn(2, 19, DEPTH).requires_grad_(), torch.randn(CLASSES, DEPTH).requires_grad_()
    backend = Tiled(tiled_loss_rules(CLASSES * 4 * 5), partition)
    torch.compile(loss, backend=backend)(x, w, torch.randint(CLASSES, (2, 19))).backward()
    forward, backward = backend.graphs
    kept = [node.meta["val"] for node in forward.graph.output_node().all_input_nodes]
    shapes = [tuple(value.shape) for value in kept if value.is_floating_point() and value.dim()]
    assert sorted(shapes) == [(38, DEPTH), (CLASSES, DEPTH)]
    assert "tiled_cross_entropy" not in backward.code


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda x, w, t: (F.cross_entropy(z := F.linear(x, w), t), z), "%linear is read elsewhere"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w).cumsum(1), t), "%cumsum, aten::cumsum, is between the head"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w) * w[:, 0], t), "%mul, aten::mul, is between the head and the"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w)[None].mT, t[None]), "the logits have rank 3"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w), F.one_hot(t, CLASSES).double()), "class probabilities"),
        (lambda x, w, t: F.cross_entropy(F.linear(x, w)[:3], t[:3]), "1,464 bytes, fit into a tile"),
        (lambda x, w, t: F.cross_entropy(w, t[:CLASSES].new_zeros(CLASSES)), "%w_1 is not computed by a linear"),
        (lambda x, w, t: F.cross_entropy(w[1:ROWS].float(), t[1:]), "w_1 is not computed by a linear"),
        (
            lambda x, w, t: F.cross_entropy(F.linear(w[:36].view(6, 6, -1), x[0]), t[:6]),
            "weight of %linear is not a matrix",
        ),
    ],
)
def test_what_does_not_match_and_why(loss: Callable[..., Any], why: str) -> None:
    x, w, _, target = operands()
    args = [x.detach(), w.detach(), target.clamp(min=0)]
    (tile,) = tiled_loss_rules(TILE).rules()
    check_left_alone(RuleSet("alone", tile), tile.id, loss, args, why)
