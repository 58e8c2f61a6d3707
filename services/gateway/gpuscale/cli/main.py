"""The program `gpuscalectl`: its command line, and the one place where errors become exit codes.

What is slow to import (gRPC, the contract, YAML, the services behind `up`) is imported inside of commands, so that `--help`
is quick.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache

import click

from gpuscale.cli.console.command import OF_ALL_COMMANDS, PROGRAM, Group
from gpuscale.cli.console.errors import ExitCode, report, report_os, report_usage, report_value
from gpuscale.cli.console.terminal import TERMINAL, flush_output, prepare_streams
from gpuscale.cli.grammar.nouns import format_of
from gpuscale.cli.tree import COMMANDS, OF_OTHER_TOOLS
from gpuscale.common.errors import GpuscaleError

HELP = """See every GPU, reserve GPUs, and scale workers from queue depth onto GPUs that are really there.

The options below may be anywhere on the line.
"""


class Root(Group):
    """The group of all commands, whose help shows their common options."""

    options = OF_ALL_COMMANDS
    of_all = ()
    of_other_tools = OF_OTHER_TOOLS


def _print_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from importlib.metadata import version

        sys.stdout.write(f"{PROGRAM} {version('gpuscale')}\n")
        context.exit()


@cache
def root() -> Group:
    """The group of all commands, made once."""
    return Root(
        PROGRAM,
        COMMANDS,
        help=HELP,
        epilog="Exit codes: gpuscalectl explain exit-codes",
        context_settings={"help_option_names": ["-h", "--help"]},
        params=[
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_print_version,
                help="Print the version and exit.",
            )
        ],
    )


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code, of the one table (or of a command that it runs)."""
    TERMINAL.reset()
    TERMINAL.json = format_of(arguments) in {"json", "jsonl"}
    asked = os.environ.get("_GPUSCALECTL_COMPLETE")
    if asked:
        from gpuscale.cli.commands.completion import complete

        return complete(root(), asked)
    try:
        with root().make_context(PROGRAM, list(arguments)) as context:
            root().invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except GpuscaleError as error:
        return report(error)
    except click.ClickException as error:
        return report_usage(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except ValueError as error:
        return report_value(error)
    except OSError as error:
        # Standard output is full or gone; commands handle the files that they read themselves.
        return report_os(error)
    return ExitCode.OK


def main() -> None:
    """Run one command and end the process with its exit code."""
    TERMINAL.silence_grpc()
    prepare_streams(data=format_of(sys.argv[1:]) not in {"", "table", "wide"})
    code = run_command(sys.argv[1:])
    try:
        flush_output()
    except OSError as error:
        code = report_os(error)
    sys.exit(code)


if __name__ == "__main__":
    main()
