"""The `fxrewrite` command: list, show, explain and verify rules, and apply them to a graph.

Exit status: 0 done; 1 a rule does not hold, an expectation is not met, a set is broken, or the graph was refused;
2 the command cannot be run as given.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fxrewrite.errors import FixpointError, FxRewriteError, MatchExpectationError, RefusedError

__all__ = ["main"]

_RULES = "a registered set, the id of a rule in one, package.module:OBJECT, file.py:OBJECT, or rules.toml"
_THOROUGH = 600
"""Samples of a rule: three times the 195 that meet each combination of contents, sizes and dtypes."""
_GRAPH = "package.module:OBJECT, file.py:OBJECT, or a .pt2 file of torch.export.save"
_GRAPH_TEXT = """\
GRAPH is a fx.GraphModule, an ExportedProgram, a pair (module, inputs) that is captured as torch.compile would, or a
function without arguments that returns one of these. Inputs are a tuple, or a dict by parameter name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    arguments = _parser().parse_args(argv)
    # Only now: torch takes seconds to import, and --help, --version and a mistyped option need none of it.
    if arguments.command == "spmd":
        from fxrewrite.cli import layouts as commands
    else:
        from fxrewrite.cli import commands

    from fxrewrite.registry import import_named

    say = _nothing if arguments.json else _print
    try:
        with _current_folder(), _quiet("torch"), _quiet("fxrewrite"):
            for module in arguments.imports:
                import_named(module)
            answer = getattr(commands, arguments.action or arguments.command)(arguments, say)
    except (FixpointError, MatchExpectationError, RefusedError) as error:
        return _fail(error, 1)
    except (FxRewriteError, OSError) as error:
        return _fail(error, 2)
    if arguments.json:
        _print(json.dumps(answer.data, indent=2))
    return answer.status


def _print(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201  # printing is what a command does
    except BrokenPipeError:  # the reader has seen enough: `fxrewrite ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _nothing(text: str) -> None:
    """Where one JSON document is the whole output."""


def _fail(error: Exception, status: int) -> int:
    print(f"fxrewrite: error: {error}", file=sys.stderr)  # noqa: T201  # the same
    return status


@contextmanager
def _quiet(library: str) -> Generator[None]:
    """While it lasts, the library logs what TORCH_LOGS asks for and nothing else: the answer, or the error, says it.

    torch logs errors of fake tensors with their traceback, before it raises them.
    """
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _current_folder() -> Generator[None]:
    """While it lasts, modules of the current folder can be imported; last, so that they hide nothing installed."""
    folder = str(Path.cwd())
    if folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _version() -> str:
    try:
        return version("fxrewrite")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "uninstalled"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxrewrite",
        description="Rewrite FX graphs with rules; see what the rules are, where they match, and whether they hold.",
        epilog="`fxrewrite COMMAND --help` says more. Exit status: 0 done, 1 a rule or the graph failed a check, "
        "2 the command cannot be run as given.",
    )
    parser.set_defaults(action="")
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    rules = _command(commands, "rules", "list the rule sets of installed packages, or the rules of one")
    rules.add_argument("name", nargs="?", metavar="NAME", help=f"one of them; also {_RULES.partition(', ')[2]}")

    show = _command(commands, "show", "print a rule set, rule or plan, what its rules promise, and its digest")
    show.add_argument("rules", metavar="RULES", help=_RULES)

    explain = _command(commands, "explain", "say why rules do or do not match in a graph, nearest misses first")
    explain.add_argument("rules", metavar="RULE", help=_RULES)
    _add_graph(explain)

    verify = _command(commands, "verify", "run both sides of every rule on drawn inputs and compare them")
    verify.add_argument("rules", metavar="RULES", help=_RULES)
    samples = verify.add_mutually_exclusive_group()
    samples.add_argument(
        "--samples", type=_positive, default=64, metavar="N", help="inputs a rule (default: %(default)s)"
    )
    samples.add_argument(
        "--thorough",
        action="store_const",
        dest="samples",
        const=_THOROUGH,
        help="%(const)s inputs a rule: all contents with all sizes and dtypes several times; for an overnight run",
    )
    verify.add_argument("--seed", type=int, default=0, metavar="N", help="of the inputs drawn (default: %(default)s)")
    verify.add_argument("--prove", action="store_true", help="prove each rule too, which takes seconds a rule")

    apply = _command(commands, "apply", "rewrite a graph, and print what was done")
    apply.add_argument("rules", metavar="RULES", help=_RULES)
    _add_graph(apply)
    apply.add_argument(
        "-o", dest="output", type=_output, metavar="OUT", help="write the result: OUT.fx.txt, or OUT.pt2"
    )
    apply.add_argument("--page", type=Path, metavar="FILE.html", help="write the report with both graphs as a web page")
    apply.add_argument("--diff", action="store_true", help="also print what changed in the graph")
    apply.add_argument("--fixpoint", action="store_true", help="repeat the rule set until nothing changes")
    apply.add_argument(
        "--expect",
        action="append",
        default=[],
        type=_expectation,
        metavar="RULE=N",
        help="fail, with the nearest miss, when the rule makes fewer than N rewrites; can be repeated",
    )
    _add_spmd(commands)
    return parser


def _add_spmd(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    summary = "layout rules: which dimensions of operators are independent"
    spmd = commands.add_parser("spmd", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    actions = spmd.add_subparsers(dest="action", required=True, metavar="ACTION")
    discover = _command(actions, "discover", "run an operator on slices, and propose its rule")
    discover.add_argument("operator", metavar="OP", help="linear, aten::sum.dim_IntList, mine::op, or module:OBJECT")
    discover.add_argument(
        "--args",
        metavar="TEXT",
        help='what to call it with, as in "f(4, 6, 8), i(6, below=8), dim=-1": f is float64, i integers, c complex, '
        "b booleans; sizes of unrelated dimensions should differ (default: guessed from its schema)",
    )
    table = _command(actions, "table", "print the rules as a Markdown table")
    table.add_argument("--update", type=Path, metavar="FILE.md", help="replace the table in a document")
    for action in (discover, table):
        action.add_argument(
            "--layouts", metavar="OBJECT", help="package.module:OBJECT (default: those of installed packages)"
        )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    command.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module or a file.py to import first, which defines operators that rules name; can be repeated",
    )
    return command


def _add_graph(command: argparse.ArgumentParser) -> None:
    command.add_argument("graph", metavar="GRAPH", help=_GRAPH)
    command.add_argument(
        "--level",
        choices=["aten", "torch"],
        help="of a module with inputs: ATen operators (default), or the torch functions that it calls",
    )
    command.epilog = _GRAPH_TEXT


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _output(text: str) -> Path:
    if not text.endswith((".pt2", ".fx.txt")):
        raise argparse.ArgumentTypeError(f"{text} is neither OUT.pt2 nor OUT.fx.txt")
    return Path(text)


def _expectation(text: str) -> tuple[str, int]:
    rule, _, number = text.rpartition("=")
    if not rule or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form RULE=N, as in activations.silu=12")
    return rule, int(number)
