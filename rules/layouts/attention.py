"""Attention: keys must be whole; heads are independent, and so are queries unless positions are compared.

    b h q d, b h? !k d, b h? !k v, mask? -> b h q v     is_causal, which counts queries from 0: q must be whole too
    kv heads are h, or 1, or with enable_gqa a divisor g of them: h = (g r)

If keys are sharded on the sequence, propagation moves the shards to the heads: an all-to-all each for q, k, v and the
result, which is DeepSpeed-Ulysses (Jacobs et al., 2023, section 3). If the heads do not divide over the axis, queries
keep their placement and k and v are gathered; with is_causal q is gathered as well.
"""

from collections.abc import Sequence

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms, divide_exactly, is_broadcast, is_same_size
from rules.attention.flops import declare_attention


def attention(call: Call) -> IndexMap | None:
    """b h q d, b h? !k d, b h? !k v, mask? -> b h q v; kv heads may be 1 or fewer (enable_gqa); causal: !q"""
    q, k, v, *masks = (call.shape(i) for i in range(len(call.operands)))
    result = call.result_shapes()[0]
    rank = len(result)
    if rank < 2 or any(len(shape) != rank for shape in (q, k, v)) or any(len(shape) > rank for shape in masks):
        return None
    sizes: dict[str, Size] = {f"b{dim}": size for dim, size in enumerate(result[:-3])}
    sizes |= {"q": q[-2], "k": k[-2], "d": q[-1], "v": v[-1]}
    heads = _heads(q, k, v, result, sizes)
    if heads is None:
        return None
    batch = [(f"b{dim}",) for dim in range(rank - 3)]

    def terms(shape: Sequence[Size], of_heads: Terms, rows: str, columns: str) -> Terms:
        names = (*batch, *of_heads, (rows,), (columns,))[rank - len(shape) :]
        full = (*result[:-2], sizes[rows], sizes[columns])[rank - len(shape) :]
        return tuple(() if is_broadcast(size, to) else name for size, to, name in zip(shape, full, names, strict=True))

    of_q, of_k, of_v = heads
    operands = [terms(q, of_q, "q", "d"), terms(k, of_k, "k", "d"), terms(v, of_v, "k", "v")]
    operands += [terms(mask, of_q, "q", "k") for mask in masks]
    whole = {"k", "d", "v", "r"} | ({"q"} if call.args.get("is_causal") else set())
    return IndexMap(tuple(operands), (terms(result, of_q, "q", "v"),), sizes, frozenset(whole))


def _heads(
    q: Sequence[Size], k: Sequence[Size], v: Sequence[Size], result: Sequence[Size], sizes: dict[str, Size]
) -> tuple[Terms, Terms, Terms] | None:
    """Returns the terms of the heads of q (and the result), k and v, with their sizes; None if they do not fit."""
    if len(result) < 3:
        return (), (), ()
    heads = result[-3]
    groups = [x[-3] for x in (k, v) if not is_same_size(x[-3], heads) and not is_same_size(x[-3], 1)]
    if not groups:
        sizes["h"] = heads
        return (("h",),), (("h",),), (("h",),)
    repeats = divide_exactly(heads, groups[0])
    if repeats is None or not all(is_same_size(size, groups[0]) for size in groups):
        return None
    sizes |= {"g": groups[0], "r": repeats}
    full: Terms = (("g", "r"),)
    of_k, of_v = (full if is_same_size(x[-3], heads) else (("g",),) for x in (k, v))
    return full, of_k, of_v


_KEY = "aten::scaled_dot_product_attention"
declare_attention(_KEY)
LAYOUTS = (LayoutRule("layout.attention", (_KEY,), attention, move_to=("h", "g")),)
