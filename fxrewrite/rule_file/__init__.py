"""Rules as data: TOML files with patterns, constraints and replacements in their text form."""

from fxrewrite.rule_file.dump import dump_rules as dump_rules
from fxrewrite.rule_file.expression import Expression as Expression
from fxrewrite.rule_file.load import load_rules as load_rules, parse_rules as parse_rules
from fxrewrite.rule_file.schema import RuleEntry as RuleEntry, RuleFile as RuleFile, RuleFileError as RuleFileError
