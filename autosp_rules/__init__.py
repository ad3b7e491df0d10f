"""AutoSP: exact automatic sequence parallelism for an unchanged model, as a rule set on fxrewrite."""

from typing import TYPE_CHECKING

from fxrewrite.lazy import lazy_package

if TYPE_CHECKING:
    from autosp_rules.backend import AutoSPBackend, autosp, dry_run
    from autosp_rules.config import AutoSPConfig
    from autosp_rules.errors import AutoSPError
    from autosp_rules.inputs import prepare_autosp_inputs
    from autosp_rules.report import AutoSPReport
    from autosp_rules.rule_set import RULES
    from autosp_rules.tiled import tiled_compute

__all__ = [
    "RULES",
    "AutoSPBackend",
    "AutoSPConfig",
    "AutoSPError",
    "AutoSPReport",
    "autosp",
    "dry_run",
    "prepare_autosp_inputs",
    "tiled_compute",
]

lazy_package(
    __name__,
    {
        "RULES": "autosp_rules.rule_set",
        "AutoSPBackend": "autosp_rules.backend",
        "AutoSPConfig": "autosp_rules.config",
        "AutoSPError": "autosp_rules.errors",
        "AutoSPReport": "autosp_rules.report",
        "autosp": "autosp_rules.backend",
        "dry_run": "autosp_rules.backend",
        "prepare_autosp_inputs": "autosp_rules.inputs",
        "tiled_compute": "autosp_rules.tiled",
    },
)
