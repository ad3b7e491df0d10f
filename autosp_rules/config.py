"""The settings of AutoSP, as one frozen value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError, field_validator

from autosp_rules.errors import AutoSPError
from autosp_rules.gradients import GradientOption
from autosp_rules.memory.budget import bytes_from
from autosp_rules.memory.checkpoint import CheckpointOption
from autosp_rules.memory.mlps import MlpTileOption
from fxrewrite import Rule, RuleSet
from fxrewrite.spmd import LayoutRule
from rules.attention.flex import MaskKernel
from rules.experts.exchange import ExpertsOption

AttentionOption: TypeAlias = Literal["auto", "ulysses", "gather_kv", "ring", "ring_ulysses"]


class AutoSPConfig(BaseModel):
    """Settings of the `autosp` backend.

    Raises:
        AutoSPError: there is no such setting, or the value is not valid for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    inner: str | Callable[..., Any] = Field(
        default="inductor", description="backend that compiles the rewritten graph: a registered name or a callable"
    )
    axis: str = Field(
        default="sp", min_length=1, description="name of the mesh axis over which the sequence is sharded"
    )
    strict: bool = Field(
        default=False,
        description="refuse an operator without a layout rule instead of running it on the gathered value, and a model "
        "of whose matrix products every rank would compute more than 10 % whole",
    )
    attention: AttentionOption = Field(
        default="auto",
        description="how attention runs: whole sequences of some heads on each rank (ulysses), own queries to gathered "
        "keys (gather_kv), own queries to keys that travel (ring), both over groups of ranks (ring_ulysses), or auto: "
        "what costs least, by bytes sent and operations of the busiest rank; one that cannot serve is refused",
    )
    experts: ExpertsOption = Field(
        default="price",
        description="how tokens come to experts that a plan holds in shards over the same axis: each token-expert pair "
        "is sent to the rank of its expert (all_to_all), all tokens are gathered (gather), or what sends fewer bytes "
        "(price)",
    )
    mask_kernel: MaskKernel = Field(
        default="auto",
        description="how attention is computed whose mask is more than causal and is never held whole: by rows (rows), "
        "by torch's flex attention, or refused where it cannot be (flex), or auto: flex attention under inductor on "
        "CUDA where it can be, else by rows",
    )
    skip_all_but_last_attention: bool = Field(
        default=False,
        description="measure whether a length fits into memory in a part of the time: every attention but the last "
        "computes nothing, so results and gradients are not the model's",
    )
    outputs: Literal["auto", "shard", "gather"] = Field(
        default="auto",
        description="how sharded outputs other than scalars return: each rank's own chunk (shard), whole on every rank "
        "(gather), or auto: beside a scalar loss as tensors that are gathered when they are first used, else "
        "whole; a view of an input is whole in any case",
    )
    breaks: Literal["gather", "dtensor", "refuse"] = Field(
        default="gather",
        description="what happens where Dynamo breaks the graph: what crosses the break is gathered, so that code "
        "between graphs runs on whole values, the same on every rank (gather); or it stays in chunks, as DTensors, "
        "with which that code computes by torch's own propagation (dtensor); or an error with the line (refuse)",
    )
    gradients: GradientOption = Field(
        default="auto",
        description="who averages gradients of parameters: whoever averages them over all ranks (mean); whoever sums "
        "them over the axis and averages over the data axis (sum); the program itself (done), so that averaging again "
        "changes nothing; or auto: mean, unless DDP, fully_shard or DeepSpeed is seen to reduce otherwise",
    )
    compare_ranks: bool = Field(
        default=True,
        description="compare the batches of all ranks at every call, and their parameters at calls 1, 2, 4, 8, ..., "
        "in the background: an error at the next call instead of wrong gradients",
    )
    sequence_dim: int | None = Field(
        default=None,
        ge=0,
        description="which dimension of the inputs is the sequence; None: the last one of ids, the longer one of the "
        "first two of hidden states",
    )
    rng: Literal["local", "global"] = Field(
        default="local",
        description="numbers that dropout draws on sharded values: each rank its own (local), or those of one device, "
        "drawn whole on every rank (global), with which training with dropout is equal to one device's",
    )
    memory: int | None = Field(
        default=None,
        description="bytes that one training step may take at its peak on each rank, an int or a text as '24 GiB': "
        "parameters, buffers, the batch, gradients, all that the step computes and what it returns, without states of "
        "the optimizer; decides `checkpoint`, `mlp_tile` and `loss_tile` where they are not given, or is refused with "
        "what would fit; None: no budget",
    )
    checkpoint: CheckpointOption = Field(
        default="auto",
        description="what layers keep for the backward pass: what the partitioner chooses (none), their input and "
        "attention's result (attention), their input alone (full), what costs most to compute again and fits into so "
        "many bytes (a number), or auto: everything where it fits, else what keeps recomputation below 8 % of a step",
    )
    logits: Literal["keep", "drop"] = Field(
        default="keep",
        description="whether the logits that a loss is made of are returned: dropped, they are None, are never held "
        "whole, and the loss is computed in tiles",
    )
    loss_tile: Literal["auto"] | Annotated[int, Field(gt=0, strict=True)] = Field(
        default="auto",
        description="bytes of logits that a loss computed in tiles holds at once, or auto: 128 MiB, or as many rows as "
        "the head has inputs if that is more, so that the sums of its weight's gradient cost little",
    )
    mlp_tile: MlpTileOption = Field(
        default="auto",
        description="bytes that an MLP's inner linears compute which it holds at once, forward and backward, None for "
        "all, or auto: 128 MiB where the backward pass computes them again in any case and they outweigh the rest",
    )
    offload: bool = Field(
        default=False,
        description="hold in host memory what layers keep for the backward pass; see `checkpoint` for what that is",
    )
    overlap: bool = Field(
        default=False,
        description="have inductor start collectives early and wait for them late, within the same peak of memory",
    )
    regions: Literal["whole", "once"] = Field(
        default="whole",
        description="whether the inner backend compiles the rank's program whole, or each distinct region of it once, "
        "such as a layer, which is then called for every layer (once): compiling takes less time, and nothing is fused "
        "or kept for the backward pass over the borders of layers",
    )
    disable_in_eval: bool = Field(
        default=False,
        description="run what is called with gradients disabled (torch.no_grad) as it is, whole on every rank",
    )
    rules: tuple[InstanceOf[Rule] | InstanceOf[RuleSet], ...] = Field(
        default=(),
        description="rules of your own, a RuleSet, a Rule or several: they run in `canonicalize`, on ATen with its "
        "global meaning, before masks are read and anything is sharded; one that refuses "
        "stops all, unless it is optional",
    )
    layouts: tuple[InstanceOf[LayoutRule], ...] = Field(
        default=(),
        description="layout rules of your own, for operators that have none: LayoutRules, or LayoutRule objects; those "
        "that installed packages register under `fxrewrite.layouts` are there already",
    )
    timeout: float = Field(
        default=300.0, gt=0, description="seconds to wait at compile time for the other ranks to show the same graph"
    )

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> int | None:
        return None if value is None else bytes_from(value)

    @field_validator("checkpoint", "loss_tile", "mlp_tile", mode="before")
    @classmethod
    def _bytes_as_text(cls, value: Any) -> Any:
        return bytes_from(value) if isinstance(value, str) and value.strip()[:1].isdigit() else value

    @field_validator("rules", mode="before")
    @classmethod
    def _listed_rules(cls, value: Any) -> tuple[Any, ...]:
        return _listed(value, (Rule, RuleSet), "a RuleSet, a Rule, or a list of them")

    @field_validator("layouts", mode="before")
    @classmethod
    def _listed_layouts(cls, value: Any) -> tuple[Any, ...]:
        return _listed(value, (LayoutRule,), "LayoutRules, or a list of LayoutRule")

    if not TYPE_CHECKING:  # type checkers know the settings from the fields

        def __init__(self, **settings: Any) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise _first_mistake(error) from None
            if self.overlap and self.inner != "inductor":
                raise AutoSPError.of(
                    f"overlap=True reorders what inductor compiles, and the inner backend is {self.inner!r}",
                    hint="leave overlap out, or leave inner out",
                )
            if self.memory is not None and (self.inner == "eager" or self.regions == "once"):
                how = "inner='eager'" if self.inner == "eager" else "regions='once'"
                raise AutoSPError.of(
                    f"memory is a budget for a program that AOTAutograd cuts into one forward and one backward graph, "
                    f"and {how} is given",
                    hint=f"leave {how} out, inner='aot_eager' compiles as fast; or set checkpoint, mlp_tile and "
                    "loss_tile yourself",
                )


def _listed(value: Any, kinds: tuple[type, ...], what: str) -> tuple[Any, ...]:
    """Returns one or several of these as a tuple; pydantic shows the ValueError to the user."""
    items = (value,) if isinstance(value, kinds) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(item, kinds) for item in items):
        raise ValueError(f"it takes {what}")
    return items


def _first_mistake(error: ValidationError) -> AutoSPError:
    """Returns an error about the first wrong setting: its name, or, for each type it may have, why it is not one."""
    first, *others = error.errors()
    name, value = str(first["loc"][0]), first["input"]
    if first["type"] == "extra_forbidden":
        known = list(AutoSPConfig.model_fields)
        return AutoSPError.of(f"{name} is not a setting", hint=_nearest(name, known) or f"there are {', '.join(known)}")
    problems = [first, *(other for other in others if other["loc"][0] == name)]
    said = (problem["msg"].removeprefix("Value error, ") for problem in problems)
    why = ", or ".join(re.sub("^(Input|String) should", "it should", text) for text in said)
    known = [word for problem in problems for word in re.findall("'(.*?)'", problem.get("ctx", {}).get("expected", ""))]
    return AutoSPError.of(f"{name}={value!r}: {why}", hint=_nearest(str(value), known))


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]!r}?" if near else ""
