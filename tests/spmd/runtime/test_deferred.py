"""A sharded result is a tensor of global shape: gathered when something reads it, and right under autograd."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxrewrite.errors import FxRewriteError
from fxrewrite.spmd import Axis, Cut, DeferredGather, Shard, deferred_gather

WHOLE = torch.randn(2, 15, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def one_rank() -> Any:
    """An axis of one rank: what is gathered is what the rank holds, with its padding cut off."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Axis("sp", 1, dist.group.WORLD.group_name)  # pyright: ignore[reportOptionalMemberAccess]
    dist.destroy_process_group()


def deferred(axis: Axis, value: Tensor = WHOLE, **options: Any) -> DeferredGather:
    made = deferred_gather(value, [Cut(axis, Shard(1, uneven=True), tuple(value.shape))], **options)
    assert isinstance(made, DeferredGather)
    return made


STAYS: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(),
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.bfloat16),
    "contiguous": lambda x: x.contiguous(),
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda x: x[:, -1],
    "argmax": lambda x: x.argmax(-1),
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "tolist": lambda x: torch.tensor(x.tolist(), dtype=torch.float64),
    "cat": lambda x: torch.cat([x, x]),
    "deepcopy": copy.deepcopy,
    "save and load": lambda x: _loaded(x),
    "item": lambda x: torch.tensor(x.max().item(), dtype=torch.float64),
    "share memory": lambda x: x.detach().share_memory_(),
    "another device": lambda x: x.to("meta").new_zeros(1, device="cpu"),  # whose process group may not be this one
}


def _loaded(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", STAYS)
def test_what_acts_on_each_element_stays_deferred(name: str, one_rank: Axis) -> None:
    found = STAYS[name](deferred(one_rank))
    assert isinstance(found, DeferredGather)
    assert found.shape == WHOLE.shape
    torch.testing.assert_close(found + 0, STAYS[name](WHOLE))


@pytest.mark.parametrize("name", READS)
def test_what_reads_it_gets_an_ordinary_tensor(name: str, one_rank: Axis) -> None:
    used: list[None] = []
    found = READS[name](deferred(one_rank, before=lambda axis, what: used.append(None)))
    assert type(found) is Tensor
    assert torch.equal(found, READS[name](WHOLE))
    assert len(used) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.complex64])
def test_any_dtype_is_gathered(dtype: torch.dtype, one_rank: Axis) -> None:
    """Also those that gloo does not send."""
    value = (WHOLE * 4).to(dtype)
    assert torch.equal(deferred(one_rank, value)[:, -1], value[:, -1])


def test_shape_and_dtype_are_read_without_gathering(one_rank: Axis) -> None:
    def fail(axis: Axis, what: str) -> None:
        raise AssertionError("gathered")

    x = deferred(one_rank, before=fail)
    assert (tuple(x.shape), x.dtype, x.dim(), x.numel(), len(x)) == ((2, 15, 3), torch.float64, 3, 90, 2)
    assert "gathered over sp=1 at the first use" in repr(x)


def test_gradients_reach_the_chunk(one_rank: Axis) -> None:
    chunk = WHOLE.clone().requires_grad_()
    exchanged: list[str] = []
    x = deferred(one_rank, chunk, before=lambda axis, what: exchanged.append(what))
    (x.logsumexp(-1).square().mean() + x[:, -1].sum()).backward()
    expected = WHOLE.clone().requires_grad_()
    (expected.logsumexp(-1).square().mean() + expected[:, -1].sum()).backward()
    torch.testing.assert_close(chunk.grad, expected.grad)
    assert exchanged == ["value", "gradient"], "the ranks are compared before each"


def test_a_second_derivative_is_refused(one_rank: Axis) -> None:
    chunk = WHOLE.clone().requires_grad_()
    (grad,) = torch.autograd.grad(deferred(one_rank, chunk).square().sum(), chunk, create_graph=True)
    torch.testing.assert_close(grad, 2 * WHOLE)
    message = r"gradient of an output of shape \(2, 15, 3\) that is sharded over .* is differentiated again"
    with pytest.raises(FxRewriteError, match=message):
        grad.square().sum().backward()


def test_it_can_be_written_to(one_rank: Axis) -> None:
    x = deferred(one_rank)
    x.div_(2)
    x[:, 0] = 0
    expected = WHOLE / 2
    expected[:, 0] = 0
    assert torch.equal(x + 0, expected)


ALIASED: dict[str, Callable[[Tensor], Any]] = {
    "a write to what is detached": lambda x: x.detach().zero_(),
    "a write to a part of it": lambda x: x.detach()[:, 5:].fill_(-9),
    "a write to data": lambda x: x.data.mul_(0),
}


@pytest.mark.parametrize("name", ALIASED)
def test_what_is_detached_shares_its_memory(name: str, one_rank: Axis) -> None:
    x, expected = deferred(one_rank), WHOLE.clone()
    ALIASED[name](x)
    ALIASED[name](expected)
    assert torch.equal(x + 0, expected)


def test_a_clone_has_memory_of_its_own(one_rank: Axis) -> None:
    x = deferred(one_rank)
    x.clone().zero_()
    assert torch.equal(x + 0, WHOLE)


def test_an_unused_one_takes_no_part_in_the_backward_pass(one_rank: Axis) -> None:
    chunk = WHOLE.clone().requires_grad_()
    deferred(one_rank, chunk)
    chunk.sum().backward()
    assert torch.equal(chunk.grad, torch.ones_like(WHOLE))  # pyright: ignore[reportArgumentType]


def _loop(x: Tensor) -> Tensor:
    total = x.new_zeros(())
    for _ in range(2):
        torch._dynamo.graph_break()
        total = total + x.abs().mean() + x[:, -1].sum()
    return total


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's guards
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    "function",
    [lambda x: x.logsumexp(-1).pow(2).mean() + x[:, -1].sum(), lambda x: x.mul_(2).sum() + x.exp().sum(), _loop],
    ids=["reads", "writes", "loop with a break"],
)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, :-1]], ids=["itself", "a view"])
def test_a_function_that_is_compiled_by_itself_reads_it(
    view: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor], needs_grad: bool, one_rank: Axis
) -> None:
    """Such as a loss on `out.logits[:, :-1]`; and nothing that gathers it is compiled."""
    graphs: list[str] = []

    def record(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(gm.print_readable(print_output=False))
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    torch._dynamo.reset()
    chunk, whole = WHOLE.clone().requires_grad_(needs_grad), WHOLE.clone().requires_grad_(needs_grad)
    found = torch.compile(function, backend=record)(view(deferred(one_rank, chunk * 1)))
    expected = function(view(whole * 1))
    torch.testing.assert_close(found, expected)
    assert not any("all_gather" in graph for graph in graphs)
    if needs_grad:
        found.backward()
        expected.backward()
        torch.testing.assert_close(chunk.grad, whole.grad)
