"""Matrix products and lookups, in index notation."""

from collections.abc import Sequence

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, is_broadcast, parse

__all__ = ["LAYOUTS"]


def matmul(call: Call) -> IndexMap | None:
    """b... m k, b... k n -> b... m n, batch dimensions broadcast, vectors without m or n"""
    left, right = call.shape(0), call.shape(1)
    result = call.result_shapes()[0]
    sizes = {"k": left[-1]}
    left_core, right_core, result_core = [("k",)], [("k",)], []
    if len(left) > 1:
        left_core.insert(0, ("m",))
        result_core.append(("m",))
        sizes["m"] = left[-2]
    if len(right) > 1:
        right_core.append(("n",))
        result_core.append(("n",))
        sizes["n"] = right[-1]
    batch = result[: len(result) - len(result_core)]
    sizes |= {f"b{dim}": size for dim, size in enumerate(batch)}

    def batch_terms(shape: Sequence[Size]) -> list[tuple[str, ...]]:
        own = shape[: max(len(shape) - 2, 0)]
        offset = len(batch) - len(own)
        return [() if is_broadcast(size, batch[offset + i]) else (f"b{offset + i}",) for i, size in enumerate(own)]

    return IndexMap(
        ((*batch_terms(left), *left_core), (*batch_terms(right), *right_core)),
        ((*((f"b{dim}",) for dim in range(len(batch))), *result_core),),
        sizes,
    )


def embedding(call: Call) -> IndexMap | None:
    """!v d, i... -> i... d; a gradient scaled by frequency counts all ids, so it has no indices"""
    if call.args.get("scale_grad_by_freq"):
        return None
    return parse("!v d, i... -> i... d").bind([call.shape(0), call.shape(1)])


LAYOUTS = (
    LayoutRule("layout.linear", ("aten::linear",), "b... i, o i, +o? -> b... o"),
    LayoutRule("layout.matmul", ("aten::matmul", "aten::mm", "aten::bmm"), matmul),
    LayoutRule("layout.addmm", ("aten::addmm",), "+n, m k, k n -> m n"),
    LayoutRule("layout.embedding", ("aten::embedding",), embedding),
)
