"""A setting that is none, by name or value, is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config
from pydantic import ValidationError
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autosp_rules import AutoSPConfig, AutoSPError, autosp
from fxrewrite.backends import OVERLAP, RECOMPUTE_LATE
from fxrewrite.testing import fake_mesh

NO_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"atention": "ring"}, "atention is not a setting; did you mean 'attention'?"),
    "value": (
        {"attention": "rign"},
        "attention='rign': it should be 'auto', 'ulysses', 'gather_kv', 'ring' or 'ring_ulysses'; did you mean 'ring'?",
    ),
    "either": (
        {"checkpoint": "ful"},
        "checkpoint='ful': it should be 'auto', 'none', 'attention' or 'full', or it should be a valid integer; "
        "did you mean 'full'?",
    ),
    "range": ({"loss_tile": 0}, "loss_tile=0: it should be 'auto', or it should be greater than 0"),
    "no name": ({"axis": ""}, "axis='': it should have at least 1 character"),
    "bytes": (
        {"memory": "24 gigs"},
        'memory=\'24 gigs\': it takes bytes, as an int of 1 or more or as a text with a unit: "24 GiB", "500 MB"',
    ),
    "budget": (
        {"memory": "24 GiB", "inner": "eager"},
        "memory is a budget for a program that AOTAutograd cuts into one forward and one backward graph, and "
        "inner='eager' is given; leave inner='eager' out, inner='aot_eager' compiles as fast; or set checkpoint, "
        "mlp_tile and loss_tile yourself",
    ),
    "together": (
        {"overlap": True, "inner": "aot_eager"},
        "overlap=True reorders what inductor compiles, and the inner backend is 'aot_eager'; leave overlap out, or "
        "leave inner out",
    ),
}


@pytest.mark.parametrize("name", NO_SETTINGS)
def test_what_is_no_setting_is_one_sentence(name: str) -> None:
    options, sentence = NO_SETTINGS[name]
    for made in (autosp, AutoSPConfig):
        with pytest.raises(AutoSPError) as error:
            made(**options)
        assert str(error.value) == f"autosp: {sentence}"


NO_VALUES: dict[str, tuple[Any, ...]] = {"checkpoint": (False, "10", -1, "ful"), "mlp_tile": (0, False, "10", "all")}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_VALUES.items() for value in values])
def test_a_setting_of_several_types_takes_no_value_of_another(name: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        AutoSPConfig.model_validate({name: value})


def test_mode_and_options_of_torch_compile_reach_the_inner_backend() -> None:
    given: list[dict[str, Any]] = []

    def inner(gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        given.append(options)
        return gm.forward

    with fake_mesh((2,), ("sp",)):
        for options in ({"mode": "max-autotune"}, {"options": {"max_autotune": True}}):
            torch._dynamo.reset()
            torch.compile(torch.nn.Embedding(8, 2), backend=autosp(inner), **options)(
                torch.zeros(1, 4, dtype=torch.int64)
            )
    assert given == [{"mode": "max-autotune"}, {"options": {"max_autotune": True}}]


def test_an_inner_backend_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(AutoSPError, match="inner backend 'indutcor' does not exist; did you mean inductor"):
        autosp("indutcor")


def test_a_configuration_in_the_place_of_the_inner_backend_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        AutoSPError, match=r"^autosp: inner is an AutoSPConfig.*; write AutoSPBackend\(config\), or autosp"
    ):
        autosp(AutoSPConfig())  # pyright: ignore[reportArgumentType]


def test_options_of_inductor_are_set_for_what_this_backend_compiles_and_nothing_else() -> None:
    before = torch._inductor.config.reorder_for_compute_comm_overlap
    program, recomputing = (fx.symbolic_trace(torch.nn.ReLU()) for _ in range(2))
    recomputing.graph.output_node().meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    compiler = autosp(overlap=True)._inner(program, options={"max_autotune": True})
    assert compiler.config == {**OVERLAP, "max_autotune": True}
    assert not autosp()._inner(program).config
    assert autosp()._inner(recomputing).config == RECOMPUTE_LATE
    assert autosp()._inner(recomputing, options={"score_fusion_memory_threshold": 10}).config != RECOMPUTE_LATE
    assert before is torch._inductor.config.reorder_for_compute_comm_overlap is False


def test_the_inner_backend_is_told_which_inputs_are_parameters() -> None:
    """So CUDA graphs need not copy them; fails when torch renames, by private names, what says so."""
    from torch._functorch._aot_autograd.frontend_utils import _try_get_metadata_from_dynamo

    found: list[Any] = []

    def inner(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append(_try_get_metadata_from_dynamo(gm, [], len(inputs), []))
        return gm.forward

    torch._dynamo.reset()
    with fake_mesh((2,), ("sp",)):
        torch.compile(torch.nn.Embedding(8, 2), backend=autosp(inner))(torch.zeros(1, 4, dtype=torch.int64))
    ((_, static),) = found
    assert len(static) == 1
