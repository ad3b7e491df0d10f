"""Imports point down, rule sets live on what fxrewrite exports, and private torch has few doors."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    *(
        "lazy",
        "errors",
        "sources",
        "identity",
        "torch_versions",
        "ops",
        "graph",
        "capture",
        "pattern",
        "match",
        "verify",
        "prove",
    ),
    *("backends", "report", "rule", "plan", "adapters"),
    *("rule_file", "registry", "page", "flow", "spmd", "testing", "cli", "__main__"),
)
"""What `fxrewrite` consists of, lowest first."""
SPMD_LAYERS = ("layouts", "operators", "price", "propagation", "lower", "discovery", "runtime", "parallelism")
"""The folders of `fxrewrite/spmd`, lowest first. They may import the files beside them, which import none of them."""

# Files that may touch private torch, and why. Whatever else needs such a thing asks one of these files for it.
PRIVATE_TORCH = {
    "fxrewrite/adapters/": "the expressions of inductor's matcher, in which passes for it are written",
    "fxrewrite/backends/": "outside compilers: Dynamo, inductor and export have no public hooks for passes",
    "fxrewrite/capture/autocast.py": "autocast's kernels, which know what is cast, and its switches in a graph",
    "fxrewrite/capture/decomposed.py": "a tracer's mode, which would record an operator in place of its parts",
    "fxrewrite/capture/functionalize.py": "schemas of operators, and how a graph switches autograd off",
    "fxrewrite/graph/fake_values.py": "fake tensors, to propagate new nodes only",
    "fxrewrite/capture/normalize.py": "make_fx over Dynamo's graph, and its higher-order ops",
    "fxrewrite/capture/opaque_backward.py": "a tracer's mode, which would record how autograd runs a function",
    "fxrewrite/match/once.py": "fake tensors, which have no entries to compute with",
    "fxrewrite/graph/other_sizes.py": "fake tensors, to run a program's calls at other sizes",
    "fxrewrite/graph/sizes.py": "symbolic sizes: sympy expressions to graph nodes",
    "fxrewrite/ops/": "where operators live, to give every spelling one key",
    "fxrewrite/capture/vmap.py": "functorch's switches in a graph, and its batching rules",
    "fxrewrite/spmd/parallelism/accumulate.py": "what runs when a backward pass has ended, and gradients as DTensors",
    "fxrewrite/spmd/runtime/chunked_tensor.py": "a subclass of DTensor, and whether one is traced",
    "fxrewrite/spmd/runtime/deferred.py": "a tensor subclass without memory of its own",
    "fxrewrite/spmd/group.py": "process groups by name",
    "fxrewrite/spmd/parallelism/parameters.py": "DTensors cut twice along one dimension, and whether one is traced",
    "fxrewrite/torch_versions.py": "what differs between versions of torch",
    "fxrewrite/prove/symbolic.py": "symbolic sizes and decompositions, of which proofs are made",
    "fxrewrite/verify/build.py": "fake tensors, the values of the graphs that rules are tested on",
    "fxrewrite/verify/spelling.py": "which functions and methods torch generates from the schemas of ATen",
    "fxrewrite/testing/fake_mesh.py": "the fake process group",
    "fxrewrite/testing/ranks.py": "LocalTensorMode: P ranks in one process",
    "rules/fusions/integers.py": "where torch defines the operators of quantized graphs",
    "rules/attention/flex_operator.py": "flex attention as an operator: the public one takes no bodies and no tiles",
}
# What only rule sets know; `Sequence` of collections.abc is Python's.
METHODS = re.compile(
    r"sequence(?!matcher)|token|hidden.?state|ulysses|autosp|megatron|deepspeed|ddp|DistributedDataParallel|fsdp"
    r"|zero[-_ ]?[123]|(data|tensor|sequence|context|expert|pipeline).?parallel",
    re.IGNORECASE,
)
SAYS_METHODS = {
    "fxrewrite/backends/data_parallel.py": "reads what torch's own data-parallel wrappers do to gradients",
    "fxrewrite/backends/__init__.py": "exports that file",
    "fxrewrite/ops/effects.py": "torch's `_sink_tokens`, which order effects",
    "fxrewrite/sources.py": "the names of the packages",
    "fxrewrite/ops/value.py": "Dynamo's `is_fsdp_module`",
}
PYTHONS_SEQUENCE = re.compile(r"\bSequence\b(?=[,\[]|$)")
STABLE = (
    "torch._dynamo.maybe_mark_dynamic",  # documented for users of torch.compile
    "torch._ops",  # the classes of operators, for isinstance
    "torch.fx.node._get_qualified_name",  # how FX itself prints a target
    "torch.utils._pytree",  # FX's own notion of nested arguments
    "torch.ops._",  # namespaces of operators, such as _c10d_functional
)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {
    module_name(path): path
    for package in ("fxrewrite", "rules", "autosp_rules")
    for path in (ROOT / package).rglob("*.py")
}


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that can run, so not what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from running_nodes(child)


def imported(path: Path) -> Iterator[str]:
    """Dotted names that the file imports, at its top or in a function: `from a import b` is `a.b`."""
    for node in running_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used(path: Path) -> Iterator[str]:
    """Dotted names that the file imports or reaches by attributes, as in `torch._dynamo.reset`."""
    names = set(imported(path))
    names |= {
        ast.unparse(node) for node in running_nodes(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
    }
    yield from (name for name in names if not any(longer.startswith(f"{name}.") for longer in names))


def exported(module: str) -> list[str]:
    """What the module binds without an underscore; of a package, what it imports under the same name."""
    tree = ast.parse(FILES[module].read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names if alias.asname == alias.name]
    if FILES[module].name == "__init__.py":
        assert names, f"{module} exports nothing: it has no `from module import name as name`"
        return names
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def owner(name: str) -> str:
    """The module of ours that holds a dotted name: the longest prefix that is a file."""
    while name not in FILES and "." in name:
        name = name.rpartition(".")[0]
    return name


def layer(module: str) -> int:
    package, _, rest = module.partition(".")
    if package != "fxrewrite" or not rest:
        return len(LAYERS) + ["fxrewrite", "rules", "autosp_rules"].index(package)
    return LAYERS.index(rest.partition(".")[0])


def spmd_layer(module: str) -> int:
    """0 for the files of `fxrewrite/spmd` itself, then its folders in order; what it exports is above all."""
    _, _, rest = module.partition("fxrewrite.spmd.")
    folder, _, inside = rest.partition(".")
    if not rest:
        return len(SPMD_LAYERS) + 1
    return SPMD_LAYERS.index(folder) + 1 if inside or folder in SPMD_LAYERS else 0


def import_graph() -> nx.DiGraph:
    edges = [(module, owner(name)) for module, path in FILES.items() for name in imported(path)]
    return nx.DiGraph([(module, used) for module, used in edges if used in FILES and used != module])


def test_every_module_has_a_layer() -> None:
    homeless = {module.split(".")[1] for module in FILES if module.startswith("fxrewrite.")} - set(LAYERS)
    assert not homeless, f"say in LAYERS where they stand: {sorted(homeless)}"


def test_no_import_cycle() -> None:
    cycles = [sorted(cycle) for cycle in nx.strongly_connected_components(import_graph()) if len(cycle) > 1]
    assert not cycles, cycles


def test_imports_point_down() -> None:
    edges = import_graph().edges
    wrong = [f"{a} imports {b}" for a, b in edges if layer(b) > layer(a)]
    assert not wrong, "\n".join(wrong)
    inside = [edge for edge in edges if all(module.startswith("fxrewrite.spmd") for module in edge)]
    wrong = [f"{a} imports {b}" for a, b in inside if spmd_layer(b) > spmd_layer(a)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["rules", "autosp_rules"])
def test_rule_sets_use_only_what_fxrewrite_exports(package: str) -> None:
    wrong: list[str] = []
    for module, path in FILES.items():
        for name in imported(path) if module.split(".")[0] == package else ():
            home, _, used_name = name.rpartition(".")
            if name.split(".")[0] == "fxrewrite" and (home.count(".") > 1 or used_name not in exported(home or name)):
                wrong.append(f"{module}: {name}")
    assert not wrong, "\n".join(wrong)


def test_private_torch_is_used_only_behind_its_doors() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES.values()
        for name in used(path)
        if name.startswith("torch.") and not name.startswith(STABLE)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        if not str(path.relative_to(ROOT)).startswith(tuple(PRIVATE_TORCH))
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_door_to_private_torch_is_needed() -> None:
    paths = [str(path.relative_to(ROOT)) for path in FILES.values()]
    unused = [door for door in PRIVATE_TORCH if not any(path.startswith(door) for path in paths)]
    assert not unused, unused


def test_one_file_asks_which_torch_this_is() -> None:
    asking = {
        str(path.relative_to(ROOT))
        for path in FILES.values()
        for name in used(path)
        if name.startswith(("torch.__version__", "torch.version", "torch.torch_version"))
    }
    assert asking == {"fxrewrite/torch_versions.py"}


def methods_said(path: Path) -> Iterator[str]:
    """Lines of a file whose names, strings, docstrings or comments speak of a parallelism or of what it shards."""
    with path.open() as lines:
        for part in tokenize.generate_tokens(lines.readline):
            text = PYTHONS_SEQUENCE.sub("", part.string)
            yield from (
                f"{path.relative_to(ROOT)}:{part.start[0] + offset}: {line.strip()}"
                for offset, line in enumerate(text.splitlines())
                if METHODS.search(line)
            )


def test_the_toolkit_knows_no_parallelism() -> None:
    toolkit = [path for module, path in FILES.items() if module.startswith("fxrewrite")]
    said = {str(path.relative_to(ROOT)): list(methods_said(path)) for path in toolkit}
    wrong = [line for path, lines in said.items() if path not in SAYS_METHODS for line in lines]
    assert not wrong, "\n".join(wrong)
    assert not [path for path in SAYS_METHODS if not said.get(path)], "a file that no longer needs its exception"
