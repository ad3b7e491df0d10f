"""Random plans over meshes, as text: `zero3=2 | sp=3 ring | tp=2 words up.weight:0 gate:stored`.

Each member is the name of an axis with its number of ranks, and settings. Ranks of `data`, `zero2`, `zero3` have rows
of their own, and so have those of `pairs`, to whom experts are sent; `sp` is AutoSP; `ep` holds experts; `tp` and `tq`
hold dimensions of parameters, at rest alone where they are `stored`, and look up `words`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from torch import nn

from autosp_rules import AutoSPConfig
from autosp_rules.parallelism import autosp_parallelism
from fxrewrite.spmd import Parallelism, Parallelisms, Shard, Stored, Zigzag, inputs, param
from rules.parallel import DATA, EXPERT_ZERO3, EXPERTS, VOCABULARY, VOCABULARY_LAYOUTS, ZERO2, ZERO3

_OWN = {"data": DATA, "zero2": ZERO2, "zero3": ZERO3, "pairs": EXPERT_ZERO3}
_ATTENTION = ("ring", "gather_kv", "ulysses")


def plan_of(text: str) -> tuple[Parallelisms, Mapping[str, int]]:
    """The plan that is written so, and its mesh."""
    members, mesh = list[Parallelism](), dict[str, int]()
    for member in filter(None, text.split(" | ")):
        first, *settings = member.split()
        axis, _, size = first.partition("=")
        mesh[axis] = int(size)
        members.append(_member(axis, settings))
    return Parallelisms(tuple(members)), mesh


def own_rows(text: str) -> int:
    """How many parts the batch has."""
    found = 1
    for axis, size in plan_of(text)[1].items():
        found *= size if axis in _OWN else 1
    return found


def is_for_a_length(text: str) -> bool:
    """Whether the plan cuts what the model is called with, so that a program is of one length."""
    return own_rows(text) > 1 or "chunks" in text or "zigzag" in text


def _member(axis: str, settings: list[str]) -> Parallelism:
    if axis in _OWN or axis == "ep":
        made = replace(_OWN.get(axis, EXPERTS), axis=axis)
        return replace(made, place={replace(site, optional=True): held for site, held in made.place.items()})
    if axis == "sp":
        attention: Any = next((name for name in _ATTENTION if name in settings), "auto")
        held = Zigzag(1) if "zigzag" in settings else Shard(1)
        is_cut = "zigzag" in settings or "chunks" in settings
        place: dict[Any, Any] = {inputs("{ids,labels,mask}", optional=True): held} if is_cut else {}
        place |= ZERO3.place if "stored" in settings else {}
        return replace(autosp_parallelism(AutoSPConfig(rng="global", attention=attention)), place=place)
    place = {}
    for name, how in (setting.split(":") for setting in settings if ":" in setting):
        held = Stored(Shard(0), or_whole=True) if how == "stored" else Shard(int(how))
        place[param(name, optional=True)] = held
    words = {"rules": [VOCABULARY], "layouts": tuple(VOCABULARY_LAYOUTS)} if "words" in settings else {}
    return Parallelism(axis, axis=axis, place=place, **words)


def random_plan(rng: Random, model: nn.Module, text: str) -> str:
    """A plan over one to three axes of a mesh of at most 12 ranks, for a model whose body is this text."""
    read = {*re.findall(r"\bm\.(\w+)", text), "embed", "up", "pos"}
    parameters = {name: p for name, p in model.named_parameters() if name.partition(".")[0] in read}
    left = {name: list(p.shape) for name, p in parameters.items()}
    has_experts = any(".experts." in name for name in parameters)
    members, num_ranks = list[str](), 1
    axes = [axis for axis in ("own", "sp", "ep", "tq", "tp") if rng.random() < {"tp": 0.8, "sp": 0.6}.get(axis, 0.35)]
    for axis in axes or ["tp"]:
        size = rng.choice((2, 2, 3) if num_ranks < 4 else (2,) if num_ranks < 6 else (1,))
        if size == 1 or (axis == "ep" and (not has_experts or size == 3)):
            continue
        num_ranks *= size
        is_of_pairs = has_experts and size == 2 and rng.random() < 0.5
        name = axis if axis != "own" else "pairs" if is_of_pairs else rng.choice(("data", "zero2", "zero3"))
        settings = [f"{name}={size}"]
        if axis == "sp":
            settings += rng.sample(("stored", "chunks", "zigzag", *_ATTENTION), rng.choice((0, 1, 1, 2)))
        elif axis in ("tp", "tq"):
            settings += ["words"] * (rng.random() < 0.7)
            settings += [f"{name}:{how}" for name in parameters if (how := _how(rng, left[name], size))]
        members.append(" ".join(settings))
    return " | ".join(members) or "sp=2"


def _how(rng: Random, left: list[int], size: int) -> str:
    """A dimension of a parameter of which other axes leave this much, or `stored`, or nothing."""
    dims = [dim for dim, n in enumerate(left) if n % size == 0]
    if not dims or rng.random() < 0.4:
        return ""
    is_stored = 0 in dims and rng.random() < 0.1
    dim = 0 if is_stored else rng.choice(dims)
    left[dim] //= size
    return "stored" if is_stored else str(dim)


def smaller_plans(text: str) -> list[str]:
    """Plans with an axis or a setting less, or with fewer ranks."""
    members = text.split(" | ")
    found = [" | ".join(members[:i] + members[i + 1 :]) for i in range(len(members) if len(members) > 1 else 0)]
    for i, member in enumerate(members):
        axis, *settings = member.split()
        fewer = [f"{axis.partition('=')[0]}=2", *settings]
        others = [fewer] if not axis.endswith("=2") else []
        others += [[axis, *settings[:j], *settings[j + 1 :]] for j in range(len(settings))]
        found += [" | ".join([*members[:i], " ".join(other), *members[i + 1 :]]) for other in others]
    return found
