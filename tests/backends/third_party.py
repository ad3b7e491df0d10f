"""Torch.compile backends that others wrote, as a user names them, and what ran in them.

    python third_party.py plan <backend> <file for results>            one process: a rule plan
    python third_party.py autosp <backend> <folder for results>        a rank of torchrun: AutoSP

A run of its own, because importing such a package changes torch: OpenVINO sets Dynamo's configuration.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import fx, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from autosp_rules import autosp
from fxrewrite import RuleSet, rule
from fxrewrite.backends import in_parts, inner_compiler, is_custom, under_autograd
from tests.autosp.models import batch, build

SILU = rule("act.silu", numerics="reassociates")(lambda x: x * torch.sigmoid(x))
SILU.replacement(lambda x: F.silu(x))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(torch.sigmoid(y) * y)


def openvino(training: bool) -> Callable[..., Any]:
    """OpenVINO in float32: where the processor has bfloat16, that is what it takes by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it sets a setting of Dynamo that does nothing any more
        import openvino.torch  # noqa: F401  # pyright: ignore[reportMissingImports]
    options = {"config": {"INFERENCE_PRECISION_HINT": "f32"}}
    return under_autograd(inner_compiler("openvino", options=options))


def iree(training: bool) -> Callable[..., Any]:
    def leave(node: fx.Node) -> bool:
        unknown = ("_backward", "_scaled_dot_product")  # IREE's importer of FX graphs has neither
        return is_custom(node) or any(name in str(node.target) for name in unknown)

    return under_autograd(in_parts("iree_turbine", leave)) if training else in_parts("iree_turbine")


def tvm(training: bool) -> Callable[..., Any]:
    from tvm.relax.frontend.torch import relax_dynamo  # pyright: ignore[reportMissingImports]

    return relax_dynamo()


BACKENDS = {"openvino": openvino, "iree": iree, "tvm": tvm}


def ran_in_openvino() -> list[bool]:
    """For every part that OpenVINO got since the last call: whether it ran there, or fell silently back to torch."""
    executed = sys.modules.get("openvino.frontend.pytorch.torchdynamo.execute")
    if executed is None:
        return []
    modules = [part for gm in executed.partitioned_modules.values() for part in gm.modules()]
    executed.partitioned_modules.clear()
    return [not part.perm_fallback for part in modules if hasattr(part, "perm_fallback")]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()


def run_plan(name: str, training: bool) -> dict[str, Any]:
    """The worst relative difference to eager of the backend without the plan and with it."""
    found: dict[str, Any] = {}
    x = torch.randn(4, 8)
    for how in ("without", "with"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Gated().train(training)
        inner = BACKENDS[name](training)
        backend = RuleSet("mine", SILU).once().expect("act.silu").backend(inner) if how == "with" else inner
        with torch.set_grad_enabled(training):
            y = torch.compile(model, backend=backend, fullgraph=True)(x)
        found[how] = relative(y.detach(), model(x).detach())
        if training:
            y.square().sum().backward()
            got = [p.grad for p in model.parameters()]
            model.zero_grad()
            model(x).square().sum().backward()
            pairs = zip(got, model.parameters(), strict=True)
            found[how] = max(found[how], *(relative(grad, p.grad) for grad, p in pairs))
        found["ran"] = ran_in_openvino()  # kept for the run with the plan, which is the second
    return found


def run_autosp(name: str, training: bool) -> dict[str, Any]:
    """Relative differences to eager on one device of loss, this rank's logits and averaged gradients."""
    torch._dynamo.reset()
    inputs = batch("llama_gqa", "uneven_labels")
    one, model = (build("llama_gqa", layers=1).float().train(training) for _ in range(2))
    expected = one(**inputs)
    step = torch.compile(model, backend=autosp(BACKENDS[name](training), strict=True), fullgraph=True)
    with torch.set_grad_enabled(training):
        out = step(**inputs)
    logits = expected.logits.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    found: dict[str, Any] = {"loss": relative(out.loss, expected.loss), "logits": relative(out.logits, logits)}
    if training:
        expected.loss.backward()
        out.loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        pairs = zip(model.parameters(), one.parameters(), strict=True)
        found["grad"] = max(relative(p.grad / dist.get_world_size(), q.grad) for p, q in pairs)
    return {**found, "ran": ran_in_openvino()}


def main() -> None:
    what, name, target = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.set_num_threads(1)
    if what == "autosp":
        dist.init_process_group("gloo")
        target = target / f"rank{dist.get_rank()}.json"
    results: dict[str, Any] = {}
    for training in (False, True):
        key = "training" if training else "inference"
        try:
            results[key] = (run_plan if what == "plan" else run_autosp)(name, training)
        except Exception as error:  # noqa: BLE001  # the test reads it from the file
            results[key] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            break  # ranks are not at the same place any more
    target.write_text(json.dumps(results))
    if what == "autosp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
