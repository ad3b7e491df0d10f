"""Compiles tanh(x) + 1 with tanh rewritten to a multiplication, and prints what inductor's caches did, as JSON."""

import json
import sys

import torch
from torch._dynamo.utils import counters

from fxrewrite.backends import RewritingBackend, installed
from tests.backends.plans import plan, scale


def function(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) + 1


def cached(how: str, factor: float) -> dict[str, int | float]:
    """Compile once, as `how` says, and return the result and the counters of both caches."""
    torch._dynamo.reset()
    counters.clear()
    rules = plan(scale(factor))
    x = torch.ones(2)
    if how in ("torch", "aten"):
        result = torch.compile(function, backend=RewritingBackend(rules.apply, "inductor", graph=how))(x)
    else:
        with installed(how, rules.apply, rules.digest()):
            result = torch.compile(function)(x)
    found = {**counters["inductor"], **counters["aot_autograd"]}
    return {"result": result[0].item(), **{name: found[name] for name in sorted(found) if "cache" in name}}


if __name__ == "__main__":
    results = [cached(how, float(factor)) for how in sys.argv[2:] for factor in sys.argv[1].split(",")]
    sys.stdout.write(json.dumps(results))
