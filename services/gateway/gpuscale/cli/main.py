"""The program `gpuscalectl`: its commands, its global options, and the one place where errors become exit codes.

Whatever is slow to import (gRPC, the contract, YAML, the rooms behind `up`) is imported inside of the commands, so
that `--help` is there at once.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from gpuscale.cli.commands import completion
from gpuscale.cli.console import streams
from gpuscale.cli.console.faults import (
    USAGE_ERRORS,
    beyond_field,
    report,
    report_interrupt,
    report_os,
    report_usage,
)
from gpuscale.cli.console.output import Output
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import TERMINAL
from gpuscale.cli.grammar import global_options
from gpuscale.cli.grammar.arguments import format_of, normalise
from gpuscale.cli.grammar.formats import Form
from gpuscale.cli.grammar.global_options import PROGRAM
from gpuscale.cli.tree import Root
from gpuscale.common.errors import GpuscaleError

app = typer.Typer(
    name=PROGRAM,
    cls=Root,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: gpuscalectl explain exit-codes",
)


@app.callback()
def options(
    context: typer.Context,
    address: global_options.Address = None,
    token_file: global_options.TokenFile = None,
    ca_file: global_options.CaFile = None,
    cert_file: global_options.CertFile = None,
    key_file: global_options.KeyFile = None,
    context_name: global_options.ContextName = None,
    request_timeout: global_options.RequestTimeout = 10.0,
    dial_timeout: global_options.DialTimeout = 5.0,
    output: global_options.OutputForm = Form(),
    no_headers: global_options.NoHeaders = False,
    only_ascii: global_options.OnlyAscii = False,
    verbose: global_options.Verbose = False,
    _version: global_options.Version = False,
) -> None:
    """See every GPU, reserve GPUs, and scale workers from queue depth onto GPUs that are truly there.

    The options below may stand anywhere on the line.
    """
    TERMINAL.ascii, TERMINAL.verbose = only_ascii, verbose
    context.obj = Session(
        address=address,
        token_file=token_file,
        context=context_name,
        request_timeout=request_timeout,
        dial_timeout=dial_timeout,
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
        output=Output(output.format, headers=not no_headers, form=output),
    )


@cache
def root() -> Any:
    """The tree of commands, made once."""
    return typer.main.get_command(app)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; its exit code, of the one table (or that of a command which it runs)."""
    TERMINAL.reset()
    if arguments[:1] == [completion.ENTRY]:
        from gpuscale.cli.commands.completing import complete

        return complete(root(), arguments[1:])
    TERMINAL.json = format_of(arguments) in {"json", "jsonl"}
    try:
        ended = root().main(args=normalise(arguments), prog_name=PROGRAM, standalone_mode=False)
    except GpuscaleError as error:
        return report(error)
    except USAGE_ERRORS as error:
        return report_usage(error)
    except KeyboardInterrupt:
        return report_interrupt()
    except ValueError as error:
        return report(beyond_field(error))
    except OSError as error:
        # What it writes to is full or gone; what they read, commands look after themselves.
        return report_os(error)
    return ended if isinstance(ended, int) else 0


def main() -> None:
    """Run one command and end the process with its exit code."""
    # What the core of gRPC would write to stderr, errors say better. Read when gRPC is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    streams.prepare(data=format_of(sys.argv[1:]) not in {"", "table", "wide"})
    sys.exit(streams.finish(run_command(sys.argv[1:])))


if __name__ == "__main__":
    main()
