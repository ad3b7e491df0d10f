"""Real ranks: values come back, and whatever ends a rank is one clear error, never a hang.

What the ranks run is given as source to `exec`, which every process can import.
"""

from __future__ import annotations

import operator
import os

import pytest
import torch.distributed as dist

from autosp_rules.demo.launch import RankError, launch

pytestmark = pytest.mark.gloo

WAIT = "import os, torch, torch.distributed as dist\ndef wait(): dist.all_reduce(torch.ones(1))\n"
"""Rank 0 waits for rank 1, which never comes."""


def test_ranks_form_a_group_and_rank_0_answers() -> None:
    assert launch(dist.get_world_size, ranks=2) == 2
    assert launch(operator.mul, 6, 7, ranks=1) == 42


def test_a_refusal_is_its_own_sentence_even_inside_what_torch_wraps_around_it() -> None:
    code = f"""{WAIT}
from autosp_rules import AutoSPError
def work():
    try:
        raise AutoSPError.of("6 heads do not divide", hint="use 3 ranks")
    except AutoSPError as error:
        raise RuntimeError("a page of compiler state") from error
wait() if dist.get_rank() == 0 else work()
"""
    with pytest.raises(RankError, match=r"^rank 1: AutoSPError: .*6 heads do not divide; use 3 ranks$") as failure:
        launch(exec, code, {}, ranks=2)
    assert failure.value.traceback == ""


def test_an_error_is_the_first_ranks_in_one_line_with_the_traceback_apart() -> None:
    code = f"{WAIT}wait() if dist.get_rank() == 0 else {{}}['lost key\\n\\npage two']"
    with pytest.raises(RankError, match=r"^rank 1: KeyError: .*lost key") as failure:
        launch(exec, code, {}, ranks=2)
    assert "\n" not in str(failure.value)
    assert "KeyError" in failure.value.traceback.splitlines()[-1]


def test_a_rank_that_is_killed_is_named() -> None:
    with pytest.raises(RankError, match=r"^rank 1 was ended by SIGKILL, perhaps for want of memory$"):
        launch(exec, f"{WAIT}wait() if dist.get_rank() == 0 else os.kill(os.getpid(), 9)", {}, ranks=2)


def test_a_rank_that_leaves_without_a_word_is_named() -> None:
    with pytest.raises(RankError, match=r"^rank 0 exited with status 3$"):
        launch(os._exit, 3, ranks=1)


def test_ctrl_c_stops_all_ranks() -> None:
    code = f"{WAIT}wait() if dist.get_rank() == 0 else (os.kill(os.getppid(), 2), __import__('time').sleep(60))"
    with pytest.raises(RankError, match=r"^stopped by SIGINT$"):
        launch(exec, code, {}, ranks=2)


def test_launching_leaves_nothing_behind() -> None:
    launch(dist.get_rank, ranks=1)
    assert not dist.is_initialized()
