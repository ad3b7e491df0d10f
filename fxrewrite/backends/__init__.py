"""Adapters of outside compilers, one per file."""

from typing import TYPE_CHECKING

from fxrewrite.lazy import lazy_package

if TYPE_CHECKING:
    from fxrewrite.backends.data_parallel import (
        GradientReduction as GradientReduction,
        gradient_reductions as gradient_reductions,
        keep_graph_whole_under_ddp as keep_graph_whole_under_ddp,
        refused_by_wrappers as refused_by_wrappers,
    )
    from fxrewrite.backends.decompose import inductor_table as inductor_table
    from fxrewrite.backends.dynamo import (
        RewritingBackend as RewritingBackend,
        backend_name as backend_name,
        capture as capture,
        capture_with_inputs as capture_with_inputs,
        compiled_function as compiled_function,
        find_backend as find_backend,
        given_up as given_up,
        graph_break_hint as graph_break_hint,
        graph_break_reason as graph_break_reason,
        inner_compiler as inner_compiler,
        normalized as normalized,
        reached_recompile_limit as reached_recompile_limit,
        refuse_dependence_on_values as refuse_dependence_on_values,
        refuse_precompile as refuse_precompile,
        untraced_callers as untraced_callers,
    )
    from fxrewrite.backends.export import apply_to_export as apply_to_export, exported_graph as exported_graph
    from fxrewrite.backends.forms import decomposed_in as decomposed_in, forms as forms
    from fxrewrite.backends.inductor import (
        OVERLAP as OVERLAP,
        RECOMPUTE_LATE as RECOMPUTE_LATE,
        GraphPass as GraphPass,
        Slot as Slot,
        installed as installed,
    )
    from fxrewrite.backends.live_bytes import StepMemory as StepMemory
    from fxrewrite.backends.parts import in_parts as in_parts, is_custom as is_custom, under_autograd as under_autograd
    from fxrewrite.backends.regions import Regions as Regions, compile_regions as compile_regions, regional as regional
    from fxrewrite.backends.step_memory import step_memory as step_memory


lazy_package(__name__)
