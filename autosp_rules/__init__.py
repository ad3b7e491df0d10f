"""AutoSP: exact automatic sequence parallelism for an unchanged model, as a rule set on fxrewrite."""

from typing import TYPE_CHECKING

from fxrewrite.lazy import lazy_package

if TYPE_CHECKING:
    from autosp_rules.backend import AutoSPBackend as AutoSPBackend, autosp as autosp, dry_run as dry_run
    from autosp_rules.config import AutoSPConfig as AutoSPConfig
    from autosp_rules.errors import AutoSPError as AutoSPError
    from autosp_rules.inputs import prepare_autosp_inputs as prepare_autosp_inputs
    from autosp_rules.report import AutoSPReport as AutoSPReport
    from autosp_rules.rule_set import RULES as RULES
    from autosp_rules.tiled import tiled_compute as tiled_compute


lazy_package(__name__)
