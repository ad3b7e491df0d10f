"""Norms: the dimensions over which statistics are computed must be whole, or the norm runs in parts."""

from fxrewrite.spmd import Call, IndexMap, LayoutRule, Size, Terms
from rules.layouts.parts import BATCH_NORM, GROUP_NORM, INSTANCE_NORM, NORMS
from rules.layouts.terms import aten, index_map, indices, names_of


def norm(call: Call) -> IndexMap | None:
    """normalizes over the last dimensions, which must be whole; weight and bias run over them"""
    terms = indices(len(call.shape()))
    first = len(terms) - len(call.args["normalized_shape"])
    whole, given = names_of(terms[first:]), (terms, *_statistics(call, terms[:first]))
    return index_map(call, {"input": terms, "weight": terms[first:], "bias": terms[first:]}, *given, whole=whole)


def _statistics(call: Call, rows: Terms) -> list[Terms]:
    """Returns terms of the mean and deviation that some spellings return as well, with or without dimensions of 1."""
    shapes = call.result_shapes()[1:]
    return [(*rows, *((),) * (len(shape) - len(rows))) for shape in shapes]


def group_norm(call: Call) -> IndexMap | None:
    """n (g !c) !d... -> n (g c) d...: each rank computes its own groups"""
    shape, groups = call.shape(), call.args["num_groups"]
    channels = (("g", "c"),)
    terms = (("n",), *channels, *indices(len(shape) - 2))
    sizes: dict[str, Size] = {"g": groups, "c": shape[1] // groups}
    operands = {"input": terms, "weight": channels, "bias": channels}
    return index_map(call, operands, terms, whole={"c", *names_of(terms[2:])}, sizes=sizes)


def instance_norm(call: Call) -> IndexMap | None:
    """n c !d... -> n c d...; with running statistics n is whole too"""
    return _by_channel(call, first=0 if call.args["running_mean"] is not None else 2)


def batch_norm(call: Call) -> IndexMap | None:
    """!n c !d... -> n c d...; with stored statistics all are independent"""
    return _by_channel(call, first=0 if call.args["training"] else len(call.shape()))


def _by_channel(call: Call, first: int) -> IndexMap | None:
    terms = indices(len(call.shape()))
    channels = terms[1:2]
    operands = {"input": terms, **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), channels)}
    return index_map(call, operands, terms, whole=names_of(terms[first:]) - names_of(channels))


LAYOUTS = (
    LayoutRule("layout.norm", aten("layer_norm native_layer_norm rms_norm _fused_rms_norm"), norm, parts=NORMS),
    LayoutRule("layout.group_norm", aten("group_norm"), group_norm, run_args=(("num_groups", 1),), parts=GROUP_NORM),
    LayoutRule("layout.instance_norm", aten("instance_norm"), instance_norm, parts=INSTANCE_NORM),
    LayoutRule("layout.batch_norm", aten("batch_norm"), batch_norm, parts=BATCH_NORM),
)
