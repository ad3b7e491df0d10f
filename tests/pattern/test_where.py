"""Every constraint accepts, says what it found when it does not, and parses back from its text; none adds a guard."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxrewrite import RuleDefinitionError, normalize, ops
from fxrewrite.backends.dynamo import capture
from fxrewrite.identity import identity
from fxrewrite.pattern import where


@pytest.fixture
def captures() -> dict:
    def f(q, k, h):
        return q + k.sum() + h.sum() + q.new_zeros(q.shape[0] * 4).sum(), h.transpose(0, 1), q.t()

    gm = make_fx(f, tracing_mode="symbolic")(torch.rand(2, 6), torch.rand(2, 6), torch.rand(2, 3, 4).half())
    q, k, h = gm.graph.find_nodes(op="placeholder")
    (new,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.new_zeros.default)
    (turned,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.transpose.int)
    (size,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    weight = fx.Graph().get_attr("weight")
    fixed = fx.Graph().placeholder("fixed")
    fixed.meta["val"] = torch.empty(2, 6, device="meta")
    python = {"n": 3, "p": 0.1, "mode": "tanh", "flag": True, "d": torch.half, "inf": float("-inf"), "many": [1, 2]}
    nodes = {"q": q, "k": k, "h": h, "new": new, "turned": turned, "s": size, "w": weight, "fixed": fixed}
    return {**nodes, **python, "gm": gm}


HALVES = where.predicate("n", text="is_odd")(lambda n: f"{n} is odd")


@pytest.mark.parametrize(
    ("constraint", "text", "why_not"),
    [
        (where.rank("q", 2), "rank(q) == 2", ""),
        (where.rank("q", 4), "rank(q) == 4", "q has rank 2"),
        (where.rank("n", 4), "rank(n) == 4", "n is 3, not a value of the graph"),
        (where.rank("w", 4), "rank(w) == 4", "%weight has no value in its metadata"),
        (where.rank("s", 4), "rank(s) == 4", "is not a tensor"),
        (where.dtype("h", torch.half), "dtype(h) in {float16}", ""),
        (where.dtype("q", torch.half), "dtype(q) in {float16}", "q has dtype float32"),
        (where.same_dtype("q", "k"), "same_dtype(q, k)", ""),
        (where.same_dtype("q", "h"), "same_dtype(q, h)", "dtypes are float32, float16"),
        (where.device("q", "cpu"), "device(q) == cpu", ""),
        (where.device("fixed", "cpu", "cuda:0"), 'device(fixed) in {cpu, "cuda:0"}', "fixed is on meta"),
        (where.same_device("q", "k", "h"), "same_device(q, k, h)", ""),
        (where.same_device("q", "fixed"), "same_device(q, fixed)", "devices are cpu, meta"),
        (where.shape_eq("q", "q"), "shape(q) == shape(q)", ""),
        (where.shape_eq("q", "h"), "shape(q) == shape(h)", "shapes are"),
        (where.contiguous("q"), "contiguous(q)", ""),
        (where.contiguous("h"), "contiguous(h)", ""),
        (where.contiguous("turned"), "contiguous(turned)", "and strides ("),
        (where.divisible("q", 0, 1), "size(q, 0) % 1 == 0", ""),
        (where.divisible("q", 0, 2), "size(q, 0) % 2 == 0", ": not known for every length that the graph admits"),
        (where.divisible("q", 5, 2), "size(q, 5) % 2 == 0", "q has rank 2"),
        (where.divisible("new", 0, 4), "size(new, 0) % 4 == 0", ""),
        (where.size("new", -1, "==", "size(q, 0) * 4"), "size(new, -1) == size(q, 0) * 4", ""),
        (where.size("new", -1, ">", "size(q, 0)"), "size(new, -1) > size(q, 0)", ""),
        (where.size("q", 0, "<", 8), "size(q, 0) < 8", "not known for every length"),
        (where.size("q", 0, "!=", "size(h, 1)"), "size(q, 0) != size(h, 1)", "not known for every length"),
        (where.size("q", 0, "==", "s"), "size(q, 0) == s", ""),
        (where.size("q", 0, "==", "mode"), "size(q, 0) == mode", "mode is 'tanh'"),
        (where.size("q", 0, "==", "mode + 1"), "size(q, 0) == mode + 1", "mode is 'tanh': not a number"),
        (where.size("q", 0, "==", "q"), "size(q, 0) == q", "is not a number"),
        (where.size("fixed", 1, "==", 6), "size(fixed, 1) == 6", ""),
        (where.size("fixed", 1, "<=", "n + 1"), "size(fixed, 1) <= n + 1", "size(fixed, 1) is 6, n is 3"),
        (where.size("fixed", 1, "==", "n * 2"), "size(fixed, 1) == n * 2", ""),
        (where.parse("size(fixed, 1) // 4 == 1"), "size(fixed, 1) // 4 == 1", ""),
        (where.value("p", "==", 0.1), "p == 0.1", ""),
        (where.value("p", "<", 0), "p < 0", "p is 0.1"),
        (where.parse("p == n - 2.9"), "p == n - 2.9", "p is 0.1, n is 3, n - 2.9 is 0.10000000000000009"),
        (where.value("n", "==", 3.0), "n == 3.0", ""),
        (where.value("n", "in", (1, 2)), "n in {1, 2}", "n is 3"),
        (where.value("n", "not in", (1, 2)), "n not in {1, 2}", ""),
        (where.value("n", "not in", (3, 2)), "n not in {3, 2}", "n is 3"),
        (where.value("s", "in", (1, 2)), "s in {1, 2}", "not known for every length"),
        (where.value("mode", "in", ("none", "tanh")), "mode in {'none', 'tanh'}", ""),
        (where.value("mode", "!=", "tanh"), "mode != 'tanh'", "mode is 'tanh'"),
        (where.value("mode", ">", 2), "mode > 2", "'tanh' and 2 have no order"),
        (where.value("flag", "==", True), "flag == True", ""),
        (where.value("flag", "==", 1), "flag == 1", "flag is True"),
        (where.value("many", "!=", 1), "many != 1", ""),
        (where.value("d", "==", torch.half), "d == torch.float16", ""),
        (where.value("inf", "<=", -1e4), "inf <= -10000.0", ""),
        (where.value("inf", "==", float("-inf")), 'inf == float("-inf")', ""),
        (where.no_other_users("turned"), "no_other_users(turned)", ""),
        (where.no_other_users("q"), "no_other_users(q)", " users"),
        (where.no_other_users("n"), "no_other_users(n)", "n is 3, not a value of the graph"),
        (where.is_param("w"), "is_param(w)", ""),
        (where.is_param("q"), "is_param(q)", "is not a parameter"),
        (where.predicate("n", text="is_three")(lambda n: n == 3), "is_three(n)", ""),
        (where.predicate("n", text="is_four")(lambda n: n == 4), "is_four(n)", "it is false of n=3"),
        (HALVES, "is_odd(n)", "3 is odd"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_constraints(captures: dict, constraint: where.Constraint, text: str, why_not: str) -> None:
    assert str(constraint) == text
    found = constraint.why_not(captures)
    assert (why_not in found) if why_not else found == ""
    assert captures["q"].meta["val"].fake_mode.shape_env.guards == []
    if not text.startswith("is_") or text.startswith("is_param"):
        assert where.parse(text) == constraint
        assert hash(where.parse(text)) == hash(constraint)


def test_a_size_read_from_data_is_not_known() -> None:
    gm = make_fx(lambda x: torch.nonzero(x), tracing_mode="symbolic")(torch.rand(4))
    (found,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    for text in ("size(y, 0) == 4", "size(y, 0) != 4", "size(y, 0) in {4}", "size(y, 0) % 2 == 0"):
        assert where.parse(text).why_not({"y": found}).endswith(": not known, it is read from data")
    assert where.parse("size(y, 0) >= 0").why_not({"y": found}) == ""
    assert where.parse("size(y, 0) < 0").why_not({"y": found}) == "size(y, 0) is u0"  # false, not unknown
    assert where.parse("size(y, 1) == 1").why_not({"y": found}) == ""
    assert where.contiguous("y").why_not({"y": found}) == ""


def test_shapes_that_differ_and_shapes_that_are_not_known_to_be_equal(captures: dict) -> None:
    assert not where.shape_eq("q", "k").why_not(captures).endswith("equal")  # one symbol: their sizes were the same
    why_not = where.shape_eq("q", "turned").why_not({**captures, "turned": captures["k"], "q": captures["fixed"]})
    assert why_not.endswith(": not known to be equal")
    assert where.shape_eq("q", "h").why_not(captures).endswith(")")


def test_one_and_true_and_zeros_are_told_apart() -> None:
    assert where.value("n", "==", 1) != where.value("n", "==", True)
    assert where.value("n", "==", 1) != where.value("n", "==", 1.0)
    assert where.value("n", "in", (0.0,)) != where.value("n", "in", (-0.0,))
    assert identity(where.value("n", "==", 1)) != identity(where.value("n", "==", True))


names = st.sampled_from(["x", "q", "weight", "size", "dtype", "rank", "n"])
ints = st.integers(-(2**40), 2**40)
floats = st.floats(allow_nan=False)
constants = st.one_of(ints, floats, st.booleans(), st.text(max_size=5), st.sampled_from([torch.half, torch.strided]))
atoms = st.one_of(
    st.builds(where.numbers.SizeOf, names, st.integers(-5, 5)),
    st.builds(where.numbers.RankOf, names),
    st.builds(where.numbers.ValueOf, names),
)


def _arithmetic(parts: Any) -> Any:
    arithmetic, literal = where.numbers.Arithmetic, where.numbers.LiteralValue
    numbers = st.one_of(parts, st.one_of(ints, floats).map(literal))
    return st.one_of(
        st.builds(arithmetic, st.sampled_from(["+", "-", "*"]), numbers, numbers),
        st.builds(arithmetic, st.sampled_from(["//", "%"]), numbers, st.integers(1, 99).map(literal)),
    )


numbers = st.recursive(atoms, _arithmetic, max_leaves=6).filter(lambda number: any(_atoms(number)))


def _atoms(number: Any) -> tuple[Any, ...]:
    return tuple(where.numbers._atoms(number))


several = st.lists(names, min_size=2, max_size=4, unique=True)
dtypes = st.lists(st.sampled_from([torch.float32, torch.half, torch.bfloat16, torch.int64]), min_size=1, unique=True)
devices = st.lists(st.sampled_from(["cpu", "cuda", "cuda:0", "meta"]), min_size=1, unique=True)
constraints = st.one_of(
    st.builds(where.rank, names, st.integers(0, 9)),
    st.builds(where.divisible, names, st.integers(-5, 5), st.integers(1, 1024)),
    st.builds(where.numbers.Relation, numbers, st.sampled_from(list(where.numbers.RELATIONS)), numbers),
    st.builds(where.value, names, st.sampled_from(["==", "!="]), constants),
    st.builds(where.value, names, st.sampled_from(["in", "not in"]), st.lists(constants, min_size=1, max_size=4)),
    st.builds(lambda name, given: where.dtype(name, *given), names, dtypes),
    st.builds(lambda name, given: where.device(name, *given), names, devices),
    st.builds(lambda given: where.same_dtype(*given), several),
    st.builds(lambda given: where.same_device(*given), several),
    st.builds(where.shape_eq, names, names),
    *(st.builds(make, names) for make in (where.contiguous, where.is_param, where.no_other_users)),
)


@given(constraints)
def test_text_parses_back(constraint: where.Constraint) -> None:
    parsed = where.parse(str(constraint))
    assert parsed == constraint
    assert identity(parsed) == identity(constraint)
    assert parsed.names == constraint.names


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("rank(x) = 4", 9, "invalid syntax"),
        ("  rank(x) == ", 14, "invalid syntax"),
        ("x in {1, 2", 6, "'{' was never closed"),
        ("", 1, ""),
        ("rank(x) ==\0 4", 1, "null bytes"),
        ("rank(x)", 1, "there is no condition rank(); allowed are rank(x) == 4"),
        ("x", 1, "x is not a constraint; allowed are rank(x) == 4"),
        ("rank(x) == 4 and rank(y) == 4", 1, "`and`: write several constraints"),
        ("not is_param(x)", 1, "not is_param(x) is not a constraint"),
        ("1 < rank(x) < 4", 1, "write `a < b < c` as two constraints"),
        ("n is 4", 1, "`is` is not supported"),
        ("__import__('os').system('true') == 0", 1, "cannot be called here"),
        ("open('x') == 0", 1, "open('x') is not part of a constraint"),
        ("size(x, 0) == [4][0]", 15, "[4][0] is not part of a constraint"),
        ("size(x, 0) == (lambda: 4)()", 15, "cannot be called here"),
        ("size(x) == 4", 1, "size() takes a capture and a dimension, as in size(x, 1)"),
        ("size(x, 1.0) == 4", 1, "size() takes a capture and a dimension"),
        ("size(x, n) == 4", 9, "n is not part of a constraint"),
        ("size(x, 1) / 2 == 4", 1, "size(x, 1) / 2 is not part of a constraint"),
        ("4 == size(x, 1) % n", 6, "size(x, 1) % n: a size is divided by a positive integer only"),
        ("4 == size(x, 1) // 0", 6, "divided by a positive integer only"),
        ("4 == size(x, 1) + 'a'", 6, "'a' is not a number"),
        ("4 == 2 + 2", 1, "reads no capture"),
        ("x == None", 1, "a capture cannot be compared with None"),
        ("x == 2j", 6, "2j is not part of a constraint"),
        ("x < 'a'", 1, "'a' is not a number: it can only be == or !="),
        ("x == torch.nn", 6, "torch.nn is not part of a constraint"),
        ("x == -True", 6, "-True is not part of a constraint"),
        ("x in [1, 2]", 6, "`in` takes a set"),
        ("x in {y}", 7, "y is not part of a constraint"),
        ("ß in {1, y}", 10, "y is not part of a constraint"),
        ("dtype(x) in {float32, float31}", 23, "float31 is not a dtype; write float32"),
        ("dtype(x) != float32", 1, "dtype() takes == or in, not !="),
        ("dtype(x, y) == float32", 1, "dtype() takes one capture"),
        ("device(x) == gpu", 1, "'gpu' is not a device"),
        ("device(x) == 4", 14, "4 is not a device; write cpu"),
        ("shape(x) == 4", 1, "shape() takes == and another shape()"),
        ("same_dtype(x)", 1, "same_dtype(x) compares two captures or more"),
        ("same_dtype(x, y=z)", 1, "same_dtype() takes names of captures"),
        ("contiguous(x, y)", 1, "contiguous() takes one capture"),
        ("is_paramm(x)", 1, "there is no condition is_paramm()"),
    ],
)
def test_what_is_no_constraint(text: str, column: int, message: str) -> None:
    with pytest.raises(RuleDefinitionError) as raised:
        where.parse(text)
    assert str(raised.value).startswith(f"constraint {text!r}, column {column}: ")
    assert message in str(raised.value)


words = "rank( size( dtype( x ) , 1 - == in { } float32 'a\u2028b' ß \n \r \0 not lambda: torch. [ ] ( : ** ... = #"
pieces = st.sampled_from([f"{space}{word}" for word in words.split(" ") for space in ("", " ")])


@given(st.lists(pieces, max_size=12).map("".join))
def test_whatever_the_text_it_is_a_constraint_or_an_error(text: str) -> None:
    message = ""
    try:
        constraint = where.parse(text)
    except RuleDefinitionError as error:
        message = str(error)
    else:
        assert where.parse(str(constraint)) == constraint
    assert not message or message.startswith(f"constraint {text!r}, column ")


def test_constraints_that_make_no_sense_as_written() -> None:
    for make, message in (
        (lambda: where.size("x", 0, "=", 4), "'=' is not one of ==, !="),
        (lambda: where.size("x", 0, "==", "size(x"), "constraint 'size(x', column"),
        (lambda: where.value("x", "==", None), "a capture cannot be compared with None"),
        (lambda: where.value("x", "==", float("nan")), "nan is not a number"),
        (lambda: where.value("x", "in", "ab"), "x in takes a list or tuple of constants, not 'ab'"),
        (lambda: where.value("x", "in", {1, 2}), "x in takes a list or tuple of constants, not {1, 2}"),
        (lambda: where.value("x", "in", ()), "the set has nothing in it"),
        (lambda: where.dtype("x", "float32"), "dtype(x) takes dtypes such as torch.float32, not ['float32']"),
        (lambda: where.dtype("x"), "not none"),
        (lambda: where.device("x"), "takes devices such as 'cpu'"),
        (lambda: where.device("x", "gpu"), "'gpu' is not a device"),
        (lambda: where.divisible("x", 0, 0), "divided by a positive integer only"),
    ):
        with pytest.raises(RuleDefinitionError) as raised:
            make()
        assert message in str(raised.value)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("buffer", torch.ones(3))
        self.constant = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.buffer + self.constant


STATE = ("weight", "bias", "buffer", "constant")


def parameters(gm: fx.GraphModule) -> tuple[list[str], list[str]]:
    """Names of the nodes that read the module's state, and of the inputs that do not."""
    nodes = [node for node in gm.graph.nodes if node.op in ("placeholder", "get_attr")]
    state = [node.name for node in nodes if where.is_param("x").why_not({"x": node}) == ""]
    return state, [node.name for node in nodes if node.name not in state]


def test_is_param_in_the_graph_of_dynamo_and_normalized() -> None:
    gm = capture(Module(), {"x": torch.ones(2, 3)})
    for graph_module in (gm, normalize(gm)):
        state, others = parameters(graph_module)
        assert [name.rstrip("_").rpartition("_")[2] for name in state] == list(STATE)
        assert others == ["l_x_"]


def test_is_param_of_attributes() -> None:
    state, others = parameters(fx.symbolic_trace(Module()))
    assert state == ["buffer", "constant"]  # the linear is a call_module
    assert others == ["x"]
    state, others = parameters(torch.export.export(Module(), (torch.ones(2, 3),)).module())
    assert state == ["linear_weight", "linear_bias", "buffer", "constant"]
    assert others == ["x"]


def test_the_body_of_a_higher_order_operator_is_no_parameter() -> None:
    graph = fx.Graph()
    graph.get_attr("body")
    graph.get_attr("body.buffer")
    gm = fx.GraphModule({"body": Module(), "body.buffer": torch.ones(3)}, graph)
    assert [ops.is_parameter(node) for node in gm.graph.nodes] == [False, True]


def test_an_exported_program_says_outside_of_its_graph_which_inputs_are_parameters() -> None:
    program = torch.export.export(Module(), (torch.ones(2, 3),))
    assert parameters(program.graph_module)[0] == []  # when this fails, nobody needs to write the mark below
    signature = program.graph_signature
    for node in program.graph.find_nodes(op="placeholder"):
        node.meta["is_parameter"] = node.name not in signature.user_inputs
    assert parameters(program.graph_module) == (["p_linear_weight", "p_linear_bias", "b_buffer", "c_constant"], ["x"])
