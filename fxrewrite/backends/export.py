"""torch.export: applies a plan to an exported program, and keeps its signature right."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import (
    ArgumentSpec,
    ExportGraphSignature,
    InputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.utils._pytree import tree_leaves

from fxrewrite import ops
from fxrewrite.backends.outputs import Apply, rewrite
from fxrewrite.errors import FxRewriteError
from fxrewrite.graph.copy import copy_module

R = TypeVar("R")
_HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_KINDS = (
    (TensorArgument, torch.Tensor),
    (SymIntArgument, torch.SymInt),
    (SymFloatArgument, torch.SymFloat),
    (SymBoolArgument, torch.SymBool),
)


def exported_graph(program: ExportedProgram) -> fx.GraphModule:
    """Returns a copy of the program's graph in which `is_parameter` knows parameters, buffers and constants."""
    gm = copy_module(program.graph_module)
    for node, spec in zip(gm.graph.find_nodes(op="placeholder"), program.graph_signature.input_specs, strict=True):
        node.meta["is_parameter"] = spec.kind in _HELD
    return gm


def apply_to_export(
    apply: Apply[R], program: ExportedProgram, *, context: Any = None, on_report: Callable[[R], None] | None = None
) -> ExportedProgram:
    """Returns a program with the rewritten graph, checked by torch.export's verifier; `program` is not changed.

    Inputs keep their names and order, even if nothing reads them any more. Outputs keep their positions; the signature
    names their new values. Parameters, buffers and constants are those of `program`.

    Args:
        apply: rewrites a module in place, and returns what it did: `plan.apply`.
        program: any dialect that torch.export makes: as exported, or decomposed.
        context: passed to `apply`.
        on_report: called with what `apply` returned.

    Raises:
        FxRewriteError: the rewritten graph would break the signature; names the output or module call. Or `program`
            is not an exported program.
    """
    if not isinstance(program, ExportedProgram):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FxRewriteError(
            f"apply_export takes an ExportedProgram, as torch.export.export gives it, not {type(program).__name__}; "
            "for an fx.GraphModule there are plan.apply(gm) and plan.applied(gm)"
        )
    gm = exported_graph(program)
    report = rewrite(apply, gm, context)
    signature = _signature(program.graph_signature, gm)
    _check_module_calls(program, gm)
    try:
        result = ExportedProgram(
            root=gm,
            graph=gm.graph,
            graph_signature=signature,
            state_dict=program.state_dict,
            range_constraints=dict(program.range_constraints),
            module_call_graph=[_copy_entry(entry) for entry in program.module_call_graph],
            example_inputs=program.example_inputs,
            constants=program.constants,
            verifiers=program.verifiers,
        )
    except SpecViolationError as error:
        raise FxRewriteError(
            f"torch.export does not accept the rewritten graph ({program.dialect}): {error}; the program is as before"
        ) from error
    if on_report is not None:
        on_report(report)
    return result


def _copy_entry(entry: ModuleCallEntry) -> ModuleCallEntry:
    """Returns the entry with its own copy of the names, which the program changes in place; tree specs are shared."""
    signature = entry.signature
    if signature is not None:
        inputs, outputs = ([copy.copy(arg) for arg in args] for args in (signature.inputs, signature.outputs))
        signature = dataclasses.replace(signature, inputs=inputs, outputs=outputs)
    return dataclasses.replace(entry, signature=signature)


def _signature(old: ExportGraphSignature, gm: fx.GraphModule) -> ExportGraphSignature:
    outputs = tree_leaves(gm.graph.output_node().args)
    specs = [_output_spec(spec, output) for spec, output in zip(old.output_specs, outputs, strict=True)]
    return ExportGraphSignature(input_specs=list(old.input_specs), output_specs=specs)


def _output_spec(old: OutputSpec, output: Any) -> OutputSpec:
    """Returns the output's specification with the name of its new value.

    Raises:
        FxRewriteError: the new value is of another kind.
    """
    if not isinstance(old.arg, tuple(kind for kind, _ in _KINDS)):
        return old  # constants, custom objects and what orders effects: no rule makes or moves them
    found: ArgumentSpec | None = None
    if isinstance(output, fx.Node):
        found = next((kind(output.name) for kind, of in _KINDS if isinstance(ops.value(output), of)), None)
    if type(found) is not type(old.arg):
        what = "a constant" if found is None else type(found).__name__.removesuffix("Argument")
        raise FxRewriteError(
            f"the plan breaks the program's signature: its {old.kind.name} %{old.arg.name} is a "
            f"{type(old.arg).__name__.removesuffix('Argument')}, and {output} ({what}) would take its place; "
            "the program is as before"
        )
    return dataclasses.replace(old, arg=found)


def _check_module_calls(program: ExportedProgram, gm: fx.GraphModule) -> None:
    """Refuses to remove an input or result of a module call whose signature the user asked to preserve.

    Raises:
        FxRewriteError: a value that such a signature names is no longer in the graph.
    """
    names = {node.name for node in gm.graph.nodes}
    for entry in program.module_call_graph:
        if entry.signature is None:
            continue
        for arg in (*entry.signature.inputs, *entry.signature.outputs):
            if arg.name and arg.name not in names:
                raise FxRewriteError(
                    f"the plan breaks the call of module {entry.fqn!r}, whose signature the program preserves: "
                    f"%{arg.name} is not in the graph any more; export it without preserve_module_call_signature; "
                    "the program is as before"
                )
