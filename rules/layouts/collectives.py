"""Collectives over another mesh axis; to this axis they are operators of one device.

So are the operators that change gradients over the other axis (`fxrewrite.spmd.operators.gradient_ops`): identities.
Collectives run on dimension 0, whose chunks belong to the ranks of their axis; every other dimension is independent.
Source: torch/distributed/_functional_collectives.py.
"""

from fxrewrite.spmd import Call, IndexMap, LayoutRule
from rules.layouts.terms import index_map, indices, replaced


def halo(call: Call) -> IndexMap | None:
    """a... !l -> a... m: chunks belong to the ranks of their axis"""
    terms, dim = indices(len(call.shape(0))), call.args["dim"]
    return index_map(call, {"x": terms}, replaced(terms, dim, ("m",)))


LAYOUTS = (
    LayoutRule("layout.all_reduce", ("_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"), "a... -> a..."),
    LayoutRule("layout.gradient", ("fxrewrite::scale_gradient", "fxrewrite::mean_gradient"), "a... -> a..."),
    LayoutRule("layout.pass_gradient", ("fxrewrite::pass_gradient",), "a..., a... -> a..."),
    LayoutRule("layout.all_to_all", ("_c10d_functional::all_to_all_single",), "!p a... -> !p a..."),
    LayoutRule("layout.all_gather", ("_c10d_functional::all_gather_into_tensor",), "!p a... -> !q a..."),
    LayoutRule("layout.halo", ("fxrewrite::halo", "fxrewrite::add_halo"), halo),
    LayoutRule("layout.reduce_scatter", ("_c10d_functional::reduce_scatter_tensor",), "!q a... -> !p a..."),
)
