"""Products: indices that are multiplied and summed over are contracted; sharding them gives a Partial result.

An added operand (the bias of a linear, the first operand of addmm) must be added once, so with one of these, contracted
indices must be whole.
"""

from __future__ import annotations

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms, is_broadcast, is_same_size
from rules.layouts.terms import aligned, broadcast_shape, dim_of, index_map, indices

__all__ = ["LAYOUTS"]


def matmul(call: Call) -> IndexMap | None:
    """b... m k, b... k n -> b... m n, batch dimensions broadcast, vectors without m or n"""
    left, right = call.shape(0), call.shape(1)
    if not left or not right:
        return None
    of_left: Terms = (("m",), ("k",))[-len(left) :]
    of_right: Terms = (("k",), ("n",))[: len(right)]
    full = broadcast_shape(left[:-2], right[:-2])
    batch = indices(len(full), "b")
    names = list(call.args)
    operands = {
        names[0]: (*aligned(left[:-2], full, batch), *of_left),
        names[1]: (*aligned(right[:-2], full, batch), *of_right),
    }
    return index_map(call, operands, (*batch, *of_left[:-1], *of_right[1:]), summed={"k"})


def addmm(call: Call) -> IndexMap | None:
    """+m? n?, m !k, !k n -> m n"""
    return _added(call, (("m",), ("n",)), {"mat1": (("m",), ("k",)), "mat2": (("k",), ("n",))})


def addmv(call: Call) -> IndexMap | None:
    """+m?, m !k, !k -> m"""
    return _added(call, (("m",),), {"mat": (("m",), ("k",)), "vec": (("k",),)})


def addr(call: Call) -> IndexMap | None:
    """+m? n?, m, n -> m n"""
    return _added(call, (("m",), ("n",)), {"vec1": (("m",),), "vec2": (("n",),)})


def addbmm(call: Call) -> IndexMap | None:
    """+m? n?, !b m !k, !b !k n -> m n"""
    factors = {"batch1": (("b",), ("m",), ("k",)), "batch2": (("b",), ("k",), ("n",))}
    return _added(call, (("m",), ("n",)), factors)


def baddbmm(call: Call) -> IndexMap | None:
    """+b? m? n?, b m !k, b !k n -> b m n"""
    factors = {"batch1": (("b",), ("m",), ("k",)), "batch2": (("b",), ("k",), ("n",))}
    return _added(call, (("b",), ("m",), ("n",)), factors)


def _added(call: Call, result: Terms, factors: dict[str, Terms]) -> IndexMap | None:
    """Returns the map of an operator with an added operand, which broadcasts to the result and forbids partial sums."""
    return index_map(call, {"self": aligned(call.shape(), call.result_shapes()[0], result), **factors}, result)


def inner(call: Call) -> IndexMap | None:
    """a... k, b... k -> a... b..."""
    if not call.shape() or not call.shape(1):
        return None
    left, right = indices(len(call.shape()) - 1, "a"), indices(len(call.shape(1)) - 1, "b")
    return index_map(call, {"self": (*left, ("k",)), "other": (*right, ("k",))}, (*left, *right), summed={"k"})


def tensordot(call: Call) -> IndexMap | None:
    """a... k..., b... k... -> a... b...: the dimensions that both list are contracted"""
    shapes = {"self": call.shape(), "other": call.shape(1)}
    listed = {name: [dim % len(shape) for dim in call.args[f"dims_{name}"]] for name, shape in shapes.items()}
    pairs = zip(listed["self"], listed["other"], strict=True)
    if not all(is_same_size(shapes["self"][i], shapes["other"][j]) for i, j in pairs):
        return None
    operands: dict[str, Terms] = {}
    free: list[tuple[str, ...]] = []
    for name, shape in shapes.items():
        names = [f"k{listed[name].index(dim)}" if dim in listed[name] else f"{name}{dim}" for dim in range(len(shape))]
        operands[name] = tuple((index,) for index in names)
        free += [(index,) for dim, index in enumerate(names) if dim not in listed[name]]
    contracted = {f"k{place}" for place in range(len(listed["self"]))}
    return index_map(call, operands, tuple(free), summed=contracted)


def kron(call: Call) -> IndexMap | None:
    """a..., b... -> (a b)..."""
    after = call.result_shapes()[0]
    rank = len(after)
    sizes: dict[str, Size] = {}
    for name, shape in (("a", call.shape()), ("b", call.shape(1))):
        sizes |= {f"{name}{rank - len(shape) + dim}": size for dim, size in enumerate(shape)}
    of_left = indices(rank, "a")[rank - len(call.shape()) :]
    of_right = indices(rank, "b")[rank - len(call.shape(1)) :]
    result = tuple(tuple(name for name in (f"a{dim}", f"b{dim}") if name in sizes) for dim in range(rank))
    return index_map(call, {"self": of_left, "other": of_right}, result, sizes=sizes)


def distances(call: Call) -> IndexMap | None:
    """b... m !d, b... n !d -> b... m n"""
    full = broadcast_shape(call.shape()[:-2], call.shape(1)[:-2])
    batch = indices(len(full), "b")
    operands = {
        "x1": (*aligned(call.shape()[:-2], full, batch), ("m",), ("d",)),
        "x2": (*aligned(call.shape(1)[:-2], full, batch), ("n",), ("d",)),
    }
    return index_map(call, operands, (*batch, ("m",), ("n",)))


def dot_along(call: Call) -> IndexMap | None:
    """a k b, a k b -> a b along `dim`; operands broadcast"""
    full = broadcast_shape(call.shape(), call.shape(1))
    terms, at = indices(len(full)), dim_of(call, len(full))
    operands = {name: aligned(call.shape(i), full, terms) for i, name in enumerate(("x", "y"))}
    return index_map(call, operands, (*terms[:at], *terms[at + 1 :]), summed=terms[at])


def solve(call: Call) -> IndexMap | None:
    """b... !n !n, b... !n k -> b... n k: columns are independent; with left=False, rows are"""
    matrix, other = call.shape(), call.shape(1)
    if len(matrix) != len(other):
        return None
    full = broadcast_shape(matrix[:-2], other[:-2])
    batch = indices(len(full), "b")
    solved: Terms = (("n",), ("k",)) if call.args["left"] else (("k",), ("n",))
    first, second = list(call.args)[:2]
    operands = {
        first: (*aligned(matrix[:-2], full, batch), ("n",), ("i",)),
        second: (*aligned(other[:-2], full, batch), *solved),
    }
    return index_map(call, operands, (*batch, *solved), whole=("n",))


def einsum(call: Call) -> IndexMap | None:
    """as its equation says; a letter that occurs twice in one operand must be whole"""
    left, arrow, right = call.args["equation"].replace(" ", "").partition("->")
    inputs = left.split(",")
    shapes = [call.shape(i) for i in range(len(call.operands))]
    if len(inputs) != len(shapes):
        return None
    spread = max(len(shape) - len(text.replace("...", "")) for text, shape in zip(inputs, shapes, strict=True))
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = "..." * ("..." in left) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    sizes: dict[str, Size] = {}
    operands: list[list[str]] = []
    for text, shape in zip(inputs, shapes, strict=True):
        operands.append(_letters(text, len(shape) - len(text.replace("...", "")), spread))
        for name, size in zip(operands[-1], shape, strict=True):
            if name not in sizes or is_same_size(sizes[name], 1):
                sizes[name] = size
    terms = [
        tuple(() if is_broadcast(size, sizes[name]) else (name,) for name, size in zip(names, shape, strict=True))
        for names, shape in zip(operands, shapes, strict=True)
    ]
    result = _letters(right, spread, spread)
    twice = {name for names in operands for name in names if names.count(name) > 1}
    summed = set(sizes).difference(result, twice)
    return index_map(call, {"tensors": terms}, tuple((name,) for name in result), whole=twice, summed=summed)


def _letters(text: str, count: int, spread: int) -> list[str]:
    """Returns the letters of one operand; its ellipsis is the last `count` of `spread` dimensions."""
    before, dots, after = text.partition("...")
    return [*before, *(f"...{dim}" for dim in range(spread - count, spread) if dots), *after]


_LINEAR = "b... i, o i, +o? -> b... o"
_BILINEAR = "b... !i, b... !j, o !i !j, +o? -> b... o"

LAYOUTS = (
    LayoutRule("layout.linear", ("aten::linear",), _LINEAR, neutral="zeros"),
    LayoutRule("layout.bilinear", ("aten::bilinear",), _BILINEAR),
    LayoutRule(
        "layout.matmul",
        tuple(f"aten::{name}" for name in ["matmul", "mm", "bmm", "mv", "dot"]),
        matmul,
        neutral="zeros",
    ),
    LayoutRule("layout.addmm", ("aten::addmm",), addmm),
    LayoutRule("layout.addmv", ("aten::addmv",), addmv),
    LayoutRule("layout.addr", ("aten::addr",), addr),
    LayoutRule("layout.addbmm", ("aten::addbmm",), addbmm),
    LayoutRule("layout.baddbmm", ("aten::baddbmm",), baddbmm),
    LayoutRule("layout.vdot", ("aten::vdot",), "k, k -> ", neutral="zeros"),
    LayoutRule("layout.outer", ("aten::outer",), "m, n -> m n"),
    LayoutRule("layout.inner", ("aten::inner",), inner, neutral="zeros"),
    LayoutRule("layout.dot_along", ("aten::linalg_vecdot",), dot_along, neutral="zeros"),
    LayoutRule("layout.tensordot", ("aten::tensordot",), tensordot, neutral="zeros"),
    LayoutRule("layout.kron", ("aten::kron",), kron),
    LayoutRule("layout.distances", ("aten::cdist",), distances),
    LayoutRule("layout.solve", ("aten::linalg_solve_triangular", "aten::linalg_solve"), solve),
    LayoutRule("layout.einsum", ("aten::einsum",), einsum, neutral="zeros"),
)
