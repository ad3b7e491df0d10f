"""Views, permutes and repeats: operators that regroup, reorder or repeat dimensions."""

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms, divide_exactly, is_same_size, product, view_map
from rules.layouts.terms import aligned, aten, dim_of, dims_of, index_map, indices, insert, names_of, replaced


def view(call: Call) -> IndexMap | None:
    """a view keeps the common factors of both shapes: (b s) d -> b s d"""
    if len(call.operands) > 1:
        return None
    return view_map(call.shape(), call.result_shapes()[0])


def view_as(call: Call) -> IndexMap | None:
    """a view to the shape of another operand, which is sharded as the result: (b s) d, b s d -> b s d"""
    viewed = view_map(call.shape(), call.result_shapes()[0])
    return IndexMap((*viewed.operands, *viewed.results), viewed.results, viewed.sizes, viewed.whole)


def expand(call: Call) -> IndexMap | None:
    """new dimensions and those of size 1 are repeated, the others stay"""
    after = call.result_shapes()[0]
    terms = indices(len(after))
    return index_map(call, {"self": aligned(call.shape(), after, terms)}, terms, made=names_of(terms))


def filled(call: Call) -> IndexMap | None:
    """the result has the stated size; the operand is not read, and is sharded as the result in equal dimensions"""
    after = call.result_shapes()[0]
    terms = indices(len(after))
    of_self = tuple(
        terms[dim] if dim < len(after) and is_same_size(size, after[dim]) else ()
        for dim, size in enumerate(call.shape())
    )
    return index_map(call, {"self": of_self}, terms, made=names_of(terms))


def repeat(call: Call) -> IndexMap | None:
    """d... -> (r d)...: copies one after the other"""
    before, after = call.shape(), call.result_shapes()[0]
    offset = len(after) - len(before)
    result: list[tuple[str, ...]] = []
    sizes: dict[str, Size] = {}
    for dim, size in enumerate(after):
        own = before[dim - offset] if dim >= offset else 1
        times = divide_exactly(size, own)
        if times is None:
            return None
        sizes |= {f"r{dim}": times, f"d{dim}": own}
        result.append((f"r{dim}", f"d{dim}") if dim >= offset else (f"r{dim}",))
    return index_map(call, {"self": indices(len(after))[offset:]}, tuple(result), sizes=sizes)


def repeat_interleave(call: Call) -> IndexMap | None:
    """d -> (d r): each entry r times; all dimensions if none is named; several counts: `dim` is whole"""
    if "self" not in call.args:
        return None
    shape, after = call.shape(), call.result_shapes()[0]
    terms = indices(len(shape))
    given, counts = call.args["dim"], call.args["repeats"]
    at = 0 if given is None else dim_of(call, len(shape))
    if counts in call.operands:
        if given is None:
            return None
        cut = replaced(terms, at, ("cut",))
        return index_map(call, {"self": terms, "repeats": indices(len(call.shape(1)), "n")}, cut)
    times = divide_exactly(after[at], product(shape) if given is None else shape[at])
    if times is None or call.args["output_size"] is not None:  # `output_size` would have to be localized
        return None
    sizes = {"r": times, **{f"d{dim}": size for dim, size in enumerate(shape)}}
    if given is None:
        return index_map(call, {"self": terms}, ((*(index for dim in terms for index in dim), "r"),), sizes=sizes)
    return index_map(call, {"self": terms}, replaced(terms, at, (*terms[at], "r")), sizes=sizes)


def transpose(call: Call) -> IndexMap | None:
    """swaps two dimensions"""
    rank = len(call.shape())
    names = [name for name in call.args if name != "self"]
    first, second = (dim_of(call, rank, name) for name in names) if names else (rank - 2, rank - 1)
    order = list(range(rank))
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return _reordered(call, order)


def permute(call: Call) -> IndexMap | None:
    """reorders dimensions"""
    return _reordered(call, dims_of(call, len(call.shape()), "dims"))


def _reordered(call: Call, order: list[int]) -> IndexMap | None:
    terms = indices(len(order))
    return index_map(call, {"self": terms}, tuple(terms[dim] for dim in order))


def unsqueeze(call: Call) -> IndexMap | None:
    """inserts a dimension of size 1"""
    terms = indices(len(call.shape()))
    return index_map(call, {"self": terms}, insert(terms, dim_of(call, len(terms) + 1), ()))


def diagonal(call: Call) -> IndexMap | None:
    """d... !i !j -> d... k"""
    terms, result = _diagonal(call)
    return index_map(call, {"self": terms}, result)


def scatter_diagonal(call: Call) -> IndexMap | None:
    """d... !i !j, d... !k -> d... i j"""
    terms, source = _diagonal(call)
    return index_map(call, {"self": terms, "src": source}, terms, whole=names_of(terms) - names_of(source))


def _diagonal(call: Call) -> tuple[Terms, Terms]:
    """Returns the terms of the first operand, and those of its diagonal."""
    terms = indices(len(call.shape()))
    taken = {dim_of(call, len(terms), name) for name in ("dim1", "dim2")}
    return terms, (*(term for dim, term in enumerate(terms) if dim not in taken), ("diagonal",))


def diag_embed(call: Call) -> IndexMap | None:
    """d... !k -> d... i j"""
    terms = indices(len(call.shape()))
    rank = len(terms) + 1
    made = {dim_of(call, rank, name): name for name in ("dim1", "dim2")}
    others = iter(terms[:-1])
    return index_map(call, {"self": terms}, tuple((made[dim],) if dim in made else next(others) for dim in range(rank)))


def unfold(call: Call) -> IndexMap | None:
    """(n w) -> n w: adjacent windows; if windows overlap, their dimension must be whole"""
    shape, after = call.shape(), call.result_shapes()[0]
    terms = indices(len(shape))
    at, size, step = dim_of(call, len(shape), "dimension"), call.args["size"], call.args["step"]
    if not isinstance(size, int) or not isinstance(step, int) or not shape:
        return None
    if size == step and is_same_size(after[at] * size, shape[at]):
        cut: Terms = replaced(terms, at, ("n", "w"))
        sizes: dict[str, Size] = {"n": after[at], "w": size}
        result = (*replaced(terms, at, ("n",)), ("w",))
        return index_map(call, {"self": cut}, result, whole=("w",), sizes=sizes)
    return index_map(call, {"self": terms}, (*replaced(terms, at, ("windows",)), ("w",)))


LAYOUTS = (
    LayoutRule("layout.reshape", aten("reshape"), view, shape_arg="shape"),
    LayoutRule("layout.unflatten", aten("unflatten"), view, shape_arg="sizes"),
    LayoutRule("layout.flatten", aten("flatten ravel atleast_1d atleast_2d atleast_3d"), view),
    LayoutRule("layout.view_as", aten("view_as reshape_as"), view_as),
    LayoutRule("layout.expand", aten("expand broadcast_to"), expand, shape_arg="size"),
    LayoutRule("layout.filled", aten("new_zeros new_ones new_full new_empty"), filled, shape_arg="size"),
    LayoutRule("layout.repeat", aten("repeat tile"), repeat),
    LayoutRule("layout.repeat_interleave", aten("repeat_interleave"), repeat_interleave),
    LayoutRule("layout.transpose", aten("transpose swapaxes t mT mH adjoint"), transpose),
    LayoutRule("layout.permute", aten("permute"), permute),
    LayoutRule("layout.unsqueeze", aten("unsqueeze"), unsqueeze),
    LayoutRule("layout.as_complex", aten("view_as_complex"), "d... !p -> d..."),
    LayoutRule("layout.as_real", aten("view_as_real"), "d... -> d... p"),
    LayoutRule("layout.diagonal", aten("diagonal"), diagonal),
    LayoutRule("layout.scatter_diagonal", aten("diagonal_scatter"), scatter_diagonal),
    LayoutRule("layout.diag_embed", aten("diag_embed"), diag_embed),
    LayoutRule("layout.unfold", aten("unfold"), unfold),
)
