"""Products: indices that are multiplied and summed over are contracted; sharding them gives a Partial result.

An added operand (the bias of a linear, the first operand of addmm) is added by one rank where the result is a sum.
"""

from __future__ import annotations

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Terms, is_same_size, parse
from rules.layouts.terms import aligned, aten, broadcast_shape, dim_of, index_map, indices, replaced


def matmul(call: Call) -> IndexMap | None:
    """b... m k, b... k n -> b... m n, batch dimensions broadcast, vectors without m or n"""
    left, right = call.shape(), call.shape(1)
    if not left or not right:
        return None
    rows, m = ("~b... m k", "m") if len(left) > 1 else ("k", "")
    columns, n = ("~b... k n", "n") if len(right) > 1 else ("k", "")
    return parse(f"{rows}, {columns} -> b... {m} {n}").bind([left, right])


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


def along(call: Call) -> IndexMap | None:
    """a k b, a k b -> a b along `dim`; operands broadcast; only a sum of products may be summed over shards"""
    full = broadcast_shape(call.shape(), call.shape(1))
    terms = indices(len(full))
    at = dim_of(call, len(full)) if "dim" in call.args else len(full) - 1
    first, second = list(call.args)[:2]
    operands = {first: aligned(call.shape(), full, terms), second: aligned(call.shape(1), full, terms)}
    kept = ((),) if call.args.get("keepdim") else ()
    summed = terms[at] if call.key == "aten::linalg_vecdot" else ()
    return index_map(call, operands, replaced(terms, at, *kept), summed=summed)


def solve(call: Call) -> IndexMap | None:
    """b... !n !n, b... !n k -> b... n k: columns are independent; with left=False, rows are"""
    if len(call.shape()) != len(call.shape(1)):
        return None
    solved = "!n k" if call.args["left"] else "k !n"
    return parse(f"~b... !n !i, ~b... {solved} -> b... {solved}").bind([call.shape(), call.shape(1)])


def einsum(call: Call) -> IndexMap | None:
    """as its equation says; a letter that occurs twice in one operand must be whole"""
    left, arrow, right = call.args["equation"].replace(" ", "").partition("->")
    inputs, shapes = left.split(","), [call.shape(i) for i in range(len(call.operands))]
    if len(inputs) != len(shapes):
        return None
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        right = "..." * ("..." in left) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    twice = {letter for text in inputs for letter in text if letter.isalpha() and text.count(letter) > 1}

    def terms(text: str) -> str:
        before, dots, after = text.partition("...")
        words = [*before, *["~dots..."] * bool(dots), *after]
        return " ".join("!" * (word in twice) + word for word in words)

    return parse(f"{', '.join(map(terms, inputs))} -> {terms(right)}").bind(shapes)


LAYOUTS = (
    LayoutRule("layout.linear", aten("linear"), "b... i, o i, +o? -> b... o", neutral="zeros"),
    LayoutRule("layout.bilinear", aten("bilinear"), "b... !i, b... !j, o !i !j, +o? -> b... o"),
    LayoutRule("layout.matmul", aten("matmul mm bmm mv dot"), matmul, neutral="zeros"),
    LayoutRule("layout.addmm", aten("addmm"), "+m n, m k, k n -> m n", neutral="zeros"),
    LayoutRule("layout.addmv", aten("addmv"), "+m, m k, k -> m", neutral="zeros"),
    LayoutRule("layout.addr", aten("addr"), "+m n, m, n -> m n"),
    LayoutRule("layout.addbmm", aten("addbmm"), "+m n, b m k, b k n -> m n", neutral="zeros"),
    LayoutRule("layout.baddbmm", aten("baddbmm"), "+b m n, b m k, b k n -> b m n", neutral="zeros"),
    LayoutRule("layout.vdot", aten("vdot"), "k, k -> ", neutral="zeros"),
    LayoutRule("layout.outer", aten("outer"), "m, n -> m n"),
    LayoutRule("layout.inner", aten("inner"), "a... k, b... k -> a... b...", neutral="zeros"),
    LayoutRule("layout.dot_along", aten("linalg_vecdot"), along, neutral="zeros"),
    LayoutRule("layout.similarity", aten("cosine_similarity pairwise_distance"), along),
    LayoutRule("layout.tensordot", aten("tensordot"), tensordot, neutral="zeros"),
    LayoutRule("layout.distances", aten("cdist"), "~b... m !d, ~b... n !d -> b... m n"),
    LayoutRule("layout.solve", aten("linalg_solve_triangular linalg_solve"), solve),
    LayoutRule("layout.einsum", aten("einsum"), einsum, neutral="zeros"),
)
