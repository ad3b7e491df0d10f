"""Every pair of twins is run on values of several dtypes: equal bits, dtypes, strides, errors and gradients."""

import itertools

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite.backends import capture
from fxrewrite.match import Program
from fxrewrite.ops import TWINS, Twins
from fxrewrite.ops.tables import DIMS_ARE_A_SET, OF_ALL
from fxrewrite.pattern import Pattern, cap, op, trace
from tests.match.test_match import matches

torch.manual_seed(0)
DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), 1e-40, 1e20, -3.0, 2.0])


def values(shape: tuple[int, ...], dtype: torch.dtype, *, special: bool) -> torch.Tensor:
    drawn = torch.randn(shape) * 2
    if special:
        drawn = SPECIAL.roll(len(shape)).repeat(-(-drawn.numel() // 12))[: drawn.numel()].reshape(shape)
    return drawn.nan_to_num().to(dtype) if not dtype.is_floating_point else drawn.to(dtype)


def letters(twins: Twins, dtype: torch.dtype, *, special: bool):
    """What the letters may be: tensors of one shape, of two that broadcast, and Python values."""
    for shape, other in (((3, 4), (3, 4)), ((4,), (3, 4)), ((2, 3, 4), (3, 4)), ((), ()), ((0, 4), (4,))):
        if twins.ranks and not twins.ranks[0] <= len(shape) <= twins.ranks[1]:
            continue
        x, y = values(shape, dtype, special=special), values(other, dtype, special=special)
        for n, m in ((y, 1), (0, -1), (1.5, 0), ([2, 3, 4], None), (-2, -1), ([0], True)):
            yield {"x": x, "y": y, "n": n, "m": m}


def run(call, given):
    name, arguments = call

    def value(argument):
        return run(argument, given) if isinstance(argument, tuple) else given.get(str(argument), argument)

    return getattr(torch.ops.aten, name.removeprefix("aten::"))(**{k: value(v) for k, v in arguments.items()})


def outcome(call, given):
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) if k in "xy" else v for k, v in given.items()}
    leaves["n"] = leaves["y"] if given["n"] is given["y"] else given["n"]
    try:
        result = run(call, leaves)
    except (RuntimeError, TypeError, IndexError):
        return "raises"
    grads = []
    if isinstance(result, torch.Tensor) and result.requires_grad:
        grads = torch.autograd.grad(result, [leaves["x"], leaves["y"]], torch.ones_like(result), allow_unused=True)
    return result, grads


def bits(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.stride(), value.detach().nan_to_num(7.0).tolist()


def named(twins: Twins) -> str:
    calls = [name.removeprefix("aten::") + str(sorted(arguments)) for name, arguments in twins.calls]
    return f"{' '.join(calls)}{twins.ranks or ''}"


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")  # of one entry, or none, the variance is NaN
@pytest.mark.parametrize("twins", TWINS, ids=named)
def test_twins_are_one_function(twins: Twins) -> None:
    compared = 0
    for dtype, special in itertools.product(DTYPES, (False, True)):
        for given in letters(twins, dtype, special=special):
            first, *others = (outcome(call, given) for call in twins.calls)
            for other in others:
                assert (first == "raises") == (other == "raises"), given
                if first != "raises":
                    assert bits(first[0]) == bits(other[0]), given
                    assert [*map(bits, first[1])] == [*map(bits, other[1])], given
                    compared += 1
    assert compared >= 10


def test_a_pattern_of_one_matches_the_other_and_nothing_else() -> None:
    assert matches(lambda x: torch.square(x), lambda x: x**2)
    assert matches(lambda x: x.pow(2), lambda x: x.square())
    assert not matches(lambda x: x.pow(3), lambda x: x.square())
    assert matches(lambda x, y: x < y, lambda x, y: y > x)
    assert not matches(lambda x: x < 2, lambda x, y: y > x)
    assert matches(lambda x: 1 - x, lambda x: torch.rsub(x, 1))
    assert not matches(lambda x: x - 1, lambda x: torch.rsub(x, 1))
    assert not matches(lambda x, y: x - y, lambda x, y: torch.rsub(x, y, alpha=2))


def test_twins_of_a_rank_match_where_the_rank_is_known() -> None:
    def count(pattern: Pattern, gm: fx.GraphModule) -> int:
        program = Program([("it", pattern)])
        return sum(1 for node, key in program.roots(gm.graph.nodes) for _ in program.find(node, key))

    swapped = Pattern((op("transpose", cap("x"), 0, 1),))
    named = trace(lambda x: x.T)
    for function in (lambda x: x.t(), lambda x: x.T, lambda x: x.mT, lambda x: x.permute(1, 0)):
        assert count(swapped, make_fx(function, pre_dispatch=True)(torch.rand(2, 3))) == 1
        assert count(named, make_fx(function, pre_dispatch=True)(torch.rand(2, 3))) == 1
        assert count(swapped, fx.symbolic_trace(function)) == 0
        assert count(swapped, capture(function, {"x": torch.rand(2, 3)})) == 1
    assert count(named, fx.symbolic_trace(lambda x: x.T)) == 1
    assert count(swapped, make_fx(torch.t, pre_dispatch=True)(torch.rand(3))) == 0
    assert count(swapped, make_fx(lambda x: x.mT, pre_dispatch=True)(torch.rand(2, 3, 4))) == 0


ROWS = torch.rand(3, 4)
NUMBERS = {
    "add": lambda x, n: x + n,
    "rsub": lambda x, n: n - x,
    "mul": lambda x, n: x * n,
    "div": lambda x, n: x / n,
    "floor_divide": lambda x, n: x // n,
    "remainder": lambda x, n: x % n,
    "fmod": lambda x, n: torch.fmod(x, n),
    "pow": lambda x, n: x**n,
    "pow of a number": lambda x, n: torch.pow(n, x),
    "clamp": lambda x, n: torch.clamp(x, min=n),
    "where": lambda x, n: torch.where(x.isnan(), n, x),
    "masked_fill": lambda x, n: x.masked_fill(x.isnan(), n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "new_full": lambda x, n: x.new_full((2,), n),
    "eq": lambda x, n: x == n,
    "gt": lambda x, n: x > n,
    "lerp": lambda x, n: torch.lerp(x, x + 1, n),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "hardtanh": lambda x, n: torch.nn.functional.hardtanh(x, -7, n),
    "threshold": lambda x, n: torch.nn.functional.threshold(x, n, 1),
    "index_fill": lambda x, n: x.index_fill(0, torch.tensor([0]), n),
    "scatter": lambda x, n: torch.scatter(x, 0, torch.zeros_like(x, dtype=torch.long), n),
    "pad": lambda x, n: torch.nn.functional.pad(x, (1, 1), value=n),
    "xlogy": lambda x, n: torch.xlogy(x, n),
    "norm": lambda x, n: torch.linalg.vector_norm(x, n),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_is_the_float_where_an_operand_is_of_floats(name: str) -> None:
    function = NUMBERS[name]
    for dtype, number in itertools.product((torch.float64, torch.float32, torch.bfloat16, torch.complex64), (-3, 0, 2)):
        x = values((3, 4), dtype, special=True)
        found: list[list] = [[], []]
        for of_kind, n in zip(found, (number, float(number)), strict=True):
            leaf = x.clone().requires_grad_()
            try:
                result = function(leaf, n)
                of_kind.append(bits(result))
                of_kind.extend(
                    torch.autograd.grad(result.abs().sum(), leaf, allow_unused=True) if result.requires_grad else ()
                )
            except (RuntimeError, NotImplementedError) as error:
                of_kind.append(type(error))
        assert str(found[0]) == str(found[1])


def test_numbers_are_one_only_where_the_operand_is_of_floats() -> None:
    def found(pattern, function, x: torch.Tensor) -> bool:
        program = Program([("it", trace(pattern))])
        nodes = make_fx(function)(x).graph.nodes
        return any(True for node, key in program.roots(nodes) for _ in program.find(node, key))

    assert found(lambda x: x * 2, lambda x: x * 2.0, ROWS)
    assert found(lambda x: x * 2.0, lambda x: x * 2, ROWS)
    assert not found(lambda x: x * 2, lambda x: x * 2.0, ROWS.long())
    assert not found(lambda x: x * 2.0, lambda x: x * 2, ROWS.long())
    assert not found(lambda x: x * 1, lambda x: x * True, ROWS)
    assert not found(lambda x: x * 0, lambda x: x * -0.0, ROWS)
    assert not found(lambda x: x * (2**53 + 1), lambda x: x * float(2**53), ROWS)


def test_a_pattern_with_too_many_twins_is_matched_as_it_is_written() -> None:
    def squares(x: torch.Tensor, count: int = 12) -> torch.Tensor:
        for _ in range(count):  # 2 ** count readings
            x = torch.square(x)
        return x

    def pattern(x: torch.Tensor) -> torch.Tensor:
        return squares(x)

    assert matches(pattern, pattern)
    assert not matches(pattern, lambda x: squares(squares(x, 6) ** 2, 6))


@pytest.mark.parametrize("name", sorted(DIMS_ARE_A_SET))
def test_the_order_of_dimensions_means_nothing(name: str) -> None:
    function = getattr(torch.ops.aten, name)
    x = values((2, 3, 4), torch.float64, special=True)

    def on(dims):
        leaf = x.clone().requires_grad_()
        result = function(leaf, 2, dims) if name == "linalg_vector_norm" else function(leaf, dims)
        results = result if isinstance(result, tuple) else (result,)
        grads = (
            torch.autograd.grad([r.sum() for r in results if r.requires_grad], leaf, allow_unused=True)
            if (any(r.requires_grad for r in results))
            else ()
        )
        return str([*map(bits, (*results, *grads))])

    assert on([0, 2]) == on([2, 0]) == on([-1, 0])
    if name in OF_ALL:
        assert on([]) == on(None)


def test_dimensions_are_one_in_any_order_and_from_either_end() -> None:
    assert matches(lambda x: x.sum((1, 2)), lambda x: x.sum((2, 1)))
    assert matches(lambda x: x.sum(), lambda x: x.sum(dim=[]))
    assert matches(lambda x, y: x / y, lambda x, y: torch.div(x, y, rounding_mode=None))
    assert not matches(lambda x: x.permute(0, 2, 1), lambda x: x.permute(1, 2, 0))
    gm = make_fx(lambda x: x.sum((-1, 0)))(torch.rand(2, 3, 4))
    for dims in ((0, 2), (2, 0), (0, -1), (-3, 2), (-1, -3)):
        program = Program([("it", Pattern((op("sum", cap("x"), dims),)))])
        assert [match for node, key in program.roots(gm.graph.nodes) for match in program.find(node, key)], dims
