"""What every test starts from: one thread, one seed, nothing compiled and no process group left by another test."""

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests are small and run side by side
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # no trial of each instruction set by the C++ compiler

import pytest
import torch

gc.set_threshold(200_000, 20, 20)  # a captured graph is many objects that stay: looking for garbage took a tenth


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    yield
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        torch._C._autograd._saved_tensors_hooks_enable()
        pytest.fail("the test left torch's hooks of saved tensors disabled, so that nothing can be checkpointed")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test left a process group behind")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("all", "some", "further"),
        default="all",
        help="of tests that are marked `some(n)`, run every case, n of them, or the others (and these tests alone)",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if item.get_closest_marker("gloo"):
            item.add_marker(pytest.mark.xdist_group("gloo"))  # one test with real processes at a time
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)  # inductor warns about cards' settings
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    yield  # syrupy must see cases that are left out, or it takes their snapshots for unused
    which = config.getoption("--cases")
    if which != "all":
        some, further = _divided(items)
        kept, left = (some, further) if which == "some" else (further, some)
        items[:] = kept
        config.hook.pytest_deselected(items=left)


def _divided(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Items that every run has, and further cases of tests marked `some(n)`; the n are spread evenly."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    some, further = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        same, mark = cases[item.nodeid.partition("[")[0]], item.get_closest_marker("some")
        chosen = same if mark is None else [same[i * len(same) // mark.args[0]] for i in range(mark.args[0])]
        (some if item in chosen else further).append(item)
    return some, further
