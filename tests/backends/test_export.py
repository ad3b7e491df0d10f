"""A plan on exported programs: the signature stays right; the program runs, is saved, unflattened, decomposed."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import tree_leaves

from fxrewrite import Param
from fxrewrite.backends import apply_to_export, exported_graph
from fxrewrite.errors import FxRewriteError, RefusedError, refuse
from fxrewrite.plan import RuleSet
from fxrewrite.report import Report
from fxrewrite.rule import rule
from tests.backends.plans import SILU, ZERO, plan

X, Y = torch.linspace(-2, 2, 12).reshape(4, 3), torch.linspace(-1, 3, 12).reshape(4, 3)


@pytest.fixture(autouse=True)
def _deprecations_of_torch_in_torch() -> Iterator[None]:
    """torch.export copies tree specifications in a way that torch.utils._pytree warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
        yield


class Everything(nn.Module):
    """Parameters (one unused), buffers (two written, one not persistent), a constant, an input that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor, scale: float, *, y: torch.Tensor) -> dict[str, Any]:
        h = self.linear(x)
        h = h * torch.sigmoid(h)
        self.count.add_(1)
        self.last.copy_(h.sum(0) + 0)
        y.mul_(2)
        with torch.no_grad():
            z = y * torch.sigmoid(y)
        shifted = z + torch.tensor([1.0, 2.0, 3.0]) + self.shift
        return {"h": h + 0, "rest": (h.shape[0], 3, None, shifted * scale), "x": x + 0}


def program(dialect: str) -> ExportedProgram:
    torch.manual_seed(0)
    n = Dim("n", min=2, max=64)
    sizes = {"x": {0: n}, "scale": None, "y": {0: n}}
    exported = export(Everything(), (X, 2.0), {"y": Y.clone()}, dynamic_shapes=sizes)
    return exported if dialect == "TRAINING" else exported.run_decompositions({})


def run(exported: ExportedProgram, x: torch.Tensor = X, y: torch.Tensor = Y) -> list[Any]:
    """Outputs, the input that is written, and the buffers afterwards; the program stays as it was."""
    module, y = copy.deepcopy(exported).module(), y.clone()
    return [*tree_leaves(module(x, 2.0, y=y)), y, *module.buffers()]


@pytest.mark.parametrize("dialect", ["TRAINING", "ATEN"])
def test_the_program_computes_the_same_and_its_signature_is_right(dialect: str) -> None:
    before = program(dialect)
    text, signature = str(before), copy.deepcopy(before.graph_signature)
    reports: list[Report] = []
    after = apply_to_export(plan().apply, before, on_report=reports.append)
    assert [(entry.rule, entry.rewrites) for entry in reports[0].rules] == [("act.silu", 2), ("add.drop_zero", 3)]
    assert (str(before), before.graph_signature) == (text, signature)
    assert after.dialect == dialect
    assert after.graph_signature.input_specs == signature.input_specs
    new, old = after.graph_signature.output_specs, signature.output_specs
    assert [(spec.kind, spec.target) for spec in new] == [(spec.kind, spec.target) for spec in old]
    values = after.graph.output_node().args[0]
    assert [v.name for v in values if isinstance(v, fx.Node)] == [spec.arg.name for spec in new if spec.arg.name]
    assert "sigmoid" not in "".join(m.code for m in after.graph_module.modules() if isinstance(m, fx.GraphModule))
    after.validate()
    torch.testing.assert_close(run(after), run(before))
    torch.testing.assert_close(run(after, X[:2], Y[:2]), run(before, X[:2], Y[:2]))


@pytest.mark.parametrize("dialect", ["TRAINING", "ATEN"])
def test_the_signature_says_which_inputs_are_parameters(dialect: str) -> None:
    @rule("export.name_parameters")
    def of_parameter(x: Any, w: Param) -> Any:
        return torch.add(x, w)

    @of_parameter.replacement
    def _(x: Any, w: Any) -> Any:
        return torch.add(x, w) + 0

    assert of_parameter.explain(program(dialect).graph_module).num_matches == 0
    assert of_parameter.explain(exported_graph(program(dialect))).num_matches == {"TRAINING": 1, "ATEN": 2}[dialect]
    rules = RuleSet("export", of_parameter).once().expect("export.name_parameters")
    torch.testing.assert_close(run(rules.apply_export(program(dialect))), run(program(dialect)))


def test_the_signature_names_what_stands_there_now() -> None:
    before = program("ATEN")
    after = apply_to_export(plan().apply, before)
    kinds = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT}
    assert {spec.kind for spec in after.graph_signature.input_specs} == kinds
    was, is_now = (
        {(spec.kind, spec.target or place): spec.arg.name for place, spec in enumerate(p.graph_signature.output_specs)}
        for p in (before, after)
    )
    changed = {key: (name, is_now[key]) for key, name in was.items() if name != is_now[key]}
    assert [kind for kind, _ in changed] == [OutputKind.BUFFER_MUTATION, OutputKind.USER_OUTPUT, OutputKind.USER_OUTPUT]
    assert changed[OutputKind.BUFFER_MUTATION, "last"][1] == "sum_1"
    assert changed[OutputKind.USER_OUTPUT, 3][1].startswith("silu_default")
    assert changed[OutputKind.USER_OUTPUT, 8][1].startswith("clone_default")  # x + 0 is a new tensor


@pytest.mark.parametrize("dialect", ["TRAINING", "ATEN"])
def test_sizes_and_their_ranges_stay(dialect: str) -> None:
    before = program(dialect)
    after = apply_to_export(plan().apply, before)
    assert after.range_constraints == before.range_constraints != {}
    assert after.range_constraints is not before.range_constraints
    with pytest.raises(AssertionError, match="64"):
        run(after, torch.ones(65, 3), torch.ones(65, 3))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11 loads parameters so
@pytest.mark.parametrize("dialect", ["TRAINING", "ATEN"])
def test_it_is_saved_loaded_unflattened_and_decomposed(dialect: str) -> None:
    before = program(dialect)
    after = apply_to_export(plan().apply, before)
    file = io.BytesIO()
    torch.export.save(after, file)
    file.seek(0)
    torch.testing.assert_close(run(torch.export.load(file)), run(before))
    torch.testing.assert_close(run(after.run_decompositions()), run(before))
    flat = torch.export.unflatten(copy.deepcopy(after))
    torch.testing.assert_close(tree_leaves(flat(X, 2.0, y=Y.clone())), run(before)[:6])


def test_parameters_are_shared_and_train() -> None:
    before = program("TRAINING")
    after = apply_to_export(plan().apply, before)
    assert all(after.state_dict[name] is value for name, value in before.state_dict.items())
    module = after.module()
    module(X, 2.0, y=Y.clone())["h"].sum().backward()
    assert module.get_parameter("linear.weight").grad is not None


class TwoBuffers(nn.Module):
    """Both buffers take the value of one expression, spelled twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(3))
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.copy_(x + 0)
        self.b.copy_(x + 0)
        return x + 0


def test_two_mutations_by_one_value_stay_two_outputs() -> None:
    """The signature finds a mutation by the output's name, so that two outputs need two names."""
    before = export(TwoBuffers(), (torch.ones(3),)).run_decompositions({})
    after = apply_to_export(plan(ZERO).apply, before)
    assert len(after.graph_signature.buffers_to_mutate) == 2
    module = after.module()
    assert module(torch.full((3,), 5.0)).tolist() == [5.0] * 3
    assert [buffer.tolist() for buffer in module.buffers()] == [[5.0] * 3] * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner[0](x)
        return self.inner[1](y) * y


def test_what_a_preserved_module_call_returns_may_not_vanish() -> None:
    before = export(Outer(), (X,), preserve_module_call_signature=("inner.1",))
    text = str(before)
    with pytest.raises(FxRewriteError) as failed:
        apply_to_export(plan(SILU).apply, before)
    assert (
        "the plan breaks the call of module 'inner.1', whose signature the program preserves: %sigmoid is not"
        in str(failed.value)
    )
    assert "export it without preserve_module_call_signature; the program is as before" in str(failed.value)
    assert str(before) == text
    kept = export(Outer(), (X,), preserve_module_call_signature=("inner.0",))
    after = apply_to_export(plan(SILU).apply, kept)
    torch.testing.assert_close(after.module()(X), kept.module()(X))
    assert after.module_call_graph[0] is not kept.module_call_graph[0]


def test_another_kind_of_value_in_an_output_is_refused() -> None:
    def constant(gm: fx.GraphModule, context: object) -> None:
        gm.graph.output_node().args = ((3,),)

    def size(gm: fx.GraphModule, context: object) -> None:
        end = gm.graph.output_node()
        sizes = [n for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
        end.args = ((sizes[0],),)

    before = export(lambda_module(lambda x: x + x.shape[0]), (X,), dynamic_shapes={"x": {0: Dim("n", min=2)}})
    for apply, found in ((constant, r"3 \(a constant\)"), (size, r"sym_size_int\w* \(SymInt\)")):
        with pytest.raises(
            FxRewriteError, match=rf"its USER_OUTPUT %add is a Tensor, and {found} would take its place"
        ):
            apply_to_export(apply, before)
    before.validate()


def lambda_module(function: Any) -> nn.Module:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return Module()


def unknown(x: torch.Tensor) -> torch.Tensor:
    return x


def test_a_graph_that_torch_export_does_not_accept_is_refused_with_its_words() -> None:
    """Fails when torch moves the verifier's exception."""
    foreign = rule("act.foreign")(lambda x: x * torch.sigmoid(x))
    foreign.replacement(lambda match, x: match.call(unknown, x))
    before = program("ATEN")
    with pytest.raises(
        FxRewriteError, match=r"torch.export does not accept the rewritten graph \(ATEN\): Operator"
    ) as e:
        apply_to_export(plan(foreign).apply, before)
    assert "tests.backends.test_export.unknown" in str(e.value) or "function unknown" in str(e.value)
    assert str(e.value).endswith("the program is as before")
    before.validate()


def test_what_the_plan_raises_comes_out_and_the_program_is_as_before() -> None:
    never = rule("act.never")(lambda x: x * torch.sigmoid(x))
    never.replacement(lambda x: refuse("not today"))
    before = program("TRAINING")
    text = str(before)
    with pytest.raises(RefusedError, match=r"act\.never: not today at %mul"):
        apply_to_export(RuleSet("s", ZERO, never, atomic=True).apply, before)
    assert str(before) == text
