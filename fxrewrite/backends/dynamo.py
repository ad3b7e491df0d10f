"""Dynamo: a backend that rewrites its graphs, and information that Dynamo has, such as why a graph ended."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from torch import fx
from torch._dynamo import lookup_backend
from torch._dynamo.exc import InvalidBackend, TorchRuntimeError, Unsupported
from torch._dynamo.source import EphemeralSource
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fxrewrite.backends.outputs import Apply, rewrite
from fxrewrite.capture.normalize import normalize
from fxrewrite.errors import FxRewriteError, RefusedError, did_you_mean, first_line
from fxrewrite.graph.copy import copy_module
from fxrewrite.graph.garbage import few_collections
from fxrewrite.graph.other_sizes import check_sizes

R = TypeVar("R")
Graph = Literal["torch", "aten"]
_PACKAGES = {"iree_boo": "iree-turbine", "iree_turbine": "iree-turbine", "openvino": "openvino"}
"""Backends of docs/backends.md that torch finds by name once a package is installed -> its name on PyPI."""


def find_backend(inner: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns the compiler function of a torch.compile backend name, or the callable itself.

    Raises FxRewriteError with the names that exist, or with the package that provides the backend.
    """
    if callable(inner):
        return inner
    try:
        return lookup_backend(inner)
    except InvalidBackend as error:
        names = torch._dynamo.list_backends(exclude_tags=())
        brings = f"; pip install {_PACKAGES[inner]}, which brings it" if inner in _PACKAGES else ""
        near = "" if brings else did_you_mean(inner, names)
        raise FxRewriteError(
            f"inner backend {inner!r} does not exist{near}; torch knows {', '.join(names)}{brings}"
        ) from error


def backend_name(inner: str | Callable[..., Any]) -> str:
    """The name of an inner backend, for people, and for ranks that compare what they compile with."""
    return inner if isinstance(inner, str) else getattr(inner, "__qualname__", "a callable")


def capture(model: Callable[..., Any], inputs: Mapping[str, Any]) -> fx.GraphModule:
    """Returns the graph that torch.compile would pass to a backend for `model(**inputs)`, without running it.

    Sizes are symbols where they are marked as dynamic, and nowhere else, whatever was compiled before.

    Raises:
        FxRewriteError: the model raises on these inputs, or does not compile to one graph; has Dynamo's reason.
    """
    return capture_with_inputs(model, inputs)[0]


def capture_with_inputs(model: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[fx.GraphModule, list[Any]]:
    """As `capture`, and what the graph's inputs are in this call: parameters of the model and its arguments."""
    if not callable(model):  # pyright: ignore[reportUnnecessaryComparison]
        raise FxRewriteError(f"the model is a {type(model).__name__}; pass a module or a function")
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        copied = copy_module(gm)  # torch 2.15 empties the graph of a compilation that ends in an error
        _keep_marks(copied, gm)
        found.append((copied, list(example_inputs)))
        raise _Captured

    try:
        limits: dict[str, Any] = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
        with torch._dynamo.config.patch(automatic_dynamic_shapes=False, **limits):
            torch.compile(model, backend=keep, fullgraph=True)(**inputs)
    except Exception as error:
        if not found:
            _check_arguments(model, inputs, error)
            if (raised := _FROM_MODEL.search(str(error))) and isinstance(error, (TorchRuntimeError, Unsupported)):
                line = _user_line(error)
                raise FxRewriteError(f"the model raises on these inputs: {raised[1]}{line}") from error
            why = f"{first_line(error) or type(error).__name__}{_broken_by(error)}"
            hint = graph_break_hint(f"{why}\n{error}")
            raise FxRewriteError(f"the model does not compile to one graph: {why}; {hint}") from error
    if not found:
        raise FxRewriteError("the model calls no operator on tensors, so that there is no graph")
    return found[0]


def _check_arguments(model: Callable[..., Any], inputs: Mapping[str, Any], error: Exception) -> None:
    """Raise FxRewriteError, because of `error`, if the model has other arguments."""
    called = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        inspect.signature(called).bind(**inputs)
    except TypeError as mismatch:
        takes = f"{getattr(called, '__qualname__', 'the model')}{inspect.signature(called)}"
        raise FxRewriteError(f"the inputs are not those of {takes}: {mismatch}") from error
    except ValueError:  # it has no signature
        return


_NO_LIMIT = sys.maxsize
"""Of how often Dynamo compiles one function: it may have done so for others, and keeps nothing of a capture."""
_FROM_MODEL = re.compile(r"\b(?:got|context: raised exception) (\w+\(.*\))$", re.MULTILINE)
"""What an operator raised on fake tensors, or the model itself and nothing catches, in Dynamo's message."""


def _user_line(error: TorchRuntimeError | Unsupported) -> str:
    own = [frame for frame in error.real_stack or () if not frame.filename.startswith(_WRAPPERS[0])]
    return f" at {own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno}" if own else ""


def _broken_by(error: Exception) -> str:
    """What breaks the graph, if Dynamo's message has a name for it, and the user's line."""
    if not isinstance(error, Unsupported):
        return ""
    named = _BROKEN_BY.search(str(error))
    return f"{f' {named[1]}' if named else ''}{_user_line(error)}"


_BROKEN_BY = re.compile(r"Developer debug context: ([\w.:]+)$", re.MULTILINE)


class _Captured(Exception):  # noqa: N818  # not an error: the way in which a backend can end a compilation
    """Ends a compilation whose graph was captured."""


def graph_break_reason(gm: fx.GraphModule) -> str:
    """Returns why Dynamo ended this graph before the function did, with the user's line; empty for a whole graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    text = str(reason.reason).strip().splitlines()[0]
    frames = [f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reason.user_stack]
    return f"{text} ({frames[-1]})" if frames else text


def untraced_callers() -> list[str]:
    """Returns functions, with lines, that run uncompiled above the function being compiled now, outermost first.

    A function that Dynamo cannot trace, as it breaks within a `with` or a loop, is no graph: those that it calls are
    compiled in its place, each as a graph of its own without a break. torch's own wrappers of modules are
    not counted, which run hooks and nothing else.
    """
    frame, found = sys._getframe(1), list[str]()
    while frame is not None and not _is_in(frame, "_dynamo/convert_frame.py"):
        frame = frame.f_back
    while frame is not None and not _is_in(frame, "_dynamo/eval_frame.py"):
        if not any(_is_in(frame, place) for place in _WRAPPERS):
            code = frame.f_code
            found.append(f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})")
        frame = frame.f_back
    return found[::-1] if frame is not None else []


def given_up() -> str:
    """Says why the calling code runs uncompiled although `torch.compile` called it, or returns ''."""
    frame = sys._getframe(1)
    while frame is not None and not _is_in(frame, "_dynamo/eval_frame.py"):
        frame = frame.f_back
    if frame is None:
        return ""
    limit = torch._dynamo.config.recompile_limit
    return (
        f"torch.compile runs it uncompiled: its code breaks the graph, or was compiled {limit} times already "
        "(torch._dynamo.config.recompile_limit; between models, call torch.compiler.reset())"
    )


def reached_recompile_limit() -> int | None:
    """Returns Dynamo's `recompile_limit` if the function being compiled now reaches it, else None.

    Dynamo then makes no other program of the function, and a call that needs one runs uncompiled.
    """
    current = CompileContext.current_compile_id()
    count = None if current is None else current.frame_compile_id  # from 0, of this function
    limit = torch._dynamo.config.recompile_limit
    return limit if count is not None and count + 1 >= limit else None


def compiled_function() -> int | None:
    """Returns a number of the function that Dynamo is compiling, the same for each of its programs; None outside."""
    current = CompileContext.current_compile_id()
    return None if current is None else current.frame_id


_WRAPPERS = (f"{Path(torch.__file__).parent}/", "/contextlib.py")


def _is_in(frame: FrameType, place: str) -> bool:
    return place in frame.f_code.co_filename


def graph_break_hint(reason: str) -> str:
    """Returns advice against a graph break with this reason from Dynamo."""
    return next((hint for words, hint in _BREAK_HINTS if words in reason.lower()), _ANY_BREAK_HINT)


_BREAK_HINTS = (
    (
        "logging.logger",
        "let Dynamo skip the logger's method, such as warning: "
        "torch._dynamo.config.ignore_logging_functions.add(logging.Logger.warning)",
    ),
    (
        ".register_hook(",
        "register_hook on a value inside of the compiled function is not supported: register it on a parameter, or on "
        "what the compiled function returns",
    ),
    (
        "output_capturing.py:",  # the place of the break: every model of transformers passes through this file
        "call the model once before it is compiled, as under torch.no_grad(): at the first call that records outputs, "
        "such as output_router_logits, transformers installs hooks under a lock, which Dynamo cannot trace",
    ),
    (
        "found no compiled frames",
        "Dynamo gave up on this function at an earlier call, and remembers it: after torch._dynamo.reset() the error "
        "says why",
    ),
    (
        "rnn, gru, or lstm",
        "let Dynamo trace recurrent modules: torch._dynamo.config.allow_rnn = True",
    ),
    ("data-dependent", "the model branches on values: choose a variant that computes both sides (torch.where)"),
)
_ANY_BREAK_HINT = "use torch.compile(..., fullgraph=True) to see the break, and remove it"


class RewritingBackend(Generic[R]):
    """A backend for `torch.compile(model, backend=...)` that runs `apply` on every graph, and compiles it with `inner`.

    Compile caches stay right: the inner backend sees, and keys, the rewritten graph. Two of them never share compiled
    code.

    Args:
        apply: rewrites a module in place, and returns what it did: `plan.apply`.
        inner: a backend's name, or its function `(gm, example_inputs, **options)`; gets `mode=` and `options=` of
            `torch.compile` if they are given.
        graph: "torch" is Dynamo's graph as it is, with the functions that the model calls; "aten" its normal form, see
            `fxrewrite.capture.normalize`. Autograd comes after both.
        context: passed to `apply`.
        on_report: called with what `apply` returned, before the inner backend starts.

    Attributes:
        reports: what `apply` returned, one per compiled graph, in order; recompilations append.

    Raises:
        FxRewriteError: no such graph, no such inner backend. What `apply` raises comes out of the first call of the
            model, as text in torch's BackendCompilerFailed.
    """

    def __init__(
        self,
        apply: Apply[R],
        inner: str | Callable[..., Any] = "inductor",
        *,
        graph: Graph = "torch",
        context: Any = None,
        on_report: Callable[[R], None] | None = None,
    ) -> None:
        if graph not in get_args(Graph):
            raise FxRewriteError(f'graph={graph!r} is not a graph that a backend rewrites; pass "torch" or "aten"')
        find_backend(inner)
        self.inner = inner
        self.graph = graph
        self.reports: list[R] = []
        self.__name__ = f"fxrewrite_{backend_name(inner)}"
        self._apply = apply
        self._context = context
        self._on_report = on_report

    def __repr__(self) -> str:
        return f"<RewritingBackend graph={self.graph!r}, inner={backend_name(self.inner)!r}>"

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Returns the compiled program; `options` are the `mode` and `options` of `torch.compile`, for `inner`.

        Raises RefusedError if a rewritten normal form for many sizes holds one of the trace as a number.
        """
        refuse_precompile()
        with few_collections():
            program = self._normalized(gm) if self.graph == "aten" else gm
            report = rewrite(self._apply, program, self._context)
            if self.graph == "aten":
                check_sizes(program)
        self.reports.append(report)
        if self._on_report is not None:
            self._on_report(report)
        return inner_compiler(self.inner, **options)(program, list(example_inputs))

    def _normalized(self, gm: fx.GraphModule) -> fx.GraphModule:
        try:
            return normalized(gm)
        except RefusedError as error:
            raise error.advised('pass graph="torch", where rules rewrite around it') from error


def inner_compiler(
    inner: str | Callable[..., Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Returns the inner backend with the mode and options of `torch.compile` bound, in the way torch itself does it.

    Raises FxRewriteError if it does not exist.
    """
    if inner == "inductor":  # its function knows neither; torch.compile turns both into patches of its configuration
        return torch._TorchCompileInductorWrapper(mode, options, None)
    given = {name: value for name, value in (("mode", mode), ("options", options)) if value}
    function = find_backend(inner)
    return functools.partial(function, **given) if given else function


@contextmanager
def refuse_dependence_on_values(inner: str | Callable[..., Any]) -> Generator[None]:
    """Inside, FxRewriteError is raised where the inner backend cannot compile an operator whose result's size, or a
    number that the program needs, depends on values: torch has no other name for it than that of the operator.
    """
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise FxRewriteError(
            f"the inner backend {backend_name(inner)} cannot compile {error.func}, whose result depends on values in "
            "its size; in place of x[mask] = y with a gradient of y, write x.masked_scatter(mask, y); or use "
            'inner="eager"'
        ) from error


def refuse_precompile() -> None:
    """Raises FxRewriteError if torch keeps compiled code under a key that does not include the backend."""
    if torch._dynamo.config.caching_precompile:
        raise FxRewriteError(
            "torch._dynamo.config.caching_precompile keeps compiled code under nothing but the function's name and "
            "line, so another process would run it under another plan; turn it off (TORCH_CACHING_PRECOMPILE=0)"
        )


def normalized(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns the normal form of a Dynamo graph, with the attributes that AOTAutograd reads of Dynamo's graphs.

    AOTAutograd reads where inputs come from, to guard inputs that alias, and to know the parameters, which CUDA graphs
    need not copy. It also hashes the module for its cache, so the module must not have a ShapeEnv, as no two are equal.
    """
    normal = normalize(gm)
    vars(normal)["shape_env"] = None
    _keep_marks(normal, gm)
    # AOTAutograd needs a source for every attribute; tracing may have added constants.
    sources = getattr(gm, "_param_name_to_source", None)
    if sources is not None:
        constants = [name for name, _ in (*normal.named_parameters(), *normal.named_buffers())]
        found = {name: EphemeralSource(name) for name in constants}  # made by tracing: each is its own source
        vars(normal)["_param_name_to_source"] = {**found, **sources}
    return normal


def _keep_marks(new: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Copies what Dynamo records besides the graph from `gm` to `new`: sources of inputs, and why the graph ended."""
    inputs = (module.graph.find_nodes(op="placeholder") for module in (new, gm))
    for placeholder, original in zip(*inputs, strict=True):
        if hasattr(original, "_dynamo_source"):
            placeholder._dynamo_source = original._dynamo_source
    for name in ("_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(gm, name):
            vars(new)[name] = getattr(gm, name)
