"""What AOTAutograd makes of a program: its forward and backward graphs, and what the one keeps for the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition


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
        """Bytes that the forward graph returns of modules whose paths match.

        Not counted is what an input holds, and the gradient of a head, which the backward pass would make first.
        """
        returned = {n: _origin(n) for n in self.forward.graph.output_node().all_input_nodes}
        saved = [n for n, made in returned.items() if made.op != "placeholder" and not _is_grad_of_head(made)]
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


def _is_grad_of_head(node: fx.Node) -> bool:
    of = node.all_input_nodes[:1]
    return any("tiled_cross_entropy_with_grads" in str(made.target) and node.args[1] in (2, 3) for made in of)
