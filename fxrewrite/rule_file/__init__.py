"""Rules as data: TOML files with patterns, constraints and replacements in their text form."""

from fxrewrite.rule_file.dump import dump_rules
from fxrewrite.rule_file.expression import Expression
from fxrewrite.rule_file.load import load_rules, parse_rules
from fxrewrite.rule_file.schema import RuleEntry, RuleFile, RuleFileError

__all__ = ["Expression", "RuleEntry", "RuleFile", "RuleFileError", "dump_rules", "load_rules", "parse_rules"]
