"""Qualified names of modules and of what belongs to them, as `named_modules` and `named_parameters` give them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import fx


def module_names(node: fx.Node) -> Iterator[str]:
    """The modules in whose forward the node runs, the outermost first: `model`, `model.layers`, `model.layers.0`."""
    yield from dict.fromkeys(name for _, name in module_calls(node))


def module_calls(node: fx.Node) -> Iterator[tuple[str, str]]:
    """The calls of modules in which the node runs, the outermost first: a key of the call, and the module's name.

    A module that is called twice has two keys, and modules of two models have different ones, whatever their names.
    """
    yield from ((str(call), _qualified(path)) for call, (path, _) in node.meta.get("nn_module_stack", {}).items())


def matches_glob(name: str, glob: str) -> bool:
    """Whether a qualified name matches a glob, in which `{a,b}` is one of several: `*.{q,k,v}_proj.weight`."""
    return any(fnmatchcase(name, one) for one in alternatives(glob))


def _qualified(path: str) -> str:
    """`layers.0.mlp` of Dynamo's `L['self'].layers.0.mlp`, or `G['model']` where the model is a global.

    Where a module looks its parts up by itself (`__getattr__`, as peft's do), Dynamo writes how they were found:
    `L['self'].__dict__['_modules']['base_model'].layers.0` is `base_model.layers.0`.
    """
    path = re.sub(r"(?:__dict__\['_modules'\]|\b_modules)\['([^']+)'\]", r"\1", path)
    return re.sub(r"^[LG]\['\w+'\]\.?|^L__self___?", "", path)


def alternatives(glob: str) -> Iterator[str]:
    """The globs without braces that a glob stands for: `a.b.d` and `a.c.d` of `a.{b,c}.d`."""
    parts = re.split(r"\{([^{}]*)\}", glob)
    for choice in itertools.product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts))):
        yield "".join(choice)
