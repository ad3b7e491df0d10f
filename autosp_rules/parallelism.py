"""AutoSP as a parallelism, to be composed with others over the axes of a mesh: `ZERO3 | AUTOSP | MEGATRON`."""

from autosp_rules.config import AutoSPConfig
from autosp_rules.rule_set import rule_set
from fxrewrite.spmd import Parallelism

__all__ = ["AUTOSP", "autosp_parallelism"]


def autosp_parallelism(config: AutoSPConfig | None = None) -> Parallelism:
    """AutoSP with these settings over `config.axis`, as one of several parallelisms of a mesh."""
    config = config or AutoSPConfig()
    return Parallelism("autosp", axis=config.axis, method=rule_set(config))


AUTOSP = autosp_parallelism()
