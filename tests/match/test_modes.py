"""Regions of no_grad, autocast and inference_mode: a match around one is rewritten, one across a border is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxrewrite import Reason, RuleSet, rule

nested = rule("test.nested")(lambda x: torch.sin(torch.cos(x)))
nested.replacement(lambda x: torch.sin(torch.cos(x)).clone())
both = rule("test.both")(lambda x: (torch.sin(x), torch.exp(x)))
both.replacement(lambda x: (torch.sin(x).clone(), torch.exp(x).clone()))
REGIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "no_grad": (torch.no_grad, "(torch._C._set_grad_enabled) switches gradients on or off between nodes of the match"),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "an autocast region between nodes of the match"),
    "inference_mode": (torch.inference_mode, "an inference_mode region between nodes of the match"),
}


def around(region: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    y = torch.cos(x)
    with region():
        z = torch.neg(x)
    return torch.sin(y) + z


def inside(region: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    with region():
        with region():
            y = torch.cos(x)
        z = torch.sin(y)
    return z + x


def leaves(region: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    with region():
        y = torch.cos(x)
    return torch.sin(y) * x


def enters(region: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    y = torch.cos(x)
    with region():
        z = torch.sin(y)
    return z * x


def one_of_two(region: Callable[[], Any], x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    with region():
        z = torch.exp(x)
    return y + z


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("function", [around, inside, leaves, enters, one_of_two], ids=lambda f: f.__name__)
def test_a_match_is_on_one_side_of_a_mode(region: str, function: Callable[..., torch.Tensor]) -> None:
    opens, message = REGIONS[region]

    def model(x: torch.Tensor) -> torch.Tensor:
        return function(opens, x)

    backend = RuleSet("s", nested, both).backend("eager")
    torch._dynamo.reset()
    x, y = (torch.tensor([0.5, 2.0], requires_grad=region != "inference_mode") for _ in range(2))
    found, expected = torch.compile(model, backend=backend)(x), model(y)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    if region != "inference_mode":
        found.sum().backward()
        expected.sum().backward()
        assert torch.equal(x.grad, y.grad)
    # no_grad within itself is the same mode
    rewrites = int(function is around or (function is inside and region == "no_grad"))
    (report,) = backend.reports
    assert report.rewrites == rewrites
    refusals = [refusal for entry in report.rules for refusal in entry.refusals]
    assert [refusal.kind for refusal in refusals] == [Reason.EFFECT] * (1 - rewrites)
    assert all(message in str(refusal) for refusal in refusals)
