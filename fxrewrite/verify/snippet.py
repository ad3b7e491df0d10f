"""A counterexample as a Python program: inputs, both graphs as straight torch code, both results."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import fx

from fxrewrite import ops
from fxrewrite.verify.compare import Difference
from fxrewrite.verify.spelling import call_text, is_item, text_of
from fxrewrite.verify.tensors import InputSpec

_SEEDED_RUN = """\
def outcome(function):
    torch.manual_seed(0)
    return function(*inputs())
"""
_RAISING_RUN = """\
def outcome(function):
    try:
        return function(*inputs())
    except Exception as error:
        return error
"""
_GRADIENTS = "fxrewrite.verify:random_gradients"
"""What a program calls that shows gradients."""
_WIDTH, _WIDEST = 100, 200
"""Longest line of a program; and where the program would have more lines than `_MOST_LINES` otherwise."""
_MOST_LINES = 9
_LISTED = 4
"""Most entries that are written one by one if all are the same."""
_INFERRED = (torch.float32, torch.int64, torch.bool)
"""Dtypes that torch gives to numbers and bools where the program names none."""
_SHORT = 24
"""Longest call that is written twice, rather than named."""


def snippet(
    title: str,
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Sequence[tuple[str, InputSpec]],
    difference: Difference,
    imports: Sequence[str] = (),
    program: str = "",
    leaves: Sequence[int] = (),
) -> str:
    """Returns Python source that sets `expected` and `found` to the results or gradients, or to the error.

    With `program`, "module:name", that function runs the graphs, given one and the list of inputs.
    If the rewrite itself failed there is no `found`. If a graph calls an operator of a library, the program imports
    `imports`, the modules that may define it. `leaves` are the positions of the inputs whose gradients are shown.
    """
    graphs = {"original": before}
    if difference.kind != "invalid":  # else there is no rewritten graph to run
        graphs["rewritten"] = after
    nodes = [node for gm in graphs.values() for node in gm.graph.nodes]
    modules: dict[str, None] = {"torch": None}
    given = [str(node.target) for node in before.graph.find_nodes(op="placeholder")]
    tensors = [_tensor_text(spec.tensor()) for _, spec in inputs]

    def functions(width: int) -> list[str]:
        made = [_function(name, gm, modules, given, width) for name, gm in graphs.items()]
        return [line for text in (_inputs(tensors, width), *made) for line in text.splitlines()]

    called = [value for node in nodes for value in (node.target, *node.args, *node.kwargs.values())]
    if any(map(ops.is_of_a_library, called)):
        modules.update(dict.fromkeys(module for module in imports if module not in ("", "__main__")))
    run = ""
    if difference.kind in ("raises", "invalid"):
        run = _RAISING_RUN
    elif any(map(ops.is_random, nodes)):
        run = _SEEDED_RUN
    calls = [f"outcome({name})" if run else f"{name}(*inputs())" for name in graphs]
    if program:
        runner = program.partition(":")[2]
        modules[program] = None
        run = run.replace("function(*inputs())", f"{runner}(function, inputs())")
        calls = calls if run else [f"{runner}({name}, inputs())" for name in graphs]
    if difference.kind == "gradient":
        modules[_GRADIENTS], run = None, ""
        options = f", {program.partition(':')[2]}" if program else ""
        if any(spec.is_inexact and place not in leaves for place, (_, spec) in enumerate(inputs)):
            options += f", of={list(leaves)}"
        calls = [f"{_GRADIENTS.partition(':')[2]}({name}, inputs(){options})" for name in graphs]
    shown = ["expected", "found"][: len(calls)]
    results = zip(graphs, shown, calls, strict=True)
    prints = [f'print("{name + ":":10}", {value} := {call})' for name, value, call in results]
    made = functions(_WIDTH)
    others = [*_imports(modules).splitlines(), *run.splitlines(), *prints]
    if len(made) + len(others) > _MOST_LINES:
        made = functions(_WIDEST)
    lines = [_imports(modules), *made, *run.splitlines()]
    comment = [f"# {title}", *(f"# {line}" for line in str(difference).splitlines())]
    return "\n".join([*comment, *lines, *prints]) + "\n"


def _inputs(tensors: Sequence[str], width: int) -> str:
    """Returns a function that makes the inputs, in one line of up to `width` characters or a line for each."""
    joined = f"def inputs(): return [{', '.join(tensors)}]"
    return joined if len(joined) <= width else "def inputs(): return [\n    " + ",\n    ".join(tensors) + "]"


def _function(name: str, gm: fx.GraphModule, modules: dict[str, None], given: Sequence[str], width: int) -> str:
    """Returns the graph as a function; values that are read several times are named v0, v1 ... in order.

    `given` are its parameters, also those whose entries the module holds. A short call that is read twice is written
    twice if the function then only returns something.
    """
    header = f"def {name}({', '.join(given)}):"
    lines, returned = _body(gm, modules, given, width, repeated=_SHORT)
    if lines or len(returned) > _WIDTH:
        lines, returned = _body(gm, modules, given, width, repeated=0)
    if not lines and len(header) + len(returned) < width:
        return f"{header} {returned}"
    return "\n".join([header, *(f"    {line}" for line in (*_joined(lines), returned))])


def _body(
    gm: fx.GraphModule, modules: dict[str, None], given: Sequence[str], width: int, *, repeated: int
) -> tuple[list[tuple[str, str]], str]:
    """Returns the names and values that are assigned, and the return; calls of up to `repeated` characters, twice."""
    numbers = itertools.count()
    names: dict[fx.Node, str] = {}
    lines: list[tuple[str, str]] = []
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    unread = {node for node in calls if not node.users and ops.is_pure(node)}
    ordered = [node for node in calls if not ops.is_pure(node)]  # one that draws may be computed at any time
    is_any_order = not ordered or (len(ordered) == 1 and not ops.mutates(ordered[0]))
    returned = ""

    def assign(node: fx.Node, value: str) -> None:
        names[node] = f"v{next(numbers)}"
        lines.append((names[node], value))

    for node in gm.graph.nodes:
        if node.op == "placeholder" or (node.op == "get_attr" and node.target in given):
            names[node] = str(node.target)
        elif node in unread:
            continue
        elif node.op == "get_attr":  # what a rule computed once
            assign(node, _tensor_text(ops.held(gm, node)))
        elif node.op == "output":
            returned = f"return {text_of(node.args[0], names)}"
        else:
            written = call_text(node, names, modules)
            longest = width if any(user.op == "output" for user in node.users) else _WIDTH
            is_short = len(node.users) == 2 and len(written) <= repeated and ops.is_pure(node)
            is_read_where_written = len(node.users) == 1 or is_short or is_item(node, names)
            if is_any_order and is_read_where_written and len(written) <= longest:
                names[node] = written
            else:
                assign(node, written)
    return lines, returned


def _joined(assigned: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields assignments; those of calls of one function on parameters, one after the other, in one line."""
    for called, group in itertools.groupby(assigned, lambda line: line[1].partition("(")[0]):
        lines = list(group)
        names, values = (", ".join(texts) for texts in zip(*lines, strict=True))
        is_one = called.startswith("torch.") and not any(name in values for name, _ in lines)
        if is_one and len(names) + len(values) + 7 <= _WIDTH:
            yield f"{names} = {values}"
        else:
            yield from (f"{name} = {value}" for name, value in lines)


def _imports(modules: Iterable[str]) -> str:
    """Returns one line for all entries "module", and one for each of the modules in "module:name"."""
    names = defaultdict[str, list[str]](list)
    for module, _, name in (entry.partition(":") for entry in modules):
        names[module] += [name] if name else []
    plain = [module for module, of in sorted(names.items()) if not of]
    lines = [f"import {', '.join(plain)}"] if plain else []
    return "\n".join(lines + [f"from {m} import {', '.join(sorted(of))}" for m, of in sorted(names.items()) if of])


def _tensor_text(tensor: torch.Tensor) -> str:
    """Returns an expression that makes this tensor, including its strides."""
    if not tensor.numel():
        return f"torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
    if tensor.storage_offset():
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        memory = text_of(tensor.as_strided((count,), (1,), 0).tolist(), {})
        place = f"{list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()}"
        return f"torch.tensor({memory}, dtype={tensor.dtype}).as_strided({place})"
    base, is_expanded = tensor, False
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and step == 0:
            base, is_expanded = base.narrow(dim, 0, 1), True
    entries = text_of(base.tolist(), {})
    flat = {text_of(entry, {}) for entry in base.flatten().tolist()}
    if len(flat) == 1 and tensor.numel() > _LISTED and tensor.is_contiguous():
        return _filled_text(tensor, *flat)
    dtype = "" if tensor.dtype in _INFERRED else f", dtype={tensor.dtype}"
    text = f"torch.tensor({entries}{dtype})"
    if is_expanded:
        return f"{text}.expand({list(tensor.shape)})"
    if not tensor.is_contiguous():
        return f"torch.empty_strided({list(tensor.shape)}, {list(tensor.stride())}, dtype={tensor.dtype}).copy_({text})"
    return text


def _filled_text(tensor: torch.Tensor, entry: str) -> str:
    """Returns an expression that makes a tensor whose entries are all the same."""
    made = {"0.0": "zeros(", "1.0": "ones("}.get(entry, "full(")
    filled = f", {entry}" if made == "full(" else ""
    is_inferred = tensor.dtype in _INFERRED if filled else tensor.dtype is torch.float32
    dtype = "" if is_inferred else f", dtype={tensor.dtype}"
    return f"torch.{made}{list(tensor.shape)}{filled}{dtype})"
