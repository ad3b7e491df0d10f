"""Losses: a sum over tokens is a partial sum; a mean must first become a sum over a global count (`rules.losses`)."""

from fxrewrite.spmd import Call, IndexMap, LayoutRule

__all__ = ["LAYOUTS"]

_NONE, _SUM = 0, 2


def cross_entropy(call: Call) -> IndexMap | None:
    """n !c d..., n d..., c? -> partial sum (reduction none: n d...); a mean has no indices"""
    shape, target = call.shape(0), call.shape(1)
    reduction = call.args["reduction"]
    if reduction not in (_NONE, _SUM) or len(shape) < 2:
        return None
    if len(target) == len(shape):
        tokens_of_target = (("n",), ("c",), *((f"d{i}",) for i in range(len(shape) - 2)))  # class probabilities
    else:
        tokens_of_target = (("n",), *((f"d{i}",) for i in range(len(shape) - 2)))
    logits = (("n",), ("c",), *((f"d{i}",) for i in range(len(shape) - 2)))
    sizes = {"n": shape[0], "c": shape[1], **{f"d{i}": size for i, size in enumerate(shape[2:])}}
    tokens = (("n",), *((f"d{i}",) for i in range(len(shape) - 2)))
    operands = (logits, tokens_of_target, *([(("c",),)] if len(call.operands) > 2 else []))
    result = () if reduction == _SUM else tokens
    return IndexMap(operands, (result,), sizes, frozenset({"c"}))


LAYOUTS = (LayoutRule("layout.cross_entropy", ("aten::cross_entropy_loss",), cross_entropy),)
