"""What AOTAutograd makes of a program: its forward and backward graphs, and what the one keeps for the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

__all__ = ["Partition"]


class Partition:
    """The forward and backward graphs into which AOTAutograd cuts a program."""

    def __init__(self, program: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.forward = self.backward = program

        def keep_forward(gm: fx.GraphModule, _: Any) -> Any:
            self.forward = gm
            return self._boxed(gm)

        def keep_backward(gm: fx.GraphModule, _: Any) -> Any:
            self.backward = gm
            return self._boxed(gm)

        compiler = aot_autograd(
            fw_compiler=keep_forward, bw_compiler=keep_backward, partition_fn=min_cut_rematerialization_partition
        )
        outputs = compiler(program, list(inputs))(*inputs)
        self.loss = next(out for out in outputs if isinstance(out, torch.Tensor) and out.dim() == 0)
        self.loss.backward()

    @staticmethod
    def _boxed(gm: fx.GraphModule) -> Any:
        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    def kept(self, modules: str = "") -> int:
        """Bytes that the forward graph returns, and no input holds, of modules whose paths match."""
        saved = [n for n in self.forward.graph.output_node().all_input_nodes if _origin(n).op != "placeholder"]
        values = [n.meta["val"] for n in saved if re.search(modules, str(n.meta.get("nn_module_stack")))]
        return sum(int(v.numel()) * v.element_size() for v in values)

    def num_again(self, name: str) -> int:
        """How many operators of that name the backward graph has that are not the backward of one."""
        return sum(name in str(n.target) and "backward" not in str(n.target) for n in self.backward.graph.nodes)


def _origin(node: fx.Node) -> fx.Node:
    views = {"aten.t.default", "aten.view.default", "aten.detach.default"}
    while str(node.target) in views:
        node = node.all_input_nodes[0]
    return node
