"""Attention: queries and keys must be whole, heads are independent.

    b h !q d, g !k d, mask h? q k -> b h !q v        with h = g * (queries per kv head)

Sharding moves from the sequence to the heads: an all-to-all each for q, k, v and the result, which is DeepSpeed-Ulysses
(Jacobs et al., 2023, section 3). Where the heads do not divide over the axis, it refuses.
"""

from collections.abc import Sequence

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms, divide_exactly, is_broadcast, is_same_size

__all__ = ["LAYOUTS"]


def attention(call: Call) -> IndexMap | None:
    """b h !q d, b h !k d, b h !k v, mask? -> b h !q v; kv heads may be fewer (enable_gqa)"""
    q, k = call.shape(0), call.shape(1)
    result = call.result_shapes()[0]
    rank = len(q)
    if rank < 3 or len(k) != rank:
        return None
    sizes: dict[str, Size] = {f"b{dim}": size for dim, size in enumerate(result[:-3])}
    heads, kv_heads = q[-3], k[-3]
    sizes |= {"q": q[-2], "k": k[-2], "d": q[-1], "v": result[-1]}
    if is_same_size(heads, kv_heads):
        sizes["h"] = heads
        head, kv_head = ("h",), ("h",)
    else:
        repeats = divide_exactly(heads, kv_heads)
        if repeats is None:
            return None
        sizes |= {"g": kv_heads, "r": repeats}
        head, kv_head = ("g", "r"), ("g",)

    def batch(shape: Sequence[Size]) -> list[tuple[str, ...]]:
        return [() if is_broadcast(size, result[i]) else (f"b{i}",) for i, size in enumerate(shape[:-3])]

    operands: list[Terms] = [
        (*batch(q), head, ("q",), ("d",)),
        (*batch(k), kv_head, ("k",), ("d",)),
        (*batch(call.shape(2)), kv_head, ("k",), ("v",)),
    ]
    if len(call.operands) > 3:
        operands.append(_mask(call.shape(3), (*(result[:-2]), q[-2], k[-2]), head))
    whole = frozenset({"q", "k", "d", "v", "r"})
    return IndexMap(tuple(operands), ((*batch(result), head, ("q",), ("v",)),), sizes, whole)


def _mask(shape: Sequence[Size], full: Sequence[Size], head: tuple[str, ...]) -> Terms:
    """The mask's terms: it broadcasts over any of b, h, q and k."""
    names = [*((f"b{i}",) for i in range(len(full) - 3)), head, ("q",), ("k",)]
    offset = len(full) - len(shape)
    return tuple(() if is_broadcast(size, full[offset + i]) else names[offset + i] for i, size in enumerate(shape))


LAYOUTS = (
    LayoutRule(
        "layout.attention",
        ("aten::scaled_dot_product_attention",),
        attention,
        move_to=("h", "g"),
        otherwise="refuse",
    ),
)
