"""Inductor: a plan as one of its custom graph passes, installed for a scope and part of its cache keys.

    pre_grad          Dynamo's graph, before autograd; not functional
    joint             forward and backward in one ATen graph, before they are split; `joint_post` is after the patterns
    post_grad_pre     a forward or a backward graph, functional ATen, before inductor's own patterns
    post_grad_post    the same, after them

The pass runs when something is compiled. Code that was compiled before, or comes from a cache, is not affected: a
function that ran already must be compiled anew inside the scope. Inductor calls the pass for the subgraph of every
higher-order operator, and then for the graph around it.

Scope and threads: inductor's configuration is thread-local (in torch 2.11 process-wide), and so is what is installed.
Worker processes only compile kernels, after the passes. Compiling whole graphs in another process
(TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS) would silently drop passes after autograd, so that is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, Self, TypeVar

from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fxrewrite.backends.decompose import decompose
from fxrewrite.backends.outputs import Apply, rewrite
from fxrewrite.errors import FxRewriteError, InvariantError
from fxrewrite.identity import NoIdentityError, identity
from fxrewrite.torch_versions import PickledByUuid, passes_of_slot

_log = logging.getLogger(__name__)
R = TypeVar("R")
Slot = Literal["pre_grad", "joint", "joint_post", "post_grad_pre", "post_grad_post"]
SLOTS: Mapping[str, str] = MappingProxyType(
    {
        "pre_grad": "pre_grad_custom_pass",
        "joint": "joint_custom_pre_pass",
        "joint_post": "joint_custom_post_pass",
        "post_grad_pre": "post_grad_custom_pre_pass",
        "post_grad_post": "post_grad_custom_post_pass",
    }
)
"""Our name of a slot -> inductor's name, which is also the key in `torch.compile(options={...})`."""
OVERLAP: Mapping[str, Any] = MappingProxyType(
    {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [
            "reorder_communication_preserving_peak_memory",
            "sink_waits_iterative",
            "reorder_communication_preserving_peak_memory",
        ],
    }
)
"""Options of `torch.compile` with which collectives start early and are waited for late, without more peak memory.

Source: PyTorch, torch/_inductor/config.py, which recommends these passes in this order.
"""
RECOMPUTE_LATE: Mapping[str, Any] = MappingProxyType({"score_fusion_memory_threshold": 2**14})
"""Options of `torch.compile` with which kernels are not fused that share less than 16 KiB of what they read or write.

Otherwise inductor fuses a kernel of a layer's backward pass with one that recomputes the layer below, as soon as both
read a table of frequencies of a few numbers, and then holds both layers at once.
"""


class GraphPass(PickledByUuid, CustomGraphPass, Generic[R]):
    """A rewrite as inductor's pass in one slot.

    `torch.compile(options={SLOTS[slot]: GraphPass(slot, ...)})` binds it to one function, recompilations included.

    Attributes:
        slot: where it runs.
        reports: what `apply` returned, one per compiled graph; none for graphs from a cache.
    """

    def __init__(self, slot: Slot, apply: Apply[R], digest: str | None, context: Any = None) -> None:
        if slot not in SLOTS:
            raise FxRewriteError(f"inductor has no slot {slot!r}; it has {', '.join(SLOTS)}")
        self.slot = slot
        self.reports: list[R] = []
        self._apply = apply
        self._context = context
        self._uuid = _uuid(digest, context)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites one graph and its module in place; after autograd, also decomposes what the rewrite added.

        Raises:
            InvariantError: the graph belongs to no module, or to several.
        """
        gm = graph.owning_module
        if gm is None:
            raise InvariantError("inductor passed a graph without a module of its own, so its attributes are not known")
        before = {module: set(module.graph.nodes) for module in gm.modules() if isinstance(module, fx.GraphModule)}
        self.reports.append(rewrite(self._apply, gm, self._context))
        if self.slot != "pre_grad":
            for module, nodes in before.items():
                decompose(module, [node for node in module.graph.nodes if node not in nodes])

    def uuid(self) -> str | None:
        """Returns the key of the pass in caches; None keeps everything that it compiles out of the caches."""
        return self._uuid

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # inductor copies its configuration, but the reports must arrive in this object


@contextlib.contextmanager
def installed(slot: Slot, apply: Apply[R], digest: str | None, *, context: Any = None) -> Generator[GraphPass[R]]:
    """In the scope, inductor runs `apply` on every graph that it compiles, after passes that were installed before.

    Afterwards the slot has its old value. Scopes nest; the outer one's pass runs first.

    Args:
        slot: one of `SLOTS`.
        apply: rewrites one module in place, and returns what it did. It need not enter subgraphs of higher-order
            operators, for which inductor calls it.
        digest: a key that is equal exactly for equal rewrites, in every process: `plan.digest()`. None means that
            nothing may be cached.
        context: passed to `apply`; part of the key in the caches, and nothing is cached if it has no identity.

    Raises:
        FxRewriteError: no such slot; or graphs are compiled in another process, where the pass would not run.
    """
    ours = GraphPass(slot, apply, digest, context)
    if slot.startswith("post_grad") and _compiles_elsewhere():
        raise FxRewriteError(
            f"{slot}: inductor compiles graphs in another process and would drop the pass; "
            "unset TORCHINDUCTOR_FX_COMPILE_MODE, or use pre_grad or joint"
        )
    name = SLOTS[slot]
    earlier = getattr(config, name)
    before = tuple(earlier) if isinstance(earlier, (list, tuple)) else () if earlier is None else (earlier,)
    with config.patch({name: passes_of_slot((*before, ours)) if before else ours}):
        yield ours


def _uuid(digest: str | None, context: Any) -> str | None:
    """Returns a digest of rewrite and context together; None if either has none."""
    if not digest or context is None:
        return digest or None
    try:
        return hashlib.sha256(f"{digest}\n\n{identity(context)}".encode()).hexdigest()
    except NoIdentityError as error:
        _log.warning("what inductor compiles with this context is not cached: %s", error)
        return None


def _compiles_elsewhere() -> bool:
    from torch._inductor import compile_fx  # lazy: loads all of inductor, with torch's own deprecation warnings

    return compile_fx.fx_compile_mode is compile_fx.FxCompileMode.SUBPROCESS
